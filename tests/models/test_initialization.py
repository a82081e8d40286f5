"""Fresh weights are drawn as each family draws them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from manyheads.attention import Attention, AttentionConfig
from manyheads.checkpoints.families import FAMILIES
from manyheads.checkpoints.folder import save
from manyheads.models.build import build, get_config
from manyheads.models.decoder import DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead, ReadoutTransform
from manyheads.models.recipes import RECIPES
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.experts import Experts, MixtureOfExperts
from manyheads.parts.feedforward import MLP, FeedForward, SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm, Normalize, PreNorm, RMSNorm
from manyheads.parts.positions import Learned

WIDTH, STD, LAYERS = 96, 0.05, 8
GATED = AttentionConfig(
    width=WIDTH,
    heads=4,
    kv_heads=2,
    mask=Causal(),
    bias="all",
    gates=(Gate(at="output", per="channel"),),
    query_norm=RMSNorm(centered=True),
)
EXPERTS = Experts(width=WIDTH, hidden=64, count=4, top_k=2, shared=64)
MIXED = (
    LayerConfig(attention=Branch(GATED), feedforward=Branch(EXPERTS)),
    LayerConfig(
        attention=Branch(GATED, PreNorm(LayerNorm(centered=True))),
        feedforward=Branch(SwiGLU(width=WIDTH, hidden=128, bias=True)),
    ),
)


def model(**init: Any) -> Any:
    config = DecoderConfig(
        embedding=Embedding(
            vocabulary=200, width=WIDTH, position=Learned(count=100), types=30, norm=LayerNorm()
        ),
        stack=StackConfig(width=WIDTH, layers=MIXED * (LAYERS // 2), final_norm=RMSNorm()),
        readout=LanguageHead(tied=False, transform=ReadoutTransform(), bias=True),
        init=Initialization(**{"std": STD} | init),
    )
    return build(config, seed=0).requires_grad_(False)


def outputs(module: nn.Module) -> Iterator[Tensor]:
    """The projections that write to the residual stream."""
    for part in module.modules():
        if isinstance(part, Attention):
            yield part.output.weight
        elif isinstance(part, FeedForward):
            yield part.contract.weight
        elif isinstance(part, MixtureOfExperts):
            yield part.contract


def inputs(module: nn.Module) -> Iterator[Tensor]:
    """The other projections."""
    for part in module.modules():
        if isinstance(part, Attention):
            yield from part.projections().values()
        elif isinstance(part, FeedForward):
            yield part.expand.weight
        elif isinstance(part, MixtureOfExperts):
            yield part.expand
            yield part.router.weight


def tables(module: Any) -> list[Tensor]:
    embedding = module.embedding
    return [embedding.tokens.weight, embedding.positions.weight, embedding.types.weight]


def test_normal_weights_have_the_deviation_everywhere() -> None:
    drawn = model()
    weights = [*inputs(drawn), *outputs(drawn), *tables(drawn)]
    weights += [drawn.readout.weight, drawn.readout.transform.dense.weight]
    assert len(weights) > 60
    for weight in weights:
        assert float(weight.std()) == pytest.approx(STD, rel=0.15)
        assert abs(float(weight.mean())) < STD / 4
    assert max(float(weight.abs().max()) for weight in weights) > 3 * STD


def test_truncated_weights_end_at_two_deviations() -> None:
    drawn = model(draw="truncated")
    weights = [*inputs(drawn), *outputs(drawn), *tables(drawn), drawn.readout.weight]
    for weight in weights:
        assert float(weight.abs().max()) <= 2 * STD
        # A normal cut at two deviations has 0.88 of its deviation left.
        assert float(weight.std()) == pytest.approx(0.88 * STD, rel=0.15)
    assert max(float(weight.abs().max()) for weight in weights) > 1.95 * STD


def bound(out: int, into: int) -> float:
    return math.sqrt(6 / (out + into))


def test_xavier_draws_query_key_value_and_gate_each_on_its_own() -> None:
    for layer in model(draw="xavier").stack.layers:
        projections = layer.attention.projections()
        assert set(projections) == {"query", "key", "value", "gate_output"}
        for rows in (*projections.values(), layer.attention.output.weight):
            assert rows.shape[0] in (WIDTH, WIDTH // 2)
            largest = float(rows.abs().max())
            assert 0.97 * bound(*rows.shape) < largest <= bound(*rows.shape)


def test_xavier_draws_every_expert_on_its_own() -> None:
    for layer in model(draw="xavier").stack.layers[::2]:
        for experts in (layer.feedforward.expand, layer.feedforward.contract):
            for expert in experts:
                largest = float(expert.abs().max())
                assert 0.97 * bound(*expert.shape) < largest <= bound(*expert.shape)


def test_xavier_embeddings_have_the_deviation_of_2017() -> None:
    for table in tables(model(draw="xavier")):
        assert float(table.std()) == pytest.approx(WIDTH**-0.5, rel=0.1)


@pytest.mark.parametrize("draw", ["normal", "truncated", "xavier"])
def test_scaled_outputs_are_divided_by_the_root_of_twice_the_layers(
    draw: Literal["normal", "truncated", "xavier"],
) -> None:
    plain, scaled = model(draw=draw), model(draw=draw, scaled_outputs=True)
    shrink = 1 / math.sqrt(2 * LAYERS)
    # The same seed draws the same numbers, so that only the scale differs.
    for before, after in zip(outputs(plain), outputs(scaled), strict=True):
        torch.testing.assert_close(after, before * shrink)
    for before, after in zip(inputs(plain), inputs(scaled), strict=True):
        assert torch.equal(after, before)
    # ModernBERT's language head is scaled too.
    factor = shrink if draw == "truncated" else 1.0
    torch.testing.assert_close(scaled.readout.weight, plain.readout.weight * factor)


def test_each_stack_of_a_translator_is_scaled_by_its_own_depth() -> None:
    def stack(layers: int, cross: bool) -> StackConfig:
        memory = AttentionConfig(width=WIDTH, heads=4, keys_from="memory")
        layer = LayerConfig(
            attention=Branch(AttentionConfig(width=WIDTH, heads=4)),
            cross=Branch(memory) if cross else None,
            feedforward=Branch(MLP(width=WIDTH, hidden=128)),
        )
        return StackConfig(width=WIDTH, layers=(layer,) * layers)

    drawn = build(
        Seq2SeqConfig(
            embedding=Embedding(vocabulary=20, width=WIDTH),
            encoder=stack(2, cross=False),
            decoder=stack(8, cross=True),
            init=Initialization(std=STD, scaled_outputs=True),
        ),
        seed=0,
    ).requires_grad_(False)
    for part, layers in ((drawn.encoder, 2), (drawn.decoder, 8)):
        weights = list(outputs(part))
        assert len(weights) == layers * (3 if layers == 8 else 2)
        for weight in weights:
            assert float(weight.std()) == pytest.approx(STD / math.sqrt(2 * layers), rel=0.1)


@pytest.mark.parametrize("draw", ["normal", "truncated", "xavier"])
def test_biases_start_at_zero_and_norms_at_one(
    draw: Literal["normal", "truncated", "xavier"],
) -> None:
    drawn = model(draw=draw)
    biases = [value for name, value in drawn.named_parameters() if name.endswith("bias")]
    assert len(biases) > 20
    assert not any(bias.any() for bias in biases)
    norms = [part for part in drawn.modules() if isinstance(part, Normalize)]
    assert {norm.config.centered for norm in norms} == {True, False}
    for norm in norms:
        assert (norm.weight == (0.0 if norm.config.centered else 1.0)).all()


def test_a_zero_readout_starts_without_an_opinion() -> None:
    drawn = model(zero_readout=True)
    assert not drawn.readout.weight.any()
    assert drawn.readout.transform.dense.weight.any()


# Tiny models of `transformers`: width 32, so that a tensor has enough weights to measure.
SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.03,
    "pad_token_id": None,
}
SIDES = {
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
}
GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 40, "vocab_size": 300}
T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 300}
VIT = SMALL | {"image_size": 24, "patch_size": 4, "num_channels": 1}
PEERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", SMALL),
    "bert, classes": ("BertForSequenceClassification", SMALL),
    "roberta": ("RobertaForMaskedLM", SMALL | {"pad_token_id": 1}),
    "modernbert": ("ModernBertForMaskedLM", SMALL),
    "modernbert, classes": ("ModernBertForSequenceClassification", SMALL),
    "gpt2": ("GPT2LMHeadModel", GPT2 | {"initializer_range": 0.03}),
    "llama": ("LlamaForCausalLM", SMALL),
    "mistral": ("MistralForCausalLM", SMALL | {"num_key_value_heads": 2}),
    "qwen2": ("Qwen2ForCausalLM", SMALL | {"num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", SMALL | {"num_key_value_heads": 2, "head_dim": 8}),
    "mixtral": ("MixtralForCausalLM", SMALL | {"num_key_value_heads": 2, "num_local_experts": 4}),
    "qwen3 experts": (
        "Qwen3MoeForCausalLM",
        SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    ),
    "vit": ("ViTForImageClassification", VIT),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 1.1": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "t5, encoder": ("T5EncoderModel", T5),
    "marian": (
        "MarianMTModel",
        SIDES | {"d_model": 32, "vocab_size": 300, "pad_token_id": 299, "init_std": 0.03},
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_fresh_weights_have_the_deviations_of_transformers(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    kind = getattr(transformers, PEERS[name][0])
    torch.manual_seed(0)
    peer = kind(kind.config_class(**PEERS[name][1]))
    described = peer.config.to_dict() | {"architectures": [PEERS[name][0]]}
    ours = build(FAMILIES[described["model_type"]].read_config(described), seed=1)
    save(ours, tmp_path / "ours")
    peer.save_pretrained(tmp_path / "theirs")
    result, expected = (
        load_file(tmp_path / side / "model.safetensors") for side in ("ours", "theirs")
    )
    compared = result.keys() & expected.keys()
    # A T5 of transformers writes no head of its own, untied or not.
    assert result.keys() - expected.keys() <= {"lm_head.weight"}
    assert len(compared) > 10
    for each in compared:
        assert_drawn_alike(each, result[each], expected[each])


def assert_drawn_alike(name: str, result: Tensor, expected: Tensor) -> None:
    """Both constant and equal, or both random with one deviation."""
    if float(expected.std()) == 0.0:
        assert torch.equal(result, expected), name
        return
    # Five standard errors of the deviation of so many normal numbers, of both.
    error = 5 / math.sqrt(min(result.numel(), expected.numel()))
    # Rows of padding are zero there, which changes a deviation by one in a few hundred.
    assert float(result.std()) == pytest.approx(float(expected.std()), rel=error + 0.01), name
    assert abs(float(result.mean())) < error * float(expected.std()), name


def test_recipes_draw_as_their_families() -> None:
    shape: dict[str, Any] = {"width": 32, "heads": 4, "layers": 2}
    for name in ("bert", "modernbert", "vit"):
        described: dict[str, Any] = {
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "hidden_size": 32,
        }
        described |= {"intermediate_size": 48, "vocab_size": 99, "max_position_embeddings": 64}
        described |= {"model_type": name}
        family = FAMILIES[name].read_config(described | {"architectures": [PEERS[name][0]]})
        assert RECIPES[name](**shape, hidden=48).init == family.init
    assert RECIPES["gpt2"](**shape).init == FAMILIES["gpt2"].read_config(GPT2).init
    llama = {"kv_heads": 2, "head_size": 8, "hidden": 48, "vocabulary": 99}
    assert RECIPES["llama"](**shape, **llama).init == Initialization()


def test_modernbert_is_truncated_and_scaled() -> None:
    shape = get_config("modernbert-base", width=WIDTH, heads=4, hidden=64, layers=6)
    drawn = build(shape, seed=0).requires_grad_(False)
    for weight in outputs(drawn):
        assert float(weight.abs().max()) <= 0.04 / math.sqrt(12)
    for weight in inputs(drawn):
        assert 0.038 < float(weight.abs().max()) <= 0.04
