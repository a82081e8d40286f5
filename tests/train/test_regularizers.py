"""What is added to the loss for heads: against definitions by hand, and that it works."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from manyheads import load
from manyheads.data.batch import Batch
from manyheads.errors import ConfigError
from manyheads.models.build import build
from manyheads.taps import Record, Site, Sublayer, Tap
from manyheads.train.loop.session import train
from manyheads.train.objectives import CausalLM, Seq2SeqLM
from manyheads.train.objectives.objective import WatcherChain
from manyheads.train.optim.optimizers import AdamW
from manyheads.train.regularizers import (
    HeadDiversity,
    HeadGates,
    L0Gates,
    L1Scales,
    Regularized,
    final_gates,
    fold_gates,
    settled,
)
from manyheads.train.run_file.run_config import parse_run
from tests.messages import refuses
from tests.models.zoo import DECODERS, HEADS, SEQ2SEQS, ids, values
from tests.train.tiny import tables, write_corpus

BATCH = Batch(texts=ids())
NOBODY = torch.Generator()


def fresh(name: str = "llama") -> Any:
    return build(DECODERS[name], seed=0)


def pairs_by_hand(x: torch.Tensor) -> torch.Tensor:
    """For heads first, tokens next."""
    result = [
        (x[one] * x[other]).sum(-1)
        for one in range(HEADS)
        for other in range(HEADS)
        if one != other
    ]
    return torch.stack(result).mean(0)


@pytest.mark.parametrize("of", ["outputs", "patterns"])
def test_diversity_is_the_mean_product_of_two_heads(of: Any) -> None:
    model = fresh()
    objective = Regularized(objective=CausalLM(), regularizers=(HeadDiversity(weight=0.5, of=of),))
    loss = objective.loss(model, BATCH, NOBODY)
    tap = Tap.HEAD_OUTPUT if of == "outputs" else Tap.PATTERN
    record = Record([Site(layer, tap) for layer in range(2)])
    model(BATCH.texts, watch=record)
    layers = []
    for site in record.sites:
        seen = record[site]
        if of == "outputs":
            layers.append(pairs_by_hand(F.normalize(seen.values, dim=-1).transpose(0, 1)).mean())
        else:
            layers.append(torch.cat([pairs_by_hand(each) for each in seen.each]).mean())
    expected = 0.5 * torch.stack(layers).mean() * loss.targets
    torch.testing.assert_close(loss.parts[f"head {of}"], expected)
    plain = CausalLM().loss(model, BATCH, NOBODY)
    torch.testing.assert_close(loss.total, plain.total)


def test_following_diversity_makes_heads_differ() -> None:
    model = fresh()
    objective = Regularized(objective=CausalLM(), regularizers=(HeadDiversity(weight=1.0),))
    optimizer = AdamW(lr=0.01).build(model)
    costs = []
    for _ in range(8):
        cost = objective.loss(model, BATCH, NOBODY).parts["head outputs"]
        cost.backward()
        optimizer.step()
        optimizer.zero_grad()
        costs.append(cost.item())
    assert costs[-1] < costs[0]


def test_l1_is_the_sum_of_all_scales() -> None:
    model = fresh("sinks")
    with torch.no_grad():
        model.stack.layers[0].attention.head_scale.copy_(torch.tensor([1.0, -2.0, 0.0, 0.5]))
    loss = Regularized(objective=CausalLM(), regularizers=(L1Scales(weight=0.1),)).loss(
        model, BATCH, NOBODY
    )
    torch.testing.assert_close(
        loss.parts["head scales"], torch.tensor(0.1 * (3.5 + HEADS) * loss.targets)
    )


def test_gates_train_with_the_model_and_close_under_their_cost() -> None:
    model = fresh().train()
    objective = Regularized(objective=CausalLM(), regularizers=(L0Gates(weight=1.0),))
    with refuses(ConfigError, "the model has no gates for its heads: call attach(model) first."):
        objective.check(model)
    objective.attach(model)
    objective.attach(model)
    optimizer = AdamW(lr=0.3).build(model)
    (group,) = [
        group
        for group in optimizer.param_groups
        if any(each is model.head_gates.gate_probability[0] for each in group["params"])
    ]
    assert group["weight_decay"] == 0
    before = model.head_gates.expected_open().item()
    torch.manual_seed(0)
    for _ in range(5):
        loss = objective.loss(model, BATCH, NOBODY)
        loss.combined.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.parts["open heads"].item() / loss.targets < before
    assert model.head_gates.expected_open().item() < 0.8 * before


def test_gates_of_an_encoder_decoder_reach_both_stacks_and_cross_attention() -> None:
    model = build(SEQ2SEQS["2017"], seed=0)
    sites = {site for site, _, _ in HeadGates(model).sites}
    assert len(sites) == 6
    assert Site(1, Tap.HEAD_OUTPUT, Sublayer.CROSS, "decoder") in sites
    objective = Regularized(
        objective=Seq2SeqLM(start=0), regularizers=(L0Gates(weight=1.0), HeadDiversity(weight=1.0))
    )
    objective.attach(model)
    loss = objective.loss(model, Batch(texts=ids((4, 2)), others=ids((3, 1))), NOBODY)
    loss.combined.backward()
    assert all(each.grad.abs().sum() > 0 for each in model.head_gates.gate_probability)


def test_watchers_together_see_what_those_before_have_left() -> None:
    model = fresh()
    gates, record = HeadGates(model).eval(), Record([Site(0, Tap.HEAD_OUTPUT)])
    with torch.no_grad():
        gates.gate_probability[0].fill_(-9.0)
        model(BATCH.texts, watch=WatcherChain([gates, record]))
    assert (record[Site(0, Tap.HEAD_OUTPUT)].values == 0).all()


def test_the_users_watcher_still_watches() -> None:
    model, record = fresh(), Record([Site(0, Tap.QUERY)])
    objective = Regularized(objective=CausalLM(), regularizers=(HeadDiversity(weight=1.0),))
    objective.loss(model, BATCH, NOBODY, watch=record)
    assert Site(0, Tap.QUERY) in record


def test_what_cannot_be_is_refused() -> None:
    with refuses(ConfigError, "weight must be at least 0, got -1"):
        L1Scales(weight=-1.0)
    with refuses(
        ConfigError,
        'the model has no head scales: set model.heads.scale="learned" in a run file, '
        'head_scale="learned" in AttentionConfig.',
    ):
        Regularized(objective=CausalLM(), regularizers=(L1Scales(weight=1.0),)).check(fresh())
    with refuses(ConfigError, "start must be in (0, 1), got 1.0: use a probability such as 0.9."):
        L0Gates(weight=1.0, start=1.0)
    with refuses(ConfigError, "2 regularizers work on head outputs: keep one"):
        Regularized(
            objective=CausalLM(),
            regularizers=(HeadDiversity(weight=1.0), HeadDiversity(weight=2.0)),
        )


def gated(config: Any) -> Any:
    """A model whose gates are closed, open and half way."""
    model = build(config, seed=0)
    L0Gates(weight=1.0).attach(model)
    with torch.no_grad():
        for number, gate_probability in enumerate(model.head_gates.gate_probability):
            gate_probability.copy_(torch.linspace(-3, 3, gate_probability.numel()).roll(number))
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
    result = final_gates(model)
    assert set(result) == {Site(0, Tap.HEAD_OUTPUT), Site(1, Tap.HEAD_OUTPUT)}
    expected = settled(torch.linspace(-3, 3, HEADS))
    torch.testing.assert_close(result[Site(0, Tap.HEAD_OUTPUT)], expected)
    assert expected[0] == 0 < expected[1] < expected[-1] == 1
    assert final_gates(build(DECODERS["gpt2"], seed=0)) == {}


def test_a_run_with_gates_leaves_a_model_with_them_folded_in(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    settings = tables(tmp_path, steps=3)
    settings["regularizer"] = [{"kind": "L0Gates", "weight": 0.5, "start": 0.6}]
    settings["optimizer"]["lr"] = 0.5
    train(parse_run(settings), progress=False)
    [kept] = (tmp_path / "out/checkpoints/step-3").glob("*.safetensors")
    state = load_file(kept)
    saved = load(tmp_path / "out/model").state_dict()
    assert not any("gates" in name for name in saved)
    for layer in range(2):
        gate = settled(state[f"model.head_gates.gate_probability.{layer}"])
        assert (gate < 1).any()
        name = f"stack.layers.{layer}.attention.output.weight"
        expected = state[f"model.{name}"] * gate.repeat_interleave(8)
        torch.testing.assert_close(saved[name], expected)
