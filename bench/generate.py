"""Time generation against transformers and print the ratios: `python bench/generate.py`.

Runs on CUDA if there is a device, otherwise on the CPU. The generated tokens are compared before
anything is timed. Weights are random, and nothing is downloaded.
"""

import argparse
import os
from importlib import import_module

# Threads that spin while they wait would count as work in the seconds of the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from stored_results import add_store, introduce, store

__all__ = ["main"]

# On CUDA: batches of 1 to 128 texts, steps after long texts, and decoders of other kinds.
PARTS = ("batches", "long", "kinds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each entrant is timed")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the fastest here")
    parser.add_argument("--quick", action="store_true", help="less of it, for a first look")
    parser.add_argument(
        "--batch", type=int, help="only this batch size, on CUDA; otherwise 1 to 128"
    )
    parser.add_argument("--part", choices=PARTS, help="only this part, on CUDA; otherwise all")
    add_store(parser)
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here, use --device cpu")
    if arguments.batch is not None and (device == "cpu" or arguments.batch < 1):
        parser.error(f"--batch {arguments.batch}: on the CPU it is one text, on CUDA 1 or more")
    if arguments.part and (device == "cpu" or arguments.quick or arguments.batch):
        parser.error(f"--part {arguments.part}: only on CUDA, without --quick and --batch")
    if arguments.store and (arguments.quick or arguments.batch):
        parser.error("--store: figures of a part of the work are not stored, drop --quick, --batch")
    introduce(device, "transformers")
    rounds = max(1, arguments.rounds)
    parts = (arguments.part,) if arguments.part else PARTS
    if device == "cpu" or arguments.quick or arguments.batch:
        parts = ("batches",)
    if "batches" in parts:
        chosen = {} if arguments.batch is None else {"batches": (arguments.batch,)}
        part = import_module(f"generate_{device}")
        figures = part.run(rounds=rounds, quick=arguments.quick, **chosen)
        store(arguments.store, "generate", device, figures, "transformers")
    if "long" in parts:
        figures = import_module("generate_long_cuda").run(rounds=rounds)
        store(arguments.store, "generate-long", device, figures, "transformers")
    if "kinds" in parts:
        figures = import_module("generate_kinds_cuda").run(rounds=rounds)
        store(arguments.store, "generate-kinds", device, figures)


if __name__ == "__main__":
    main()
