"""manyheads circuit: which edges between heads carry a task, proved by an exact evaluation."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from manyheads.cli import arguments
from manyheads.cli.options import DeviceOptions
from manyheads.errors import InputError
from manyheads.formatting import listed, plain_table, pluralise, standard_error

if TYPE_CHECKING:
    from manyheads.lens.circuit_discovery.circuit import Circuit, FaithfulnessCurve
    from manyheads.lens.circuit_discovery.graph import Edge
    from manyheads.lens.circuit_discovery.task_pairs import CircuitTask


@dataclass(frozen=True, slots=True)
class CircuitCommand:
    """Find the circuit of a task: edges between heads and MLPs, and how much of it they carry.

    For example: manyheads circuit smollm2 --task ioi -o circuit.json --picture circuit.png

    Clean and corrupted prompts differ in the answer. Every edge is scored by what the metric loses
    when it carries the corrupted run, and circuits of the strongest edges are evaluated exactly.
    The rows of FILE.jsonl have "clean", "corrupted", "answer" and "wrong".
    """

    model: arguments.AnyModel = arguments.DEFAULT_MODEL

    task: Annotated[str, arguments.metavar("{ioi,ioi-giver,greater-than,agreement,FILE.jsonl}")] = (
        "agreement"
    )
    """Names in a sentence (ioi, or ioi-giver as in MIB), years (greater-than), the number of a verb
    (agreement), or a file of pairs, FILE.jsonl."""

    method: Literal["eap", "eap-ig", "eap-ig-activations", "atp*", "relp", "exact"] = "eap-ig"
    """How to score edges: by gradients, or exactly with one run per edge."""

    level: Literal["edge", "head"] = "edge"
    """Score edges, or whole heads and MLPs."""

    pairs: Annotated[int, arguments.metavar("N")] = 32
    """How many pairs of prompts to read."""

    steps: Annotated[int, arguments.metavar("N")] = 5
    """Gradients along the line from corrupted to clean, for eap-ig."""

    faithfulness: float = 0.9
    """How much of the metric the minimal circuit must keep."""

    edges: Annotated[int, arguments.metavar("N")] = 12
    """How many edges to print."""

    skip_unaligned: arguments.Flag = False
    """Leave out the pairs of a file whose texts have different numbers of tokens."""

    out: arguments.OutFile = None
    """A .json or .safetensors file to save the circuit to, for manyheads.lens and report."""

    picture: arguments.PngFile = None
    """A picture of the circuit, .png or .svg."""

    page: Annotated[Path | None, arguments.metavar("HTML")] = None
    """An HTML file to explore the circuit in; it opens without a network."""

    seed: int = 0
    """The seed of the prompts."""

    compute: DeviceOptions = DeviceOptions()

    def run(self) -> None:
        """Score the edges, evaluate circuits, print and save."""
        self._check()
        from manyheads.lens import circuit_task
        from manyheads.lens.circuit_discovery.circuit import circuit

        model = self.compute.open(self.model)
        task = circuit_task(model, self.task, self.pairs, self.seed, skip=self.skip_unaligned)
        scored = circuit(
            *(model, task.clean, task.corrupted, task.metric, self.method, self.level),
            steps=self.steps,
        )
        curve = scored.faithfulness()
        minimal = scored.minimal(self.faithfulness)
        _print(self, task, scored, curve, minimal)
        self._save(task, scored, curve)

    def _check(self) -> None:
        """Refuse what cannot be done before a model is loaded."""
        arguments.check_minimum("--pairs", self.pairs, 1)
        arguments.check_minimum("--edges", self.edges, 1)
        arguments.check_minimum("--steps", self.steps, 1)
        if not 0 < self.faithfulness <= 1:
            raise InputError(f"--faithfulness must be in (0, 1], got {self.faithfulness:g}")
        if self.out is not None and self.out.suffix not in (".json", ".safetensors"):
            raise InputError(f"--out must end in .json or .safetensors, got {self.out}")
        if self.out is not None:
            from manyheads.atomic_write import check_writable

            check_writable(self.out)
        arguments.check_picture(self.picture, (".png", ".svg"))
        if self.page is not None:
            from manyheads.report import check_report_path

            check_report_path(self.page)
        if self.task.endswith(".jsonl") and not Path(self.task).is_file():
            raise InputError(f"--task {self.task} does not exist", "name a file of pairs")

    def _save(self, task: "CircuitTask", scored: "Circuit", curve: "FaithfulnessCurve") -> None:
        from manyheads.cli.commands.report import name_of_model

        about = {
            "counts": [*curve.counts],
            "faithfulness": curve.faithfulness.tolist(),
            "errors": curve.errors.tolist(),
            "cpr": curve.cpr,
            "cmd": curve.cmd,
        }
        name = name_of_model(self.model)
        more = {"model": name, "task": task.name, "curve": about}
        scored = replace(scored, metadata=scored.metadata | more)
        if self.out is not None:
            scored.save(self.out)
            print(f"saved the circuit to {self.out}")
        if self.picture is not None:
            from manyheads.pictures import draw_circuit

            ranked = scored.ranked()
            draw_circuit(
                [(edge.writer, edge.reader, score) for edge, score, _ in ranked],
                self.picture,
                title=f"{name}: {task.name}",
                subtitle=f"{self.method}, {pluralise(len(task), 'pair')}; CPR {curve.cpr:.2f}, "
                f"CMD {curve.cmd:.2f}",
            )
            print(f"saved the picture to {self.picture}")
        if self.page is not None:
            from manyheads.report import render_circuit, write_report

            origin = f"Made by manyheads circuit on {time.strftime('%d %B %Y')}."
            write_report(render_circuit(scored, name=name, origin=origin), self.page)
            print(f"saved the page to {self.page}")


def _print(
    command: CircuitCommand,
    task: "CircuitTask",
    scored: "Circuit",
    curve: "FaithfulnessCurve",
    minimal: "tuple[Edge, ...]",
) -> None:
    from manyheads.console import TerminalPage

    page, ranked = TerminalPage(), scored.ranked()
    noun = "edge" if scored.level == "edge" else "part"
    page.title(f"{command.model}: {task.name}")
    page.paragraph(
        f"The {scored.metric} of {pluralise(len(task), 'pair')} is {scored.clean:.4g} in the clean "
        f"runs and {scored.corrupted:.4g} in the corrupted ones, for example "
        f"“{task.clean[0]}” against “{task.corrupted[0]}”."
    )
    if task.skipped:
        page.paragraph(f"Left out: {pluralise(task.skipped, 'pair')} that did not align.")
    if scored.warning:
        page.paragraph(f"Warning: {scored.warning}.", "bold red")
    page.heading(f"The strongest of {len(ranked):,} {noun}s", right=scored.method)
    rows = [
        (
            str(edge) if scored.level == "edge" else edge.writer,
            f"{score:+.4f}",
            standard_error(error),
        )
        for edge, score, error in ranked[: command.edges]
    ]
    page.show(plain_table([noun], ["score", "±"], rows))
    page.heading("Faithfulness", "(circuit - corrupted) / (clean - corrupted)")
    points = zip(
        curve.fractions,
        curve.counts,
        curve.faithfulness,
        curve.errors,
        curve.complements,
        strict=True,
    )
    table = [
        (
            f"{100 * fraction:g} %",
            f"{count:,}",
            f"{value:z.3f}",
            standard_error(error),
            f"{rest:z.3f}",
        )
        for fraction, count, value, error, rest in points
    ]
    page.show(plain_table(["kept"], [f"{noun}s", "faithfulness", "±", "without them"], table))
    page.paragraph(
        f"CPR {curve.cpr:.3f} (the area under it), CMD {curve.cmd:.3f} (the area between it and 1)."
    )
    page.heading("The minimal circuit")
    names = [str(edge) if scored.level == "edge" else edge.writer for edge in minimal]
    page.paragraph(
        f"{pluralise(len(minimal), noun)} of the strongest keep {command.faithfulness:g} of the "
        f"metric: {listed(names, command.edges)}."
    )
