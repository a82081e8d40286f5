"""Shared prefixes and ablated versions give what whole texts give."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from manyheads.bridge.wrapped_model import wrap
from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import ActivationEditor
from manyheads.ragged import Ragged
from manyheads.taps import Head
from manyheads.tasks.benchmarks.continuation_scores import (
    branches_cache,
    head_ablation,
    score_continuations,
)
from manyheads.tasks.benchmarks.prefix_tree import Continuation
from tests.bridge.zoo import tiny
from tests.messages import refuses
from tests.mixers.mixer_configs import CAUSAL, VOCABULARY, small_model
from tests.models.zoo import DECODERS, ENCODERS, small

VERSIONS = ((Head(0, 1),), (Head(1, 0), Head(0, 0)), (Head(1, 1),), ())


def questions(vocabulary: int, seed: int = 0) -> list[Continuation]:
    """The same example before two questions with three answers of up to three tokens each."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(1, vocabulary) for _ in range(count))

    examples = tokens(9)
    contexts = [examples + tokens(draw.randint(1, 4)) for _ in range(2)]
    items = [Continuation(context, tokens(length)) for context in contexts for length in (1, 2, 3)]
    return [*items, items[0], Continuation(tokens(1), tokens(2))]


def by_definition(
    model: Any, items: Sequence[Continuation], heads: Sequence[Head] = (), mean: bool = False
) -> tuple[torch.Tensor, list[bool]]:
    """The definition: whole texts and all logits."""
    watch = None
    if heads:
        texts = sorted({item.text for item in items})
        ablation = head_ablation(model, texts, "mean" if mean else "zero")
        watch = ActivationEditor(ablation.changes(tuple(heads)))
    batch = Ragged.from_list([torch.tensor(item.text) for item in items])
    with torch.no_grad():
        logits = model.eval()(batch, watch=watch).logits
    values, greedy = [], []
    for row, item in enumerate(items):
        rows, target = logits.of(row)[len(item.context) - 1 :], torch.tensor(item.tokens)
        values.append(rows.double().log_softmax(-1)[range(len(target)), target].sum())
        greedy.append(bool((rows.argmax(-1) == target).all()))
    return torch.stack(values), greedy


@pytest.mark.parametrize("name", ["gpt2", "windows and whole", "t5", "gates", "sinks", "capped"])
def test_scores_are_those_of_whole_texts(name: str) -> None:
    model = small(DECODERS[name])
    items = questions(model.config.embedding.vocabulary)
    scores = score_continuations(model, items, VERSIONS[:2], batch_tokens=24, progress=False)
    assert branches_cache(model)
    for row, heads in enumerate(((), *VERSIONS[:2])):
        expected, greedy = by_definition(model, items, heads)
        torch.testing.assert_close(scores.logprobs[row], expected, rtol=1e-4, atol=1e-4)
        assert scores.greedy[row].tolist() == greedy


@pytest.mark.parametrize(("replace_with", "batch_tokens"), [("zero", 4096), ("mean", 7)])
def test_versions_lack_their_heads_and_those_of_all(replace_with: Any, batch_tokens: int) -> None:
    model = small(DECODERS["llama"])
    items = questions(model.config.embedding.vocabulary, seed=1)
    removed = (Head(0, 2),)
    scores = score_continuations(
        model,
        items,
        VERSIONS,
        without=removed,
        replace_with=replace_with,
        batch_tokens=batch_tokens,
        progress=False,
    )
    for row, heads in enumerate(((), *VERSIONS)):
        expected, _ = by_definition(model, items, (*heads, *removed), replace_with == "mean")
        torch.testing.assert_close(scores.logprobs[row], expected, rtol=1e-4, atol=1e-4)


def test_a_mixer_branches_its_state() -> None:
    model = small_model(CAUSAL["delta"], CAUSAL["mamba2"])
    items = questions(VOCABULARY)
    scores = score_continuations(model, items, progress=False)
    expected, _ = by_definition(model, items)
    torch.testing.assert_close(scores.logprobs[0], expected, rtol=1e-4, atol=1e-4)


def test_a_wrapped_model_reads_whole_texts() -> None:
    model = wrap(tiny("llama"))
    items = questions(model.vocabulary)
    scores = score_continuations(model, items, [(Head(0, 1),)], progress=False)
    assert not branches_cache(model)
    for row, heads in enumerate(((), (Head(0, 1),))):
        expected, greedy = by_definition(model, items, heads)
        torch.testing.assert_close(scores.logprobs[row], expected, rtol=1e-4, atol=1e-4)
        assert scores.greedy[row].tolist() == greedy


def test_the_most_likely_continuation_is_greedy() -> None:
    model = small(DECODERS["llama"])
    context = (5, 6, 7)
    with torch.no_grad():
        best = int(model(torch.tensor([context])).logits[0, -1].argmax())
    items = [Continuation(context, (best,)), Continuation(context, ((best + 1) % 20,))]
    assert score_continuations(model, items, progress=False).greedy.tolist() == [[True, False]]


def test_wrong_uses_are_refused() -> None:
    model = small(DECODERS["llama"])
    assert score_continuations(model, [], progress=False).logprobs.shape == (1, 0)
    with refuses(InputError, "Encoder does not continue a text"):
        score_continuations(small(ENCODERS["bert"]), [], progress=False)
    with refuses(InputError, "resample", '"zero" or "mean"'):
        head_ablation(model, [[1, 2]], "resample")
