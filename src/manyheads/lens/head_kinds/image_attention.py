"""Where the heads of a vision model attend on the grid of patches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.lens.attention_maps.patterns import PatternWatcher
from manyheads.lens.inputs.texts import for_each_batch
from manyheads.lens.results.addresses import Block, blocks_of
from manyheads.models.model_interface import ModelInputs
from manyheads.models.vision import Vision

PATCH_KINDS = ("self", "local", "row", "column", "class-token")
BATCH_TOKENS = 4096
# Weights in memory at once: images have many patches.
CHUNK_WEIGHTS = 2**22


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PatchAttention:
    """The mean weights of each head by kind, their errors over images, and uniform attention's.

    Over queries that are patches: the weight on the patch itself, on the eight around it, on others
    of its row and of its column, and on the class token. `draws` are the means of groups of images.
    """

    means: dict[str, Float[np.ndarray, " h"]]
    uniform: dict[str, Float[np.ndarray, " h"]]
    errors: dict[str, Float[np.ndarray, " h"]]
    draws: tuple["PatchAttention", ...] = ()
    complete: bool = True


def measure_image_attention(
    model: Vision, inputs: ModelInputs, draws: int = 0, *, progress: bool = True
) -> PatchAttention:
    """Measure images of any sizes; Ctrl-C keeps finished batches.

    With `draws`, images are dealt to so many groups in turn, each with means of its own.
    """
    blocks = blocks_of(model)
    side, skip = model.config.patches.size, 1 + model.config.patches.registers
    sums: dict[int, dict[Block, Float[Tensor, "names columns"]]] = {}

    def visit(batch: ModelInputs, numbers: list[int]) -> None:
        by_image: list[dict[Block, Float[Tensor, "names columns"]]] = [{} for _ in numbers]

        def add(block: Block, image: int, rows: range, weights: Tensor, visible: Tensor) -> None:
            height, width = (size // side for size in batch.images[image].shape[1:])
            # The first queries are the class token and registers, not patches.
            first = min(max(skip - rows.start, 0), len(rows))
            queries = range(max(rows.start - skip, 0), max(rows.stop - skip, 0))
            masks = _patch_masks(height, width, queries, skip)
            total = _sum_patches(masks, weights[:, first:].cpu(), visible[first:].cpu().float())
            by_image[image][block] = by_image[image].get(block, 0) + total

        with torch.inference_mode():
            model.run_hidden(batch, PatternWatcher(model.stacks(), add, CHUNK_WEIGHTS))
        sums.update(zip(numbers, by_image, strict=True))

    summary = for_each_batch(
        model,
        inputs,
        visit,
        label="measuring patches",
        unit="images",
        batch_tokens=BATCH_TOKENS,
        progress=progress,
    )
    every = torch.stack(
        [torch.cat([by_block[block] for block in blocks], dim=1) for by_block in sums.values()]
    ).double()
    columns = [1 + block.heads + 1 for block in blocks]
    groups = [
        [place for place, image in enumerate(sums) if image % draws == draw]
        for draw in range(draws)
    ]
    return replace(
        _mean_attention(every, columns),
        draws=tuple(_mean_attention(every[group], columns) for group in groups if group),
        complete=summary.complete,
    )


def _mean_attention(sums: Float[Tensor, "b names columns"], columns: list[int]) -> PatchAttention:
    """Means over all patches, and their errors over images (the ratio estimator)."""
    means, uniform, errors = [], [], []
    for part in sums.split(columns, dim=2):
        patches, weights = part[..., :1], part[..., 1:]
        mean = weights.sum(0) / patches.sum(0)
        scatter = (weights - mean * patches).square().sum(0) * len(part) / max(1, len(part) - 1)
        error = scatter.sqrt() / patches.sum(0)
        means.append(mean[:, 1:])
        errors.append(error[:, 1:] if len(part) > 1 else torch.full_like(error[:, 1:], torch.nan))
        uniform.append(mean[:, :1].expand_as(mean[:, 1:]))
    return PatchAttention(means=_by_kind(means), uniform=_by_kind(uniform), errors=_by_kind(errors))


def _by_kind(parts: Sequence[Float[Tensor, "names _"]]) -> dict[str, Float[np.ndarray, " h"]]:
    return dict(zip(PATCH_KINDS, torch.cat(list(parts), dim=1).numpy(), strict=True))


def _sum_patches(
    masks: Float[Tensor, "names t s"], weights: Float[Tensor, "h t s"], sight: Float[Tensor, "t s"]
) -> Float[Tensor, "names columns"]:
    """Sums over queries that are patches: their number, uniform attention, each head."""
    uniform = sight / sight.sum(1, keepdim=True).clamp(min=1)
    attention = torch.cat((uniform[None], weights))
    patches = torch.full((len(PATCH_KINDS), 1), float(masks.shape[1]))
    return torch.cat((patches, torch.einsum("hts,mts->mh", attention, masks)), dim=1)


def _patch_masks(
    rows: int, columns: int, queries: range, first_patch: int = 1
) -> Float[Tensor, "names t s"]:
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
    masks = torch.zeros(len(PATCH_KINDS), len(query), len(key) + first_patch)
    masks[:4, :, first_patch:] = patches.float()
    masks[4, :, 0] = 1.0
    return masks
