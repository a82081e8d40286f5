"""The masks of `transformers` as rules: what its mask functions say, without an n x n tensor."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from manyheads.parts import masks
from manyheads.ragged import Lengths

# (batch, head, query, key) -> whether the query sees the key, elementwise over index tensors.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
# Pairs on which a rule is compared with the function that it was read from.
CHECKED_PAIRS = 64


@dataclass(frozen=True, slots=True, eq=False)
class FunctionMask(masks.Mask):
    """A mask function for one sequence of a batch, whose first key has the index `start`."""

    function: MaskFunction
    sequence: int
    start: int

    def allows(
        self, query: Int[Tensor, "*#at"], key: Int[Tensor, "*#at"], length: Int[Tensor, "*#at"]
    ) -> Bool[Tensor, "*#at"]:
        batch = torch.full((1,) * query.dim(), self.sequence, device=query.device)
        seen = self.function(batch, torch.zeros_like(batch), query + self.start, key + self.start)
        return seen & (length >= 0) & (query == query) & (key == key)

    @property
    def independent_of_length(self) -> bool:
        return False

    @property
    def reach(self) -> masks.Band:
        return masks.Band(math.inf, math.inf)


def read_rule(function: Any) -> masks.Mask | None:
    """The rule that a mask function of `transformers` follows; None where it is not a known one.

    Its parameters are in the closure. That is private to `transformers`, so `agrees` compares.
    """
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(function, "__closure__", None) or (), strict=True))
    inside = {name: cell.cell_contents for name, cell in cells.items()}
    match getattr(function, "__qualname__", "").split(".")[0]:
        case "causal_mask_function":
            return masks.Causal()
        case "bidirectional_mask_function":
            return masks.Full()
        case "sliding_window_overlay":
            # Keys after the query are the business of the causal mask beside it.
            return _SinceWindow(inside["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay":
            return masks.Window(inside["sliding_window"], inside["sliding_window"])
        case "chunked_overlay":
            return masks.Blocks(inside["chunk_size"], before=0, after=0)
        case "and_masks":
            return _joined(inside["mask_functions"], masks.And)
        case "or_masks":
            return _joined(inside["mask_functions"], masks.Or)
    return None


@dataclass(frozen=True, slots=True)
class _SinceWindow(masks.Mask):
    """Keys at most `before` to the left, and all to the right."""

    before: int

    def allows(
        self, query: Int[Tensor, "*#at"], key: Int[Tensor, "*#at"], length: Int[Tensor, "*#at"]
    ) -> Bool[Tensor, "*#at"]:
        return (key >= query - self.before) & (length >= 0)

    @property
    def reach(self) -> masks.Band:
        return masks.Band(self.before, math.inf)

    @property
    def fills_reach(self) -> bool:
        return True


def _joined(
    functions: Sequence[Any], join: Callable[[masks.Mask, masks.Mask], masks.Mask]
) -> masks.Mask | None:
    rules = [read_rule(function) for function in functions]
    present = [rule for rule in rules if rule is not None]
    if not present or len(present) < len(rules):
        return None
    return reduce(lambda joined, rule: _simplified(join(joined, rule)), present)


def _simplified(mask: masks.Mask) -> masks.Mask:
    """Causal within a window is a window; what is full adds nothing."""
    if isinstance(mask, masks.And):
        for first, second in ((mask.first, mask.second), (mask.second, mask.first)):
            if isinstance(first, masks.Full):
                return second
            if isinstance(first, masks.Causal) and isinstance(second, _SinceWindow):
                return masks.Window(second.before)
    return mask


def agrees(
    rule: masks.Mask, function: MaskFunction, queries: range, keys: range, device: Any
) -> bool:
    """Whether a rule says the same as the function on a sample of pairs."""
    generator = torch.Generator().manual_seed(0)
    query, key = (
        torch.randint(lengths.start, lengths.stop, (CHECKED_PAIRS,), generator=generator).to(device)
        for lengths in (queries, keys)
    )
    # Most pairs of a long text are far apart: half of the sample is near the diagonal.
    key[::2] = (query[::2] - torch.arange(CHECKED_PAIRS // 2, device=device) + 4).clamp(
        keys.start, keys.stop - 1
    )
    zero = torch.zeros_like(query)
    visible = function(zero, zero, query, key) & (query >= 0)
    return bool((visible == rule.allows(query, key, zero + keys.stop)).all())


def moves_with_start(rule: masks.Mask) -> bool:
    """Whether a rule depends on where the first key stands, as blocks do."""
    if isinstance(rule, masks.And | masks.Or):
        return moves_with_start(rule.first) or moves_with_start(rule.second)
    return isinstance(rule, masks.Blocks)


@dataclass(frozen=True, slots=True, eq=False)
class Visible:
    """Which tokens of a padded batch are real, and the mask between them.

    `query_starts` and `key_starts` are where each sequence begins in the padded tensors.
    """

    queries: Lengths
    keys: Lengths
    query_starts: tuple[int, ...]
    key_starts: tuple[int, ...]
    mask: masks.Mask


def runs(tokens: Bool[Tensor, "b t"]) -> list[tuple[int, int]] | None:
    """The one run of real tokens of each sequence, as (start, stop); None if one has several.

    >>> runs(torch.tensor([[True, True, False], [False, True, True]]))
    [(0, 2), (1, 3)]
    """
    spans = []
    for row in tokens.tolist():
        edges = [
            i for i, (before, after) in enumerate(pairwise((False, *row, False))) if before != after
        ]
        if len(edges) > 2:
            return None
        spans.append((edges[0], edges[1]) if edges else (0, 0))
    return spans


def tensor_masks(
    visible: Bool[Tensor, "b t s"], queries: Sequence[int], keys: Sequence[int]
) -> masks.MaskBySequence:
    """The masks of sequences that begin at the first row and column of a tensor."""
    rows = zip(visible.expand(len(queries), -1, -1), queries, keys, strict=True)
    return masks.MaskBySequence(tuple(masks.TensorMask(seen[:t, :s]) for seen, t, s in rows))
