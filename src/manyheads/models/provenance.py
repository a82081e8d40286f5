"""What a model folder holds besides the weights."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.errors import LongTextWarning
from manyheads.parts.feedforward import ACTIVATIONS, Activation

Pooling = Literal["mean", "cls", "last"]
Role = Literal["query", "document"]
# What a classification head gives a class to.
Classified = Literal["texts", "tokens", "images"]


@dataclass(frozen=True, slots=True, eq=False)
class DenseProjection:
    """A linear layer and an activation behind the model; it is not part of the model."""

    weight: Float[Tensor, "o i"]
    bias: Float[Tensor, " o"] | None
    activation: Activation | Literal["none"] = "tanh"

    def __call__(self, x: Float[Tensor, "b i"]) -> Float[Tensor, "b o"]:
        bias = None if self.bias is None else self.bias.to(x)
        projected = F.linear(x, self.weight.to(x), bias)
        return projected if self.activation == "none" else ACTIVATIONS[self.activation](projected)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DenseProjection) or self.activation != other.activation:
            return False
        if (self.bias is None) != (other.bias is None):
            return False
        same = self.bias is None or other.bias is None or torch.equal(self.bias, other.bias)
        return same and torch.equal(self.weight, other.weight)

    def __hash__(self) -> int:
        return hash((self.weight.shape, self.activation))


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceConfig:
    """How a model was trained to embed sentences: tokens are pooled, projected and normalized.

    Texts are truncated to `max_length` tokens, special tokens included.
    """

    pooling: Pooling = "mean"
    dense: tuple[DenseProjection, ...] = ()
    normalize: bool = False
    max_length: int | None = None

    def project(self, pooled: Float[Tensor, "b c"]) -> Float[Tensor, "b o"]:
        """Through the dense projections, if there are any."""
        for dense in self.dense:
            pooled = dense(pooled)
        return pooled

    def width(self, pooled: int) -> int:
        """The size of an embedding, given that of the pooled tokens."""
        return self.dense[-1].weight.shape[0] if self.dense else pooled


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class QueryExpansion:
    """Queries are extended to `length` tokens with `token`, usually [MASK] (arXiv 2004.12832).

    The added tokens get vectors, and these count in the score. Unless `attend` is set, no token
    attends to them. Queries of more than `length` tokens are truncated if `truncates`.
    """

    length: PositiveInt
    token: int
    attend: bool = False
    truncates: bool = True


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LateInteractionConfig:
    """How a model gives one vector per token, for late interaction (ColBERT, arXiv 2004.12832).

    The text is read behind the prompt of its role, such as "[unused0] ", and truncated to the
    length of its role, or to `max_length`. Hidden states are projected and normalized. Tokens in
    `skipped`, such as punctuation, get no vector in the roles `skipped_in`.
    """

    projection: tuple[DenseProjection, ...] = ()
    normalize: bool = True
    query_prompt: str = ""
    document_prompt: str = ""
    query_length: PositiveInt | None = None
    document_length: PositiveInt | None = None
    max_length: PositiveInt | None = None
    expansion: QueryExpansion | None = None
    skipped: tuple[int, ...] = ()
    skipped_in: tuple[Role, ...] = ("document",)

    def prompt(self, role: Role) -> str:
        """What is put in front of a text of this role."""
        return self.query_prompt if role == "query" else self.document_prompt

    def length(self, role: Role) -> int | None:
        """How many tokens of a text of this role are read, special tokens included."""
        if role == "document":
            return self.document_length or self.max_length
        if self.expansion is None:
            return self.query_length or self.max_length
        if self.expansion.truncates:
            return self.expansion.length
        ceiling = self.query_length or self.max_length
        return None if ceiling is None else max(ceiling, self.expansion.length)

    def project(self, states: Float[Tensor, "n c"]) -> Float[Tensor, "n o"]:
        """The vectors of tokens from their hidden states."""
        for dense in self.projection:
            states = dense(states)
        return F.normalize(states, dim=-1) if self.normalize else states

    def width(self, states: int) -> int:
        """The size of a vector, given that of a hidden state."""
        return self.projection[-1].weight.shape[0] if self.projection else states


# How `transformers` names classes that have no name, before their number.
DEFAULT_LABEL = "LABEL_"


class Provenance:
    """What came with a model's folder, so that it can be saved again completely.

    `source_config` is its config.json and `generation` its generation_config.json. `unread`
    are tensors of the file that no part of the model uses, such as a pooler. `side_files` are the
    small files beside the weights, by name. A model that was built here has none of these.
    `source` is where the model itself was loaded from; a copy with other weights has none.
    `trained_length` is how long the texts were that the model was trained on, if that is known.
    """

    source: str = ""
    source_config: dict[str, Any] | None = None
    tokenizer: Any = None
    sentence: SentenceConfig | None = None
    late: LateInteractionConfig | None = None
    generation: Mapping[str, Any] = MappingProxyType({})
    side_files: Mapping[str, bytes] = MappingProxyType({})
    unread: Mapping[str, Tensor] = MappingProxyType({})
    trained_length: int | None = None

    def copy_provenance(self, other: "Provenance") -> None:
        """Copy all this but `source` from the model that this one is made from."""
        for name in Provenance.__annotations__:
            if name != "source":
                setattr(self, name, getattr(other, name))

    def warn_if_longer(self, tokens: int, what: str) -> None:
        """Warn that a text is longer than those that the model was trained on."""
        if self.trained_length is not None and tokens > self.trained_length:
            warnings.warn(
                f"{what} has {tokens:,} tokens, and the model was trained on up to "
                f"{self.trained_length:,}: results beyond that are unreliable",
                LongTextWarning,
                stacklevel=3,
            )

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in order; empty if they have none."""
        named = (self.source_config or {}).get("id2label") or {}
        names = tuple(str(named[key]) for key in sorted(named, key=int))
        unnamed = all(name == f"{DEFAULT_LABEL}{index}" for index, name in enumerate(names))
        return () if unnamed else names
