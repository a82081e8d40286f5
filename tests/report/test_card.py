"""The card of a model: its numbers are those of the lens, as Markdown, picture and JSON."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyheads import lens
from manyheads.lens.inputs.synthetic import default_texts
from manyheads.models.build import build
from manyheads.report import Card, card_json, card_markdown, collect_card, write_card
from tests.report.small import WORDS, decoder, quick_kinds, seq2seq

TEXTS = [WORDS, WORDS * 2]


@pytest.fixture(scope="module")
def card() -> Card:
    with quick_kinds():
        return collect_card(
            decoder(heads=4), TEXTS, name="small", command="manyheads card small", progress=False
        )


def test_the_least_important_heads_are_removed_together(card: Card) -> None:
    model, importance = decoder(heads=4), card.inspection.importance
    assert importance is not None
    order = np.argsort(importance.change, kind="stable")
    assert [len(cost.heads) for cost in card.costs] == [1, 2, 3]
    last = card.costs[-1]
    assert set(last.heads) == {str(card.inspection.addresses[index]) for index in order[:3]}
    joint = lens.ablate_together(model, TEXTS, last.heads, progress=False)
    assert last.change == pytest.approx(joint.change, abs=1e-5)


def test_most_valuable_heads_come_first(card: Card) -> None:
    changes = [change for _, change, _ in card.valuable()]
    assert changes == sorted(changes, reverse=True)
    assert all(change > 0 for change in changes)


def test_every_head_is_counted_once(card: Card) -> None:
    counts = card.kinds_by_layer()
    assert list(counts) == ["L0", "L1"]
    assert [sum(layer.values()) for layer in counts.values()] == [4, 4]


def test_the_page_has_all_and_its_command(card: Card) -> None:
    page = card_markdown(card, "card.png")
    for words in ("## The heads of small", "| L1 |", "Sinks:", "Dead heads:", "Duplicate pairs:"):
        assert words in page
    assert "![heads of small" in page
    assert "manyheads card small" in page
    for cost in card.costs:
        assert f"| {cost.fraction:.0%} | {len(cost.heads)} | {cost.change:+.4f}" in page


def test_files_hold_the_card(card: Card, tmp_path: Path) -> None:
    paths = write_card(card, tmp_path / "new" / "card")
    assert [path.name for path in paths] == ["card.md", "card.png", "card.json"]
    assert paths[1].read_bytes().startswith(b"\x89PNG")
    stored = json.loads(paths[2].read_text())
    assert stored == json.loads(json.dumps(card_json(card)))
    assert stored["removal"][0]["fraction"] == 0.1
    assert stored["model"]["parameters"] == card.inspection.model.parameters


def test_a_card_without_importance_has_the_reason(card: Card) -> None:
    inspection = replace(card.inspection, importance=None)
    bare = replace(card, inspection=inspection, unknown_importance="it was switched off", costs=())
    assert "not known: it was switched off." in card_markdown(bare)
    assert card_json(bare)["importance"] is None


def test_images_have_a_card_too() -> None:
    model: Any = build("vit-b16", layers=1, width=32, heads=2, seed=0)
    images = default_texts(model, 0)[:1]
    card = collect_card(model, images, name="vit", progress=False)
    assert card.costs == ()
    assert "the right class" in card_markdown(card)


def test_the_heads_of_an_encoder_decoder_are_ranked_but_not_removed_together(
    tmp_path: Path,
) -> None:
    pairs = [(WORDS, "The dog sat."), (WORDS, "The cat sat.")]
    with quick_kinds():
        card = collect_card(seq2seq(), pairs, name="pairs", progress=False)
    assert card.inspection.importance is not None
    assert card.costs == ()
    page = card_markdown(card)
    assert " cross | " in page
    assert "removed at once" not in page
    assert write_card(card, tmp_path)
