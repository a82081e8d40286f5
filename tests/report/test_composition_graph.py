"""The strongest compositions are those of the weights, few enough to follow, and safe to draw."""

import re

import numpy as np
import pytest

from manyheads import lens
from manyheads.lens.head_kinds.kinds import Kinds
from manyheads.lens.results.addresses import Address
from manyheads.report import composition_graph
from manyheads.report.composition_graph import draw_compositions, strongest_compositions
from manyheads.taps import Head
from tests.report.small import decoder, report, seq2seq


def test_scores_are_those_of_the_lens_and_the_strongest_are_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = decoder(layers=3)
    monkeypatch.setattr(composition_graph, "MAX_EDGES", 5)
    edges, why = strongest_compositions(model, None)
    assert (len(edges), why) == (5, "")
    above = []
    for way in ("query", "key", "value"):
        scores = lens.composition_scores(model, way)
        usual = np.nanmedian(scores.values)
        above += (scores.values - usual)[~np.isnan(scores.values)].tolist()
        for edge in edges:
            if edge.through == way:
                place = scores.addresses.index(edge.writer), scores.addresses.index(edge.reader)
                assert edge.score == pytest.approx(scores.values[place])
    best = sorted(above, reverse=True)[:5]
    assert [edge.score - edge.usual for edge in edges] == pytest.approx(best)
    assert all(edge.writer.head.layer < edge.reader.head.layer for edge in edges)


def test_the_partner_of_an_induction_head_comes_first() -> None:
    partner = {"head": "L0H1", "composition": 0.2, "by": "ablation", "score": 0.5, "without": 0.1}
    kinds = report().kinds
    kinds = Kinds(
        labels=kinds.labels, scores=kinds.scores, metadata={"partners": {"L1H0": partner}}
    )
    edges, _ = strongest_compositions(decoder(), kinds)
    writers = [(edge.writer, edge.reader) for edge in edges if edge.without == (0.5, 0.1)]
    scores = lens.composition_scores(decoder(), "key")
    if scores.values[1, 2] > np.nanmedian(scores.values):
        assert writers == [(Address(Head(0, 1)), Address(Head(1, 0)))]
        assert (edges[0].writer, edges[0].reader) == writers[0]


def test_a_stack_of_one_layer_and_too_many_heads_have_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    edges, why = strongest_compositions(seq2seq(), None)
    assert edges == ()
    assert "layer before it" in why
    monkeypatch.setattr(composition_graph, "MAX_MULTIPLICATIONS", 1)
    assert "too many pairs" in strongest_compositions(decoder(), None)[1]


def test_the_picture_links_every_head_once_and_escapes_kinds() -> None:
    edges, _ = strongest_compositions(decoder(), None)
    heads = report().statistics.addresses
    picture = draw_compositions(
        edges, dict.fromkeys(heads, "<b>"), {head: place for place, head in enumerate(heads)}
    )
    links = re.findall(r'data-head="(\d+)"', picture)
    drawn = {head for edge in edges for head in (edge.writer, edge.reader)}
    assert len(links) == len(set(links)) == len(drawn)
    assert "<b>" not in picture
    assert picture.count("<path") == len(edges)
