"""Which damping of GPTQ suits four-bit weights: `python bench/damping_cpu.py`.

It is chosen by the perplexity of SmolLM2 on the passages that the lens brings, and the loss is
reported on the texts of `measure_quality`, which had no part in the choice. Neither are among the
texts that weights are rounded by.
"""

import argparse
import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from side_by_side import say, show
from stored_results import add_store, introduce, store

from manyheads import load
from manyheads.lens.inputs.synthetic import passages
from manyheads.quantization import error_compensation, measure_quality

__all__ = ["main"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--values", type=float, nargs="+", default=[0.01, 0.02, 0.05, 0.1, 0.2])
    add_store(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    introduce("cpu")
    original = load("smollm2")
    texts = passages()
    rows: list[dict[str, Any]] = []
    for value in arguments.values:
        error_compensation.DAMPING = value
        model = load("smollm2", weights="int4")
        chosen, reported = measure_quality(model, original, texts), measure_quality(model, original)
        assert chosen.change is not None
        assert reported.change is not None
        rows.append(
            {
                "damping": value,
                "perplexity, by which it is chosen": round(chosen.change, 4),
                "perplexity, reported": round(reported.change, 4),
                "cosine, reported": round(reported.cosine, 4),
            }
        )
    table = [[str(value) for value in row.values()] for row in rows]
    show(f"four bits by GPTQ; chosen on {chosen.tokens} tokens", list(rows[0]), table)
    best = min(rows, key=lambda row: float(row["perplexity, by which it is chosen"]))
    say(f"the least on the text for the choice: {best['damping']:g}")
    figures: dict[str, Any] = {
        "rows": rows,
        "tokens of the choice": chosen.tokens,
        "tokens": reported.tokens,
    }
    store(arguments.store, "damping", "cpu", figures)


if __name__ == "__main__":
    main()
