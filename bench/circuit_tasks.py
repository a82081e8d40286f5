"""Circuits of real models by MIB's protocol: `python bench/circuit_tasks.py --models smollm2`.

Edges are scored on some pairs of a task, and circuits of the strongest .1 to 100 % of them are
evaluated exactly on other pairs, everything else corrupted (arXiv 2504.13151). CPR is the area
under their faithfulness, CMD the area between it and 1. "random" is an order drawn at random.
Published values are of other models on other prompts: they say what is usual, not what is better.
"""

import argparse
import gc
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from stored_results import describe, introduce

from manyheads import lens, load
from manyheads.devices import resolve_device

__all__ = ["main"]

TASKS = ("ioi-giver", "greater-than", "agreement")
METHODS = ("random", "eap", "eap-ig", "eap-ig-activations", "atp*", "relp", "exact")
# MIB, IOI, CPR at the level of edges.
PUBLISHED = (
    ("GPT-2 small", "random", 0.25),
    ("GPT-2 small", "node attribution, IG", 0.76),
    ("GPT-2 small", "UGS", 0.97),
    ("GPT-2 small", "EAP-IG, inputs", 1.85),
)


def measure(model: Any, name: str, method: Any, pairs: int) -> dict[str, float]:
    """CPR and CMD of a method on pairs that it has not scored."""
    task, others = (lens.circuit_task(model, name, pairs, seed) for seed in (0, 1))
    started, used = time.monotonic(), time.process_time()
    scored = lens.circuit(
        *(model, task.clean, task.corrupted, task.metric),
        "eap" if method == "random" else method,
        progress=False,
    )
    seconds, core_seconds = time.monotonic() - started, time.process_time() - used
    if method == "random":
        drawn = np.random.default_rng(0).normal(size=scored.scores.shape)
        scored = replace(scored, scores=np.where(np.isnan(scored.scores), np.nan, drawn))
    bound = scored.bind(model, others.clean, others.corrupted, others.metric)
    started = time.monotonic()
    curve = bound.faithfulness(progress=False)
    return {
        "clean": scored.clean,
        "corrupted": scored.corrupted,
        "CPR": curve.cpr,
        "CMD": curve.cmd,
        "1 %": float(curve.faithfulness[curve.fractions.index(0.01)]),
        "10 %": float(curve.faithfulness[curve.fractions.index(0.1)]),
        "seconds": seconds,
        "core seconds": core_seconds,
        "evaluation seconds": time.monotonic() - started,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma"])
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--out", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    device = resolve_device("auto")
    introduce(device.type)
    head = {"bench": "circuit-tasks", **describe(device.type)}
    results: dict[str, Any] = {**head, "pairs": arguments.pairs, "rows": []}
    columns = ("CPR", "CMD", "1 %", "10 %", "seconds", "core seconds", "evaluation seconds")
    print(f"| model | task | method | {' | '.join(columns)} |")
    print("|" + "---|" * (len(columns) + 3))
    for name in arguments.models:
        model = load(name, device=device)
        for task in arguments.tasks:
            for method in arguments.methods:
                row = measure(model, task, method, arguments.pairs)
                values = " | ".join(f"{row[column]:.3g}" for column in columns)
                print(f"| {name} | {task} | {method} | {values} |", flush=True)
                results["rows"].append({"model": name, "task": task, "method": method, **row})
                if arguments.out is not None:
                    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
                gc.collect()
    for model_name, method, cpr in PUBLISHED:
        print(f"| {model_name} (published by MIB) | IOI | {method} | {cpr} |" + " |" * 6)


if __name__ == "__main__":
    main()
