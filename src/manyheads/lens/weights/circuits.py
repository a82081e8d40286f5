"""Heads from their weights alone: what each writes for what it reads, and how well it copies.

The circuits of "A mathematical framework for transformer circuits" (Elhage et al. 2021). Matrices
act on columns: OV = W_O W_V turns what is read into what is written, and a query x scores a key y
by x' QK y with QK = W_Q' W_K. All are kept in factors of the head's size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import Part, StackName, part_of
from manyheads.lens.results.by_head import ByHead
from manyheads.models.build import Model
from manyheads.models.layer import Layer
from manyheads.models.readout import LanguageHead, ReadoutLayer
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.parts.norms import LayerNorm, Normalise, PostNorm
from manyheads.progress import Progress
from manyheads.taps import Head, Sublayer

# Words that are met at once: most heads leave after the first of them.
WORDS_AT_ONCE = 2048
# Below this share of two vectors' lengths their products differ by rounding alone.
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """A matrix as left @ right, the inner size being small."""

    left: Float[Tensor, "a d"]
    right: Float[Tensor, "d b"]

    @property
    def matrix(self) -> Float[Tensor, "a b"]:
        return self.left @ self.right

    def singular_values(self) -> Float[Tensor, " d"]:
        """Those that can differ from zero, largest first."""
        core = torch.linalg.qr(self.left).R @ torch.linalg.qr(self.right.T).R.T
        return torch.linalg.svdvals(core)

    def eigenvalues(self) -> Tensor:
        """Those that can differ from zero: of left @ right they are those of right @ left."""
        return torch.linalg.eigvals(self.right @ self.left)

    def rank(self) -> int:
        """How many singular values stand out of float32's rounding."""
        values = self.singular_values()
        largest = max(self.left.shape[0], self.right.shape[1])
        return int((values > values.max() * largest * torch.finfo(torch.float32).eps).sum())

    def stable_rank(self) -> float:
        """The squared Frobenius norm over the squared largest singular value; 0 of nothing."""
        squares = self.singular_values().square()
        return float(squares.sum() / squares[0]) if squares[0] > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """The vectors by which tokens enter the model, and those that score them at its end."""

    enter: Float[Tensor, "v c"]
    leave: Float[Tensor, "v c"]

    @classmethod
    def of(cls, model: Model) -> "Words":
        """In float32; norms that every token meets on its own are folded in."""
        readout = model.readout
        if isinstance(model, Vision) or not isinstance(model.config.readout, LanguageHead):
            raise InputError(
                f"this {type(model).__name__} has no language head to copy words to",
                "use a model that scores words",
            )
        assert readout is not None
        stack = part_of(model).stack
        table = model.embedding.tokens.weight.detach().float()
        entering = model.embedding.norm(table * model.config.embedding.scale).detach()
        leaving = readout.vectors(model.table).detach().float()
        return cls(entering, folded(leaving, stack.final_norm))


@dataclass(frozen=True, slots=True, eq=False)
class Circuits:
    """The factors of every head of one attention, in float64.

    A norm in front of the attention is folded into what it reads, and a learned scale of a head
    into what it writes. Gates count as open, and positions as equal.
    """

    part: Part

    def ov(self, head: Head) -> Factors:
        """W_O W_V: what is written where this is read."""
        return Factors(self.writes(head), self.reads(head, "value"))

    def qk(self, head: Head) -> Factors:
        """W_Q' W_K: how strongly one token looks at another, before the scale and the softmax."""
        return Factors(self.reads(head, "query").T, self.reads(head, "key"))

    def writes(self, head: Head) -> Float[Tensor, "c d"]:
        attention = self.part.attention(head.layer)
        size = attention.config.size
        columns = attention.output.weight.detach()[:, head.head * size : (head.head + 1) * size]
        if attention.head_scale is not None:
            columns = columns * attention.head_scale.detach()[head.head]
        return columns.double()

    def reads(self, head: Head, what: str) -> Float[Tensor, "d c"]:
        """The rows of "query", "key" or "value"; heads that share keys have the same."""
        attention = self.part.attention(head.layer)
        config = attention.config
        place = head.head
        if what != "query":
            place = config.owners[head.head]
        rows = attention.projections()[what].detach()
        mine = rearrange(rows, "(h d) c -> h d c", d=config.size)[place].double()
        if self.part.sublayer is Sublayer.CROSS and what != "query":
            return mine
        return folded(mine, self._norm(head.layer))

    def _norm(self, layer: int) -> torch.nn.Module:
        module = self.part.stack.layers[layer]
        assert isinstance(module, Layer)
        crosses = self.part.sublayer is Sublayer.CROSS
        residual = module.cross_residual if crosses else module.attention_residual
        return torch.nn.Identity() if isinstance(residual.placement, PostNorm) else residual.norm


def circuits(
    model: Model, *, stack: StackName | None = None, sublayer: Sublayer = Sublayer.ATTENTION
) -> Circuits:
    """The weights of a model's heads, ready to be multiplied.

    >>> from manyheads.models.build import build
    >>> found = circuits(build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0))
    >>> found.ov(Head(0, 3)).matrix.shape, found.ov(Head(0, 3)).rank()
    (torch.Size([32, 32]), 8)
    """
    return Circuits(part_of(model, stack, sublayer))


def score_circuits(
    model: Model,
    *,
    top_k: int = 5,
    sample: int | None = 2048,
    seed: int = 0,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    progress: bool = True,
) -> ByHead:
    """Rank, stable rank, eigenvalue scores and copying score of every head.

    "ov_rank" and "ov_stable_rank" are of W_O W_V. "ov_eigenvalues" and "qk_eigenvalues" are
    sum(Re λ) / sum|λ| of the residual circuits; "copying_eigenvalues" is that of W_U W_O W_V W_E, 1
    where every word raises itself, and "matching_eigenvalues" that of W_E' W_Q' W_K W_E. "copying"
    is the share of words whose own logit is among the `top_k` of W_U W_O W_V W_E, over a `sample`
    of words drawn evenly (None: all). What goes by words is left out for models without any.
    """
    part = part_of(model, stack, sublayer)
    found = Circuits(part)
    copying = matching = None
    if isinstance(model.config.readout, LanguageHead):
        words = Words.of(model)
        copying = _Copying(words, _draw(words, sample, seed), top_k)
        matching = _met(words.enter, words.enter)

    def score(head: Head) -> dict[str, float]:
        alone = _alone(found, head)
        if copying is None or matching is None:
            return alone
        qk = found.qk(head)
        values = torch.linalg.eigvals(qk.right @ matching @ qk.left)
        return alone | {"matching_eigenvalues": eigenvalue_score(values)} | copying(found.ov(head))

    return _each_head(part, score, top_k, 0 if copying is None else len(copying.drawn), progress)


def score_copying(
    model: Model,
    *,
    top_k: int = 5,
    sample: int | None = 2048,
    seed: int = 0,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    progress: bool = True,
) -> ByHead:
    """Of `score_circuits` "copying" and "copying_eigenvalues" alone, at a part of the cost."""
    part = part_of(model, stack, sublayer)
    found, words = Circuits(part), Words.of(model)
    copying = _Copying(words, _draw(words, sample, seed), top_k)

    def score(head: Head) -> dict[str, float]:
        return copying(found.ov(head))

    return _each_head(part, score, top_k, len(copying.drawn), progress)


def _each_head(
    part: Part, score: Callable[[Head], dict[str, float]], top_k: int, words: int, progress: bool
) -> ByHead:
    rows = []
    with Progress("reading weights", total=len(part.heads), unit="heads", enabled=progress) as bar:
        for head in part.heads:
            rows.append(score(head))
            bar.advance()
    means = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    facts: dict[str, Any] = {"top_k": top_k, "words": words}
    return ByHead(kind="circuits", blocks=part.blocks, means=means, facts=facts)


def eigenvalue_score(values: Tensor) -> float:
    """sum(Re λ) / sum|λ|: 1 where all are positive, 0 where they cancel or there are none."""
    total = values.abs().sum()
    return float(values.real.sum() / total) if total > 0 else 0.0


def copying_score(
    ov: Factors, words: Words, drawn: Sequence[int] | Tensor, top_k: int = 5
) -> float:
    """The share of words among whose `top_k` logits, when the head reads them, is their own.

    A word that `top_k` others have beaten is not asked again, so that a head which copies little
    meets a small part of the vocabulary; level words count as beaten.
    """
    drawn = torch.as_tensor(drawn, device=words.enter.device)
    left = ov.left.float()
    read, mine = words.enter[drawn] @ ov.right.T.float(), words.leave[drawn] @ left
    # A head that writes nothing puts all words level: none of them is copied.
    least = (read * mine).sum(1) - ROUNDING * read.norm(dim=1) * mine.norm(dim=1)
    beaten_by = torch.zeros_like(drawn)
    asked = torch.arange(len(drawn), device=drawn.device)
    # Each portion is from the whole of the vocabulary, whose beginning is often unlike the rest.
    portions = -(-len(words.leave) // WORDS_AT_ONCE)
    for first in range(portions):
        scored = _scored(read[asked], left, words.leave[first::portions])
        itself = (drawn[asked] % portions == first).nonzero().squeeze(1)
        scored[itself, drawn[asked[itself]] // portions] = -torch.inf
        beaten_by[asked] += (scored >= least[asked, None]).sum(1)
        asked = asked[beaten_by[asked] < top_k]
        if not len(asked):
            break
    return len(asked) / len(drawn)


def _scored(
    read: Float[Tensor, "k d"], left: Float[Tensor, "c d"], leave: Float[Tensor, "w c"]
) -> Float[Tensor, "k w"]:
    """read left' leave', the cheaper product first."""
    few = len(read) < left.shape[1]
    return (read @ left.T) @ leave.T if few else read @ (leave @ left).T


def _alone(found: Circuits, head: Head) -> dict[str, float]:
    ov, qk = found.ov(head), found.qk(head)
    return {
        "ov_rank": float(ov.rank()),
        "ov_stable_rank": ov.stable_rank(),
        "ov_eigenvalues": eigenvalue_score(ov.eigenvalues()),
        "qk_eigenvalues": eigenvalue_score(qk.eigenvalues()),
    }


class _Copying:
    """How well the words that a head reads come out as themselves."""

    def __init__(self, words: Words, drawn: Tensor, top_k: int) -> None:
        self.words, self.drawn, self.top_k = words, drawn, top_k
        self._met = _met(words.enter, words.leave)

    def __call__(self, ov: Factors) -> dict[str, float]:
        values = torch.linalg.eigvals(ov.right @ self._met @ ov.left)
        return {
            "copying_eigenvalues": eigenvalue_score(values),
            "copying": copying_score(ov, self.words, self.drawn, self.top_k),
        }


def _met(one: Float[Tensor, "v c"], other: Float[Tensor, "v c"]) -> Float[Tensor, "c c"]:
    """one' other, through which all heads' words meet; c x c, not v x v."""
    found = one.new_zeros(one.shape[1], other.shape[1], dtype=torch.float64)
    for some, others in zip(one.split(8192), other.split(8192), strict=True):
        found += some.double().T @ others.double()
    return found


def _draw(words: Words, sample: int | None, seed: int) -> Tensor:
    count = len(words.enter)
    if sample is None or sample >= count:
        return torch.arange(count, device=words.enter.device)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:sample].sort().values.to(words.enter.device)


def folded(rows: Float[Tensor, "d c"], norm: torch.nn.Module) -> Float[Tensor, "d c"]:
    """Rows that read the stream before the norm as they read it after, up to the norm's divisor."""
    if not isinstance(norm, Normalise):
        return rows
    weight = norm.weight.detach().to(rows.dtype)
    rows = rows * (weight + 1 if norm.config.centred else weight)
    if isinstance(norm.config, LayerNorm):
        rows = rows - rows.mean(1, keepdim=True)
    return rows


Through = Literal["unembedding", "transform and unembedding", "embedding"]


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The vectors of the words at both ends of a stack, and what leads to the last.

    `through` is "unembedding" where a language head scores the words, with the final norm folded
    in; "transform and unembedding" where the head has a layer of its own (BERT), which a direction
    is led through as if it were alone; "embedding" where there is no language head, and the words
    that enter the model stand for those that leave it.
    """

    enter: Float[Tensor, "v c"]
    leave: Float[Tensor, "v c"]
    through: Through
    final_norm: nn.Module
    readout: ReadoutLayer | None

    def said(self, directions: Float[Tensor, "m c"]) -> Float[Tensor, "m v"]:
        """The score that each direction, written to the stream, gives every word."""
        if self.through == "transform and unembedding":
            assert self.readout is not None
            with torch.no_grad():
                weight = next(self.readout.parameters())
                normed = self.final_norm(directions.to(weight.dtype))
                directions = self.readout.features(normed).float()
        return directions @ self.leave.T

    def read(self, directions: Float[Tensor, "m c"]) -> Float[Tensor, "m v"]:
        """The cosine of each direction with the vector by which every word enters."""
        return F.normalize(directions, dim=-1) @ F.normalize(self.enter, dim=-1).T


def vocabulary_of(model: Model, stack: StackName | None = None) -> Vocabulary:
    """The words of a model's stack; a `Vision` has none, and is refused."""
    if isinstance(model, Vision):
        raise InputError("a Vision has no words to read or write", "use a model of texts")
    embedding, end = model.embedding, model.stack if not isinstance(model, Seq2Seq) else None
    if isinstance(model, Seq2Seq):
        end = model.encoder if stack == "encoder" else model.decoder
        if stack != "encoder" and model.target_embedding is not None:
            embedding = model.target_embedding
    assert end is not None
    table = embedding.tokens.weight.detach().float()
    with torch.no_grad():
        scaled = embedding.tokens.weight * embedding.config.scale
        enter = embedding.norm(scaled).detach().float()
    head = model.config.readout
    if stack == "encoder" or not isinstance(head, LanguageHead):
        return Vocabulary(enter, table, "embedding", end.final_norm, None)
    readout = model.readout
    assert readout is not None
    words = readout.vectors(model.table).detach().float()
    if head.transform is not None:
        return Vocabulary(enter, words, "transform and unembedding", end.final_norm, readout)
    leave = folded(words, end.final_norm) * head.scale
    return Vocabulary(enter, leave, "unembedding", end.final_norm, readout)
