"""Needles on the device, and positions that are changed only for a test."""

import torch

from manyheads.parts import NoScaling, Rotary
from studies.length.needles import ANSWERS, add_needles
from studies.length.study import scale_positions
from studies.mixers.tasks import KEYS, MARK, NEEDLES, VALUES
from studies.small_models import language_model


def texts_with_needles(count: int = 3, length: int = 60) -> torch.Tensor:
    ids = torch.zeros(count, length, dtype=torch.long)
    add_needles(ids, torch.Generator().manual_seed(0))
    return ids


def test_every_question_has_its_needle_earlier_in_the_text() -> None:
    for text in texts_with_needles().tolist():
        end = len(text) - 3 * NEEDLES
        questions = [tuple(text[at : at + 3]) for at in range(end, len(text), 3)]
        needles = [tuple(text[at : at + 3]) for at in range(end) if text[at] == MARK]
        assert sorted(questions) == sorted(needles)
        assert len({key for _, key, _ in needles}) == NEEDLES


def test_answers_are_the_values_at_the_end() -> None:
    ids = texts_with_needles()
    assert (ids[:, 1:][:, ANSWERS] >= VALUES).all()
    before = ids[:, :-1][:, ANSWERS]
    assert ((before >= KEYS) & (before < VALUES)).all()
    assert before.shape == (3, NEEDLES)


def test_positions_of_a_variant_are_taken_back() -> None:
    model = language_model(width=16, layers=2, heads=2)
    ids = torch.arange(24)[None]
    expected = model(ids).logits
    differs = {
        name: not torch.equal(model(ids).logits, expected)
        for name in scale_positions(model, factor=4.0, length=6)
    }
    assert differs == {"unchanged": False, "linear": True, "base raised": True, "YaRN": True}
    position = model.stack.layers[1].attention.config.position
    assert isinstance(position, Rotary)
    assert isinstance(position.scaling, NoScaling)


def test_no_variant_changes_texts_of_the_trained_length() -> None:
    model = language_model(width=16, layers=1, heads=2)
    ids = torch.arange(8)[None]
    expected = model(ids).logits
    for _ in scale_positions(model, factor=1.0, length=8):
        torch.testing.assert_close(model(ids).logits, expected)
