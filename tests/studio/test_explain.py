"""The numbers of How attention works are the model's, from queries to the output of the layer."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.errors import InputError
from manyheads.mixers.linear_attention import LinearAttention
from manyheads.models.build import build
from manyheads.models.layer import Branch
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal, Window
from manyheads.parts.norms import RMSNorm
from manyheads.parts.positions import Alibi, Rotary, Shaw, T5Buckets
from manyheads.studio.explain import MAX_CHANNELS, MAX_TOKENS, explain_batch, explain_layer
from manyheads.studio.models import LoadedModel
from manyheads.studio.requests import RawImage
from tests.studio import models

TEXT = "The cat sat on the mat. The cat sat"
ATTENTIONS: dict[str, dict[str, Any]] = {
    "rotary": {"position": Rotary()},
    "half rotary, shared keys": {"position": Rotary(fraction=0.5), "kv_heads": 2},
    "uneven groups": {"kv_heads": (3, 1)},
    "alibi in a window": {"position": Alibi(), "mask": Window(2)},
    "buckets": {"position": T5Buckets(bidirectional=False)},
    "capped, with a sink": {"softcap": 5.0, "sink": "learned"},
    "scaled otherwise": {"scale": 0.7, "query_norm": RMSNorm(), "key_norm": RMSNorm()},
    "gated": {"gates": (Gate(at="output", per="channel"), Gate(at="value"))},
}


def with_attention(**fields: Any) -> LoadedModel:
    """A decoder whose attention has other parts."""
    model = models.learned(positions=64)
    config = model.config
    layers = []
    for layer in config.stack.layers:
        inner = replace(layer.attention.inner, **{"mask": Causal(), **fields})
        layers.append(replace(layer, attention=replace(layer.attention, inner=inner)))
    return with_layers(config, layers)


def with_layers(config: Any, layers: list[Any]) -> LoadedModel:
    model = build(replace(config, stack=replace(config.stack, layers=tuple(layers))), seed=1)
    for parameter in model.parameters():
        parameter.data.mul_(4.0).add_(0.01)
    model.tokenizer = models.tokenizer()
    return LoadedModel("tiny", model)


def explained(loaded: LoadedModel, layer: int = 1, head: int = 2) -> dict[str, Any]:
    return explain_layer(loaded, loaded.read_text(TEXT), layer, head)


def check_arithmetic(view: dict[str, Any]) -> None:
    """From products to what the head reads, as the page computes it."""
    part = view["attention"]
    query, key, products = (torch.tensor(part[name]) for name in ("query", "key", "products"))
    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(query @ key.T, products, **close)
    scores = products * part["scale"]
    if part["softcap"] is not None:
        scores = part["softcap"] * torch.tanh(scores / part["softcap"])
    if part["bias"] is not None:
        scores = scores + torch.tensor(part["bias"])
    torch.testing.assert_close(scores, torch.tensor(part["scores"]), **close)
    hidden = torch.tensor(part["visible"]) == 0
    scores = scores.masked_fill(hidden, -torch.inf)
    if part["sink"] is not None:
        scores = torch.cat((scores, torch.full((len(scores), 1), part["sink"])), dim=1)
    weights = scores.softmax(-1)[:, : len(products)]
    torch.testing.assert_close(weights, torch.tensor(part["weights"]), atol=1e-4, rtol=0.0)
    mixed = weights @ torch.tensor(part["value"])
    torch.testing.assert_close(mixed, torch.tensor(part["mixed"]), **close)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_scores_softmax_and_mix_give_what_the_module_mixes(name: str) -> None:
    view = explained(with_attention(**ATTENTIONS[name]))
    check_arithmetic(view)
    part, channels = view["attention"], view["channels"]
    if name == "gated":
        gate = torch.tensor(part["gates"][0]["values"])
        gated = torch.tensor(part["mixed"]) * gate
        torch.testing.assert_close(gated, torch.tensor(part["output"]), atol=1e-4, rtol=1e-4)
    before, written, after = (torch.tensor(view[each]) for each in ("before", "written", "after"))
    torch.testing.assert_close(before + written, after, atol=1e-4, rtol=1e-4)
    assert len(view["joined"]["heads"][0]) == 4
    assert len(view["joined"]["own"][0]) == channels == 32
    assert view["feedforward"]["after"] is not None


@pytest.mark.parametrize("model", [models.decoder, models.learned, models.encoder])
def test_every_family_is_explained_by_its_own_parts(model: Any) -> None:
    loaded = LoadedModel("tiny", model())
    view = explained(loaded)
    check_arithmetic(view)
    rotary = model is models.decoder
    assert view["attention"]["position"]["kind"] == ("Rotary" if rotary else None)
    assert view["embedding"]["position"] == (None if rotary else "Learned")
    assert view["norm"]["placement"] == ("PostNorm" if model is models.encoder else "PreNorm")
    assert view["attention"]["mask"]["name"] == ("Full" if model is models.encoder else "Causal")
    assert view["attention"]["key_heads"] == (2 if rotary else 4)
    parts = [view["embedding"][name] for name in ("token", "place")]
    assert (parts[1] is None) == rotary


def test_rotation_turns_each_pair_by_its_angle() -> None:
    view = explained(with_attention(position=Rotary()))
    part = view["attention"]
    plain, turned = (torch.tensor(part[name]) for name in ("plain_query", "query"))
    half = plain.shape[1] // 2
    angle = torch.tensor(part["position"]["angles"])
    first, second = plain[:, :half], plain[:, half:]
    expected = first * angle[:, :half].cos() - second * angle[:, :half].sin()
    torch.testing.assert_close(expected, turned[:, :half], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(plain, turned, atol=1e-2)


def test_position_vectors_of_values_are_part_of_the_mix() -> None:
    """Shaw's relative positions add to what is mixed, so that weights and values are not all."""
    view = explained(with_attention(position=Shaw(reach=4)))
    assert view["attention"]["position"]["kind"] == "Shaw"
    assert view["attention"]["bias"] is not None


def test_what_does_not_fit_on_the_page_is_cut_and_counted() -> None:
    loaded = LoadedModel("tiny", models.decoder(width=128, heads=4))
    text = loaded.read_text(TEXT * 8)
    view = explain_layer(loaded, text, 0, 0)
    assert view["total"] == len(text) > MAX_TOKENS == len(view["tokens"])
    assert len(view["before"][0]) == view["channels"] == MAX_CHANNELS < view["width"] == 128
    assert len(view["attention"]["query"][0]) == 32


def test_a_mixer_shows_its_weights() -> None:
    config = models.learned(positions=64).config
    first, *rest = config.stack.layers
    mixer = Branch(LinearAttention(width=32, heads=2))
    loaded = with_layers(config, [replace(first, attention=None, mixer=mixer), *rest])
    view = explained(loaded, layer=0, head=1)
    assert view["attention"] is None
    assert view["mixer"]["name"] == "LinearAttention"
    assert len(view["mixer"]["weights"]) == len(view["tokens"])
    assert [layer["kind"] for layer in view["layers"]] == ["mixer", "attention"]


def test_an_image_is_explained_patch_by_patch() -> None:
    loaded = LoadedModel("sees", models.vision())
    pixels = RawImage(width=32, height=32, data=bytes(range(256)) * 12)
    view = explain_layer(loaded, loaded.read_image(pixels), 0, 1)
    check_arithmetic(view)
    assert len(view["tokens"]) == 17
    assert view["ids"] is None
    assert view["start"] == 0
    large = RawImage(width=64, height=64, data=bytes(64 * 64 * 3))
    with pytest.raises(InputError, match="24 or fewer"):
        explain_layer(loaded, loaded.read_image(large), 0, 1)


def test_strides_find_the_numbers_of_a_head() -> None:
    loaded = LoadedModel("tiny", models.decoder())
    layout = explained(loaded, layer=0, head=0)["layout"]
    views = layout["views"]
    assert views["query"]["shape"] == [1, 10, 4, 8]
    assert views["query"]["stride"] == [10 * 64, 64, 8, 1]
    assert views["key"]["shape"] == [1, 10, 2, 8]
    assert views["key"]["offset"] == 32
    assert views["by_head"]["stride"] == [640, 8, 64, 1]
    assert views["copied"]["contiguous"]
    assert views["shared"]["shape"] == [1, 10, 2, 2, 8]
    assert views["shared"]["stride"][3] == 0
    assert sum(layout["parts"].values()) == views["joined"]["shape"][2]


def test_a_packed_batch_is_counted_and_changes_no_text() -> None:
    loaded = LoadedModel("tiny", models.decoder())
    texts = ["The cat sat.", "It rained in Paris and Rome.", "The dog"]
    view = explain_batch(loaded, texts, 0)
    lengths = view["lengths"]
    assert [len(tokens) for tokens in view["texts"]] == lengths
    assert view["offsets"] == [0, lengths[0], sum(lengths[:2]), sum(lengths)]
    cost = view["cost"]
    assert cost["padded_tokens"] == 3 * max(lengths)
    assert cost["packed_tokens"] == sum(lengths)
    assert cost["padded_scores"] == 12 * 3 * max(lengths) ** 2
    assert cost["packed_scores"] == 12 * sum(length**2 for length in lengths)
    assert view["difference"] <= 1e-4 * max(1, view["largest"])
    assert view["visible"][0][0] == [1, *[0] * (lengths[0] - 1)]
    with pytest.raises(InputError, match="1 to 3"):
        explain_batch(loaded, [*texts, "more"], 0)
