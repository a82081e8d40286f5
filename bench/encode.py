"""Time texts to vectors against other libraries, with real MiniLM: `python bench/encode.py`.

Runs on CUDA if there is a device, otherwise on the CPU. Vectors are compared before anything is
timed, and a disagreement ends the run.
"""

import argparse
import os
from importlib import import_module
from importlib.util import find_spec

# Threads that spin while they wait would count as work in the seconds of the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from stored_results import add_store, introduce, store

__all__ = ["main"]

PEERS = {"cpu": ("sentence-transformers", "onnxruntime"), "cuda": ("transformers",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each entrant is timed")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the fastest here")
    parser.add_argument("--full", action="store_true", help="all texts and lengths, not a part")
    add_store(parser)
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here, use --device cpu")
    if arguments.store and not arguments.full:
        parser.error("--store: figures of a part of the work are not stored, add --full")
    part = f"encode_{device}"
    if find_spec(part) is None:
        parser.error(f"--device {device}: there is no bench/{part}.py yet")
    introduce(device, *PEERS[device])
    figures = import_module(part).run(rounds=max(1, arguments.rounds), quick=not arguments.full)
    store(arguments.store, "encode", device, figures, *PEERS[device])


if __name__ == "__main__":
    main()
