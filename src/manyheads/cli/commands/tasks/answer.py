"""manyheads answer: a question answered from the documents of an index."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from manyheads.cli import arguments
from manyheads.cli.commands.tasks import search
from manyheads.cli.options import ComputeOptions
from manyheads.errors import InputError

if TYPE_CHECKING:
    from manyheads.tasks.search.answering import Answer


@dataclass(frozen=True, slots=True)
class AnswerCommand:
    """Answer a question from the documents of an index, with numbered sources.

    For example: manyheads answer notes.index "Which heads are pruned first?" --reader smollm2
    """

    address: search.IndexAddress

    question: Annotated[search.OptionalQuery, arguments.metavar("[QUESTION]")] = None
    """The question; without it, questions are asked for, or read from a pipe line by line."""

    reader: Annotated[str, arguments.metavar("MODEL", "(required)")] = ""
    """The model that answers: a folder, a bundled model, smollm2, or a model of the hub."""

    top_k: int = 5
    """Give the reader this many passages."""

    max_new_tokens: int = 128
    """The answer has at most this many tokens."""

    temperature: arguments.OptionalFloat = None
    """Sample at this temperature; without it the most likely token is chosen."""

    seed: arguments.OptionalInt = None
    """The seed of sampling; without it every run samples other tokens."""

    json: arguments.JsonFile = None
    """A JSON file for all answers; - prints them instead of the page, one line per question."""

    index: search.IndexOptions = search.IndexOptions()
    compute: ComputeOptions = ComputeOptions()

    def run(self) -> None:
        """Print the answer and the passages that it came from."""
        from manyheads.decoding.generation_config import GenerationConfig
        from manyheads.decoding.sampling import Greedy, Sample
        from manyheads.tasks.search.answering import answer

        if not self.reader:
            remedy = "name a decoder, such as smollm2"
            raise InputError("manyheads answer needs --reader MODEL", remedy)
        arguments.check_minimum("--top-k", self.top_k, 1)
        arguments.check_minimum("--max-new-tokens", self.max_new_tokens, 1)
        arguments.check_not_empty("QUESTION", self.question)
        arguments.check_temperature(self.temperature)
        config = GenerationConfig(
            max_new_tokens=self.max_new_tokens,
            sampling=Greedy() if self.temperature is None else Sample(temperature=self.temperature),
            seed=self.seed,
        )
        results = search.JsonResults(self.json)
        index = self.compute.open_index(self.address, self.index.model)
        reader = self.compute.open(self.reader)
        for question in search.read_questions() if self.question is None else (self.question,):
            where = self.index.where
            result = answer(index, question, reader, top_k=self.top_k, where=where, config=config)
            if result.truncation:
                print(f"note: {result.truncation}", file=sys.stderr, flush=True)
            results.add(result.as_dict())
            if self.question is None:
                search.print_question(question)
            print_answer(result)
        results.write()


def print_answer(answer: "Answer") -> None:
    """The answer, then the passages that it came from."""
    from manyheads.console import TerminalPage, visible
    from manyheads.tasks.search.answering import UNSUPPORTED

    page = TerminalPage()
    for line in answer.text.splitlines() or ["(The reader wrote nothing.)"]:
        page.paragraph(visible(line))
    page.blank_line()
    for source in answer.cited:
        hit = source.hit
        where = f" ({hit.source})" if hit.source and hit.source != (hit.title or hit.id) else ""
        line = f"[{source.number}] {hit.title or hit.id}{where}"
        page.paragraph(visible(line))
    if answer.text and not answer.cited:
        page.paragraph(UNSUPPORTED, style="bold")
    if answer.finish_reason == "length":
        page.paragraph("The answer was cut off by --max-new-tokens.", style="dim")
    sys.stdout.flush()
