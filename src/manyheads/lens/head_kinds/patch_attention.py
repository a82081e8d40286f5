"""Where heads of a vision model look on the grid of patches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.lens.attention_maps.patterns import Forming
from manyheads.lens.inputs.batches import lead
from manyheads.lens.inputs.texts import Given, climb
from manyheads.lens.results.addresses import Block, blocks_of, stacks_of
from manyheads.models.vision import Vision

NAMES = ("self", "local", "row", "column", "class-token")
BATCH_TOKENS = 4096
# Weights alive at once: images have many patches.
WEIGHTS_AT_ONCE = 2**22


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Glances:
    """By name the mean weight of each head, and that of a head that looks at all alike.

    Over the queries that are patches: on the patch itself, on the eight around it, on others of its
    row and of its column, on the class token.
    """

    scores: dict[str, Float[np.ndarray, " h"]]
    even: dict[str, Float[np.ndarray, " h"]]
    images: int
    complete: bool


def glance(model: Vision, given: Given, *, progress: bool = True) -> Glances:
    """Look at images of any sizes; Ctrl-C keeps what was seen."""
    blocks = blocks_of(model)
    side = model.config.patches.size
    sums: dict[Block, Float[Tensor, "names columns"]] = {}

    def visit(some: Given, _: list[int]) -> None:
        batch = _Batch([(each.shape[1] // side, each.shape[2] // side) for each in some.images])
        with torch.inference_mode():
            climb(model, some, Forming(stacks_of(model), batch.take, WEIGHTS_AT_ONCE))
        for block, found in batch.sums.items():
            sums[block] = sums[block] + found if block in sums else found

    passed = lead(
        model,
        given,
        visit,
        label="looking",
        unit="images",
        batch_tokens=BATCH_TOKENS,
        progress=progress,
    )
    means = [sums[block][:, 1:] / sums[block][:, :1] for block in blocks]
    return Glances(
        scores=_by_name([mean[:, 1:] for mean in means]),
        even=_by_name([mean[:, :1].expand(-1, mean.shape[1] - 1) for mean in means]),
        images=passed.texts,
        complete=passed.complete,
    )


def _by_name(parts: Sequence[Float[Tensor, "names _"]]) -> dict[str, Float[np.ndarray, " h"]]:
    joined = torch.cat(list(parts), dim=1).double().numpy()
    return dict(zip(NAMES, joined, strict=True))


class _Batch:
    """Sums by attention over the patches of one batch: patches, an even head, each head."""

    def __init__(self, grids: Sequence[tuple[int, int]]) -> None:
        self.sums: dict[Block, Float[Tensor, "names columns"]] = {}
        self._grids = grids

    def take(
        self,
        block: Block,
        text: int,
        rows: range,
        weights: Float[Tensor, "h t s"],
        visible: Bool[Tensor, "t s"],
    ) -> None:
        # The class token is the first query, and no patch.
        first = int(rows.start == 0)
        marks = _marks(*self._grids[text], range(rows.start + first - 1, rows.stop - 1))
        shown = visible[first:].cpu().float()
        even = shown / shown.sum(1, keepdim=True).clamp(min=1)
        looks = torch.cat((even[None], weights[:, first:].cpu()))
        found = torch.einsum("hts,mts->mh", looks, marks)
        patches = torch.full((len(NAMES), 1), float(marks.shape[1]))
        found = torch.cat((patches, found), dim=1)
        self.sums[block] = self.sums[block] + found if block in self.sums else found


def _marks(rows: int, columns: int, queries: range) -> Float[Tensor, "names t s"]:
    """For some patches as queries the keys of each name; the class token is the first key.

    >>> _marks(3, 3, range(4, 5)).sum(-1)[:, 0].tolist()
    [1.0, 8.0, 2.0, 2.0, 1.0]
    """
    query, key = torch.arange(queries.start, queries.stop), torch.arange(rows * columns)
    down = query[:, None] // columns - key[None] // columns
    right = query[:, None] % columns - key[None] % columns
    itself = (down == 0) & (right == 0)
    near = (down.abs() <= 1) & (right.abs() <= 1) & ~itself
    patches = torch.stack((itself, near, (down == 0) & ~itself, (right == 0) & ~itself))
    marks = torch.zeros(len(NAMES), len(query), len(key) + 1)
    marks[:4, :, 1:] = patches.float()
    marks[4, :, 0] = 1.0
    return marks
