"""Prompts with a common beginning are continued as `generate` continues them."""

from typing import Any

import pytest
import torch

from manyheads.decoding.generation import generate
from manyheads.decoding.generation_config import GenerationConfig
from manyheads.lens.inputs.cached_run import ActivationEditor
from manyheads.taps import Head
from manyheads.tasks.benchmarks.continuation_scores import head_ablation
from manyheads.tasks.benchmarks.prompt_steps import PromptSteps, generate_ids
from tests.models.zoo import DECODERS, small

EXAMPLES = list(range(1, 13))
PROMPTS = [[*EXAMPLES, 14], [3, 4], [*EXAMPLES, 15, 16, 17], EXAMPLES, [*EXAMPLES, 14]]
CONFIG = GenerationConfig(max_new_tokens=5, eos_token_ids=())


@pytest.mark.parametrize("name", ["gpt2", "windows and whole"])
def test_shared_prompts_are_continued_as_by_generate(name: str) -> None:
    model = small(DECODERS[name])
    expected = [generation.ids for generation in generate(model, PROMPTS, CONFIG, progress=False)]
    assert generate_ids(model, PROMPTS, CONFIG, progress=False) == expected
    shared = [PROMPTS[index] for index in (0, 2, 4)]
    result = generate_ids(model, shared, CONFIG, progress=False)
    assert result == [expected[index] for index in (0, 2, 4)]


def test_the_common_beginning_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, read = small(DECODERS["gpt2"]), []
    logits = PromptSteps._logits

    def counted(steps: Any, ids: Any) -> Any:
        read.append(ids.lengths.each)
        return logits(steps, ids)

    monkeypatch.setattr(PromptSteps, "_logits", counted)
    generate_ids(model, [PROMPTS[0], PROMPTS[2]], CONFIG, progress=False)
    assert read[:2] == [(12,), (1, 3)]


def test_heads_that_are_off_stay_off_in_every_step() -> None:
    model = small(DECODERS["llama"])
    heads = (Head(0, 1), Head(1, 0), Head(1, 1))
    editor = ActivationEditor(head_ablation(model, PROMPTS, "zero").changes(heads))
    for prompt, ids in zip(
        PROMPTS, generate_ids(model, PROMPTS, CONFIG, watch=editor, progress=False), strict=True
    ):
        text = torch.tensor([[*prompt, *ids]])
        with torch.no_grad():
            logits = model(text, watch=editor).logits[0]
        assert tuple(logits[len(prompt) - 1 : -1].argmax(-1).tolist()) == ids
