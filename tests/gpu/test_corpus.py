"""A pass over a corpus adds up the same on CUDA as on the CPU."""

import numpy as np
import pytest

from manyheads.lens.corpus.corpus_pass import read_corpus
from manyheads.lens.corpus.pass_state import PassSettings
from manyheads.models.build import build


@pytest.mark.parametrize("family", ["llama-1b-shape", "bert-base"])
def test_a_pass_is_that_of_the_cpu(family: str, device: str) -> None:
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, 40, size).tolist() for size in (9, 1, 170, 2, 300)]
    sizes = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 40}
    sizes |= {"kv_heads": 2} if family.startswith("llama") else {}
    model = build(family, **sizes, seed=0).float()
    settings = PassSettings(max_length=None, offsets=(-1, 0))
    expected, by_cpu = read_corpus(model, texts, settings, progress=False)
    result, by_cuda = read_corpus(model.to(device), texts, settings, progress=False)
    for block, sums in expected.sums.blocks.items():
        other = result.sums.of(block)
        for name in ("earlier", "later", "squares", "copied", "counts"):
            one, two = getattr(sums, name), getattr(other, name)
            assert np.allclose(one, two, rtol=1e-3, atol=1e-2), name
        assert np.allclose(sums.at.sums, other.at.sums, rtol=1e-3, atol=1e-2)
        for head in range(block.heads):
            pairs = zip(sums.book.sharpest(head), other.book.sharpest(head), strict=True)
            assert all(abs(a.activation - b.activation) < 1e-3 for a, b in pairs)
    for name in ("entropy", "distance", "previous_token"):
        assert np.allclose(by_cpu[name].means, by_cuda[name].means, rtol=1e-3, atol=1e-3)
