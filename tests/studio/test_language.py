"""The studio in the reader's language."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from manyheads.studio.examples import BUNDLED
from tests.studio import sentences

PLACE = re.compile(r"\{(\d)(\|[^}]*)?\}")
CYRILLIC = re.compile("[а-яё]", re.IGNORECASE)
# The same in both languages.
ALIKE = {"Ctrl Enter", "Esc", "cls", "“{0}”"}
LANGUAGE = sentences.SHARED / "language.js"
PAGES = sorted(sentences.PAGE.glob("*.html"))
NODE = shutil.which("node")


@pytest.fixture(scope="module")
def russian() -> dict[str, str]:
    names = ("circuit", "heads", "kinds", "measures")
    tables = (sentences.SHARED / f"russian_{name}.js" for name in names)
    return sentences.russian([*sorted(sentences.PAGE.glob("*.js")), *tables])


@pytest.fixture(scope="module")
def english() -> set[str]:
    sent = sentences.sent_labels() | sentences.sent_errors()
    return sent.union(*(said_on(page) for page in PAGES))


def said_on(page: Path) -> set[str]:
    return sentences.written_in(page) | sentences.said_in_scripts(sentences.scripts_of(page))


def in_words(texts: set[str]) -> set[str]:
    """Those with words of their own, be it in the forms of a noun."""
    return {text for text in texts if sentences.LETTERS.search(PLACE.sub(r"\2", text))}


def values_of(text: str) -> set[str]:
    return {place for place, _ in PLACE.findall(text)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_page_loads_its_sentences_in_russian(page: Path) -> None:
    loaded = sentences.russian(sentences.scripts_of(page))
    assert sorted(in_words(said_on(page)) - loaded.keys()) == []


def test_every_sentence_is_in_russian(english: set[str], russian: dict[str, str]) -> None:
    assert sorted(in_words(english) - russian.keys()) == []
    strangers = [key for key, text in russian.items() if not CYRILLIC.search(text)]
    assert set(strangers) == ALIKE


def test_no_translation_is_left_over(english: set[str], russian: dict[str, str]) -> None:
    assert sorted(russian.keys() - english) == []


def test_a_translation_has_the_values_of_its_sentence(russian: dict[str, str]) -> None:
    for english, text in russian.items():
        assert values_of(text) == values_of(english), english
        for _, forms in PLACE.findall(text):
            assert forms.count("|") in (0, 3), text


def test_an_example_keeps_its_heads_and_its_words(russian: dict[str, str]) -> None:
    for example in (example for group in BUNDLED.values() for example in group if example.about):
        for pattern in (r"L\d+H\d+", "“[^”]+”"):
            in_russian = re.findall(pattern, russian[example.about])
            assert sorted(in_russian) == sorted(re.findall(pattern, example.about))


def run_script(language: str, script: str) -> Any:
    """What a script prints that uses language.js."""
    module = LANGUAGE.read_text("utf-8")
    start = f"globalThis.localStorage = {{ getItem: () => {language!r} }};\n"
    assert NODE is not None
    done = subprocess.run(
        [NODE, "--input-type=module", "-"],
        input=start + module + script,
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return json.loads(done.stdout)


SCRIPT = """
addSentences("ru", {
  "{0} {0|head|heads} in {1}": "В {1}: {0} {0|голова|головы|голов}",
  "the text has {0} tokens: use {1}.": "В тексте {0} токенов: возьмите {1}.",
  "Close": "Закрыть",
});
const counts = [1, 2, 5, 11, 21, "1,022", "12 000"];
console.log(JSON.stringify({
  plural: counts.map((count) => say`${count} {0|head|heads} in ${"A"}`),
  parts: sayParts`${2} {0|head|heads} in ${{ element: true }}`,
  labels: ["Close", "Open"].map(translate),
  filled: ["the text has 9 tokens: use 5 (or 6).", "Close", "another."].map(translateFilled),
}));
"""


@pytest.mark.skipif(NODE is None, reason="there is no Node.js here")
def test_nouns_follow_their_numbers() -> None:
    said = run_script("ru", SCRIPT)
    nouns = ["голова", "головы", "голов", "голов", "голова", "головы", "голов"]
    assert [text.split()[-1] for text in said["plural"]] == nouns
    assert said["plural"][0] == "В A: 1 голова"
    assert said["parts"] == ["В ", {"element": True}, ": ", 2, " ", "головы"]
    assert said["labels"] == ["Закрыть", "Open"]
    assert said["filled"] == [
        "В тексте 9 токенов: возьмите 5 (or 6).",
        "Закрыть",
        "another.",
    ]
    english = run_script("en", SCRIPT)
    assert english["plural"][:2] == ["1 head in A", "2 heads in A"]
    assert english["filled"][0] == "the text has 9 tokens: use 5 (or 6)."
