"""A report as one HTML file: words, data, style and script together, and nothing from elsewhere."""

import json
import re
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib.resources import files
from typing import Any

import numpy as np

from manyheads.report import sections
from manyheads.report.advice import advise
from manyheads.report.examine import Findings
from manyheads.report.measures import Measure, measures_of
from manyheads.report.sparse import pack

__all__ = ["compose"]

SCRIPTS = ("data.js", "colour.js", "atlas.js", "look.js", "main.js")


def compose(found: Findings, *, where: str, file: str, made: str = "") -> str:
    """The whole page; `where` and `file` are what the commands it gives name, `made` is the date.

    Only the script that is written here may run: whatever a text holds, a browser that heeds the
    page's own policy runs nothing else and asks no other place for anything.
    """
    measures = measures_of(found)
    script = '"use strict";\n' + "\n".join(_part(name) for name in SCRIPTS)
    head, body = sections.rows(found, measures)
    words = {
        "policy": f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        "name": escape(found.name),
        "made": escape(made),
        "read": "text" if found.reading.picture is None else "image",
        "style": _part("look.css"),
        "overview": sections.overview(found),
        "about": sections.about_model(found),
        "important": sections.important(found),
        "trouble": sections.trouble(found),
        "activations": sections.activations(found),
        "table_head": head,
        "table_body": body,
        "advices": sections.advices(advise(found, where=where, file=file)),
        "how": sections.how_made(found, measures),
        "data": _json(_data(found, measures)),
        "script": script,
    }
    return _filled(_part("page.html"), words)


def _data(found: Findings, measures: list[Measure]) -> dict[str, Any]:
    flags = sections.flags_of(found)
    heads = []
    for address in found.seen.addresses:
        labels = found.kinds.of(address)
        heads.append(
            {
                "name": str(address),
                "layer": address.head.layer,
                "head": address.head.head,
                "kind": found.kinds.best(address),
                "group": labels[0].kind if labels else "mixed",
                "kinds": [
                    {"name": each.name, "score": round(each.score, 3), "evidence": each.evidence}
                    for each in labels
                ],
                "flags": flags[str(address)],
            }
        )
    picture = found.reading.picture
    by_head = {each.address: each for each in found.largest}
    return {
        "tokens": list(found.reading.letters),
        "picture": None if picture is None else [picture.address, picture.rows, picture.columns],
        "heads": heads,
        "measures": [_measure(each) for each in measures],
        "patterns": [
            pack(by_head[each].keys.cpu().numpy(), by_head[each].weights.cpu().numpy())
            for each in found.seen.addresses
        ],
    }


def _measure(measure: Measure) -> dict[str, Any]:
    values = [None if np.isnan(each) else float(f"{each:.4g}") for each in measure.values.tolist()]
    return {
        "name": measure.name,
        "title": measure.title,
        "how": measure.how,
        "share": measure.share,
        "values": values,
    }


def _json(data: Mapping[str, Any]) -> str:
    """JSON that no HTML can be seen in: a token may be the end of a script."""
    written = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        written = written.replace(letter, f"\\u{ord(letter):04x}")
    return written


def _filled(page: str, words: Mapping[str, str]) -> str:
    """All at once, so that what is filled in is never looked through again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda place: words[place[1]], page)


def _hash(script: str) -> str:
    return f"sha256-{b64encode(sha256(script.encode('utf-8')).digest()).decode('ascii')}"


def _part(name: str) -> str:
    return files("manyheads.report").joinpath("page", name).read_text("utf-8")
