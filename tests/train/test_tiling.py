"""A larger model from a smaller one: where each number comes from, and that it runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.errors import ConfigError
from manyheads.models.build import build, get_config
from manyheads.models.recipes import llama, modernbert
from manyheads.parts.positions import Rotary
from manyheads.ragged import Ragged
from manyheads.train.tiling import (
    set_rotary_base,
    source_layers,
    tile,
    tile_tensor,
    with_rotary_base,
)
from tests.messages import refuses
from tests.mixers.mixer_configs import CAUSAL, small_model
from tests.models.zoo import DECODERS, ENCODERS, SEQ2SEQS, VISIONS, ids, values

SMALL = modernbert(width=24, heads=3, hidden=20, layers=5, vocabulary=31, window=4)
LARGE = modernbert(width=40, heads=5, hidden=52, layers=8, vocabulary=31, window=4)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    small = build(SMALL, seed=0)
    with torch.no_grad():
        for parameter in small.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(parameter.numel()))
    return small, tile(small, LARGE, seed=1)


def test_the_small_tensor_lies_in_the_center_and_is_gone_round() -> None:
    small = torch.arange(6).reshape(2, 3)
    large = tile_tensor(small, (5, 7))
    assert large.shape == (5, 7)
    assert torch.equal(large[1:3, 2:5], small)
    for row in range(5):
        for column in range(7):
            assert large[row, column] == small[(row - 1) % 2, (column - 2) % 3]


def test_layers_start_from_the_nearest_of_their_kind() -> None:
    base, large = get_config("modernbert-base").stack, get_config("modernbert-large").stack
    sources = source_layers(base, large)
    assert len(sources) == 28
    for index, source in enumerate(sources):
        assert (source % 3 == 0) == (index % 3 == 0)
        assert abs(source - index * 22 / 28) <= 1.5
    assert sources[0] == 0
    assert sources[27] == 21


def test_layers_that_are_all_alike_start_from_the_rounded_depth() -> None:
    shape = {"width": 8, "heads": 1, "kv_heads": 1, "head_size": 8, "hidden": 8, "vocabulary": 9}
    small, large = (llama(**shape, layers=layers).stack for layers in (22, 28))
    assert source_layers(small, large) == tuple(round(index * 22 / 28) for index in range(28))


def test_queries_keys_values_and_both_halves_are_tiled_apart(pair: tuple[Any, Any]) -> None:
    small, large = pair
    for index, source in enumerate(source_layers(SMALL.stack, LARGE.stack)):
        one, other = small.stack.layers[source], large.stack.layers[index]
        for name, rows in other.attention.projections().items():
            before = one.attention.projections()[name]
            assert torch.equal(rows[8:32, 8:32], before)
            assert torch.equal(rows, tile_tensor(before, rows.shape))
        assert torch.equal(other.attention.output.weight[8:32, 8:32], one.attention.output.weight)
        halves = zip(
            one.feedforward.expand.weight.chunk(2),
            other.feedforward.expand.weight.chunk(2),
            strict=True,
        )
        for before, after in halves:
            assert torch.equal(after[16:36, 8:32], before)
            assert torch.equal(after, tile_tensor(before, after.shape))
        contract = other.feedforward.contract.weight
        assert torch.equal(contract, tile_tensor(one.feedforward.contract.weight, contract.shape))


def test_embedding_norms_and_head_are_tiled_along_the_width_alone(pair: tuple[Any, Any]) -> None:
    small, large = pair
    assert torch.equal(large.embedding.tokens.weight[:, 8:32], small.embedding.tokens.weight)
    assert torch.equal(large.stack.final_norm.weight[8:32], small.stack.final_norm.weight)
    assert torch.equal(large.readout.bias, small.readout.bias)
    inside = large.readout.transform.dense.weight[8:32, 8:32]
    assert torch.equal(inside, small.readout.transform.dense.weight)


def test_a_norm_that_the_source_has_not_starts_fresh() -> None:
    small = build(modernbert(width=16, heads=2, hidden=8, layers=1, vocabulary=31), seed=0)
    large = tile(
        small,
        modernbert(width=16, heads=2, hidden=8, layers=2, vocabulary=31, global_every=1),
        seed=0,
    )
    norm = large.stack.layers[1].attention_residual.norm
    assert torch.equal(norm.weight, torch.ones(16))


def test_a_tiled_model_runs_and_one_of_the_same_size_is_the_same(pair: tuple[Any, Any]) -> None:
    small, large = pair
    batch = ids((9, 4))
    with torch.no_grad():
        assert values(large(batch).logits).isfinite().all()
        same = tile(small, SMALL)
        torch.testing.assert_close(values(same(batch).logits), values(small(batch).logits))


@pytest.mark.parametrize("config", [*ENCODERS.values(), *DECODERS.values(), *SEQ2SEQS.values()])
def test_every_model_of_text_tiles_onto_itself(config: Any) -> None:
    small = build(config, seed=0)
    same = tile(small, config, seed=1)
    for name, parameter in same.named_parameters():
        assert torch.equal(parameter, small.get_parameter(name)), name


def test_heads_stay_whole_in_groups() -> None:
    shape = {"width": 16, "head_size": 4, "hidden": 8, "layers": 1, "vocabulary": 31}
    small = build(llama(**shape, heads=4, kv_heads=2), seed=0)
    large = tile(small, llama(**shape, heads=12, kv_heads=4))
    one, other = (model.stack.layers[0].attention.projections() for model in (small, large))
    queries = other["query"].unflatten(0, (4, 3, 4))
    assert torch.equal(queries[1:3, 0:2], one["query"].unflatten(0, (2, 2, 4)))
    assert torch.equal(other["key"].unflatten(0, (4, 4))[1:3], one["key"].unflatten(0, (2, 4)))


def test_what_cannot_grow_is_refused() -> None:
    small = build(SMALL, seed=0)
    with refuses(ConfigError, "head size 8", "16", "keep head_size=8"):
        tile(small, modernbert(width=48, heads=3, hidden=20, layers=5, vocabulary=31, window=4))
    with refuses(ConfigError, "31 and 64 tokens", "use 31 tokens"):
        tile(small, replace(LARGE, embedding=replace(LARGE.embedding, vocabulary=64)))
    with refuses(ConfigError, "a VisionConfig cannot be tiled", "use a text model"):
        tile(build(VISIONS["vit"]), VISIONS["vit"])
    with refuses(ConfigError, "layer 1 of the large model", "as in the small model"):
        shape = {"width": 24, "heads": 3, "hidden": 20, "vocabulary": 31}
        tile(build(modernbert(**shape, layers=1)), modernbert(**shape, layers=2))


def test_mixers_are_copied_to_more_layers_and_do_not_grow() -> None:
    mixer = CAUSAL["delta"]
    small, config = small_model(mixer), small_model(mixer, mixer).config
    large = tile(small, config, seed=1)
    for layer in large.stack.layers:
        result, expected = layer.mixer.state_dict(), small.stack.layers[0].mixer.state_dict()
        assert all(torch.equal(result[name], expected[name]) for name in expected)
    wider = small_model(replace(mixer, heads=8)).config
    with pytest.raises(ConfigError, match="GatedDelta cannot be tiled"):
        tile(small, wider)


def test_the_rotary_base_is_raised_where_the_whole_text_is_seen() -> None:
    config = with_rotary_base(SMALL, 5000.0)
    thetas = []
    for index in range(5):
        position = config.stack.attention(index).position
        assert isinstance(position, Rotary)
        thetas.append(position.theta)
    assert thetas == [5000.0, 10_000.0, 10_000.0, 5000.0, 10_000.0]
    assert with_rotary_base(config, 160_000.0) == SMALL
    with refuses(ConfigError, "rotary", "leave theta out"):
        with_rotary_base(DECODERS["window"], 5000.0)
    with refuses(ConfigError, "theta must be above 1, got 1", "larger base"):
        with_rotary_base(SMALL, 1.0)


def test_a_living_model_keeps_its_parameters_and_turns_by_the_new_base() -> None:
    # With one base for all layers they share their angles, and must not afterwards.
    config = with_rotary_base(SMALL, 10_000.0)
    model = build(config, seed=0)
    assert set(model.stack.position_owner) == {0}
    parameters = list(model.parameters())
    set_rotary_base(model, 160_000.0)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert model.config == SMALL
    expected = build(SMALL, seed=0)
    assert model.stack.position_owner == expected.stack.position_owner
    batch = Ragged.from_list([torch.arange(20)])
    with torch.no_grad():
        assert torch.equal(values(model(batch).hidden), values(expected(batch).hidden))
