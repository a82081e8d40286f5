"""Every sentence that the studio shows: in its scripts, its HTML, and from its server."""

import ast
import json
import re
import tomllib
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

from manyheads.lens.results.measure_names import _table
from manyheads.studio import examples

PACKAGE = Path(str(files("manyheads")))
PAGE = PACKAGE / "studio" / "page"
# Scripts that the studio, the report and the atlas share.
SHARED = PACKAGE / "pictures" / "page"
KINDS = PACKAGE / "lens" / "head_kinds" / "kinds.toml"
ATTRIBUTES = ("title", "aria-label", "placeholder", "alt")
# Without scripts nothing is translated.
UNTRANSLATED = ("script", "style", "noscript")
# Names and numbers are the same in every language.
LETTERS = re.compile(r"[^\W\d_]{2}")
IMPORT = re.compile(r'^import .*?"\./([^"]+)";', re.MULTILINE)
# Sentences of the server whose values are filled in.
RAISES = ("InputError", "RequestError")
# The page checks its own requests: these answer other programs.
OTHER_PROGRAMS = ("requests.py", "security.py", "connections.py")
# A kind with what it was tested on.
KIND_DETAILS = {
    *("positional {0}", "syntactic {0}", "recall {0}", "acronym {0}", "bracket {0}"),
    *("bracket brackets", "bracket brackets, ahead", "bracket quotes", "numbering numbers"),
    *("numbering {0}", "numbering line ends", "acronym letters", "acronym letters, ahead"),
    *("recall capitals", "recall opposites", "recall partners", "recall past"),
}
# Other sentences that the server sends: how a text was read, and how far a measurement is.
NOTES = {
    "The space before {0} is left out, because the tokens of this model begin with their space.",
    *("row {0}, column {1}", "[register {0}]", "[class]"),
    *("measuring", "measuring patches", "reading weights", "composing heads", "removing heads"),
    *("scoring words", "testing {0} heads"),
}


# Why the lens has no answer for a model, shown in the card "Why this word?".
REFUSALS = {
    f"{reason}: use ablation, patching or integrated gradients."
    for reason in (
        "the readout of this model is not linear, so that its logits are no sums",
        "this model reads its classes from the first token and a mean of the others",
        "layer {0} has a convolution, which adds more than its sublayers do",
    )
} | {
    f"{reason}: use lens.cut, patching or ablation."
    for reason in (
        "layer {0} has a convolution, which reads several tokens at once and is no writer of its "
        "own",
        "{0} of this model does not simply add to the residual stream, so that the stream is no "
        "sum of what heads write",
        "the {0} of {1} is not linear in the residual stream, even with frozen norms",
    )
}
REFUSALS |= {
    "the links of {0} have no scores: the model does not dispatch its attention, and only its "
    "weights are read: ablate the head instead."
}
# What the lens says about the two texts of a circuit.
ABOUT_PAIRS = {
    "the texts of pair {0} do not align: the clean one has {1} tokens and the corrupted one {2}; "
    "they part at token {3}, {4} against {5}. Clean: {6}. Corrupted: {7}: replace tokens one for "
    "one, so that positions match.",
    "the metric differs between both runs by {0}: this is not more than chance, and no circuit "
    "can be proved on it",
    "scores of one half of the pairs correlate with those of the other by {0}: they do not "
    "separate from noise",
}


def scripts_of(page: Path) -> set[Path]:
    """The scripts that a page loads, with all that they import."""
    waiting = re.findall(r'<script type="module" src="([^"]+)"', page.read_text("utf-8"))
    result: set[Path] = set()
    while waiting:
        name = waiting.pop()
        path = PAGE / name if (PAGE / name).exists() else SHARED / name
        if path.exists() and path not in result:
            result.add(path)
            waiting += IMPORT.findall(path.read_text("utf-8"))
    return result


def said_in_scripts(scripts: Iterable[Path]) -> set[str]:
    """say`...` and sayParts`...` as keys of the table."""
    result = set()
    for path in scripts:
        script = path.read_text("utf-8")
        for match in re.finditer(r"\b(?:say|sayParts)`", script):
            result.add(_template(script, match.end()))
    return result


def _template(script: str, start: int) -> str:
    """A template literal from its first character on, with {0}, {1}, … for its values."""
    text, place, values = "", start, 0
    while script[place] != "`":
        if script.startswith("${", place):
            place, text, values = _after_value(script, place + 2), f"{text}{{{values}}}", values + 1
        else:
            text, place = text + script[place], place + 1
    return text


def _after_value(script: str, place: int) -> int:
    """The place after the } of a value, which may have templates and braces of its own."""
    while script[place] != "}":
        if script[place] == "`":
            place += 1
            while script[place] != "`":
                inner = script.startswith("${", place)
                place = _after_value(script, place + 2) if inner else place + 1
        elif script[place] == "{":
            place = _after_value(script, place + 1) - 1
        place += 1
    return place + 1


class _Sentences(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.result: set[str] = set()
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in UNTRANSLATED:
            self._open.append(tag)
        self.result |= {value for name, value in attrs if name in ATTRIBUTES and value}

    def handle_endtag(self, tag: str) -> None:
        if tag in UNTRANSLATED:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if not self._open:
            self.result.add(" ".join(data.split()))


def written_in(page: Path) -> set[str]:
    """Texts and named attributes of the HTML."""
    parser = _Sentences()
    parser.feed(page.read_text("utf-8"))
    return {text for text in parser.result if LETTERS.search(text) and text != "manyheads"}


def head_labels() -> set[str]:
    """Measures with their meanings, and kinds of heads."""
    measures = {text for info in _table().values() for text in (info.label, info.about)}
    kinds = set(tomllib.loads(KINDS.read_text("utf-8"))) - {"silent"}
    return {label.replace("{}", "{0}") for label in measures} | kinds | KIND_DETAILS


def sent_labels() -> set[str]:
    """Labels of heads, examples and notes."""
    plain = (*examples.NEXT_TOKEN, *examples.MASKED, *examples.PLAIN)
    every = [*plain, *(example for group in examples.BUNDLED.values() for example in group)]
    named = {text for each in every for text in (each.name, each.about, each.button) if text}
    return head_labels() | named | set(examples.ABOUT.values()) | NOTES | REFUSALS | ABOUT_PAIRS


def sent_errors() -> set[str]:
    """What the handlers of the studio raise, as the page receives it."""
    result: set[str] = set()
    for path in (PACKAGE / "studio").glob("*.py"):
        if path.name not in OTHER_PROGRAMS:
            result |= set(_raised(ast.parse(path.read_text("utf-8"))))
    return result


def _raised(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "_describe_error":
            texts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            yield from (text for text in texts if isinstance(text, str))
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        parts = node.args[1:] if name == "RequestError" else node.args
        if name in RAISES and all(isinstance(part, ast.JoinedStr | ast.Constant) for part in parts):
            yield _numbered(parts) + ("." if name == "InputError" else "")


def _numbered(parts: list[ast.expr]) -> str:
    """Texts with {0}, {1}, … for their values."""
    count, texts = 0, []
    for part in parts:
        text = ""
        for piece in part.values if isinstance(part, ast.JoinedStr) else [part]:
            if isinstance(piece, ast.Constant):
                text += str(piece.value)
            else:
                text, count = f"{text}{{{count}}}", count + 1
        texts.append(text)
    return ": ".join(texts)


def russian(scripts: Iterable[Path]) -> dict[str, str]:
    """The sentences of all tables among the scripts."""
    table: dict[str, str] = {}
    for path in scripts:
        if not path.name.startswith("russian"):
            continue
        body = path.read_text("utf-8").partition('addSentences("ru", {')[2].rpartition("}")[0]
        # The tables are JSON but for a comma at the end.
        entries = json.loads("{" + body.strip().removesuffix(",") + "}")
        assert not table.keys() & entries.keys(), f"{path.name} repeats a sentence"
        table |= entries
    return table
