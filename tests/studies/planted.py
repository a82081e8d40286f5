"""A study of a few numbers, for the tests of the frame."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from manyheads.errors import InputError
from studies.study import Arm, Claim, Finding, Result, Settings, Study, compare, markdown_table

CLAIM = Claim("Wide models lose less than narrow ones.", "Nobody 2026")


class Planted(Study):
    """Its arms measure at once, fail, or interrupt the run."""

    name: ClassVar[str] = "planted"
    title: ClassVar[str] = "Wide against narrow"
    question: ClassVar[str] = "Two widths over two seeds."
    full: ClassVar[Settings] = {"arms": ("narrow", "wide"), "seeds": (0, 1), "steps": 20_000}
    quick: ClassVar[Settings] = {"seeds": (0,)}
    test: ClassVar[Settings] = {"seeds": (0,), "steps": 1}
    limits: ClassVar[tuple[str, ...]] = ("It measures nothing.",)

    def arms(self, settings: Settings) -> Sequence[Arm]:
        return [
            Arm(name, seed, alone=name == "timed", device="cuda" if name == "on a GPU" else "")
            for name in settings["arms"]
            for seed in settings["seeds"]
        ]

    def run(self, arm: Arm, settings: Settings, device: str) -> dict[str, Any]:
        if arm.name == "broken":
            raise ZeroDivisionError("a fault of the study")
        if arm.name == "without data":
            raise InputError("data/numbers.gz is missing", "download it")
        if arm.name == "interrupted":
            raise KeyboardInterrupt
        loss = {"narrow": 2.0, "wide": 1.5}.get(arm.name, float("inf"))
        return {"loss": loss + arm.seed / 100, "steps": settings["steps"], "by": {"cpu": device}}

    def findings(self, result: Result) -> list[Finding]:
        difference, error = result.difference("narrow", "wide", "loss")
        measured = f"{result.text('narrow', 'loss')} and {result.text('wide', 'loss')}"
        return [Finding(CLAIM, compare(difference, error, least=0.01), measured)]

    def draw(self, result: Result, path: Path) -> None:
        if not result.runs("narrow"):
            raise ZeroDivisionError("nothing to draw")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a picture")

    def table(self, result: Result) -> str:
        return markdown_table(
            ["arm", "loss"], [[arm, result.text(arm, "loss")] for arm in result.arms]
        )
