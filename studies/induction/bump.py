"""The bump: a small model that learns, all at once, to go on as before.

    python studies/induction/bump.py [--steps 1500]        # three minutes on two cores; no network

Two layers of four heads read random letters, a block of them said twice in each text; what a block
is cannot be known, only that it comes again. The telemetry of the training run watches the heads
and the loss on both copies of a random block. `bump.json` and a picture in docs say what it saw.
"""

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from manyheads.pictures import draw_training, read_telemetry
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.run_file.run_config import parse_run

HERE = Path(__file__).parent
PICTURE = HERE.parents[1] / "docs/images/induction-bump.png"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
TEXTS, SHORTEST, LONGEST = 60_000, 16, 64
EVERY = 20
KINDS = ("previous_token", "induction")
COPIES = ("first_copy_loss", "second_copy_loss")

Line = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1500)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_texts(folder)
        train(parse_run(tables(folder, settings.steps)))
        telemetry = folder / "out/telemetry.jsonl"
        grown = read(telemetry)
        draw(telemetry, grown)
    (HERE / "bump.json").write_text(json.dumps(grown, indent=1) + "\n")
    show(grown)


def write_texts(folder: Path) -> None:
    """Blocks of random letters, each said twice; and a tokenizer whose tokens are letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    drawn = random.Random(0)
    blocks = (
        "".join(drawn.choices(LETTERS, k=drawn.randint(SHORTEST, LONGEST))) for _ in range(TEXTS)
    )
    (folder / "texts.txt").write_text("\n".join(block * 2 for block in blocks))
    tokenizer = Tokenizer(
        models.WordLevel({letter: at for at, letter in enumerate(LETTERS)}, LETTERS[0])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))


def tables(folder: Path, steps: int) -> dict[str, Any]:
    return {
        "model": {
            "size": "llama-1b-shape",
            "change": {
                "layers": 2,
                "width": 64,
                "heads": 4,
                "kv_heads": 4,
                "head_size": 16,
                "hidden": 128,
                "vocabulary": len(LETTERS),
                "theta": 1000.0,
            },
        },
        "data": {
            "train": str(folder / "texts.txt"),
            "separator": "\n",
            "tokenizer": str(folder / "tokenizer.json"),
            "end": "",
            "max_length": 2 * LONGEST,
            "batch": 2048,
        },
        "objective": {"kind": "CausalLM"},
        "optimizer": {"lr": 5e-3},
        "run": {
            "folder": str(folder / "out"),
            "steps": steps,
            "device": "cpu",
            "telemetry_every": EVERY,
        },
    }


def read(telemetry: Path) -> list[Line]:
    """By step the best head of each kind, and the loss on both copies."""
    grown = []
    for line in MetricsLog(telemetry).read():
        best = {kind: max(max(layer) for layer in line[kind]) for kind in KINDS}
        grown.append({"step": line["step"], **best, **{copy: line[copy] for copy in COPIES}})
    return grown


def draw(telemetry: Path, grown: list[Line]) -> None:
    steps, panels = read_telemetry(telemetry, KINDS)
    losses = {
        name.split("_")[0] + " copy": np.array([line[name] for line in grown]) for name in COPIES
    }
    named = {"previous token": panels["previous_token"], "induction": panels["induction"]}
    draw_training(
        steps,
        {**named, "loss, nats a letter": losses},
        PICTURE,
        named=2,
        title="Induction heads form, and what was said before is known",
        subtitle="two layers of four heads on random letters said twice",
    )


def show(grown: list[Line]) -> None:
    print("step  previous  induction  loss of the first copy  of the second")
    for line in grown[:: max(1, len(grown) // 25)]:
        print(
            f"{line['step']:>4}  {line['previous_token']:>8.2f}  {line['induction']:>9.2f}  "
            f"{line['first_copy_loss']:>22.3f}  {line['second_copy_loss']:>13.3f}"
        )


if __name__ == "__main__":
    main()
