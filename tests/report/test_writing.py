from pathlib import Path

import pytest

from manyheads.errors import InputError
from manyheads.report.writing import write_page


def test_a_page_is_written_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    assert write_page("<p>ö</p>", path) == 9
    assert path.read_text("utf-8") == "<p>ö</p>"
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


@pytest.mark.parametrize("name", ["report.txt", "report"])
def test_other_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="is no HTML"):
        write_page("", tmp_path / name)
