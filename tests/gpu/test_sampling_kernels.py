"""Our kernels choose the tokens that the plain rules of sampling choose.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_sampling_kernels.py --on cpu`.
"""

import pytest
import torch
from torch import Tensor

from manyheads.decoding import sampling

ROWS, RING = 5, 4

SAMPLES = {
    "plain": sampling.Sample(),
    "cold": sampling.Sample(temperature=0.3),
    "top_k": sampling.Sample(top_k=7),
    "more than a chunk hands over": sampling.Sample(top_k=400, temperature=2.0),
    "top_p": sampling.Sample(top_p=0.8),
    "narrow top_p": sampling.Sample(top_p=0.303, temperature=0.5),
    "min_p": sampling.Sample(min_p=0.2, temperature=1.5),
    "all": sampling.Sample(temperature=0.7, top_k=50, top_p=0.903, min_p=0.05),
}


def peaked(vocabulary: int, dtype: torch.dtype, device: str) -> Tensor:
    """Logits with a few likely tokens, many equal ones and some that are out."""
    draw = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(ROWS, vocabulary, generator=draw)
    logits[1] = logits[1].round()
    logits[2, :200], logits[2, 200:] = 0.0, -8.0
    logits[3, ::3] = -torch.inf
    logits[4, : vocabulary // 2] -= 40.0
    return logits.to(dtype).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [50, 4096, 9001])
def test_the_most_likely_token_is_the_first_of_them(
    vocabulary: int, dtype: torch.dtype, device: str
) -> None:
    from manyheads.decoding.steps.triton_sampling import choose_most_likely

    logits = peaked(vocabulary, dtype, device)
    chosen, steps = (torch.arange(6, device=device), torch.full((6,), 11, device=device))
    tokens = torch.zeros(RING, 6, dtype=torch.long, device=device)
    choose_most_likely(logits, chosen, steps, tokens)
    expected = [int((row == row.max()).nonzero()[0, 0]) for row in logits]
    assert chosen.tolist() == [*expected, 5]
    assert tokens[11 % RING].tolist() == [*expected, 0]
    assert steps.tolist() == [12] * ROWS + [11]


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocabulary", [50, 9001])
def test_a_token_is_drawn_by_the_plain_rules(
    vocabulary: int, dtype: torch.dtype, name: str, device: str
) -> None:
    from manyheads.decoding.steps.triton_sampling import choose_by_chance

    sample, logits = SAMPLES[name], peaked(vocabulary, dtype, device)
    settings = torch.tensor(
        [sample.temperature, sample.top_p or 1.0, sample.min_p or 0.0, sample.top_k or vocabulary],
        device=device,
    )
    uniforms = torch.rand(ROWS, RING, generator=torch.Generator().manual_seed(1)).to(device)
    uniforms[:, 0], uniforms[:, 1] = 0.0, 1.0
    chosen = torch.zeros(ROWS, dtype=torch.long, device=device)
    steps, tokens = torch.zeros_like(chosen), chosen.new_zeros(RING, ROWS)
    filtered = sample.filter_logits(logits)
    probabilities = filtered.double().softmax(-1)
    cumulative = probabilities.cumsum(-1)
    for step in range(RING):
        choose_by_chance(logits, settings, uniforms, chosen, steps, tokens)
        drawn, uniform = probabilities.gather(1, chosen[:, None]), uniforms[:, step, None].double()
        # Rounding may move a uniform number to the neighbor of its token, but not further.
        upper = cumulative.gather(1, chosen[:, None])
        assert ((upper > uniform - 1e-5) & (upper - drawn < uniform + 1e-5)).all()
        assert (drawn > 0).all()
    assert steps.tolist() == [RING] * ROWS
    assert torch.equal(tokens[-1], chosen)
