"""Atlases in the files of HeadVis, which its viewers and those of Neuronpedia read, and back.

A folder has config.json, scatter_data.json with six metrics of every head, and for each head
heads/L{layer}H{head}.json with sampled passages, whose weights are lists of `query * length + key`
and values. Only the self-attention of one stack has a place there.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.atomic_write import atomic_write
from manyheads.errors import InputError
from manyheads.formatting import kind_of
from manyheads.lens.corpus.atlas import Atlas, HeadEntry
from manyheads.lens.corpus.corpus_watcher import DISTANCE_BINS
from manyheads.lens.corpus.examples import DECILES, HeadExample
from manyheads.lens.results.addresses import Address
from manyheads.report.atlas_folder import (
    FORMAT,
    NAMED_TOKENS,
    AtlasFiles,
    standard_places,
)
from manyheads.report.data import WEIGHT_UNITS
from manyheads.taps import Sublayer

METRICS = {
    "self_attention_score": "Mean weight of a query on itself.",
    "prev_token_score": "Mean weight on the token before the query.",
    "pattern_entropy": "Mean entropy of the weights of a query, in nats.",
    "qk_distance": "Mean distance between query and key, by weight.",
    "qk_distance_variance": "Variance of that distance over all weight.",
    "induction_score": "Mean weight on tokens after earlier copies of the query's token.",
}
# The measures of manyheads that are the same.
SAME = {
    "self_attention_score": "self",
    "prev_token_score": "previous_token",
    "pattern_entropy": "entropy",
    "qk_distance": "distance",
}
DIGITS = 4


def headvis_metrics(atlas: Atlas, head: Address) -> dict[str, float | None]:
    """The six metrics of a head, as HeadVis defines them."""
    entry, measured = atlas.of(head), atlas.inspection.statistics
    values = {name: float(measured[own].of(head)) for name, own in SAME.items()}
    values |= {"qk_distance_variance": entry.distance_variance, "induction_score": entry.induction}
    return {name: _rounded(value) for name, value in values.items()}


def write_headvis(atlas: Atlas, folder: Path, *, model: str, corpus: str) -> None:
    """Write the self-attention of the first stack as a folder of HeadVis."""
    heads = _heads(atlas)
    rows = [
        {"layer": head.head.layer, "head": head.head.head, **headvis_metrics(atlas, head)}
        for head in heads
    ]
    layers = 1 + max(head.head.layer for head in heads)
    most = 1 + max(head.head.head for head in heads)
    config = {
        "model_name": model,
        "np_model_id": model,
        "dataset_name": corpus,
        "heads": [[head.head.layer, head.head.head] for head in heads],
        "n_layers": layers,
        "n_heads": most,
        "n_intervals": DECILES,
        "metrics": list(METRICS),
        "metric_descriptions": METRICS,
        "head_data_pattern": "L{layer}H{head}.json",
        "has_umap": False,
        "umap_heads": [],
        "custom_plots": [
            {"key": "qk_distance_histogram", "label": "Q-K distance"},
            {"key": "histogram", "label": "Activation distribution"},
        ],
        "custom_tables": [
            {"key": "top_query_tokens", "label": "Top query tokens"},
            {"key": "top_key_tokens", "label": "Top key tokens"},
        ],
        "statistics_display": {
            "n_samples": {"label": "Samples kept", "format": "default"},
            "mean_max_activation": {"label": "Mean max activation", "format": "default"},
        },
        "pipeline_config": {
            "model_name": model,
            "np_model_id": model,
            "dataset_name": corpus,
            "n_sequences": atlas.metadata["passages"],
            "actual_sequences_processed": atlas.metadata["passages"],
            "seq_len": atlas.metadata["max_length"],
            "dtype": "float32",
            "attn_implementation": "manyheads",
            "n_intervals": DECILES,
            "num_hidden_layers": layers,
            "num_attention_heads": most,
        },
    }
    _write(folder / "config.json", config)
    _write(folder / "scatter_data.json", rows)
    _write(folder / "server_config.json", {})
    _write(folder / "attributions" / "manifest.json", {})
    for head in heads:
        _write(folder / "heads" / f"{head.head}.json", _head(atlas, atlas.of(head)))


def _heads(atlas: Atlas) -> list[Address]:
    stack = next((head.stack for head in atlas.entries), None)
    heads = [
        head
        for head in atlas.entries
        if head.stack == stack and head.sublayer is Sublayer.ATTENTION
    ]
    if not heads:
        raise InputError("the model has no self-attention", "HeadVis shows nothing else")
    return heads


def _head(atlas: Atlas, entry: HeadEntry) -> dict[str, Any]:
    tenths = {
        example.text: decile for decile, examples in entry.deciles.items() for example in examples
    }
    sequences = [
        _sequence(atlas, entry, example, tenths.get(example.text, DECILES))
        for example in entry.examples
    ]
    distances = entry.earlier + entry.later
    return {
        "sequences": sequences,
        "qk_distance_histogram": {
            "bin_edges": [0, *(2**power for power in range(DISTANCE_BINS))],
            "bin_values": [round(float(value), DIGITS) for value in distances],
        },
        "top_query_tokens": _top_tokens(sequences, lambda flat, length: flat // length),
        "top_key_tokens": _top_tokens(sequences, lambda flat, length: flat % length),
        "histogram": {
            "bin_edges": [
                round(edge, DIGITS)
                for edge in np.linspace(0, 1, len(entry.activations) + 1).tolist()
            ],
            "bin_values": entry.activations.tolist(),
        },
        "statistics": {
            "n_samples": len(sequences),
            "mean_max_activation": _rounded(entry.mean_activation),
        },
    }


def _sequence(atlas: Atlas, entry: HeadEntry, example: HeadExample, decile: int) -> dict[str, Any]:
    """A passage with the keys of the queries around the sharpest; those of others were not kept."""
    words = atlas.words(example.text, entry.address.stack) if atlas.passages[example.text] else []
    length = len(words)
    links = sorted(example.links())
    return {
        "sequence_id": example.text,
        "interval": decile,
        "tokens": words,
        "attention_indices": [query * length + key for query, key, _ in links],
        "attention_values": [round(weight, DIGITS) for _, _, weight in links],
        "seq_len": length,
        "max_activation": _rounded(example.activation),
    }


def _top_tokens(
    sequences: list[dict[str, Any]], place: Callable[[int, int], int]
) -> list[dict[str, Any]]:
    """Tokens by the weight of their links, as HeadVis adds them up."""
    weights: dict[str, float] = defaultdict(float)
    for sequence in sequences:
        pairs = zip(sequence["attention_indices"], sequence["attention_values"], strict=True)
        for flat, value in pairs:
            weights[sequence["tokens"][place(flat, sequence["seq_len"])]] += value
    ranked = sorted(weights.items(), key=lambda pair: -pair[1])[:50]
    return [{"token": token, "weight": round(weight, DIGITS)} for token, weight in ranked]


def _rounded(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None


def _write(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(file) as beside:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False)
        # A token may be half of a letter, which UTF-8 does not have.
        beside.write_bytes(text.encode("utf-8", errors="replace") + b"\n")


def read_headvis(folder: Path) -> AtlasFiles:
    """A folder of HeadVis as the files of an atlas page."""
    config, rows = _read(folder / "config.json", dict), _read(folder / "scatter_data.json", list)
    try:
        return _as_atlas(folder, config, rows)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise InputError(
            f"{folder} does not have the form of HeadVis ({type(error).__name__}: {error})",
            "make it anew, or name another folder",
        ) from None


def _as_atlas(folder: Path, config: dict[str, Any], rows: list[Any]) -> AtlasFiles:
    metrics = [str(name) for name in config.get("metrics", METRICS)]
    descriptions: Mapping[str, str] = config.get("metric_descriptions", {})
    words: dict[str, int] = {}
    texts: dict[int, dict[str, list[int]]] = {}
    heads: list[dict[str, Any]] = []
    entries = {}
    for row in rows:
        name = f"L{int(row['layer'])}H{int(row['head'])}"
        entry = _read(folder / "heads" / f"{name}.json", dict)
        heads.append(
            {
                "name": name,
                "stack": "main",
                "sublayer": "attention",
                "layer": int(row["layer"]),
                "head": int(row["head"]),
                "kind": "",
                "group": "",
                "kinds": [],
                "nearest": None,
                "why": "",
                "flags": [],
                "values": [row.get(metric) for metric in metrics],
                "errors": [None] * len(metrics),
                "similar": [],
                "file": True,
                "looks_at": [str(top["token"]) for top in entry["top_key_tokens"][:NAMED_TOKENS]],
            }
        )
        entries[name] = _entry(entry, name, texts, words)
    places = standard_places([head["values"] for head in heads])
    index = {
        "format": FORMAT,
        "name": str(config.get("model_name", folder.name)),
        "about": "Read from files of HeadVis.",
        "corpus": {
            "name": str(config.get("dataset_name", "")),
            "passages": config.get("pipeline_config", {}).get("n_sequences"),
            "tokens": None,
            "max_length": config.get("pipeline_config", {}).get("seq_len"),
        },
        "measures": [
            {
                "name": metric,
                "label": metric.replace("_", " "),
                "title": metric.replace("_", " "),
                "unit": "number",
                "about": str(descriptions.get(metric, "")),
            }
            for metric in metrics
        ],
        "heads": [head | {"place": place} for head, place in zip(heads, places, strict=True)],
        "importance": None,
    }
    texts = dict(sorted(texts.items()))
    return AtlasFiles(index=index, heads=entries, texts=texts, tokens=list(words))


def _entry(
    head: dict[str, Any],
    name: str,
    texts: dict[int, dict[str, list[int]]],
    words: dict[str, int],
) -> dict[str, Any]:
    """One head; its passages and their words are added to those of all heads."""

    def number(word: str) -> int:
        return words.setdefault(word, len(words))

    examples = []
    for sequence in head["sequences"]:
        text, length = int(sequence["sequence_id"]), len(sequence["tokens"])
        texts[text] = {"main": [number(str(word)) for word in sequence["tokens"]]}
        links = sorted(
            (int(flat) // length, -float(value), int(flat) % length)
            for flat, value in zip(
                sequence["attention_indices"], sequence["attention_values"], strict=True
            )
        )
        beyond_first = [link for link in links if link[0] and link[2]] or links or [(0, 0.0, 0)]
        examples.append(
            {
                "text": text,
                "decile": int(sequence["interval"]),
                "query": min(beyond_first, key=lambda link: link[1])[0],
                "activation": float(sequence["max_activation"] or 0),
                "start": 0,
                "counts": np.bincount([link[0] for link in links], minlength=length).tolist(),
                "keys": [link[2] for link in links],
                "weights": [round(-link[1] * WEIGHT_UNITS) for link in links],
            }
        )
    # Rounded activations may be equal: such examples keep the order of the file.
    examples.sort(key=lambda example: -example["activation"])
    distances = np.array(head["qk_distance_histogram"]["bin_values"], dtype=float)
    return {
        "name": name,
        "earlier": (distances / max(distances.sum(), 1e-9)).round(5).tolist(),
        "later": [],
        # HeadVis has sums of weights; how much is expected of a token is not known.
        "at": [[number(str(row["token"])), row["weight"], None] for row in head["top_key_tokens"]],
        "from": [
            [number(str(row["token"])), row["weight"], None] for row in head["top_query_tokens"]
        ],
        "activations": [int(count) for count in head["histogram"]["bin_values"]],
        "mean_activation": head["statistics"].get("mean_max_activation"),
        "examples": examples,
    }


def _read(file: Path, kind: type) -> Any:
    try:
        content = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{file} does not exist", "name a folder of HeadVis") from None
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error})", "make the folder anew") from None
    if not isinstance(content, kind):
        raise InputError(f"{file} holds {kind_of(content)}", f"it must be a {kind.__name__}")
    return content
