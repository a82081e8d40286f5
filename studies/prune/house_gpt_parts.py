"""How many neurons and layers house-gpt can lose: perplexity by share removed, in every order.

    python studies/prune/house_gpt_parts.py TEXT OUT [--pieces 8] [--length 128] [--draws 2]

Neurons and layers are ordered by each measure on some pieces of the text; every curve is measured
on others, as `house_gpt.py` does for heads. Exact ablation of all neurons, one at a time, is slow:
`--ablation-pieces` says on how many of the pieces it is done, 0 leaving it out. `--only` takes some
measures, and joins them to what the folder has of the same pieces.
"""

import argparse
import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from house_gpt import GATE_TOKENS, MODEL, cut

from manyheads import load
from manyheads.lens.causal.evaluate import Evaluation, Variant
from manyheads.models.build import Model
from manyheads.surgery import prune_layers, prune_neurons, select_layers, select_neurons
from manyheads.surgery.selection.l0_selection import L0Config

MEASURES = ("ablation", "gradient", "redundancy", "l0", "random")
READ_AT = (0.05, 0.125, 0.25, 0.5, 0.75)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pieces", type=int, default=8, help="to choose by; as many to measure")
    parser.add_argument("--ablation-pieces", type=int, default=2, help="for neurons one by one")
    parser.add_argument("--length", type=int, default=128, help="tokens of a piece")
    parser.add_argument("--draws", type=int, default=2, help="orders by chance")
    parser.add_argument("--gate-steps", type=int, default=100, help="that L0 gates are trained")
    parser.add_argument("--what", nargs="+", default=("layers", "neurons"))
    parser.add_argument("--only", nargs="+", default=MEASURES, choices=MEASURES)
    tables_of_run = parser.parse_args()
    model = load(MODEL)
    pieces = cut(
        model,
        tables_of_run.text.read_text(encoding="utf-8"),
        2 * tables_of_run.pieces,
        tables_of_run.length,
    )
    first, other = pieces[::2], pieces[1::2]
    l0 = L0Config(steps=tables_of_run.gate_steps, batch_tokens=GATE_TOKENS)
    evaluation = Evaluation.of(model, other)
    tables_of_run.out.mkdir(parents=True, exist_ok=True)
    path = tables_of_run.out / "house_gpt_parts.json"
    settings = ("pieces", "ablation_pieces", "length", "gate_steps")
    message: dict[str, Any] = {name: getattr(tables_of_run, name) for name in settings}
    message |= {"model": MODEL, "layers": {}, "neurons": {}}
    if path.exists():
        before = json.loads(path.read_text())
        if all(before[name] == message[name] for name in settings):
            message = before

    def tell(what: str, by: str, result: dict[str, Any]) -> None:
        message[what][by] = result
        print(what, by, result)
        # What is slow comes last, and what there is by then is kept.
        path.write_text(json.dumps(message, indent=1) + "\n")

    wanted = measures(tables_of_run.draws, tables_of_run.only)
    for by, seed in wanted if "layers" in tables_of_run.what else ():
        order, harmful = layers_by(model, first, by, seed, l0)
        counts = list(range(1, len(order) + 1))
        sets = [partial(without_layers, model, order[:count]) for count in counts]
        result = described(evaluation, sets, counts, harmful)
        tell("layers", name(by, seed), result | {"order": order})
    if "neurons" not in tables_of_run.what:
        return
    for by, seed in sorted(wanted, key=lambda each: each[0] == "ablation"):
        texts = first[: tables_of_run.ablation_pieces] if by == "ablation" else first
        if not texts:
            continue
        neurons, harmful, total = neurons_by(model, texts, by, seed, l0)
        counts = [round(share * total) for share in READ_AT if round(share * total) <= len(neurons)]
        sets = [partial(without_neurons, model, neurons[:count]) for count in counts]
        result = described(evaluation, sets, counts, harmful)
        tell("neurons", name(by, seed), result | {"ordered": len(neurons)})


def measures(draws: int, only: Sequence[str]) -> list[tuple[str, int]]:
    """Every measure once, and chance as often as asked."""
    result = [(by, 0) for by in only if by != "random"]
    return result + [("random", seed) for seed in range(draws) if "random" in only]


def name(by: str, seed: int) -> str:
    return f"random, draw {seed}" if by == "random" else by


def layers_by(
    model: Model, texts: Sequence[Any], by: str, seed: int, l0: L0Config
) -> tuple[list[int], list[str]]:
    chosen = select_layers(model, texts, by, fraction=1.0, seed=seed, l0=l0)  # type: ignore[arg-type]
    return list(chosen.order), list(chosen.harmful_names)


def neurons_by(
    model: Model, texts: Sequence[Any], by: str, seed: int, l0: L0Config
) -> tuple[list[tuple[int, int]], list[str], int]:
    # The curve of the texts chosen by is not what is wanted: a fraction of zero leaves it out.
    options: Any = {"fraction": 0.0, "points": 1, "seed": seed, "l0": l0}
    chosen = select_neurons(model, texts, by, **options)  # type: ignore[arg-type]
    return list(chosen.order), list(chosen.harmful_names), chosen.total


def without_layers(model: Model, layers: Sequence[int]) -> Variant:
    return Variant(prune_layers(model, layers))


def without_neurons(model: Model, neurons: Sequence[tuple[int, int]]) -> Variant:
    gone: dict[int, list[int]] = {}
    for layer, neuron in neurons:
        gone.setdefault(layer, []).append(neuron)
    return Variant(prune_neurons(model, gone))


def described(
    evaluation: Evaluation, sets: Sequence[Any], counts: Sequence[int], harmful: Sequence[str]
) -> dict[str, Any]:
    effects = evaluation.measure(sets)
    result = [effects.of(place) for place in range(len(sets))]
    return {
        "baseline": effects.baseline_mean[0],
        "taken": list(counts),
        "perplexity": [round(math.exp(value), 2) for value, _, _ in result],
        "change": [round(change, 4) for _, change, _ in result],
        "errors": [round(error, 4) for _, _, error in result],
        "harmful": list(harmful),
    }


if __name__ == "__main__":
    main()
