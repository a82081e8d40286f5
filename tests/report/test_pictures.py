"""The pictures of a report."""

from pathlib import Path

from manyheads.report.pictures import draw_pictures
from tests.report.small import report


def test_the_atlas_one_head_and_its_layer_are_drawn(tmp_path: Path) -> None:
    paths = draw_pictures(report(), tmp_path / "drawn")
    assert [path.name.split("-")[0] for path in paths] == ["atlas.png", "head", "layer"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
