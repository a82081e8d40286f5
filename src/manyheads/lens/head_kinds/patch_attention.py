"""Where the heads of a vision model attend on the grid of patches."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.lens.attention_maps.patterns import PatternWatcher
from manyheads.lens.inputs.texts import ModelInputs, for_each_batch, forward_hidden
from manyheads.lens.results.addresses import Block, blocks_of, stacks_of
from manyheads.models.vision import Vision

PATCH_KINDS = ("self", "local", "row", "column", "class-token")
BATCH_TOKENS = 4096
# Weights in memory at once: images have many patches.
CHUNK_WEIGHTS = 2**22


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PatchAttention:
    """The mean weights of each head by kind, and those of uniform attention.

    Over queries that are patches: the weight on the patch itself, on the eight around it, on others
    of its row and of its column, and on the class token.
    """

    scores: dict[str, Float[np.ndarray, " h"]]
    uniform: dict[str, Float[np.ndarray, " h"]]
    images: int
    complete: bool


def measure_patch_attention(
    model: Vision, inputs: ModelInputs, *, progress: bool = True
) -> PatchAttention:
    """Measure images of any sizes; Ctrl-C keeps finished batches."""
    blocks = blocks_of(model)
    side = model.config.patches.size
    sums: dict[Block, Float[Tensor, "names columns"]] = {}

    def visit(batch: ModelInputs, _: list[int]) -> None:
        patches = _PatchSums(
            [(each.shape[1] // side, each.shape[2] // side) for each in batch.images]
        )
        with torch.inference_mode():
            forward_hidden(
                model, batch, PatternWatcher(stacks_of(model), patches.add, CHUNK_WEIGHTS)
            )
        for block, values in patches.sums.items():
            sums[block] = sums[block] + values if block in sums else values

    summary = for_each_batch(
        model,
        inputs,
        visit,
        label="measuring patches",
        unit="images",
        batch_tokens=BATCH_TOKENS,
        progress=progress,
    )
    means = [sums[block][:, 1:] / sums[block][:, :1] for block in blocks]
    return PatchAttention(
        scores=_by_kind([mean[:, 1:] for mean in means]),
        uniform=_by_kind([mean[:, :1].expand(-1, mean.shape[1] - 1) for mean in means]),
        images=summary.texts,
        complete=summary.complete,
    )


def _by_kind(parts: Sequence[Float[Tensor, "names _"]]) -> dict[str, Float[np.ndarray, " h"]]:
    joined = torch.cat(list(parts), dim=1).double().numpy()
    return dict(zip(PATCH_KINDS, joined, strict=True))


class _PatchSums:
    """Sums by attention over the patches of one batch: patches, uniform attention, each head."""

    def __init__(self, grids: Sequence[tuple[int, int]]) -> None:
        self.sums: dict[Block, Float[Tensor, "names columns"]] = {}
        self._grids = grids

    def add(
        self,
        block: Block,
        text: int,
        rows: range,
        weights: Float[Tensor, "h t s"],
        visible: Bool[Tensor, "t s"],
    ) -> None:
        # The first query is the class token, not a patch.
        first = int(rows.start == 0)
        masks = _patch_masks(*self._grids[text], range(rows.start + first - 1, rows.stop - 1))
        seen = visible[first:].cpu().float()
        uniform = seen / seen.sum(1, keepdim=True).clamp(min=1)
        attention = torch.cat((uniform[None], weights[:, first:].cpu()))
        by_kind = torch.einsum("hts,mts->mh", attention, masks)
        patches = torch.full((len(PATCH_KINDS), 1), float(masks.shape[1]))
        total = torch.cat((patches, by_kind), dim=1)
        self.sums[block] = self.sums[block] + total if block in self.sums else total


def _patch_masks(rows: int, columns: int, queries: range) -> Float[Tensor, "names t s"]:
    """Which keys belong to each kind, for some patches as queries; key 0 is the class token.

    >>> _patch_masks(3, 3, range(4, 5)).sum(-1)[:, 0].tolist()
    [1.0, 8.0, 2.0, 2.0, 1.0]
    """
    query, key = torch.arange(queries.start, queries.stop), torch.arange(rows * columns)
    down = query[:, None] // columns - key[None] // columns
    right = query[:, None] % columns - key[None] % columns
    itself = (down == 0) & (right == 0)
    near = (down.abs() <= 1) & (right.abs() <= 1) & ~itself
    patches = torch.stack((itself, near, (down == 0) & ~itself, (right == 0) & ~itself))
    masks = torch.zeros(len(PATCH_KINDS), len(query), len(key) + 1)
    masks[:4, :, 1:] = patches.float()
    masks[4, :, 0] = 1.0
    return masks
