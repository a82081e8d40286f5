"""Is the explanation of a match faithful? See README.md.

    python -m studies.explain_search.run DOCUMENTS QUERIES --model FOLDER --queries 10
    python -m studies.explain_search.run --table       # the table from result.json

The lines of both files are JSON: {"id", "text"}, and {"id", "text", "relevant": {id: grade}}.
Each query is explained with the relevant document that the model scores best. The words that the
explanation names are then deleted from the document, which is encoded again.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

import manyheads
from manyheads import lens
from manyheads.encoding.encode import pool
from manyheads.models.build import Model
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.tasks import MatchExplanation, explain_match

HERE = Path(__file__).parent
# The fraction of words that is deleted, the random draws, and the heads that are ablated.
FRACTION, DRAWS, HEADS = 0.1, 20, 5
FUNCTION_WORDS = re.compile(
    "been|could|does|from|have|into|more|most|such|than|that|their|them|then|there|these|they|this|"
    "those|were|when|where|which|while|will|with|would"
)
Fall = Callable[[Sequence[Sequence[Any]]], list[float]]


@dataclass(frozen=True)
class Fallen:
    """How much the score of one query, named by its id, fell, in parts of the score."""

    explained: str
    method: str
    query: str
    named: float
    chosen_at_random: float
    content_words: float
    least: float


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def scores(model: Model, query: str, texts: Sequence[str], kind: str) -> list[float]:
    if kind == "dense":
        options: dict[str, Any] = {"normalize": True, "progress": False}
        vectors = manyheads.encode(model, [query, *texts], **options)
        return (vectors[1:] @ vectors[0]).tolist()
    from manyheads.encoding.late_scores import maxsim

    one = manyheads.encode_tokens(model, [query], role="query", progress=False)
    return maxsim(one.of(0), manyheads.encode_tokens(model, texts, progress=False)).tolist()


def without(explained: MatchExplanation, words: Sequence[int]) -> str:
    """The document without some of its words."""
    text, result = explained.document.text, explained.document.words()
    for word in sorted((result[index] for index in words), key=lambda word: -word.start):
        text = text[: word.start] + text[word.end :]
    return re.sub(r"\s+", " ", text)


def delete_words(
    model: Model, query: str, text: str, kind: str, method: Any, draw: random.Random
) -> Fallen:
    explained = explain_match(model, query, text, kind=kind, tokens_by=method, heads=False)
    result = explained.document.words()
    words = [index for index, word in enumerate(result) if any(map(str.isalnum, word.text))]
    content = [index for index in words if is_content(result[index].text)]
    ranked = sorted(words, key=lambda index: -result[index].contribution)

    def fall(sets: Sequence[Sequence[int]]) -> list[float]:
        [before, *after] = scores(
            model, query, [text, *(without(explained, each) for each in sets)], kind
        )
        return [1 - each / before for each in after]

    count = max(1, round(FRACTION * len(words)))
    about = (kind, f"words by {explained.tokens_by}", "")
    return compare(about, fall, ranked, content, count, draw)


def is_content(word: str) -> bool:
    return len(word) > 3 and not FUNCTION_WORDS.fullmatch(word.casefold())


def ablate_heads(model: Model, query: str, text: str, by: Any, draw: random.Random) -> Fallen:
    """Heads of a dense model, ablated together while it reads the document."""
    explained = explain_match(model, query, text, kind="dense", by=by)
    assert explained.heads is not None
    ranked = [str(head) for head, _ in explained.heads["document"].ranked()]
    vector = manyheads.encode(model, query, normalize=True, progress=False)[0]
    sentence = model.sentence
    assert sentence is not None, "a folder of sentence-transformers"

    def cosine(states: Ragged, _: Sequence[int]) -> torch.Tensor:
        return pool(states, sentence.pooling, True, sentence.project) @ vector

    metric = lens.StateMetric(cosine)

    def fall(sets: Sequence[Sequence[str]]) -> list[float]:
        result = [
            lens.ablate_together(model, [text], each, metric=metric, progress=False)
            for each in sets
        ]
        return [1 - each.value / each.baseline for each in result]

    return compare(("dense", f"heads by {by}", ""), fall, ranked, ranked, HEADS, draw)


def compare(
    about: tuple[str, str, str],
    fall: Fall,
    ranked: list[Any],
    content: list[Any],
    count: int,
    draw: random.Random,
) -> Fallen:
    randoms = [draw.sample(ranked, count) for _ in range(DRAWS)]
    contents = [draw.sample(content, min(count, len(content))) for _ in range(DRAWS)]
    falls = fall([ranked[:count], ranked[-count:], *randoms, *contents])
    at_random, of_content = falls[2 : 2 + DRAWS], falls[2 + DRAWS :]
    return Fallen(*about, falls[0], fmean(at_random), fmean(of_content), falls[1])


def run(arguments: argparse.Namespace) -> list[Fallen]:
    documents = {str(each["id"]): each["text"] for each in read_lines(arguments.documents)}
    known = [each for each in read_lines(arguments.queries_file) if each["relevant"]]
    draw = random.Random(arguments.seed)
    queries = draw.sample(known, arguments.queries)
    model = manyheads.load(arguments.model)
    rows: list[Fallen] = []
    kinds = arguments.kinds
    with Progress("explaining", total=len(queries) * len(kinds), unit="queries") as bar:
        for kind in kinds:
            for query in queries:
                relevant = [documents[each] for each in query["relevant"] if documents.get(each)]
                result = scores(model, query["text"], relevant, kind)
                text = relevant[result.index(max(result))]
                methods = ("decomposition", "removal", "gradient") if kind == "dense" else (None,)
                for method in methods:
                    rows.append(delete_words(model, query["text"], text, kind, method, draw))
                if kind == "dense":
                    for by in ("ablation", "gradient"):
                        rows.append(ablate_heads(model, query["text"], text, by, draw))
                own = str(query["id"])
                rows = [row if row.query else replace(row, query=own) for row in rows]
                bar.advance()
    return rows


def table(rows: Iterable[Fallen]) -> str:
    """One line per kind and method: means over queries, and the paired difference."""
    groups: dict[tuple[str, str], list[Fallen]] = {}
    for row in rows:
        groups.setdefault((row.explained, row.method), []).append(row)
    lines = [
        "| match | removed | queries | named | random | random, content words | least "
        "| named - random |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (kind, method), result in groups.items():
        gaps = [each.named - each.chosen_at_random for each in result]
        error = stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        content = fmean(each.content_words for each in result)
        cells = [
            kind,
            method,
            str(len(result)),
            f"{fmean(each.named for each in result):.1%}",
            f"{fmean(each.chosen_at_random for each in result):.1%}",
            "" if method.startswith("heads") else f"{content:.1%}",
            f"{fmean(each.least for each in result):.1%}",
            f"{100 * fmean(gaps):.1f} ± {100 * error:.1f} points",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("documents", type=Path, nargs="?")
    parser.add_argument("queries_file", type=Path, nargs="?", metavar="QUERIES")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--queries", type=int, default=10)
    parser.add_argument("--kinds", nargs="+", default=["dense", "late"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    file = HERE / "result.json"
    if not arguments.table:
        if arguments.queries_file is None or arguments.model is None:
            sys.exit("give DOCUMENTS, QUERIES and --model, or --table")
        rows = [asdict(row) for row in run(arguments)]
        before = json.loads(file.read_text("utf-8")) if file.exists() else []
        others = [row for row in before if row["explained"] not in arguments.kinds]
        file.write_text(json.dumps([*others, *rows], indent=1) + "\n", "utf-8")
    print(table(Fallen(**row) for row in json.loads(file.read_text("utf-8"))))


if __name__ == "__main__":
    main()
