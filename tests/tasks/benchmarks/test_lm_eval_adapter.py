"""Our models answer as the harness's own backend for transformers does."""

import sys
from typing import Any

import pytest
import torch

import manyheads
from manyheads.errors import InputError, MissingPackageError
from manyheads.lens.inputs.synthetic import passages
from manyheads.taps import Head
from manyheads.tasks.benchmarks.evaluation import lm_eval_model
from tests.messages import refuses

lm_eval = pytest.importorskip("lm_eval")
WORDS = passages()[0].split()
CONTEXT = " ".join(WORDS[:20])
QUESTIONS = [
    (CONTEXT, " " + WORDS[20]),
    (CONTEXT, " " + " ".join(WORDS[20:24])),
    (CONTEXT + " ", "bread and butter"),
    ("", " ".join(WORDS[:5])),
]
TEXTS = [(" ".join(WORDS[:40]),), (" ".join(WORDS[40:50]),)]
OPTIONS = {"until": ["\n", " the"], "max_gen_toks": 12, "do_sample": False}
PROMPTS = [(CONTEXT, OPTIONS), (CONTEXT + " " + WORDS[20], OPTIONS), ("The river", OPTIONS)]


def instances(kind: str, requests: list[Any]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=arguments, idx=index)
        for index, arguments in enumerate(requests)
    ]


@pytest.fixture(scope="module")
def model() -> Any:
    return manyheads.load("house-gpt")


@pytest.fixture(scope="module")
def ours(model: Any) -> Any:
    return lm_eval_model(model, max_length=32, progress=False)


@pytest.fixture(scope="module")
def peer(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The same weights in the harness's own backend."""
    from lm_eval.models.huggingface import HFLM

    folder = tmp_path_factory.mktemp("folder")
    manyheads.save(model, folder)
    return HFLM(pretrained=str(folder), device="cpu", batch_size=2, max_length=32)


def test_continuations_are_as_likely_as_in_transformers(ours: Any, peer: Any) -> None:
    requests = instances("loglikelihood", QUESTIONS)
    expected = peer.loglikelihood(requests, disable_tqdm=True)
    for (value, greedy), (peer_value, peer_greedy) in zip(
        ours.loglikelihood(requests), expected, strict=True
    ):
        assert value == pytest.approx(peer_value, abs=1e-4)
        assert greedy == peer_greedy


def test_long_texts_roll_through_windows_as_in_transformers(ours: Any, peer: Any) -> None:
    requests = instances("loglikelihood_rolling", TEXTS)
    assert len(ours.tok_encode(TEXTS[0][0])) > ours.max_length
    expected = peer.loglikelihood_rolling(requests, disable_tqdm=True)
    assert ours.loglikelihood_rolling(requests) == pytest.approx(expected, rel=1e-6)


def test_generated_texts_are_those_of_transformers(ours: Any, peer: Any) -> None:
    requests = instances("generate_until", PROMPTS)
    assert ours.generate_until(requests) == peer.generate_until(requests, disable_tqdm=True)


def test_tokens_and_limits_are_those_of_transformers(ours: Any, peer: Any) -> None:
    assert ours.prefix_token_id == peer.prefix_token_id
    assert ours.eot_token_id == peer.eot_token_id
    assert ours.tok_encode(CONTEXT) == peer.tok_encode(CONTEXT)


def test_versions_answer_together_and_as_models_of_their_own(model: Any) -> None:
    from manyheads.tasks.benchmarks.lm_eval_adapter import LmEvalModel

    heads = (Head(1, 2), Head(0, 3))
    lm = LmEvalModel(model, [heads], progress=False)
    alone = lm_eval_model(model, without=heads, progress=False)
    for kind, arguments in (
        ("loglikelihood", QUESTIONS),
        ("loglikelihood_rolling", TEXTS),
        ("generate_until", PROMPTS),
    ):
        requests = instances(kind, arguments)
        lm.version = 0
        complete = getattr(lm, kind)(requests)
        lm.version = 1
        answers, expected = getattr(lm, kind)(requests), getattr(alone, kind)(requests)
        if kind == "generate_until":
            assert answers == expected != complete
        else:
            flat = [torch.tensor(rows).flatten().tolist() for rows in (answers, expected)]
            assert flat[0] == pytest.approx(flat[1], abs=1e-3)
            assert answers != complete


def test_wrong_options_are_refused(ours: Any, model: Any) -> None:
    for options, expected in (
        ({"num_beams": 4}, "'num_beams'...use do_sample"),
        ({"max_gen_toks": 32}, "max_gen_toks=32...less than 32"),
    ):
        with refuses(InputError, expected):
            ours.generate_until(instances("generate_until", [("The", OPTIONS | options)]))
    with refuses(InputError, "L9H9"):
        lm_eval_model(model, without="L9H9")
    with refuses(InputError, "needs a tokenizer"):
        lm_eval_model(manyheads.build("gpt2", layers=1, width=32, heads=2, vocabulary=50))


def test_a_missing_package_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(MissingPackageError, match=r"manyheads\[lm-eval\]"):
        lm_eval_model(model)


def test_a_conversation_is_rendered_by_the_model(model: Any) -> None:
    lm = lm_eval_model(model)
    lm._settings = {"chat_template": "{{ messages[0].content }}!"}
    assert lm.apply_chat_template([{"role": "user", "content": "Hello"}]) == "Hello!"
    assert lm.chat_template(True) == "{{ messages[0].content }}!"
