"""The head that carries a task is known in a model set by hand; a random model has none."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.bridge.wrapped_model import wrap
from manyheads.checkpoints.folder import load
from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import head_scope
from manyheads.lens.task_heads.function_vectors import (
    FunctionVectorHeads,
    Mediation,
    find_function_vector_heads,
    head_writes,
)
from manyheads.models.build import build, eval_mode
from manyheads.models.model_interface import ModelInputs
from manyheads.taps import Head, Record, Tap
from tests.bridge.zoo import tiny
from tests.lens.planted import attention_of
from tests.lens.task_heads.planted_tasks import PLACES, TASKS, VOCABULARY, task_model, task_prompts
from tests.messages import refuses
from tests.models.zoo import DECODERS, ids, small

CARRIER = Head(2, 0)


@pytest.fixture(scope="module")
def result() -> FunctionVectorHeads:
    return find_function_vector_heads(task_model(), task_prompts(4), top=1, progress=False)


def test_the_planted_head_carries_the_task(result: FunctionVectorHeads) -> None:
    assert result.heads == (CARRIER,)
    effects = result["effect"]
    assert effects.of(CARRIER) > 0.9
    assert all(value < 0.2 for address, value in effects.ranked() if address.head != CARRIER)
    assert result.problem == ""
    for probabilities in result.metadata["tasks"].values():
        assert probabilities["few-shot"] > 0.9
        assert probabilities["shuffled"] < 0.2


def test_heads_of_one_half_of_the_tasks_work_in_the_other(result: FunctionVectorHeads) -> None:
    effects = result.held_out
    few, without = effects["few-shot prompts"], effects["without these heads"]
    assert few.low > 0.9 > 0.2 > without.high
    assert effects["shuffled prompts"].high < 0.2
    assert effects["shuffled, with these heads patched"].low > 0.9
    assert effects["zero-shot prompts"].high < 0.2
    assert effects["zero-shot, with the function vector"].low > 0.9
    assert all(effect.samples == TASKS for effect in effects.values())
    assert all(effect.low <= effect.mean <= effect.high for effect in effects.values())


def test_the_vector_is_what_the_head_writes(result: FunctionVectorHeads) -> None:
    assert list(result.vectors) == [f"add {task}" for task in range(TASKS)]
    for task, vector in enumerate(result.vectors.values()):
        assert int(np.abs(vector).argmax()) == vector.shape[0] - VOCABULARY + task
    assert 0 <= result.layer < 4


def test_the_result_counts_its_induction_heads(result: FunctionVectorHeads, tmp_path: Path) -> None:
    overlap = result.overlap
    assert (overlap.heads, overlap.induction, overlap.both) == (1, 0, 0)
    assert overlap.depth == pytest.approx(2 / 3)
    assert np.isnan(overlap.induction_depth)
    result.save(tmp_path / "heads.json")
    again = lens.load(tmp_path / "heads.json")
    assert isinstance(again, FunctionVectorHeads)
    assert again.heads == result.heads
    assert again.held_out == result.held_out
    assert "function-vector heads: 1 of 12 heads" in str(again)


def test_without_its_carrier_the_model_learns_nothing() -> None:
    model = task_model()
    with torch.no_grad():
        attention_of(model.stack, 2).output.weight.zero_()
    result = find_function_vector_heads(model, task_prompts(4), progress=False)
    assert result.heads == ()
    assert result.held_out == {}
    assert "does not learn these tasks from examples" in result.problem


@pytest.mark.parametrize("seed", [0, 1])
def test_a_random_model_has_no_such_head(seed: int) -> None:
    model = build(
        "gpt2", layers=2, width=32, heads=4, vocabulary=VOCABULARY, positions=2 * PLACES, seed=seed
    )
    result = find_function_vector_heads(model, task_prompts(4, seed), progress=False)
    assert result.heads == ()
    assert result.problem in str(result)


def test_a_wrapped_model_has_the_effects_of_the_native_one(tmp_path: Path) -> None:
    peer = tiny("llama")
    peer.save_pretrained(tmp_path)
    prompts, effects = task_prompts(2), []
    for model in (wrap(peer), load(tmp_path)):
        with eval_mode(model), torch.no_grad():
            mediation = Mediation(head_scope(model), prompts, limit=100, progress=False)
            effects.append(mediation.effects)
    np.testing.assert_allclose(*effects, atol=1e-4)
    assert np.abs(effects[0]).max() > 0.01


@pytest.mark.parametrize("name", ["gpt2", "both norms", "parallel"])
def test_writes_of_heads_sum_to_what_attention_adds(name: str) -> None:
    check_writes(small(DECODERS[name]))


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_writes_of_wrapped_heads_sum_to_what_attention_adds(name: str) -> None:
    check_writes(wrap(tiny(name)))


def check_writes(model: Any) -> None:
    """The writes, and the bias that is the write of no head, sum to the output."""
    scope, batch = head_scope(model), ids((3, 5))
    outputs, added = scope.site(1, Tap.HEAD_OUTPUT), scope.site(1, Tap.OUTPUT)
    record = Record([outputs, added])
    with eval_mode(model), torch.no_grad():
        model.run_inputs(ModelInputs(ids=batch), record)
        written = head_writes(scope, 1, record[outputs].values).sum(1)
        whole = record[added].values
        if not model.native and (norm := scope.stack.facts.attentions[1][0].write.norm) is not None:
            # The tap of a wrapped model is in front of the norm.
            whole = norm(whole)
    rest = whole.double() - written
    # A bias is the same at every token, up to the divisor of a norm after it.
    if rest.abs().max() > 1e-4:
        torch.testing.assert_close(rest, rest[:1].expand_as(rest), rtol=1e-3, atol=1e-4)


def test_wrong_arguments_are_refused() -> None:
    with refuses(InputError, "top must be at least 1, got 0"):
        find_function_vector_heads(task_model(), task_prompts(2), top=0)
    with refuses(InputError, "no tokenizer"):
        find_function_vector_heads(task_model())
