"""The report and the atlas in the reader's language: every sentence with its values."""

import ast
import re

import pytest

from manyheads.report import atlas_page, headvis, page
from manyheads.report.page import SHARED_SCRIPTS, WORD_SCRIPTS
from tests.studio import sentences
from tests.studio.test_language import CYRILLIC, in_words, values_of

FOLDER = sentences.PACKAGE / "report" / "atlas"
SCRIPTS = [
    *(sentences.SHARED / name for name in (*SHARED_SCRIPTS, *WORD_SCRIPTS)),
    *(FOLDER / name for name in atlas_page.SCRIPTS),
]
# What the files of an atlas say: flags, stacks, corpora, models.
SENT = {
    *("dead", "harmful", "duplicate", "mixed", "encoder", "decoder", "decoder cross"),
    *("articles that come with manyheads", "Read from files of HeadVis."),
    *(
        f"{start} {{1}} layers with {{2}} heads each: {{3}} heads, width {{4}}, {end} parameters."
        for start, end in (
            ("A {0} of", "vocabulary {5}, {6}"),
            ("An {0} of", "vocabulary {5}, {6}"),
            ("A {0} of", "{5}"),
        )
    ),
    *(name.replace("_", " ") for name in headvis.METRICS),
    *headvis.METRICS.values(),
}
ALIKE = {"manyheads studio MODEL", "cls", "“{0}”", "–", "", "≈ {0}"}
# The sentences of a report, with values of their own: a browser shows that none is left.
REPORT = sentences.PACKAGE / "report" / "page"
REPORT_SCRIPTS = [
    *(sentences.SHARED / name for name in (*SHARED_SCRIPTS, *page.CIRCUIT_SCRIPTS)),
    *(REPORT / name for name in page.SCRIPTS),
]
WRITERS = (
    *("report/sections.py", "report/data.py", "report/composition_graph.py"),
    *("report/predictions.py", "lens/redundant/dead_heads.py", "cli/commands/report.py"),
    *("lens/head_kinds/criteria.py", "lens/head_kinds/kinds.py", "lens/head_kinds/head_tests.py"),
    *("lens/head_kinds/text_tests.py", "lens/head_kinds/word_targets.py"),
)


@pytest.fixture(scope="module")
def english() -> set[str]:
    written = sentences.written_in(FOLDER / "page.html")
    said = {text for text in written if "{{" not in text} | sentences.said_in_scripts(SCRIPTS)
    return said | sentences.head_labels() | SENT


@pytest.fixture(scope="module")
def russian() -> dict[str, str]:
    return sentences.russian(SCRIPTS)


def test_every_sentence_is_in_russian(english: set[str], russian: dict[str, str]) -> None:
    assert sorted(in_words(english) - russian.keys()) == []
    assert {text for text in russian.values() if not CYRILLIC.search(text)} <= ALIKE


def test_no_translation_is_left_over(english: set[str], russian: dict[str, str]) -> None:
    assert sorted(russian.keys() - english) == []


def test_a_translation_has_the_values_of_its_sentence(russian: dict[str, str]) -> None:
    for sentence, text in russian.items():
        assert values_of(text) == values_of(sentence), sentence


def test_every_script_that_speaks_has_its_sentences_from_language_js() -> None:
    for path in SCRIPTS:
        script = path.read_text("utf-8")
        assert "say`" not in script or "language.js" in script or path.name == "language.js", path
        assert not re.search(r'h\("(?:h[1-6]|p|th|button|label)", \{[^}]*\}, "[A-Z][a-z]', script)


@pytest.fixture(scope="module")
def report_russian() -> dict[str, str]:
    return sentences.russian(
        sentences.PACKAGE / room / "page" / name for name, room in page.RUSSIAN.items()
    )


def test_what_scripts_and_html_of_a_report_say_is_in_russian(
    report_russian: dict[str, str],
) -> None:
    said = sentences.said_in_scripts(REPORT_SCRIPTS).union(
        *(sentences.written_in(REPORT / name) for name in ("page.html", "head_section.html"))
    )
    own = {text for text in in_words(said) if "{{" not in text}
    assert sorted(own - report_russian.keys()) == []
    for sentence, text in report_russian.items():
        assert values_of(text) == values_of(sentence), sentence


def test_a_report_holds_only_the_sentences_that_it_may_say(report_russian: dict[str, str]) -> None:
    table = page.russian_table("Dead and closest: something, 0.1 of the 0.4 it needs")
    assert "closest: {0}, {1} of the {2} it needs" in table
    assert "Where a head looks" not in table
    assert len(table) < len(str(report_russian))


def test_no_sentence_of_a_report_is_left_over() -> None:
    scripts = " ".join(path.read_text("utf-8") for path in REPORT_SCRIPTS)
    html = " ".join(
        (REPORT / name).read_text("utf-8") for name in ("page.html", "head_section.html")
    )
    written = []
    for name in WRITERS:
        tree = ast.parse((sentences.PACKAGE / name).read_text("utf-8"))
        nodes = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        written += [text for text in nodes if isinstance(text, str)]
    texts = triples(" ".join((scripts, html, *written)))
    own = sentences.russian([REPORT / "russian_report.js"]).keys()
    # A sentence that is put together has words that meet nowhere else: three at a seam.
    left = [key for key in own if len(triples(re.sub(r"\{\d[^}]*\}", " 0 ", key)) - texts) > 3]
    assert left == []


def triples(text: str) -> set[tuple[str, ...]]:
    """All runs of three words, but for those with a value."""
    words = re.findall(r"[\w'-]+", text)
    return {run for run in zip(words, words[1:], words[2:], strict=False) if "0" not in run}
