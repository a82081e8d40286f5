"""How many heads house-gpt can lose: perplexity by heads removed, in four orders.

    python studies/prune/house_gpt.py TEXT OUT [--pieces 8] [--length 128] [--draws 2]

Heads are ordered by exact ablation, gradient importance, trained L0 gates and chance on some pieces
of the text; every curve is measured on others, taken by turns from all over it. The pieces must be
of text the model was not trained on, which `studies/house/prepare.py` sets aside.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyheads import lens, load
from manyheads.lens.causal.ablation import CumulativeAblation
from manyheads.lens.results.addresses import Address
from manyheads.models.build import Model
from manyheads.pictures import Curve, CurveLabels, draw_curve
from manyheads.surgery import select_heads
from manyheads.surgery.selection.l0_selection import L0Config

MODEL = "house-gpt"
ORDERS = {"exact ablation": "ablation", "gradient": "gradient", "L0 gates": "l0"}
# A curve is read at these shares of the heads.
READ_AT = (0.125, 0.25, 0.375, 0.5, 0.75, 1.0)
# What a word may cost: a hundredth of a nat, a tenth of one.
BUDGETS = (0.01, 0.1)
GATE_TOKENS = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pieces", type=int, default=8, help="to choose by; as many to measure")
    parser.add_argument("--length", type=int, default=128, help="tokens of a piece")
    parser.add_argument("--draws", type=int, default=2, help="orders by chance")
    parser.add_argument("--gate-steps", type=int, default=100, help="that L0 gates are trained")
    settings = parser.parse_args()
    model = load(MODEL)
    pieces = cut(
        model, settings.text.read_text(encoding="utf-8"), 2 * settings.pieces, settings.length
    )
    first, other = pieces[::2], pieces[1::2]
    result, harmful = orders(model, first, settings.draws, settings.gate_steps)
    message, lines = {}, []
    for name, order in result.items():
        heads = [address.head for address in order]
        curve = lens.ablate_in_order(model, other, heads)
        message[name] = {"order": [str(head) for head in heads], **described(curve)}
        print(summary(name, message[name]))
        lines.append(drawn(name, message[name]))
    harms = confirmed(model, other, harmful)
    print(f"harmful on the pieces chosen by: {', '.join(harms['chosen']) or 'none'}")
    print(f"and on those measured by: {', '.join(harms['measured']) or 'none'}")
    settings.out.mkdir(parents=True, exist_ok=True)
    facts = {
        "model": MODEL,
        "pieces": settings.pieces,
        "length": settings.length,
        "gate_steps": settings.gate_steps,
        "baseline": message["exact ablation"]["baseline"],
        "harmful": harms,
        "orders": message,
    }
    (settings.out / "house_gpt.json").write_text(json.dumps(facts, indent=1) + "\n")
    labels = CurveLabels(
        title=f"{MODEL} with fewer and fewer heads",
        subtitle=f"{len(other)} pieces of {settings.length} tokens that no order was chosen by",
        xlabel="fraction of heads removed",
        ylabel="loss a token, in nats",
    )
    draw_curve(lines, facts["baseline"], settings.out / "house_gpt.png", labels=labels)


def cut(model: Model, text: str, count: int, length: int) -> list[list[int]]:
    """Pieces of so many tokens, evenly far apart over the text."""
    assert model.tokenizer is not None
    # More letters than a piece's tokens can need; what is cut off is a word's rest at its start.
    letters, pieces = 16 * length, []
    for place in range(count):
        start = place * (len(text) - letters) // count
        start = text.index(" ", start) + 1
        pieces.append(model.tokenizer.encode(text[start : start + letters]).ids[:length])
    assert all(len(piece) == length for piece in pieces), "the text is too short for the pieces"
    return pieces


def orders(
    model: Model, texts: Sequence[list[int]], draws: int, gate_steps: int
) -> tuple[dict[str, list[Address]], list[str]]:
    """All heads by each measure, and those that exact ablation says do harm."""
    result, harmful = {}, []
    l0 = L0Config(steps=gate_steps, batch_tokens=GATE_TOKENS)
    for name, by in ORDERS.items():
        # The curve of the texts chosen by is not what is wanted: a fraction of zero leaves it out.
        chosen = select_heads(model, texts, by, fraction=0.0, l0=l0)  # type: ignore[arg-type]
        result[name] = list(chosen.order)
        if by == "ablation":
            harmful = [str(address) for address in chosen.harmful]
    for seed in range(draws):
        chosen = select_heads(model, texts[:1], "random", fraction=0.0, seed=seed)
        result[f"chance, draw {seed}"] = list(chosen.order)
    return result, harmful


def described(curve: CumulativeAblation) -> dict[str, Any]:
    changes = [step.change for step in curve.steps]
    return {
        "baseline": curve.baseline,
        "loss": [step.value for step in curve.steps],
        "perplexity": [math.exp(step.value) for step in curve.steps],
        "errors": [step.error for step in curve.steps],
        "within": {
            f"{budget:g}": max(
                (place + 1 for place, change in enumerate(changes) if change <= budget), default=0
            )
            for budget in BUDGETS
        },
    }


def confirmed(model: Model, texts: Sequence[list[int]], harmful: list[str]) -> dict[str, list[str]]:
    """Heads that do harm where they were chosen, and those of them that do so elsewhere too."""
    again = {str(address) for address, _ in lens.ablate(model, texts).harmful()}
    return {"chosen": harmful, "measured": [name for name in harmful if name in again]}


def summary(name: str, message: dict[str, Any]) -> str:
    places = [round(share * len(message["loss"])) - 1 for share in READ_AT]
    read = " ".join(f"{message['perplexity'][place]:9.1f}" for place in places)
    return f"{name:16} {read}   within {message['within']}"


def drawn(name: str, message: dict[str, Any]) -> Curve:
    total = len(message["loss"])
    shares = [(place + 1) / total for place in range(total)]
    return Curve(name=name, fractions=shares, values=message["loss"], errors=message["errors"])


if __name__ == "__main__":
    main()
