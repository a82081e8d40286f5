"""Attribution of a model's next word to heads, layers or tokens."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.encoding.text_reader import require_text_model
from manyheads.errors import InputError
from manyheads.formatting import plain_table
from manyheads.lens.attention_maps.rollout import attention_rollout
from manyheads.lens.attribution import direct_logits, gradients
from manyheads.lens.inputs import metrics, texts
from manyheads.lens.redundant.dead_heads import predicts_next_token
from manyheads.lens.results.tables import Tabular
from manyheads.models import build, model_interface
from manyheads.ragged import Ragged
from manyheads.taps import Sublayer
from manyheads.tokenizers import surrogates_refused

KIND = "attribution"
MAX_ROWS = 40
SHORT_ROWS = 10
# This fraction of the rows shows the last tokens, whatever they add.
LAST_FRACTION = 0.25
Method = Literal["direct", "integrated", "heads", "rollout"]


@dataclass(frozen=True, slots=True)
class Contribution:
    """A part of the model or of the text, and what it adds to the logit."""

    part: str
    value: float


@dataclass(frozen=True, slots=True)
class LayerPrediction:
    """The prediction after a layer, and the probability and rank of the answer (0 is first)."""

    layer: int
    prediction: str
    probability: float
    answer: float
    rank: int


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Attribution(Tabular):
    """What each part adds to the logit of `target`, minus that of `against` if there is one.

    Contributions sum to `value` up to `completeness`; those of rollout are weights and sum to 1.
    `path_steps` is the number of integration steps of the gradients, 0 without gradients.
    """

    method: Method
    target: str | None
    against: str | None
    value: float
    completeness: float
    contributions: tuple[Contribution, ...]
    steps: tuple[LayerPrediction, ...] = ()
    text: str = ""
    tokens: tuple[str, ...] = field(default=())
    path_steps: int = 0

    def of(self, part: str) -> float:
        """What a part adds, such as L2H7, "feedforward 3", "embedding" or "biases"."""
        for contribution in self.contributions:
            if contribution.part == part:
                return contribution.value
        raise InputError(
            f"there is no part {part!r}", f"use {self.contributions[0].part} or another"
        )

    @property
    def by_token(self) -> bool:
        """Whether the parts are tokens of the text rather than parts of the model."""
        return self.method in ("integrated", "rollout")

    def ranked(self) -> list[Contribution]:
        """Contributions by absolute value, largest first; tokens stay in their order."""
        return [self.contributions[index] for index in self.indices()]

    def indices(self, top_k: int | None = None) -> list[int]:
        """Indices of the largest contributions; tokens stay in order and include the last ones."""
        sizes = [abs(contribution.value) for contribution in self.contributions]
        order = sorted(range(len(sizes)), key=lambda index: -sizes[index])
        if not self.by_token:
            return order[:top_k]
        if top_k is not None:
            first_of_last = len(order) - int(top_k * LAST_FRACTION)
            order.sort(key=lambda index: index < first_of_last)
        return sorted(order[:top_k])

    def rows(self) -> list[dict[str, Any]]:
        """One record per part."""
        return [asdict(contribution) for contribution in self.contributions]

    def table(self, max_rows: int | None = MAX_ROWS) -> Any:
        """A rich table of the largest contributions."""
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False)
        if self.by_token:
            table.add_column("at", justify="right")
        table.add_column("token" if self.by_token else "part")
        title, sign = ("weight", "") if self.method == "rollout" else ("adds", "+")
        table.add_column(title, justify="right")
        for index in self.indices(max_rows):
            part, value = self.contributions[index].part, self.contributions[index].value
            cells = [str(index), Text(repr(part))] if self.by_token else [Text(part)]
            table.add_row(*cells, f"{value:{sign}.4f}{self._error}")
        if max_rows is not None and len(self.contributions) > max_rows:
            more = len(self.contributions) - max_rows
            table.caption = f"{more} more: table(max_rows=None), frame() or save()"
            table.caption_justify = "left"
        return table

    def layer_table(self) -> Any:
        """A rich table of the prediction after each layer, and how likely the target is there."""
        from rich.text import Text

        rows = [
            (
                "embeddings" if step.layer < 0 else f"layer {step.layer}",
                Text(repr(step.prediction)),
                f"{step.probability:.3f}",
                f"{step.answer:.3f}",
                str(step.rank + 1),
            )
            for step in self.steps
        ]
        numbers = ["probability", f"of {self.target!r}", "its rank"]
        return plain_table(["after", "prediction"], numbers, rows)

    def __str__(self) -> str:
        largest = [self.contributions[index] for index in self.indices(SHORT_ROWS)]
        lines = [f"  {part.part:<16} {part.value:+.4f}{self._error}" for part in largest]
        return "\n".join([self.summary, *lines])

    __repr__ = __str__

    @property
    def _error(self) -> str:
        """What the parts are off by together, beside each number that was integrated."""
        return f" ±{self.completeness:.1g}" if self.path_steps else ""

    @property
    def summary(self) -> str:
        """One sentence on what was attributed."""
        if self.method == "rollout":
            return f"attention rollout of the last of {len(self.tokens)} tokens"
        against = "" if self.against is None else f" minus that of {self.against!r}"
        by = {"direct": "direct attribution", "integrated": "integrated gradients by token"}
        method = by.get(self.method, "integrated gradients by head")
        method += f" in {self.path_steps} steps" if self.path_steps else ""
        failed = "" if self.converged else "it did not converge, and "
        return (
            f"the logit of {self.target!r}{against}, {self.value:+.4f}, by {method}; "
            f"{failed}the parts are off by {self.completeness:.1e}"
        )

    @property
    def converged(self) -> bool:
        """Whether integrated gradients ended within their tolerance; other methods are exact."""
        return not self.path_steps or gradients.is_converged(self.completeness, [self.value])


def split_pair(text: str) -> tuple[str, str]:
    """The source and the target of an encoder-decoder, written with a tab between them."""
    source, tab, target = text.partition("\t")
    if not tab:
        raise InputError(
            "the text of a Seq2Seq has no tab", "write a source, a tab and the target so far"
        )
    return source, target


@wrapping_models
def attribute(
    model: build.Model,
    text: str | Sequence[Any],
    target: str | None = None,
    against: str | None = None,
    *,
    method: Method = "direct",
    steps: int | None = None,
    progress: bool = True,
) -> Attribution:
    """Attribute the next word of a text, or `target`, optionally against another word.

    - direct: what heads, feed-forwards, embedding and biases write to the logit, norms frozen
      (see `attribute_logits`)
    - integrated: integrated gradients from mean embeddings to the tokens (see `integrate_inputs`)
    - heads: integrated gradients of gates on all heads (see `integrate_heads`); they sum to the
      logit minus that of the model without attention
    - rollout: attention through all layers to the last token (see `attention_rollout`)

    Gradients are integrated in `steps` steps, by default as many as needed, up to 1,024. All but
    rollout need a model that generates; the result's `steps` then has the logit lens. A `Seq2Seq`
    takes a (source, target) pair.
    """
    if method == "rollout" and (target is not None or against is not None):
        raise InputError("rollout follows attention, not a word", "leave out the words")
    if steps is not None and method not in ("integrated", "heads"):
        raise InputError(
            f"the method {method!r} has no integration steps, got steps={steps}",
            'leave it out, or use the method "integrated" or "heads"',
        )
    if model.reads_pairs and isinstance(text, str):
        text = split_pair(text)
    tokenizer = require_text_model(model).tokenizer
    if tokenizer is None:
        raise InputError(
            "this model has no tokenizer to name words with",
            "set model.tokenizer, wrap(model, tokenizer), or use attribute_logits with token ids",
        )
    inputs = texts.read_inputs(model, [text])
    assert inputs.ids is not None
    words = tuple(_decode(tokenizer, token) for token in inputs.ids.of(0).tolist())
    written = text if isinstance(text, str) else "\t".join(text)
    if method == "rollout":
        rolled = attention_rollout(model, inputs)[0][-1].tolist()
        return Attribution(
            method=method,
            target=None,
            against=None,
            value=1.0,
            completeness=abs(1 - sum(rolled)),
            contributions=tuple(map(Contribution, words, rolled)),
            text=written,
            tokens=words,
        )
    if not predicts_next_token(model):
        raise InputError(
            f"this {type(model).__name__} predicts no next word", 'use the method "rollout"'
        )
    distractor = None if against is None else find_token(tokenizer, against, written)
    if target is None:
        answer = int(direct_logits.logit_lens(model, inputs, top_k=1).answers[-1, 0, 0])
    else:
        answer = find_token(tokenizer, target, written)
    fields = _attribute(
        model, inputs, answer, distractor, words, method, steps=steps, progress=progress
    )
    return Attribution(
        method=method,
        target=_decode(tokenizer, answer),
        against=None if distractor is None else _decode(tokenizer, distractor),
        **fields,
        steps=_steps(model, inputs, tokenizer, answer),
        text=written,
        tokens=words,
    )


def find_token(tokenizer: Any, word: str, after: str = "") -> int:
    """The token id of a word, with a space before it unless the text ends in one."""
    if not word:
        raise InputError("the word is empty", "give a word that is one token of this model")
    spaced = [f" {word}", word] if after and not after[-1].isspace() else [word, f" {word}"]
    with surrogates_refused(spaced[:1]):
        tried = [tokenizer.encode(form, add_special_tokens=False).ids for form in spaced]
    for ids in tried:
        if len(ids) == 1:
            return int(ids[0])
    pieces = [tokenizer.decode([token]) for token in tried[-1]]
    raise InputError(
        f"{word!r} is {len(pieces)} tokens of this model: {pieces}",
        "give a word that is one token, such as the first of these",
    )


def _attribute(
    model: build.Model,
    inputs: model_interface.ModelInputs,
    answer: int,
    distractor: int | None,
    words: Sequence[str],
    method: Method,
    **options: Any,
) -> dict[str, Any]:
    """The fields of an `Attribution` that depend on the method."""
    if method == "direct":
        distractors = None if distractor is None else [distractor]
        direct = direct_logits.attribute_logits(model, inputs, [answer], distractors)
        added = {str(head): mean for head, mean in direct.heads["logit"].items()}
        for (sublayer, layer), by_text in direct.layers.items():
            if sublayer is Sublayer.FEEDFORWARD:
                added[f"feedforward {layer}"] = float(by_text[0])
        added |= {"embedding": float(direct.embedding[0]), "biases": float(direct.bias[0])}
        return {
            "value": float(direct.logits[0]),
            "completeness": direct.completeness,
            "contributions": tuple(map(Contribution, added.keys(), added.values())),
        }

    def logit(logits: Ragged | Tensor, _texts: Sequence[int]) -> Float[Tensor, " b"]:
        assert isinstance(logits, Ragged), "a model that predicts the next token scores every token"
        last = logits.values[logits.lengths.offsets[1:].long() - 1]
        return last[:, answer] - (0 if distractor is None else last[:, distractor])

    metric = metrics.CustomMetric(logit)
    path: gradients.TokenAttribution | gradients.HeadAttribution
    if method == "integrated":
        path = gradients.integrate_inputs(model, inputs, metric, **options)
        parts = tuple(map(Contribution, words, path.of(0).tolist()))
    else:
        path = gradients.integrate_heads(model, inputs, metric, **options)
        pairs = path.heads["attribution"].items()
        parts = tuple(Contribution(str(head), mean) for head, mean in pairs)
    return {
        "value": float(path.expected[0]),
        "completeness": path.completeness,
        "contributions": parts,
        "path_steps": path.steps,
    }


def _steps(
    model: build.Model, inputs: model_interface.ModelInputs, tokenizer: Any, answer: int
) -> tuple[LayerPrediction, ...]:
    lens = direct_logits.logit_lens(model, inputs, [answer], top_k=1)
    assert lens.answer_log_probabilities is not None
    assert lens.answer_ranks is not None
    probabilities = lens.log_probabilities[:, 0, 0].exp(), lens.answer_log_probabilities[:, 0].exp()
    columns = lens.answers[:, 0, 0], *probabilities, lens.answer_ranks[:, 0]
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return tuple(
        LayerPrediction(layer, _decode(tokenizer, token), *numbers)
        for layer, (token, *numbers) in enumerate(rows, start=-1)
    )


def _decode(tokenizer: Any, token: int) -> str:
    return str(tokenizer.decode([token], skip_special_tokens=False))
