import re
from importlib.resources import files

from manyheads.report.atlas_page import SCRIPTS, render_atlas_page
from manyheads.report.page import SHARED_SCRIPTS, WORD_SCRIPTS, content_hash


def test_only_its_own_script_and_files_beside_it_may_run() -> None:
    page = render_atlas_page("tiny")
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    [script], [style] = (
        re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("script", "style")
    )
    assert "default-src 'none'" in policy
    assert f"script-src {content_hash(script)} 'self' file:;" in policy
    assert f"style-src {content_hash(style)};" in policy
    assert "unsafe" not in policy


def test_the_name_of_a_model_is_text() -> None:
    page = render_atlas_page("<script>alert(1)</script> {{script}}")
    assert "<script>alert" not in page
    assert page.count('"use strict"') == 1


def test_every_script_of_the_page_is_in_it_after_what_it_imports() -> None:
    folder = files("manyheads").joinpath("report", "atlas")
    names = {file.name for file in folder.iterdir() if file.name.endswith(".js")}
    assert names == set(SCRIPTS)
    order = [*SHARED_SCRIPTS, *WORD_SCRIPTS, *SCRIPTS]
    for name in SCRIPTS:
        imported = re.findall(
            r'^import.* "\./(.*?)"', folder.joinpath(name).read_text("utf-8"), re.M
        )
        assert set(imported) <= set(order)
    page = render_atlas_page("tiny")
    assert not re.search(r"^(import|export) ", page, re.MULTILINE)
    assert "innerHTML" not in page
