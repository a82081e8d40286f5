"""Optimizers against torch's own, against small computations by hand, and on joined matrices."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.models.build import build
from manyheads.models.recipes import ModelConfig
from manyheads.train.optim.optimizers import (
    AdamW,
    Muon,
    OptimizerConfig,
    RuleOptimizer,
    ScaledAdamW,
    StableAdamW,
    orthogonalise,
)
from manyheads.train.optim.param_groups import (
    RateFactor,
    build_param_groups,
    describe_parameters,
    set_learning_rate,
)
from tests.messages import refuses
from tests.models.zoo import DECODERS, ENCODERS, MODELS, SEQ2SEQS, VISIONS

MUON = Muon(precision="single")
OPTIMIZERS: dict[str, OptimizerConfig] = {
    "adamw": AdamW(),
    "stable": StableAdamW(decay=0.1),
    "muon": MUON,
}
ROWS = (RateFactor(pattern="*.query.*", factor=0.5), RateFactor(pattern="*.value.*", factor=2.0))


def fresh(config: ModelConfig) -> Any:
    return build(config, seed=0)


def pretend(parameters: list[Tensor], step: int) -> None:
    """Gradients of very different sizes, the same each time."""
    for index, parameter in enumerate(parameters):
        draw = torch.Generator().manual_seed(1000 * step + index)
        parameter.grad = torch.randn(parameter.shape, generator=draw) * 10.0 ** (
            step % 3 - index % 3
        )


def trained(config: OptimizerConfig, model: nn.Module, steps: int = 4) -> list[Tensor]:
    optimizer = config.build(model)
    for step in range(steps):
        pretend(list(model.parameters()), step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in model.parameters()]


def names(group: dict[str, Any], model: nn.Module) -> set[str]:
    known = {parameter: name for name, parameter in model.named_parameters()}
    return {known[parameter] for parameter in group["params"]}


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_learns_in_one_group(name: str) -> None:
    model = fresh(MODELS[name])
    for config in OPTIMIZERS.values():
        result = [each for group in config.build(model).param_groups for each in group["params"]]
        assert len(result) == len(set(result)) == len(list(model.parameters()))


def test_norms_biases_embeddings_and_scales_do_not_decay() -> None:
    for config in (ENCODERS["bert"], DECODERS["sinks"], SEQ2SEQS["t5"], VISIONS["vit"]):
        model = fresh(config)
        for group in AdamW().build(model).param_groups:
            for name in names(group, model):
                spared = any(
                    word in name for word in ("norm", "bias", "embedding", "sink", "scale", "table")
                )
                spared = spared and not name.endswith("convolution.weight")
                assert (group["weight_decay"] == 0) == spared, name


@pytest.mark.parametrize(
    "config",
    [
        AdamW(decay_embeddings=True),
        StableAdamW(decay_embeddings=True),
        Muon(rest=AdamW(decay_embeddings=True)),
    ],
    ids=["adamw", "stable", "muon"],
)
def test_embeddings_decay_only_with_decay_embeddings(config: OptimizerConfig) -> None:
    for settings in (ENCODERS["bert"], DECODERS["sinks"], SEQ2SEQS["t5"]):
        model = fresh(settings)
        for group in config.build(model).param_groups:
            for name in names(group, model):
                spared = any(word in name for word in ("norm", "bias", "sink", "scale", "table"))
                assert (group["weight_decay"] == 0) == spared, name


def test_muon_takes_the_matrices_between_hidden_spaces() -> None:
    for config in (ENCODERS["bert"], DECODERS["experts"], ENCODERS["tags"], VISIONS["vit"]):
        model = fresh(config)
        for group in MUON.build(model).param_groups:
            for name in names(group, model):
                inside = name.startswith("stack.layers") and "norm" not in name
                inside = inside and not name.endswith("bias")
                assert (group["rule"] == "muon") == inside, name


def test_adamw_is_torchs() -> None:
    ours, peer = fresh(DECODERS["gates"]), fresh(DECODERS["gates"])
    decayed = {parameter for parameter in peer.parameters() if parameter.dim() == 2}
    decayed -= {peer.embedding.tokens.weight}
    plain = torch.optim.AdamW(
        [
            {"params": [each for each in peer.parameters() if each in decayed]},
            {
                "params": [each for each in peer.parameters() if each not in decayed],
                "weight_decay": 0.0,
            },
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        weight_decay=0.2,
        fused=True,
    )
    for step in range(4):
        pretend(list(peer.parameters()), step)
        plain.step()
    result = trained(AdamW(lr=0.01, decay=0.2), ours)
    for one, other in zip(result, peer.parameters(), strict=True):
        assert torch.equal(one, other)


class Apart(nn.Module):
    """The rows of joined matrices as parameters of their own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = describe_parameters(model)
        self.each = nn.ParameterList(
            part.detach().clone()
            for weights in self.weights
            for part in weights.parameter.split([size for _, size in weights.parts], weights.axis)
        )

    def parts(self) -> list[tuple[str, bool, bool, nn.Parameter]]:
        named = [
            (address, weights.decays, weights.matrix)
            for weights in self.weights
            for address, _ in weights.parts
        ]
        return [(*name, part) for name, part in zip(named, self.each, strict=True)]

    def together(self) -> list[Tensor]:
        """As the model has them."""
        left = list(self.each)
        result = []
        for weights in self.weights:
            mine, left = left[: len(weights.parts)], left[len(weights.parts) :]
            result.append(torch.cat(list(mine), weights.axis))
        return result


def groups_apart(apart: Apart, config: OptimizerConfig) -> list[dict[str, Any]]:
    """One group a part, its learning rate written down by hand."""
    groups = []
    for address, decays, matrix, part in apart.parts():
        factor = 0.5 if ".query." in address else 2.0 if ".value." in address else 1.0
        rule: OptimizerConfig = config
        if isinstance(config, Muon) and not matrix:
            rule = config.rest
        entries: dict[str, Any] = {"rule": "stable" if isinstance(rule, StableAdamW) else "adamw"}
        if isinstance(rule, Muon):
            fields = ("momentum", "nesterov", "rounds", "size", "precision")
            entries = {"rule": "muon"} | {name: getattr(rule, name) for name in fields}
        else:
            entries |= {"betas": rule.betas, "eps": rule.eps}
        decay = rule.decay if decays else 0.0
        axis = 2 if part.dim() == 3 else 0
        groups.append(
            {
                "params": [part],
                "lr": rule.lr * factor,
                "weight_decay": decay,
                "parts": (),
                "axis": axis,
            }
            | entries
        )
    return groups


@pytest.mark.parametrize("model", ["gates", "experts", "gpt2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_of_a_joined_matrix_learn_as_if_they_were_apart(name: str, model: str) -> None:
    config = replace(OPTIMIZERS[name], rates=ROWS)
    joined = fresh(DECODERS[model])
    apart = Apart(joined)
    separate: torch.optim.Optimizer
    groups = groups_apart(apart, OPTIMIZERS[name])
    if name == "adamw":
        keys = ("params", "lr", "weight_decay", "betas", "eps")
        separate = torch.optim.AdamW([{key: group[key] for key in keys} for group in groups])
    else:
        separate = RuleOptimizer(groups)
    optimizer = config.build(joined)
    for step in range(4):
        pretend([weights.parameter for weights in apart.weights], step)
        left = list(apart.each)
        for weights in apart.weights:
            sizes = [size for _, size in weights.parts]
            for gradient in weights.parameter.grad.split(sizes, weights.axis):
                left.pop(0).grad = gradient.clone()
        optimizer.step()
        separate.step()
    for weights, expected in zip(apart.weights, apart.together(), strict=True):
        torch.testing.assert_close(weights.parameter.detach(), expected, rtol=2e-6, atol=2e-7)


def test_stable_adamw_is_the_papers_formula() -> None:
    weight = nn.Linear(5, 3, bias=False)
    before = weight.weight.detach().double()
    rate, (first, second), eps, decay = 0.1, (0.9, 0.98), 1e-6, 0.3
    config = StableAdamW(lr=rate, betas=(first, second), eps=eps, decay=decay)
    optimizer = config.build(weight)
    mean, square, clipped = torch.zeros(3, 5), torch.zeros(3, 5), 0
    for step in range(1, 7):
        pretend([weight.weight], step)
        gradient = weight.weight.grad.double()
        optimizer.step()
        one = first * (1 - first ** (step - 1)) / (1 - first**step)
        two = second * (1 - second ** (step - 1)) / (1 - second**step)
        mean = one * mean + (1 - one) * gradient
        square = two * square + (1 - two) * gradient**2
        rms = (gradient**2 / square.clamp(min=eps**2)).mean().sqrt().item()
        clipped += rms > 1
        shrunk = rate / max(1, rms)
        before = before - shrunk * decay * before - shrunk * mean / (square.sqrt() + eps)
    assert 0 < clipped < 6
    torch.testing.assert_close(weight.weight.detach().double(), before, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", ["original", "adamw"])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_muon_is_torchs(shape: tuple[int, int], size: Any) -> None:
    ours, peer = (nn.Linear(*shape, bias=False) for _ in range(2))
    peer.load_state_dict(ours.state_dict())
    plain = torch.optim.Muon(
        peer.parameters(),
        lr=0.02,
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw" if size == "adamw" else "original",
    )
    optimizer = Muon(size=size).build(ours)
    for step in range(4):
        for model, each in ((ours, optimizer), (peer, plain)):
            pretend(list(model.parameters()), step)
            each.step()
    # In half precision both are as far from the truth as from each other.
    torch.testing.assert_close(ours.weight, peer.weight, rtol=0.02, atol=2e-3)


def test_orthogonalised_is_the_polynomial_of_the_singular_values() -> None:
    matrix = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    assert (values - 1).abs().max() < 0.35
    result = orthogonalise(matrix, 5, "single")
    torch.testing.assert_close(result, left @ values.diag() @ right, rtol=1e-4, atol=1e-4)
    batch = torch.stack((matrix, 3 * matrix))
    torch.testing.assert_close(orthogonalise(batch, 5, "single")[1], result, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_schedule_takes_its_share_of_every_peak(name: str) -> None:
    config = replace(OPTIMIZERS[name], rates=(RateFactor(pattern="embedding.*", factor=0.1),))
    optimizer = config.build(fresh(DECODERS["llama"]))
    peaks = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [peak / 4 for peak in peaks]
    assert len({group["lr"] for group in optimizer.param_groups}) > 1


def test_a_rate_of_zero_moves_nothing() -> None:
    for config in OPTIMIZERS.values():
        model = fresh(DECODERS["llama"])
        before = [parameter.detach().clone() for parameter in model.parameters()]
        optimizer = config.build(model)
        set_learning_rate(optimizer, 0.0)
        pretend(list(model.parameters()), 0)
        optimizer.step()
        for one, other in zip(before, model.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_goes_through_a_distributed_checkpoint(name: str, tmp_path: Any) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    config = replace(OPTIMIZERS[name], rates=ROWS)
    one, other = fresh(DECODERS["llama"]), build(DECODERS["llama"], seed=1)
    optimizer, second = config.build(one), config.build(other)
    for step in range(2):
        pretend(list(one.parameters()), step)
        optimizer.step()
    optimizer.zero_grad()
    model_state, state = get_state_dict(one, optimizer)
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
    model_state, state = get_state_dict(other, second)
    room = {"model": model_state, "optimizer": state}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(room, checkpoint_id=tmp_path, no_dist=True)
    set_state_dict(
        other, second, model_state_dict=room["model"], optim_state_dict=room["optimizer"]
    )
    for model, each in ((one, optimizer), (other, second)):
        pretend(list(model.parameters()), 2)
        each.step()
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


def test_what_cannot_be_is_refused() -> None:
    model = fresh(DECODERS["llama"])
    with refuses(
        ConfigError,
        "no parameter matches '*.querry.weight': use a pattern that matches "
        "stack.layers.1.attention.query.weight.",
    ):
        AdamW(rates=(RateFactor(pattern="*.querry.weight", factor=0.5),)).build(model)
    with refuses(ConfigError, "lr must be above 0, got 0.0: use a value such as 1e-3."):
        AdamW(lr=0.0)
    with refuses(ConfigError, "decay must be at least 0, got -1"):
        StableAdamW(decay=-1.0)
    with refuses(ConfigError, "lr must be a number, got nan"):
        AdamW(lr=math.nan)
    with refuses(ConfigError, "eps must be at least 0, got -1.0: use a value such as 1e-8."):
        AdamW(eps=-1.0)
    with refuses(ConfigError, "must be in [0, 1), got 1.0: use a value such as 0.9."):
        Muon(momentum=1.0)
    with refuses(ConfigError, "rest.rates cannot be used with Muon: set rates of Muon itself."):
        Muon(rest=AdamW(rates=ROWS))
    with refuses(ConfigError, "factor must be at least 0, got -1"):
        RateFactor(pattern="*", factor=-1.0)


def test_the_last_pattern_that_fits_counts() -> None:
    model = fresh(DECODERS["llama"])
    rates = (RateFactor(pattern="*", factor=3.0), RateFactor(pattern="*.key.weight", factor=0.0))
    groups = build_param_groups(describe_parameters(model), lr=1.0, decay=0.0, rates=rates)
    assert {group["peak"] for group in groups} == {3.0, 1.0}
    (joined,) = [group for group in groups if group["peak"] == 1.0]
    assert [factor for _, factor in joined["parts"]] == [3.0, 0.0, 3.0]
    assert isinstance(AdamW(rates=rates).build(model), ScaledAdamW)
    assert math.isclose(groups[0]["lr"], groups[0]["peak"])
