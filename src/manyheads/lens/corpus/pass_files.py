"""A pass over a corpus on disk: what has been added up, to go on from there."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from manyheads.atomic_write import atomic_write
from manyheads.encoding.fingerprints import exact_fingerprint
from manyheads.errors import InputError
from manyheads.lens.corpus.examples import HeadExample
from manyheads.lens.corpus.pass_state import CorpusPass, PassSettings
from manyheads.lens.measure.statistics import StatisticsTotals
from manyheads.lens.measure.watcher import Activation
from manyheads.lens.results.addresses import Block
from manyheads.models.build import Model
from manyheads.taps import Sublayer

HEADER_KEY = "manyheads.atlas"
# The parts of sums over one attention that are arrays.
HEAD_SUMS = ("earlier", "later", "squares", "copied", "counts")
BOOK = ("histogram", "linear", "activation_sums")
Arrays = dict[str, NDArray[Any]]


def weights_fingerprint(model: Model) -> str:
    """The hash of a model, or its size where weights have no plain values, as some quantized ones.

    A pass goes on only with the same.
    """
    try:
        return exact_fingerprint(model)
    except (RuntimeError, TypeError):
        return str(sum(parameter.numel() for parameter in model.parameters()))


def _describe(model: Model, settings: PassSettings) -> dict[str, Any]:
    """What a pass must have been made with to go on."""
    return json.loads(json.dumps({"model": weights_fingerprint(model), **asdict(settings)}))


def pack_totals(totals: StatisticsTotals) -> tuple[Arrays, dict[str, Any]]:
    """Sums over texts as arrays by name, and the rest as plain values."""
    arrays: Arrays = {}
    for (block, name), sums in totals.sums.sums.items():
        arrays[f"measure/{_name(block)}/{name}"] = sums.cpu().numpy()
    for block, scores in totals.logits.items():
        arrays[f"logit/{_name(block)}"] = scores.float().cpu().numpy()
    return arrays, {
        "tokens": totals.tokens,
        "class_counts": totals.class_counts,
        "activations": [asdict(activation) for activation in totals.activations.values()],
    }


def unpack_totals(arrays: Arrays, about: dict[str, Any]) -> StatisticsTotals:
    """The sums that `pack_totals` has packed; other arrays are left alone."""
    totals = StatisticsTotals()
    totals.tokens, totals.class_counts = int(about["tokens"]), about["class_counts"]
    for record in about["activations"]:
        totals.activations[record["stack"], record["layer"]] = Activation(**record)
    for name, array in arrays.items():
        kind, _, rest = name.partition("/")
        if kind == "measure":
            block, _, measure = rest.partition("/")
            totals.sums.sums[_block(block), measure] = torch.from_numpy(array.copy())
        elif kind == "logit":
            totals.logits[_block(rest)] = torch.from_numpy(array.copy())
    return totals


def save_pass(done: CorpusPass, file: Path, model: Model, settings: PassSettings) -> None:
    arrays, values = pack_totals(done.totals)
    for block, head_sums in done.sums.blocks.items():
        place = f"corpus/{_name(block)}"
        for part in HEAD_SUMS:
            arrays[f"{place}/{part}"] = getattr(head_sums, part)
        for part in BOOK:
            arrays[f"{place}/{part}"] = getattr(head_sums.book, part)
        for part in ("at", "of_queries"):
            tokens = getattr(head_sums, part)
            arrays[f"{place}/{part}/ids"], arrays[f"{place}/{part}/sums"] = tokens.ids, tokens.sums
        arrays |= _pack_examples(place, head_sums.book.stored)
    for text, stacks in done.pool.items():
        for stack, ids in stacks.items():
            arrays[f"text/{text}/{stack}"] = ids
    about = {
        "settings": _describe(model, settings),
        "counts": [done.texts, done.passages, done.tokens, values["tokens"]],
        "digest": done.digest,
        "ahead": sorted(done.ahead),
        "ahead_digest": done.ahead_digest,
        "class_counts": values["class_counts"],
        "activations": values["activations"],
    }
    arrays = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    content = save(arrays, metadata={HEADER_KEY: json.dumps(about)})
    with atomic_write(file) as beside:
        beside.write_bytes(content)


def restore_pass(file: Path, model: Model, settings: PassSettings) -> CorpusPass:
    try:
        with safe_open(file, framework="np") as opened:
            about = json.loads((opened.metadata() or {})[HEADER_KEY])
            arrays: Arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        if about["settings"] != _describe(model, settings):
            raise InputError(
                f"{file} was made with another model or other settings", "delete it to start anew"
            )
        done = CorpusPass.begin(settings)
        _restore(done, about, arrays)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise InputError(f"{file} is damaged ({error})", "delete it to start anew") from None
    return done


def _restore(done: CorpusPass, about: dict[str, Any], arrays: Arrays) -> None:
    done.texts, done.passages, done.tokens, tokens = map(int, about["counts"])
    done.totals = unpack_totals(arrays, about | {"tokens": tokens})
    done.digest = about["digest"]
    done.ahead, done.ahead_digest = set(about["ahead"]), about["ahead_digest"]
    for name, array in arrays.items():
        kind, _, rest = name.partition("/")
        if kind == "text":
            text, _, stack = rest.partition("/")
            done.pool.setdefault(int(text), {})[stack] = array
    for name in [name for name in arrays if name.endswith("/earlier")]:
        place = name.removesuffix("/earlier")
        head_sums = done.sums.of(_block(place.removeprefix("corpus/")))
        for part in HEAD_SUMS:
            setattr(head_sums, part, arrays[f"{place}/{part}"].copy())
        for part in BOOK:
            setattr(head_sums.book, part, arrays[f"{place}/{part}"].copy())
        for part in ("at", "of_queries"):
            tokens = getattr(head_sums, part)
            tokens.restore(arrays[f"{place}/{part}/ids"], arrays[f"{place}/{part}/sums"])
        for head, example in _unpack_examples(place, arrays):
            head_sums.book.stored[head][example.text] = example
        head_sums.book.refresh()


def _pack_examples(place: str, stored: list[dict[int, HeadExample]]) -> Arrays:
    """All examples of an attention end to end."""
    pairs = [
        (head, example) for head, examples in enumerate(stored) for example in examples.values()
    ]
    numbers = [
        [
            head,
            example.text,
            example.query,
            example.rows.start,
            example.rows.stop,
            len(example.keys),
        ]
        for head, example in pairs
    ]
    parts: dict[str, list[NDArray[Any]]] = {
        "counts": [example.counts for _, example in pairs],
        "keys": [example.keys for _, example in pairs],
        "weights": [example.weights for _, example in pairs],
    }
    return {
        f"{place}/examples/numbers": np.array(numbers, dtype=np.int64).reshape(-1, 6),
        f"{place}/examples/activation": np.array([example.activation for _, example in pairs]),
        **{
            f"{place}/examples/{part}": np.concatenate([*arrays, np.zeros(0, arrays[0].dtype)])
            for part, arrays in parts.items()
            if arrays
        },
    }


def _unpack_examples(place: str, arrays: Arrays) -> list[tuple[int, HeadExample]]:
    numbers = arrays[f"{place}/examples/numbers"].tolist()
    examples, row, entry = [], 0, 0
    for number, activation in zip(
        numbers, arrays[f"{place}/examples/activation"].tolist(), strict=True
    ):
        head, text, query, start, stop, entries = number
        rows, entry_range = slice(row, row + stop - start), slice(entry, entry + entries)
        row, entry = rows.stop, entry_range.stop
        example = HeadExample(
            text=text,
            query=query,
            activation=activation,
            rows=range(start, stop),
            counts=arrays[f"{place}/examples/counts"][rows],
            keys=arrays[f"{place}/examples/keys"][entry_range],
            weights=arrays[f"{place}/examples/weights"][entry_range],
        )
        examples.append((head, example))
    return examples


def _name(block: Block) -> str:
    return f"{block.stack} {block.layer} {block.heads} {block.sublayer.value}"


def _block(name: str) -> Block:
    stack, layer, heads, sublayer = name.split(" ")
    return Block(int(layer), int(heads), stack, Sublayer(sublayer))
