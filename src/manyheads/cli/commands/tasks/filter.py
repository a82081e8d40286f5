"""manyheads filter: keep the documents of a corpus that a classifier scores well."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from manyheads.cli import arguments
from manyheads.cli.options import EngineOptions


@dataclass(frozen=True, slots=True)
class FilterCommand:
    """Keep the documents of a corpus for which a rule over a classifier's output holds.

    For example: manyheads filter corpus/ --model edu/ --keep "score >= 3" -o kept/
    or with --keep 'probability["spam"] < 0.1 and language == "en" and tokens >= 50'
    """

    corpus: Annotated[
        tuple[Path, ...], tyro.conf.Positional, arguments.metavar("CORPUS ...", "(required)")
    ]
    """Files or folders of .jsonl, .parquet and .txt, compressed or not."""

    model: Annotated[str, tyro.conf.arg(metavar="MODEL")]
    """The folder of a classifier or regression model, or a model of the hub: org/name."""

    keep: Annotated[str, tyro.conf.arg(metavar="RULE")]
    """The rule: score, label, probability, probability["CLASS"], tokens and columns, compared."""

    out: arguments.OutFolder
    """The folder for Parquet shards; a run that was interrupted continues in it."""

    text_column: Annotated[str, tyro.conf.arg(metavar="COLUMN")] = "text"
    """The column with the text."""

    separator: arguments.OptionalText = None
    """What separates documents in a .txt file, such as '\\n\\n'; otherwise it is one document."""

    prefix: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """What the new columns score, label and probability begin with."""

    max_length: arguments.OptionalInt = None
    """Read at most this many tokens of a document; by default what the model reads."""

    price_per_hour: arguments.OptionalFloat = None
    """The price of the machines per hour, to state the cost per million tokens."""

    block_rows: int = 1024
    """Documents that are scored together; an interrupted run repeats at most one such block."""

    shard_rows: int = 50_000
    """Rows per shard."""

    compute: EngineOptions = EngineOptions()

    def run(self) -> None:
        """Print how many documents were kept, how fast, and what was wrong with others."""
        arguments.check_out_folder(self.out, self.model)
        self.compute.check()
        from manyheads.encoding.filter_rule import TextRule
        from manyheads.tasks.filtering.corpus import plan
        from manyheads.tasks.filtering.corpus_filter import filter_corpus

        # A wrong rule or corpus is reported before a model is loaded.
        TextRule.parse(self.keep)
        plan(self.corpus)
        # Shells pass a line feed as two characters.
        separator = self.separator and self.separator.replace("\\n", "\n").replace("\\t", "\t")
        model = self.compute.open_for_engine(self.model)
        try:
            result = filter_corpus(
                self.corpus,
                model,
                self.out,
                keep=self.keep,
                text_column=self.text_column,
                separator=separator,
                prefix=self.prefix,
                max_length=self.max_length,
                batch_tokens=self.compute.batch_tokens,
                block_rows=self.block_rows,
                shard_rows=self.shard_rows,
                engine=self.compute.engine,
                workers=self.compute.workers,
                device=self.compute.device,
                price_per_hour=self.price_per_hour,
            )
        except KeyboardInterrupt:
            print("run the same command again to continue", file=sys.stderr)
            raise
        print(result)
