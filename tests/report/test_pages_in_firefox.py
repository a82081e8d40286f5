"""Every page in Firefox: it opens, shows its numbers, and raises no error."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from manyheads import show
from manyheads.report.atlas_folder import atlas_files, write_atlas
from manyheads.report.page import render_report, write_report
from tests.firefox import Firefox, launch_firefox, needs_firefox
from tests.report.small import atlas, decoder, report
from tests.studio import models
from tests.studio.live_server import live_server

pytestmark = needs_firefox


@pytest.fixture(scope="module")
def firefox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Firefox]:
    with launch_firefox(tmp_path_factory.mktemp("profile")) as result:
        yield result


def test_a_report_opens(firefox: Firefox, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(render_report(report(), model_path="it", text_file="text.txt"), path)
    firefox.open(path.as_uri())
    firefox.wait("document.querySelector('.token.at')")
    assert firefox.errors(path.as_uri()) == []


def test_an_atlas_opens_from_disk(firefox: Firefox, tmp_path: Path) -> None:
    write_atlas([atlas_files(atlas(), name="small", corpus="words")], tmp_path)
    firefox.open(f"{tmp_path.as_uri()}/index.html#L1H1")
    firefox.wait("document.body.innerText.includes('L1H1')")
    firefox.wait("document.querySelector('.example')")
    assert firefox.errors(tmp_path.as_uri()) == []


def test_a_notebook_cell_opens(firefox: Firefox, tmp_path: Path) -> None:
    path = tmp_path / "cell.html"
    shown = show(decoder(), "The cat sat on the mat")._repr_html_()
    path.write_text(f"<!doctype html><meta charset=utf-8>{shown}", encoding="utf-8")
    firefox.open(path.as_uri())
    firefox.enter_frame(0)
    firefox.wait("document.querySelector('.token.at')")


def test_the_studio_works(firefox: Firefox) -> None:
    with live_server([("tiny", models.decoder())]) as studio:
        address = f"http://127.0.0.1:{studio.endpoint.port}"
        firefox.open(f"{address}/#m=tiny&t=The cat sat on the mat. The cat&h=L0H1")
        firefox.wait("document.querySelector('.bars li')?.textContent.includes('%')")
        firefox.wait("document.querySelector('.attention-list li')?.textContent.includes('%')")
        firefox.open(f"{address}/explain.html", width=450)
        firefox.wait("document.querySelectorAll('button').length > 8")
        assert firefox.errors(address) == []
