"""Why a model goes on as it does: one word after one text, traced to heads, layers or tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from manyheads.encoding.text_reader import reads_texts
from manyheads.errors import InputError
from manyheads.lens.attention_maps.rollout import attention_rollout
from manyheads.lens.attribution.direct_logits import attribute_logits
from manyheads.lens.attribution.gradients import (
    ByToken,
    HeadGradients,
    integrate_heads,
    integrate_inputs,
)
from manyheads.lens.attribution.logit_lens import logit_lens
from manyheads.lens.inputs.metrics import Measure
from manyheads.lens.inputs.texts import Given, read
from manyheads.lens.redundant.dead_heads import writes_next
from manyheads.lens.results.by_head import Tabular
from manyheads.models.build import Model
from manyheads.models.seq2seq import Seq2Seq
from manyheads.ragged import Ragged
from manyheads.taps import Sublayer

KIND = "attribution"
MOST_ROWS = 40
FEW_ROWS = 10
# Of tokens, so large a share of the rows goes to the last ones, whatever they add.
LAST_SHARE = 0.25
Method = Literal["direct", "integrated", "heads", "rollout"]


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the model or of the text, and what it adds."""

    part: str
    value: float


@dataclass(frozen=True, slots=True)
class LayerPrediction:
    """What the model would say after so many layers, and how it ranks the answer (0 is first)."""

    layer: int
    says: str
    probability: float
    answer: float
    rank: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Attribution(Tabular):
    """What each part adds to the logit of `target`, less that of `against` if there is one.

    Shares sum to `value` but for `completeness`; those of rollout are weights and sum to 1.
    `path_steps` is how many steps gradients were integrated in, 0 where none were.
    """

    method: Method
    target: str | None
    against: str | None
    value: float
    completeness: float
    shares: tuple[Share, ...]
    steps: tuple[LayerPrediction, ...] = ()
    text: str = ""
    tokens: tuple[str, ...] = field(default=())
    path_steps: int = 0

    def of(self, part: str) -> float:
        """What a part adds, such as L2H7, "feedforward 3", "embedding" or "biases"."""
        for share in self.shares:
            if share.part == part:
                return share.value
        raise InputError(f"there is no part {part!r}", f"use {self.shares[0].part} or another")

    @property
    def by_token(self) -> bool:
        """Whether the parts are those of the text, and not of the model."""
        return self.method in ("integrated", "rollout")

    def ranked(self) -> list[Share]:
        """Shares by how much they add, either way; tokens stay in their order."""
        return [self.shares[place] for place in self.places()]

    def places(self, top_k: int | None = None) -> list[int]:
        """Where the shares lie that matter most, those first; of tokens in order, the last too."""
        order = sorted(range(len(self.shares)), key=lambda place: -abs(self.shares[place].value))
        if not self.by_token:
            return order[:top_k]
        if top_k is None:
            return sorted(order)
        first_of_last = len(order) - int(top_k * LAST_SHARE)
        order.sort(key=lambda place: place < first_of_last)
        return sorted(order[:top_k])

    def rows(self) -> list[dict[str, Any]]:
        """One record per part."""
        return [asdict(share) for share in self.shares]

    def table(self, max_rows: int | None = MOST_ROWS) -> Any:
        """A rich table of so many parts, those of `places`."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        if self.by_token:
            table.add_column("at", justify="right")
        table.add_column("token" if self.by_token else "part")
        table.add_column("weight" if self.method == "rollout" else "adds", justify="right")
        sign = "" if self.method == "rollout" else "+"
        for place in self.places(max_rows):
            share = self.shares[place]
            said = [str(place), Text(repr(share.part))] if self.by_token else [Text(share.part)]
            table.add_row(*said, f"{share.value:{sign}.4f}")
        if max_rows is not None and len(self.shares) > max_rows:
            table.caption = (
                f"{len(self.shares) - max_rows} more: table(max_rows=None), frame() or save()"
            )
            table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        lines = [self.told]
        few = [self.shares[place] for place in self.places(FEW_ROWS)]
        lines += [f"  {share.part:<16} {share.value:+.4f}" for share in few]
        return "\n".join(lines)

    __repr__ = __str__

    @property
    def told(self) -> str:
        """One sentence on what was traced."""
        if self.method == "rollout":
            return f"attention rollout of the last of {len(self.tokens)} tokens"
        against = "" if self.against is None else f" less that of {self.against!r}"
        by = {"direct": "direct attribution", "integrated": "integrated gradients by token"}
        how = by.get(self.method, "integrated gradients by head")
        how += f" in {self.path_steps} steps" if self.path_steps else ""
        return (
            f"the logit of {self.target!r}{against}, {self.value:+.4f}, by {how}; "
            f"the parts are off by {self.completeness:.1e}"
        )


def attribute(
    model: Model,
    text: Any,
    target: str | None = None,
    against: str | None = None,
    *,
    method: Method = "direct",
    steps: int | None = None,
    progress: bool = True,
) -> Attribution:
    """Trace the next word after a text, or `target`, perhaps against another word.

    - direct: what heads, feed-forwards, embedding and biases write to the logit, norms frozen
      (see `attribute_logits`)
    - integrated: integrated gradients from a stream of zeros to the tokens (see `integrate_inputs`)
    - heads: the same on gates that open all heads (see `integrate_heads`); they sum to the logit
      less what a model without attention gives
    - rollout: attention through all layers to the last token (see `attention_rollout`)

    Gradients are integrated in so many `steps`, or in as many as it takes, up to 512. All but
    rollout need a model that writes; `steps` of the answer then has the logit lens. A `Seq2Seq`
    takes a (source, target) pair.
    """
    _check_asked(target, against, method, steps)
    if isinstance(model, Seq2Seq) and isinstance(text, str):
        source, tab, begun = text.partition("\t")
        if not tab:
            raise InputError("the text has no tab", "write a source, a tab and what is said so far")
        text = (source, begun)
    tokenizer = reads_texts(model).tokenizer
    given = read(model, [text])
    assert given.ids is not None
    words = tuple(_said(tokenizer, token) for token in given.ids.of(0).tolist())
    said = text if isinstance(text, str) else "\t".join(text)
    if method == "rollout":
        rolled = attention_rollout(model, given)[0][-1].tolist()
        shares = _by_token(words, rolled)
        return Attribution(
            method=method,
            target=None,
            against=None,
            value=1.0,
            completeness=abs(1 - sum(rolled)),
            shares=shares,
            text=said,
            tokens=words,
        )
    if not writes_next(model):
        raise InputError(
            f"this {type(model).__name__} writes no next word to trace", 'use the method "rollout"'
        )
    distractor = None if against is None else find_token(tokenizer, against, said)
    answer = _likeliest(model, given) if target is None else find_token(tokenizer, target, said)
    traced = _traced(model, given, answer, distractor, words, method, steps, progress)
    return Attribution(
        method=method,
        target=_said(tokenizer, answer),
        against=None if distractor is None else _said(tokenizer, distractor),
        **traced,
        steps=_steps(model, given, tokenizer, answer),
        text=said,
        tokens=words,
    )


def find_token(tokenizer: Any, word: str, after: str = "") -> int:
    """The one token of a word, with a space before it where the text has none at its end."""
    if not word:
        raise InputError("a word to trace is empty", "give one that is one token of this model")
    spaced = [f" {word}", word] if after and not after[-1].isspace() else [word, f" {word}"]
    tried = [tokenizer.encode(each, add_special_tokens=False).ids for each in spaced]
    for ids in tried:
        if len(ids) == 1:
            return int(ids[0])
    pieces = [tokenizer.decode([token]) for token in tried[-1]]
    raise InputError(
        f"{word!r} is {len(pieces)} tokens of this model: {pieces}",
        "give a word that is one token, perhaps the first of these",
    )


def _check_asked(
    target: str | None, against: str | None, method: Method, steps: int | None
) -> None:
    """Before a text is read in vain."""
    if method == "rollout" and (target is not None or against is not None):
        raise InputError("rollout follows attention and no word", "leave the words out")
    if steps is not None and method not in ("integrated", "heads"):
        raise InputError(
            f"steps={steps} is given and {method} integrates nothing",
            'leave it out, or use the method "integrated" or "heads"',
        )


def _traced(
    model: Model,
    given: Given,
    answer: int,
    distractor: int | None,
    words: Sequence[str],
    method: Method,
    steps: int | None,
    progress: bool,
) -> dict[str, Any]:
    """What an answer says of the parts, by its own names."""
    if method == "direct":
        found = attribute_logits(
            model, given, [answer], None if distractor is None else [distractor]
        )
        shares = [Share(str(head), mean) for head, mean in found.heads["logit"].items()]
        for (sublayer, layer), each in found.layers.items():
            if sublayer is Sublayer.FEEDFORWARD:
                shares.append(Share(f"feedforward {layer}", float(each[0])))
        shares += [
            Share("embedding", float(found.embedding[0])),
            Share("biases", float(found.bias[0])),
        ]
        return {
            "value": float(found.logits[0]),
            "completeness": found.completeness,
            "shares": tuple(shares),
        }
    metric = Measure(_Logit(answer, distractor))
    path: ByToken | HeadGradients
    if method == "integrated":
        path = integrate_inputs(model, given, metric, steps=steps, progress=progress)
        shares_of = _by_token(words, path.of(0).tolist())
    else:
        path = integrate_heads(model, given, metric, steps=steps, progress=progress)
        pairs = path.heads["attribution"].items()
        shares_of = tuple(Share(str(head), mean) for head, mean in pairs)
    return {
        "value": float(path.expected[0]),
        "completeness": path.completeness,
        "shares": shares_of,
        "path_steps": path.steps,
    }


@dataclass(frozen=True, slots=True)
class _Logit:
    """The logit of a token after the last one of each text, less that of another."""

    answer: int
    distractor: int | None

    def __call__(self, logits: Ragged | Tensor, _texts: Sequence[int]) -> Float[Tensor, " b"]:
        assert isinstance(logits, Ragged), "a model that writes scores every token"
        last = logits.values[logits.lengths.offsets[1:].long() - 1]
        value = last[:, self.answer]
        return value if self.distractor is None else value - last[:, self.distractor]


def _likeliest(model: Model, given: Given) -> int:
    return int(logit_lens(model, given, top_k=1).answers[-1, 0, 0])


def _steps(model: Model, given: Given, tokenizer: Any, answer: int) -> tuple[LayerPrediction, ...]:
    found = logit_lens(model, given, [answer], top_k=1)
    assert found.answer_log_probabilities is not None
    assert found.answer_ranks is not None
    return tuple(
        LayerPrediction(
            layer=layer - 1,
            says=_said(tokenizer, int(found.answers[layer, 0, 0])),
            probability=float(found.log_probabilities[layer, 0, 0].exp()),
            answer=float(found.answer_log_probabilities[layer, 0].exp()),
            rank=int(found.answer_ranks[layer, 0]),
        )
        for layer in range(len(found.answers))
    )


def _by_token(words: Sequence[str], values: Sequence[float]) -> tuple[Share, ...]:
    return tuple(Share(word, value) for word, value in zip(words, values, strict=True))


def _said(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token], skip_special_tokens=False))
