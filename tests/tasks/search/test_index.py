import json
from functools import cache
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from manyheads import encode, load
from manyheads.cli.main import main
from manyheads.encoding.fingerprints import model_fingerprint
from manyheads.encoding.late_scores import maxsim
from manyheads.encoding.token_vectors import encode_tokens
from manyheads.errors import InputError, MissingPackageError
from manyheads.models.build import Model
from manyheads.tasks import Document, Index
from manyheads.tasks.search.index import _SearchScope
from manyheads.tasks.search.rank_fusion import fuse_rankings
from manyheads.tasks.search.storage import vector_store
from manyheads.tasks.search.storage.index_manifest import IndexLocation
from tests.messages import refuses

WORDS = ("river", "mountain", "house", "tree", "cloud")
DOCUMENTS = [
    Document(
        f"d{number}",
        f"A {WORDS[number % 5]} with the number {number}.\n" * (1 + number % 4),
        f"Page {number}",
        {"number": number, "word": WORDS[number % 5], "even": number % 2 == 0},
        f"book.txt:{number}",
    )
    for number in range(20)
]
SMALL: dict[str, Any] = {"chunk_tokens": 24, "overlap": 4, "progress": False}


@cache
def house_bert() -> Model:
    return load("house-bert")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Index:
    path = tmp_path_factory.mktemp("dense") / "index"
    return Index.create(path, house_bert(), DOCUMENTS, **SMALL)


def all_texts(index: Index) -> tuple[list[str], list[str]]:
    """The document and the encoded text of each chunk."""
    names = index._state.names
    texts = index._state.table.searched_texts()
    return [names.documents[each] for each in names.document], texts


def test_dense_scores_are_cosines_of_the_best_chunk(dense: Index) -> None:
    documents, texts = all_texts(dense)
    query = "the cloud of page 14"
    vectors = encode(house_bert(), [query, *texts], normalize=True, progress=False)
    cosines = vectors[1:] @ vectors[0]
    best: dict[str, float] = {}
    for name, cosine in zip(documents, cosines.tolist(), strict=True):
        best[name] = max(cosine, best.get(name, -1.0))
    expected = sorted(best, key=lambda name: -best[name])
    hits = dense.search(query, top_k=20)
    assert [hit.id for hit in hits] == expected
    for hit in hits:
        assert hit.score == pytest.approx(best[hit.id], abs=1e-5)
        original = DOCUMENTS[int(hit.id[1:])]
        assert hit.text == original.text[hit.start : hit.end]
        assert (hit.title, hit.metadata) == (original.title, original.metadata)
        assert hit.source == original.source
    chunks = dense.search(query, top_k=1000, every_chunk=True)
    assert len(chunks) == dense.chunks == len({(hit.id, hit.chunk) for hit in chunks})
    assert [hit.score for hit in chunks] == sorted((hit.score for hit in chunks), reverse=True)


@pytest.mark.parametrize("vectors", ["float32", "float16"])
def test_late_scores_are_exact_and_the_index_of_lancedb_agrees(
    tmp_path: Path, vectors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = "a house on the mountain"
    exact = Index.create(
        tmp_path / "a", house_bert(), DOCUMENTS, kind="late", vectors=vectors, **SMALL
    )
    documents, texts = all_texts(exact)
    [tokens] = encode_tokens(house_bert(), [query], role="query", progress=False).to_list()
    scores = maxsim(tokens, encode_tokens(house_bert(), texts, progress=False))
    hits = exact.search(query, top_k=5)
    assert hits[0].id == documents[int(scores.argmax())]
    assert hits[0].score == pytest.approx(float(scores.max()), abs=2e-3)
    monkeypatch.setattr(vector_store, "EXACT_VECTORS", 50)
    monkeypatch.setattr(vector_store, "MIN_PROPOSED", 30)
    large = Index.create(
        tmp_path / "b", house_bert(), DOCUMENTS, kind="late", vectors=vectors, **SMALL
    )
    assert large._state.manifest.approximate
    assert not exact._state.manifest.approximate
    assert large.search(query, top_k=5, where="even") == exact.search(query, top_k=5, where="even")


def test_two_bits_per_channel_rank_nearly_alike_and_grow_with_the_same_codec(
    tmp_path: Path,
) -> None:
    coded = Index.create(
        tmp_path / "a", house_bert(), DOCUMENTS[:15], kind="late", vectors="2bit", **SMALL
    )
    coded.add(DOCUMENTS[15:], progress=False)
    exact = Index.create(tmp_path / "b", house_bert(), DOCUMENTS, kind="late", **SMALL)
    for index in (coded, Index.open(tmp_path / "a", house_bert())):
        scores = {hit.id: hit.score for hit in index.search("a house on a tree", top_k=20)}
        for hit in exact.search("a house on a tree", top_k=20):
            assert scores[hit.id] == pytest.approx(hit.score, rel=0.08)
        assert index.like("d6", 1)[0].metadata["word"] == "mountain"
    with pytest.raises(InputError, match=r"2bit.*float16"):
        Index.create(tmp_path / "c", house_bert(), DOCUMENTS, vectors="2bit", **SMALL)


def test_bm25_needs_no_model_and_hybrid_fuses_both_rankings(tmp_path: Path, dense: Index) -> None:
    keywords = Index.create(tmp_path / "bm25", None, DOCUMENTS, kind="bm25", **SMALL)
    assert {hit.metadata["word"] for hit in keywords.search("tree", top_k=20)} == {"tree"}
    assert keywords.search("zebra") == []
    both = Index.create(tmp_path / "both", house_bert(), DOCUMENTS, kind="hybrid", **SMALL)
    query = "number 7 river"
    # Chunks by words differ from those by tokens, so keywords are ranked by the same index.
    state = both._state
    ranked = state.by_keywords(query, _SearchScope(state.allowed(None), None, 100))
    names = [state.names.documents[each.key] for each in ranked]
    expected = fuse_rankings([[hit.id for hit in dense.search(query, top_k=20)], names])
    assert [(hit.id, hit.score) for hit in both.search(query, top_k=4)] == expected[:4]
    assert Index.open(tmp_path / "bm25").search("tree") == keywords.search("tree")


def test_only_changes_are_encoded_and_missing_documents_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "index"
    first = Index.create(path, house_bert(), DOCUMENTS, **SMALL)
    changed = [
        *DOCUMENTS[:18],
        Document("d18", "Entirely new words about glaciers."),
        Document("new", "Nothing like the others: a submarine."),
    ]
    second = Index.create(path, house_bert(), changed, **SMALL)
    assert second.report is not None
    report = second.report
    assert (report.encoded, report.unchanged, report.removed) == (2, 18, 1)
    assert second.search("submarine", top_k=1)[0].id == "new"
    assert set(second.ids) == {each.id for each in changed}
    # A reader that opened the old state still sees it.
    assert len(first) == 20
    assert first.search("glaciers", top_k=20)[0].text.startswith("A ")
    # The same vectors serve a hybrid index; other settings need new ones.
    hybrid = Index.create(path, house_bert(), changed, kind="hybrid", **SMALL)
    assert hybrid.report is not None
    assert (hybrid.report.encoded, hybrid.kind) == (0, "hybrid")
    whole = Index.create(path, house_bert(), changed, whole=True, progress=False)
    assert whole.report is not None
    assert (whole.report.encoded, whole.chunks) == (20, 20)


def test_add_and_delete_change_only_what_they_name(tmp_path: Path) -> None:
    path = tmp_path / "index"
    index = Index.create(path, house_bert(), DOCUMENTS[:10], kind="hybrid", **SMALL)
    index.add([Document("d3", "A replaced text about penguins."), *DOCUMENTS[10:12]])
    assert len(index) == 12
    assert index.search("penguins", top_k=1)[0].id == "d3"
    report = index.delete(["d3", "d4"])
    assert (report.removed, len(index)) == (2, 10)
    reopened = Index.open(path, house_bert())
    assert set(reopened.ids) == {each.id for each in DOCUMENTS[:12]} - {"d3", "d4"}
    assert "d3" not in [hit.id for hit in reopened.search("penguins", top_k=20)]
    with pytest.raises(InputError, match="no document 'd3'"):
        reopened.delete("d3")
    reopened.delete(reopened.ids)
    assert (len(reopened), reopened.search("river")) == (0, [])


def test_conditions_filter_by_metadata(dense: Index) -> None:
    def numbers(where: Any) -> set[object]:
        return {hit.metadata["number"] for hit in dense.search("river", top_k=20, where=where)}

    assert numbers("number < 6 AND even") == {0, 2, 4}
    assert numbers({"word": ["river", "tree"], "even": False}) == {3, 5, 13, 15}
    assert numbers({"document": "d7"}) == {7}
    assert numbers({"word": "it's"}) == set()
    with pytest.raises(InputError, match=r"color.*number, word, even"):
        numbers({"color": "red"})
    with pytest.raises(InputError, match=r"color.*number, word, even"):
        numbers("color = 'red'")
    with pytest.raises(InputError, match="number >"):
        numbers("number > (")


def test_a_sample_is_spread_over_the_documents(dense: Index) -> None:
    hits = dense.sample(3)
    assert [hit.id for hit in hits] == [dense.ids[0], dense.ids[len(dense) // 2], dense.ids[-1]]
    assert all(hit.start == 0 for hit in hits)
    assert len(dense.sample(1000)) == len(dense)


@pytest.mark.parametrize("held_bytes", [0, vector_store.HELD_BYTES])
def test_later_searches_show_the_same_and_hold_only_small_texts(
    held_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_store, "HELD_BYTES", held_bytes)
    index = Index.create(tmp_path / "index", None, DOCUMENTS[:6], kind="bm25", **SMALL)
    index.delete(DOCUMENTS[0].id)
    index.add([*DOCUMENTS[6:8], DOCUMENTS[0]])
    first, second = index.search("river"), index.search("river")
    assert first
    assert second == first
    assert index.search("zzzz") == []
    assert (index._state._held is None) == (held_bytes == 0)


def test_similar_documents_are_not_the_document_itself(dense: Index) -> None:
    hits = dense.like("d6", 3)
    assert "d6" not in [hit.id for hit in hits]
    assert hits[0].metadata["word"] == "mountain"
    other = dense.like(Document("x", DOCUMENTS[6].text, DOCUMENTS[6].title), 1)
    assert other[0].id == "d6"
    assert other[0].score > 0.99
    with pytest.raises(InputError, match="no document 'x'"):
        dense.like("x")


def test_metadata_of_two_types_and_two_documents_of_one_id_are_refused(tmp_path: Path) -> None:
    index = Index.create(
        tmp_path / "a", None, [Document("a", "x", metadata={"due date": 1})], kind="bm25"
    )
    assert index.search("x", where="due_date = 1")[0].metadata == {"due date": 1}
    with pytest.raises(InputError, match=r"due_date.*'b'.*'soon'"):
        index.add([Document("b", "y", metadata={"due date": "soon"})])
    with pytest.raises(InputError, match="two documents have the id 'c'"):
        index.add([Document("c", "y"), Document("c", "z")])
    assert index.ids == ["a"]


def test_a_changed_or_missing_model_is_named(tmp_path: Path) -> None:
    from manyheads import save

    model = load("house-bert")
    save(model, tmp_path / "model")
    path = tmp_path / "index"
    Index.create(path, tmp_path / "model", DOCUMENTS[:4], **SMALL)
    assert Index.open(path).model is not None
    half = load(tmp_path / "model", dtype=torch.bfloat16)
    assert model_fingerprint(half) == model_fingerprint(model)
    with torch.no_grad():
        next(model.parameters()).mul_(1.5)
    with pytest.raises(InputError, match="not the one"):
        Index.open(path, model)
    (tmp_path / "model").rename(tmp_path / "moved")
    with pytest.raises(InputError, match=r"model, cannot be loaded.*give its new place"):
        Index.open(path)
    assert len(Index.open(path, tmp_path / "moved")) == 4


def test_what_cannot_be_an_index_is_refused(tmp_path: Path, dense: Index) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("x", encoding="utf-8")
    with pytest.raises(InputError, match=r"mine.txt.*new folder"):
        Index.create(tmp_path / "full", None, ["x"], kind="bm25")
    with pytest.raises(InputError, match="needs a model"):
        Index.create(tmp_path / "x", None, ["x"])
    with pytest.raises(InputError, match="no documents"):
        Index.create(tmp_path / "x", None, [" "], kind="bm25")
    with pytest.raises(InputError, match="there is no index"):
        Index.open(tmp_path / "nowhere")
    with pytest.raises(InputError, match="query"):
        dense.search(" ")
    (tmp_path / "x" / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="create the index again"):
        Index.open(tmp_path / "x")


@pytest.mark.parametrize(
    "change",
    [
        *({"kind": "dense"}, {"kind": 5}, {"vectors": "float3"}, {"version": "2"}, {"version": {}}),
        *({"keywords": 5}, {"keywords": "../x"}, {"chunks": -1}, {"chunks": 7}),
        *({"settings": []}, {"settings": {"overlap": 99}}, {"before": [5]}, {"before": ["../x"]}),
        *({"documents": True}, {"table": "chunks-0"}, {"format": None}, {"codes": "codes-0"}),
        *({"row_vectors": "dense"}, {"model_fingerprint": [[[[]]]]}),
    ],
)
def test_a_manifest_with_wrong_values_is_refused_when_it_is_read(
    change: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, keyword_index: Path
) -> None:
    path = Path(copytree(keyword_index, tmp_path_factory.mktemp("index") / "index"))
    content = json.loads((path / "manifest.json").read_text()) | change
    deep = "[" * 50_000 + "]" * 50_000
    (path / "manifest.json").write_text(json.dumps(content).replace("[[[[]]]]", deep))
    with refuses(InputError, str(path), "create the index again"):
        Index.open(path)


def test_damaged_keywords_are_refused(keyword_index: Path, tmp_path: Path) -> None:
    path = Path(copytree(keyword_index, tmp_path / "index"))
    [file] = path.glob("keywords-*/data.csc.index.npy")
    data = bytearray(file.read_bytes())
    data[-3] ^= 64
    file.write_bytes(data)
    with refuses(InputError, file.name, "checksum", "create the index again"):
        Index.open(path)


@pytest.fixture(scope="module")
def keyword_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keywords") / "index"
    Index.create(path, None, DOCUMENTS[:4], kind="bm25", progress=False)
    return path


def test_an_address_with_a_scheme_goes_to_lancedb_and_the_rest_beside_it(tmp_path: Path) -> None:
    address = f"file://{tmp_path / 'store'}"
    index = Index.create(address, house_bert(), DOCUMENTS[:6], kind="hybrid", **SMALL)
    index.add(DOCUMENTS[6:8])
    opened = Index.open(address, house_bert())
    assert IndexLocation(Path("s3://bucket/notes")).address == "s3://bucket/notes"
    assert [hit.id for hit in opened.search("river")] == [hit.id for hit in index.search("river")]
    assert len(opened) == 8


def test_lancedb_missing_or_refusing_the_processor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vector_store, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(vector_store.platform, "machine", lambda: "x86_64")
    (tmp_path / "cpuinfo").write_text("flags\t\t: fpu sse4_2 avx\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"AVX2.*another machine"):
        vector_store.require_lancedb()
    (tmp_path / "cpuinfo").write_text("flags\t\t: avx avx2\n", encoding="utf-8")
    monkeypatch.setitem(__import__("sys").modules, "lancedb", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'manyheads\[search\]'"):
        vector_store.require_lancedb()


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "a.md").write_text("# Heads\n\nHeads look at tokens.", encoding="utf-8")
    (folder / "b.py").write_text("def look(head):\n    return head\n", encoding="utf-8")
    (folder / "c.bin").write_bytes(b"\0\1")
    return folder


def test_the_command_reports_its_work(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(notes.parent / "notes.index")
    assert main(["index", str(notes), "-o", out, "--model", "house-bert", "--code"]) == 0
    printed = capsys.readouterr().out
    assert "2 documents, 2 chunks" in printed
    assert "tokens/s" in printed
    assert "skipped 1 (binary): c.bin" in printed
    extra = notes.parent / "extra.jsonl"
    extra.write_text(json.dumps({"id": "e", "text": "An extra."}), encoding="utf-8")
    assert main(["index", str(extra), "-o", out, "--add"]) == 0
    assert "3 documents" in capsys.readouterr().out
    assert main(["index", "-o", out, "--delete", "e"]) == 0
    assert "1 removed" in capsys.readouterr().out
    assert main(["index", str(notes), "-o", out, "--model", "house-bert", "--code"]) == 0
    assert "2 unchanged" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["index", "docs"], "--out"),
        (["index", "-o", "x"], "needs documents"),
        (["index", "docs", "-o", "x"], "--model"),
        (["index", "docs", "-o", "x", "--delete", "a"], "two steps"),
        (["index", "nowhere", "-o", "no/such", "--add"], "no index"),
    ],
)
def test_wrong_use_of_the_command_is_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
