"""Time a training step against transformers.

python bench/train.py [--part gpt2|masked|gates] [--rounds 8]     with CUDA
python bench/train.py [--rounds 5]                                otherwise: packed against padded
"""

import argparse

import torch
import train_cpu
import train_cuda


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--part", choices=train_cuda.PARTS, action="append")
    parser.add_argument("--rounds", type=int, default=8)
    asked = parser.parse_args()
    if torch.cuda.is_available():
        for part in asked.part or train_cuda.PARTS:
            train_cuda.run(part, asked.rounds)
    else:
        train_cpu.run(asked.rounds)


if __name__ == "__main__":
    main()
