"""The report on a terminal."""

import pytest

from manyheads.report.terminal import print_report
from tests.report.small import report


def test_every_head_of_a_small_model_and_what_to_try_next(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_report(report(), model_path="model", text_file="text.txt")
    page = capsys.readouterr().out
    assert "4 heads in 2 layers" in page
    assert all(name in page for name in ("L0H0", "L0H1", "L1H0", "L1H1", "What to try next"))
    assert "manyheads studio model" in page
