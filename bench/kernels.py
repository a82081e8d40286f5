"""Time every kernel against others and print the ratios: `python bench/kernels.py`.

Runs the CUDA kernels if there is a device, otherwise those of the CPU. Outputs are compared before
anything is timed, and a disagreement ends the run.
"""

import argparse
import os

# Threads that spin while they wait would count as work in the seconds of the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import kernels_cpu
import kernels_cuda
import torch

__all__ = ["main"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each entrant is timed")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="instead of the fastest here")
    parser.add_argument("--quick", action="store_true", help="shorter sequences, for a first look")
    arguments = parser.parse_args()
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here, use --device cpu")
    part = kernels_cuda if device == "cuda" else kernels_cpu
    part.run(rounds=max(1, arguments.rounds), quick=arguments.quick)


if __name__ == "__main__":
    main()
