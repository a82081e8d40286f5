"""Attention by its definition, in float64 and one head at a time: what every kernel must give.

Nothing of manyheads computes anything here: masks are plain predicates, biases plain formulas.
All are asked with one signature and read what they need of it.
"""
# ruff: noqa: ARG001, ARG002, ARG005

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from manyheads.kernels.contract import Request, Want
from manyheads.parts.masks import (
    Blocks,
    Causal,
    Full,
    GlobalTokens,
    Mask,
    Prefix,
    RandomBlocks,
    Window,
)
from manyheads.parts.positions.alibi import AlibiBias
from manyheads.parts.positions.disentangled import Disentangled, DisentangledBias
from manyheads.parts.positions.relative import Bias, BucketBias, ShawBias, T5Buckets
from manyheads.ragged import Lengths

Sees = Callable[[int, int, int], bool]

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def drawn_blocks(block: int, length: int, size: int, count: int, seed: int) -> set[int]:
    """The blocks that RandomBlocks draws, in plain integers: saved models depend on them."""
    blocks = -(-length // size)
    result = set()
    for draw in range(count):
        low, high = blocks * draw // count, blocks * (draw + 1) // count
        mixed = (block + 1) * 40503 + (draw + 1) * 9973 + (seed + 1) * 69069
        for multiplier in (48271, 69621):
            mixed = mixed * multiplier % 2147483647
            mixed ^= mixed >> 13
        if high > low:
            result.add(low + mixed % 1000003 % (high - low))
    return result


@dataclass(frozen=True)
class Rule:
    """A mask, and what it means for a query and a key of a sequence with so many keys."""

    mask: Mask
    sees: Sees

    @property
    def bounded(self) -> bool:
        """Whether it limits how far one looks on both sides."""
        return self.mask.reach.before + self.mask.reach.after < math.inf


def _global(*places: int) -> Sees:
    return lambda i, j, n: any(x % n in (i, j) for x in places if -n <= x < n)


RULES = {
    "all": Rule(Full(), lambda i, j, n: True),
    "causal": Rule(Causal(), lambda i, j, n: j <= i),
    "window": Rule(Window(3), lambda i, j, n: 0 <= i - j <= 3),
    "both sides": Rule(Window(2, 4), lambda i, j, n: -4 <= i - j <= 2),
    "prefix": Rule(Prefix(4), lambda i, j, n: j <= i or j < 4),
    "longformer": Rule(
        Window(2, 2) | GlobalTokens((0, -2)),
        lambda i, j, n: abs(i - j) <= 2 or _global(0, -2)(i, j, n),
    ),
    "blocks": Rule(Blocks(3, before=1, after=1), lambda i, j, n: abs(i // 3 - j // 3) <= 1),
    "random blocks": Rule(
        RandomBlocks(2, count=2, seed=5),
        lambda i, j, n: j // 2 in drawn_blocks(i // 2, n, 2, 2, 5),
    ),
    "bigbird": Rule(
        Blocks(2) | RandomBlocks(2, count=1) | GlobalTokens((0,)),
        lambda i, j, n: (
            abs(i // 2 - j // 2) <= 1
            or j // 2 in drawn_blocks(i // 2, n, 2, 1, 0)
            or _global(0)(i, j, n)
        ),
    ),
    "causal and window": Rule(Causal() & Window(4, 4), lambda i, j, n: 0 <= i - j <= 4),
    "causal or global": Rule(
        Causal() | GlobalTokens((1,)), lambda i, j, n: j <= i or _global(1)(i, j, n)
    ),
    "window and blocks": Rule(
        Window(4, 4) & Blocks(3, before=1, after=0),
        lambda i, j, n: abs(i - j) <= 4 and 0 <= i // 3 - j // 3 <= 1,
    ),
    "first rows blind": Rule(
        Causal() & GlobalTokens((2,)), lambda i, j, n: j <= i and _global(2)(i, j, n)
    ),
    "last rows blind": Rule(
        Window(2, 1) & GlobalTokens((3,)),
        lambda i, j, n: -1 <= i - j <= 2 and _global(3)(i, j, n),
    ),
}

HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}

# What a bias adds to a head's scores, given its queries and keys and key place minus query place.
Added = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def t5_bucket(distance: int, buckets: int, reach: int, bidirectional: bool) -> int:
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    growth = math.log(distance / exact) / math.log(reach / exact)
    return first + min(exact + int(growth * (buckets - exact)), buckets - 1)


@dataclass
class Expected:
    output: Tensor
    lse: Tensor
    patterns: list[Tensor]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    queries: Lengths,
    keys: Lengths,
    sees: Sees,
    scale: float,
    added: Added | None = None,
    read_by_distance: Callable[[Tensor], Tensor] | None = None,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> Expected:
    """Sequence by sequence, head by head; the last query stands at the last key."""
    outputs, lses, patterns = [], [], []
    heads, share = q.shape[1], q.shape[1] // k.shape[1]
    for index in range(len(queries)):
        t, s = queries.each[index], keys.each[index]
        query = q[queries.starts[index] :][:t]
        key, value = k[keys.starts[index] :][:s], v[keys.starts[index] :][:s]
        places = range(s - t, s)
        distance = torch.tensor([[j - i for j in range(s)] for i in places], dtype=torch.long)
        distance = distance.reshape(t, s)
        table = torch.tensor([[sees(i, j, s) for j in range(s)] for i in places], dtype=torch.bool)
        each = []
        for head in range(heads):
            scores = scale * query[:, head] @ key[:, head // share].T
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if added is not None:
                scores = scores + added(head, query[:, head], key[:, head // share], distance)
            scores = scores.masked_fill(~table.reshape(t, s), -math.inf)
            one = _softmax(scores, None if sink is None else sink[head])
            read = one[0] @ value[:, head // share]
            if read_by_distance is not None:
                read = read + (one[0].unsqueeze(-1) * read_by_distance(distance)).sum(1)
            each.append((read, *one))
        outputs.append(torch.stack([read for read, _, _ in each], 1))
        lses.append(torch.stack([lse for _, _, lse in each], 1))
        patterns.append(torch.stack([pattern for _, pattern, _ in each]))
    return Expected(
        torch.cat([q.new_zeros(0, heads, v.shape[2]), *outputs]),
        torch.cat([q.new_zeros(0, heads), *lses]),
        patterns,
    )


def _softmax(scores: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    top = torch.zeros(scores.shape[0], dtype=scores.dtype)
    if scores.shape[1]:
        top = scores.detach().amax(1).nan_to_num(neginf=0.0)
    mass = (scores - top[:, None]).exp()
    total = mass.sum(1)
    if sink is not None:
        total = total + (sink - top).exp()
    blind = total == 0
    lse = (total.masked_fill(blind, 1.0).log() + top).masked_fill(blind, -math.inf)
    return mass / total.masked_fill(blind, 1.0)[:, None], lse


@dataclass
class Tokens:
    """What a bias may be computed from; a key is repeated for each of its query heads."""

    query: Tensor
    key: Tensor
    queries: Lengths
    keys: Lengths


class Biased:
    """One kind of bias: as manyheads has it, and by its formula.

    `prepare` draws what is learned; `bias` and `added` read the same numbers.
    """

    learned = False
    needs_pattern = False

    def prepare(self, heads: int, size: int) -> list[Tensor]:
        return []

    def bias(self, weights: list[Tensor], tokens: "Tokens", scale: float) -> Bias | None:
        return None

    def added(self, weights: list[Tensor], scale: float) -> Added | None:
        return None

    def read_by_distance(self, weights: list[Tensor]) -> Callable[[Tensor], Tensor] | None:
        return None


class Sloped(Biased):
    def prepare(self, heads: int, size: int) -> list[Tensor]:
        return [torch.tensor([2 ** (-8 * (head + 1) / heads) for head in range(heads)])]

    def bias(self, weights: list[Tensor], tokens: "Tokens", scale: float) -> Bias:
        return AlibiBias(weights[0])

    def added(self, weights: list[Tensor], scale: float) -> Added:
        return lambda head, query, key, distance: -weights[0][head] * distance.abs()


class Bucketed(Biased):
    def __init__(self, bidirectional: bool, learned: bool) -> None:
        self.config = T5Buckets(buckets=8, reach=9, bidirectional=bidirectional)
        self.learned = learned

    def prepare(self, heads: int, size: int) -> list[Tensor]:
        return [torch.randn(8, heads)]

    def bias(self, weights: list[Tensor], tokens: "Tokens", scale: float) -> Bias:
        return BucketBias(self.config, weights[0])

    def added(self, weights: list[Tensor], scale: float) -> Added:
        def add(head: int, query: Tensor, key: Tensor, distance: Tensor) -> Tensor:
            buckets = [
                t5_bucket(each, 8, 9, self.config.bidirectional)
                for each in distance.flatten().tolist()
            ]
            return weights[0][torch.tensor(buckets, dtype=torch.long), head].reshape(distance.shape)

        return add


class Shawed(Biased):
    reach = 3
    learned = True

    def __init__(self, values: bool) -> None:
        self.needs_pattern = values

    def prepare(self, heads: int, size: int) -> list[Tensor]:
        count = 2 if self.needs_pattern else 1
        return [torch.randn(2 * self.reach + 1, size) for _ in range(count)]

    def bias(self, weights: list[Tensor], tokens: "Tokens", scale: float) -> Bias:
        products = scale * tokens.query.float() @ weights[0].T
        return ShawBias(self.reach, products, weights[1] if self.needs_pattern else None)

    def added(self, weights: list[Tensor], scale: float) -> Added:
        def add(head: int, query: Tensor, key: Tensor, distance: Tensor) -> Tensor:
            vectors = weights[0][distance.clamp(-self.reach, self.reach) + self.reach]
            return scale * (query[:, None] * vectors).sum(-1)

        return add

    def read_by_distance(self, weights: list[Tensor]) -> Callable[[Tensor], Tensor] | None:
        if not self.needs_pattern:
            return None
        return lambda distance: weights[1][distance.clamp(-self.reach, self.reach) + self.reach]


def deberta_bucket(distance: int, buckets: int, reach: int) -> int:
    """The vector of query place minus key place, by the formula of arXiv 2006.03654's code."""
    middle, far = buckets // 2, abs(distance)
    if far > middle:
        growth = math.log(far / middle) / math.log((reach - 1) / middle)
        far = math.ceil(growth * (middle - 1)) + middle
    return min(max(buckets + (far if distance > 0 else -far), 0), 2 * buckets - 1)


class Disentangling(Biased):
    learned = True

    def __init__(
        self, terms: Literal["both", "content_to_position", "position_to_content"]
    ) -> None:
        self.config = Disentangled(buckets=4, reach=7, terms=terms)

    def prepare(self, heads: int, size: int) -> list[Tensor]:
        return [torch.randn(8, heads, size) for _ in range(2)]

    def bias(self, weights: list[Tensor], tokens: "Tokens", scale: float) -> Bias:
        last = max(tokens.keys.longest - 1, 0)
        index = self.config.index(torch.arange(-last, last + 1))
        query, key = weights
        distances = (
            query if self.config.counts_position else None,
            key if self.config.counts_content else None,
            index,
        )
        lengths = (tokens.queries, tokens.keys)
        return DisentangledBias.of(tokens.query, tokens.key, distances, lengths, scale)

    def added(self, weights: list[Tensor], scale: float) -> Added:
        def add(head: int, query: Tensor, key: Tensor, distance: Tensor) -> Tensor:
            buckets = [deberta_bucket(-each, 4, 7) for each in distance.flatten().tolist()]
            at = torch.tensor(buckets, dtype=torch.long).reshape(distance.shape)
            score = torch.zeros(distance.shape, dtype=query.dtype)
            if self.config.counts_content:
                score = score + (query[:, None] * weights[1][at, head]).sum(-1)
            if self.config.counts_position:
                score = score + (key[None] * weights[0][at, head]).sum(-1)
            return scale * score

        return add


BIASES: dict[str, Biased] = {
    "no bias": Biased(),
    "alibi": Sloped(),
    "t5": Bucketed(bidirectional=True, learned=False),
    "t5 backwards": Bucketed(bidirectional=False, learned=False),
    "t5 learned": Bucketed(bidirectional=True, learned=True),
    "shaw": Shawed(values=False),
    "shaw with values": Shawed(values=True),
    "deberta": Disentangling("both"),
    "deberta, positions only": Disentangling("position_to_content"),
}


@dataclass
class Problem:
    """One attention, asked of a kernel and of the oracle with the same numbers."""

    rule: Rule
    queries: Lengths
    keys: Lengths
    heads: tuple[int, int] = (4, 2)
    size: int = 8
    value_size: int = 8
    dtype: torch.dtype = torch.float32
    biased: Biased = BIASES["no bias"]
    sink: bool = False
    grad: bool = True
    seed: int = 0
    spare: int = 0  # rows behind the last key, as a cache has them

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        heads, kv_heads = self.heads
        tokens = self.spare + max((place.stop for place in self.keys.slices()), default=0)
        self.scale = self.size**-0.5
        self.qkv = [
            torch.randn(self.queries.total, heads, self.size).to(self.dtype),
            torch.randn(tokens, kv_heads, self.size).to(self.dtype),
            torch.randn(tokens, kv_heads, self.value_size).to(self.dtype),
        ]
        self.weights = self.biased.prepare(heads, self.size)
        self.sinks = [torch.randn(heads)] if self.sink else []
        self.pull = torch.randn(self.queries.total, heads, self.value_size)

    @classmethod
    def of(cls, rule: str, lengths: Sequence[int], **more: object) -> "Problem":
        both = Lengths.of(lengths)
        return cls(RULES[rule], both, both, **more)  # type: ignore[arg-type]

    def request(self, leaves: list[Tensor], want: Want, dropout: float = 0.0) -> Request:
        weights, sinks = leaves[3 : 3 + len(self.weights)], leaves[-1:]
        key = leaves[1].repeat_interleave(self.heads[0] // self.heads[1], dim=1)
        tokens = Tokens(leaves[0], key, self.queries, self.keys)
        return Request(
            queries=self.queries,
            keys=self.keys,
            mask=self.rule.mask,
            scale=self.scale,
            bias=self.biased.bias(weights, tokens, self.scale),
            sink=sinks[0] if self.sink else None,
            want=want,
            dropout=dropout,
        )

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor]:
        """Queries, keys, values, what the bias learns, the sink: as tensors of their own."""
        fixed = [] if self.biased.learned else self.weights
        leaves = []
        for tensor in (*self.qkv, *self.weights, *self.sinks):
            own = tensor.clone() if dtype is None else tensor.to(dtype)
            needs = self.grad and not any(tensor is each for each in fixed)
            leaves.append(own.requires_grad_(needs))
        return leaves

    def gradients(self, output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        if not output.requires_grad:
            return [torch.zeros_like(leaf) for leaf in wanted]
        pulled = (output * self.pull.to(output.dtype)).sum()
        result = torch.autograd.grad(pulled, wanted, allow_unused=True)
        return [
            torch.zeros_like(leaf) if each is None else each
            for leaf, each in zip(wanted, result, strict=True)
        ]

    def expected(self) -> tuple[Expected, list[Tensor]]:
        leaves = self.leaves(torch.float64)
        weights = leaves[3 : 3 + len(self.weights)]
        expected = attention(
            *leaves[:3],
            queries=self.queries,
            keys=self.keys,
            sees=self.rule.sees,
            scale=self.scale,
            added=self.biased.added(weights, self.scale),
            read_by_distance=self.biased.read_by_distance(weights),
            sink=leaves[-1] if self.sink else None,
        )
        return expected, self.gradients(expected.output, leaves)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Equal up to a share of the largest expected value; infinities at the same places."""
    assert actual.shape == expected.shape, what
    actual, expected = actual.detach().double(), expected.detach()
    assert not actual.isnan().any(), f"{what} holds NaN"
    endless = expected.isinf()
    assert torch.equal(actual.isinf(), endless), f"{what}: other rows see nothing"
    assert torch.equal(actual[endless], expected[endless]), what
    if (finite := expected[~endless]).numel():
        magnitude = max(float(finite.abs().max()), 0.1)
        worst = float((actual[~endless] - finite).abs().max())
        assert worst <= tolerance * magnitude, f"{what} is off by {worst:.2e} of {magnitude:.2e}"
