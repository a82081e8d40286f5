"""Time the statistics of heads against a plain forward: `python bench/lens.py`.

On the CPU: all statistics of the 144 heads of GPT-2 small at 2,048 tokens, against a plain forward,
against keeping all patterns, and against TransformerLens if it is installed. On CUDA: 32 layers of
32 heads of 128 at 131,072 tokens; all layers take the same time, so `--layers 4` is enough.
"""

import argparse
import os

# Threads that spin while they wait would count as work in the seconds of the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import lens_cpu
import lens_cuda
import torch
from stored_results import add_store, introduce, store

__all__ = ["main"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each entrant is timed")
    parser.add_argument("--quick", action="store_true", help="a shorter text, for a first look")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the fastest here")
    parser.add_argument("--layers", type=int, default=32, help="layers of the model on CUDA")
    parser.add_argument("--tokens", type=int, default=131_072, help="of the text on CUDA")
    add_store(parser)
    arguments = parser.parse_args()
    rounds, quick = max(1, arguments.rounds), arguments.quick
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here, use --device cpu")
    if arguments.store and quick:
        parser.error("--store: figures of a part of the work are not stored, drop --quick")
    peers = ("transformer-lens",) if device == "cpu" else ()
    introduce(device, *peers)
    if device == "cpu":
        figures = lens_cpu.run(rounds=rounds, quick=quick)
    else:
        tokens = arguments.tokens // 8 if quick else arguments.tokens
        figures = lens_cuda.run(rounds=rounds, layers=arguments.layers, tokens=tokens)
    store(arguments.store, "lens", device, figures, *peers)


if __name__ == "__main__":
    main()
