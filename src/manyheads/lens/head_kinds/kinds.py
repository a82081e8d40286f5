"""What kind of head each head is: a catalogue with scores, thresholds and evidence."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from manyheads.encoding.text_reader import TextReader, reads_texts
from manyheads.errors import InputError
from manyheads.lens.head_kinds.criteria import threshold_table
from manyheads.lens.head_kinds.head_tests import (
    Gathered,
    try_copying,
    try_coreference,
    try_given,
    try_images,
    try_marks,
    try_punctuation,
    try_repeats,
    try_syntax,
)
from manyheads.lens.head_kinds.labels import Kinds
from manyheads.lens.inputs.annotated import coreference_texts, read_references
from manyheads.lens.inputs.conllu import read_conllu, syntactic_texts
from manyheads.models.build import Model
from manyheads.models.vision import Vision

Step = Callable[[], None]


def kinds(
    model: Model,
    texts: Any = None,
    *,
    syntax: Path | str | None = None,
    coreference: Path | str | None = None,
    thresholds: Mapping[str, int | float] | None = None,
    sequences: int = 64,
    seed: int = 0,
    progress: bool = True,
) -> Kinds:
    """Every head with all kinds that fit it, best first, each with its score and its evidence.

    Heads are tried on texts made here from the model's own tokens: random ones said twice, words
    with brackets, quotes, numbers and stops. Where `texts` are given, as `statistics` takes them
    or as it has measured them already, they decide what goes by place: previous-token, next-token,
    self, positional, sink, punctuation and broad. `syntax` is a CoNLL-U file and `coreference` one
    with brackets around mentions and pronouns. The least scores are in `kinds.toml`, with where
    they come from; `thresholds` changes some, as {"sink": 0.5}.

    - previous-token, next-token, self, positional: more than half of the weight at one offset
    - duplicate-token, induction: on earlier copies of the token, or on what came after them; an
      induction head is told with its previous-token partner by K-composition
    - copying: the OV circuit raises the word it reads
    - sink, punctuation, broad: on the first or special tokens, on stops, on everything
    - bracket, numbering: most attended is the partner of a bracket or quote, the number before,
      with a quarter of the weight; a bracket head tells the partner from other marks by its weight
    - syntactic, coreference: most attended is the right word, more often than by a fixed choice
    - images: self, local, row, column, class-token, broad

    A head of no kind is mixed, and one that writes nothing has none. Ctrl-C ends the measuring and
    keeps what was measured.

    >>> from manyheads.models.build import build
    >>> found = kinds(build("gpt2", layers=1, width=32, heads=2, vocabulary=60, seed=0))
    >>> found.missing["bracket"]
    'the model has no tokenizer'
    """
    if sequences < 1:
        raise InputError(f"sequences={sequences} shows nothing", "use 1 or more")
    gathered = Gathered(model, threshold_table(thresholds), progress=progress)
    if isinstance(model, Vision):
        if syntax is not None or coreference is not None:
            raise InputError("images have no syntax", "leave syntax and coreference out")
        steps: list[Step] = [partial(try_images, gathered, model, texts, seed)]
    else:
        reader = reads_texts(model)
        steps = _reading(gathered, reader, texts, sequences, seed)
        steps += _asking(gathered, reader, syntax, coreference)
    for step in steps:
        try:
            step()
        except KeyboardInterrupt:
            if not gathered.findings:
                raise
            gathered.complete = False
        if not gathered.complete:
            break
    return gathered.result()


def _reading(
    gathered: Gathered, model: TextReader, texts: Any, sequences: int, seed: int
) -> list[Step]:
    """What needs no file: random tokens, texts given or made, weights, marks."""
    decides = texts is None
    steps: list[Step] = [
        partial(try_repeats, gathered, model, sequences, seed, decides=decides),
        partial(try_copying, gathered, model),
    ]
    if not decides:
        steps.insert(1, partial(try_given, gathered, texts))
    if model.tokenizer is None:
        for kind in ("punctuation", "bracket", "numbering"):
            gathered.missing[kind] = "the model has no tokenizer"
        return steps
    if decides:
        steps.append(partial(try_punctuation, gathered, model, seed))
    return [*steps, partial(try_marks, gathered, model, seed)]


def _asking(
    gathered: Gathered,
    model: TextReader,
    syntax: Path | str | None,
    coreference: Path | str | None,
) -> list[Step]:
    """What needs a file: read at once, so that a bad one is refused before anything is measured."""
    for kind, path in {"syntactic": syntax, "coreference": coreference}.items():
        if path is None:
            gathered.missing[kind] = "no file was given"
        elif model.tokenizer is None:
            raise InputError(
                f"{path} is text and the model has no tokenizer", "set model.tokenizer"
            )
    steps: list[Step] = []
    if syntax is not None:
        sentences = list(syntactic_texts(list(read_conllu(syntax))))
        steps.append(partial(try_syntax, gathered, sentences))
    if coreference is not None:
        references = list(coreference_texts(read_references(coreference)))
        steps.append(partial(try_coreference, gathered, references))
    return steps
