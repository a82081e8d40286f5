"""The atlas of a model: every head over a whole corpus, in one result."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import ManyheadsError
from manyheads.formatting import pluralise
from manyheads.lens.causal.head_importance import (
    HeadImportance,
    ImportanceMethod,
    measure_importance,
)
from manyheads.lens.corpus.corpus_pass import cut_texts, read_corpus
from manyheads.lens.corpus.corpus_watcher import ExampleSettings, HeadSums
from manyheads.lens.corpus.examples import HeadExample
from manyheads.lens.corpus.pass_state import CorpusPass, PassSettings
from manyheads.lens.corpus.token_sums import TokenLift, top_lifts
from manyheads.lens.head_kinds import head_tests
from manyheads.lens.head_kinds.kinds import Kinds
from manyheads.lens.head_kinds.kinds import kinds as find_kinds
from manyheads.lens.inputs.texts import Inputs
from manyheads.lens.inspection import Inspection, summarize_model
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.redundant.heads import Redundancy, redundancy
from manyheads.lens.results import html_tables
from manyheads.lens.results.addresses import Address, HeadName, pick_head
from manyheads.lens.results.files import Metadata
from manyheads.models import build
from manyheads.tokenizers import token_text

# Passages of the corpus on which kinds, similar heads and the worth of heads are measured.
SAMPLE_TEXTS = 8
TOP_TOKENS, MIN_COUNT = 24, 5
SIMILAR = 6

# The token ids of passages by number and stack.
Passages = Mapping[int, Mapping[str, Int[np.ndarray, " n"]]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class HeadEntry:
    """One head over the corpus.

    `earlier` and `later` are the fractions of its weight at distances 0, 1, 2 to 3, 4 to 7 and so
    on before and after the query. `looks_at` are tokens that receive more than equal attention
    would give them, `looks_from` those at which its largest weight is above its mean, both as
    multiples. `activations` is the histogram of its largest weight in a passage, from 0 to 1.
    `distance_variance` is that of the distance over all of its weight, `induction` its mean weight
    on tokens after earlier copies of a query, weights below 0.01 left out, both as in HeadVis.
    `deciles` has examples of each tenth of the passages, 10 being the sharpest. The first token of
    a passage counts in distances only.
    """

    address: Address
    earlier: Float[np.ndarray, " bins"]
    later: Float[np.ndarray, " bins"]
    looks_at: tuple[TokenLift, ...]
    looks_from: tuple[TokenLift, ...]
    activations: Int[np.ndarray, " linear"]
    mean_activation: float
    distance_variance: float
    induction: float
    sharpest: tuple[HeadExample, ...]
    deciles: Mapping[int, tuple[HeadExample, ...]]
    similar: tuple[tuple[Address, float], ...] = ()

    @property
    def examples(self) -> tuple[HeadExample, ...]:
        """All examples, the sharpest first, each once."""
        every = (*self.sharpest, *(example for tenth in self.deciles.values() for example in tenth))
        return tuple({example.text: example for example in every}.values())


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Atlas:
    """Every head of a model over a corpus.

    `inspection` has the measures, kinds, duplicates and the importance of heads; `passages` the
    token ids of the passages that examples show, by number and stack; `tokens` the text of each
    token that occurs in them or among the entries; `positions` a place for each head on a map where
    heads with similar measures are near each other.
    """

    inspection: Inspection
    entries: Mapping[Address, HeadEntry]
    passages: Passages
    tokens: Mapping[int, str]
    positions: Float[np.ndarray, "h 2"]
    metadata: Metadata = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """False if the corpus was not read to its end."""
        return bool(self.metadata["complete"])

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self.inspection.addresses

    def of(self, head: HeadName) -> HeadEntry:
        return self.entries[pick_head(self.entries, head)]

    def words(self, text: int, stack: str | None = None) -> list[str]:
        """The tokens of a passage."""
        stacks = self.passages[text]
        ids = stacks[next(iter(stacks)) if stack is None else stack]
        return [self.tokens[token] for token in ids.tolist()]

    def rows(self) -> list[dict[str, Any]]:
        """One record per head: measures, kinds, and the tokens it looks at and from most."""
        rows = self.inspection.rows()
        for address, row in zip(self.addresses, rows, strict=True):
            entry = self.entries.get(address)
            if entry is not None:
                row["looks_at"] = " ".join(map(self._token, entry.looks_at[:5]))
                row["looks_from"] = " ".join(map(self._token, entry.looks_from[:5]))
                row["mean_activation"] = entry.mean_activation
        return rows

    def _token(self, lift: TokenLift) -> str:
        return repr(self.tokens[lift.token])

    def _lines(self) -> Iterator[str]:
        counts = pluralise(self.metadata["passages"], "passage")
        yield f"{self.inspection.model} Read: {counts}, {self.metadata['tokens']:,} tokens."
        if self.inspection.kinds is not None:
            yield str(self.inspection.kinds)
        if not self.complete:
            yield "the corpus was not read to its end"

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_tables.html_table(self.rows())


@wrapping_models
def atlas(
    model: build.Model,
    texts: Inputs,
    *,
    max_length: int | None = 512,
    by: ImportanceMethod = "gradient",
    kinds: bool = True,
    sharpest: int = 10,
    per_decile: int = 2,
    state: Path | str | None = None,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Atlas:
    """Look at every head over a corpus of any size, in one streaming pass.

    `texts` are those of `statistics`, also an iterator; longer ones are read in passages of
    `max_length` tokens. For each head: all measures with standard errors, its kinds, the distances
    at which it looks, the tokens it looks at and from most, the passages where it is sharpest (the
    `sharpest` first, and `per_decile` of each tenth), similar heads, and its importance, `by`
    gradients, ablation, or "none". Without `kinds` heads have no labels. Kinds that need no corpus,
    similar heads and importance are measured on a few passages.

    With `state` the pass is written to that file now and then, and goes on from it. Ctrl-C ends the
    pass after the current batch and keeps what was read.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=60, seed=0)
    >>> result = atlas(model, [[5, 6, 7, 5, 6], [8, 9, 10, 11]], max_length=4)
    >>> result.metadata["passages"], result.of("L0H1").sharpest[0].query > 0
    (3, True)
    """
    settings = PassSettings(
        max_length=max_length,
        offsets=() if model.reads_images else head_tests.OFFSETS,
        examples=ExampleSettings(sharpest=sharpest, per_decile=per_decile, seed=seed),
    )
    on_progress("the corpus")
    done, measured = read_corpus(
        model,
        texts,
        settings,
        state=None if state is None else Path(state),
        batch_tokens=batch_tokens,
        progress=progress,
    )
    sample = cut_texts(model, done.first, max_length)[:SAMPLE_TEXTS]
    inspection = _inspect(
        model, done, measured, sample, by, seed, progress, on_progress, kinds=kinds
    )
    entries = {
        entry.address: entry
        for sums in done.sums.blocks.values()
        for entry in _entries(sums, settings.examples, inspection)
    }
    # The pass holds more examples, of which it draws those of each tenth.
    texts_of_examples = {example.text for entry in entries.values() for example in entry.examples}
    passages = {text: ids for text, ids in done.pool.items() if text in texts_of_examples}
    return Atlas(
        inspection=inspection,
        entries={head: entries[head] for head in inspection.addresses if head in entries},
        passages=passages,
        tokens=_token_texts(model, passages, entries.values()),
        positions=place_heads(measured),
        metadata={
            "texts": done.texts,
            "passages": done.passages_read,
            "tokens": done.tokens,
            "max_length": max_length,
            "seed": seed,
            "complete": done.complete and inspection.complete,
        },
    )


def _inspect(
    model: build.Model,
    done: CorpusPass,
    measured: Statistics,
    sample: list[Any],
    by: ImportanceMethod,
    seed: int,
    progress: bool,
    on_progress: Callable[[str], None],
    *,
    kinds: bool,
) -> Inspection:
    """The measures of the corpus, and what a few passages say beside them."""
    classified: Kinds | None = None
    worth: HeadImportance | None = None
    redundant: list[Redundancy] = []
    complete, unknown = True, ""
    try:
        if kinds and (model.reads_token_ids or model.reads_images):
            on_progress("head kinds")
            classified = find_kinds(model, sample, measured=measured, seed=seed, progress=progress)
        on_progress("similar heads")
        for stack, sublayer in dict.fromkeys(
            (block.stack, block.sublayer) for block in done.sums.blocks
        ):
            redundant.append(
                redundancy(model, sample, stack=stack, sublayer=sublayer, progress=progress)
            )
        on_progress("importance of each head")
        tokens = measured.metadata["tokens"]
        worth, unknown = measure_importance(model, sample, by, tokens, progress)
    except ManyheadsError as error:
        # What a model or its tokenizer lacks does not cost the pass.
        unknown = str(error)
    except KeyboardInterrupt:
        complete = False
    return Inspection(
        model=summarize_model(model),
        statistics=measured,
        kinds=classified,
        redundancy=tuple(redundant),
        importance=worth,
        metadata={
            "complete": complete,
            "seed": seed,
            "default_texts": False,
            "unknown_importance": unknown,
        },
    )


def _entries(
    sums: HeadSums, settings: ExampleSettings, inspection: Inspection
) -> Iterator[HeadEntry]:
    """The entries of the heads of one attention."""
    similar = _similar_heads(inspection)
    at, of_queries = sums.at.sums, sums.of_queries.sums
    passages = sums.book.histogram.sum(1)
    weight = sums.earlier.sum(1) + sums.later.sum(1)
    queries, repeated = sums.counts
    measured = inspection.statistics
    distances = dict(measured["distance"].items()) if "distance" in measured else {}
    for head, address in enumerate(sums.block.addresses):
        share = 1 / weight[head] if weight[head] > 0 else 0.0
        yield HeadEntry(
            address=address,
            earlier=sums.earlier[head] * share,
            later=sums.later[head] * share,
            looks_at=tuple(
                top_lifts(
                    *(sums.at.ids, at[:, head], at[:, -2], at[:, -1]),
                    top=TOP_TOKENS,
                    min_count=MIN_COUNT,
                )
            ),
            looks_from=tuple(
                top_lifts(
                    *(sums.of_queries.ids, of_queries[:, head]),
                    *(of_queries[:, -1], of_queries[:, -1]),
                    top=TOP_TOKENS,
                    min_count=MIN_COUNT,
                )
            ),
            activations=sums.book.linear[head],
            mean_activation=float(sums.book.activation_sums[head] / max(1, passages[head])),
            distance_variance=float(
                sums.squares[head] / max(queries, 1) - distances.get(address, np.nan) ** 2
            ),
            induction=float(sums.copied[head] / repeated) if repeated else np.nan,
            sharpest=tuple(sums.book.sharpest(head)),
            deciles={
                decile: tuple(examples)
                for decile, examples in sums.book.by_decile(head, settings.per_decile).items()
            },
            similar=similar.get(address, ()),
        )


def _similar_heads(inspection: Inspection) -> dict[Address, tuple[tuple[Address, float], ...]]:
    """The heads with the most similar patterns and outputs."""
    similar = {}
    for result in inspection.redundancy:
        pairs = result.pairs("joint")
        values = np.where(np.isnan(pairs.values), -np.inf, pairs.values)
        np.fill_diagonal(values, -np.inf)
        for index, address in enumerate(result.addresses):
            nearest = np.argsort(-values[index], kind="stable")[:SIMILAR]
            similar[address] = tuple(
                (result.addresses[place], round(float(values[index, place]), 4))
                for place in nearest
                if np.isfinite(values[index, place])
            )
    return similar


def place_heads(measured: Statistics) -> Float[np.ndarray, "h 2"]:
    """The two main directions in which the measures of heads differ (PCA of standard scores)."""
    columns = [
        column
        for name in measured.names
        if np.isfinite(column := measured[name].means).all() and column.std() > 0
    ]
    if not columns or len(columns[0]) < 2:
        return np.zeros((len(measured.addresses), 2))
    scores = np.stack([(column - column.mean()) / column.std() for column in columns], axis=1)
    left, sizes, right = np.linalg.svd(scores, full_matrices=False)
    # The sign of a direction is free: its largest part is positive.
    signs = np.sign(np.take_along_axis(right, np.abs(right).argmax(1)[:, None], axis=1)[:, 0])
    places = (left * sizes * signs)[:, :2]
    return np.pad(places, ((0, 0), (0, 2 - places.shape[1])))


def _token_texts(
    model: build.Model, passages: Passages, entries: Iterable[HeadEntry]
) -> dict[int, str]:
    """The text of every token of the examples and the entries."""
    used = {
        token for stacks in passages.values() for ids in stacks.values() for token in ids.tolist()
    }
    for entry in entries:
        used |= {lift.token for lift in (*entry.looks_at, *entry.looks_from)}
    tokenizer = model.tokenizer
    return {
        token: str(token) if tokenizer is None else token_text(tokenizer, token)
        for token in sorted(used)
    }
