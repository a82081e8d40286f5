"""manyheads study: measure published claims again."""

import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from manyheads.cli import arguments
from manyheads.cli.options import DeviceOptions
from manyheads.errors import InputError
from manyheads.formatting import alternatives, listed, plain_table, pluralise

# Of a checkout; a wheel comes without it.
CHECKOUT = Path(__file__).parents[5]


@dataclass(frozen=True, slots=True)
class StudyCommand:
    """Measure published claims about attention again, or list them with what was measured.

    For example: manyheads study gates --quick

    Without a name it lists the studies and their verdicts so far. Runs that have ended are kept:
    the same command goes on where Ctrl-C or --minutes stopped it.
    """

    study: Annotated[arguments.PositionalText, arguments.metavar("[STUDY]", "(optional)")] = ""
    """The name of a study."""

    quick: arguments.Flag = False
    """Smaller models and texts: minutes on two CPU cores; the full study wants a GPU."""

    out: arguments.OptionalOutFolder = None
    """The folder for the numbers, the plot and the page; by default study-NAME."""

    workers: int = 1
    """Processes that measure side by side."""

    minutes: arguments.OptionalFloat = None
    """Start no run after so many minutes; by default all are run."""

    json: arguments.JsonFile = None
    """A JSON file for the verdicts and all numbers; - prints it instead."""

    compute: DeviceOptions = DeviceOptions()

    def run(self) -> int:
        """Print the studies, or what one has shown; 1 if some of its runs are missing."""
        arguments.check_json(self.json)
        arguments.check_minimum("--workers", self.workers, 1)
        if self.minutes is not None and not self.minutes > 0:
            raise InputError(f"--minutes must be above 0, got {self.minutes:g}")
        if not study_names():
            raise InputError(
                f"{CHECKOUT} has no folder studies, which an installed package lacks",
                "clone the repository and run pip install -e . in it",
            )
        if not self.study:
            return self._list()
        if self.study not in study_names():
            names = alternatives(study_names())
            raise InputError(f"there is no study {self.study!r}", f"use {names}")
        return self._measure(self.out or Path(f"study-{self.study}"))

    def _list(self) -> int:
        from manyheads.console import TerminalPage

        studies = _module("run")
        shipped = {study.name: result for study, result in studies.measured_studies()}
        page, rows, values = TerminalPage(), [], []
        for study in map(studies.find_study, study_names()):
            findings = study.findings(shipped[study.name]) if study.name in shipped else []
            counts = Counter(str(finding.verdict) for finding in findings)
            verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
            rows.append((study.name, study.title, verdicts or "no result yet"))
            values.append({"study": study.name, "title": study.title, **_findings(findings)})
        page.console.print(plain_table(["study", "what it asks", "claims"], [], rows))
        page.console.print()
        print("Run one: manyheads study NAME --quick")
        arguments.write_json(self.json, values)
        return 0

    def _measure(self, folder: Path) -> int:
        from manyheads.devices import resolve_device

        device = str(resolve_device(self.compute.device, "--device"))
        arguments.check_out_folder(folder)
        studies, pages = _module("run"), _module("pages")
        run = studies.run_studies(
            {self.study: folder},
            "quick" if self.quick else "full",
            device=device,
            workers=self.workers,
            minutes=self.minutes,
        )
        study, result = studies.find_study(self.study), run.results[self.study]
        if result.arms:
            print(pages.summary(study, result))
            print(f"\nthe page: {folder / 'README.md'}, the plot: {folder / 'plot.png'}")
        if run.unmeasured:
            print(f"{pluralise(run.unmeasured, 'run')} left: the same command goes on")
        numbers = {"result": {"settings": result.settings, "arms": result.arms}}
        values = {"study": study.name, "title": study.title}
        arguments.write_json(self.json, {**values, **_findings(study.findings(result)), **numbers})
        if run.interrupted:
            raise KeyboardInterrupt
        if run.failures and not any(failure.trace for failure in run.failures):
            raise InputError(listed([str(failure) for failure in run.failures], 1))
        for failure in run.failures:
            print(f"error: {failure}\n{failure.trace}", file=sys.stderr)
        return 1 if run.failures or run.unmeasured else 0


@cache
def study_names() -> tuple[str, ...]:
    """The studies of the checkout; none if manyheads was installed without one."""
    return tuple(sorted(file.parent.name for file in CHECKOUT.glob("studies/*/study.py")))


def _module(name: str) -> Any:
    """A module of the folder `studies`, which lies outside the package."""
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return import_module(f"studies.{name}")


def _findings(findings: Any) -> dict[str, list[dict[str, str]]]:
    return {
        "findings": [
            {
                "claim": finding.claim.text,
                "source": finding.claim.source,
                "verdict": str(finding.verdict),
                "measured": finding.measured,
            }
            for finding in findings
        ]
    }
