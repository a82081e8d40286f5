"""Tasks of mteb, made from local data, run on our encoders and score them as we do."""

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import manyheads
from manyheads.errors import InputError, MissingPackageError
from manyheads.tasks.search.mteb_adapter import MtebEncoder
from manyheads.tasks.search.ranking_measures import JudgedQuery, evaluate_retrieval

DOCUMENTS = {
    "rain": "It rained all day and the streets were wet.",
    "bread": "She baked bread in the old oven.",
    "train": "The train to the city leaves at noon.",
    "dog": "A dog barked at the postman.",
}
QUERIES = {
    "q1": ("Wet weather in town", {"rain": 2, "train": 1}),
    "q2": ("Baking with an oven", {"bread": 1}),
    "q3": ("Animals and letters", {"dog": 1}),
}


@pytest.fixture(scope="module")
def model() -> Any:
    return manyheads.load("house-bert")


def _metadata(kind: str, name: str, main_score: str) -> Any:
    from mteb.abstasks.task_metadata import TaskMetadata

    return TaskMetadata(
        name=name,
        type=kind,
        main_score=main_score,
        description="local data",
        dataset={"path": "local", "revision": "1"},
        category="t2t",
        eval_splits=["test"],
        eval_langs=["eng-Latn"],
        modalities=["text"],
    )


def _retrieval_task() -> Any:
    from datasets import Dataset
    from mteb.abstasks.retrieval import AbsTaskRetrieval

    class LocalRetrieval(AbsTaskRetrieval):
        metadata = _metadata("Retrieval", "LocalRetrieval", "ndcg_at_10")

        def load_data(self, **_: Any) -> None:
            rows = [{"id": name, "text": text, "title": ""} for name, text in DOCUMENTS.items()]
            queries = [{"id": name, "text": text} for name, (text, _) in QUERIES.items()]
            split = {
                "corpus": Dataset.from_list(rows),
                "queries": Dataset.from_list(queries),
                "relevant_docs": {name: relevant for name, (_, relevant) in QUERIES.items()},
                "top_ranked": None,
            }
            self.dataset = {"default": {"test": split}}
            self.data_loaded = True

    return LocalRetrieval()


def _similarity_task() -> Any:
    from datasets import Dataset, DatasetDict
    from mteb.abstasks.sts import AbsTaskSTS

    class LocalSimilarity(AbsTaskSTS):
        metadata = _metadata("STS", "LocalSimilarity", "cosine_spearman")

        def load_data(self, **_: Any) -> None:
            texts = list(DOCUMENTS.values())
            columns = {
                "sentence1": texts,
                "sentence2": [*texts[1:], texts[0]],
                "score": [0.5, 2.0, 1.0, 4.0],
            }
            self.dataset = DatasetDict({"test": Dataset.from_dict(columns)})
            self.data_loaded = True

    return LocalSimilarity()


def _run(encoder: MtebEncoder, task: Any) -> dict[str, float]:
    import mteb

    results = mteb.evaluate(encoder, [task], cache=None, show_progress_bar=False)
    return dict(results.task_results[0].scores["test"][0])


def test_retrieval_is_scored_as_by_our_measures(model: Any) -> None:
    pytest.importorskip("mteb")
    scores = _run(MtebEncoder(model), _retrieval_task())
    queries = [JudgedQuery(name, text, relevant) for name, (text, relevant) in QUERIES.items()]
    vectors = F.normalize(manyheads.encode(model, list(DOCUMENTS.values())), dim=1)
    request = F.normalize(manyheads.encode(model, [query.text for query in queries]), dim=1)
    rankings = {
        query.id: dict(zip(DOCUMENTS, row, strict=True))
        for query, row in zip(queries, (request @ vectors.T).tolist(), strict=True)
    }
    ours = evaluate_retrieval(rankings, queries)
    assert scores["ndcg_at_10"] == pytest.approx(ours.ndcg.mean, abs=1e-5)
    assert scores["map_at_10"] == pytest.approx(ours.map.mean, abs=1e-5)


def test_similarity_of_sentences_is_their_cosine(model: Any) -> None:
    pytest.importorskip("mteb")
    scores = _run(MtebEncoder(model), _similarity_task())
    vectors = manyheads.encode(model, list(DOCUMENTS.values()))
    cosines = F.cosine_similarity(vectors, vectors.roll(-1, 0))
    ranks = torch.stack([cosines, torch.tensor([0.5, 2.0, 1.0, 4.0])]).argsort(1).argsort(1)
    assert scores["cosine_spearman"] == pytest.approx(
        float(torch.corrcoef(ranks.double())[0, 1]), abs=1e-5
    )


def test_token_vectors_are_scored_by_maxsim(model: Any) -> None:
    pytest.importorskip("mteb")
    encoder = MtebEncoder(model, kind="late")
    scores = _run(encoder, _retrieval_task())
    assert 0 < scores["ndcg_at_10"] <= 1
    assert encoder.mteb_model_meta.similarity_fn_name.value == "MaxSim"
    with pytest.raises(InputError, match="LocalSimilarity"):
        _run(encoder, _similarity_task())


def test_prompts_stand_before_queries_alone(model: Any) -> None:
    pytest.importorskip("mteb")
    from mteb.types import PromptType

    encoder = MtebEncoder(model, prompts={"query": "query: "}, name="org/named")
    task = _retrieval_task()
    options = {"task_metadata": task.metadata, "hf_split": "test", "hf_subset": "default"}
    batch = [{"text": ["wet weather"]}]
    query = encoder.encode(batch, prompt_type=PromptType.query, **options)
    document = encoder.encode(batch, prompt_type=PromptType.document, **options)
    expected = manyheads.encode(model, ["query: wet weather", "wet weather"])
    both = torch.cat([torch.from_numpy(query), torch.from_numpy(document)])
    torch.testing.assert_close(both, expected)
    assert encoder.mteb_model_meta.name == "org/named"
    with pytest.raises(InputError, match="image"):
        encoder.encode([{"image": []}], **options)


def test_a_missing_package_is_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mteb", None)
    with pytest.raises(MissingPackageError, match=r"manyheads\[mteb\]"):
        MtebEncoder(model)
