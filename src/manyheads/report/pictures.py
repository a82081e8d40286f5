"""The pictures of a report: the atlas, one head, one layer, and the class token over an image."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from manyheads.lens.attention_maps.patterns import patterns
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.measure_names import describe_measure
from manyheads.pictures import draw_atlas, draw_grid, draw_head_map, draw_over_image
from manyheads.report.data import ReportData, short_kind, telling_head
from manyheads.report.inputs import ReportImage

# Tokens of the text on the picture of one head.
MAX_TOKENS = 48


def draw_pictures(report: ReportData, folder: Path) -> list[Path]:
    """Draw the atlas, the head with the clearest pattern and its layer; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    best = telling_head(report.inspection)
    layer = [
        address
        for block in report.statistics.blocks
        if best in block.addresses
        for address in block.addresses
    ]
    # All weights: the report itself has only the largest of each query.
    measured = patterns(report.model, report.input.shown, layer)
    maps = [measured.of(head).weights.float().cpu().numpy() for head in layer]
    tokens = list(report.input.tokens)[:MAX_TOKENS]
    paths = [
        folder / "atlas.png",
        folder / f"head-{best}.png",
        folder / f"layer-{best.head.layer}.png",
    ]
    _draw_atlas(report, paths[0])
    kind = short_kind(report.inspection, best)
    draw_head_map(
        maps[layer.index(best)][: len(tokens), : len(tokens)],
        tokens,
        paths[1],
        title=f"{report.name} {best}: {kind}",
        subtitle=f"on the first {len(tokens)} tokens of the text",
    )
    draw_grid(
        [maps],
        paths[2],
        numbers=[best.head.layer],
        names={(0, address.head.head): short_kind(report.inspection, address) for address in layer},
        title=f"{report.name}, layer {best.head.layer}",
        subtitle=f"queries down, keys across, {len(report.input)} tokens",
    )
    if report.input.image is not None:
        paths.append(folder / f"class-{best.head.layer}.png")
        _draw_class(report, report.input.image, layer, maps, paths[-1])
    return paths


def _draw_class(
    report: ReportData,
    image: ReportImage,
    heads: Sequence[Address],
    maps: Sequence[Float[np.ndarray, "t t"]],
    path: Path,
) -> None:
    """Draw the attention of the class token over the image."""
    grids = [
        weights[0, 1 + image.registers :].reshape(image.rows, image.columns) for weights in maps
    ]
    pixels = image.pixels.float().cpu()
    # Scale the pixels to [0, 1], whatever range the model reads.
    scaled = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp_min(1e-9)
    draw_over_image(
        scaled.expand(3, -1, -1).permute(1, 2, 0).numpy(),
        np.stack(grids),
        path,
        names=[str(head) for head in heads],
        title=f"{report.name}: attention of the class token",
    )


def _draw_atlas(report: ReportData, path: Path) -> None:
    importance = report.importance
    name = "normalized_entropy" if importance is None else importance.measure
    values = report.statistics.means[name] if importance is None else importance.change
    blocks = report.statistics.blocks
    ends = np.cumsum([block.heads for block in blocks])
    draw_atlas(
        [part.tolist() for part in np.split(values, ends[:-1])],
        path,
        labels=[
            [short_kind(report.inspection, address) for address in block.addresses]
            for block in blocks
        ],
        measure=describe_measure(name).title,
        title=f"The {report.heads} heads of {report.name}",
        subtitle="each with its kind",
    )
