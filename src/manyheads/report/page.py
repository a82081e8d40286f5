"""The report as one HTML file with its text, data, styles and scripts inside."""

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from hashlib import sha256
from html import escape, unescape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Integer

from manyheads.atomic_write import atomic_write, check_writable
from manyheads.errors import InputError
from manyheads.formatting import without_nan
from manyheads.lens.attention_maps.patterns import TopKeys
from manyheads.lens.circuit_discovery.circuit import Circuit
from manyheads.lens.inspection import Inspection
from manyheads.lens.results.addresses import Address
from manyheads.report import sections
from manyheads.report.data import (
    ReportData,
    ReportMeasure,
    example_record,
    kind_words,
    short_kind,
    suggest_commands,
    telling_head,
)
from manyheads.report.inputs import ReportInput
from manyheads.taps import Sublayer

# The format of the page: a sample of an earlier one is out of date.
FORMAT = 2
# Scripts shared with the studio and the atlas, and the report's own.
SHARED_SCRIPTS = (
    *("language.js", "dom.js", "color.js", "format.js", "scale.js", "token_text.js", "theme.js"),
    *("grid.js", "pixels.js", "packed.js", "example.js", "table.js", "head_words.js"),
)
# The kinds and measures of heads in words, in English and Russian.
WORD_SCRIPTS = (
    *("kinds.js", "russian_heads.js", "russian_kinds.js", "russian_measures.js"),
    "russian_pages.js",
)
# The tables of the report and where they are.
RUSSIAN = {
    "russian_heads.js": "pictures",
    "russian_measures.js": "pictures",
    "russian_pages.js": "pictures",
    "russian_circuit.js": "pictures",
    "russian_report.js": "report",
}
HEAD_SCRIPTS = ("data.js", "atlas.js", "head_view.js", "main.js")
SCRIPTS = ("language_page.js", *HEAD_SCRIPTS, "text_parts.js")
STYLES = ("theme.css", "example.css")
# Those of a circuit, where a page has one.
CIRCUIT_SCRIPTS = ("circuit.js",)
CIRCUIT_SECTION, CIRCUIT_STYLE = "circuit_section.js", "circuit.css"
# The largest weights of a query are kept up to this sum.
KEPT_WEIGHT = 0.98


def render_report(
    report: ReportData,
    *,
    model_path: str,
    text_file: str,
    made: str = "",
    circuit: Circuit | None = None,
) -> str:
    """Render the page; the commands that it suggests use `model_path` and `text_file`.

    A `circuit` of the model has a section of its own.

    Only the script of the page itself may run: whatever a text contains, a browser that follows the
    page's content security policy runs nothing else and sends no request.
    """
    measures = report.measures()
    style, more = page_style(), ""
    shared: Sequence[str] = SHARED_SCRIPTS
    own: Sequence[str] = SCRIPTS
    if circuit is not None:
        shared, own = (*shared, *CIRCUIT_SCRIPTS), (*own, CIRCUIT_SECTION)
        style += read_part(CIRCUIT_STYLE, "pictures")
        section = circuit_section(circuit)
        more = f'<section class="wide">\n<h2>A circuit</h2>\n{section}\n</section>'
    head, body = sections.head_table(report, measures)
    suggestions = suggest_commands(report, model_path=model_path, text_file=text_file)
    values = {
        "name": escape(report.name),
        "format": str(FORMAT),
        "made": escape(made),
        "input": "text" if report.input.image is None else "image",
        "style": style,
        "overview": sections.overview(report),
        "about": sections.about_model(report),
        "predictions": sections.predictions(report),
        "importance": sections.importance(report),
        "compositions": sections.compositions(report),
        "circuit": more,
        "examples": sections.examples(report),
        "problem_heads": sections.problem_heads(report),
        "activations": sections.activations(report),
        "table_head": head,
        "table_body": body,
        "next_steps": sections.next_steps(suggestions),
        "definitions": sections.definitions(report, measures),
        "head_section": read_part("head_section.html"),
        "data": to_json(
            page_data(report.input, report.inspection, measures, report.largest)
            | {"predictions": report.predictions.record(), "examples": _example_data(report)}
        ),
    }
    page = read_part("page.html")
    script = join_scripts(shared, own)
    words = unescape(fill_page(page, values | {"policy": "", "script": ""}))
    script = join_scripts(shared, own, tables=[russian_table(words + script)])
    return fill_page(page, values | {"policy": content_policy(script, style), "script": script})


def circuit_section(circuit: Circuit) -> str:
    """What was measured in words, the place for the circuit and its data."""
    data = to_json(without_nan(sections.circuit_data(circuit)))
    return (
        f'<p class="lead" lang="en">{escape(sections.describe_circuit(circuit))}</p>'
        '<div id="circuit">'
        "<noscript><p>The circuit needs JavaScript.</p></noscript></div>"
        f'<script type="application/json" id="circuit-data">{data}</script>'
    )


def page_style() -> str:
    """The styles that pages share, and the report's own."""
    return "".join(read_part(name, "pictures") for name in STYLES) + read_part("style.css")


def _example_data(report: ReportData) -> dict[str, Any]:
    """The examples of some heads, by their index, and the tokens of the texts."""
    index = {head: place for place, head in enumerate(report.inspection.addresses)}
    return {
        "heads": [
            [index[head], [example_record(example) for example in examples]]
            for head, examples in report.examples.items()
        ],
        "passages": {str(text): tokens for text, tokens in report.passages.items()},
    }


def russian_table(page: str) -> str:
    """The sentences in Russian that a page with its script may say: those whose words it has."""
    text = " ".join(page.split())
    table: dict[str, str] = {}
    for name, room in RUSSIAN.items():
        # JSON, but for a comma at the end.
        body = read_part(name, room).partition('addSentences("ru", {')[2].rpartition("}")[0]
        part = json.loads("{" + body.strip().removesuffix(",") + "}")
        for english, russian in part.items():
            if all(words.strip() in text for words in re.split(r"\{\d[^}]*\}", english)):
                table[english] = russian
    return f'addSentences("ru", {to_json(table)});\n'


def join_scripts(
    shared: Sequence[str],
    own: Sequence[str],
    folder: str = "page",
    tables: Sequence[str] = (),
) -> str:
    """One script of modules: those that the studio imports too, `tables`, and the page's own.

    In a block, a name that two modules share is a syntax error.
    """
    parts = [*(read_part(name, "pictures") for name in shared), *tables]
    parts += [read_part(name, folder=folder) for name in own]
    # What only a reader of the source needs is left out.
    modules = re.compile(r"^(export |import [^;]*;\n| *//.*\n)", re.MULTILINE)
    return '"use strict";\n{\n' + "\n".join(modules.sub("", part) for part in parts) + "}\n"


def content_policy(script: str, style: str) -> str:
    """The content security policy of a page: its own script and styles, and no request."""
    return (
        f"default-src 'none'; style-src {content_hash(style)}; script-src {content_hash(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def content_hash(content: str) -> str:
    """What a content security policy calls a script or a style that may be in the page."""
    return f"'sha256-{b64encode(sha256(content.encode('utf-8')).digest()).decode('ascii')}'"


def fill_page(page: str, values: Mapping[str, str]) -> str:
    """Fill in all placeholders at once, so that no value is searched for them."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], page)


def check_report_path(path: Path) -> None:
    """Raise an InputError for a path where no page can be written, before it is computed."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"the report must end in .html, got {path}", "rename it")
    if path.is_dir():
        raise InputError(f"the report {path} is a folder", "pass the path of a file")
    check_writable(path)


def write_report(page: str, path: Path) -> int:
    """Write a page and return its size in bytes; a write that fails leaves the old file."""
    check_report_path(path)
    content = page.encode("utf-8", errors="replace")
    with atomic_write(path) as beside:
        beside.write_bytes(content)
    return len(content)


def quantize(weights: Float[np.ndarray, "t k"]) -> Integer[np.ndarray, "t k"]:
    """255 times the square root of a weight, so that small weights keep more precision.

    >>> quantize(np.array([[1.0, 0.25, 0.0001, 0.0]])).tolist()
    [[255, 128, 3, 0]]
    """
    return np.rint(np.sqrt(np.clip(weights, 0, 1)) * 255).astype(np.uint8)


def pack(keys: Integer[np.ndarray, "t k"], weights: Float[np.ndarray, "t k"]) -> str:
    """Base64 of gzipped bytes: the number of keys of each query, key differences, weights.

    Numbers and weights take one byte, differences two, all low bytes before all high bytes. Rows
    come with the largest weight first and are stored in the order of keys, so that differences are
    small.
    """
    small = quantize(weights)
    before = np.cumsum(weights, axis=1) - weights
    stored = (small > 0) & (before < KEPT_WEIGHT)
    order = np.argsort(np.where(stored, keys, np.iinfo(np.int64).max), axis=1, kind="stable")
    keys, small, stored = (
        np.take_along_axis(table, order, axis=1) for table in (keys.astype(np.int64), small, stored)
    )
    steps = np.diff(keys, axis=1, prepend=0)[stored].astype("<u2")
    counts = stored.sum(axis=1).astype(np.uint8)
    parts = (counts, steps & 255, steps >> 8, small[stored])
    raw = b"".join(part.astype(np.uint8).tobytes() for part in parts)
    # Without a time stamp the same pattern gives the same text.
    return b64encode(gzip.compress(raw, compresslevel=9, mtime=0)).decode("ascii")


def page_data(
    source: ReportInput,
    inspection: Inspection,
    measures: Sequence[ReportMeasure],
    largest: Sequence[TopKeys],
) -> dict[str, Any]:
    """What the scripts of the head view read; kinds may not have been measured."""
    flags, kinds = inspection.flags(), inspection.kinds
    heads, addresses = [], inspection.addresses
    stacks = dict.fromkeys(address.stack for address in addresses)
    for address in addresses:
        labels = inspection.labels(address)
        keys = "encoder" if address.sublayer is Sublayer.CROSS else address.stack
        near = None if kinds is None else kinds.nearest.get(address)
        why = "" if kinds is None else kinds.why_mixed(address)
        heads.append(
            {
                "name": str(address),
                **address.record(),
                "keys": keys,
                "kind": short_kind(inspection, address),
                "words": kind_words(inspection, address),
                "group": labels[0].kind if labels else "mixed",
                "kinds": [label.record() for label in labels],
                "nearest": None if near is None else near.record(),
                "why": labels[0].evidence if labels else why,
                "flags": flags[address],
            }
        )
    image = source.image
    by_head = {keys.address: keys for keys in largest}
    return {
        "tokens": {stack: list(source.tokens_of(stack)) for stack in stacks},
        "start": addresses.index(telling_head(inspection)),
        "image": None if image is None else [image.url, image.rows, image.columns, image.registers],
        "heads": heads,
        "kinds": kinds is not None,
        "measures": [
            {
                "name": measure.name,
                "label": measure.about.label,
                "title": measure.about.title,
                "unit": measure.about.unit,
                "about": measure.about.about,
                "values": without_nan([float(f"{value:.4g}") for value in measure.values]),
            }
            for measure in measures
        ],
        "patterns": [
            _pack_head(by_head.get(head), len(source.tokens_of(head.stack))) for head in addresses
        ],
    }


def pack_pattern(report: ReportData, head: Address) -> tuple[str, int, int]:
    """The pattern of a head, and how many queries and keys it has."""
    queries = report.input.tokens_of(head.stack)
    keys = report.input.tokens_of("encoder") if head.sublayer is Sublayer.CROSS else queries
    largest = next((keys for keys in report.largest if keys.address == head), None)
    return _pack_head(largest, len(queries)), len(queries), len(keys)


def _pack_head(largest: TopKeys | None, tokens: int) -> str:
    """The pattern of a head; some mixers have none."""
    if largest is None:
        return pack(np.zeros((tokens, 0), dtype=np.int64), np.zeros((tokens, 0)))
    return pack(largest.keys.cpu().numpy(), largest.weights.cpu().numpy())


def to_json(data: Mapping[str, Any]) -> str:
    """JSON without any HTML in it: a token may be the end tag of a script."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def read_part(name: str, room: str = "report", folder: str = "page") -> str:
    return files("manyheads").joinpath(room, folder, name).read_text("utf-8")
