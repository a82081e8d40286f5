"""How close each kernel came to the reference: kept by each share of the tests, shown for all.

Run as `python tests/gpu/ledger.py FILE ...` it prints one table for the files that shares wrote.
"""

import json
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

KERNELS = ("fused", "window", "varlen", "flex", "batched", "reference")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class Closeness:
    """The worst of some cases, as a share of the length of what the reference gives."""

    cases: int = 0
    output: float = 0.0
    gradient: float = 0.0

    def add(self, output: float, gradient: float) -> None:
        self.cases += 1
        self.output = max(self.output, output)
        self.gradient = max(self.gradient, gradient)

    def join(self, cases: int, output: float, gradient: float) -> None:
        self.add(output, gradient)
        self.cases += cases - 1

    def __str__(self) -> str:
        gradient = f"{self.gradient:.0e}" if self.gradient else "-"
        return f"{self.output:.0e} {gradient} ({self.cases})"


@dataclass
class Ledger:
    """How close each kernel came, and what each would not do."""

    closeness: dict[tuple[str, str, str], Closeness] = field(
        default_factory=lambda: defaultdict(Closeness)
    )
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        rows = sorted(
            {(kernel, mask) for kernel, mask, _ in self.closeness},
            key=lambda row: (KERNELS.index(row[0]), row[1]),
        )
        lines = [f"{'kernel':<10}{'mask':<14}" + "".join(f"{dtype:<22}" for dtype in DTYPES)]
        for kernel, mask in rows:
            result = (self.closeness.get((kernel, mask, dtype)) for dtype in DTYPES)
            cells = "".join(f"{one or '-'!s:<22}" for one in result)
            lines.append(f"{kernel:<10}{mask:<14}{cells}")
        for (kernel, reason), cases in sorted(self.refusals.items()):
            lines.append(f"{kernel} refused {cases} cases: {reason}"[:110])
        return lines

    def write(self, file: Path) -> None:
        closeness = [
            [*place, one.cases, one.output, one.gradient] for place, one in self.closeness.items()
        ]
        refusals = [[*place, cases] for place, cases in self.refusals.items()]
        file.write_text(json.dumps({"closeness": closeness, "refusals": refusals}))

    def read(self, file: Path) -> None:
        """Add what another share has written."""
        result = json.loads(file.read_text())
        for kernel, mask, dtype, *worst in result["closeness"]:
            self.closeness[kernel, mask, dtype].join(*worst)
        for kernel, reason, cases in result["refusals"]:
            self.refusals[kernel, reason] += cases


if __name__ == "__main__":
    together = Ledger()
    for name in sys.argv[1:]:
        together.read(Path(name))
    print("worst output and gradient error against reference (cases)")
    print("\n".join(together.lines()))
