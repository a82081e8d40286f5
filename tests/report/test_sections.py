from manyheads.report import collect_report, sections
from tests.report.small import WORDS, decoder, report


def test_one_piece_is_one_piece() -> None:
    said: list[str] = []
    result = collect_report(
        decoder(layers=1), WORDS, name="it", on_progress=said.append, progress=False
    )
    assert result.statistics.metadata["texts"] == 1
    message = sections.about_model(result) + sections.importance(result) + sections.overview(result)
    assert "in 1 piece;" in message
    assert "1 layer of 2 attention heads" in message
    assert "Means over 1 piece, so the standard error is unknown." in message
    assert len(said) == 5


def test_several_pieces_have_errors() -> None:
    message = sections.importance(report())
    assert "pieces; whiskers are two standard errors." in message


def test_one_head_is_one_head() -> None:
    result = collect_report(decoder(heads=1), WORDS * 4, name="it", by="none", progress=False)
    assert "2 layers of 1 attention head, 2 in all" in sections.about_model(result)
    assert "Not measured: it was switched off." in sections.importance(result)
