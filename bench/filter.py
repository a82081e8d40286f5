"""What filtering and guarding cost: beside classifying in memory, in memory, and in generation.

python bench/filter.py [MODEL] [--documents 2000] [--words 60]
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from manyheads import Guard, classify, generate, load, save, with_classes
from manyheads.tasks import filter_corpus

WORDS = [
    "a",
    "child",
    "saw",
    "the",
    "river",
    "and",
    "asked",
    "why",
    "it",
    "runs",
    "to",
    "the",
    "sea",
    "so",
    "slowly",
    "every",
    "day",
]


def corpus(file: Path, documents: int, words: int) -> list[str]:
    """Documents of mixed length, as rows."""
    chance = random.Random(0)
    texts = [
        " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 2 * words)))
        for _ in range(documents)
    ]
    file.write_text(
        "".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts))
    )
    return texts


def memory_of(model: str, file: Path, out: Path) -> float:
    """The peak memory of a process that filters, in MB."""
    command = [sys.executable, __file__, model, "--measure", str(file), str(out)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="house-bert")
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    inputs = parser.parse_args()
    if inputs.measure:
        # Most rows are decided by a column, so that a large corpus takes seconds.
        rule = "n < 1000 and score >= 0"
        filter_corpus(inputs.measure[0], load(inputs.model), inputs.measure[1], keep=rule)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    model = with_classes(load(inputs.model), ("fine", "toxic"))
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        texts = corpus(rows, inputs.documents, inputs.words)
        started = time.perf_counter()
        classify(model, texts, progress=False)
        alone = time.perf_counter() - started
        result = filter_corpus(
            rows, model, Path(folder) / "out", keep="score >= 0", price_per_hour=1.0, progress=False
        )
        print(f"classify in memory  {result.counts.tokens / alone:10,.0f} tokens/s")
        print(f"filter              {result.tokens_per_second:10,.0f} tokens/s")
        print(f"  {result.cost_per_million_tokens:.4f} per million tokens at 1 per hour")
        save(model, Path(folder) / "model")
        for factor in (2, 128):
            corpus(rows, factor * inputs.documents, inputs.words)
            peak = memory_of(str(Path(folder) / "model"), rows, Path(folder) / f"out{factor}")
            size = rows.stat().st_size / 2**20
            print(f"peak memory         {peak:10,.0f} MB for {size:.1f} MB of rows")
    writer = load("house-gpt")
    for prompts in (1, 16):
        generations = generate(
            writer,
            ["Once upon a time"] * prompts,
            max_new_tokens=100,
            guard=Guard(model, refuse="toxic", threshold=1.0),
            progress=False,
        )
        report = generations[0].guard
        assert report is not None
        sentences = sum(each.guard.sentences for each in generations if each.guard)
        print(
            f"guard, {prompts:2} prompts   {report.fraction:10.1%} of the time, "
            f"{1000 * report.seconds / max(1, sentences):.1f} ms per sentence"
        )


if __name__ == "__main__":
    main()
