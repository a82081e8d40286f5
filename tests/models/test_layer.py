"""A layer: norms before, after or on both sides; sublayers it has not do not exist."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.errors import ConfigError
from manyheads.models.build import build
from manyheads.models.layer import Branch, Layer, LayerConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.experts import MixtureOfExperts
from manyheads.parts.feedforward import MLP
from manyheads.parts.norms import (
    LayerNorm,
    NoNorm,
    OutputNorm,
    Placement,
    PostNorm,
    PreNorm,
    RMSNorm,
    SandwichNorm,
    ScaledPreNorm,
)
from manyheads.ragged import Ragged
from tests.models.zoo import EXPERTS, WIDTH, decoder, ids, layer, own

CROSS = own(keys_from="memory")
LENGTHS = (3, 0, 5)


def hidden(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_list([torch.randn(length, WIDTH, generator=generator) for length in lengths])


def made(config: LayerConfig) -> Layer:
    """A layer with every weight at random, norms too."""
    module = Layer(config, WIDTH).eval().requires_grad_(False)
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_(std=0.3)
    return module


def normed(x: Tensor, norm: torch.nn.Module) -> Tensor:
    return F.layer_norm(x, (WIDTH,), norm.weight, norm.bias)


def around(placement: Placement, x: Tensor, inner: object, residual: object) -> Tensor:
    """The formula of each placement, written out."""
    match placement:
        case PreNorm():
            return x + inner(normed(x, residual.norm))
        case PostNorm():
            return normed(x + inner(x), residual.norm)
        case SandwichNorm():
            return x + normed(inner(normed(x, residual.norm)), residual.second_norm)
        case OutputNorm():
            return x + normed(inner(x), residual.second_norm)
        case ScaledPreNorm():
            return x + residual.second_norm.weight * inner(normed(x, residual.norm))


@pytest.mark.parametrize(
    "placement",
    [PreNorm(), PostNorm(), SandwichNorm(), OutputNorm(LayerNorm()), ScaledPreNorm()],
    ids=lambda one: type(one).__name__,
)
def test_each_placement_follows_its_formula(placement: Placement) -> None:
    module = made(layer(norm=placement, cross=CROSS))
    x, memory = hidden(), hidden(1, (2, 4, 1))
    attend, cross, feed = module.attention, module.cross, module.feedforward

    def mix(values: Tensor) -> Tensor:
        return attend(x.with_values(values)).values

    def look_back(values: Tensor) -> Tensor:
        return cross(x.with_values(values), memory=memory).values

    expected = around(placement, x.values, mix, module.attention_residual)
    expected = around(placement, expected, look_back, module.cross_residual)
    expected = around(placement, expected, lambda v: feed(v, x), module.feedforward_residual)
    result, losses = module(x, memory=memory)
    torch.testing.assert_close(result.values, expected, rtol=1e-4, atol=1e-4)
    assert losses is None


def test_both_has_two_norms_and_the_others_one() -> None:
    def norms(placement: Placement) -> int:
        return sum("norm" in name for name, _ in made(layer(norm=placement)).named_parameters())

    assert norms(SandwichNorm(RMSNorm())) == 4
    assert norms(PreNorm(RMSNorm())) == norms(PostNorm(RMSNorm())) == 2
    assert norms(PreNorm(NoNorm())) == 0


def test_branches_of_one_layer_may_be_placed_differently() -> None:
    config = LayerConfig(
        attention=Branch(own(), PreNorm(NoNorm())),
        feedforward=Branch(MLP(width=WIDTH, hidden=24), PostNorm(LayerNorm())),
    )
    module, x = made(config), hidden()
    middle = x.values + module.attention(x).values
    fed = module.feedforward(middle, x)
    expected = normed(middle + fed, module.feedforward_residual.norm)
    torch.testing.assert_close(module(x)[0].values, expected, rtol=1e-4, atol=1e-4)


def test_both_branches_of_a_parallel_layer_read_the_same() -> None:
    module, x = made(layer(residual="parallel")), hidden()
    mixed = module.attention(x.with_values(normed(x.values, module.attention_residual.norm)))
    fed = module.feedforward(normed(x.values, module.feedforward_residual.norm), x)
    expected = x.values + mixed.values + fed
    torch.testing.assert_close(module(x)[0].values, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{"norm": PostNorm()}, {"cross": CROSS}])
def test_a_parallel_layer_has_no_norm_after_the_sum_and_no_memory(changes: dict) -> None:
    with pytest.raises(ConfigError, match=r'residual="parallel" is not supported with .*: use '):
        layer(residual="parallel", **changes)


def test_a_layer_without_attention_only_feeds() -> None:
    module, x = made(layer(None)), hidden()
    assert module.attention is None
    assert not any("attention" in name for name, _ in module.named_parameters())
    expected = x.values + module.feedforward(normed(x.values, module.feedforward_residual.norm), x)
    torch.testing.assert_close(module(x)[0].values, expected)


def test_a_layer_without_feedforward_only_mixes() -> None:
    module, x = made(layer(feedforward=None)), hidden()
    assert module.feedforward is None
    assert not any("feedforward" in name for name, _ in module.named_parameters())
    entered = x.with_values(normed(x.values, module.attention_residual.norm))
    torch.testing.assert_close(module(x)[0].values, x.values + module.attention(entered).values)


def test_an_empty_layer_changes_nothing() -> None:
    x = hidden()
    assert torch.equal(made(layer(None, None))(x)[0].values, x.values)


def test_experts_report_their_losses() -> None:
    module = made(layer(feedforward=EXPERTS))
    assert isinstance(module.feedforward, MixtureOfExperts)
    _, losses = module(hidden())
    assert losses is not None
    assert losses.balance > 0
    assert losses.z > 0


def test_dropout_falls_on_what_is_added_and_only_in_training() -> None:
    config = LayerConfig(
        attention=Branch(own(), PreNorm(), 0.5), feedforward=Branch(MLP(width=WIDTH, hidden=24))
    )
    module, x = made(config), hidden()
    module.feedforward = None
    calm = module(x)[0].values - x.values
    module.train()
    added = module(x)[0].values - x.values
    dropped = added.abs() < 1e-6
    assert 0.3 < dropped.float().mean() < 0.7
    torch.testing.assert_close(added[~dropped], 2 * calm[~dropped], rtol=1e-3, atol=1e-4)


def test_sublayers_of_other_widths_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        layer(own(), MLP(width=WIDTH + 8, hidden=24))
    assert "[32, 40]" in caught.value.problem
    assert caught.value.remedy == "give all of them the same width"


def test_a_layer_of_another_width_than_the_stack_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="layer 1 has width 32, and the stack 64: give all layers"
    ):
        StackConfig(
            width=64,
            layers=(
                layer(AttentionConfig(width=64, heads=2), None),
                layer(),
            ),
        )


def test_memory_belongs_under_cross() -> None:
    with pytest.raises(
        ConfigError, match='attention has keys_from="memory": make it the cross branch'
    ):
        layer(CROSS)
    with pytest.raises(ConfigError, match='cross has keys_from="itself": use keys_from="memory"'):
        layer(cross=own())


def test_layers_without_parts_train_within_a_model() -> None:
    model = build(decoder(layer(None), layer(feedforward=None), layer()), seed=0)
    model(ids()).logits.values.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert sum(isinstance(part, Attention) for part in model.modules()) == 2


def test_one_norm_for_both_branches_is_the_same_for_both() -> None:
    config = layer(residual="parallel")
    shared = made(replace(config, residual="parallel_one_norm"))
    norms = [name for name, _ in shared.named_parameters() if "norm" in name]
    assert norms == ["attention_residual.norm.weight", "attention_residual.norm.bias"]
    assert config.feedforward is not None
    feedforward = replace(config.feedforward, norm=PreNorm(RMSNorm()))
    with pytest.raises(ConfigError, match="two norms"):
        replace(config, residual="parallel_one_norm", feedforward=feedforward)
