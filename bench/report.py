"""Size and cost of reports of 12 x 12 heads, compared with pages of BertViz.

    python bench/report.py [--lengths 128 512 2048] [--bertviz 32 64 128]

The model has the shape of GPT-2 small, a vocabulary of 4,096 and random weights, three times as
large as at the start of training, so that its heads look somewhere. A report measures and shows the
requested number of tokens; the cost of each of its steps is in seconds of all cores together. First
the weights on the page are checked against the lens. BertViz, if installed, draws the patterns
of the same model on the same tokens, its two views one after the other, and measures nothing.
"""

import argparse
import base64
import gzip
import json
import re
import tempfile
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import prose
from side_by_side import say
from stored_results import add_store, introduce, store

from manyheads.data.sources.texts import InMemoryTexts
from manyheads.data.tokenizer_training import train_tokenizer
from manyheads.lens.attention_maps.patterns import patterns
from manyheads.models.build import build
from manyheads.report import collect_report, render_report, write_report
from manyheads.taps import Head

# A weight is kept as a byte of its root.
ROUNDED = 1 / 255


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[128, 512, 2048])
    parser.add_argument("--bertviz", type=int, nargs="*", default=[32, 64, 128])
    add_store(parser)
    request = parser.parse_args()
    introduce("cpu", "bertviz")
    texts = prose()
    model: Any = build("gpt2", vocabulary=4096, positions=2048, dropout=0.0, seed=0)
    with torch.no_grad():
        for parameter in model.stack.parameters():
            parameter.mul_(3.0)
    model.tokenizer = train_tokenizer(InMemoryTexts(tuple(texts[:4000])), size=4096, progress=False)
    text = " ".join(texts[:4000])
    say(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, 12 x 12 heads")
    figures: dict[str, float] = {}
    for length in request.lengths:
        figures |= report(model, text, length)
    if request.bertviz:
        figures |= bertviz(model, text, request.bertviz)
    store(request.store, "report", "cpu", figures, "bertviz")


def report(model: Any, text: str, length: int) -> dict[str, float]:
    """Write one report of so many tokens and say what it came to."""
    marks: list[tuple[str, float]] = []

    def step(name: str) -> None:
        marks.append((name, time.process_time()))

    wall = time.perf_counter()
    result = collect_report(
        model,
        text,
        name="gpt2-shape",
        tokens=length,
        pattern_tokens=length,
        progress=False,
        on_progress=step,
    )
    step("page")
    page = render_report(result, model_path="model/", text_file="text.txt")
    with tempfile.TemporaryDirectory() as folder:
        size = write_report(page, Path(folder) / "report.html")
    marks.append(("", time.process_time()))
    wall = time.perf_counter() - wall
    check(model, page, list(result.input.ids))
    cores = marks[-1][1] - marks[0][1]
    importance = "nothing" if result.importance is None else result.importance.by
    steps = pairwise(marks)
    message = ", ".join(f"{name} {after - before:.1f}" for (name, before), (_, after) in steps)
    say(
        f"report, {length:>5} tokens: {size / 1e6:.2f} MB, {cores:.1f} core-seconds, {wall:.1f} s,"
        f" {result.keys} keys per query, importance by {importance} ({message})"
    )
    return {f"{length} tokens, MB": size / 1e6, f"{length} tokens, core-seconds": cores}


def check(model: Any, page: str, ids: list[int]) -> None:
    """Refuse a page whose weights are not the model's."""
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    for place, head in ((0, Head(0, 0)), (143, Head(11, 11))):
        raw = gzip.decompress(base64.b64decode(json.loads(data)["patterns"][place]))
        counts = np.frombuffer(raw[: len(ids)], np.uint8).astype(np.int64)
        kept = int(counts.sum())
        low, high, small = (
            np.frombuffer(raw[len(ids) :], np.uint8).astype(np.int64).reshape(3, kept)
        )
        rows = np.repeat(np.arange(len(ids)), counts)
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        steps = np.cumsum(low + 256 * high)
        columns = steps - np.where(starts > 0, steps[starts - 1], 0)
        weights = patterns(model, [ids], [head]).of(head).weights.numpy()
        apart = np.abs(np.sqrt(weights[rows, columns]) - small / 255).max()
        if apart > ROUNDED:
            raise SystemExit(f"{head}: the page is {apart:.3f} off the pattern")


def bertviz(model: Any, text: str, lengths: list[int]) -> dict[str, float]:
    """What BertViz writes for the same patterns, where it is installed."""
    try:
        views = import_module("bertviz")
    except ImportError:
        say("bertviz is not installed: pip install bertviz")
        return {}
    figures = {}
    heads = [Head(layer, head) for layer in range(12) for head in range(12)]
    for length in lengths:
        ids = model.tokenizer.encode(text).ids[:length]
        words = [model.tokenizer.decode([each]) for each in ids]
        result = patterns(model, [ids], heads)
        weights = [result.of(head).weights for head in heads]
        layers = tuple(
            torch.stack(weights[start : start + 12])[None] for start in range(0, 144, 12)
        )
        message = []
        for view in (views.head_view, views.model_view):
            started = time.process_time()
            page = view(layers, words, html_action="return").data
            message.append(f"{len(page) / 1e6:.1f} MB in {time.process_time() - started:.1f}")
            if view is views.head_view:
                figures[f"{length} tokens, BertViz, MB"] = len(page) / 1e6
        say(
            f"bertviz, {length:>5} tokens: "
            f"head view {message[0]}, model view {message[1]} core-seconds"
        )
    return figures


if __name__ == "__main__":
    main()
