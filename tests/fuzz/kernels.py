"""Random attention requests: every kernel of the CPU against the formula in float64.

The formula and the predicates of the masks are those of tests/kernels/oracle.py, which computes
nothing with manyheads. Heads, groups, masks, lengths, alignment, biases, sinks, dtypes, wishes and
the sizes of chunks and blocks are drawn at random.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from unittest.mock import patch

import torch
from torch import Tensor

from manyheads.errors import KernelError
from manyheads.kernels import banded, batched, fused, reference
from manyheads.kernels.choose import attend
from manyheads.kernels.contract import AttentionResult, Request, Want
from manyheads.parts.head_groups import key_head_of_query, normalize_kv_heads
from manyheads.parts.masks import (
    Blocks,
    Causal,
    Full,
    GlobalTokens,
    Prefix,
    RandomBlocks,
    Window,
)
from manyheads.ragged import Lengths
from tests.kernels.oracle import (
    BIASES,
    TOLERANCE,
    Biased,
    Expected,
    Rule,
    Tokens,
    assert_close,
    attention,
    drawn_blocks,
)

__all__ = ["ATTACKS"]

NAMED = ("reference", "fused", "banded", "batched", "auto")
SMALL_LENGTHS = (0, 1, 1, 2, 3, 5, 8, 13)


def _simple_rule(random: Random) -> Rule:
    before, after = random.randint(0, 6), random.randint(0, 6)
    size, count, seed = random.randint(1, 4), random.randint(1, 3), random.randint(0, 9)
    places = tuple(random.randint(-4, 6) for _ in range(random.randint(1, 3)))
    match random.randint(0, 6):
        case 0:
            return Rule(Full(), lambda i, j, n: True)  # noqa: ARG005
        case 1:
            return Rule(Causal(), lambda i, j, n: j <= i)  # noqa: ARG005
        case 2:
            return Rule(Window(before, after), lambda i, j, n: -after <= i - j <= before)  # noqa: ARG005
        case 3:
            return Rule(Prefix(before), lambda i, j, n: j <= i or j < before)  # noqa: ARG005
        case 4:
            return Rule(
                GlobalTokens(places),
                lambda i, j, n: any((x if x >= 0 else n + x) in (i, j) for x in places),
            )
        case 5:
            before, after = before // 3, after // 3
            return Rule(
                Blocks(size, before=before, after=after),
                lambda i, j, n: -before <= j // size - i // size <= after,  # noqa: ARG005
            )
        case _:
            return Rule(
                RandomBlocks(size, count=count, seed=seed),
                lambda i, j, n: j // size in drawn_blocks(i // size, n, size, count, seed),
            )


def _rule(random: Random) -> Rule:
    """One mask, or two joined by and or or."""
    one = _simple_rule(random)
    if random.random() < 0.6:
        return one
    other = _simple_rule(random)
    if random.random() < 0.5:
        return Rule(
            one.mask & other.mask, lambda i, j, n: one.sees(i, j, n) and other.sees(i, j, n)
        )
    return Rule(one.mask | other.mask, lambda i, j, n: one.sees(i, j, n) or other.sees(i, j, n))


def _groups(random: Random) -> tuple[int, ...]:
    """How many query heads each key head serves, often unevenly."""
    if random.random() < 0.3:
        return tuple(random.randint(1, 3) for _ in range(random.randint(1, 3)))
    return (random.randint(1, 3),) * random.randint(1, 3)


@dataclass(frozen=True, slots=True)
class Question:
    """An attention with its numbers, for a kernel and for the formula."""

    rule: Rule
    queries: Lengths
    keys: Lengths
    rows: int
    groups: tuple[int, ...]
    size: int
    value_size: int
    scale: float
    dtype: torch.dtype
    biased: Biased
    sink: bool
    softcap: float | None
    grad: bool
    seed: int

    def leaves(self) -> list[Tensor]:
        """Queries, keys, values, the numbers of the bias, the sink."""
        torch.manual_seed(self.seed)
        heads, key_heads = sum(self.groups), len(self.groups)
        shapes = [
            (self.queries.total, heads, self.size),
            (self.rows, key_heads, self.size),
            (self.rows, key_heads, self.value_size),
        ]
        leaves = [torch.randn(shape).to(self.dtype) for shape in shapes]
        weights = self.biased.prepare(heads, self.size)
        sinks = [torch.randn(heads)] if self.sink else []
        learned = weights if self.biased.learned else []
        for leaf in (*leaves, *learned, *sinks):
            leaf.requires_grad_(self.grad)
        return [*leaves, *weights, *sinks]

    def request(self, leaves: list[Tensor], want: Want) -> Request:
        kv_heads = normalize_kv_heads(sum(self.groups), self.groups)
        key = leaves[1][:, list(key_head_of_query(self.groups))]
        tokens = Tokens(leaves[0], key, self.queries, self.keys)
        weights = leaves[3:-1] if self.sink else leaves[3:]
        return Request(
            queries=self.queries,
            keys=self.keys,
            mask=self.rule.mask,
            scale=self.scale,
            bias=self.biased.bias(weights, tokens, self.scale),
            sink=leaves[-1] if self.sink else None,
            softcap=self.softcap,
            groups=kv_heads if isinstance(kv_heads, tuple) else None,
            want=want,
        )

    def expected(self, leaves: list[Tensor]) -> Expected:
        """By the formula, every key repeated for each of its query heads."""
        owners = list(key_head_of_query(self.groups))
        weights = leaves[3:-1] if self.sink else leaves[3:]
        return attention(
            leaves[0],
            leaves[1][:, owners],
            leaves[2][:, owners],
            queries=self.queries,
            keys=self.keys,
            sees=self.rule.sees,
            scale=self.scale,
            added=self.biased.added(weights, self.scale),
            read_by_distance=self.biased.read_by_distance(weights),
            sink=leaves[-1] if self.sink else None,
            softcap=self.softcap,
        )


def _question(random: Random) -> Question:
    """Self-attention, a few queries at the end of their keys, or keys of any length."""
    count = random.randint(0, 5)
    keys = [random.choice(SMALL_LENGTHS) for _ in range(count)]
    if random.random() < 0.2:
        keys = [max(keys, default=1)] * count
    rule, biased = _rule(random), BIASES[random.choice(list(BIASES))]
    match random.randint(0, 2):
        case 0:
            queries = [random.randint(0, length) for length in keys]
        case 1 if isinstance(rule.mask, Full) and type(biased) is Biased:
            queries = [random.choice(SMALL_LENGTHS) for _ in keys]
        case _:
            queries = keys
    lengths, rows = Lengths.of(keys), sum(keys)
    if queries is not keys and random.random() < 0.5:
        room = max(keys, default=0) + random.randint(0, 3)
        lengths, rows = Lengths.with_capacity(keys, room, "cpu"), room * count
    size = random.randint(1, 9)
    return Question(
        rule=rule,
        queries=lengths if queries is keys else Lengths.of(queries),
        keys=lengths,
        rows=rows,
        groups=_groups(random),
        size=size,
        value_size=size if biased.needs_pattern or random.random() < 0.7 else random.randint(1, 9),
        scale=random.choice([0.25, 0.5, 1.0]),
        dtype=random.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16]),
        biased=biased,
        sink=random.random() < 0.3,
        softcap=random.uniform(0.5, 5) if random.random() < 0.15 else None,
        grad=random.random() < 0.7,
        seed=random.randrange(2**31),
    )


@contextmanager
def _small_pieces(random: Random) -> Iterator[None]:
    """Chunks and blocks so small that short sequences cross their borders."""
    rows = random.randint(1, 8)
    with ExitStack() as stack:
        if random.random() < 0.7:
            for module in (reference, fused, batched):
                stack.enter_context(patch.object(module, "rows_per_chunk", lambda *_: rows))
            stack.enter_context(patch.object(banded, "BLOCK", random.randint(1, 6)))
            padding, kept = random.choice([0, 100, 1_000, 100_000]), random.choice([0, 3, 256])
            stack.enter_context(patch.object(batched, "PADDING_PER_BLOCK", padding))
            stack.enter_context(patch.object(batched, "KEPT_KEYS", kept))
        yield


def any_kernel(random: Random, folder: Path) -> str:  # noqa: ARG001, part of the frame
    """A kernel by name, or the one that is chosen; one that refuses says so, and another serves."""
    question, kernel = _question(random), random.choice(NAMED)
    lse = random.random() < 0.5
    want = Want(lse=lse, pattern=kernel in ("reference", "auto") and random.random() < 0.2)
    leaves = question.leaves()
    request = question.request(leaves, want)
    with _small_pieces(random):
        try:
            result = attend(*leaves[:3], request, kernel)
        except KernelError:
            assert kernel not in ("auto", "reference")
            result = attend(*leaves[:3], request)
        _assert_equal(random, question, leaves, result, want)
    return "equal"


def _assert_equal(
    random: Random, question: Question, leaves: list[Tensor], result: AttentionResult, want: Want
) -> None:
    wide = [leaf.detach().double().requires_grad_(leaf.requires_grad) for leaf in leaves]
    expected = question.expected(wide)
    tolerance = TOLERANCE[question.dtype]
    assert result.output.dtype == question.dtype
    assert_close(result.output, expected.output, tolerance, "output")
    assert (result.lse is None) != want.lse
    if result.lse is not None:
        assert_close(result.lse, expected.lse, tolerance, "log-sum-exp")
    if want.pattern:
        assert result.patterns is not None
        for one, other in zip(result.patterns.each, expected.patterns, strict=True):
            assert_close(one, other, tolerance, "pattern")
    if not question.grad:
        return
    torch.manual_seed(random.randrange(2**31))
    pull = torch.randn(result.output.shape)
    ours, peer = (
        _gradients(output, of, pull)
        for output, of in ((result.output, leaves), (expected.output, wide))
    )
    for index, (one, other) in enumerate(zip(ours, peer, strict=True)):
        assert_close(one, other, 2 * tolerance, f"gradient {index}")


def _gradients(output: Tensor, leaves: list[Tensor], pull: Tensor) -> list[Tensor]:
    learned = [leaf for leaf in leaves if leaf.requires_grad]
    if not output.requires_grad:
        return [torch.zeros_like(leaf) for leaf in learned]
    pulled = (output * pull.to(output.dtype)).sum()
    result = torch.autograd.grad(pulled, learned, allow_unused=True)
    return [
        torch.zeros_like(leaf) if each is None else each
        for leaf, each in zip(learned, result, strict=True)
    ]


def step(random: Random, folder: Path) -> str:  # noqa: ARG001, part of the frame
    """One query per sequence over a cache of which only a tensor says how much is filled."""
    question = replace(_question(random), grad=False, dtype=torch.float32, softcap=None)
    count, room = random.randint(1, 4), random.randint(1, 12)
    filled = [random.randint(1, room) for _ in range(count)]
    rule = question.rule
    if not rule.mask.independent_of_length:
        rule = Rule(Causal(), lambda i, j, n: j <= i)  # noqa: ARG005
    question = replace(
        question,
        queries=Lengths.of([1] * count),
        keys=Lengths.with_capacity(filled, room, "cpu"),
        rows=room * count,
        # The newest key is the last that anybody sees.
        rule=Rule(rule.mask & Causal(), lambda i, j, n: j <= i and rule.sees(i, j, n)),
    )
    leaves, want = question.leaves(), Want(lse=True)
    whole = replace(Lengths.of([room] * count), filled=torch.tensor(filled, dtype=torch.int32))
    request = replace(question.request(leaves, want), keys=whole)
    result = attend(*leaves[:3], request)
    _assert_equal(random, question, leaves, result, want)
    return "equal"


def permuted(random: Random, folder: Path) -> str:  # noqa: ARG001, part of the frame
    """The sequences of a batch in another order give the same answers in that order."""
    question = replace(_question(random), biased=BIASES["no bias"], dtype=torch.float32, grad=False)
    keys = [random.choice(SMALL_LENGTHS) for _ in range(random.randint(1, 6))]
    lengths = Lengths.of(keys)
    question = replace(question, queries=lengths, keys=lengths, rows=sum(keys))
    leaves = question.leaves()
    order = random.sample(range(len(keys)), len(keys))
    moved = Lengths.of([keys[index] for index in order])
    rows = torch.cat([torch.arange(keys[i]) + lengths.starts[i] for i in order]).long()
    shuffled = [*(leaf[rows] for leaf in leaves[:3]), *leaves[3:]]
    other = replace(question, queries=moved, keys=moved)
    kernel = random.choice(["reference", "batched", "auto"])
    with torch.no_grad():
        result = attend(*shuffled[:3], other.request(shuffled, Want()), kernel).output
        expected = attend(*leaves[:3], question.request(leaves, Want()), kernel).output
    assert_close(result, expected[rows].double(), TOLERANCE[torch.float32], "permuted output")
    return "equal"


ATTACKS = [any_kernel, step, permuted]
