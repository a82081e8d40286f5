"""A report is drawn from an inspection, and its JSON has the names and values of one."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from manyheads.errors import InputError
from manyheads.lens import ablate, inspect, patterns
from manyheads.models.build import build
from manyheads.models.readout import NoReadout
from manyheads.report.data import (
    collect_report,
    kind_words,
    report_json,
    short_kind,
    suggest_commands,
    telling_head,
)
from manyheads.taps import Head, Sublayer
from tests.report.small import WORDS, decoder, pairs_report, quick_kinds, report, with_importance

HEADS = (Head(0, 0), Head(0, 1), Head(1, 0), Head(1, 1))


def test_every_head_has_everything() -> None:
    result = report()
    assert result.heads == 4
    assert len(result.largest) == 4
    assert result.importance is not None
    assert result.importance.by == "ablation"
    assert not np.isnan(result.importance.change).any()
    assert len(result.input.ids) == 64


def test_the_inspection_is_the_one_that_the_lens_makes() -> None:
    result = report()
    texts = list(result.input.measured)
    other = inspect(decoder(), texts, redundancy_texts=8, progress=False)
    for name, means in other.statistics.means.items():
        np.testing.assert_allclose(result.statistics.means[name], means, rtol=1e-4, atol=1e-7)
    assert other.kinds is not None
    assert result.kinds.rows() == other.kinds.rows()
    assert result.inspection.duplicate_pairs == other.duplicate_pairs


def test_gradients_are_used_on_request() -> None:
    with quick_kinds():
        result = collect_report(decoder(), WORDS * 4, name="it", by="gradient", progress=False)
    assert result.importance is not None
    assert result.importance.by == "gradient"
    # An estimate is no reason to call a head dead.
    assert "loss_change" not in result.inspection.dead


def test_a_model_of_vectors_is_compared_with_itself() -> None:
    bert = build("bert-base", layers=1, width=32, heads=2, hidden=64, vocabulary=320, seed=2)
    model: Any = build(replace(bert.config, readout=NoReadout()), seed=2)
    model.tokenizer = decoder().tokenizer
    with quick_kinds():
        result = collect_report(model, WORDS * 4, name="it", progress=False)
    assert result.importance is not None
    assert result.importance.metric == "similarity"
    assert result.measures()[0].name == "similarity_drop"
    with quick_kinds(), pytest.raises(InputError, match="--by ablation"):
        collect_report(model, WORDS * 4, name="it", by="gradient", progress=False)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(InputError, match=r"pattern_tokens .* got 1"):
        collect_report(decoder(), WORDS, name="it", pattern_tokens=1, progress=False)


def test_an_encoder_decoder_has_three_maps_and_every_head_its_importance() -> None:
    result = pairs_report()
    names = ["encoder L0H0", "encoder L0H1", "decoder L0H0", "decoder L0H1"]
    names += ["decoder L0H0 cross", "decoder L0H1 cross"]
    assert [str(head) for head in result.inspection.addresses] == names
    lengths = {"encoder": len(result.input.source_ids), "decoder": len(result.input.ids)}
    for top in result.largest:
        assert len(top.keys) == lengths[top.address.stack]
    assert result.importance is not None
    assert not np.isnan(result.importance.change).any()
    texts = list(result.input.measured)
    for stack, sublayer in (("encoder", Sublayer.ATTENTION), ("decoder", Sublayer.CROSS)):
        peer = ablate(result.model, texts, stack=stack, sublayer=sublayer, progress=False)
        mine = [result.importance.change[names.index(str(head))] for head in peer.addresses]
        assert mine == pytest.approx(peer["change"].means.tolist(), rel=1e-4)


def test_examples_are_the_texts_with_the_largest_weight() -> None:
    result = report()
    assert result.importance is not None
    order = np.argsort(-result.importance.change, kind="stable")
    assert list(result.examples) == [result.inspection.addresses[index] for index in order]
    head, (first, *_) = next(iter(result.examples.items()))
    largest = []
    for text in result.input.measured:
        weights = patterns(result.model, [text], head).of(head).weights
        largest.append(float(weights[1:, 1:].max()))
    assert first.activation == pytest.approx(max(largest), rel=1e-4)
    assert largest[first.text] == pytest.approx(max(largest), rel=1e-4)
    tokens = result.passages[first.text]["main"]
    assert result.input.measured[first.text].startswith("".join(tokens[:3]))


def test_the_page_opens_on_the_most_telling_kind() -> None:
    inspection = pairs_report().inspection
    best = telling_head(inspection)
    assert inspection.labels(best)[0].kind == "induction"
    assert kind_words(inspection, best) == short_kind(inspection, best) == "induction"
    other = next(head for head in inspection.addresses if head.head.head == 1)
    assert kind_words(inspection, other) == "closest: sink, 0.20 of the 0.30 it needs"
    assert short_kind(inspection, other) == "near sink"


def test_an_interrupted_inspection_gives_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("manyheads.lens.inspection.kinds", interrupted)
    with pytest.raises(KeyboardInterrupt):
        collect_report(decoder(), WORDS, name="it", progress=False)


def test_importance_comes_first_and_every_measure_is_known_for_some_head() -> None:
    measures = report().measures()
    assert measures[0].name == "loss_change"
    assert not any(np.isnan(each.values).all() for each in measures)
    assert len({each.name for each in measures}) == len(measures)
    assert all(each.about.about for each in measures)


def test_every_measure_of_the_page_is_in_every_row_of_json() -> None:
    rows = report_json(report())["rows"]
    assert tuple(Head(row["layer"], row["head"]) for row in rows) == HEADS
    for measure in report().measures():
        mine = [np.nan if row[measure.name] is None else row[measure.name] for row in rows]
        assert mine == pytest.approx(measure.values.tolist(), nan_ok=True)


def test_json_names_are_those_of_an_inspection() -> None:
    rows, peer = report_json(report())["rows"], report().inspection.rows()
    assert [set(row) for row in rows] == [set(row) for row in peer]
    assert report_json(report())["statistics"].keys() == report().statistics.metadata.keys()


def test_dead_duplicate_and_harmful_heads_are_in_json() -> None:
    result = with_importance(change=np.array([0.5, -0.4, 0.1, 0.1]), errors=np.full(4, 0.1))
    # With this threshold all heads are duplicates.
    [alike] = result.inspection.redundancy
    inspection = replace(result.inspection, redundancy=(replace(alike, duplicate_above=-1.0),))
    rows = report_json(replace(result, inspection=inspection))["rows"]
    assert [row["harmful"] for row in rows] == [False, True, False, False]
    assert sorted(rows[1]["duplicates"]) == ["L0H0", "L1H0", "L1H1"]
    assert [row["dead"] for row in rows] == [list(inspection.dead.why(each)) for each in HEADS]


def test_what_was_not_measured_is_null_and_all_of_it_is_json() -> None:
    inspection = replace(report().inspection, importance=None)
    message = report_json(replace(report(), inspection=inspection))
    assert message["importance"] is None
    assert "loss_change" not in message["rows"][0]
    json.dumps(message, allow_nan=False)


def test_idle_heads_are_to_be_pruned_and_the_studio_comes_last() -> None:
    idle = with_importance(change=np.array([0.5, 0.0, 0.0, 0.2]))
    advice = suggest_commands(idle, model_path="it", text_file="a b.txt")
    assert advice[0].command.startswith("manyheads prune it --file 'a b.txt'")
    assert "2 of 4 heads" in advice[0].why
    assert advice[-1].command == "manyheads studio it"


def test_advice_follows_from_what_was_measured() -> None:
    harmful = with_importance(
        change=np.array([0.5, -0.4, 0.1, 0.1]), errors=np.full(4, 0.1), by="gradient"
    )
    commands = [step.command for step in suggest_commands(harmful, model_path="m", text_file="t")]
    assert "manyheads ablate m --heads L0H1 --file t --tokens 20000" in commands
    assert "manyheads report m --file t --by ablation -o report.html" in commands
    assert "manyheads atlas m --corpus t -o atlas/" in commands
    syntax = [command for command in commands if "--syntax" in command]
    unnamed = sum(not harmful.kinds.of(head) for head in HEADS)
    assert len(syntax) == (unnamed >= 2)
    pairs = suggest_commands(pairs_report(), model_path="m", text_file="t")
    assert not any(step.command.startswith("manyheads studio") for step in pairs)


def test_needed_heads_are_left_alone() -> None:
    needed = with_importance(change=np.full(4, 0.5))
    commands = [each.command for each in suggest_commands(needed, model_path="it", text_file="t")]
    assert not any("--loss-budget" in each for each in commands)
