"""Recipes: each family is made of what its paper says."""

import pytest
import torch

from manyheads.models.build import build, get_config, get_recipe, list_configs
from manyheads.models.decoder import DecoderConfig
from manyheads.models.encoder import EncoderConfig
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout
from manyheads.models.recipes import RECIPES, bert, gpt2, llama, modernbert, vit
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.vision import VisionConfig
from manyheads.parts.experts import Experts
from manyheads.parts.feedforward import MLP, GeGLU, SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal, Full, Window
from manyheads.parts.norms import LayerNorm, NoNorm, PostNorm, PreNorm, RMSNorm
from manyheads.parts.positions import Learned, NoPosition, Rotary, Sinusoidal

KINDS = {
    "tiny_encoder": EncoderConfig,
    "transformer": Seq2SeqConfig,
    "bert": EncoderConfig,
    "modernbert": EncoderConfig,
    "gpt2": DecoderConfig,
    "llama": DecoderConfig,
    "vit": VisionConfig,
}
# What each recipe must be told: the smallest numbers that make a model.
TINY = {
    "tiny_encoder": {"width": 16, "heads": 2, "hidden": 8, "vocabulary": 9},
    "transformer": {"width": 16, "heads": 2, "hidden": 8, "layers": 1, "vocabulary": 9},
    "bert": {"width": 16, "heads": 2, "hidden": 8, "layers": 1, "vocabulary": 9, "positions": 8},
    "modernbert": {"width": 16, "heads": 2, "hidden": 8, "layers": 2, "vocabulary": 9},
    "gpt2": {"width": 16, "heads": 2, "layers": 1, "vocabulary": 9, "positions": 8},
    "llama": {
        "width": 16,
        "heads": 2,
        "kv_heads": 1,
        "head_size": 8,
        "hidden": 8,
        "layers": 1,
        "vocabulary": 9,
    },
    "vit": {"width": 16, "heads": 2, "hidden": 8, "layers": 1, "image": 8, "patch": 4},
}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_its_kind_of_model_and_runs(name: str) -> None:
    config = RECIPES[name](**TINY[name])
    assert type(config) is KINDS[name]
    model, text = build(config, seed=0), torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        match KINDS[name].__name__:
            case "VisionConfig":
                output = model(torch.zeros(1, 3, 8, 8))
            case "Seq2SeqConfig":
                output = model(text, text)
            case _:
                output = model(text)
    assert output.hidden.isfinite().all()


@pytest.mark.parametrize("name", list_configs())
def test_configs_are_values(name: str) -> None:
    assert get_config(name) == get_config(name)
    assert hash(get_config(name)) == hash(get_config(name))
    changed = {"width": 256, "heads": 4}
    if get_recipe(name) is RECIPES["llama"]:
        changed = {"layers": 1}
    assert get_config(name, **changed) != get_config(name)


def test_bert_norms_after_and_learns_its_positions() -> None:
    config = bert(**TINY["bert"])
    (layer,) = config.stack.layers
    norm = LayerNorm(eps=1e-12)
    assert layer.attention.norm == layer.feedforward.norm == PostNorm(norm)
    assert config.embedding.position == Learned(count=8)
    assert (config.embedding.types, config.embedding.norm) == (2, norm)
    assert config.stack.final_norm == NoNorm()
    assert isinstance(layer.feedforward.inner, MLP)
    assert layer.feedforward.inner.activation == "gelu"
    assert layer.attention.inner.bias == "all"
    head = config.readout
    assert isinstance(head, LanguageHead)
    assert head.tied
    assert head.bias
    assert head.transform.norm == norm


def test_bert_takes_another_readout() -> None:
    assert bert(**TINY["bert"], readout=ClassHead(classes=3)).readout == ClassHead(classes=3)
    assert bert(**TINY["bert"], readout=NoReadout()).readout == NoReadout()


@pytest.mark.parametrize("every", [1, 2, 3])
def test_modernbert_sees_all_every_so_many_layers_and_else_a_window(every: int) -> None:
    config = modernbert(**TINY["modernbert"] | {"layers": 7}, global_every=every)
    for index, layer in enumerate(config.stack.layers):
        attention = layer.attention.inner
        whole = index % every == 0
        assert attention.mask == (Full() if whole else Window(64, 64))
        assert attention.position == Rotary(theta=160_000.0 if whole else 10_000.0)
        assert layer.attention.norm == PreNorm(NoNorm() if index == 0 else LayerNorm(bias=False))
        assert isinstance(layer.feedforward.inner, GeGLU)
        assert attention.bias == "none"
    assert config.embedding.norm == config.stack.final_norm == LayerNorm(bias=False)
    assert config.embedding.position == NoPosition()


def test_modernbert_has_no_bias_but_the_readouts() -> None:
    model = build(modernbert(**TINY["modernbert"]), device="meta")
    biases = [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert biases == ["readout.bias"]


def test_gpt2_norms_before_and_after_the_last_layer() -> None:
    config = gpt2(**TINY["gpt2"])
    (layer,) = config.stack.layers
    assert layer.attention.norm == layer.feedforward.norm == PreNorm(LayerNorm())
    assert config.stack.final_norm == LayerNorm()
    assert layer.attention.inner.mask == Causal()
    assert layer.feedforward.inner.hidden == 4 * config.stack.width
    assert layer.feedforward.inner.activation == "gelu_tanh"
    assert config.init.scaled_outputs


def test_llama_is_rotary_and_swiglu() -> None:
    config = llama(**TINY["llama"])
    (layer,) = config.stack.layers
    attention = layer.attention.inner
    assert attention.position == Rotary(theta=500_000.0)
    assert attention.mask == Causal()
    assert (attention.key_heads, attention.gates, attention.query_norm) == (1, (), NoNorm())
    assert layer.feedforward.inner == SwiGLU(width=16, hidden=8)
    assert config.stack.final_norm == layer.attention.norm.norm == RMSNorm(eps=1e-5)


@pytest.mark.parametrize("per", ["head", "channel"])
def test_llama_can_gate_its_outputs_and_norm_its_heads(per: str) -> None:
    config = llama(**TINY["llama"], gate=per, norm_heads=True, eps=1e-6, tied=False)
    attention = config.stack.layers[0].attention.inner
    assert attention.gates == (Gate(at="output", per=per),)
    assert attention.query_norm == attention.key_norm == RMSNorm(eps=1e-6)
    assert not config.readout.tied


def test_llama_can_choose_among_experts() -> None:
    config = llama(**TINY["llama"], experts=4, top_k=2)
    experts = config.stack.layers[0].feedforward.inner
    assert experts == Experts(width=16, hidden=8, count=4, top_k=2)


def test_the_transformer_of_2017_adds_sines_to_scaled_words() -> None:
    config = get_config("transformer-base")
    assert config.embedding.position == Sinusoidal(layout="interleaved")
    assert config.embedding.scale == 512**0.5
    reads, writes = config.encoder.layers[0], config.decoder.layers[0]
    assert (reads.attention.inner.mask, writes.attention.inner.mask) == (Full(), Causal())
    assert reads.cross is None
    assert writes.cross.inner.keys_from == "memory"
    assert writes.attention.norm == writes.cross.norm == writes.feedforward.norm == PostNorm()
    assert writes.feedforward.inner.activation == "relu"
    assert config.shared
    assert config.readout.tied
    assert config.init.draw == "xavier"


def test_vit_reads_classes_off_its_first_token() -> None:
    config = vit(**TINY["vit"], classes=7)
    assert config.readout == ClassHead(classes=7, pool="first")
    assert (config.patches.size, config.patches.grid.rows) == (4, 2)
    assert config.stack.final_norm == LayerNorm(eps=1e-12)
    assert vit(**TINY["vit"], classes=0).readout == NoReadout()
