"""Readouts: language heads, and classification heads for sequences, tokens and images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import PositiveFloat, Probability
from manyheads.argument_checks import check_fields
from manyheads.errors import ConfigError, InputError
from manyheads.models.provenance import Provenance
from manyheads.parts import feedforward, norms
from manyheads.ragged import Lengths, Ragged

Pool = Literal["first", "mean", "last", "first_and_mean"]


@dataclass(frozen=True, slots=True)
class NoReadout:
    """No readout: the output is the hidden states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadoutTransform:
    """Dense, activation, norm: what BERT has before its language head.

    Its outputs have `width` channels: in ALBERT those of the token vectors.
    """

    activation: feedforward.Activation = "gelu"
    norm: norms.Norm = norms.LayerNorm()
    bias: bool = True
    width: int | Literal["same"] = "same"


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageHead:
    """Logits of every token; a `tied` head uses the token embedding as its weight.

    `softcap` bends logits to softcap * tanh(logits / softcap), as in Gemma 2.
    """

    tied: bool = True
    transform: ReadoutTransform | None = None
    bias: bool = False
    scale: float = 1.0
    softcap: PositiveFloat | Literal["none"] = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassHead:
    """Logits of the classes of a sequence or image, from its pooled tokens.

    "first_and_mean" joins the first token and the mean of those from `mean_from` on, as DINOv2.
    """

    classes: int
    pool: Pool = "first"
    mean_from: int = 0
    transform: ReadoutTransform | None = None
    bias: bool = True

    def __post_init__(self) -> None:
        if self.pool == "first_and_mean" and self.transform is not None:
            problem = 'pool="first_and_mean" is not supported with a transform'
            raise ConfigError(problem, "leave one of them out")

    def pooled(self, x: Float[Tensor, "n c"], lengths: Lengths) -> Float[Tensor, "b pooled"]:
        """One vector per sequence."""
        if self.pool == "first_and_mean":
            mean = pooled(x, lengths, "mean", self.mean_from)
            return torch.cat((pooled(x, lengths, "first"), mean), dim=1)
        return pooled(x, lengths, self.pool)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHead:
    """Logits of the classes of each token."""

    classes: int
    transform: ReadoutTransform | None = None
    bias: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanHead:
    """Two logits per token: that an answer starts here, and that it ends here."""

    transform: ReadoutTransform | None = None
    bias: bool = True

    @property
    def classes(self) -> int:
        return 2


# Keys of a config.json; `transformers` knows the first and keeps the others.
PROBLEM_TYPE = "problem_type"
TEMPERATURE, THRESHOLDS = "classifier_temperature", "classifier_thresholds"
MULTI_LABEL, SINGLE_LABEL = "multi_label_classification", "single_label_classification"


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSettings:
    """How logits become probabilities and labels.

    Of several classes one is right, or with `multi_label` any number of them, each decided alone:
    a class is a label if its probability reaches its threshold; one threshold may stand for all.
    Logits are divided by `temperature` (arXiv 1706.04599).
    """

    multi_label: bool = False
    temperature: PositiveFloat = 1.0
    thresholds: tuple[Probability, ...] = (0.5,)

    def probabilities(self, logits: Float[Tensor, "*n classes"]) -> Float[Tensor, "*n classes"]:
        """The probabilities of the classes, in float32."""
        scaled = logits.float() / self.temperature
        return scaled.sigmoid() if self.multi_label else scaled.softmax(-1)

    def description(self) -> dict[str, Any]:
        """The keys of config.json that say this; defaults are left out."""
        settings: dict[str, Any] = {}
        if self.multi_label:
            settings[PROBLEM_TYPE] = MULTI_LABEL
        if self.temperature != 1.0:
            settings[TEMPERATURE] = self.temperature
        if self.thresholds != (0.5,):
            settings[THRESHOLDS] = list(self.thresholds)
        return settings


def classifier_of(model: Provenance) -> ClassifierSettings:
    """The settings of a model's classes, as its config.json has them."""
    source_config: Mapping[str, Any] = getattr(model, "source_config", None) or {}
    try:
        return ClassifierSettings(
            multi_label=source_config.get(PROBLEM_TYPE) == MULTI_LABEL,
            temperature=float(source_config.get(TEMPERATURE, 1.0)),
            thresholds=tuple(map(float, source_config.get(THRESHOLDS, (0.5,)))),
        )
    except (TypeError, ValueError):
        raise ConfigError(
            f"{TEMPERATURE}={source_config.get(TEMPERATURE)!r:.100} and "
            f"{THRESHOLDS}={source_config.get(THRESHOLDS)!r:.100} must be a number and a list of "
            "numbers",
            "correct config.json",
        ) from None


Readout = NoReadout | LanguageHead | ClassHead | TokenHead | SpanHead


class TransformLayer(nn.Module):
    """The layers of a `ReadoutTransform`."""

    def __init__(self, config: ReadoutTransform, width: int) -> None:
        super().__init__()
        self.config = config
        self.width = width if config.width == "same" else config.width
        self.dense = nn.Linear(width, self.width, bias=config.bias)
        self.norm = norms.make_norm(config.norm, self.width)

    def forward(self, x: Float[Tensor, "n c"]) -> Float[Tensor, "n e"]:
        return self.norm(feedforward.ACTIVATIONS[self.config.activation](self.dense(x)))


class ReadoutLayer(nn.Module):
    """Any of the readouts; `table` is the token embedding, for tied ones.

    `product` multiplies by the vectors of tokens if they are stored as integers.
    """

    product: Callable[[Tensor], Tensor] | None

    def __init__(
        self, config: LanguageHead | ClassHead | TokenHead | SpanHead, width: int, vocabulary: int
    ) -> None:
        super().__init__()
        self.config = config
        transform = config.transform
        self.transform = nn.Identity() if transform is None else TransformLayer(transform, width)
        outputs = vocabulary if isinstance(config, LanguageHead) else config.classes
        tied = isinstance(config, LanguageHead) and config.tied
        joined = isinstance(config, ClassHead) and config.pool == "first_and_mean"
        if isinstance(self.transform, TransformLayer):
            width = self.transform.width
        inputs = 2 * width if joined else width
        self.weight = None if tied else nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if config.bias else None
        self.product = None
        if self.weight is not None:
            nn.init.normal_(self.weight, std=0.02)

    def forward(self, hidden: Ragged, table: Float[Tensor, "v c"] | None) -> Ragged | Tensor:
        x = hidden.values
        if isinstance(self.config, ClassHead):
            x = self.config.pooled(x, hidden.lengths)
        logits = self.logits(x, table)
        return logits if isinstance(self.config, ClassHead) else hidden.with_values(logits)

    def logits(
        self, x: Float[Tensor, "*n c"], table: Float[Tensor, "v e"] | None
    ) -> Float[Tensor, "*n o"]:
        """The logits of hidden states, or of pooled ones."""
        features = self.features(x)
        if self.product is None:
            return self.finish(F.linear(features, self.vectors(table), self.bias))
        product = self.product(features)
        return self.finish(product if self.bias is None else product + self.bias)

    def features(self, x: Float[Tensor, "n c"]) -> Float[Tensor, "n e"]:
        """The features that are multiplied with the vectors of tokens or classes."""
        x = self.transform(x)
        if isinstance(self.config, LanguageHead) and self.config.scale != 1.0:
            x = x * self.config.scale
        return x

    @property
    def softcap(self) -> float | None:
        """The bound of the logits, if they are capped."""
        cap = self.config.softcap if isinstance(self.config, LanguageHead) else "none"
        return None if cap == "none" else cap

    @property
    def factor(self) -> float:
        """What the logits are multiplied by before any cap."""
        return self.config.scale if isinstance(self.config, LanguageHead) else 1.0

    @property
    def subtracts(self) -> bool:
        """Whether differences of logits are products with differences of vectors."""
        return self.softcap is None

    def finish(self, logits: Float[Tensor, "*n v"]) -> Float[Tensor, "*n v"]:
        """What still happens to the products: a cap, or nothing."""
        cap = self.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def vectors(self, table: Float[Tensor, "v c"] | None) -> Float[Tensor, "outputs e"]:
        """One vector per token or class."""
        weight = table if self.weight is None else self.weight
        if isinstance(self.product, nn.Linear):
            return self.product.weight
        assert weight is not None, "a tied readout needs the token embedding"
        return weight


def pooled(
    x: Float[Tensor, "n c"],
    lengths: Lengths,
    pool: Literal["first", "mean", "last"],
    mean_from: int = 0,
) -> Float[Tensor, "b c"]:
    """One vector per sequence, zeros if it is empty; a mean is of tokens from `mean_from` on."""
    if lengths.shard is not None:
        raise InputError(
            "a vector of a whole text is pooled from tokens of several processes",
            "read such a model in one process",
        )
    counts = lengths.offsets.diff().unsqueeze(1)
    if pool == "mean":
        if mean_from:
            x, counts = x * (lengths.positions >= mean_from)[:, None], counts - mean_from
        summed = x.new_zeros(lengths.count, x.shape[1]).index_add(0, lengths.sequence_of_token, x)
        return summed / counts.clamp(min=1)
    index = lengths.offsets[:-1] if pool == "first" else lengths.offsets[1:] - 1
    if x.shape[0] == 0:
        return x.new_zeros(lengths.count, x.shape[1])
    return torch.where(counts > 0, x[index.clamp(0, x.shape[0] - 1).long()], 0.0)


def make_readout(config: Readout, width: int, vocabulary: int = 0) -> ReadoutLayer | None:
    return None if isinstance(config, NoReadout) else ReadoutLayer(config, width, vocabulary)
