"""Find circuits that are known: `python bench/circuits.py`.

RASP programs are compiled by Tracr into models, hidden among idle and noise heads and turned into a
random basis (`known_circuits.compile_rasp`), so that their true edges and heads are known. Every
method of `lens.circuit` ranks the edges and the heads of every program: 1 is a ranking with all
true ones first. The area under the ROC curve (AUROC) of a ranking by chance is 0.5, its average
precision (AP) the fraction of true ones. "clear" is the AUROC of edges if scores below 1e-4 of the
largest count as zero, and "by weights" that of all wired edges, those with constants too, which no
exchange of activations can show. Forwards and backwards are of all pairs of texts at once.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import walk_packages
from statistics import mean
from typing import get_args

# Threads that spin while they wait would count as work in the seconds of the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from side_by_side import say, show
from stored_results import add_store, introduce, store

from manyheads.lens.circuit_discovery.circuit import Circuit, circuit
from manyheads.lens.circuit_discovery.edge_scores import Level, Method
from manyheads.lens.circuit_discovery.known_circuits import (
    KnownCircuit,
    ProgramPairs,
    compile_rasp,
)
from manyheads.lens.circuit_discovery.rasp_programs import library_programs

__all__ = ["main"]

METHODS: tuple[Method, ...] = get_args(Method)
LEVELS: tuple[Level, ...] = get_args(Level)
PEER = "transformer-lens"
# Scores below this share of the largest count as equal in one column: a ranking of gradients that
# have vanished can be right, but says nothing to a reader.
CLEAR = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """How well one method ranks the edges or heads of one program."""

    program: str
    method: str
    level: str
    true: int
    all: int
    auroc: float
    ap: float
    wired_auroc: float
    clear_auroc: float
    forwards: float
    backwards: float
    seconds: float


def auroc(true: np.ndarray, scores: np.ndarray) -> float:
    """How often a true one has a higher score than a false one; ties count half.

    >>> auroc(np.array([True, False, False]), np.array([2.0, 2.0, 1.0]))
    0.75
    """
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[place]
    own = int(true.sum())
    return float((ranks[true].sum() - own * (own + 1) / 2) / (own * (len(true) - own)))


def average_precision(true: np.ndarray, scores: np.ndarray) -> float:
    """The mean, over true ones, of the fraction of true ones among those with no lower score.

    >>> average_precision(np.array([True, False, True]), np.array([3.0, 2.0, 1.0]))
    0.8333333333333333
    """
    _, place = np.unique(-scores, return_inverse=True)
    hits, counts = np.bincount(place, true).cumsum(), np.bincount(place).cumsum()
    return float((np.diff(hits, prepend=0) * hits / counts).sum() / true.sum())


def truth(known: KnownCircuit, result: Circuit, *, wired: bool = False) -> np.ndarray:
    """Which of the scores are those of true edges or heads."""
    edges = known.wired if wired else known.edges
    if result.level == "head":
        return np.isin(result.writers, [edge.writer for edge in edges])[None]
    true = np.zeros(result.scores.shape, bool)
    for edge in edges:
        true[result.readers.index(edge.reader), result.writers.index(edge.writer)] = True
    return true


def rank(
    program: str, known: KnownCircuit, pairs: ProgramPairs, method: Method, level: Level, steps: int
) -> Ranking | None:
    """The method's ranking beside the truth; None where all or none are true."""
    start = time.perf_counter()
    result = circuit(
        known.model,
        pairs.clean,
        pairs.corrupted,
        pairs.metric,
        method,
        level,
        steps=steps,
        progress=False,
    )
    seconds = time.perf_counter() - start
    counted = ~np.isnan(result.scores)
    if level == "head":
        counted &= np.array(["H" in name for name in result.writers])
    scores = np.abs(result.scores[counted])
    true, wired = truth(known, result)[counted], truth(known, result, wired=True)[counted]
    if not 0 < true.sum() < len(true):
        return None
    return Ranking(
        program=program,
        method=f"{method}, {steps} steps" if "ig" in method else method,
        level=level,
        true=int(true.sum()),
        all=len(true),
        auroc=auroc(true, scores),
        ap=average_precision(true, scores),
        wired_auroc=auroc(wired, scores) if wired.sum() < len(wired) else 1.0,
        clear_auroc=auroc(true, np.where(scores > CLEAR * scores.max(), scores, 0)),
        forwards=float(result.metadata["forwards"]),
        backwards=float(result.metadata["backwards"]),
        seconds=seconds,
    )


def peer() -> str:
    """What TransformerLens has to compare with."""
    try:
        installed = version(PEER)
    except PackageNotFoundError:
        return "TransformerLens is not installed."
    import transformer_lens

    names = [
        module.name for module in walk_packages(transformer_lens.__path__, "transformer_lens.")
    ]
    own = [
        name for name in names if {"eap", "edge", "circuit"} & set(name.split(".")[-1].split("_"))
    ]
    if own:
        return f"TransformerLens {installed} has {', '.join(own)}: not compared yet."
    return f"TransformerLens {installed} scores no edges: nothing to compare with."


def report(rankings: Sequence[Ranking]) -> dict[str, dict[str, float]]:
    """Print the means of each method over all programs, and return them."""
    methods = list(dict.fromkeys(ranking.method for ranking in rankings))
    rows = []
    figures: dict[str, dict[str, float]] = {}
    for method in methods:
        row = [method]
        figures[method] = {}
        for level in LEVELS:
            own = [item for item in rankings if (item.method, item.level) == (method, level)]
            figures[method][f"AUROC of {level}s"] = mean(item.auroc for item in own)
            figures[method][f"AP of {level}s"] = mean(item.ap for item in own)
            row += [
                f"{mean(item.auroc for item in own):.3f}",
                f"{mean(item.ap for item in own):.3f}",
            ]
        own = [item for item in rankings if (item.method, item.level) == (method, "edge")]
        figures[method] |= {
            "clear": mean(item.clear_auroc for item in own),
            "forwards": mean(item.forwards for item in own),
            "backwards": mean(item.backwards for item in own),
        }
        worst = min(own, key=lambda item: item.auroc)
        row += [
            f"{mean(item.clear_auroc for item in own):.3f}",
            f"{mean(item.wired_auroc for item in own):.3f}",
            f"{mean(item.forwards for item in own):.0f}",
            f"{mean(item.backwards for item in own):.0f}",
            f"{worst.program} {worst.auroc:.2f}",
        ]
        rows.append(row)
    columns = (
        "method",
        "AUROC",
        "AP",
        "heads",
        "AP",
        "clear",
        "by weights",
        "forwards",
        "backwards",
        "worst",
    )
    programs = len({ranking.program for ranking in rankings})
    show(f"Edges, then heads: means over {programs} programs.", columns, rows)
    names = list(dict.fromkeys(ranking.program for ranking in rankings))
    cells = {(item.program, item.method): item for item in rankings if item.level == "edge"}
    rows = [
        [
            name,
            f"{cells[name, methods[0]].true} of {cells[name, methods[0]].all:,}",
            *(f"{cells[name, method].auroc:.3f}" for method in methods),
        ]
        for name in names
    ]
    show("AUROC of edges by program.", ("program", "true edges", *methods), rows)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", nargs="*", help="names of library programs; all by default")
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--pairs", type=int, default=32)
    parser.add_argument(
        "--steps",
        type=int,
        nargs="*",
        default=(5, 100),
        help="of eap-ig; other methods take the first",
    )
    parser.add_argument("--idle-heads", type=int, default=1)
    parser.add_argument("--noise-heads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path, help="a JSON file for all rankings")
    add_store(parser)
    options = parser.parse_args()
    if options.store and (options.programs or tuple(options.methods) != METHODS):
        parser.error("--store: figures of a part are not stored, drop --programs and --methods")
    introduce("cpu", PEER, "tracr-pypi")
    say(peer())
    rankings = list[Ranking]()
    for entry in library_programs():
        if options.programs and entry.name not in options.programs:
            continue
        known = compile_rasp(
            entry.program,
            entry.vocabulary,
            entry.max_length,
            causal=entry.causal,
            idle_heads=options.idle_heads,
            noise_heads=options.noise_heads,
            seed=options.seed,
        )
        inputs = known.draw(100)
        say(f"{entry.name}: {known.wrong(inputs)} of {sum(map(len, inputs))} outputs wrong")
        pairs = known.pairs(options.pairs, options.seed)
        for method in options.methods:
            for steps in options.steps if method == "eap-ig" else options.steps[:1]:
                for level in LEVELS:
                    ranking = rank(entry.name, known, pairs, method, level, steps)
                    rankings += [] if ranking is None else [ranking]
    store(options.store, "circuits", "cpu", report(rankings), PEER, "tracr-pypi")
    if options.output is not None:
        options.output.write_text(json.dumps([asdict(item) for item in rankings], indent=1) + "\n")


if __name__ == "__main__":
    main()
