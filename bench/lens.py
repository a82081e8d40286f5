"""What looking costs beside the plain forward: `python bench/lens.py`.

On the CPU: all statistics of GPT-2 small's 144 heads at 2,048 tokens, beside a plain forward,
beside keeping all patterns, and beside TransformerLens where it is installed.
"""

import argparse
import os

# Threads that spin while they wait would count as work in the seconds of the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import lens_cpu

__all__ = ["main"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each entrant is timed")
    parser.add_argument("--quick", action="store_true", help="a shorter text, for a first look")
    arguments = parser.parse_args()
    lens_cpu.run(rounds=max(1, arguments.rounds), quick=arguments.quick)


if __name__ == "__main__":
    main()
