"""Time exact MaxSim beside LanceDB's flat search of multivectors: `python bench/maxsim.py`.

2,000 documents of 80,000 vectors of 128 channels, and queries of 32 vectors. Both find the same 5
best documents before anything is timed, or the run ends. The limit is the matrix product alone. The
vectors are drawn by a seed around 4,000 directions, as those of words lie; with `--documents` and
`--queries`, .jsonl files of texts, MiniLM makes them, with a random projection, and its vectors and
scores are compared with those of sentence-transformers first.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import torch.nn.functional as F
from encode_peers import minilm
from side_by_side import Race, alone, count, peak_extra, race, say, show
from torch import Tensor

from manyheads.checkpoints.folder import load
from manyheads.encoding.late_scores import maxsim, maxsim_matrix
from manyheads.encoding.token_vectors import encode_tokens
from manyheads.ragged import Lengths, Ragged
from manyheads.tasks.search.residual_codes import ResidualCodes

__all__ = ["main"]

DOCUMENTS, VECTORS, WIDTH, QUERY, QUERIES = 2_000, 80_000, 128, 32, 20
DIRECTIONS, SPREAD = 4_000, 0.7
OURS, HALF, CODES, LANCE, LIMIT = "float32", "float16", "2 bits", "LanceDB, flat", "product alone"
SAME, TOP_K = 5, 10

Search = Callable[[Tensor], Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=Path, help="a .jsonl file with the field text")
    parser.add_argument("--queries", type=Path, help="a .jsonl file with the field text")
    parser.add_argument("--rounds", type=int, default=QUERIES)
    options = parser.parse_args()
    if options.documents is None:
        documents, queries = drawn()
    else:
        documents, queries = from_texts(options.documents, options.queries)
    size = f"{len(documents):,} documents, {documents.values.shape[0]:,} vectors of"
    say(f"{size} {documents.values.shape[1]}, {torch.get_num_threads()} threads of torch")
    with tempfile.TemporaryDirectory() as folder:
        compare(documents, queries, Path(folder), options.rounds)


def drawn() -> tuple[Ragged, list[Tensor]]:
    """Vectors around few directions, in documents of 10 to 70 vectors."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(10, 71, (DOCUMENTS,), generator=generator)
    lengths = lengths * VECTORS // lengths.sum()
    lengths[: VECTORS - int(lengths.sum())] += 1
    directions = torch.randn(DIRECTIONS, WIDTH, generator=generator)

    def some(number: int) -> Tensor:
        around = directions[torch.randint(DIRECTIONS, (number,), generator=generator)]
        away = SPREAD * torch.randn(number, WIDTH, generator=generator)
        return F.normalize(around + away, dim=-1)

    documents = Ragged(some(VECTORS), Lengths.of(lengths.tolist()))
    return documents, [some(QUERY) for _ in range(QUERIES)]


def from_texts(documents: Path, queries: Path) -> tuple[Ragged, list[Tensor]]:
    """The vectors of MiniLM, equal to those that sentence-transformers gives."""
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    texts, request = (
        [json.loads(line)["text"] for line in file.open()] for file in (documents, queries)
    )
    torch.manual_seed(0)
    expansion: Any = {"strategy": "fixed", "length": QUERY}
    tokens = "token_embeddings"
    modules = [
        Transformer(str(minilm()), query_expansion=expansion, document_length=180),
        Dense(384, WIDTH, bias=False, activation_function=None, module_input_name=tokens),
        MultiVectorMask(skiplist_words=list(".,;:!?()-/'")),
        Normalize(module_input_name=tokens),
    ]
    peer = MultiVectorEncoder(modules=modules, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        peer.save(folder)
        model = load(folder)
    result = encode_tokens(model, texts)
    query = encode_tokens(model, request, role="query")
    expected = peer.encode_document(texts[:64]), peer.encode_query(request[:64])
    first = result.select(range(len(expected[0]))), query.select(range(len(expected[1])))
    worst = max(
        float((ours.values - torch.cat(list(each))).abs().max())
        for ours, each in zip(first, expected, strict=True)
    )
    scores = peer.similarity(expected[1], expected[0])
    off = float((maxsim_matrix(first[1], first[0]) - scores).abs().max())
    say(f"largest difference from sentence-transformers: vectors {worst:.1e}, scores {off:.1e}")
    if max(worst, off) > 1e-4:
        raise SystemExit("the vectors differ")
    return result, query.to_list()


def compare(documents: Ragged, queries: list[Tensor], folder: Path, rounds: int) -> None:
    half = documents.map(Tensor.half)
    codes = ResidualCodes.of(documents)
    table = lance_table(documents, folder)
    searches: dict[str, Search] = {
        OURS: partial(exact, documents),
        HALF: partial(exact, half),
        CODES: lambda query: codes.score(query).topk(TOP_K).indices,
        LANCE: partial(lance, table),
        LIMIT: lambda query: documents.values @ query.T,
    }
    for query in queries:
        ours, peer = (set(searches[name](query)[:SAME].tolist()) for name in (OURS, LANCE))
        if ours != peer:
            raise SystemExit(f"LanceDB's {SAME} best are {sorted(peer)}, ours {sorted(ours)}")
    turns = {
        name: partial(take_turn, search, iter(queries * rounds))
        for name, search in searches.items()
    }
    timed = race(turns, device="cpu", rounds=rounds)
    bytes_each = {OURS: 4 * WIDTH, HALF: 2 * WIDTH, CODES: codes.codec.row_bytes}
    recall = {name: agreement(searches[name], searches[OURS], queries) for name in (HALF, CODES)}
    memory = {name: alone(memory_of, name) for name in (OURS, HALF, CODES, LANCE)}
    rows = [row(name, timed, bytes_each, recall, memory) for name in searches]
    columns = ("", "median", "beside LanceDB", "bytes per vector", f"recall@{TOP_K}", "memory")
    show("One query over all documents", columns, rows)


def row(
    name: str,
    timed: Race,
    bytes_each: dict[str, int],
    recall: dict[str, float],
    memory: dict[str, int],
) -> tuple[str, ...]:
    return (
        name,
        count(timed.seconds(name), "s"),
        f"{timed.ratio(name, LANCE):.3f}",
        str(bytes_each.get(name, "")),
        f"{recall[name]:.3f}" if name in recall else "",
        count(memory[name], "B") if name in memory else "",
    )


def take_turn(search: Search, queries: Any) -> Tensor:
    return search(next(queries))


def exact(documents: Ragged, query: Tensor) -> Tensor:
    return maxsim(query, documents).topk(TOP_K).indices


def agreement(search: Search, truth: Search, queries: list[Tensor]) -> float:
    """The fraction of the best documents that are found."""
    both = [(set(search(each).tolist()), set(truth(each).tolist())) for each in queries]
    return sum(len(result & wanted) for result, wanted in both) / (TOP_K * len(both))


def lance_table(documents: Ragged, folder: Path) -> Any:
    import lancedb
    import pyarrow as pa

    values = pa.array(documents.values.numpy().ravel())
    column = pa.FixedSizeListArray.from_arrays(values, documents.values.shape[1])
    each = pa.ListArray.from_arrays(pa.array(documents.lengths.offsets.numpy()), column)
    rows = pa.table({"number": pa.array(range(len(documents))), "vector": each})
    return lancedb.connect(str(folder)).create_table("documents", rows)


def lance(table: Any, query: Tensor) -> Tensor:
    result = table.search(query.numpy()).distance_type("cosine").limit(TOP_K)
    return torch.tensor(result.select(["number", "_distance"]).to_arrow()["number"].to_pylist())


def memory_of(name: str) -> int:
    """Bytes that the search of a drawn corpus holds at most, the vectors included."""
    documents, queries = drawn()
    with tempfile.TemporaryDirectory() as folder:
        if name == LANCE:
            table = lance_table(documents, Path(folder))
            del documents
            return peak_extra(lambda: lance(table, queries[0]), "cpu")
        if name == CODES:
            codes = ResidualCodes.of(documents, progress=False)
            held, search = codes.rows.values.nbytes, codes.score
            held += codes.codec.centroids.nbytes
        else:
            stored = documents.map(Tensor.half) if name == HALF else documents
            held, search = stored.values.nbytes, lambda query: maxsim(query, stored)
        return held + peak_extra(lambda: search(queries[0]), "cpu")


if __name__ == "__main__":
    main()
