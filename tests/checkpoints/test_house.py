"""The models that come with the package: small, offline, and with the heads they are made for."""

import pytest
import torch

from manyheads.checkpoints.folder import load
from manyheads.checkpoints.hub import HOUSE, HOUSE_FOLDER
from manyheads.decoding.loop import generate
from manyheads.taps import Record, Site, Tap

BLOCK = 60


@pytest.mark.parametrize("name", HOUSE)
def test_they_load_by_name_in_single_precision(name: str) -> None:
    model = load(name)
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    assert load(name, dtype=torch.bfloat16).config == model.config
    assert model.tokenizer.get_vocab_size() == 4096
    assert (HOUSE_FOLDER / name / "README.md").read_text().startswith(f"# {name}\n")
    for companion in ("run.toml", "curve.jsonl"):
        assert (HOUSE_FOLDER / name / companion).is_file()


def test_they_are_small_together() -> None:
    assert sum(file.stat().st_size for file in HOUSE_FOLDER.rglob("*")) < 24e6


def test_twins_are_of_one_size() -> None:
    one, other = (
        sum(each.numel() for each in load(name).parameters())
        for name in ("house-gpt", "house-gpt-gated")
    )
    assert abs(one / other - 1) < 5e-4


@pytest.mark.parametrize(("name", "least"), [("house-gpt", 0.45), ("house-gpt-gated", 0.4)])
def test_random_tokens_said_twice_show_an_induction_head(name: str, least: float) -> None:
    model = load(name)
    block = torch.randint(300, 4096, (8, BLOCK), generator=torch.Generator().manual_seed(3))
    ids = torch.cat((torch.zeros(8, 1, dtype=torch.long), block, block), dim=1)
    record = Record([Site(layer, Tap.PATTERN) for layer in range(4)])
    with torch.no_grad():
        model(ids, watch=record)
    patterns = torch.stack(
        [torch.stack(record[site].each) for site in sorted(record.sites, key=str)]
    )
    again = torch.arange(BLOCK + 1, 2 * BLOCK + 1)
    assert patterns[..., again, again - BLOCK + 1].mean((1, 3)).max() > least


def test_the_default_writes_the_language_it_was_trained_on() -> None:
    [written] = generate(load("house-gpt"), ["The [[United"], new_tokens=3)
    assert written.text.startswith(" States")
