"""CUDA graphs give the logits of eager steps, for every decoder that can be captured."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads import (
    AttentionConfig,
    DecoderConfig,
    DynamicCache,
    Ragged,
    Sample,
    build,
    generate,
    get_config,
)
from manyheads.decoding import token_source
from manyheads.decoding.steps import triton_step
from manyheads.decoding.steps.cached import CachedSteps
from manyheads.decoding.steps.cuda_graph import cannot, cuda_graph_steps
from manyheads.mixers.build import MIXERS
from manyheads.models import Branch, Embedding, LanguageHead, LayerConfig, StackConfig
from manyheads.models.decoder import Decoder
from manyheads.parts import (
    Alibi,
    Causal,
    DynamicScaling,
    Learned,
    NoPosition,
    OutputNorm,
    PreNorm,
    RMSNorm,
    Rotary,
    SandwichNorm,
    SwiGLU,
    Window,
)
from manyheads.parts.experts import ClampedSwiGLU, Experts
from tests.mixers.mixer_configs import CAUSAL

WIDTH, VOCABULARY = 256, 500
NORM = RMSNorm(eps=1e-6)


def config(**changes: object) -> DecoderConfig:
    choices = {"position": Rotary(), "mask": Causal(), "kv_heads": 2} | changes
    position = choices.pop("embedding_position", NoPosition())
    placement, residual = choices.pop("norm", PreNorm(NORM)), choices.pop("residual", "serial")
    feedforward = choices.pop("feedforward", SwiGLU(width=WIDTH, hidden=700))
    cap = choices.get("softcap", "none")
    attention = AttentionConfig(width=WIDTH, heads=4, **choices)
    layer = LayerConfig(
        attention=Branch(attention, placement),
        feedforward=Branch(feedforward, placement),
        residual=residual,
    )
    return DecoderConfig(
        embedding=Embedding(vocabulary=VOCABULARY, width=WIDTH, position=position),
        stack=StackConfig(width=WIDTH, layers=(layer,) * 3, final_norm=NORM),
        readout=LanguageHead(softcap=cap),
    )


LLAMA_LIKE = {
    "llama": config(),
    "mqa": config(kv_heads=1),
    "qwen2": config(bias="inputs"),
    "qwen3": config(query_norm=NORM, key_norm=NORM, head_size=128),
    "centered": config(query_norm=RMSNorm(centered=True), key_norm=RMSNorm(centered=True)),
    "small heads": config(head_size=32),
    "no position": config(position=NoPosition(), bias="all"),
    "window": config(mask=Window(20)),
}
OTHERS = {
    "alibi": config(position=Alibi()),
    "alibi in a window": config(position=Alibi(), mask=Window(20)),
    "learned": config(position=NoPosition(), embedding_position=Learned(count=200)),
    "sink": config(sink="learned"),
    # For PyTorch's flash attention: our kernels take no heads of this size.
    "heads of 96": config(head_size=96),
    "uneven": config(kv_heads=(3, 1)),
    "parallel": config(residual="parallel", position=Rotary(fraction=0.5)),
    "normed outputs": config(
        norm=OutputNorm(NORM), query_norm=NORM, key_norm=NORM, norm_span="heads"
    ),
    "capped in a window": config(softcap=5.0, mask=Window(20), norm=SandwichNorm(NORM)),
    "dynamic": config(position=Rotary(scaling=DynamicScaling(factor=2.0, original_length=30))),
    "gated": get_config("gated-1.7b", layers=2, vocabulary=VOCABULARY),
    "experts": config(feedforward=Experts(width=WIDTH, hidden=300, count=12, top_k=3, shared=64)),
    "experts with biases": config(
        feedforward=Experts(
            width=WIDTH, hidden=128, count=5, top_k=2, bias=True, gating=ClampedSwiGLU()
        )
    ),
}


RECURRENT = [name for name, mixer in CAUSAL.items() if MIXERS[type(mixer)].carries_state]


def ids(*lengths: int) -> Ragged:
    draw = torch.Generator().manual_seed(0)
    each = [torch.randint(VOCABULARY, (length,), generator=draw) for length in lengths]
    return Ragged.from_list(each).to("cuda")


def worst(model: Decoder, prompts: Ragged, steps: int = 40) -> float:
    """The largest difference of a step's logits, as a fraction of their norm."""
    fixed, eager = cuda_graph_steps(model, len(prompts), 100), CachedSteps(model, DynamicCache())
    # What a recorded program writes may be overwritten by the next one, as they share their memory.
    pairs = [(fixed.start(prompts).clone(), eager.start(prompts))]
    draw = torch.Generator().manual_seed(1)
    for step in range(steps):
        new = torch.randint(VOCABULARY, (len(prompts),), generator=draw).cuda()
        pairs.append((fixed.next(new).clone(), eager.next(new)))
        if step == 20 and len(prompts) > 2:
            fixed.select([2, 0, 1])
            eager.select([2, 0, 1])
    return max(
        float((one.float() - other.float()).norm() / other.float().norm()) for one, other in pairs
    )


@pytest.mark.parametrize("name", [*LLAMA_LIKE, *OTHERS])
def test_graphs_give_the_logits_of_eager_steps(name: str) -> None:
    # Where two experts are as good as equal, rounding sends a token to the other one.
    half = 1e-1 if name.startswith("experts") else 3e-2
    for dtype, limit in ((torch.float32, 1e-4), (torch.bfloat16, half)):
        model = build((LLAMA_LIKE | OTHERS)[name], seed=0, device="cuda", dtype=dtype).eval()
        assert worst(model, ids(30, 1, 50)) < limit
        # Once more, with the graph that exists.
        assert worst(model, ids(7, 44, 2)) < limit


def hybrid(name: str) -> DecoderConfig:
    """A decoder whose first layer is a mixer and whose second attends."""
    stack = config().stack
    mixer = LayerConfig(
        attention=None,
        mixer=Branch(replace(CAUSAL[name], width=WIDTH), PreNorm(NORM)),
        feedforward=stack.layers[0].feedforward,
    )
    return replace(config(), stack=replace(stack, layers=(mixer, stack.layers[0])))


@pytest.mark.parametrize("name", RECURRENT)
def test_graphs_give_the_logits_of_eager_steps_with_mixers(name: str) -> None:
    for alone in (False, True):
        changed = hybrid(name)
        if alone:
            changed = replace(
                changed, stack=replace(changed.stack, layers=changed.stack.layers[:1])
            )
        model = build(changed, seed=0, device="cuda").eval()
        for prompts in (ids(30, 1, 50), ids(7, 44, 2)):
            assert worst(model, prompts) < 1e-4


def test_a_mixer_that_keeps_every_token_is_not_recorded() -> None:
    model = build(hybrid("lsh"), seed=0, device="cuda").eval()
    assert "with every token" in str(cannot(model, torch.device("cuda")))


def test_a_batch_that_shrinks_goes_on_with_smaller_programs() -> None:
    for name in ("llama", "sink"):
        model = build((LLAMA_LIKE | OTHERS)[name], seed=0, device="cuda").eval()
        prompts = ids(*range(3, 40, 4))
        fixed, eager = (
            cuda_graph_steps(model, len(prompts), 100),
            CachedSteps(model, DynamicCache()),
        )
        fixed.start(prompts)
        eager.start(prompts)
        count, draw = len(prompts), torch.Generator().manual_seed(1)
        for keep in ((9, 1, 2, 5), (3, 0, 1), (2,)):
            for _ in range(3):
                new = torch.randint(VOCABULARY, (count,), generator=draw).cuda()
                torch.testing.assert_close(fixed.next(new), eager.next(new), rtol=1e-3, atol=1e-4)
            fixed.select(list(keep))
            eager.select(list(keep))
            count = len(keep)
        assert sorted(rows for rows, _ in fixed.programs) == [4, 16]
        assert cuda_graph_steps(model, 3, 60) is fixed


@pytest.mark.parametrize(
    "name", ["qwen3", "parallel", "normed outputs", "gated", "sink", "experts with biases"]
)
def test_a_recorded_program_reads_prompts_as_the_model_does(name: str) -> None:
    model = build((LLAMA_LIKE | OTHERS)[name], seed=0, device="cuda", dtype=torch.bfloat16).eval()
    limit = 1e-1 if name.startswith("experts") else 3e-2
    for lengths in ((30, 17, 9), (29, 32, 1), (21, 3, 31), (32, 32, 5)):
        assert worst(model, ids(*lengths), steps=5) < limit
    assert list(cuda_graph_steps(model, 3, 100).readers) == [(4, 32)]


# Several programs share the keys of a head, or one reads them all.
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_one_sequence_takes_the_triton_step_and_gives_the_same(
    name: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shared:
        monkeypatch.setattr(triton_step, "LONG_CAPACITY", 1)
    model = build(LLAMA_LIKE[name], seed=0, device="cuda", dtype=torch.bfloat16).eval()
    assert triton_step.cannot(model) is None
    for length in (30, 1, 50):
        assert worst(model, ids(length)) < 2e-2
    truth = build(LLAMA_LIKE[name], seed=0, device="cuda").eval()
    truth.load_state_dict(model.state_dict())
    text = ids(50)
    steps = cuda_graph_steps(model, 1, 100)
    steps.start(text)
    new = torch.tensor([7], device="cuda")
    result = steps.next(new).float()
    with torch.no_grad():
        whole = torch.cat((text.values, new))[None]
        expected = truth(whole).logits[:, -1]
    assert float((result - expected).norm() / expected.norm()) < 2e-2


@pytest.mark.parametrize("name", OTHERS)
def test_other_decoders_do_not_take_the_triton_step(name: str) -> None:
    model = build(OTHERS[name], seed=0, device="cuda", dtype=torch.bfloat16)
    assert triton_step.cannot(model) is not None


def spread() -> DecoderConfig:
    """A decoder whose tokens differ in likelihood by far more than rounding."""
    return replace(config(), init=replace(config().init, std=0.2))


def test_generating_on_cuda_writes_what_the_cpu_writes() -> None:
    cpu = build(spread(), seed=0).eval()
    # One seed draws other numbers on another device.
    cuda = build(spread(), seed=0, device="cuda").eval()
    cuda.load_state_dict(cpu.state_dict())
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10]]
    for texts in (prompts, prompts[:1]):
        expected = generate(cpu, texts, max_new_tokens=30, eos_token_ids=(3, 5, 7))
        result = generate(cuda, texts, max_new_tokens=30, eos_token_ids=(3, 5, 7))
        assert [one.ids for one in result] == [one.ids for one in expected]


def test_new_weights_are_captured_anew() -> None:
    model = build(config(), seed=0, device="cuda", dtype=torch.bfloat16).eval()
    first = cuda_graph_steps(model, 1, 100)
    assert cuda_graph_steps(model, 1, 90) is first
    model.to(torch.float32)
    assert cuda_graph_steps(model, 1, 100) is not first
    assert worst(model, ids(9)) < 1e-4


def test_a_graph_outlives_the_graphs_of_another_model() -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    first, second = (build(config(), seed=seed, device="cuda").eval() for seed in (0, 1))
    # Eight sequences are multiplied by cuBLAS, which sums long products up in a workspace.
    prompts, new = ids(*[20] * 8), torch.full((8,), 7, device="cuda")
    steps = {model: cuda_graph_steps(model, 8, 100) for model in (first, second)}
    for recorded in steps.values():
        recorded.start(prompts)
        recorded.next(new)
    steps[second].start(prompts)
    expected = steps[second].next(new).clone()
    steps.pop(first)
    del first, recorded
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    others = [torch.randn(2**20, device="cuda", generator=draw) for _ in range(64)]
    copies = [other.clone() for other in others]
    steps[second].start(prompts)
    assert torch.equal(steps[second].next(new), expected)
    assert all(torch.equal(other, copy) for other, copy in zip(others, copies, strict=True))


def test_recording_keeps_no_workspace_of_a_stream() -> None:
    model = build(config(), seed=0, device="cuda", dtype=torch.bfloat16).eval()
    cuda_graph_steps(model, 8, 100)

    def memory_after(batch: int) -> int:
        generate(model, [[1, 2, 3]] * batch, max_new_tokens=20, eos_token_ids=())
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before = memory_after(8)
    # Programs of other sizes share the memory of the first; cuBLAS takes 32 MiB for a stream.
    assert max(memory_after(batch) for batch in (5, 3, 2, 1)) - before < 2**24


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sampling": Sample(temperature=1.5)},
        {"sampling": Sample(temperature=1.2, top_k=40, top_p=0.9), "logprobs": True},
        {"sampling": Sample(min_p=0.05), "repetition_penalty": 1.3},
        {"suppress_tokens": (4, 8, 15)},
    ],
)
def test_tokens_chosen_in_the_graph_are_those_that_the_host_chooses(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(spread(), seed=0, device="cuda").eval()
    prompts = [text.tolist() for text in ids(*range(3, 40, 4)).to_list()]
    wanted = {"max_new_tokens": 60, "eos_token_ids": (3, 5, 7), "seed": 3} | options
    recorded = [generate(model, prompts, **wanted) for _ in range(2)]
    monkeypatch.setattr(token_source, "why_not_recorded", lambda *_: "for comparison")
    expected = generate(model, prompts, **wanted)
    for result in recorded:
        assert [one.ids for one in result] == [one.ids for one in expected]
        assert [one.finish_reason for one in result] == [one.finish_reason for one in expected]
        if "logprobs" in wanted:
            for one, other in zip(result, expected, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-3)
