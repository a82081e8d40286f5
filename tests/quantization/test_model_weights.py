"""Whole models with integer weights: their layers, their steps, and what the lens sees."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from manyheads import DynamicCache, Ragged, build, generate, lens, load, surgery
from manyheads.decoding.steps.cached import CachedSteps
from manyheads.decoding.steps.cpu_step import cannot
from manyheads.errors import ConfigError, InputError
from manyheads.parts.gates import Gate
from manyheads.quantization import dequantize_weights, quantize_weights
from manyheads.quantization.integer_layers import IntegerEmbedding, IntegerLinear, IntegerWeight
from manyheads.quantization.model_weights import (
    built_in_texts,
    layouts_of,
    text_inputs,
    weights_of,
)

SHAPE: dict[str, Any] = {"layers": 2, "width": 64, "heads": 4, "vocabulary": 120, "seed": 0}
LLAMA = "llama-1b-shape"
RECIPES: dict[str, Any] = {"gpt2": SHAPE, LLAMA: {**SHAPE, "kv_heads": 2, "hidden": 96}}
NAMES: tuple[Any, ...] = ("int8", "int4")
IDS = torch.arange(20)[None] * 5 % 120


def quantized(recipe: str, name: Any, **options: Any) -> Any:
    model = build(recipe, **RECIPES[recipe], **options).eval()
    quantize_weights(model, name)
    return model


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
def test_outputs_stay_near_those_of_float32(recipe: str, name: Any) -> None:
    model, small = build(recipe, **RECIPES[recipe]).eval(), quantized(recipe, name)
    with torch.no_grad():
        before, after = model(IDS), small(IDS)
    cosine = torch.cosine_similarity(before.hidden, after.hidden, dim=-1).mean()
    assert cosine > (0.999 if name == "int8" else 0.98)
    assert after.logits.shape == before.logits.shape
    assert weights_of(small) == name
    assert weights_of(model) is None


def test_the_vocabulary_has_eight_bits_and_is_one_table_where_it_is_tied() -> None:
    model = quantized("gpt2", "int4")
    table = model.embedding.tokens
    assert isinstance(table, IntegerEmbedding)
    assert table.weight_name == "int8"
    assert model.readout.product.__self__ is table
    twin = copy.deepcopy(model)
    assert twin.readout.product.__self__ is twin.embedding.tokens
    assert not any(name.startswith("readout") for name in model.state_dict())


def test_four_bits_are_eight_where_a_feed_forward_contracts() -> None:
    layouts = layouts_of(quantized(LLAMA, "int4"))
    contracting = {name for name in layouts if name.endswith("feedforward.contract")}
    assert len(contracting) == SHAPE["layers"]
    assert {name for name in layouts if layouts[name] == "int8"} == {
        *contracting,
        "embedding.tokens",
    }


def test_a_language_head_of_its_own_is_rounded_too() -> None:
    config = build(LLAMA, **RECIPES[LLAMA]).config
    config = replace(config, readout=replace(config.readout, tied=False))
    model = build(config, seed=0).eval()
    with torch.no_grad():
        before = model(IDS).logits
        quantize_weights(model, "int8")
        after = model(IDS).logits
    assert isinstance(model.readout.product, IntegerLinear)
    assert model.readout.weight is None
    assert (after - before).norm() < 0.03 * before.norm()
    assert torch.equal(model.readout.vectors(None), model.readout.product.weight)
    dequantize_weights(model)
    assert isinstance(model.readout.weight, nn.Parameter)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 3])
def test_steps_give_the_logits_of_the_layers(recipe: str, name: Any, count: int) -> None:
    model = quantized(recipe, name)
    assert cannot(model) is None
    steps, layers = CachedSteps(model, DynamicCache()), model.new_cache()
    prompts = IDS.expand(count, -1)[:, :6]
    with torch.inference_mode():
        steps.start(Ragged.from_list(list(prompts)))
        model(prompts, cache=layers)
        for token in (3, 99, 7):
            ids = torch.full((count,), token)
            expected = model(ids[:, None], cache=layers).logits[:, 0]
            torch.testing.assert_close(steps.next(ids), expected, atol=1e-4, rtol=1e-4)


def test_dequantizing_gives_ordinary_layers_with_the_same_weights() -> None:
    model = quantized("gpt2", "int8")
    plain = copy.deepcopy(model)
    dequantize_weights(plain)
    assert not any(isinstance(part, IntegerWeight) for part in plain.modules())
    assert plain.state_dict().keys() == build("gpt2", **SHAPE).state_dict().keys()
    expected = model.stack.layers[0].attention.project.weight
    assert torch.equal(plain.stack.layers[0].attention.project.weight, expected)
    plain.train()
    with torch.no_grad():
        before, after = model(IDS).logits, plain.eval()(IDS).logits
    assert (after - before).norm() < 0.03 * before.norm()


def test_gradients_reach_the_embeddings_of_a_rounded_model() -> None:
    model, exact = quantized(LLAMA, "int8"), quantized(LLAMA, "int8")
    dequantize_weights(exact)
    gradients = []
    for decoder in (model, exact):
        x = decoder.embedding.tokens(IDS[0]).detach().requires_grad_()
        hidden, _ = decoder.stack(Ragged.from_list([x]))
        hidden.values.square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    model = load("house-gpt")
    small = copy.deepcopy(model)
    quantize_weights(small, "int8")
    return model, small


TEXT = ["The river froze in January, and the river broke its ice in March."]


def test_statistics_of_heads_stay_what_they_were(pair: tuple[Any, Any]) -> None:
    before, after = (lens.statistics(model, TEXT) for model in pair)
    differences = [
        abs(value - after["entropy"].of(head)) for head, value in before["entropy"].items()
    ]
    assert max(differences) < 0.15


def test_removed_heads_cost_what_they_did(pair: tuple[Any, Any]) -> None:
    heads = ["L0H1", "L1H0", "L2H3"]
    before, after = (lens.ablate(model, TEXT, heads=heads) for model in pair)
    assert before.baseline == pytest.approx(after.baseline, abs=0.1)


def test_gradients_of_the_lens_work(pair: tuple[Any, Any]) -> None:
    _, small = pair
    assert lens.importance(small, TEXT) is not None
    assert lens.attribute_logits(small, TEXT) is not None


def test_a_rounded_model_generates_text(pair: tuple[Any, Any]) -> None:
    [result] = generate(pair[1], ["The town of"], max_new_tokens=5, progress=False)
    assert result.text


def test_compensated_four_bits_lose_less_than_nearest_ones(pair: tuple[Any, Any]) -> None:
    house, _ = pair
    vocabulary = house.config.embedding.vocabulary
    model = build("gpt2", **{**SHAPE, "vocabulary": vocabulary}).eval()
    model.tokenizer = house.tokenizer
    inputs = text_inputs(model, built_in_texts("evaluation")[:2])
    assert inputs is not None
    losses = {}
    with torch.no_grad():
        before = model.run_inputs(inputs).hidden.values
        for method in ("nearest", "compensated"):
            small = copy.deepcopy(model)
            quantize_weights(small, "int4", method=method)  # type: ignore[arg-type]
            after = small.run_inputs(inputs).hidden.values
            losses[method] = float((after - before).norm())
    assert losses["compensated"] < 0.9 * losses["nearest"]


def test_rounding_twice_and_rounding_half_precision_are_refused() -> None:
    with pytest.raises(ConfigError, match="already has int8 weights"):
        quantize_weights(quantized("gpt2", "int8"), "int4")
    half = build("gpt2", **SHAPE, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"bfloat16.*float32 on the CPU"):
        quantize_weights(half, "int8")


def test_reshaping_a_rounded_model_is_refused_before_anything_is_measured() -> None:
    model = quantized("gpt2", "int8")
    refusal = r"int8 weights.*dequantize_weights"
    with pytest.raises(InputError, match=refusal):
        surgery.prune(model, "L0H1")
    with pytest.raises(InputError, match=refusal):
        surgery.add_gates(model, Gate(at="output"))
    # If the texts were read first, they would be refused.
    with pytest.raises(InputError, match=refusal):
        surgery.run_pruning(model, [["no token"]], surgery.PruningConfig(fraction=0.5))


def test_small_layers_keep_their_weights() -> None:
    shape = {**SHAPE, "width": 16, "heads": 2}
    model = build("gpt2", **shape).eval()
    quantize_weights(model, "int8")
    assert not any(isinstance(part, IntegerLinear) for part in model.modules())
    assert isinstance(model.embedding.tokens, IntegerEmbedding)
    assert weights_of(model) == "int8"
