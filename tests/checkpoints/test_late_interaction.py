"""Folders of late interaction: vectors and scores are those of sentence-transformers."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads import build, encode_tokens, load, save
from manyheads.encoding.late_scores import maxsim_matrix
from manyheads.errors import ConfigError, InputError, TruncationWarning
from manyheads.models.provenance import DenseProjection, LateInteractionConfig, QueryExpansion
from tests.checkpoints.late_folders import (
    QUERIES,
    TEXTS,
    multi_vector,
    opened,
    pylate_folder,
    stanford_folder,
)
from tests.messages import refuses

PUNCTUATION = list(".,;!?()")
MARKED = {"query": "[MASK] ", "document": "the model "}
FIXED = {"strategy": "fixed", "length": 12}
FOLDERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "skip list, prompts and lengths": {
        "words": [*PUNCTUATION, "missing"],
        "prompts": MARKED,
        "query_length": 9,
        "document_length": 14,
    },
    "expansion": {"query_expansion": FIXED, "prompts": MARKED},
    "attended expansion": {"query_expansion": {**FIXED, "attend": True}, "words": PUNCTUATION},
    "expansion without truncation": {"query_expansion": {**FIXED, "strategy": "min"}},
    "expansion with another token": {"query_expansion": {**FIXED, "token": "[SEP]"}},
    "ModernBERT": {"query_expansion": FIXED, "words": PUNCTUATION, "family": "modernbert"},
}


def both(model: Any, place: Path) -> None:
    """Compare vectors and scores with those that sentence-transformers makes of a folder."""
    peer = opened(place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TruncationWarning)
        queries = encode_tokens(model, QUERIES, role="query")
        documents = encode_tokens(model, TEXTS, batch_tokens=30)
    expected = peer.encode_query(QUERIES), peer.encode_document(TEXTS)
    for result, wanted in zip((queries, documents), expected, strict=True):
        assert result.lengths.each == tuple(len(each) for each in wanted)
        torch.testing.assert_close(result.values, torch.cat(wanted), atol=1e-5, rtol=0)
    scores = peer.similarity(*expected)
    real = [index for index, each in enumerate(expected[1]) if len(each)]
    torch.testing.assert_close(
        maxsim_matrix(queries, documents)[:, real], scores[:, real], atol=1e-5, rtol=1e-6
    )


@pytest.mark.parametrize("name", FOLDERS)
def test_vectors_and_scores_equal_the_reference_and_stay_so_when_saved(
    name: str, tmp_path: Path
) -> None:
    place = multi_vector(tmp_path, **FOLDERS[name])
    model = load(place)
    both(model, place)
    save(model, tmp_path / "ours")
    both(model, tmp_path / "ours")
    assert load(tmp_path / "ours").late == model.late


@pytest.mark.parametrize("attend", [False, True])
def test_a_folder_of_stanford_opens_and_is_saved_for_both(attend: bool, tmp_path: Path) -> None:
    settings = {"query_maxlen": 10, "doc_maxlen": 16, "attend_to_mask_tokens": attend}
    place = stanford_folder(tmp_path / "theirs", **settings)
    model: Any = load(place)
    assert model.late.expansion == QueryExpansion(length=10, token=4, attend=attend)
    assert model.tokenizer.encode("[unused0] words").ids == [2, 5, 11, 3]
    both(model, place)
    save(model, tmp_path / "ours")
    both(load(tmp_path / "ours"), tmp_path / "ours")
    # What Stanford's code reads is complete without the modules.
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (tmp_path / "ours" / name).unlink()
    shutil.rmtree(tmp_path / "ours" / "1_Dense")
    both(model, tmp_path / "ours")


def test_defaults_of_stanford_are_those_of_its_code(tmp_path: Path) -> None:
    place = stanford_folder(tmp_path, mask_punctuation=False)
    late = load(place).late
    assert late is not None
    assert (late.expansion, late.skipped) == (QueryExpansion(length=32, token=4), ())
    both(load(place), place)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "ColBERT", "query_prefix": "[unused0] ", "document_prefix": "[unused1] "},
        {"query_length": 8, "document_length": 11, "attend_to_expansion_tokens": True},
        {"do_query_expansion": False, "query_length": 8, "skiplist_words": ["the"]},
    ],
)
def test_a_folder_of_pylate_is_saved_as_pylate(settings: dict[str, Any], tmp_path: Path) -> None:
    place = pylate_folder(tmp_path / "theirs", **settings)
    model = load(place)
    both(model, place)
    save(model, tmp_path / "ours")
    both(model, tmp_path / "ours")


def test_a_model_built_here_is_saved_for_them(tmp_path: Path) -> None:
    place = multi_vector(tmp_path)
    model: Any = build(load(place).config, seed=0)
    model.tokenizer = load(place).tokenizer
    weight = torch.randn(8, 24, generator=torch.Generator().manual_seed(0), requires_grad=True)
    model.late = LateInteractionConfig(
        projection=(DenseProjection(weight, None, "none"),),
        expansion=QueryExpansion(length=7, token=4),
        skipped=(model.tokenizer.token_to_id(","),),
    )
    save(model, tmp_path / "ours")
    again: Any = load(tmp_path / "ours")
    both(again, tmp_path / "ours")
    assert torch.equal(again.late.projection[0].weight, weight)
    model.tokenizer = None
    with refuses(ConfigError, "late interaction uses token", "set model.tokenizer"):
        save(model, tmp_path / "other")


def test_folders_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    place = multi_vector(tmp_path, query_expansion=FIXED)

    def changed(name: str, **values: Any) -> Path:
        copy = tmp_path / "changed"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(place, copy)
        file = copy / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
        return copy

    settings, mask = "sentence_bert_config.json", "2_MultiVectorMask/config.json"
    for name, values, wanted in (
        (settings, {"query_expansion": {"strategy": "endless"}}, ("endless", "fixed or min")),
        (settings, {"query_expansion": {**FIXED, "length": 0}}, ("at least 1", "got 0")),
        (settings, {"query_expansion": {**FIXED, "token": "[Z]"}}, ("[Z]", "its vocabulary")),
        (settings, {"query_length": 5}, ("query_length=5", "not smaller")),
        (settings, {"document_length": "long"}, ("document_length", "'long'")),
        (mask, {"keep_only_token_ids": [3]}, ("keep_only_token_ids", "model of text")),
        ("1_Dense/config.json", {"module_input_name": "sentence_embedding"}, ("token_embeddings",)),
        ("config_sentence_transformers.json", {"prompts": ["a"]}, ("prompts", "per role")),
    ):
        with refuses(InputError, *wanted):
            load(changed(name, **values))
    copy = changed(mask)
    (copy / "tokenizer.json").unlink()
    with refuses(InputError, "no tokenizer.json"):
        load(copy)
    file = stanford_folder(tmp_path / "stanford") / "artifact.metadata"
    file.write_text("[")
    with refuses(InputError, "artifact.metadata"):
        load(file.parent)
