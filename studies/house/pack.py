"""The trained house models and their cards for the package: studies/house/pack.py RUNS TO

RUNS holds the run folders and held-out.txt, which the cards' figures are measured on. Weights go in
half precision; run.toml, curve.jsonl (the validations) and README.md, the card, lie beside them.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from manyheads.checkpoints.folder import load, save
from manyheads.taps import Record, Site, Sublayer, Tap
from manyheads.train.run_file.run_config import read_run

NAMES = ("house-gpt", "house-gpt-gated", "house-bert")
ABOUT = {
    "house-gpt": "A small language model for looking at heads",
    "house-gpt-gated": "The twin of house-gpt with a gate on every channel of the heads' outputs",
    "house-bert": "A small masked language model like ModernBERT",
}
LENGTH, TEXTS, BLOCK = 512, 8, 60
CARD = """# {name}

{about}:
{parameters:,} parameters, {layers} layers of {heads} heads, width {width}, a byte-level
tokenizer of {vocabulary:,} entries. Trained by manyheads on the first 95% of enwik8 (the start of
the English Wikipedia of 2006, as XML), {tokens:,} tokens in {steps:,} steps, seed {seed}, on one
H200 GPU in bfloat16. The last 5% are held out, and every figure is measured on them.
`run.toml` is the run file, `curve.jsonl` its validation losses.

| measure | value |
|---|---|
{rows}

`manyheads.load("{name}")` needs no network. Do not trust the facts in what it generates: it is for
looking at heads, for teaching and for tests. Text of enwik8: Wikipedia's authors, CC BY-SA.
"""


def main(runs: Path, folder: Path) -> None:
    for name in NAMES:
        model = load(runs / name / "model", dtype=torch.bfloat16)
        place = folder / name
        save(model, place)
        shutil.copy(Path(__file__).with_name(f"{name}.toml"), place / "run.toml")
        lines = [json.loads(line) for line in (runs / name / "metrics.jsonl").open()]
        checks = [line for line in lines if "validation" in line]
        curve = "".join(json.dumps(check) + "\n" for check in checks)
        (place / "curve.jsonl").write_text(curve)
        model = model.float()
        tokens = [line["tokens"] for line in lines if "tokens" in line][-1]
        result = {**figures(model, (runs / "held-out.txt").read_text()), **checks[-1]}
        seed = read_run(place / "run.toml").run.seed
        (place / "README.md").write_text(_card(name, model, tokens, result, seed))


def figures(model: Any, text: str) -> dict[str, Any]:
    """Of heads: the best on random tokens said twice, and what real text makes of them all."""
    layers = range(len(model.stack.layers))
    draw = torch.Generator().manual_seed(1)
    block = torch.randint(300, model.config.embedding.vocabulary, (16, BLOCK), generator=draw)
    twice = torch.cat((torch.zeros(16, 1, dtype=torch.long), block, block), dim=1)
    patterns = watched(model, twice, Tap.PATTERN, layers)
    after, every = torch.arange(BLOCK + 1, 2 * BLOCK + 1), torch.arange(1, 2 * BLOCK + 1)
    scores = {
        "induction": patterns[..., after, after - BLOCK + 1].mean((1, 3)),
        "previous token": patterns[..., every, every - 1].mean((1, 3)),
    }
    result: dict[str, Any] = {}
    for name, score in scores.items():
        layer, head = divmod(int(score.argmax()), score.shape[1])
        result[name] = (float(score.max()), f"L{layer}H{head}")
    ids = model.tokenizer.encode(text[: 16 * LENGTH * TEXTS]).ids[: LENGTH * TEXTS]
    rows = torch.tensor(ids).view(TEXTS, LENGTH)
    result["first"] = float(watched(model, rows, Tap.PATTERN, layers)[..., 0].mean())
    # As each layer leaves it: after attention alone it is another number.
    record = Record([Site(layer, Tap.AFTER, Sublayer.FEEDFORWARD) for layer in layers])
    with torch.no_grad():
        model(rows, watch=record)
    result["largest"] = max(float(record[site].values.abs().max()) for site in record.sites)
    return result


def watched(model: Any, ids: torch.Tensor, tap: Tap, layers: range) -> torch.Tensor:
    record = Record([Site(layer, tap) for layer in layers])
    with torch.no_grad():
        model(ids, watch=record)
    return torch.stack([torch.stack(record[Site(layer, tap)].each) for layer in layers])


def _card(name: str, model: Any, tokens: int, figures: dict[str, Any], seed: int) -> str:
    config = model.config
    checked = figures["validation"]
    rows = []
    if "bits_per_byte" in checked:
        rows.append(("bits per byte", f"{checked['bits_per_byte']:.4f}"))
    rows.append(("loss per token, in nats", f"{checked['loss']:.4f}"))
    for kind in ("induction", "previous token"):
        score, head = figures[kind]
        if kind == "previous token" or name != "house-bert":
            label = f"best {kind.replace(' ', '-')} head, on {BLOCK} random tokens, repeated"
            rows.append((label, f"{score:.3f} ({head})"))
    rows.append(("weight on the first token", f"{figures['first']:.2%}"))
    rows.append(("largest activation", f"{figures['largest']:.1f}"))
    return CARD.format(
        name=name,
        about=ABOUT[name],
        parameters=sum(each.numel() for each in model.parameters()),
        layers=len(config.stack.layers),
        heads=config.stack.layers[0].attention.inner.heads,
        width=config.stack.width,
        vocabulary=config.embedding.vocabulary,
        tokens=tokens,
        steps=figures["step"],
        seed=seed,
        rows="\n".join(f"| {what} | {value} |" for what, value in rows),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
