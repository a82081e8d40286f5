"""LSH attention: what a query sees, how much it misses, and that a step sees the same."""

import pytest
import torch
from torch import Tensor

from manyheads import Ragged
from manyheads.cache import StateCache, StateSlot
from manyheads.errors import ConfigError
from manyheads.mixers import lsh_attention
from manyheads.mixers.lsh_attention import LshAttention, LshAttentionLayer, missed_mass

WIDTH, HEADS = 12, 2


def layer(
    *, causal: bool = True, chunk: int = 8, rounds: int = 2, before: int = 1
) -> LshAttentionLayer:
    config = LshAttention(
        width=WIDTH, heads=HEADS, causal=causal, chunk=chunk, rounds=rounds, before=before
    )
    return LshAttentionLayer(config).eval()


def attention_without_itself(mixer: LshAttentionLayer, x: Tensor) -> Tensor:
    query, value = (
        part.unflatten(1, (HEADS, -1)).transpose(0, 1) for part in mixer.project(x).chunk(2, -1)
    )
    key = query / (query.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    scores = query @ key.transpose(1, 2) * mixer.config.size**-0.5
    if mixer.config.causal:
        scores = scores + torch.full_like(scores[0], -torch.inf).triu(1)
    scores.diagonal(dim1=1, dim2=2).fill_(-1e5)
    return mixer.output((scores.softmax(-1) @ value).transpose(0, 1).flatten(1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 20])
def test_one_chunk_is_attention_to_all_others(length: int, causal: bool) -> None:
    mixer, x = layer(causal=causal, chunk=20), torch.randn(length, WIDTH)
    with torch.no_grad():
        expected = attention_without_itself(mixer, x)
        torch.testing.assert_close(mixer(Ragged.from_list([x])).values, expected)


def test_rounds_and_neighbors_miss_less() -> None:
    query = torch.randn(200, HEADS, WIDTH // HEADS)
    few, many, near = (
        float(missed_mass(query, layer(rounds=rounds, before=before).config).mean())
        for rounds, before in ((1, 1), (8, 1), (1, 6))
    )
    assert 0.3 < few < 1.0
    assert many < few / 2
    assert near < 0.85 * few
    assert missed_mass(query[:8], layer().config).max() == 0.0


@torch.no_grad()
def test_a_step_sees_what_the_last_token_of_the_text_sees() -> None:
    mixer, whole = layer(), [torch.randn(length, WIDTH) for length in (30, 17)]
    cache = StateSlot(StateCache())
    mixer(Ragged.from_list([text[:-3] for text in whole]), cache=cache)
    for end in (2, 1, 0):
        texts = [text[: len(text) - end] for text in whole]
        step = mixer(Ragged.from_list([text[-1:] for text in texts]), cache=cache).values
        full = mixer(Ragged.from_list(texts))
        expected = torch.stack([full.of(index)[-1] for index in range(2)])
        torch.testing.assert_close(step, expected, atol=1e-5, rtol=1e-5)


def test_other_texts_are_not_seen() -> None:
    mixer, x = layer(), torch.randn(50, WIDTH)
    batch = Ragged.from_list([x[:30], x[30:]])
    together = mixer(batch).values
    x[:30] = torch.nan
    assert torch.equal(mixer(batch.with_values(x)).values[30:], together[30:])


def test_gradients_do_not_depend_on_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    mixer, x = layer(rounds=3), torch.randn(40, WIDTH, requires_grad=True)
    batch = Ragged.from_list([x[:33], x[33:]])
    result = []
    for largest in (2**24, 700):
        monkeypatch.setattr(lsh_attention, "LARGEST", largest)
        output = mixer(batch).values
        result.append((output, *torch.autograd.grad(output.square().sum(), x)))
    for one, other in zip(*result, strict=True):
        torch.testing.assert_close(one, other)
    assert result[0][1].isfinite().all()


def test_random_rotations_change_in_training_only() -> None:
    mixer = LshAttentionLayer(LshAttention(width=WIDTH, heads=HEADS, chunk=4, seed="random"))
    batch = Ragged.from_list([torch.randn(40, WIDTH)])
    assert not torch.equal(mixer(batch).values, mixer(batch).values)
    mixer.eval()
    assert torch.equal(mixer(batch).values, mixer(batch).values)


@pytest.mark.parametrize(
    ("field", "value"), [("heads", 5), ("buckets", (3,)), ("round_to", 9), ("rounds", 0)]
)
def test_the_config_is_checked(field: str, value: object) -> None:
    inputs = {"width": WIDTH, "heads": HEADS, "chunk": 8, field: value}
    with pytest.raises(ConfigError, match=field):
        LshAttention(**inputs)  # type: ignore[arg-type]
