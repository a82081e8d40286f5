"""Whole models on CUDA: compiled without graph breaks, cached, in two precisions."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from manyheads import AttentionConfig, DecoderConfig, EncoderConfig, Ragged, build, get_config
from manyheads.attention import Attention
from manyheads.models import Branch, Embedding, LanguageHead, LayerConfig, StackConfig
from manyheads.parts import (
    Alibi,
    Causal,
    Gate,
    GlobalTokens,
    NoPosition,
    Rotary,
    SwiGLU,
    T5Buckets,
    Window,
)

SMALL = {"layers": 2, "vocabulary": 1000}
LENGTHS = (700, 1, 0, 300, 1100)


def tokens(*lengths: int, seed: int = 0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    each = [torch.randint(0, 1000, (length,), generator=generator) for length in lengths]
    return Ragged.from_list(each).to("cuda")


def difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    result, expected = result.double(), expected.double()
    return float((result - expected).norm() / expected.norm())


def with_position(position: object, mask: object, **more: object) -> DecoderConfig | EncoderConfig:
    choices = {"kv_heads": 2, "position": position, "mask": mask} | more
    attention = AttentionConfig(width=256, heads=4, **choices)
    layer = LayerConfig(
        attention=Branch(attention), feedforward=Branch(SwiGLU(width=256, hidden=512))
    )
    config = DecoderConfig if mask == Causal() else EncoderConfig
    return config(
        embedding=Embedding(vocabulary=1000, width=256),
        stack=StackConfig(width=256, layers=(layer, layer)),
        readout=LanguageHead(),
    )


MODELS = {
    "modernbert": get_config("modernbert-base", **SMALL),
    "llama": get_config("llama-1b-shape", **SMALL),
    "gated": get_config("gated-1.7b", **SMALL),
    "alibi": with_position(Alibi(), Causal()),
    "t5": with_position(T5Buckets(), Window(2000, 2000)),
    "longformer": with_position(NoPosition(), Window(64, 64) | GlobalTokens((0,))),
    "uneven": with_position(Rotary(), Causal(), kv_heads=(3, 1)),
    "uneven alibi": with_position(Alibi(), Causal(), kv_heads=(3, 1)),
    "a gate a head": with_position(Rotary(), Causal(), gates=(Gate(at="output"),), bias="all"),
}


@pytest.mark.parametrize("name", MODELS)
def test_compiled_model_equals_the_eager_one_without_graph_breaks(name: str) -> None:
    model = build(MODELS[name], seed=0, device="cuda")
    batch = tokens(*LENGTHS)
    with torch.no_grad():
        expected = model(batch).logits.values
        result = torch.compile(model, fullgraph=True)(batch).logits.values
    assert difference(result, expected) < 2e-5


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        *(("llama", None), ("t5", None), ("uneven", None), ("a gate a head", None)),
        # Compiled for any length, as they are once another one comes.
        *(("t5", True), ("longformer", True)),
    ],
)
def test_compiled_model_has_the_gradients_of_the_eager_one(name: str, dynamic: bool | None) -> None:
    model = build(MODELS[name], seed=0, device="cuda")
    batch = tokens(*LENGTHS)
    gradients = []
    torch.compiler.reset()
    for function in (model, torch.compile(model, fullgraph=True, dynamic=dynamic)):
        loss = function(batch).logits.values.square().mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for expected, result in zip(*gradients, strict=True):
        assert difference(result, expected) < 1e-3


@pytest.mark.parametrize("name", ["modernbert", "llama", "gated", "uneven", "a gate a head"])
def test_half_precision_stays_near_single(name: str) -> None:
    batch = tokens(*LENGTHS)
    single = build(MODELS[name], seed=0, device="cuda")
    half = build(MODELS[name], seed=0, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        error = difference(half(batch).logits.values, single(batch).logits.values)
    assert error < 3e-2
    assert "varlen" in str(half.explain_kernels(batch))


def test_a_model_is_not_compiled_anew_for_every_batch() -> None:
    model = build(MODELS["modernbert"], seed=0, device="cuda", dtype=torch.bfloat16)
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for seed, lengths in enumerate(
            [
                (300, 40),
                (7, 500, 260),
                (900, 900, 33),
                (64, 65, 66, 400),
                (70,) * 9 + (80,),
                (1, 2000),
            ]
        ):
            batch = tokens(*lengths, seed=seed)
            error = difference(compiled(batch).logits.values, model(batch).logits.values)
            assert error < 2e-2
    # The first batch is compiled as it is; the next ones show which numbers change.
    assert counter.frame_count <= 4


def test_experts_agree_compiled_and_eager() -> None:
    config = get_config("moe-15b-a2.5b", layers=1, vocabulary=1000)
    model = build(config, seed=0, device="cuda", dtype=torch.bfloat16)
    batch = tokens(300, 20)
    with torch.no_grad():
        expected = model(batch).logits.values
        result = torch.compile(model, fullgraph=True)(batch).logits.values
        single = model.float()(batch).logits.values
    # Rounding sends a few tokens to another expert, so that only most of them agree.
    for one, other in ((result, expected), (expected, single)):
        off = (one.float() - other.float()).norm(dim=-1) / other.float().norm(dim=-1)
        assert off.median() < 2e-2


def test_images_of_several_sizes_agree_with_single_precision() -> None:
    config = get_config("vit-b16", layers=2)
    config = replace(config, init=replace(config.init, zero_readout=False))
    model = build(config, seed=0, device="cuda")
    images = [torch.randn(3, *size, device="cuda") for size in ((224, 224), (384, 224), (32, 48))]
    with torch.no_grad():
        together = model(images).logits
        alone = torch.cat([model(image[None]).logits for image in images])
        compiled = torch.compile(model, fullgraph=True)(torch.stack(images[:1])).logits
    assert difference(together, alone) < 1e-5
    assert difference(compiled, alone[:1]) < 1e-5


@pytest.mark.parametrize("name", ["llama", "gated", "alibi"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_with_the_cache_equals_the_whole_forward(name: str, dtype: torch.dtype) -> None:
    model = build(MODELS[name], seed=0, device="cuda", dtype=dtype)
    whole = tokens(40, 17)
    with torch.no_grad():
        expected = model(whole).logits
        cache = model.new_cache()
        model(tokens_until(whole, (30, 9)), cache=cache)
        for step in range(8):
            ends = (30 + step, 9 + step)
            ids = torch.stack([whole.of(each)[end] for each, end in enumerate(ends)])
            result = model(ids[:, None], cache=cache).logits[:, 0]
            wanted = torch.stack([expected.of(each)[end] for each, end in enumerate(ends)])
            assert difference(result, wanted) < (1e-5 if dtype == torch.float32 else 3e-2)


def tokens_until(batch: Ragged, ends: tuple[int, ...]) -> Ragged:
    return Ragged.from_list([batch.of(each)[:end] for each, end in enumerate(ends)])


def test_dropped_attention_keeps_its_mean() -> None:
    config = AttentionConfig(width=256, heads=4, mask=Causal(), dropout=0.3)
    layer = Attention(config).to("cuda", torch.bfloat16)
    x = Ragged.from_list([torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)])
    with torch.no_grad():
        expected = layer.eval()(x).values.float()
        layer.train()
        result = torch.stack([layer(x).values.float() for _ in range(400)]).mean(0)
    assert difference(result, expected) < 0.1
