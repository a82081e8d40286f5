"""`make fuzz`: attack manyheads with made-up damage, and count how it ends.

python -m tests.fuzz --count 10000 --seed 0
python -m tests.fuzz --only checkpoints.config --case 17 --seed 0
"""

import argparse
import sys
from collections import Counter

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

from tests.fuzz.attack import ACCEPTED, FAILED, Case, Tally, attacks, plan, run, run_case

SHOWN_FAILURES = 20


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Attack manyheads.")
    parser.add_argument("--count", type=int, default=10_000, help="about how many cases to run")
    parser.add_argument("--seed", type=int, default=0, help="other seeds give other cases")
    parser.add_argument("--only", default="", help="attacks whose name begins so")
    parser.add_argument("--case", type=int, help="run this case alone, in this process")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side")
    options = parser.parse_args()
    chosen = attacks(options.only)
    if not chosen:
        parser.error(f"no attack begins with {options.only!r}: choose from {', '.join(attacks())}")
    tally = Tally()
    if options.case is not None:
        for name, (attack, _) in chosen.items():
            tally.add(run_case(attack, Case(name, options.case, options.seed)))
    else:
        cases = plan(chosen, options.count, options.seed)
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, disable=not sys.stderr.isatty()) as bar:
            for verdict in bar.track(run(cases, options.workers), total=len(cases)):
                tally.add(verdict)
    print_table(tally)
    return 1 if tally.failures else 0


def print_table(tally: Tally) -> None:
    outcomes = (*ACCEPTED, *FAILED)
    width = max(len(name) for name in tally.counts)
    print(" " * width, *(f"{outcome:>13}" for outcome in outcomes))
    for name, counts in sorted(tally.counts.items()):
        print(f"{name:{width}}", *(f"{counts[outcome]:>13,}" for outcome in outcomes))
    total: Counter[str] = sum(tally.counts.values(), Counter())
    print(f"{f'{total.total():,} cases':{width}}", *(f"{total[each]:>13,}" for each in outcomes))
    for verdict in tally.failures[:SHOWN_FAILURES]:
        print(f"\n{verdict.outcome}: python -m tests.fuzz {verdict.case}\n{verdict.detail}")
    if len(tally.failures) > SHOWN_FAILURES:
        print(f"\n{len(tally.failures) - SHOWN_FAILURES} more failures are not shown")


if __name__ == "__main__":
    sys.exit(main())
