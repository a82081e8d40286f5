"""The atlas in the reader's language: every sentence has a translation, with its values."""

import re

import pytest

from manyheads.report import atlas_page, headvis
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
ALIKE = {"manyheads studio MODEL", "cls", "“{0}”", "–"}


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
