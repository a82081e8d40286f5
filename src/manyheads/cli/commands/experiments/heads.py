"""manyheads heads: the heads that a task depends on, checked on halves that did not choose them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from manyheads.cli import arguments
from manyheads.cli.options import DeviceOptions
from manyheads.errors import InputError
from manyheads.formatting import listed, percent

if TYPE_CHECKING:
    from manyheads.lens.task_heads.task_heads import TaskHeads

# Heads in the table, besides those that were chosen.
MORE_ROWS = 5


@dataclass(frozen=True, slots=True)
class HeadsCommand:
    """Find the heads of a task by interventions: function-vector heads or retrieval heads.

    For example: manyheads heads smollm2 --kind retrieval --json retrieval.json

    Function-vector heads carry what few-shot examples ask for, retrieval heads read what is copied
    from a text. One half of the tasks or texts chooses heads, the other half says what happens
    without them, beside induction heads and as many random heads.
    """

    model: arguments.AnyModel = arguments.DEFAULT_MODEL

    kind: Literal["function-vector", "retrieval"] = "function-vector"
    """What to look for."""

    prompts: arguments.OptionalInt = None
    """Prompts of each task, or needles in all; by default 8 and 16."""

    shots: Annotated[int, arguments.metavar("N")] = 6
    """Examples in a few-shot prompt."""

    words: Annotated[int, arguments.metavar("N")] = 60
    """At most so many words on either side of a needle, at least a third of them."""

    seed: int = 0
    """The seed of prompts and needles."""

    json: arguments.ResultFile = None

    compute: DeviceOptions = DeviceOptions()

    def run(self) -> int:
        """Print the heads, and what they do on held-out halves."""
        arguments.check_json(self.json)
        if self.words < 3:
            raise InputError(f"--words must be at least 3, got {self.words}")
        model = self.compute.open(self.model)
        result = self._find(model)
        _print(self.model, result)
        arguments.save_result(self.json, result)
        return 0

    def _find(self, model: Any) -> "TaskHeads":
        from manyheads import lens

        if self.kind == "retrieval":
            words = (self.words // 3, self.words)
            count = 16 if self.prompts is None else self.prompts
            needles = lens.retrieval_needles(model, count, words=words, seed=self.seed)
            return lens.find_retrieval_heads(model, needles, seed=self.seed)
        count = 8 if self.prompts is None else self.prompts
        prompts = lens.few_shot_prompts(model, prompts=count, shots=self.shots, seed=self.seed)
        return lens.find_function_vector_heads(model, prompts, seed=self.seed)


def _print(name: str, result: "TaskHeads") -> None:
    from manyheads.console import TerminalPage

    page, count = TerminalPage(), len(result.addresses)
    page.title(name)
    share = f"{len(result.heads)} of {count} heads, {percent(len(result.heads) / count)}"
    page.paragraph(f"{result.kind.capitalize()}: {share}.")
    if result.problem:
        page.paragraph(f"None: {result.problem}.")
    page.heading("Heads")
    table = result.table(by=result.names[0], max_rows=len(result.heads) + MORE_ROWS)
    # The caption is about Python.
    table.title = table.caption = None
    page.show(table)
    if result.held_out:
        page.heading("Held-out halves")
        page.paragraph(f"The {result.metadata['measure']}.")
        page.show(result.held_out_table())
    page.heading("Induction heads")
    overlap = result.overlap
    page.paragraph(
        f"{overlap.both} of {overlap.induction} induction heads are among them, "
        f"{overlap.by_chance:.1f} by chance; the rank correlation of both scores over all heads is "
        f"{overlap.rank_correlation:.2f}."
    )
    if result.heads and result.induction_heads:
        page.paragraph(
            f"Mean depth (0 first layer, 1 last): {overlap.depth:.2f}, of induction heads "
            f"{overlap.induction_depth:.2f}."
        )
    if missing := result.metadata.get("missing"):
        reasons = [f"{task} ({why})" for task, why in missing.items()]
        page.paragraph(f"Tasks left out: {listed(reasons, len(reasons))}.", "dim")
