"""Gates added to a trained model and taught on a text, with what that did to it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import torch

from manyheads.errors import InputError
from manyheads.lens.given import read, run, shares
from manyheads.lens.metrics import judge
from manyheads.lens.statistics import statistics
from manyheads.lens.trunk import Edits
from manyheads.models.build import Model
from manyheads.models.decoder import Decoder
from manyheads.models.encoder import Encoder
from manyheads.models.readout import LanguageHead
from manyheads.models.resting import resting
from manyheads.parts.gates import Gate
from manyheads.progress import Progress
from manyheads.surgery.gates import add_gates
from manyheads.surgery.questions import questions
from manyheads.surgery.trainable import learn_all, learn_gates
from manyheads.surgery.tuning import objective_for, tune
from manyheads.taps import Site, Tap
from manyheads.train.optim.optimisers import AdamW
from manyheads.train.optim.schedules import Cosine

__all__ = ["Figures", "Gated", "pieces", "teach_gates"]

# Tokens whose words are scored together.
ROOM = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What the gated-attention study (arXiv 2505.06708) looks at, over some texts.

    The share of attention on the first token, mean over heads; the largest activation of the
    residual stream; perplexity, of an encoder that of masked words.
    """

    first_token: float
    largest: float
    perplexity: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Gated:
    """A model with gates that were taught, and its figures beside those without."""

    model: Model
    gate: Gate
    learnt: int
    texts: int
    before: Figures
    after: Figures

    def __str__(self) -> str:
        rows = [
            (
                "first-token share",
                f"{self.before.first_token:.4f}",
                f"{self.after.first_token:.4f}",
            ),
            ("largest activation", f"{self.before.largest:.4g}", f"{self.after.largest:.4g}"),
            ("perplexity", f"{self.before.perplexity:.3f}", f"{self.after.perplexity:.3f}"),
        ]
        lines = [f"{'':20}{'before':>12}{'after':>12}"]
        lines += [f"{name:20}{one:>12}{other:>12}" for name, one, other in rows]
        lines.append(
            f"over {self.texts:,} texts that were held out; {self.learnt:,} numbers learnt"
        )
        return "\n".join(lines)


def teach_gates(
    model: Model,
    gate: Gate,
    texts: Sequence[Any],
    held_out: Sequence[Any],
    *,
    layers: tuple[int, ...] | Literal["all"] = "all",
    learn: Literal["gates", "all"] = "gates",
    steps: int = 100,
    rate: float = 1e-3,
    batch_tokens: int = 2048,
    seed: int = 0,
    shown: bool = True,
) -> Gated:
    """A new model with gates, trained on texts; both are measured on others. This one stays."""
    if not isinstance(model, Decoder | Encoder) or not isinstance(
        model.config.readout, LanguageHead
    ):
        raise InputError(
            f"this {type(model).__name__} with {type(model.config.readout).__name__} names no word "
            "of a plain text, next or masked, to be scored by",
            "use surgery.add_gates and train it with an objective of its own",
        )
    for name, number in (("steps", steps), ("batch_tokens", batch_tokens)):
        if number < 1:
            raise InputError(f"{name}={number} teaches nothing", "use 1 or more")
    gated = add_gates(model, gate, layers)
    before = _figures(model, held_out, seed, shown)
    if learn == "gates":
        learnt = learn_gates(gated)
    else:
        learnt = sum(each.numel() for each in gated.parameters())
    given = read(gated, texts)
    tune(
        gated,
        given,
        objective_for(gated, given, None),
        optimiser=AdamW(rate=rate, decay=0.0),
        schedule=Cosine(),
        steps=steps,
        room=batch_tokens,
        seed=seed,
        shown=shown,
        label="teaching",
    )
    learn_all(gated)
    return Gated(
        model=gated,
        gate=gate,
        learnt=learnt,
        texts=len(held_out),
        before=before,
        after=_figures(gated, held_out, seed, shown),
    )


def _figures(model: Decoder | Encoder, texts: Sequence[Any], seed: int, shown: bool) -> Figures:
    found = statistics(model, texts, progress=shown)
    return Figures(
        first_token=float(found["first_token"].means.mean()),
        largest=max(each.largest for each in found.activations),
        perplexity=_perplexity(model, texts, seed, shown),
    )


def _perplexity(model: Decoder | Encoder, texts: Sequence[Any], seed: int, shown: bool) -> float:
    """exp of the mean loss of a next word, or of one that the seed masks."""
    asked = questions(model, texts, seed=seed)
    given, sizes = asked.given, asked.given.sizes(model)
    last, total, count = Site(-1, Tap.FINAL), 0.0, 0.0
    with (
        torch.no_grad(),
        resting(model),
        Progress("scoring", total=sum(sizes), unit="tokens", shown=shown) as bar,
    ):
        for some in shares(sizes, ROOM):
            judged = judge(model, given, some, "loss", asked.targets)
            seen = Edits({}, [last])
            run(model, given.select(some), seen)
            total += float((judged(seen[last])[0].double() * judged.weights).sum())
            count += float(judged.weights.sum())
            bar.advance(sum(sizes[text] for text in some))
    return math.exp(min(total / max(count, 1.0), 700.0))


def pieces(
    tokenizer: Any, texts: Iterable[str], length: int, most: int, share: float
) -> tuple[list[list[int]], list[list[int]]]:
    """Up to `most` pieces of texts: those to learn from, and a share of them held out.

    Every so many pieces one is held out, so that both come from all over the file.
    """
    if tokenizer is None:
        raise InputError("the model has no tokenizer", "use a folder with a tokenizer.json")
    if not 0 < share <= 0.5:
        raise InputError(f"a share of {share:g} cannot be held out", "use 0 < share <= 0.5")
    if length < 2:
        raise InputError(f"length={length} leaves no next word", "use 2 or more")

    def cut() -> Iterable[list[int]]:
        for text in texts:
            ids = tokenizer.encode(text).ids
            for start in range(0, len(ids), length):
                if len(piece := ids[start : start + length]) > 1:
                    yield piece

    found = list(islice(cut(), most))
    every = max(2, round(1 / share))
    learnt = [piece for index, piece in enumerate(found) if index % every]
    held = found[::every]
    if not learnt:
        raise InputError(
            f"the text makes {len(found)} pieces of {length} tokens", "give a longer text"
        )
    return learnt, held
