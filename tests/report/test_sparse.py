import gzip
from base64 import b64decode

import numpy as np

from manyheads.report.sparse import pack, quantise


def unpack(packed: str, length: int) -> list[dict[int, float]]:
    raw = np.frombuffer(gzip.decompress(b64decode(packed)), dtype=np.uint8).astype(int)
    counts, rest = raw[:length], raw[length:]
    low, high, small = np.split(rest, 3)
    rows, start = [], 0
    for count in counts:
        some = slice(start, start + count)
        keys = np.cumsum(low[some] + 256 * high[some])
        rows.append(dict(zip(keys.tolist(), ((small[some] / 255) ** 2).tolist(), strict=True)))
        start += count
    return rows


def test_weights_come_back_within_half_a_step_of_their_root() -> None:
    generator = np.random.default_rng(0)
    weights = np.sort(generator.dirichlet(np.full(8, 0.3), size=700))[:, ::-1].astype(np.float32)
    keys = np.stack([generator.permutation(700)[:8] for _ in range(700)])
    rows = unpack(pack(keys, weights), 700)
    for row, mine, values in zip(rows, keys, weights, strict=True):
        given = dict(zip(mine.tolist(), values.tolist(), strict=True))
        assert row.keys() <= given.keys()
        for key, weight in row.items():
            assert abs(weight**0.5 - given[key] ** 0.5) <= 0.5 / 255 + 1e-6
        left_out = sum(given[key] for key in given.keys() - row.keys())
        assert left_out < 0.021


def test_the_same_pattern_is_the_same_text() -> None:
    keys, weights = np.array([[0, 1]]), np.array([[0.7, 0.3]])
    assert pack(keys, weights) == pack(keys, weights)


def test_no_weight_is_no_byte() -> None:
    assert quantise(np.zeros((1, 1)))[0, 0] == 0
    assert unpack(pack(np.array([[3, 1]]), np.array([[1.0, 0.0]])), 1) == [{3: 1.0}]
