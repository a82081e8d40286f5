"""What telemetry says of heads, against patterns made by hand, and that it changes nothing."""

import math
from typing import Any

import pytest
import torch

from manyheads import build
from manyheads.checkpoints.folder import load
from manyheads.data.batch import Batch
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Tap
from manyheads.train.loop.evaluation import HeadWatcher, Probe, make_probe


def probe(block: int = 3) -> Probe:
    texts = Ragged.from_list([torch.arange(4), torch.arange(6)])
    return Probe(texts, (), 1, block)


def observe(natural: Any, repeated: Any) -> dict[str, Any]:
    watcher = HeadWatcher(probe())
    watcher.see(Site(0, Tap.PATTERN), Patterns((natural[None], repeated[None])))
    (line,) = watcher.lines()
    return line


def test_each_number_is_its_definition_on_a_pattern_made_by_hand() -> None:
    previous = torch.eye(4).roll(-1, 1).tril()
    previous[0, 0] = 1.0
    induction = torch.zeros(6, 6)
    induction[:, 0] = 1.0
    for query in (3, 4, 5):
        induction[query] = torch.eye(6)[query - 3 + 1]
    line = observe(previous, induction)
    assert line["previous_token"] == [[1.0]]
    assert line["induction"] == [[1.0]]
    assert line["entropy"] == [[0.0]]
    # The first query and the second look at the first token.
    assert line["first_token"] == [[0.5]]


def test_an_even_pattern_has_the_entropy_of_its_keys() -> None:
    even = torch.ones(4, 4).tril()
    even = even / even.sum(-1, keepdim=True)
    line = observe(even, torch.eye(6))
    expected = torch.tensor([1.0, 2.0, 3.0, 4.0]).log().mean().item()
    assert line["entropy"][0][0] == pytest.approx(expected, rel=1e-5)
    assert line["induction"] == [[0.0]]
    assert line["previous_token"][0][0] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3, rel=1e-5)


def test_a_model_is_looked_at_layer_by_layer_and_left_as_it_was() -> None:
    change: dict[str, Any] = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "head_size": 4}
    model = build("gated-1.7b", **change, hidden=16, vocabulary=50, seed=0)
    model.train()
    batch = Batch(texts=Ragged.from_list([torch.arange(20), torch.arange(7)]))
    made = make_probe(model, batch, seed=0)
    assert (made.natural, made.block) == (2, 64)
    before = torch.random.get_rng_state()
    watcher = HeadWatcher(made)
    made.run(model, watcher)
    assert torch.equal(before, torch.random.get_rng_state())
    assert model.training
    (line,) = watcher.lines()
    assert set(line) == {
        *("stack", "entropy", "first_token", "previous_token", "induction"),
        *("gate_output", "largest_activation", "first_copy_loss", "second_copy_loss"),
    }
    # Untrained, it knows nothing of either copy.
    assert line["first_copy_loss"] == pytest.approx(math.log(50), rel=0.05)
    assert line["second_copy_loss"] == pytest.approx(math.log(50), rel=0.05)
    assert [len(layer) for layer in line["entropy"]] == [4, 4]
    assert [len(layer) for layer in line["gate_output"]] == [4, 4]
    assert len(line["largest_activation"]) == 2


def test_images_and_encoder_decoders_are_looked_at_too() -> None:
    vision = build("vit-b16", width=16, heads=2, hidden=16, layers=1, image=32, seed=0)
    made = make_probe(vision, Batch(images=(torch.randn(3, 32, 32),)), seed=0)
    watcher = HeadWatcher(made)
    made.run(vision, watcher)
    (line,) = watcher.lines()
    assert "induction" not in line
    both = build("transformer-base", width=16, heads=2, hidden=16, layers=1, vocabulary=50, seed=0)
    made = make_probe(both, Batch(texts=Ragged.from_list([torch.arange(9)])), seed=0)
    watcher = HeadWatcher(made)
    made.run(both, watcher)
    assert [each["stack"] for each in watcher.lines()] == ["encoder", "decoder"]


def test_a_model_with_induction_heads_knows_the_second_copy() -> None:
    model = load("house-gpt")
    made = make_probe(model, Batch(texts=Ragged.from_list([torch.arange(20)])), seed=0)
    watcher = HeadWatcher(made)
    made.run(model, watcher)
    (line,) = watcher.lines()
    assert max(map(max, line["induction"])) > 0.4
    assert line["second_copy_loss"] < line["first_copy_loss"] - 3
