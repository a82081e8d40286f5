"""Draw heads and results as PNG or SVG, from plain arrays."""

from manyheads.pictures.attention_maps import (
    HeadMapLabels,
    draw_grid,
    draw_head_map,
    draw_heads,
    draw_over_image,
    draw_over_text,
)
from manyheads.pictures.canvas import check_image_path
from manyheads.pictures.circuit_graphs import draw_circuit
from manyheads.pictures.class_charts import draw_confusion
from manyheads.pictures.curves import (
    Curve,
    CurveLabels,
    ScalingCurves,
    ScalingLabels,
    draw_curve,
    draw_scaling,
    draw_training,
    read_telemetry,
)
from manyheads.pictures.head_charts import (
    draw_atlas,
    draw_bars,
    draw_gates,
    draw_head_kinds,
    draw_similarity,
)
from manyheads.pictures.layer_maps import draw_layer_maps
from manyheads.pictures.match_maps import draw_match

__all__ = [
    "Curve",
    "CurveLabels",
    "HeadMapLabels",
    "ScalingCurves",
    "ScalingLabels",
    "check_image_path",
    "draw_atlas",
    "draw_bars",
    "draw_circuit",
    "draw_confusion",
    "draw_curve",
    "draw_gates",
    "draw_grid",
    "draw_head_kinds",
    "draw_head_map",
    "draw_heads",
    "draw_layer_maps",
    "draw_match",
    "draw_over_image",
    "draw_over_text",
    "draw_scaling",
    "draw_similarity",
    "draw_training",
    "read_telemetry",
]
