"""Few-shot prompts: right, shuffled and without examples, for any tokenizer."""

from typing import Any

import pytest

from manyheads.errors import InputError
from manyheads.lens.inputs.few_shot import FewShotPrompts, few_shot_prompts, few_shot_tasks
from manyheads.models.build import build
from manyheads.models.recipes import gpt2
from tests.lens.inputs.test_word_texts import word_tokenizer
from tests.messages import refuses
from tests.models.zoo import ENCODERS, small

NAMES = ("opposites", "plurals", "past")


@pytest.fixture(scope="module")
def model() -> Any:
    words = {word for name in NAMES for pair in few_shot_tasks()[name].items() for word in pair}
    tokenizer = word_tokenizer("Q", "A", ":", *sorted(words))
    built = build(
        gpt2(width=32, heads=2, layers=1, vocabulary=tokenizer.get_vocab_size(), positions=200)
    )
    built.tokenizer = tokenizer
    return built


@pytest.fixture(scope="module")
def prompts(model: Any) -> FewShotPrompts:
    return few_shot_prompts(model, prompts=5, shots=4, seed=3)


def words_of(model: Any, ids: tuple[int, ...]) -> list[str]:
    return [model.tokenizer.id_to_token(token) for token in ids]


def test_examples_are_right_and_the_query_has_no_answer(model: Any, prompts: Any) -> None:
    assert set(prompts.tasks) == set(NAMES)
    assert len(prompts.clean) == 15
    for task, clean, zero, answer in zip(
        prompts.tasks, prompts.clean, prompts.zero_shot, prompts.answers, strict=True
    ):
        pairs, words = few_shot_tasks()[task], words_of(model, clean)
        shown = dict(zip(words[2::6], words[5::6], strict=False))
        query, right = words[-3], model.tokenizer.id_to_token(answer)
        assert words[-2:] == ["A", ":"]
        assert pairs[query] == right
        shown.pop(query, None)
        assert len(shown) == 4
        assert all(pairs[word] == label for word, label in shown.items())
        assert words_of(model, zero) == ["Q", ":", query, "A", ":"]


def test_shuffled_answers_are_the_same_in_another_order(prompts: Any) -> None:
    for clean, shuffled in zip(prompts.clean, prompts.shuffled, strict=True):
        assert sorted(clean) == sorted(shuffled)
        changed = [one != two for one, two in zip(clean, shuffled, strict=True)]
        assert sum(changed) >= 3
        assert not any(changed[place] for place in range(len(clean)) if place % 6 != 5)


def test_seeds_decide_the_prompts(model: Any, prompts: Any) -> None:
    assert few_shot_prompts(model, prompts=5, shots=4, seed=3) == prompts
    assert few_shot_prompts(model, prompts=5, shots=4, seed=4) != prompts


def test_tasks_that_do_not_fit_are_named(model: Any, prompts: Any) -> None:
    assert set(prompts.missing) == set(few_shot_tasks()) - set(NAMES)
    assert "single token" in prompts.missing["capitals"]
    with refuses(InputError, "tasks fit this model", "fewer shots"):
        few_shot_prompts(model, {"past": few_shot_tasks()["past"]})
    with refuses(InputError, "the context 200"):
        few_shot_prompts(model, shots=34)


def test_models_that_cannot_continue_are_refused(model: Any) -> None:
    with refuses(InputError, "does not continue a text"):
        few_shot_prompts(small(ENCODERS["bert"]))
    with refuses(InputError, "no tokenizer"):
        few_shot_prompts(build(model.config))
    with refuses(InputError, "shots must be at least 2, got 1"):
        few_shot_prompts(model, shots=1)
    with refuses(InputError, "items"):
        FewShotPrompts((), (), (), (), (), {})
