"""OV and QK circuits: what each head writes for what it reads, from the weights alone.

The circuits of "A mathematical framework for transformer circuits" (Elhage et al. 2021). Matrices
act on columns: OV = W_O W_V maps what is read to what is written, and a query x scores a key y by
x' QK y with QK = W_Q' W_K. All are stored as factors of the head's size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError, NativeModelError
from manyheads.lens.inputs.cached_run import HeadScope, StackName, head_scope
from manyheads.lens.results.addresses import HeadName, check_one_stream
from manyheads.lens.results.tables import ByHead
from manyheads.models import build, seq2seq, vision
from manyheads.models.layer import Residual
from manyheads.models.readout import LanguageHead, ReadoutLayer, TransformLayer
from manyheads.parts.norms import ChannelScale, LayerNorm, Normalize, PostNorm
from manyheads.progress import Progress
from manyheads.taps import Head, Sublayer

# Tokens that are scored first and at most at once: most heads are done after the first chunk.
FIRST_TOKENS, TOKENS_AT_ONCE = 256, 2048
# Tokens of several heads that are compared with the vocabulary together.
MAX_CANDIDATES = 8192
# Products of two vectors that differ by less than this, relative to their norms, count as equal.
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class FactoredMatrix:
    """A matrix left @ right of low rank."""

    left: Float[Tensor, "a d"]
    right: Float[Tensor, "d b"]

    @property
    def matrix(self) -> Float[Tensor, "a b"]:
        return self.left @ self.right

    def singular_values(self) -> Float[Tensor, " d"]:
        """The singular values that can differ from zero, largest first."""
        core = torch.linalg.qr(self.left).R @ torch.linalg.qr(self.right.T).R.T
        return torch.linalg.svdvals(core)

    def eigenvalues(self) -> Tensor:
        """The eigenvalues that can differ from zero, which are those of right @ left."""
        return torch.linalg.eigvals(self.right @ self.left)

    def rank(self) -> int:
        """How many singular values exceed the rounding error of float32."""
        values = self.singular_values()
        largest = max(self.left.shape[0], self.right.shape[1])
        return int((values > values.max() * largest * torch.finfo(torch.float32).eps).sum())

    def stable_rank(self) -> float:
        """The squared Frobenius norm over the squared largest singular value; 0 for zeros."""
        squares = self.singular_values().square()
        return float(squares.sum() / squares[0]) if squares[0] > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class TokenVectors:
    """The embedding and the unembedding vector of each token."""

    embed: Float[Tensor, "v c"]
    unembed: Float[Tensor, "v c"]

    @classmethod
    def of(cls, model: build.Model) -> "TokenVectors":
        """Both in float32, with the embedding norm and the final norm folded in."""
        readout = model.readout
        if isinstance(model, vision.Vision) or not isinstance(model.config.readout, LanguageHead):
            raise InputError(
                f"this {type(model).__name__} has no language head", "use a model that has one"
            )
        assert readout is not None
        stack = head_scope(model).stack
        check_one_stream(stack)
        table = model.embedding.tokens.weight.detach().float()
        embed = model.embedding.finished(table * model.config.embedding.scale).detach()
        unembed = readout.vectors(model.table).detach().float()
        if unembed.shape[1] != stack.config.width:
            # The vectors of ALBERT are narrower than the stream: its transform makes up for it.
            assert isinstance(readout.transform, TransformLayer)
            unembed = unembed @ readout.transform.dense.weight.detach().float()
        return cls(embed, folded(unembed, stack.final_norm))


@dataclass(frozen=True, slots=True, eq=False)
class Circuits:
    """The factored circuits of every head, in float64.

    A norm in front of the attention is folded into what a head reads; a learned scale
    and a norm of the head's output and a norm after the attention into what it writes, up to the
    norms' divisors. Gates count as
    open, and positions are ignored.
    """

    scope: HeadScope

    def ov(self, head: HeadName) -> FactoredMatrix:
        """W_O W_V: what the head writes for what it reads."""
        return FactoredMatrix(self.writes(head), self.reads(head, "value"))

    def qk(self, head: HeadName) -> FactoredMatrix:
        """W_Q' W_K: the attention score of two tokens, before scaling and softmax."""
        return FactoredMatrix(self.reads(head, "query").T, self.reads(head, "key"))

    def writes(self, head: HeadName) -> Float[Tensor, "c d"]:
        head = self.scope.head(head)
        attention = self.scope.module(head.layer)
        if attention.output is None:
            raise NativeModelError("the output projection, which was not found here,")
        weight = attention.output.weight.detach()
        size = weight.shape[1] // attention.config.heads
        columns = weight[:, head.head * size : (head.head + 1) * size]
        if isinstance(attention, Attention):
            columns = folded(columns, attention.output_norm)
            if attention.head_scale is not None:
                columns = columns * attention.head_scale.detach()[head.head]
        residual = self._residual(head.layer)
        return through(columns.double().T, None if residual is None else residual.second_norm).T

    def reads(self, head: HeadName, what: str) -> Float[Tensor, "d c"]:
        """The rows of "query", "key" or "value"; heads that share keys share these rows."""
        head = self.scope.head(head)
        attention = self.scope.attention(head.layer)
        config = attention.config
        index = head.head if what == "query" else config.owners[head.head]
        rows = attention.projections()[what].detach()
        mine = rearrange(rows, "(h d) c -> h d c", d=config.size)[index].double()
        residual = self._residual(head.layer)
        assert residual is not None, "only native models have projections to read"
        from_memory = self.scope.sublayer is Sublayer.CROSS and what != "query"
        if from_memory or isinstance(residual.placement, PostNorm):
            return mine
        return folded(mine, residual.norm)

    def _residual(self, layer: int) -> Residual | None:
        """The norms around the attention; None in a wrapped model."""
        module = self.scope.stack.layers[layer]
        residual = getattr(module, f"{self.scope.sublayer.value}_residual", None)
        return residual if isinstance(residual, Residual) else None


@wrapping_models
def circuits(
    model: build.Model, *, stack: StackName | None = None, sublayer: Sublayer = Sublayer.ATTENTION
) -> Circuits:
    """The OV and QK circuits of a model's heads.

    >>> from manyheads.models.build import build
    >>> result = circuits(build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0))
    >>> result.ov("L0H3").matrix.shape, result.ov("L0H3").rank()
    (torch.Size([32, 32]), 8)
    """
    return Circuits(head_scope(model, stack, sublayer))


@wrapping_models
def score_circuits(
    model: build.Model,
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
    if every token raises its own logit, and "matching_eigenvalues" that of W_E' W_Q' W_K W_E.
    "copying" is the fraction of a random `sample` of tokens (None: all) whose own logit is among
    the `top_k` of W_U W_O W_V W_E. Models without a language head have no token scores. Heads of
    mixers, which read more than a token at a time, are left out.
    """
    scope = head_scope(model, stack, sublayer, mixers=False)
    factored = Circuits(scope)
    copying = matching = None
    if isinstance(model.config.readout, LanguageHead):
        tokens = TokenVectors.of(model)
        copying = _Copying(tokens, sample, seed, top_k)
        matching = _product(tokens.embed, tokens.embed)

    def score(head: Head) -> dict[str, float]:
        ov, qk = factored.ov(head), factored.qk(head)
        scores = {
            "ov_rank": float(ov.rank()),
            "ov_stable_rank": ov.stable_rank(),
            "ov_eigenvalues": eigenvalue_score(ov.eigenvalues()),
            "qk_eigenvalues": eigenvalue_score(qk.eigenvalues()),
        }
        if copying is not None and matching is not None:
            values = torch.linalg.eigvals(qk.right @ matching @ qk.left)
            scores |= {"matching_eigenvalues": eigenvalue_score(values)} | copying.add(ov)
        return scores

    return _each_head(scope, score, copying, progress, top_k=top_k)


def score_copying(
    model: build.Model,
    *,
    sample: int | None = 2048,
    sublayer: Sublayer = Sublayer.ATTENTION,
    progress: bool = True,
) -> ByHead:
    """Only "copying" and "copying_eigenvalues" of `score_circuits`, at a fraction of the cost."""
    scope = head_scope(model, None, sublayer, mixers=False)
    factored, copying = Circuits(scope), _Copying(TokenVectors.of(model), sample)

    def score(head: Head) -> dict[str, float]:
        return copying.add(factored.ov(head))

    return _each_head(scope, score, copying, progress, top_k=copying.top_k)


def _each_head(
    scope: HeadScope,
    score: Callable[[Head], dict[str, float]],
    copying: "_Copying | None",
    progress: bool,
    **metadata: Any,
) -> ByHead:
    rows = []
    with Progress("reading weights", total=len(scope.heads), unit="heads", enabled=progress) as bar:
        for head in scope.heads:
            rows.append(score(head))
            bar.advance()
    means = {name: np.array([row[name] for row in rows]) for name in rows[0]}
    metadata["tokens"] = 0
    if copying is not None:
        means["copying"] = np.array(copying.scores.result())
        metadata["tokens"] = len(copying.drawn)
    return ByHead(kind="circuits", blocks=scope.blocks, means=means, metadata=metadata)


def eigenvalue_score(values: Tensor) -> float:
    """sum(Re λ) / sum|λ|: 1 if all are positive, 0 if they cancel or are all zero."""
    total = values.abs().sum()
    return float(values.real.sum() / total) if total > 0 else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Rivals:
    """The unembedding vectors, those that beat most others first, and the place of each token.

    These are the ones far from the mean: what all vectors have in common raises every logit alike.
    """

    vectors: Float[Tensor, "v c"]
    places: Int[Tensor, " v"]

    @classmethod
    def of(cls, unembed: Float[Tensor, "v c"]) -> "Rivals":
        order = (unembed - unembed.mean(0)).norm(dim=1).argsort(descending=True, stable=True)
        return cls(unembed[order], order.argsort())


def copying_score(
    ov: FactoredMatrix,
    tokens: TokenVectors,
    drawn: Sequence[int] | Tensor,
    top_k: int = 5,
    rivals: Rivals | None = None,
) -> float:
    """The fraction of tokens whose own logit is among the `top_k` when the head reads them."""
    rivals = Rivals.of(tokens.unembed) if rivals is None else rivals
    scores = CopyingScores(tokens, torch.as_tensor(drawn), top_k, rivals)
    scores.add(ov)
    return scores.result()[0]


@dataclass(frozen=True, slots=True, eq=False)
class _CopiedTokens:
    """Tokens that may be copied: the head that reads each, what it writes, and its own logit.

    `places` are those among the rivals, and `beaten_by` counts the rivals with a higher logit.
    """

    heads: Int[Tensor, " k"]
    written: Float[Tensor, "k c"]
    least: Float[Tensor, " k"]
    places: Int[Tensor, " k"]
    beaten_by: Int[Tensor, " k"]

    @classmethod
    def join(cls, parts: Sequence["_CopiedTokens"]) -> "_CopiedTokens":
        names = [field.name for field in fields(cls)]
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in names))

    def meet(self, scored: Float[Tensor, "k w"], start: int, top_k: int) -> Int[Tensor, " left"]:
        """Count the rivals from `start` on that win; the rows that fewer than `top_k` have beaten.

        `scored` is overwritten.
        """
        own = self.places - start
        itself = ((own >= 0) & (own < scored.shape[1])).nonzero().squeeze(1)
        scored[itself, own[itself]] = -torch.inf
        # Counting takes several times as long as the maximum, which already rules out most.
        beaten = (scored.amax(1) >= self.least).nonzero().squeeze(1)
        self.beaten_by[beaten] += (scored[beaten] >= self.least[beaten, None]).sum(1)
        return (self.beaten_by < top_k).nonzero().squeeze(1)

    def take(self, rows: Int[Tensor, " left"]) -> "_CopiedTokens":
        return _CopiedTokens(*(getattr(self, field.name)[rows] for field in fields(self)))


class CopyingScores:
    """The copying scores of heads, in the order in which they are added.

    A token that `top_k` others have beaten is dropped, so that a head that copies little is
    compared with a small part of the vocabulary; ties count as beaten. What remains of many heads
    meets the rest of the vocabulary together, since products with few rows are slow.
    """

    def __init__(
        self, tokens: TokenVectors, drawn: Int[Tensor, " k"], top_k: int, rivals: Rivals
    ) -> None:
        self._tokens, self._drawn = tokens, drawn.to(tokens.embed.device)
        self._top_k, self._rivals = top_k, rivals
        sizes, count = [FIRST_TOKENS], len(rivals.vectors)
        while sum(sizes) < count:
            sizes.append(min(2 * sizes[-1], TOKENS_AT_ONCE))
        ends = np.cumsum(sizes).clip(max=count).tolist()
        self._chunks = list(map(slice, [0, *ends[:-1]], ends))
        # By the chunk that they meet next.
        self._waiting: list[list[_CopiedTokens]] = [[] for _ in self._chunks]
        self._rows = 0
        self._copied: list[int] = []

    def add(self, ov: FactoredMatrix) -> None:
        head, drawn, left = len(self._copied), self._drawn, ov.left.float()
        self._copied.append(0)
        read = self._tokens.embed[drawn] @ ov.right.T.float()
        mine = self._tokens.unembed[drawn] @ left
        # A head that writes nothing ties all tokens: none is copied.
        least = (read * mine).sum(1) - ROUNDING * read.norm(dim=1) * mine.norm(dim=1)
        # Until few tokens remain, products of the head's size are the cheaper ones.
        alive = _CopiedTokens(
            heads=torch.full_like(drawn, head),
            written=read,
            least=least,
            places=self._rivals.places[drawn],
            beaten_by=torch.zeros_like(drawn),
        )
        for number, chunk in enumerate(self._chunks):
            if number and len(alive.heads) < left.shape[1]:
                if len(alive.heads):
                    alive = replace(alive, written=alive.written @ left.T)
                    self._waiting[number].append(alive)
                    self._rows += len(alive.heads)
                break
            scored = alive.written @ (self._rivals.vectors[chunk] @ left).T
            alive = alive.take(alive.meet(scored, chunk.start, self._top_k))
        else:
            self._copied[head] = len(alive.heads)
        if self._rows > MAX_CANDIDATES:
            self._finish()

    def result(self) -> list[float]:
        self._finish()
        return [copied / len(self._drawn) for copied in self._copied]

    def _finish(self) -> None:
        """The tokens that remain meet the rest of the vocabulary."""
        alive: list[_CopiedTokens] = []
        for chunk, waiting in zip(self._chunks, self._waiting, strict=True):
            alive += waiting
            waiting.clear()
            if alive:
                joined = _CopiedTokens.join(alive)
                scored = joined.written @ self._rivals.vectors[chunk].T
                alive = [joined.take(joined.meet(scored, chunk.start, self._top_k))]
        for part in alive:
            for head in part.heads.tolist():
                self._copied[head] += 1
        self._rows = 0


class _Copying:
    """The copying scores of all heads, and of each its eigenvalues."""

    def __init__(
        self, tokens: TokenVectors, sample: int | None, seed: int = 0, top_k: int = 5
    ) -> None:
        count = len(tokens.embed)
        drawn = torch.arange(count)
        if sample is not None and sample < count:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
            drawn = order[:sample].sort().values
        self.drawn, self.top_k = drawn.to(tokens.embed.device), top_k
        self.scores = CopyingScores(tokens, drawn, top_k, Rivals.of(tokens.unembed))
        self._product = _product(tokens.embed, tokens.unembed)

    def add(self, ov: FactoredMatrix) -> dict[str, float]:
        self.scores.add(ov)
        values = torch.linalg.eigvals(ov.right @ self._product @ ov.left)
        return {"copying_eigenvalues": eigenvalue_score(values)}


def _product(one: Float[Tensor, "v c"], other: Float[Tensor, "v c"]) -> Float[Tensor, "c c"]:
    """one' other, shared by all heads: c x c instead of v x v."""
    gram = one.new_zeros(one.shape[1], other.shape[1], dtype=torch.float64)
    for rows, others in zip(one.split(8192), other.split(8192), strict=True):
        gram += rows.double().T @ others.double()
    return gram


def folded(rows: Float[Tensor, "d c"], norm: torch.nn.Module) -> Float[Tensor, "d c"]:
    """Rows with the norm folded in, so that they read the stream before it, up to its divisor."""
    if not isinstance(norm, Normalize):
        return rows
    weight = norm.weight.detach().to(rows.dtype)
    rows = rows * (weight + 1 if norm.config.centered else weight)
    if isinstance(norm.config, LayerNorm):
        rows = rows - rows.mean(1, keepdim=True)
    return rows


def through(rows: Float[Tensor, "f c"], norm: nn.Module | None) -> Float[Tensor, "f c"]:
    """Rows after a norm, up to its divisor."""
    if isinstance(norm, ChannelScale):
        return rows * norm.weight.detach().to(rows.dtype)
    if not isinstance(norm, Normalize):
        return rows
    if isinstance(norm.config, LayerNorm):
        rows = rows - rows.mean(1, keepdim=True)
    weight = norm.weight.detach().to(rows.dtype)
    return rows * (weight + 1 if norm.config.centered else weight)


Through = Literal["unembedding", "transform and unembedding", "embedding"]


@dataclass(frozen=True, slots=True, eq=False)
class VocabularyProjection:
    """The projection of directions in the residual stream onto the vocabulary.

    `through` is "unembedding" with a language head, the final norm folded in; "transform and
    unembedding" if that head has a layer of its own (BERT), which is applied to the direction
    alone; "embedding" without a language head, the embedding serving as unembedding.
    """

    embed: Float[Tensor, "v c"]
    unembed: Float[Tensor, "v e"]
    through: Through
    final_norm: nn.Module
    readout: ReadoutLayer | None

    def write_scores(self, directions: Float[Tensor, "m c"]) -> Float[Tensor, "m v"]:
        """The logit of every token when a direction is written to the stream."""
        if self.through == "transform and unembedding":
            assert self.readout is not None
            with torch.no_grad():
                weight = next(self.readout.parameters())
                normed = self.final_norm(directions.to(weight.dtype))
                directions = self.readout.features(normed).float()
        return directions @ self.unembed.T

    def read_scores(self, directions: Float[Tensor, "m c"]) -> Float[Tensor, "m v"]:
        """The cosine of each direction with the embedding of every token."""
        return F.normalize(directions, dim=-1) @ F.normalize(self.embed, dim=-1).T


def vocabulary_projection(
    model: build.Model, stack: StackName | None = None
) -> VocabularyProjection:
    """The projection onto the vocabulary of a model's stack."""
    if isinstance(model, vision.Vision):
        raise InputError("a Vision model has no vocabulary", "use a model that reads text")
    embedding, end = model.embedding, model.stacks()[stack or model.readout_stack]
    if (
        isinstance(model, seq2seq.Seq2Seq)
        and stack != "encoder"
        and model.target_embedding is not None
    ):
        embedding = model.target_embedding
    check_one_stream(end)
    table = embedding.tokens.weight.detach().float()
    with torch.no_grad():
        scaled = embedding.tokens.weight * embedding.config.scale
        embed = embedding.finished(scaled).detach().float()
    head = model.config.readout
    table = table if table.shape[1] == embed.shape[1] else embed
    if stack == "encoder" or not isinstance(head, LanguageHead):
        return VocabularyProjection(embed, table, "embedding", end.final_norm, None)
    readout = model.readout
    assert readout is not None
    vectors = readout.vectors(model.table).detach().float()
    if head.transform is not None:
        return VocabularyProjection(
            embed, vectors, "transform and unembedding", end.final_norm, readout
        )
    unembed = folded(vectors, end.final_norm) * head.scale
    return VocabularyProjection(embed, unembed, "unembedding", end.final_norm, readout)
