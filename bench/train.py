"""Time a training step against transformers.

python bench/train.py [--part gpt2|masked|gates|t5|shaw] [--rounds 8]     with CUDA
python bench/train.py [--part packed|t5|shaw] [--rounds 8]        otherwise

`--store` keeps the figures of each part in a file of its own.
"""

import argparse
from functools import partial

import torch
import train_bias_cpu
import train_cpu
import train_cuda
from stored_results import add_store, introduce, store

CPU_PARTS = {"packed": train_cpu.run, "t5": train_bias_cpu.run_t5, "shaw": train_bias_cpu.run_shaw}


def main() -> None:
    parts = tuple(train_cuda.PARTS) if torch.cuda.is_available() else tuple(CPU_PARTS)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=parts, action="append")
    parser.add_argument("--rounds", type=int, default=8)
    add_store(parser)
    request = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    introduce(device, "transformers")
    for part in request.part or parts:
        run = partial(train_cuda.run, part) if device == "cuda" else CPU_PARTS[part]
        store(request.store, f"train-{part}", device, run(request.rounds), "transformers")


if __name__ == "__main__":
    main()
