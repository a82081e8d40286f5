"""Files of HeadVis: metrics as its own pipeline defines them, and the way out and in again."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.corpus.atlas import Atlas
from manyheads.report.headvis import METRICS, headvis_metrics, read_headvis, write_headvis
from tests.report import small


def eager_metrics(model: Any, texts: list[list[int]]) -> dict[str, np.ndarray]:
    """The metrics from whole attention matrices, added up as HeadVis does; a value per head."""
    sums = dict.fromkeys(("self", "previous", "entropy", "distance", "square", "copied"), 0.0)
    queries = followers = repeated = 0
    for ids in texts:
        with torch.no_grad():
            output = model(torch.tensor([ids]), output_attentions=True)
        weights = torch.cat(output.attentions).double().flatten(0, 1).numpy()
        away = np.abs(np.subtract.outer(np.arange(len(ids)), np.arange(len(ids))))
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.nansum(weights * np.log(weights), axis=(1, 2))
        pairs = [
            (query, key + 1) for query in range(len(ids)) for key in range(query)
            if ids[key] == ids[query]
        ]  # fmt: skip
        copied = weights[:, [query for query, _ in pairs], [key for _, key in pairs]]
        parts = (
            weights.diagonal(0, 1, 2).sum(1),
            weights.diagonal(-1, 1, 2).sum(1),
            entropy,
            (weights * away).sum((1, 2)),
            (weights * away**2).sum((1, 2)),
            np.where(copied < 0.01, 0, copied).sum(1),
        )
        sums = {name: sums[name] + part for name, part in zip(sums, parts, strict=True)}
        queries, followers = queries + len(ids), followers + len(ids) - 1
        repeated += len({query for query, _ in pairs})
    distance = np.asarray(sums["distance"]) / queries
    return {
        "self_attention_score": np.asarray(sums["self"]) / queries,
        "prev_token_score": np.asarray(sums["previous"]) / followers,
        "pattern_entropy": np.asarray(sums["entropy"]) / queries,
        "qk_distance": distance,
        "qk_distance_variance": np.asarray(sums["square"]) / queries - distance**2,
        "induction_score": np.asarray(sums["copied"]) / repeated,
    }


def test_the_six_metrics_are_those_of_eager_attention() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=24, n_positions=64, n_embd=16, n_layer=2, n_head=2,
        attn_implementation="eager", bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(6.0)
    texts = [torch.randint(0, 24, (length,)).tolist() for length in (5, 17, 30)]
    with small.quick_kinds():
        atlas = lens.atlas(model, texts, by="none", progress=False)
    expected = eager_metrics(model, texts)
    for place, head in enumerate(atlas.entries):
        metrics = headvis_metrics(atlas, head)
        assert list(metrics) == list(METRICS)
        for name, value in metrics.items():
            assert value == pytest.approx(expected[name][place], abs=1e-4), (str(head), name)


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    return small.atlas()


@pytest.fixture
def folder(atlas: Atlas, tmp_path: Path) -> Path:
    write_headvis(atlas, tmp_path / "headvis", model="tiny", corpus="words")
    return tmp_path / "headvis"


def test_out_and_in_again(atlas: Atlas, folder: Path) -> None:
    files = read_headvis(folder)
    assert files.index["name"] == "tiny"
    assert [head["name"] for head in files.index["heads"]] == [str(head) for head in atlas.entries]
    for head, entry in zip(files.index["heads"], atlas.entries.values(), strict=True):
        metrics = headvis_metrics(atlas, entry.address)
        assert head["values"] == list(metrics.values())
        again = files.heads[head["name"]]
        assert again["activations"] == entry.activations.tolist()
        assert {example["text"] for example in again["examples"]} == {
            example.text for example in entry.examples
        }
        best, sharpest = again["examples"][0], entry.sharpest[0]
        assert (best["text"], best["query"]) == (sharpest.text, sharpest.query)
        words = [files.tokens[token] for token in files.texts[best["text"]]["main"]]
        assert words == atlas.words(sharpest.text)


def test_links_are_flat_indices_into_the_pattern(atlas: Atlas, folder: Path) -> None:
    head = json.loads((folder / "heads" / "L1H1.json").read_bytes())
    by_text = {example.text: example for example in atlas.of("L1H1").examples}
    for sequence in head["sequences"]:
        length = sequence["seq_len"]
        assert length == len(sequence["tokens"])
        links = [(query, key) for query, key, _ in by_text[sequence["sequence_id"]].links()]
        flat = [divmod(index, length) for index in sequence["attention_indices"]]
        assert flat == sorted(links)
        assert 1 <= sequence["interval"] <= 10


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "does not exist"),
        ("scatter_data.json", "{", "is not JSON"),
        ("scatter_data.json", "{}", "holds a dict"),
        ("scatter_data.json", '[{"layer": 0}]', "does not have the form of HeadVis"),
        ("heads/L1H0.json", None, "does not exist"),
        ("heads/L1H0.json", '{"sequences": [{}]}', "does not have the form of HeadVis"),
    ],
)
def test_a_damaged_folder_is_named(
    folder: Path, file: str, content: str | None, message: str
) -> None:
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        read_headvis(folder)
    assert str(folder) in str(caught.value)
