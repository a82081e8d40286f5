"""manyheads answer: a question answered from the documents of an index."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from manyheads.cli.arguments import DeviceName, DtypeName, JsonFile, check_minimum, open_model
from manyheads.cli.commands.tasks.search import (
    Condition,
    IndexAddress,
    IndexModel,
    JsonResults,
    OptionalQuery,
    open_index,
    print_question,
    read_questions,
)
from manyheads.errors import InputError

if TYPE_CHECKING:
    from manyheads.decoding.generation_config import GenerationConfig
    from manyheads.tasks.search.answering import Answer
    from manyheads.tasks.search.index import Index


@dataclass(frozen=True, slots=True)
class AnswerCommand:
    """Answer a question from the documents of an index, with numbered sources.

    For example: manyheads answer notes.index "Which heads are pruned first?" --reader smollm2
    """

    index: IndexAddress
    """The folder of an index that manyheads index wrote, or its address in an object store."""

    question: Annotated[
        OptionalQuery, tyro.conf.arg(metavar="[QUESTION]", help_behavior_hint="")
    ] = None
    """The question; without it, questions are asked for, or read from a pipe line by line."""

    reader: Annotated[str, tyro.conf.arg(metavar="MODEL", help_behavior_hint="(required)")] = ""
    """The model that answers: a folder, a bundled model, smollm2, or a model of the hub."""

    top_k: int = 5
    """Give the reader this many passages."""

    where: Condition = None
    """Only documents whose metadata fits, such as "year > 1960 and author = 'Ann'"."""

    max_new_tokens: int = 128
    """The answer has at most this many tokens."""

    temperature: Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")] = (
        None
    )
    """Sample at this temperature; without it the most likely token is chosen."""

    seed: Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")] = None
    """The seed of sampling; without it every run samples other tokens."""

    json: JsonFile = None
    """A JSON file for all answers; - prints them instead of the page, one line per question."""

    model: IndexModel = None
    """The model to encode questions with, if the one that the index was made with has moved."""

    dtype: DtypeName = "auto"
    """The dtype for the reader to compute in; by default that of the weights."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    def run(self) -> int:
        """Print the answer and the passages that it was written from."""
        if not self.reader:
            raise InputError(
                "manyheads answer needs --reader MODEL", "name a decoder, such as smollm2"
            )
        check_minimum("--top-k", self.top_k, 1)
        check_minimum("--max-new-tokens", self.max_new_tokens, 1)
        if self.question is not None and not self.question.strip():
            raise InputError(f"QUESTION {self.question!r} is empty", "ask something")
        config = self._config()
        results = JsonResults(self.json)
        index = open_index(self.index, self.model, self.device)
        reader = open_model(self.reader, self.device, self.dtype)
        for question in read_questions() if self.question is None else (self.question,):
            found = self._answer(index, question, reader, config)
            results.add(found.as_dict())
            if results.printed:
                continue
            if self.question is None:
                print_question(question)
            print_answer(found)
        results.write()
        return 0

    def _config(self) -> "GenerationConfig":
        from manyheads.decoding.generation_config import GenerationConfig
        from manyheads.decoding.sampling import Greedy, Sample

        if self.temperature is not None and self.temperature <= 0:
            raise InputError(
                f"--temperature must be above 0, got {self.temperature:g}",
                "leave it out to choose the most likely token",
            )
        return GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            sampling=Greedy() if self.temperature is None else Sample(temperature=self.temperature),
            seed=self.seed,
        )

    def _answer(
        self, index: "Index", question: str, reader: Any, config: "GenerationConfig"
    ) -> "Answer":
        from manyheads.tasks.search.answering import answer

        found = answer(index, question, reader, top_k=self.top_k, where=self.where, config=config)
        if found.truncation:
            print(f"note: {found.truncation}", file=sys.stderr, flush=True)
        return found


def print_answer(found: "Answer") -> None:
    """The answer, then its sources, those that it names in bold."""
    from manyheads.console import TerminalPage, visible

    page = TerminalPage()
    for line in found.text.splitlines() or ["(The reader wrote nothing.)"]:
        page.paragraph(visible(line))
    page.blank_line()
    for source in found.sources:
        hit = source.hit
        where = f" ({hit.source})" if hit.source and hit.source != (hit.title or hit.id) else ""
        line = f"[{source.number}] {hit.title or hit.id}{where}"
        page.paragraph(visible(line), style="bold" if source.cited else "")
    if found.finish_reason == "length":
        page.paragraph("The answer was cut off by --max-new-tokens.", style="dim")
    sys.stdout.flush()
