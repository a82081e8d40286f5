"""What every head of a model does, measured over texts in one pass each, at any length."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from manyheads.errors import InputError
from manyheads.lens.inputs.batches import Passed, lead
from manyheads.lens.inputs.texts import Given, climb
from manyheads.lens.inputs.token_classes import TokenClasses, token_classes
from manyheads.lens.measure.measure_table import in_order
from manyheads.lens.measure.measures import NEIGHBOURS, SINK_ABOVE, Tally
from manyheads.lens.measure.watcher import Activation, Observer, Plan
from manyheads.lens.results.addresses import blocks_of, stacks_of
from manyheads.lens.results.by_head import ByHead
from manyheads.models.build import Model
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.ragged import Ragged

KIND = "statistics"


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
        """False where the measuring was interrupted; the rest of the texts is then missing."""
        return bool(self.facts["complete"])

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
            lines.append("  interrupted before all texts were read")
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
    plan = make_plan(model, classes, offsets, sink_above)
    sums = _Sums()

    def visit(given: Given, numbers: list[int]) -> None:
        observer = Observer(plan, ids_by_stack(model, given), numbers)
        with torch.inference_mode():
            climb(model, given, observer)
        sums.add(observer)

    passed = lead(
        model, texts, visit, label="measuring", batch_tokens=batch_tokens, progress=progress
    )
    return sums.result(model, plan, passed)


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


class _Sums:
    """What was measured so far, batch by batch."""

    def __init__(self) -> None:
        self.tally = Tally()
        self.activations: dict[tuple[str, int], Activation] = {}
        self.tokens = 0
        self.members: dict[str, float] = {}

    def add(self, observer: Observer) -> None:
        self.tally.merge(observer.tally)
        for place, found in observer.activations.items():
            known = self.activations.get(place)
            if known is None or found.largest > known.largest:
                self.activations[place] = found
        self.tokens += observer.tokens
        for name, count in observer.members.items():
            self.members[name] = self.members.get(name, 0.0) + count

    def result(self, model: Model, plan: Plan, passed: Passed) -> Statistics:
        blocks, names = blocks_of(model), in_order(self.tally.names)
        over_sequences = passed.texts > 1
        facts = {
            "texts": passed.texts,
            "tokens": self.tokens,
            "errors_over": "texts" if over_sequences else "queries",
            "sink_above": plan.sink_above,
            "class_shares": {name: self.members[name] / self.tokens for name in self.members},
            "activations": [asdict(each) for _, each in sorted(self.activations.items())],
            "complete": passed.complete,
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
