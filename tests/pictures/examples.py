"""Every picture drawn once, with what it is given made by a formula."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from manyheads.pictures import (
    draw_atlas,
    draw_bars,
    draw_circuit,
    draw_gates,
    draw_grid,
    draw_head_map,
    draw_layer_maps,
    draw_over_image,
    draw_over_text,
    draw_similarity,
    draw_training,
)
from manyheads.pictures.canvas import Theme

TOKENS = ["The", " cat", " sat", "Привет,", " мир", "你好", "مرحبا", "שלום", "नमस्ते"]
TOKENS += ["$x_1$", "<script>", " on\n", " the", " mat"]
RANDOM = np.random.default_rng(0)


def causal(length: int, sharp: float = 1.0) -> np.ndarray:
    scores = sharp * RANDOM.normal(size=(length, length))
    scores[np.triu_indices(length, 1)] = -np.inf
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.asarray(weights / weights.sum(1, keepdims=True))


def _head_map(path: Path, theme: Theme) -> None:
    draw_head_map(
        causal(len(TOKENS), 2.0),
        TOKENS,
        path,
        title="L2H7: induction",
        subtitle="a text",
        theme=theme,
    )


def _grid(path: Path, theme: Theme) -> None:
    layers = [[causal(40, 0.5 + layer + head / 2) for head in range(8)] for layer in range(3)]
    draw_grid(layers, path, names={(0, 3): "previous-token"}, title="A model", theme=theme)


def _atlas(path: Path, theme: Theme) -> None:
    values = RANDOM.normal(size=(3, 6)).tolist()
    values[1][2] = float("nan")
    labels = [["induction", "mixed", "sink", "previous-token", "broad", "bracket quotes"]] * 3
    draw_atlas(values, path, labels=labels, measure="loss", title="All heads", theme=theme)


def _bars(path: Path, theme: Theme) -> None:
    names = [f"L{layer}H{head}" for layer in range(4) for head in range(6)]
    values = (RANDOM.normal(size=24) ** 3).tolist()
    draw_bars(
        names, values, path, errors=[0.2] * 24, top_k=12, xlabel="nats", title="Worth", theme=theme
    )


def _training(path: Path, theme: Theme) -> None:
    steps = list(range(0, 1000, 50))
    x = np.array(steps) / 100
    panels = {
        name: {
            f"L{layer}H{head}": top / (1 + np.exp(4 + layer - x)) + 0.05 * RANDOM.random(20)
            for layer in range(3)
            for head, top in enumerate(RANDOM.random(4))
        }
        for name in ("entropy", "induction", "first token")
    }
    draw_training(steps, panels, path, title="Heads while training", theme=theme)


def _over_text(path: Path, theme: Theme) -> None:
    words = TOKENS * 4
    scores = {"rollout": RANDOM.random(len(words)) ** 3, "flow": RANDOM.random(len(words))}
    draw_over_text(words, scores, path, at=5, title="Where it comes from", theme=theme)


def _over_image(path: Path, theme: Theme) -> None:
    rows, columns = np.mgrid[0:96, 0:96] / 96
    image = np.stack([rows, columns, 1 - rows], axis=-1)
    spots = np.exp(-RANDOM.random((7, 1, 1)) * 30 * ((np.mgrid[0:12, 0:12] - 6) ** 2).sum(0) / 36)
    draw_over_image(image, spots, path, title="The class token looks", theme=theme)


def _gates(path: Path, theme: Theme) -> None:
    layers = [[RANDOM.beta(0.4 + head, 2, size=500) for head in range(6)] for _ in range(2)]
    draw_gates(layers, path, title="Gates", theme=theme)


def _likeness(path: Path, theme: Theme) -> None:
    vectors = RANDOM.normal(size=(20, 6))
    vectors[[1, 7, 12]] = vectors[3] + 0.3 * RANDOM.normal(size=(3, 6))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    names = [f"L{place // 5}H{place % 5}" for place in range(20)]
    similarity = np.clip(vectors @ vectors.T, 0, 1)
    draw_similarity(similarity, names, path, clusters=[[1, 3, 7, 12]], title="Alike", theme=theme)


def _layer_maps(path: Path, theme: Theme) -> None:
    layers, places = np.mgrid[0:24, 0 : len(TOKENS)]
    spot = np.exp(-((layers - 6) ** 2) / 30 - (places - 4) ** 2)
    spot[:, -1] += 1 / (1 + np.exp(14 - layers[:, -1]))
    maps = {"residual": spot, "attention": spot[::-1], "feedforward": spot * np.nan}
    draw_layer_maps(
        maps, TOKENS, path, marked=(3, 4), measure="probability", title="Restored", theme=theme
    )


def circuit_edges() -> list[tuple[str, str, float]]:
    """Edges of three layers whose four heads share keys and values by two, weaker and weaker."""
    writers = [("embeddings", -1.0)]
    readers = [("logits", 9.0)]
    for layer in range(3):
        writers += [(f"L{layer}H{head}", float(layer)) for head in range(4)]
        writers.append((f"L{layer} mlp", layer + 0.5))
        readers += [(f"L{layer}H{head} query", float(layer)) for head in range(4)]
        for group in ("H0-1", "H2-3"):
            readers += [(f"L{layer}{group} {port}", float(layer)) for port in ("key", "value")]
        readers.append((f"L{layer} mlp", layer + 0.5))
    pairs = [(w, r) for w, low in writers for r, high in readers if low < high]
    order = np.random.default_rng(1).permutation(len(pairs))
    return [
        (*pairs[place], (-1) ** (rank % 3 == 2) / (1 + rank)) for rank, place in enumerate(order)
    ]


def _circuit(path: Path, theme: Theme) -> None:
    draw_circuit(circuit_edges(), path, max_edges=20, title="A circuit", theme=theme)


PICTURES: dict[str, Callable[[Path, Theme], None]] = {
    "head_map": _head_map,
    "grid": _grid,
    "atlas": _atlas,
    "bars": _bars,
    "training": _training,
    "over_text": _over_text,
    "over_image": _over_image,
    "gates": _gates,
    "similarity": _likeness,
    "layer_maps": _layer_maps,
    "circuit": _circuit,
}
