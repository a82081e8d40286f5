"""What every head of a model does, measured over texts in one pass each, at any length."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads.encoding.batches import fill
from manyheads.errors import InputError
from manyheads.lens.addresses import blocks_of, stacks_of
from manyheads.lens.classes import TokenClasses, token_classes
from manyheads.lens.given import Given, read
from manyheads.lens.measure_table import in_order
from manyheads.lens.measures import NEIGHBOURS, SINK_ABOVE
from manyheads.lens.observer import Activation, Observer, Plan
from manyheads.lens.results import ByHead, fields_from
from manyheads.lens.tally import Tally
from manyheads.models.build import Model
from manyheads.models.resting import resting
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Watcher

__all__ = ["Statistics", "ids_by_stack", "make_plan", "pass_by", "portions", "statistics"]

KIND = "statistics"
BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}
# Texts that are tokenised and sorted by length together.
TEXTS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Statistics(ByHead):
    """Measures of every head by name, with standard errors; `facts` says over what.

    A mean is over all queries of all texts, except for "sink" and "induction_score", which have one
    value per text. Errors are over texts, whose queries may depend on each other, or over the
    queries of a single text (`facts["errors_over"]`).
    """

    @property
    def activations(self) -> tuple[Activation, ...]:
        """The largest value of the residual stream after each layer, and where it stood."""
        return tuple(Activation(**each) for each in self.facts["activations"])

    @property
    def class_shares(self) -> dict[str, float]:
        """What share of all tokens each class has: the mass a head without a taste would give."""
        return dict(self.facts["class_shares"])

    @property
    def complete(self) -> bool:
        """False where the measuring was broken off; the rest of the texts is then missing."""
        return bool(self.facts["complete"])

    @classmethod
    def load(cls, path: Path | str, kind: str = KIND) -> "Statistics":
        return cls(**fields_from(path, kind))

    def __str__(self) -> str:
        facts = self.facts
        over = f"over {facts['texts']:,} texts, {facts['tokens']:,} tokens"
        lines = [ByHead.__str__(self), f"  {over}, errors over {facts['errors_over']}"]
        massive = [each for each in self.activations if each.massive]
        for each in massive:
            lines.append(
                f"  massive activation after layer {each.layer}: {each.largest:.0f} in channel "
                f"{each.channel} at position {each.position} of text {each.text}"
            )
        if not self.complete:
            lines.append("  broken off before all texts were read")
        return "\n".join(lines)

    __repr__ = __str__


def statistics(
    model: Model,
    texts: Any,
    *,
    classes: TokenClasses = None,
    offsets: Sequence[int] = (),
    sink_above: float = SINK_ABOVE,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Statistics:
    """Every measure of every head, streaming over texts; the n x n pattern is never formed.

    Texts are strings, lists of ids or a `Ragged`; (source, target) pairs for a `Seq2Seq`, images
    for a `Vision`; also an iterator of them. Weights of a query sum to 1 over the keys it sees.

    - entropy: -sum A ln A in nats; normalized_entropy: divided by ln of the number of visible keys
    - effective_keys: 1 / sum A^2; max_weight: max A, the confidence of arXiv 1905.09418
    - distance: sum A |i - j|; spread: standard deviation of the place looked at
    - first_token: A[i, 0]; sink: fraction of texts whose mean of it exceeds `sink_above`
    - previous_token, self, next_token and any of `offsets`: A[i, i + offset] where there is such
      a place; previous_token_all_queries divides by all queries (arXiv 1906.04341)
    - on_<class>: mass on tokens of a class: punctuation, digits, newline, brackets, special, or
      ids of your own by name
    - duplicate_token, induction: mass on earlier copies of the token, and on the tokens after
      them, over queries that have one; induction_score: the detector's score of a text, with and
      without the first token
    - output_norm: what a head writes to the residual stream; output_share: beside that stream
    - gate_<place>: a gate's value; gate_<place>_closed: the share below 0.1
    - on_no_key: what a learned sink takes

    Ctrl-C ends the measuring and keeps what was measured.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, seed=0)
    >>> found = statistics(model, [[5, 6, 7, 5, 6], [8, 9]], offsets=(-2,))
    >>> sorted(set(found.names) & {"entropy", "offset-2", "induction"})
    ['entropy', 'induction', 'offset-2']
    """
    device = next(model.parameters()).device
    most = batch_tokens or BATCH_TOKENS.get(device.type, BATCH_TOKENS["cuda"])
    if most < 1:
        raise InputError(f"batch_tokens={most} holds no token", "use 1 or more")
    plan = make_plan(model, classes, offsets, sink_above)
    done = _Done()
    total = len(texts) if hasattr(texts, "__len__") and not isinstance(texts, str) else None
    with Progress("measuring", total=total, unit="texts", shown=progress) as bar, resting(model):
        try:
            for observer, given in _observed(model, texts, plan, most):
                done.take(observer, given)
                bar.advance(len(given))
        except KeyboardInterrupt:
            if not done.texts:
                raise
            done.complete = False
    return done.result(model, plan)


def pass_by(model: Model, given: Given, watch: Watcher) -> None:
    """Lead what was given past a watcher; no word is scored."""
    with torch.inference_mode():
        if isinstance(model, Vision):
            model(list(given.images), watch=watch)
        elif isinstance(model, Seq2Seq):
            assert given.ids is not None
            model.hidden(given.source, given.ids, watch=watch)
        else:
            assert given.ids is not None
            model.hidden(given.ids, watch=watch)


def portions(texts: Any) -> Iterator[Any]:
    """Texts as they come, some at a time; what is one thing already stays so."""
    if isinstance(texts, str):
        yield [texts]
    elif isinstance(texts, Given | Ragged | Tensor) or _pair_of_ragged(texts):
        yield texts
    else:
        rest = iter(texts)
        while some := list(islice(rest, TEXTS_AT_ONCE)):
            yield some


def _pair_of_ragged(texts: Any) -> bool:
    return isinstance(texts, tuple) and bool(texts) and isinstance(texts[0], Ragged)


def _observed(model: Model, texts: Any, plan: Plan, most: int) -> Iterator[tuple[Observer, Given]]:
    first = 0
    for portion in portions(texts):
        given = read(model, portion)
        for places in fill(given.sizes(model), most):
            some = given.select(places)
            observer = Observer(
                plan, ids_by_stack(model, some), [first + place for place in places]
            )
            pass_by(model, some, observer)
            yield observer, some
        first += len(given)
    if first == 0:
        raise InputError("there is no text", "give at least one")


def ids_by_stack(model: Model, given: Given) -> dict[str, Ragged]:
    """The tokens of each stack."""
    if given.ids is None:
        return {}
    if not isinstance(model, Seq2Seq):
        return {"main": given.ids}
    assert given.source is not None
    return {"encoder": given.source, "decoder": given.ids}


def make_plan(
    model: Model,
    classes: TokenClasses = None,
    offsets: Sequence[int] = (),
    sink_above: float = SINK_ABOVE,
) -> Plan:
    """What every batch of a model is measured by."""
    columns = {}
    if not isinstance(model, Vision):
        vocabulary = model.config.embedding.vocabulary
        columns = token_classes(model.tokenizer, vocabulary, classes)
    elif classes:
        raise InputError("an image has no classes of tokens", "leave classes out")
    every = tuple(dict.fromkeys((*NEIGHBOURS, *offsets)))
    return Plan(stacks_of(model), columns, every, sink_above)


class _Done:
    """What was measured so far; a batch counts as a whole or not at all."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.activations: dict[tuple[str, int], Activation] = {}
        self.texts = self.tokens = 0
        self.members: dict[str, float] = {}
        self.complete = True

    def take(self, observer: Observer, given: Given) -> None:
        self.tally.merge(observer.tally)
        for place, found in observer.activations.items():
            known = self.activations.get(place)
            if known is None or found.largest > known.largest:
                self.activations[place] = found
        self.texts += len(given)
        self.tokens += observer.tokens
        for name, count in observer.members.items():
            self.members[name] = self.members.get(name, 0.0) + count

    def result(self, model: Model, plan: Plan) -> Statistics:
        blocks, names = blocks_of(model), in_order(self.tally.names)
        over_sequences = self.texts > 1
        facts = {
            "texts": self.texts,
            "tokens": self.tokens,
            "errors_over": "texts" if over_sequences else "queries",
            "sink_above": plan.sink_above,
            "class_shares": {name: self.members[name] / self.tokens for name in self.members},
            "activations": [asdict(each) for _, each in sorted(self.activations.items())],
            "complete": self.complete,
        }
        return Statistics(
            kind=KIND,
            blocks=blocks,
            means={name: self.tally.means(blocks, name) for name in names},
            errors={
                name: self.tally.errors(blocks, name, over_sequences=over_sequences)
                for name in names
            },
            facts=facts,
        )
