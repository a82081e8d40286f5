"""Search Python's standard library by docstring, before and after training: see README.md.

    python studies/code_search/run.py --device cuda --minutes 5 -o result.json
    python studies/code_search/run.py --kinds late --device cuda --minutes 5 -o late.json

The functions are those of the running Python. Every function of a package is either trained on or
tested on. A run of one kind takes its minutes of training and about one more.
"""

import argparse
import ast
import hashlib
import json
import math
import re
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyheads import encode, encode_tokens, load
from manyheads.atomic_write import atomic_write
from manyheads.devices import resolve_device
from manyheads.encoding.late_scores import maxsim_matrix
from manyheads.train import parse_run, train
from manyheads.train.loop.reporting import MetricsLog

FUNCTIONS = 5_000
LENGTH = 256
# Docstrings and bodies shorter than this say too little to be found by.
FEWEST_WORDS, FEWEST_LETTERS = 3, 60
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
# Tokens of a micro-batch: pairs in it are each other's negatives.
BATCH = {
    ("dense", "cuda"): 131_072,
    ("late", "cuda"): 49_152,
    ("dense", "cpu"): 8_192,
    ("late", "cpu"): 4_096,
}
CACHE = {"cuda": 0, "cpu": 4_096}
CALIBRATION_STEPS = {"cuda": 40, "cpu": 2}
RATE = 6e-4


@dataclass(frozen=True, slots=True)
class Function:
    """A function without its docstring; `package` is the part of its module before any dot."""

    package: str
    where: str
    name: str
    docstring: str
    body: str

    @property
    def nameless(self) -> str:
        return re.sub(rf"\b{re.escape(self.name)}\b", "function", self.body)

    @property
    def words(self) -> str:
        """The name as words: `getLineNumber` as "get line number"."""
        return " ".join(split_words(self.name))

    @property
    def order(self) -> bytes:
        """A random order that is the same everywhere."""
        return hashlib.sha256(f"{self.where}:{self.name}".encode()).digest()


def split_words(text: str) -> list[str]:
    """
    >>> split_words("getLineNumber(self, _last)")
    ['get', 'line', 'number', 'self', 'last']
    """
    return [each.lower() for each in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", text)]


def read_functions(library: Path) -> Iterator[Function]:
    """Every function of the library, with the first paragraph of its docstring, or with none."""
    for file in sorted(library.rglob("*.py")):
        parts = file.relative_to(library).parts
        if LEFT_OUT & set(parts) or parts[0].startswith(("config-", "_sysconfigdata")):
            continue
        try:
            text = file.read_text("utf-8")
            tree = ast.parse(text)
        except (SyntaxError, UnicodeDecodeError):
            continue
        package, lines = Path(parts[0]).stem, text.splitlines()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                docstring = (ast.get_docstring(node) or "").partition("\n\n")[0]
                where = f"{'/'.join(parts)}:{node.lineno}"
                body = body_of(node, lines, documented=ast.get_docstring(node) is not None)
                yield Function(package, where, node.name, " ".join(docstring.split()), body)


def body_of(
    node: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str], *, documented: bool
) -> str:
    """The source of a function from its `def` on, without the lines of its docstring."""
    start, end = node.lineno - 1, node.end_lineno or node.lineno
    kept = list(range(start, end))
    if documented:
        first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
        kept = [number for number in kept if not first <= number < last]
    source = [lines[number] for number in kept]
    indent = len(lines[start]) - len(lines[start].lstrip())
    return "\n".join(line[indent:].rstrip() for line in source if line.strip())


def split(
    functions: Iterable[Function], count: int
) -> tuple[list[Function], list[Function], list[Function]]:
    """Documented functions to train on, a fifth to test on, and other functions to train on."""
    most = count // 5
    known: set[str] = set()
    documented, plain = [], []
    for each in sorted(functions, key=lambda each: each.order):
        if len(each.body) < FEWEST_LETTERS or each.body in known or each.docstring in known:
            continue
        known.add(each.body)
        if len(each.docstring.split()) >= FEWEST_WORDS:
            known.add(each.docstring)
            documented.append(each)
        else:
            plain.append(each)
    counts = Counter(each.package for each in documented)
    packages = sorted(counts, key=lambda name: hashlib.sha256(name.encode()).digest())
    held: set[str] = set()
    for package in packages:
        # No package is more than a quarter of the test.
        if counts[package] <= most // 4 and sum(counts[name] for name in held) < most:
            held.add(package)
    tested = [each for each in documented if each.package in held][:most]
    trained = [each for each in documented if each.package not in held][: count - most]
    return trained, tested, [each for each in plain if each.package not in held][: 2 * count]


def pairs(trained: Sequence[Function], plain: Sequence[Function]) -> Iterator[dict[str, str]]:
    """What finds what: a docstring the body, a name the body without it, one half the other."""
    for each in trained:
        yield {"query": each.docstring, "body": each.body}
        yield {"query": each.docstring, "body": each.nameless}
    for each in [*trained, *plain]:
        lines = each.nameless.splitlines()
        if len(each.words) > FEWEST_WORDS:
            yield {"query": each.words, "body": each.nameless}
        if len(lines) >= 6:
            half = len(lines) // 2
            yield {"query": "\n".join(lines[:half]), "body": "\n".join(lines[half:])}


def ranks(scores: Tensor) -> Tensor:
    """The rank of candidate i for query i; candidates with the same score count as better."""
    own = scores.diagonal()[:, None]
    return (scores >= own).sum(1)


def summary(result: Tensor) -> dict[str, float]:
    each = 1 / result.double()
    return {
        "mrr": each.mean().item(),
        "standard_error": (each.std() / math.sqrt(len(each))).item(),
        "recall_at_10": (result <= 10).double().mean().item(),
    }


def dense_scores(model: Any, queries: Sequence[str], bodies: Sequence[str]) -> Tensor:
    one, other = (
        torch.nn.functional.normalize(
            encode(model, list(texts), max_length=LENGTH, progress=False), dim=-1
        )
        for texts in (queries, bodies)
    )
    return one @ other.T


def late_scores(model: Any, queries: Sequence[str], bodies: Sequence[str]) -> Tensor:
    one = encode_tokens(model, list(queries), role="query", max_length=LENGTH, progress=False)
    other = encode_tokens(model, list(bodies), max_length=LENGTH, progress=False)
    with torch.no_grad():
        return maxsim_matrix(one, other)


def bm25_scores(queries: Sequence[str], bodies: Sequence[str]) -> Tensor:
    """Okapi BM25 with k1 = 1.2 and b = 0.75 on words, identifiers split into theirs."""
    documents = [Counter(split_words(body)) for body in bodies]
    sizes = [sum(each.values()) for each in documents]
    mean = sum(sizes) / len(sizes)
    postings: dict[str, tuple[list[int], list[float]]] = {}
    for number, (document, size) in enumerate(zip(documents, sizes, strict=True)):
        for word, count in document.items():
            numbers, weights = postings.setdefault(word, ([], []))
            numbers.append(number)
            weights.append(count * 2.2 / (count + 1.2 * (0.25 + 0.75 * size / mean)))
    scores = torch.zeros(len(queries), len(bodies))
    for row, query in zip(scores, queries, strict=True):
        for word in split_words(query):
            numbers, weights = postings.get(word, ([], []))
            rarity = math.log(1 + (len(bodies) - len(numbers) + 0.5) / (len(numbers) + 0.5))
            row[numbers] += rarity * torch.tensor(weights)
    return scores


SCORES = {"dense": dense_scores, "late": late_scores}


def evaluate(score: Any, tested: Sequence[Function], trained: Sequence[Function]) -> Any:
    """Among the tested functions alone, and among all of them."""
    queries = [each.docstring for each in tested]
    scores = score(queries, [each.body for each in (*tested, *trained)])
    return {
        "among_tested": summary(ranks(scores[:, : len(tested)])),
        "among_all": summary(ranks(scores)),
    }


def train_model(kind: str, folder: Path, rows: Path, device: str, minutes: float) -> dict[str, Any]:
    """Train house-bert for so many minutes; the steps are counted from a first short run."""
    tables: dict[str, Any] = {
        "model": {"folder": "house-bert", "heads": {"drop": 0.1}},
        "data": {
            "kind": "pairs",
            "train": str(rows),
            "first": "query",
            "second": "body",
            "validation": 0.02,
            "max_length": LENGTH,
            "batch": BATCH[kind, device],
        },
        "objective": {
            "kind": "Contrastive",
            "similarity": "maxsim" if kind == "late" else "cosine",
            "both_ways": kind == "dense",
            "cache_tokens": CACHE[device],
        },
        "optimizer": {"lr": RATE, "decay": 0.05},
        "schedule": {"kind": "Cosine", "warmup": 1, "floor": 0.02},
        "run": {
            "folder": str(folder / "calibration"),
            "steps": CALIBRATION_STEPS[device],
            "device": device,
            "precision": "bfloat16" if device == "cuda" else "float32",
            "checkpoint_every": 0,
        },
    }
    train(parse_run(tables))
    lines = MetricsLog(folder / "calibration/metrics.jsonl").read()
    speed = [line["tokens_per_second"] for line in lines if "loss" in line][-1]
    tokens = [line["tokens"] for line in lines if "loss" in line]
    steps = max(round(minutes * 60 * speed * len(tokens) / tokens[-1]), 4)
    tables["run"] |= {"folder": str(folder / "run"), "steps": steps}
    tables["run"]["validate_every"] = max(steps // 10, 1)
    tables["schedule"]["warmup"] = min(100, steps // 4)
    start = time.perf_counter()
    result = train(parse_run(tables))
    lines = MetricsLog(folder / "run/metrics.jsonl").read()
    return {
        "seconds": time.perf_counter() - start,
        "steps": steps,
        "tokens": result.state.tokens,
        "loss": [line["loss"] for line in lines if "loss" in line][-1],
        "validation": [
            [line["step"], line["validation"]["loss"]] for line in lines if "validation" in line
        ],
        "run": {**tables, "run": {**tables["run"], "folder": "run"}} | {"data": None},
    }


def study(kind: str, device: str, minutes: float, folder: Path, sides: Any) -> dict[str, Any]:
    trained, tested, plain = sides
    rows = folder / "pairs.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in pairs(trained, plain)), "utf-8")

    def mrr(place: Any) -> Any:
        model = load(place).to(device)
        return evaluate(lambda *texts: SCORES[kind](model, *texts), tested, trained)

    before = mrr("house-bert")
    training = train_model(kind, folder, rows, device, minutes)
    return {"before": before, "after": mrr(folder / "run/model"), "training": training}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", default=["dense"], choices=list(SCORES))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, per kind")
    parser.add_argument("--functions", type=int, default=FUNCTIONS, help="a fifth is tested on")
    parser.add_argument("--folder", type=Path, help="keep the runs and the models here")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(__file__).with_name("result.json")
    )
    options = parser.parse_args()
    device = resolve_device(options.device, "--device").type
    sides = split(read_functions(Path(sysconfig.get_path("stdlib"))), options.functions)
    trained, tested, plain = sides
    print(
        f"{len(trained)} documented functions to train on, {len(plain)} others, {len(tested)} tests"
    )
    results: dict[str, Any] = {
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "functions": {"trained": len(trained), "undocumented": len(plain), "tested": len(tested)},
        "bm25": evaluate(bm25_scores, tested, trained),
    }
    print(json.dumps(results["bm25"], indent=1))
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (options.folder or Path(temporary)) / kind
            folder.mkdir(parents=True)
            results[kind] = study(kind, device, options.minutes, folder, sides)
        print(kind, json.dumps({key: results[kind][key] for key in ("before", "after")}, indent=1))
        with atomic_write(options.output) as file:
            file.write_text(json.dumps(results, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
