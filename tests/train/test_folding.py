"""A saved model does without gates what it did with them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from manyheads import load
from manyheads.models.build import build
from manyheads.taps import Site, Tap
from manyheads.train.hard_concrete import settled
from manyheads.train.loop.session import train
from manyheads.train.regularisers import L0Gates, final_gates, fold_gates
from manyheads.train.run_file.run_config import run_of
from tests.models.zoo import DECODERS, HEADS, SEQ2SEQS, ids, values
from tests.train.tiny import tables, write_corpus


def gated(config: Any) -> Any:
    """A model whose gates are closed, open and half way."""
    model = build(config, seed=0)
    L0Gates(weight=1.0).attach(model)
    with torch.no_grad():
        for number, openness in enumerate(model.head_gates.openness):
            openness.copy_(torch.linspace(-3, 3, openness.numel()).roll(number))
    return model.eval()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_folded_weights_need_no_gates(name: str) -> None:
    model, alone = gated(DECODERS[name]), build(DECODERS[name], seed=1)
    alone.load_state_dict(fold_gates(model, model.state_dict()))
    with torch.no_grad():
        expected = values(model(ids(), watch=model.head_gates).hidden)
        torch.testing.assert_close(values(alone(ids()).hidden), expected)
        assert not torch.allclose(values(model(ids()).hidden), expected, atol=1e-2)


def test_cross_attention_of_an_encoder_decoder_is_folded_too() -> None:
    model, alone = gated(SEQ2SEQS["2017"]), build(SEQ2SEQS["2017"], seed=1)
    before = {name: each.clone() for name, each in model.state_dict().items()}
    alone.load_state_dict(fold_gates(model, model.state_dict()))
    with torch.no_grad():
        expected = values(model(ids((5, 2, 7)), ids((2, 3, 4)), watch=model.head_gates).hidden)
        torch.testing.assert_close(values(alone(ids((5, 2, 7)), ids((2, 3, 4))).hidden), expected)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_final_gates_are_those_of_evaluation_even_in_training() -> None:
    model = gated(DECODERS["gpt2"]).train()
    found = final_gates(model)
    assert set(found) == {Site(0, Tap.HEAD_OUTPUT), Site(1, Tap.HEAD_OUTPUT)}
    expected = settled(torch.linspace(-3, 3, HEADS))
    torch.testing.assert_close(found[Site(0, Tap.HEAD_OUTPUT)], expected)
    assert expected[0] == 0 < expected[1] < expected[-1] == 1
    assert final_gates(build(DECODERS["gpt2"], seed=0)) == {}


def test_a_run_with_gates_leaves_a_model_with_them_folded_in(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    asked = tables(tmp_path, steps=3)
    asked["regulariser"] = [{"kind": "L0Gates", "weight": 0.5, "start": 0.6}]
    asked["optimiser"]["rate"] = 0.5
    train(run_of(asked), progress=False)
    [kept] = (tmp_path / "out/checkpoints/step-3").glob("*.safetensors")
    state = load_file(kept)
    saved = load(tmp_path / "out/model").state_dict()
    assert not any("gates" in name for name in saved)
    for layer in range(2):
        gate = settled(state[f"model.head_gates.openness.{layer}"])
        assert (gate < 1).any()
        name = f"stack.layers.{layer}.attention.output.weight"
        expected = state[f"model.{name}"] * gate.repeat_interleave(8)
        torch.testing.assert_close(saved[name], expected)
