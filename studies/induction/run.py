"""Induction heads of house-gpt: which they are, what is lost without them, and when they formed.

    python studies/induction/run.py [--text build/house/held-out.txt]
    python studies/induction/run.py --grown build/house/house-gpt    # the folder of its training

Heads are found by `lens.kinds`. Then the loss is measured without them, without their
previous-token partner and without other pairs of the same layers, where something was said before
and where it was not: on random tokens said twice, and on pieces of the text of enwik8 that was held
out (studies/house/prepare.py makes it), or else on the articles that the library brings along.
`--grown` reads the journal of a training run into growth.json instead.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from manyheads import lens, load
from manyheads.lens.causal.ablation import HeadAblation
from manyheads.lens.head_kinds.kinds import Kinds
from manyheads.lens.inputs.synthetic import passages, repeated_tokens
from manyheads.models.build import Model
from manyheads.taps import Head

HERE = Path(__file__).parent
MODEL = "house-gpt"
HELD_OUT = Path("build/house/held-out.txt")
PIECES, LENGTH, SEQUENCES, PAIRS = 16, 384, 32, 6

Targets = list[dict[int, int]]
Sets = dict[str, tuple[Head, ...]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, default=HELD_OUT)
    parser.add_argument("--grown", type=Path)
    settings = parser.parse_args()
    if settings.grown is not None:
        (HERE / "growth.json").write_text(json.dumps(grown(settings.grown), indent=1) + "\n")
        return
    model = load(MODEL)
    result = lens.kinds(model)
    chosen = tuple(address.head for address in result.heads("induction"))
    sets = choose(chosen, result)
    real, source = read_pieces(model, settings.text)
    random = repeated_tokens(model, SEQUENCES, seed=1)
    tables = {
        "random tokens said twice": measure(model, random, sets),
        source: measure(model, real, sets),
    }
    message = {
        "model": MODEL,
        "induction": {str(head): round(result.scores["induction"].of(head), 4) for head in chosen},
        "partners": result.metadata["partners"],
        "kinds": {str(head): result.best(head) for head in result.labels},
        "pieces": len(real),
        "length": LENGTH,
        "losses": tables,
    }
    (HERE / "result.json").write_text(json.dumps(message, indent=1) + "\n")
    print(page(message))


def choose(chosen: Sequence[Head], result: Kinds) -> Sets:
    """The induction heads, the heads they build on, and as many others of the same layers."""
    layers = {head.layer for head in chosen}
    rest = [
        address.head
        for address in result.labels
        if address.head.layer in layers and address.head not in chosen
    ]
    pairs = list(combinations(rest, len(chosen)))
    draw = np.random.default_rng(0).permutation(len(pairs))[:PAIRS]
    partners = {Head.parse(each["head"]) for each in result.metadata["partners"].values()}
    sets: Sets = {"induction": tuple(chosen), "partner": tuple(sorted(partners, key=str))}
    return sets | {" ".join(map(str, pairs[place])): pairs[place] for place in sorted(draw)}


def read_pieces(model: Model, file: Path) -> tuple[list[list[int]], str]:
    """Pieces of token ids from all over a text, and what the text is."""
    if not file.is_file():
        ids = [model.tokenizer.encode(each).ids for each in passages()]
        return ids, "articles of the library"
    text = file.read_text("utf-8")
    # More characters than a piece needs, whatever the tokens are.
    starts = np.linspace(0, len(text) - 8 * LENGTH, PIECES).astype(int)
    ids = [model.tokenizer.encode(text[at : at + 8 * LENGTH]).ids[:LENGTH] for at in starts]
    return ids, "enwik8, held out"


def measure(model: Model, texts: list[list[int]], sets: Sets) -> dict[str, Any]:
    """The loss with all heads and without each set, where induction can help and where not."""
    repeats, others = split(texts)
    return {
        name: losses(model, texts, targets, sets)
        for name, targets in (("said before", repeats), ("new", others))
    }


def split(texts: list[list[int]]) -> tuple[Targets, Targets]:
    """Next tokens that followed an earlier copy of the token before them, and all the others."""
    repeats: Targets = []
    others: Targets = []
    for ids in texts:
        seen: set[tuple[int, int]] = set()
        mine: tuple[dict[int, int], dict[int, int]] = ({}, {})
        for place, pair in enumerate(pairwise(ids)):
            mine[pair not in seen][place] = pair[1]
            seen.add(pair)
        repeats.append(mine[0])
        others.append(mine[1])
    return repeats, others


def losses(model: Model, texts: list[list[int]], targets: Targets, sets: Sets) -> dict[str, Any]:
    effects = HeadAblation.of(model, texts, targets=targets).measure(list(sets.values()))
    message: dict[str, Any] = {
        "tokens": sum(map(len, targets)),
        "loss": round(effects.baseline_mean[0], 4),
    }
    changes = {}
    for place, name in enumerate(sets):
        _, change, error = effects.of(place)
        if name in ("induction", "partner"):
            message[name] = {"change": round(change, 4), "error": round(error, 4)}
        else:
            changes[name] = round(change, 4)
    message["other pairs"] = {"mean": round(float(np.mean(list(changes.values()))), 4), **changes}
    return message


def page(message: dict[str, Any]) -> str:
    heads = ", ".join(f"{head} ({score:.2f})" for head, score in message["induction"].items())
    partners = ", ".join(sorted({each["head"] for each in message["partners"].values()}))
    lines = [f"induction heads of {message['model']}: {heads}; their partner: {partners}", ""]
    lines.append("| text | next tokens | all heads | induction heads | partner | other pairs |")
    lines.append("|---|---|---|---|---|---|")
    for text, rows in message["losses"].items():
        for name, row in rows.items():
            changed = [
                f"{row[each]['change']:+.3f} ±{row[each]['error']:.3f}"
                for each in ("induction", "partner")
            ]
            cells = [f"{text}: {name}", f"{row['tokens']:,}", f"{row['loss']:.3f}", *changed]
            pairs = [change for name, change in row["other pairs"].items() if name != "mean"]
            reach = f"{min(pairs):+.3f} to {max(pairs):+.3f}"
            lines.append(f"| {' | '.join(cells)} | {row['other pairs']['mean']:+.3f} ({reach}) |")
    return "\n".join(lines)


def grown(folder: Path) -> dict[str, Any]:
    """By step the best induction and previous-token heads, and the loss of the training batches."""
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = []
    for line in (folder / "telemetry.jsonl").read_text().splitlines():
        row = json.loads(line)
        step = row["step"]
        before = [
            each["loss"] for each in logged if "loss" in each and step - 100 < each["step"] <= step
        ]
        best: dict[str, Any] = {}
        for name in ("induction", "previous_token"):
            values = np.array(row[name])
            layer, head = np.unravel_index(values.argmax(), values.shape)
            best[name] = round(float(values.max()), 4)
            best[f"{name}_head"] = f"L{layer}H{head}"
        steps.append({"step": step, "training_loss": round(float(np.mean(before)), 4), **best})
    return {"model": MODEL, "steps": steps}


if __name__ == "__main__":
    main()
