"""Statistics on CUDA: streamed sums are those of the tiles, and whole models those of the CPU.

`TRITON_INTERPRET=1 pytest tests/gpu/test_statistics.py --on cpu` tries the kernels without a GPU.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
import torch
from kernel_cases import MASKS
from torch import Tensor

from manyheads import build
from manyheads.kernels import reference
from manyheads.kernels.contract import Request
from manyheads.lens.measure import watcher
from manyheads.lens.measure.row_sums import (
    RowSums,
    RowSumSpec,
    cannot,
    cannot_mix,
    stream_rows,
    stream_rows_and_output,
    sum_rows,
)
from manyheads.lens.measure.score_tiles import TiledScores
from manyheads.lens.measure.statistics import statistics
from manyheads.lens.measure.triton_row_sums import count_below
from manyheads.lens.measure.watcher import masked_median
from manyheads.parts.masks import Causal, Full, Mask, Window
from manyheads.parts.positions import Alibi
from manyheads.ragged import Lengths

BANDS: dict[str, Mask] = {
    "causal": Causal(),
    "all": Full(),
    "window before": Window(20),
    "window both": Window(70, 9),
    "window far": Window(150),
}
# Beyond what a value of such size may lose: places are numbers of tokens, the rest are shares.
LIMITS = {torch.float32: 2e-5, torch.bfloat16: 3e-4, torch.float16: 3e-4}


def tiled_of(
    mask: Mask,
    device: str,
    *,
    queries: Sequence[int] = (200, 0, 1, 131, 64),
    keys: Sequence[int] | None = None,
    heads: tuple[int, int] = (4, 2),
    size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    sharp: float = 1.5,
    alibi: bool = False,
    sink: bool = False,
) -> TiledScores:
    draw = torch.Generator().manual_seed(3)
    keys = queries if keys is None else keys
    if device == "cpu" and dtype == torch.bfloat16:
        # Triton's interpreter multiplies the bits of these as if they were whole numbers.
        dtype = torch.float16
    query = torch.randn(sum(queries), heads[0], size, generator=draw) * sharp
    key = torch.randn(sum(keys), heads[1], size, generator=draw) * sharp
    request = Request(
        queries=Lengths.of(queries, device),
        keys=Lengths.of(keys, device),
        mask=mask,
        scale=size**-0.5,
        bias=Alibi().bias(heads[0], torch.device(device)) if alibi else None,
        sink=torch.randn(heads[0], generator=draw).to(device) if sink else None,
    )
    return TiledScores(query.to(device, dtype), key.to(device, dtype), request)


def spec_for(
    tiled: TiledScores, marks: int = 5, kinds: int = 20, *, same: bool = True
) -> RowSumSpec:
    draw, device = torch.Generator().manual_seed(4), tiled.query.device
    tokens = len(tiled.key)
    columns = torch.rand(tokens, marks, generator=draw) < 0.3
    ids = torch.randint(kinds, (tokens,), generator=draw).to(device) if same else None
    return RowSumSpec(
        offsets=(-1, 0, 1, -7) if same else (), marks=columns.float().to(device), ids=ids
    )


def off(result: Tensor, expected: Tensor) -> float:
    """The largest difference, in parts of 1 or of the largest value."""
    if not expected.numel():
        return 0.0
    assert result.shape == expected.shape
    return float((result - expected).abs().max() / expected.abs().max().clamp(min=1))


def check(tiled: TiledScores, spec: RowSumSpec, allowed: float = 1.0) -> None:
    exact = replace_values(tiled)
    result, expected = stream_rows(tiled, spec), sum_rows(exact, spec)
    limit = allowed * LIMITS[tiled.query.dtype]
    worst = {
        each.name: off(getattr(result, each.name), getattr(expected, each.name))
        for each in fields(RowSums)
        if each.name not in ("variance", "memory")
    }
    # What is told of it is its root, beside which rounding of the places themselves is allowed.
    worst["variance"] = off(result.variance.sqrt(), expected.variance.sqrt())
    assert {name: value for name, value in worst.items() if not value <= limit} == {}


def replace_values(tiled: TiledScores) -> TiledScores:
    return TiledScores(tiled.query.float(), tiled.key.float(), tiled.request)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize("band", BANDS)
def test_streamed_sums_are_those_of_strips(band: str, dtype: torch.dtype, device: str) -> None:
    tiled = tiled_of(BANDS[band], device, dtype=dtype)
    check(tiled, spec_for(tiled))


@pytest.mark.parametrize("size", [16, 32, 80, 128, 256])
@pytest.mark.parametrize("heads", [(1, 1), (6, 2)])
def test_sizes_of_heads(size: int, heads: tuple[int, int], device: str) -> None:
    tiled = tiled_of(Causal(), device, size=size, heads=heads, queries=(150, 37))
    check(tiled, spec_for(tiled))


@pytest.mark.parametrize("band", ["causal", "all", "window both"])
def test_biases_and_sinks(band: str, device: str) -> None:
    for alibi, sink in ((True, False), (False, True)):
        tiled = tiled_of(BANDS[band], device, alibi=alibi, sink=sink)
        check(tiled, spec_for(tiled))


@pytest.mark.parametrize("band", ["causal", "all", "window both"])
def test_queries_stand_at_the_end_of_their_keys(band: str, device: str) -> None:
    queries, keys = (3, 0, 40, 130, 9), (200, 5, 6, 131, 0)
    tiled = tiled_of(BANDS[band], device, queries=queries, keys=keys)
    check(tiled, spec_for(tiled, same=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("band", "size", "wide", "sink"),
    [("causal", 64, 64, False), ("window both", 128, 128, True), ("all", 20, 40, False)],
)
def test_output_of_the_pass_that_sums_is_attention(
    band: str, size: int, wide: int, sink: bool, dtype: torch.dtype, device: str
) -> None:
    tiled = tiled_of(BANDS[band], device, size=size, dtype=dtype, sink=sink)
    draw = torch.Generator().manual_seed(7)
    # Larger than float16 can hold, where the dtype can.
    value = torch.randn(len(tiled.key), 2, wide, generator=draw) * (
        1e5 if tiled.key.dtype == torch.bfloat16 else 10
    )
    value = value.to(device, tiled.key.dtype)
    spec = spec_for(tiled)
    assert device == "cpu" or cannot_mix(tiled, spec, value) is None
    sums, output = stream_rows_and_output(tiled, spec, value)
    exact = replace_values(tiled)
    expected = reference.attend(exact.query, exact.key, value.float(), tiled.request).output
    assert output is not None
    assert off(output.float() / value.abs().max(), expected / value.abs().max()) <= 4e-3
    alone = stream_rows(tiled, spec)
    for name in ("mass", "entropy", "distance", "marks"):
        assert off(getattr(sums, name), getattr(alone, name)) <= 3e-4, name


def test_whole_models_mix_in_the_pass_that_sums(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cpu":
        pytest.skip("streaming needs CUDA")
    changes = {"layers": 2, "width": 256, "heads": 8, "vocabulary": 300, "hidden": 512}
    model = build("llama-1b-shape", seed=0, **changes).to(device, torch.bfloat16)
    texts = [torch.randint(300, (length,)).tolist() for length in (700, 3, 260)]
    calls = []

    def spy(*inputs: object) -> object:
        calls.append(inputs)
        return stream_rows_and_output(*inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(watcher, "stream_rows_and_output", spy)
    mixed = statistics(model, texts, progress=False)
    assert len(calls) == 2
    monkeypatch.setattr(watcher, "cannot_mix", lambda *_: "not this time")
    alone = statistics(model, texts, progress=False)
    assert len(calls) == 2
    assert mixed.names == alone.names
    for name in mixed.names:
        one, other = torch.from_numpy(mixed.means[name]), torch.from_numpy(alone.means[name])
        assert torch.allclose(one, other, rtol=2e-2, atol=5e-3), name


@pytest.mark.parametrize("marks", [0, 1, 17])
def test_any_number_of_marks(marks: int, device: str) -> None:
    tiled = tiled_of(Causal(), device, queries=(90,))
    check(tiled, spec_for(tiled, marks=marks))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharp_heads_keep_their_digits(dtype: torch.dtype, device: str) -> None:
    tiled = tiled_of(Causal(), device, queries=(300,), sharp=8.0, dtype=dtype)
    # Scores of some hundreds have fewer digits behind the point.
    check(tiled, spec_for(tiled), allowed=10.0)


def test_no_text_at_all(device: str) -> None:
    tiled = tiled_of(Causal(), device, queries=(0, 0))
    check(tiled, spec_for(tiled))


def test_a_text_of_one_word(device: str) -> None:
    tiled = tiled_of(Causal(), device, queries=(140,))
    check(tiled, spec_for(tiled, kinds=1))


def test_tokens_that_lie_apart_in_memory(device: str) -> None:
    tiled = tiled_of(Causal(), device, queries=(70, 50))
    joined = torch.cat((tiled.query, tiled.key), dim=1)
    apart = replace(tiled, query=joined[:, :4], key=joined[:, 4:])
    check(apart, spec_for(apart))


@pytest.mark.parametrize("dtype", LIMITS)
def test_counting_finds_the_median(dtype: torch.dtype, device: str) -> None:
    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter counts the bits of these")
    draw = torch.Generator().manual_seed(5)
    sizes = torch.randn(37, 1100, generator=draw).abs().to(device, dtype)
    rows = torch.arange(37, device=device) % 4 > 0
    limit = sizes[0, 0]
    assert count_below(sizes, rows, limit) == (sizes[rows] < limit).sum()
    assert masked_median(sizes, rows) == sizes[rows].float().median()


def test_others_say_why_they_are_not_streamed(device: str) -> None:
    tiled = tiled_of(MASKS["longformer"], device)
    reason = cannot(tiled, spec_for(tiled))
    assert reason == (
        "the mask is not a band around the diagonal"
        if device == "cuda"
        else "streaming needs CUDA, got cpu"
    )


@pytest.mark.parametrize("name", ["gpt2", "llama-1b-shape"])
def test_whole_models_are_measured_as_on_the_cpu(name: str, device: str) -> None:
    if device == "cpu":
        pytest.skip("this is what it is compared to")
    changes = {"layers": 2, "width": 256, "heads": 8, "vocabulary": 300, "hidden": 512}
    texts = [torch.randint(300, (length,)).tolist() for length in (700, 3, 260)]
    expected, result = (
        statistics(
            build(name, seed=0, **changes).to(where),
            texts,
            classes={"low": range(30)},
            progress=False,
        )
        for where in ("cpu", device)
    )
    assert result.names == expected.names
    for measure in expected.names:
        one, other = torch.from_numpy(result.means[measure]), expected.means[measure]
        assert torch.allclose(one, torch.from_numpy(other), rtol=1e-4, atol=1e-4), measure
