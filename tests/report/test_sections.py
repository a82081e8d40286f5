from dataclasses import replace

from manyheads.report import sections
from manyheads.report.examine import examine
from tests.report.small import WORDS, decoder, findings


def test_one_piece_is_one_piece() -> None:
    said: list[str] = []
    found = examine(decoder(layers=1), WORDS, name="it", say=said.append, progress=False)
    assert found.seen.facts["texts"] == 1
    told = sections.about_model(found) + sections.important(found) + sections.overview(found)
    assert "in 1 piece;" in told
    assert "1 layer of 2 attention heads" in told
    assert "Means over 1 piece, so that no error is known." in told
    assert said[0].endswith("over 1 piece of the text")


def test_several_pieces_have_errors() -> None:
    told = sections.important(findings())
    assert "pieces; whiskers are two standard errors." in told


def test_one_head_is_one_head() -> None:
    found = examine(decoder(heads=1), WORDS * 4, name="it", by="none", progress=False)
    assert "2 layers of 1 attention head, 2 in all" in sections.about_model(found)
    assert "Not measured: it was not asked for." in sections.important(replace(found, worth=None))
