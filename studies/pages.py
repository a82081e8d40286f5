"""The page of a study, made from its result, and the page of all verdicts."""

from collections.abc import Iterable
from pathlib import Path

from manyheads.atomic_write import atomic_write
from manyheads.formatting import pluralise
from studies.study import Finding, Result, Study, Verdict, markdown_table

MARKS = {
    Verdict.HOLDS: "✔ holds",
    Verdict.WEAKLY: "~ weakly",
    Verdict.NOT_HERE: "· not at this size",
    Verdict.CONTRADICTED: "✘ contradicted",
    Verdict.OPEN: "? not measured",
}


def write_page(study: Study, result: Result, folder: Path) -> None:
    """The picture and the page of a study in a folder."""
    study.draw(result, folder / "plot.png")
    with atomic_write(folder / "README.md") as file:
        file.write_text(render(study, result), encoding="utf-8")


def render(study: Study, result: Result) -> str:
    """The page as Markdown: every number comes from the result."""
    level = "" if result.level == "full" else f" --{result.level}"
    parts = [
        f"# {study.title}",
        study.question,
        "![what was measured](plot.png)",
        "## The claims, and what became of them here",
        *(
            f"**{_claim(finding)}** ({finding.claim.source})\n\n"
            f"{MARKS[finding.verdict]}: {finding.measured}"
            for finding in study.findings(result)
        ),
        "## Measured",
        study.table(result),
    ]
    if study.limits:
        parts += ["## Limits", "\n".join(f"- {limit}" for limit in study.limits)]
    settings = ", ".join(f"{key} {_short(value)}" for key, value in result.settings.items())
    runs = sum(len(seeds) for seeds in result.arms.values())
    seconds = sum(result.seconds.values())
    parts += [
        "## Run it again",
        f"    manyheads study {study.name}{level}",
        f"{pluralise(runs, 'run')}, {_duration(seconds)} in all if one follows the other, on: "
        f"{result.machine}. Settings: {settings}.",
    ]
    return "\n\n".join(parts) + "\n"


def summary(study: Study, result: Result) -> str:
    """A few lines for the terminal."""
    lines = [study.title]
    for finding in study.findings(result):
        lines += [f"  {MARKS[finding.verdict]}: {_claim(finding)}", f"    {finding.measured}"]
    return "\n".join(lines)


def write_verdicts(studies: Iterable[tuple[Study, Result]], source: Path, docs: Path) -> None:
    """The page of all verdicts, with the pictures that lie in the folders of the studies."""
    studies = list(studies)
    for study, _ in studies:
        with atomic_write(docs / "images" / "studies" / f"{study.name}.png") as file:
            file.write_bytes((source / study.name / "plot.png").read_bytes())
    with atomic_write(docs / "studies.md") as file:
        file.write_text(verdict_page(studies), encoding="utf-8")


def verdict_page(studies: Iterable[tuple[Study, Result]]) -> str:
    """All claims with their verdicts, and one plot for each study."""
    studies = list(studies)
    rows = [
        [
            f"[{study.name}](#{study.name})" if index == 0 else "",
            _claim(finding),
            MARKS[finding.verdict],
        ]
        for study, result in studies
        for index, finding in enumerate(study.findings(result))
    ]
    parts = [
        "# What holds at a size anyone can rerun",
        "Published claims about attention, each measured again by one command: `manyheads study "
        "NAME`, or with `--quick` in minutes on two cores. Our models are small, so a claim that "
        "does not show here may still be true of large ones. `manyheads study` lists all studies.",
        markdown_table(["study", "claim", "here"], rows) if rows else "No study has a result yet.",
    ]
    for study, result in studies:
        parts += [
            f"## {study.name}",
            f"{study.title}. {study.question}",
            f"![{study.title}](images/studies/{study.name}.png)",
            "\n".join(
                f"- {_claim(finding)} ({finding.claim.source}) {MARKS[finding.verdict]}: "
                f"{finding.measured}"
                for finding in study.findings(result)
            ),
            f"Measured on: {result.machine}. The whole page: `studies/{study.name}/README.md`.",
        ]
    return "\n\n".join(parts) + "\n"


def _claim(finding: Finding) -> str:
    """A claim without the dot at its end, which not all have."""
    return finding.claim.text.removesuffix(".")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} seconds" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _short(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_short, value))
    return f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
