"""The report card of a model: what its heads are, and what it costs to remove some of them.

It is made for a model card: Markdown with a picture beside it, and all numbers as JSON.
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.atomic_write import atomic_write
from manyheads.errors import InputError
from manyheads.formatting import listed, percent, pluralise, without_nan
from manyheads.lens.causal.ablation import ablate_together
from manyheads.lens.causal.head_importance import ImportanceMethod, measure_importance
from manyheads.lens.inputs.evaluation_inputs import prepare_inputs
from manyheads.lens.inputs.metrics import Similarity
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.inspection import Inspection, inspect
from manyheads.lens.measure.measures import SINK_ABOVE
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.tables import format_change
from manyheads.models import build
from manyheads.report.data import REDUNDANCY_TEXTS

FRACTIONS = (0.1, 0.2, 0.4)
MOST_VALUABLE, LISTED = 8, 6


@dataclass(frozen=True, slots=True)
class RemovalCost:
    """What it costs to remove the least important heads, some at once and without training."""

    fraction: float
    heads: tuple[str, ...]
    change: float
    error: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Card:
    """An inspection with the importance of heads, and the cost of removing some.

    `unknown_importance` says why the importance is not known, where it is not.
    """

    name: str
    inspection: Inspection
    unknown_importance: str
    costs: tuple[RemovalCost, ...]
    corpus: str
    command: str

    def valuable(self) -> list[tuple[Address, float, float]]:
        """The heads that the model needs most, with the change without each and its error."""
        importance = self.inspection.importance
        if importance is None:
            return []
        order = np.argsort(-np.nan_to_num(importance.change, nan=-np.inf))[:MOST_VALUABLE]
        return [
            (
                self.inspection.addresses[index],
                float(importance.change[index]),
                float(importance.errors[index]),
            )
            for index in order.tolist()
            if importance.change[index] > 0
        ]

    def kinds_by_layer(self) -> dict[str, dict[str, int]]:
        """How many heads of each layer have which kind."""
        return kinds_by_layer(self.inspection)


def kinds_by_layer(inspection: Inspection) -> dict[str, dict[str, int]]:
    """How many heads of each layer have which kind, "mixed" where they have none."""
    layers: dict[str, Counter[str]] = {}
    for head in inspection.addresses:
        labels = inspection.labels(head)
        kind = labels[0].kind if labels else "mixed"
        layers.setdefault(_layer(head), Counter())[kind] += 1
    return {layer: dict(counts.most_common()) for layer, counts in layers.items()}


def _layer(head: Address) -> str:
    """
    >>> from manyheads.taps import Head
    >>> _layer(Address(Head(2, 5))), _layer(Address(Head(0, 1), "decoder"))
    ('L2', 'decoder L0')
    """
    return str(head).replace(f"H{head.head.head}", "", 1)


def collect_card(
    model: build.Model,
    texts: Inputs,
    *,
    name: str,
    corpus: str = "the given texts",
    command: str = "",
    by: ImportanceMethod = "auto",
    progress: bool = True,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Card:
    """Measure what a card says: kinds, sinks, dead and duplicate heads, importance and cost."""
    inputs = read_inputs(model, texts)
    if inputs.examples:
        raise InputError(f"{name} reads more than texts or images", "use lens.statistics")
    inspection = inspect(
        model,
        inputs,
        redundancy_texts=REDUNDANCY_TEXTS,
        progress=progress,
        on_progress=on_progress,
    )
    if not inspection.complete:
        raise KeyboardInterrupt
    on_progress("importance of each head")
    tokens = inspection.statistics.metadata["tokens"]
    importance, why = measure_importance(model, inputs, by, tokens, progress)
    inspection = replace(inspection, importance=importance)
    on_progress("the cost of removing heads")
    return Card(
        name=name,
        inspection=inspection,
        unknown_importance=why,
        costs=_removal_costs(model, inputs, inspection, progress),
        corpus=corpus,
        command=command,
    )


def _removal_costs(
    model: build.Model, texts: Any, inspection: Inspection, progress: bool
) -> tuple[RemovalCost, ...]:
    importance = inspection.importance
    if importance is None or model.reads_pairs:
        # Heads of several attentions are not removed together.
        return ()
    stacks = model.stacks()
    # The heads of mixers share weights and cannot be cut out.
    removable = [
        (float(change), head)
        for head, change in zip(inspection.addresses, importance.change, strict=True)
        if not np.isnan(change) and stacks[head.stack].config.layers[head.head.layer].mixer is None
    ]
    ranked = [head for _, head in sorted(removable, key=lambda pair: pair[0])]
    evaluated = prepare_inputs(model, texts)
    sign = -1 if isinstance(evaluated.metric, Similarity) else 1
    costs = []
    for fraction in FRACTIONS:
        heads = ranked[: round(fraction * len(ranked))]
        if heads:
            joint = ablate_together(
                model,
                evaluated.model_inputs,
                heads,
                metric=evaluated.metric,
                targets=evaluated.targets,
                progress=progress,
            )
            names = tuple(map(str, heads))
            costs.append(RemovalCost(fraction, names, sign * joint.change, joint.error))
    return tuple(costs)


def card_json(card: Card) -> dict[str, Any]:
    """All numbers of a card."""
    inspection, importance = card.inspection, card.inspection.importance
    return dict(
        without_nan(
            {
                "kind": "card",
                "name": card.name,
                "model": asdict(inspection.model),
                "corpus": card.corpus,
                "texts": inspection.statistics.metadata["texts"],
                "tokens": inspection.statistics.metadata["tokens"],
                "kinds_by_layer": card.kinds_by_layer(),
                "sinks": {str(head): weight for head, weight in sinks_of(inspection)},
                "dead": {str(head): list(why) for head, why in inspection.dead.reasons.items()},
                "duplicates": [
                    [str(pair.one), str(pair.other)] for pair in inspection.duplicate_pairs
                ],
                "importance": None
                if importance is None
                else {"measure": importance.measure, "by": importance.by},
                "most_valuable": [
                    {"head": str(head), "change": change, "error": error}
                    for head, change, error in card.valuable()
                ],
                "removal": [asdict(cost) for cost in card.costs],
                "command": card.command,
            }
        )
    )


def sinks_of(inspection: Inspection) -> list[tuple[Address, float]]:
    """Heads whose mean weight on the first token is that of a sink."""
    return [(head, weight) for head, weight in inspection.sinks if weight > SINK_ABOVE]


def card_markdown(card: Card, picture: str | None = None) -> str:
    """The page; `picture` is the path of the image as the page names it."""
    inspection = card.inspection
    metadata, heads = inspection.statistics.metadata, inspection.addresses
    sinks, dead = sinks_of(inspection), inspection.dead.heads
    duplicates = [f"{pair.one} and {pair.other}" for pair in inspection.duplicate_pairs]
    texts = pluralise(metadata["texts"], "text")
    parts = [
        f"## The heads of {card.name}",
        f"{inspection.model} Measured on {texts} ({metadata['tokens']:,} tokens): {card.corpus}.",
    ]
    if picture is not None:
        parts.append(f"![heads of {card.name} by kind, and the cost of removing some]({picture})")
    rows = [
        f"| {layer} | {', '.join(f'{count} {kind}' for kind, count in counts.items())} |"
        for layer, counts in card.kinds_by_layer().items()
    ]
    parts.append("\n".join(["| layer | heads by kind |", "|---|---|", *rows]))
    share = percent(len(sinks) / max(1, len(heads)))
    facts = [
        f"Sinks: {len(sinks)} of {len(heads)} heads ({share}) give the first token more than "
        f"{percent(SINK_ABOVE)} of their attention.",
        "Dead heads: " + _listed([*map(str, dead)]),
        "Duplicate pairs: " + _listed(duplicates),
    ]
    parts.append("\n".join(f"- {fact}" for fact in facts))
    parts += _worth(card)
    parts.append(f"Reproduce it:\n\n```console\n{card.command}\n```" if card.command else "")
    return "\n\n".join(part for part in parts if part) + "\n"


def _worth(card: Card) -> list[str]:
    """The most valuable heads, and the cost of removing the least valuable."""
    importance = card.inspection.importance
    if importance is None:
        return [f"The importance of heads is not known: {card.unknown_importance}."]
    what = _cost_label(importance.metric)
    how = "measured by ablation" if importance.by == "ablation" else "estimated by gradients"
    rows = [
        f"| {head} | {card.inspection.best_kind(head)} | {format_change(change, error)} |"
        for head, change, error in card.valuable()
    ]
    removed = [
        f"| {percent(cost.fraction)} | {len(cost.heads)} | {changed} |"
        for cost in card.costs
        for changed in (format_change(cost.change, cost.error),)
    ]
    valuable = [f"| most valuable head | kind | {what} without it, {how} |", "|---|---|---|", *rows]
    costs = [f"| removed at once, untrained | heads | {what} |", "|---|---|---|", *removed]
    return ["\n".join(table) for table in (valuable, costs) if len(table) > 2]


def _cost_label(metric: str) -> str:
    return "rise of the loss" if metric == "loss" else "drop of the similarity"


def _listed(names: list[str]) -> str:
    return f"{listed(names, LISTED)}." if names else "none."


def write_card(card: Card, folder: Path) -> list[Path]:
    """Write card.md, card.png and card.json into a folder, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    picture, page, numbers = (folder / f"card.{kind}" for kind in ("png", "md", "json"))
    draw_card(card, picture)
    content = json.dumps(card_json(card), indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    for path, text in ((page, card_markdown(card, picture.name)), (numbers, content)):
        with atomic_write(path) as beside:
            beside.write_bytes(text.encode("utf-8", errors="replace"))
    return [page, picture, numbers]


def draw_card(card: Card, path: Path) -> None:
    """Draw every head by its kind, and the cost of removing some."""
    from manyheads.pictures import draw_head_kinds

    inspection = card.inspection
    layers: dict[str, list[str]] = {}
    for head in inspection.addresses:
        labels = inspection.labels(head)
        layers.setdefault(_layer(head), []).append(labels[0].kind if labels else "mixed")
    importance = inspection.importance
    draw_head_kinds(
        layers,
        path,
        costs=[(cost.fraction, cost.change, cost.error) for cost in card.costs],
        cost_label="" if importance is None else _cost_label(importance.metric),
        title=f"The {len(inspection.addresses)} heads of {card.name}",
        subtitle=f"by kind; {inspection.statistics.metadata['tokens']:,} tokens",
    )
