"""Faithfulness: models whose attention is known to explain, or not to, are told apart."""

import dataclasses
import math
import sys
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kendalltau
from torch import Tensor

from manyheads import lens
from manyheads.attention import AttentionConfig
from manyheads.errors import InputError, NonFiniteWarning
from manyheads.lens.faithful.adversarial import (
    MAX_DIVERGENCE,
    find_adversary,
    jensen_shannon,
    total_variation,
)
from manyheads.lens.faithful.erasure import (
    Decision,
    decisions_of,
    erase,
    erase_key_weights,
    rank_keys,
    renormalize,
)
from manyheads.lens.faithful.faithfulness_report import TaskVerdict, faithfulness, kendall
from manyheads.lens.inputs.cached_run import head_scope
from manyheads.lens.inputs.texts import read_inputs
from manyheads.models.build import build
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import Encoder, EncoderConfig
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import ClassHead
from manyheads.models.stack import StackConfig
from manyheads.parts.norms import NoNorm, PreNorm
from manyheads.taps import Patterns, Record, Site, Sublayer, Tap
from tests.messages import refuses
from tests.models.zoo import DECODERS, ENCODERS, SEQ2SEQS, VISIONS, ids, images, small

WIDTH = 8
READS, WORD, MARK = 0, 1, 2
CHANGE = 1e-2
LONG = [READS, WORD, WORD, WORD, MARK, WORD, WORD, WORD, WORD, WORD]
OTHER = [READS, WORD, WORD, WORD, WORD, WORD, WORD, WORD, MARK, WORD]


def handmade(sharpness: float = 8.0, *, equal_values: bool = False) -> Encoder:
    """A first token looks for the mark among words, and what it reads names the class.

    Channel 0 marks the first token, 1 words, 2 the mark; values go to channels 6 and 7, which the
    classes are read off. Without the mark the class is that of words.
    """
    attention = AttentionConfig(width=WIDTH, heads=1, scale=1.0, bias="all")
    one = LayerConfig(attention=Branch(attention, PreNorm(NoNorm())), feedforward=None)
    config = EncoderConfig(
        embedding=Embedding(vocabulary=3, width=WIDTH),
        stack=StackConfig(width=WIDTH, layers=(one,), final_norm=NoNorm()),
        readout=ClassHead(classes=2, pool="first"),
    )
    model = build(config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embedding.tokens.weight[:, :3] = torch.eye(3)
        module: Any = model.stack.layers[0]
        rows = module.attention.projections()
        rows["query"][0, READS] = sharpness
        rows["key"][0, MARK] = 1.0
        if equal_values:
            module.attention.project.bias[-WIDTH + 7] = 1.0
        else:
            rows["value"][6, READS] = rows["value"][6, WORD] = 1.0
            rows["value"][7, MARK] = 1.0
        module.attention.output.weight.copy_(torch.eye(WIDTH))
        assert model.readout is not None
        assert model.readout.weight is not None
        model.readout.weight[0, 6] = model.readout.weight[1, 7] = 4.0
    return model


def decision_of(model: Any, texts: Any, **more: Any) -> Decision:
    part = head_scope(model, more.pop("stack", None), more.pop("sublayer", Sublayer.ATTENTION))
    inputs = read_inputs(model, texts)
    return decisions_of(part, part.layers, inputs, more.pop("at", "last"))[0]()


def test_attention_that_decides_alone_explains() -> None:
    report = faithfulness(
        handmade(), {"marks": [LONG, OTHER] * 4}, steps=10, iterations=1, progress=False
    )
    task = report["marks"]
    np.testing.assert_allclose(task.erased["attention"], 0.1)
    np.testing.assert_allclose(task.erased["gradient_times_attention"], 0.1)
    assert task.erased["random"].mean() > 0.3
    assert task.flipped["attention"].all()
    assert (task.moved <= 0.01).all()
    assert task.verdict.startswith(
        "Attention explains the classes of marks at least in part: the answer changes when 10% of "
        "the keys are erased by attention, "
    )
    adversary = find_adversary(decision_of(handmade(), [LONG]), iterations=120)
    assert adversary.settled
    assert adversary.divergence < 0.1 * MAX_DIVERGENCE
    settled = dataclasses.replace(
        task, settled=np.ones(8), divergence=np.full(8, adversary.divergence)
    )
    assert settled.unique is True
    assert settled.verdict.startswith("Attention explains the classes of marks: ")
    assert task.curves["attention"][0] > 0.9
    assert task.curves["attention"][1:-1].max() < 0.1


def test_equal_values_can_be_read_from_anywhere() -> None:
    model = handmade(equal_values=True)
    adversary = find_adversary(decision_of(model, [LONG]), iterations=1)
    assert adversary.divergence > 0.9 * MAX_DIVERGENCE
    assert adversary.moved < 1e-6
    report = faithfulness(model, [LONG, OTHER] * 4, steps=5, iterations=5, progress=False)
    task = report.tasks[0]
    assert task.unique is False
    # Only with nothing left to read are both classes alike.
    assert task.erased["attention"].min() == 1.0
    assert task.verdict.startswith("Attention does not explain the classes of these texts: ")
    assert "distant patterns give the same answer" in task.verdict
    assert task.agreement["gradient"].shape == (8,)


@pytest.mark.parametrize("texts", [1, 7])
def test_too_few_texts_cannot_tell(texts: int) -> None:
    task = faithfulness(handmade(), [LONG] * texts, iterations=1, progress=False).tasks[0]
    assert task.sooner is None
    assert task.unique is None
    assert task.verdict.startswith("Cannot tell whether attention explains the classes")
    assert f"only {texts} text" in task.verdict


def verdict_of(
    random: list[float], attention: list[float], *, divergence: float, settled: float = 1.0
) -> TaskVerdict:
    erased = {name: np.array(random) for name in ("random", "gradient", "gradient_times_attention")}
    erased["attention"] = np.array(attention)
    each = np.ones(len(random))
    return TaskVerdict(
        name="these texts",
        decides="tokens",
        erased=erased,
        flipped=dict.fromkeys(erased, each),
        curves={},
        divergence=divergence * each,
        moved=0 * each,
        settled=settled * each,
        agreement={"gradient": each},
    )


def test_worse_than_random_never_explains_in_part() -> None:
    early, late = [0.3, 0.35] * 4, [0.6, 0.55] * 4
    for divergence in (0.0, MAX_DIVERGENCE):
        task = verdict_of(random=early, attention=late, divergence=divergence)
        assert task.sooner is False
        assert task.verdict.startswith("Attention does not explain ")
    # Somewhat worse, but by less than its error.
    task = verdict_of(random=[0.1, 0.9] * 4, attention=[0.9, 0.2] * 4, divergence=0.0)
    assert task.verdict.startswith("Cannot tell ")


def test_a_search_cut_short_does_not_count_in_favor() -> None:
    better: dict[str, Any] = {"random": [0.6, 0.55] * 4, "attention": [0.3, 0.35] * 4}
    assert " explains the tokens of these texts: " in verdict_of(**better, divergence=0.0).verdict
    short = verdict_of(**better, divergence=0.0, settled=0.0)
    assert short.unique is None
    assert " explains the tokens of these texts at least in part: " in short.verdict
    assert "cut short in 8 texts" in short.verdict
    assert "only in part" in verdict_of(**better, divergence=0.6, settled=0.0).verdict
    assert not find_adversary(decision_of(handmade(), [LONG]), iterations=1).settled
    assert not find_adversary(decision_of(small(DECODERS["gpt2"]), ids((9,))), iterations=3).settled


def test_nan_passes_no_test() -> None:
    unknown = [math.nan] * 8
    task = verdict_of(random=unknown, attention=unknown, divergence=math.nan)
    assert (task.sooner, task.unique) == (None, None)
    assert task.verdict.startswith("Cannot tell ")
    model = deepcopy(small(DECODERS["gpt2"]))
    with torch.no_grad():
        model.embedding.tokens.weight.fill_(math.nan)
    with pytest.warns(NonFiniteWarning):
        task = faithfulness(model, ids((5,) * 8), iterations=1, steps=2, progress=False).tasks[0]
    assert task.verdict.startswith("Cannot tell ")
    assert np.isnan(task.divergence).all()
    assert np.isnan(task.erased["attention"]).all()
    # A text with a single key has no other pattern.
    assert math.isnan(find_adversary(decision_of(small(DECODERS["gpt2"]), ids((1,)))).divergence)


def test_an_answer_that_nothing_changes_is_reported() -> None:
    model = handmade(equal_values=True)
    with torch.no_grad():
        model.readout.bias[1] = 1.0
    task = faithfulness(model, [LONG], iterations=1, progress=False).tasks[0]
    assert "the answer never changes, whatever is erased" in task.verdict
    assert not task.flipped["random"].any()
    assert task.erased["random"].tolist() == [1.0]


def test_no_adversary_may_move_the_answer() -> None:
    for seed in range(2):
        decision = decision_of(small(DECODERS["gpt2"]), ids((9,), seed=seed))
        result = find_adversary(decision, iterations=8, seed=seed)
        assert 0 <= result.divergence <= MAX_DIVERGENCE
        assert result.moved <= 0.01


def test_more_freedom_finds_patterns_that_are_farther() -> None:
    decision = decision_of(handmade(sharpness=3.0), [LONG])
    near, far = (
        find_adversary(decision, within=within, iterations=30).divergence for within in (0.001, 0.3)
    )
    assert far > near + 0.02


@pytest.mark.parametrize("name", ["gpt2", "llama", "alibi", "window", "gates", "sinks", "uneven"])
def test_weights_are_those_of_the_pattern(name: str) -> None:
    model, batch = small(DECODERS[name]), ids((9,))
    decision = decision_of(model, batch, at=[6])
    record = Record(Site(layer, Tap.PATTERN) for layer in decision.layers)
    with torch.no_grad():
        logits = model(batch, watch=record).logits
    expected = logits.values[6].softmax(-1)
    torch.testing.assert_close(decision.probabilities, expected, atol=1e-5, rtol=0)
    for layer, weights in decision.weights.items():
        seen = record[Site(layer, Tap.PATTERN)]
        assert isinstance(seen, Patterns)
        torch.testing.assert_close(weights, seen.of(0)[:, 6:7], atol=1e-5, rtol=0)
        assert not weights[:, ~decision.visible[layer]].any()
    assert int(decision.keys.max()) == 6


@pytest.mark.parametrize("name", ["gpt2", "llama", "sinks"])
def test_gradients_are_those_of_small_changes(name: str) -> None:
    decision = decision_of(small(DECODERS[name]), ids((6,)))
    gradients = decision.gradients()
    for layer, key in ((0, 2), (1, 4)):

        def more(here: int, copy: int, weights: Tensor, layer: int = layer, key: int = key) -> Any:
            added = torch.zeros_like(weights)
            if here == layer:
                added[1, 0, key] = CHANGE if copy else -CHANGE
            return weights + added

        with torch.no_grad():
            low, high = decision.under(more, 2)[:, decision.answer].tolist()
        expected = (high - low) / (2 * CHANGE)
        assert float(gradients[layer][1, 0, key]) == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("name", ["llama", "sinks"])
def test_erased_keys_are_as_if_they_were_masked(name: str) -> None:
    model, batch = small(DECODERS[name]), ids((7,))
    decision = decision_of(model, batch)
    kept = torch.ones(2, 7, dtype=torch.bool)
    kept[1, [1, 4]] = False

    class Hide:
        def wants(self, site: Site) -> bool:
            return site.tap is Tap.SCORES

        def see(self, _: Site, value: Any) -> Patterns:
            scores = value.of(0).clone()
            scores[:, 6, [1, 4]] = -torch.inf
            return Patterns((scores,))

    with torch.no_grad():
        expected = model(batch, watch=Hide()).logits.values[6].softmax(-1)
    result = erase_key_weights(decision, kept)
    torch.testing.assert_close(result[1], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(result[0], decision.probabilities, atol=1e-6, rtol=0)


def test_nothing_left_to_look_at_is_nothing() -> None:
    weights = torch.tensor([[[0.25, 0.25]]])
    nothing = torch.zeros(2, dtype=torch.bool)
    assert renormalize(weights, nothing, sink=True).tolist() == [[[0.0, 0.0]]]
    assert renormalize(weights * 2, nothing, sink=False).tolist() == [[[0.0, 0.0]]]
    first = torch.tensor([True, False])
    # Half of all weight lay on the sink, which keeps it.
    assert renormalize(weights, first, sink=True)[0, 0, 0] == pytest.approx(1 / 3)


def test_steps_round_the_share_up() -> None:
    decision = decision_of(handmade(), [LONG])
    order = rank_keys(decision)["attention"].argsort(descending=True)
    assert int(order[0]) == 4
    assert erase(decision, order, steps=10).fraction == pytest.approx(0.1)
    assert erase(decision, order, steps=2).fraction == pytest.approx(0.5)
    assert len(erase(decision, order, steps=40).curve) == 41


@pytest.mark.parametrize(
    ("name", "model", "texts", "more"),
    [
        ("classes", ENCODERS["classes"], ids((5, 8)), {}),
        ("masked words", ENCODERS["bert"], ids((5, 8)), {"at": [2, 3]}),
        ("tags", ENCODERS["tags"], ids((5, 8)), {"at": [2, 3]}),
        ("images", VISIONS["vit"], images()[:2], {}),
        ("images, all patches", VISIONS["mean"], images()[:2], {"layers": [1]}),
        ("pairs", SEQ2SEQS["t5"], (ids((5, 3)), ids((4, 6), seed=1)), {}),
        (
            "memory",
            SEQ2SEQS["window"],
            (ids((5, 3)), ids((4, 6), seed=1)),
            {"sublayer": Sublayer.CROSS},
        ),
    ],
)
def test_every_kind_of_model_is_judged(name: str, model: Any, texts: Any, more: Any) -> None:
    inputs = {name: texts}
    report = faithfulness(
        small(model), inputs, iterations=2, steps=3, draws=1, progress=False, **more
    )
    task = report[name]
    assert task.texts == 2
    assert name in task.verdict
    for order in ("attention", "gradient", "gradient_times_attention", "random"):
        assert ((task.erased[order] > 0) & (task.erased[order] <= 1)).all()
        assert task.curves[order].shape == (4,)
    assert (task.moved <= 0.01).all()


def test_a_report_reads_well_and_comes_back_from_disk(tmp_path: Any) -> None:
    tasks = {"marks": [LONG, OTHER], "one": [LONG]}
    report = faithfulness(handmade(), tasks, steps=3, draws=1, iterations=2, progress=False)
    for ending in ("json", "safetensors"):
        report.save(tmp_path / f"report.{ending}")
        again = lens.load(tmp_path / f"report.{ending}")
        assert str(again) == str(report)
        assert again.metadata == report.metadata
        assert str(again.rows()) == str(report.rows())
    assert str(report).count("\n") == 1
    assert report.metadata["thresholds"]["far"] == 0.5
    assert report.table().row_count == len(report["marks"].measures())
    assert len(report.frame()) == 2 * len(report["one"].measures())
    with refuses(InputError, "there is no task 'two': use marks, one."):
        report["two"]


def test_ctrl_c_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def stop(*inputs: Any, **more: Any) -> Any:
        calls.append(inputs)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return find_adversary(*inputs, **more)

    # The package gives the file's name to its function.
    monkeypatch.setattr(sys.modules[faithfulness.__module__], "find_adversary", stop)
    task = faithfulness(
        handmade(), [LONG] * 4, steps=2, draws=1, iterations=1, progress=False
    ).tasks[0]
    assert task.texts == 2
    assert not task.complete


def test_what_decides_nothing_is_refused() -> None:
    gpt2, bert = small(DECODERS["gpt2"]), small(ENCODERS["bert"])
    with refuses(
        InputError,
        "Encoder",
        "at to one position per text",
    ):
        faithfulness(bert, ids((5,)))
    with refuses(InputError, "text 0 has no position 5: use 0 to 4."):
        faithfulness(gpt2, ids((5,)), at=[5])
    with refuses(InputError, "1 positions for 2 texts", "one per text"):
        faithfulness(gpt2, ids((5, 3)), at=[1])
    with refuses(InputError, "steps", "got 0", "1 or more"):
        faithfulness(gpt2, ids((5,)), steps=0)
    with refuses(InputError, "(9,)", "(0, 1)"):
        faithfulness(gpt2, ids((5,)), layers=[9])
    with refuses(
        InputError,
        "encoder",
        'stack="decoder"',
    ):
        faithfulness(small(SEQ2SEQS["t5"]), (ids((5,)), ids((4,))), stack="encoder")
    with refuses(InputError, "within", "got 0.0", "0 < within < 1"):
        find_adversary(decision_of(gpt2, ids((5,))), within=0.0)


def test_divergence_and_variation_of_known_distributions() -> None:
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.5])
    expected = 0.5 * (math.log(4 / 3) + 0.5 * math.log(2 / 3) + 0.5 * math.log(2))
    assert float(jensen_shannon(one, other)) == pytest.approx(expected, abs=1e-6)
    assert float(jensen_shannon(one, one)) == 0.0
    assert float(total_variation(one, other)) == 0.5


def test_tau_is_that_of_scipy() -> None:
    generator = np.random.default_rng(0)
    for count in (5, 30, 80):
        one, other = generator.integers(0, 12, (2, count)).astype(float)
        assert kendall(one, other) == pytest.approx(kendalltau(one, other).statistic)
    assert math.isnan(kendall(np.ones(4), np.arange(4.0)))
