"""The models that come with the package: small, offline, and with the heads they are made for."""

from typing import Any

import pytest
import torch

from manyheads.checkpoints.folder import load
from manyheads.checkpoints.hub import BUNDLED_FOLDER, HOUSE
from manyheads.decoding.generation import generate
from manyheads.lens.inputs.synthetic import passages
from manyheads.taps import Record, Site, Sublayer, Tap

BLOCK = 60


@pytest.mark.parametrize("name", HOUSE)
def test_they_load_by_name_in_single_precision(name: str) -> None:
    model = load(name)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert load(name, dtype=torch.bfloat16).config == model.config
    assert model.tokenizer.get_vocab_size() == 4096
    assert (BUNDLED_FOLDER / name / "README.md").read_text().startswith(f"# {name}\n")
    for companion in ("run.toml", "curve.jsonl"):
        assert (BUNDLED_FOLDER / name / companion).is_file()


def test_they_are_small_together() -> None:
    kinds = sum(file.stat().st_size for file in BUNDLED_FOLDER.glob("kinds/*"))
    assert sum(file.stat().st_size for file in BUNDLED_FOLDER.rglob("*")) - kinds < 24e6
    assert kinds < 4e6


def test_twins_are_of_one_size() -> None:
    one, other = (
        sum(each.numel() for each in load(name).parameters())
        for name in ("house-gpt", "house-gpt-gated")
    )
    assert abs(one / other - 1) < 5e-4


@pytest.mark.parametrize(("name", "least"), [("house-gpt", 0.45), ("house-gpt-gated", 0.4)])
def test_repeated_random_tokens_show_the_induction_heads(name: str, least: float) -> None:
    block = torch.randint(300, 4096, (8, BLOCK), generator=torch.Generator().manual_seed(3))
    ids = torch.cat((torch.zeros(8, 1, dtype=torch.long), block, block), dim=1)
    record = watched(load(name), ids, [Site(layer, Tap.PATTERN) for layer in range(4)])
    patterns = torch.stack(
        [torch.stack(record[site].each) for site in sorted(record.sites, key=str)]
    )
    again, every = torch.arange(BLOCK + 1, 2 * BLOCK + 1), torch.arange(1, 2 * BLOCK + 1)
    assert patterns[..., again, again - BLOCK + 1].mean((1, 3)).max() > least
    assert patterns[..., every, every - 1].mean((1, 3)).max() > 0.85


def test_gates_keep_activations_small_and_heads_off_the_first_token() -> None:
    text = passages()[0]
    largest, first = {}, {}
    for name in ("house-gpt", "house-gpt-gated"):
        model = load(name)
        ids = torch.tensor([model.tokenizer.encode(text).ids[:256]])
        left = [Site(layer, Tap.AFTER, Sublayer.FEEDFORWARD) for layer in range(4)]
        looks = [Site(layer, Tap.PATTERN) for layer in range(4)]
        record = watched(model, ids, left + looks)
        largest[name] = max(record[site].values.abs().max() for site in left)
        first[name] = torch.stack([record[site].each[0][..., 0] for site in looks]).mean()
    assert largest["house-gpt-gated"] < 31
    assert largest["house-gpt-gated"] < largest["house-gpt"] / 2
    assert first["house-gpt-gated"] < first["house-gpt"] * 0.6


def watched(model: Any, ids: torch.Tensor, sites: list[Site]) -> Record:
    record = Record(sites)
    with torch.no_grad():
        model(ids, watch=record)
    return record


def test_the_default_writes_the_language_it_was_trained_on() -> None:
    [written] = generate(load("house-gpt"), ["The [[United"], max_new_tokens=3)
    assert written.text.startswith(" States")
