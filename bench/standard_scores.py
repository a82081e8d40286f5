"""Time our model in lm-evaluation-harness against its own `hf` backend: `bench/standard_scores.py`.

Three tasks are made up from the articles of this library: multiple choice, rolling perplexity and
generation. Both sides have the same weights and answer the same requests in one process, in turn;
the answers are compared first. The limit is the least work, every token that differs read once and
logits where they are asked for, at the speed of large matrix products on this machine. Of rolling
perplexity every token and every logit counts, so that no backend can be twice as fast as another
that reads texts one by one: the limit says how much is left.

Seconds are those of the processor. Needs `pip install 'manyheads[lm-eval,transformers]'`.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Threads that spin while they wait would count as work in the seconds of the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import transformers
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from side_by_side import Race, count, race, say, show
from stored_results import add_store, introduce, store

import manyheads
from manyheads import tasks
from manyheads.lens.inputs.synthetic import passages
from manyheads.tasks.benchmarks.continuation_scores import branches_cache
from manyheads.tasks.benchmarks.prefix_tree import Continuation, plan_passes

__all__ = ["main"]

PACKAGES = ("lm_eval", "transformers")
OURS = "manyheads"
KINDS = {
    "multiple choice": "loglikelihood",
    "rolling perplexity": "loglikelihood_rolling",
    "generation": "generate_until",
}
# Of a log-likelihood; its sum over a long text is taken in float32 by the harness.
LIMIT = 1e-4
PRODUCT = 1024


def requests(documents: int, seed: int = 0) -> dict[str, list[Instance]]:
    """Questions with four answers, texts, and prompts, all pieces of the articles."""
    draw, words = random.Random(seed), " ".join(passages()).split()

    def piece(low: int, high: int) -> str:
        size = draw.randint(low, high)
        start = draw.randrange(len(words) - size)
        return " ".join(words[start : start + size])

    questions = [piece(30, 60) for _ in range(documents)]
    options = {"until": ["\n\n"], "max_gen_toks": 32, "do_sample": False}
    arguments: dict[str, list[Any]] = {
        "multiple choice": [
            (question, " " + piece(2, 8)) for question in questions for _ in range(4)
        ],
        "rolling perplexity": [(piece(60, 120),) for _ in range(documents)],
        "generation": [(question, options) for question in questions],
    }
    return {
        name: [
            Instance(request_type=KINDS[name], doc={}, arguments=own, idx=index)
            for index, own in enumerate(arguments[name])
        ]
        for name in KINDS
    }


def answers(lm: Any, name: str, batch: list[Instance]) -> list[Any]:
    return list(getattr(lm, KINDS[name])(batch, disable_tqdm=True))


def largest_difference(name: str, ours: list[Any], peer: list[Any]) -> float:
    """Of log-likelihoods, relative to those above 1; generated texts must be equal."""
    if name == "generation":
        return float(ours != peer)
    if name == "multiple choice":
        ours, peer = ([logprob for logprob, _ in rows] for rows in (ours, peer))
    return max(abs(own - hf) / max(1.0, abs(hf)) for own, hf in zip(ours, peer, strict=True))


def least_operations(lm: Any, name: str, batch: list[Instance]) -> float:
    """The multiplications and additions of every different token, read once, with its logits."""
    model, items = lm.model, []
    for arguments in (request.args for request in batch):
        if name == "multiple choice":
            pair = lm._encode_pair(*arguments)
        else:
            pair = [lm.prefix_token_id], lm.tok_encode(*arguments)
        items.append(Continuation(*map(tuple, pair)))
    passes = [
        group
        for block in plan_passes(items, 2**40, shared=branches_cache(model))
        for root in block
        for group in root.walk()
    ]
    tokens = sum(group.tokens for group in passes)
    rows = sum(len({read.row for read in group.reads()}) for group in passes)
    vocabulary = model.readout.vectors(model.table).numel()
    inside = sum(own.numel() for own in model.stack.parameters() if own.dim() == 2)
    return 2.0 * (tokens * inside + rows * vocabulary)


def product_speed() -> float:
    """Operations per second of a large matrix product, the best of a few."""
    left, right = torch.randn(2, PRODUCT, PRODUCT)
    best = 0.0
    for _ in range(5):
        start = time.process_time()
        left @ right
        best = max(best, 2 * PRODUCT**3 / (time.process_time() - start))
    return best


def peers(folder: Path, sizes: list[int]) -> dict[str, Any]:
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return {
        f"hf, batch {size}": HFLM(
            pretrained=model, tokenizer=tokenizer, device="cpu", batch_size=size
        )
        for size in sizes
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="a folder or the name of a model")
    parser.add_argument("--documents", type=int, default=8, help="of each task")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--batch", type=int, action="append", help="of the peer; repeatable")
    add_store(parser)
    arguments = parser.parse_args()
    introduce("cpu", *PACKAGES)
    model = manyheads.load(arguments.model)
    batches = requests(arguments.documents)
    with tempfile.TemporaryDirectory() as folder:
        manyheads.save(model, folder)
        others = peers(Path(folder), arguments.batch or [1, 8])
    entrants = {OURS: tasks.lm_eval_model(model, progress=False), **others}
    result: dict[str, Any] = {}
    timed: dict[str, Race] = {}
    for name, batch in batches.items():
        truth = answers(entrants[OURS], name, batch)
        worst = max(
            largest_difference(name, truth, answers(lm, name, batch)) for lm in others.values()
        )
        if worst > LIMIT:
            sys.exit(f"{name}: answers differ by {worst:.1e}, more than {LIMIT}")
        work: dict[str, Callable[[], Any]] = {
            entrant: lambda lm=lm, name=name, batch=batch: answers(lm, name, batch)  # type: ignore[misc]
            for entrant, lm in entrants.items()
        }
        timed[name] = race(work, device="cpu", rounds=arguments.rounds, warmups=0)
        own = timed[name].host_seconds(OURS)
        row: dict[str, Any] = {"difference": worst, "core_seconds": {}}
        for entrant in entrants:
            row["core_seconds"][entrant] = timed[name].host_seconds(entrant)
        if name != "generation":
            row["limit"] = least_operations(entrants[OURS], name, batch) / product_speed()
            row["share_of_limit"] = row["limit"] / own
        result[name] = row
        say(f"{name}: answers differ by {worst:.1e} at most")
    ratio = report(arguments.model, result, list(entrants))
    figures = {**result, "times hf": ratio}
    store(
        arguments.store, f"standard-scores-{Path(arguments.model).name}", "cpu", figures, *PACKAGES
    )


def report(model: str, result: dict[str, Any], entrants: list[str]) -> float:
    """Print the core time of all tasks; how many times ours the best of the others takes."""
    rows = []
    totals = dict.fromkeys(entrants, 0.0)
    for name, task in result.items():
        seconds = task["core_seconds"]
        for entrant in entrants:
            totals[entrant] += seconds[entrant]
        share = f"{task['share_of_limit']:.0%}" if "limit" in task else ""
        rows.append([name, *_cells(seconds, entrants), share])
    rows.append(["all three", *_cells(totals, entrants), ""])
    columns = ["task", *entrants, "of the limit"]
    show(f"{model}: core seconds, and how many times ours", columns, rows)
    return min(totals[entrant] for entrant in entrants[1:]) / totals[OURS]


def _cells(seconds: dict[str, float], entrants: list[str]) -> list[str]:
    cells = []
    for entrant in entrants:
        times = "" if entrant == OURS else f" ({seconds[entrant] / seconds[OURS]:.1f})"
        cells.append(count(seconds[entrant], "s") + times)
    return cells


if __name__ == "__main__":
    main()
