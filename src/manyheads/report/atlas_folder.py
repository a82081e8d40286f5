"""An atlas as a folder that opens from disk or from any web server: data in chunks, and the page.

A browser reads no JSON from disk, but it runs scripts: each chunk is a script that calls
`manyheads(kind, data)` with JSON. A head is read when it is opened, a passage when it is shown.

- `atlas.js`: the model, the corpus, and every head with its measures and kinds
- `heads/L3H1.js`: one head: distances, tokens, examples
- `texts/0.js`, `texts/1.js` ...: the passages of examples, as indices into the tokens
- `tokens.js`: the text of every token

Several atlases, such as steps of a training run, share one `atlas.js`; the other files of each are
in folders `0`, `1` ...
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.atomic_write import atomic_write, check_writable
from manyheads.errors import InputError
from manyheads.formatting import without_nan
from manyheads.lens.corpus.atlas import Atlas, HeadEntry
from manyheads.lens.corpus.examples import DECILES
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.measure_names import describe_measure, sort_measures
from manyheads.report.atlas_page import render_atlas_page
from manyheads.report.data import example_record

FORMAT = 1
TEXTS_PER_CHUNK = 32
# Of each head in the index.
NAMED_TOKENS = 3
# Variants of other measures, and single offsets.
HIDDEN = ("previous_token_all_queries", "induction_score", "offset")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AtlasFiles:
    """The content of the files: plain values that JSON can hold."""

    index: dict[str, Any]
    heads: Mapping[str, dict[str, Any]]
    # The passages by number and stack, as indices into `tokens`.
    texts: Mapping[int, Mapping[str, list[int]]]
    tokens: list[str]


def atlas_files(atlas: Atlas, *, name: str, corpus: str, origin: str = "") -> AtlasFiles:
    """The files of an atlas of the model `name` over the corpus of that name."""
    place = {token: index for index, token in enumerate(atlas.tokens)}
    return AtlasFiles(
        index=_index(atlas, name, corpus, origin),
        heads={str(head): _entry(entry, place) for head, entry in atlas.entries.items()},
        texts={
            text: {stack: [place[token] for token in ids.tolist()] for stack, ids in stacks.items()}
            for text, stacks in sorted(atlas.passages.items())
        },
        tokens=list(atlas.tokens.values()),
    )


def _index(atlas: Atlas, name: str, corpus: str, origin: str) -> dict[str, Any]:
    inspection = atlas.inspection
    measured, importance = inspection.statistics, inspection.importance
    columns = [
        (column, measured[column].means, measured[column].errors)
        for column in sort_measures(
            column for column in measured.names if not column.startswith(HIDDEN)
        )
        if not np.isnan(measured[column].means).all()
    ]
    if importance is not None:
        columns.insert(0, (importance.measure, importance.change, importance.errors))
    places = standard_places([[*place] for place in atlas.positions.tolist()], project=False)
    return {
        "format": FORMAT,
        "name": name,
        "origin": origin,
        "about": str(inspection.model),
        "corpus": {"name": corpus}
        | {key: atlas.metadata[key] for key in ("texts", "passages", "tokens", "max_length")},
        "complete": atlas.complete,
        "importance": None
        if importance is None
        else {"measure": importance.measure, "by": importance.by},
        "measures": [
            {
                "name": column,
                "label": about.label,
                "title": about.title,
                "unit": about.unit,
                "about": about.about,
            }
            for column, about in ((column, describe_measure(column)) for column, _, _ in columns)
        ],
        "heads": [
            _head(atlas, head, place)
            | {
                "values": _short(means[number] for _, means, _ in columns),
                "errors": _short(errors[number] for _, _, errors in columns),
            }
            for number, (head, place) in enumerate(zip(atlas.addresses, places, strict=True))
        ],
    }


def _head(atlas: Atlas, head: Address, place: list[float]) -> dict[str, Any]:
    inspection = atlas.inspection
    labels, kinds = inspection.labels(head), inspection.kinds
    near = None if kinds is None else kinds.nearest.get(head)
    entry = atlas.entries.get(head)
    return {
        "name": str(head),
        **head.record(),
        "kind": inspection.best_kind(head),
        "group": labels[0].kind if labels else "mixed",
        "kinds": [label.record() for label in labels],
        "nearest": None if near is None else near.record(),
        "why": labels[0].evidence if labels else "" if kinds is None else kinds.why_mixed(head),
        "flags": inspection.flags()[head],
        "place": place,
        # Mixers without a pattern have measures and no file.
        "file": entry is not None,
        "looks_at": []
        if entry is None
        else [atlas.tokens[lift.token] for lift in entry.looks_at[:NAMED_TOKENS]],
        "similar": []
        if entry is None
        else [[str(address), value] for address, value in entry.similar],
    }


def _entry(entry: HeadEntry, place: Mapping[int, int]) -> dict[str, Any]:
    examples = [example_record(example) for example in entry.sharpest]
    examples += [
        example_record(example, decile)
        for decile in range(DECILES, 0, -1)
        for example in entry.deciles.get(decile, ())
    ]
    return {
        "name": str(entry.address),
        "earlier": _short(entry.earlier.tolist()),
        "later": _short(entry.later.tolist()) if entry.later.any() else [],
        "at": [[place[lift.token], lift.lift, lift.count] for lift in entry.looks_at],
        "from": [[place[lift.token], lift.lift, lift.count] for lift in entry.looks_from],
        "activations": entry.activations.tolist(),
        "mean_activation": round(entry.mean_activation, 4),
        "examples": examples,
    }


def standard_places(rows: Sequence[Sequence[Any]], *, project: bool = True) -> list[list[float]]:
    """Places on a map from 0 to 1: of rows of measures by their two main directions."""
    values = np.array(
        [[np.nan if value is None else value for value in row] for row in rows], dtype=float
    )
    if project:
        values = values[:, np.isfinite(values).all(0)]
        spread = values.std(0)
        values = (values - values.mean(0))[:, spread > 0] / spread[spread > 0]
        left, sizes, _ = np.linalg.svd(values, full_matrices=False)
        values = np.pad((left * sizes)[:, :2], ((0, 0), (0, max(0, 2 - values.shape[1]))))
    low, size = values.min(0), np.ptp(values, axis=0)
    return ((values - low) / np.where(size > 0, size, 1)).round(4).tolist()


def _short(values: Any) -> list[float | None]:
    return list(without_nan([float(f"{value:.4g}") for value in values]))


def write_atlas(files: AtlasFiles | Sequence[AtlasFiles], folder: Path) -> int:
    """Write all files, the page last, and return their size in bytes.

    Several atlases, of steps of a training run or of several models, share one page. What an
    earlier atlas left in the folder is removed.
    """
    atlases = [files] if isinstance(files, AtlasFiles) else list(files)
    folders = [""] if len(atlases) == 1 else [f"{number}/" for number in range(len(atlases))]
    written = {}
    indices = []
    for atlas, inside in zip(atlases, folders, strict=True):
        for path, kind, content in _chunks(atlas):
            written[folder / inside / path] = _write(folder / inside / path, script(kind, content))
        indices.append(atlas.index | {"folder": inside, "chunks": _first_texts(atlas)})
    content = {"format": FORMAT, "atlases": _on_one_map(indices)}
    page = folder / "index.html"
    for file in _earlier_chunks(folder):
        if file not in written:
            file.unlink()
    return (
        sum(written.values())
        + _write(folder / "atlas.js", script("index", content))
        + _write(page, render_atlas_page(_title(indices)))
    )


def _title(indices: list[dict[str, Any]]) -> str:
    names = list(dict.fromkeys(str(index["name"]) for index in indices))
    return " and ".join(names) if len(names) < 3 else f"{names[0]} to {names[-1]}"


def read_atlas(folder: Path) -> list[AtlasFiles]:
    """The atlases that a folder holds."""
    index = read_chunk(folder / "atlas.js")
    try:
        if index["format"] != FORMAT:
            raise InputError(
                f"{folder} has the format {index['format']}, this version reads {FORMAT}",
                "make the atlas anew",
            )
        return [_read_one(folder / atlas["folder"], atlas) for atlas in index["atlases"]]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise InputError(
            f"{folder} is no atlas ({type(error).__name__}: {error})", "make the atlas anew"
        ) from None


def _read_one(folder: Path, index: dict[str, Any]) -> AtlasFiles:
    own = {key: value for key, value in index.items() if key not in ("folder", "chunks")}
    texts = {
        int(text): stacks
        for chunk in range(len(index["chunks"]))
        for text, stacks in read_chunk(folder / f"texts/{chunk}.js")["texts"].items()
    }
    names = [head["name"] for head in own["heads"] if head["file"]]
    return AtlasFiles(
        index=own,
        heads={name: read_chunk(folder / "heads" / file_name(name)) for name in names},
        texts=texts,
        tokens=read_chunk(folder / "tokens.js"),
    )


def _on_one_map(indices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Places for the heads of several atlases together, so that they can be compared."""
    if len(indices) == 1:
        return indices
    names = [[measure["name"] for measure in index["measures"]] for index in indices]
    shared = [name for name in names[0] if all(name in own for own in names)]
    rows = [
        [head["values"][own.index(name)] for name in shared]
        for index, own in zip(indices, names, strict=True)
        for head in index["heads"]
    ]
    places = iter(standard_places(rows))
    return [
        index | {"heads": [head | {"place": next(places)} for head in index["heads"]]}
        for index in indices
    ]


def _earlier_chunks(folder: Path) -> list[Path]:
    """The files that atlases put into a folder, but for those that every atlas has."""
    kinds = ("heads/*.js", "texts/*.js", "tokens.js")
    return [
        file
        for inside in ("", "[0-9]*/")
        for kind in kinds
        for file in sorted(folder.glob(inside + kind))
    ]


def check_atlas_folder(folder: Path) -> None:
    """Raise an InputError for a folder that holds something else, before anything is computed."""
    if folder.is_file():
        raise InputError(f"{folder} is a file", "name a folder")
    if folder.is_dir() and any(folder.iterdir()) and not is_atlas_folder(folder):
        raise InputError(f"{folder} is not empty and holds no atlas", "name another folder")
    check_writable(folder / "index.html")


def is_atlas_folder(folder: Path) -> bool:
    """Whether it holds an atlas, or the beginning of one."""
    return any((folder / name).is_file() for name in ("atlas.js", STATE))


# Beside the files of the page: how far the corpus has been read.
STATE = "pass.safetensors"


def _chunks(files: AtlasFiles) -> Iterator[tuple[str, str, Any]]:
    """The path, kind and content of the files of one atlas."""
    numbers = list(files.texts)
    for chunk, first in enumerate(range(0, len(numbers), TEXTS_PER_CHUNK)):
        texts = {text: files.texts[text] for text in numbers[first : first + TEXTS_PER_CHUNK]}
        yield f"texts/{chunk}.js", "texts", {"chunk": chunk, "texts": texts}
    yield "tokens.js", "tokens", files.tokens
    for name, head in files.heads.items():
        yield f"heads/{file_name(name)}", "head", head


def _first_texts(files: AtlasFiles) -> list[int]:
    """The first passage of each chunk, by which the page finds the chunk of a passage."""
    return list(files.texts)[::TEXTS_PER_CHUNK]


def file_name(head: str) -> str:
    """
    >>> file_name("decoder L2H0 cross")
    'decoder-L2H0-cross.js'
    """
    return head.replace(" ", "-") + ".js"


def script(kind: str, content: Any) -> str:
    """A chunk as a script: a call with a string of JSON, in which no markup can end."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return f'manyheads("{kind}",{text});\n'


def read_chunk(file: Path) -> Any:
    """The content of a chunk."""
    try:
        match = re.fullmatch(r'manyheads\("\w+",(.*)\);\n', file.read_text("utf-8"), re.DOTALL)
        return json.loads(match[1]) if match else _not_a_chunk(file)
    except (OSError, ValueError) as error:
        raise InputError(f"{file} cannot be read ({error})", "make the atlas anew") from None


def _not_a_chunk(file: Path) -> Any:
    raise InputError(f"{file} is not a part of an atlas", "make the atlas anew")


def _write(file: Path, content: str) -> int:
    file.parent.mkdir(parents=True, exist_ok=True)
    # A token may be half of a letter, which UTF-8 does not have.
    encoded = content.encode("utf-8", errors="replace")
    with atomic_write(file) as beside:
        beside.write_bytes(encoded)
    return len(encoded)
