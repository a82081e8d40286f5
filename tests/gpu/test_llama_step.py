"""The kernels of Llama-like decoders, whole: prompts and steps as the model computes them.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_llama_step.py --on cpu`.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads import Ragged, StaticCache, build, get_config
from manyheads.decoding.steps import triton_kernels, triton_products, triton_step
from manyheads.parts import RMSNorm

SHAPE: dict[str, Any] = {
    "width": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 32,
    "hidden": 100,
    "layers": 2,
    "vocabulary": 90,
}


LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def off(result: Tensor, expected: Tensor) -> float:
    """The difference as a fraction of the norm."""
    return float((result.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("batch", [2, 3, 17])
# Several programs share the keys of a head, or one reads them all.
@pytest.mark.parametrize("shared", [False, True])
@torch.inference_mode()
def test_prompts_and_steps_give_the_logits_of_the_model(
    shared: bool, batch: int, norms: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shared:
        monkeypatch.setattr(triton_step, "LONG_CAPACITY", 16)
    if device == "cpu":
        # The interpreter cannot launch a kernel early.
        for module in (triton_kernels, triton_products):
            monkeypatch.setattr(module, "_early", lambda _: {"EARLY": False})
    config: Any = get_config("llama-1b-shape", **SHAPE)
    if norms:
        layer = config.stack.layers[0]
        assert layer.attention is not None
        norm = RMSNorm(centered=True)
        inner = replace(layer.attention.inner, query_norm=norm, key_norm=norm)
        layer = replace(layer, attention=replace(layer.attention, inner=inner))
        config = replace(config, stack=replace(config.stack, layers=(layer,) * 2))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = build(config, seed=0, device=device, dtype=dtype).eval()
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(90, (1 + 7 * row % 12,), generator=draw) for row in range(batch)]
    prompts = Ragged.from_list(texts).to(device)
    caches = [model.new_cache(StaticCache(size=16, rows=batch)) for _ in range(2)]
    expected = model.next_logits(prompts, caches[0])
    # The second takes its memory, and is read again.
    model.next_logits(prompts, caches[1])
    for store in caches[1].stores:
        assert store is not None
        store.k.zero_()
        store.v.zero_()
    caches[1].seen = ()
    plan = caches[1].plan(prompts.lengths)
    last = prompts.lengths.offsets[1:].long() - 1
    result = triton_step.llama_read(model, prompts, caches[1], plan, last)
    assert off(result, expected) < LIMITS[dtype]
    caches[1].finish(plan)
    for one, other in zip(caches[1].stores, caches[0].stores, strict=True):
        assert one is not None
        assert other is not None
        assert off(one.k, other.k) < LIMITS[dtype]
        assert off(one.v, other.v) < LIMITS[dtype]
    static = caches[1].static_plan()
    ids = torch.randint(90, (3, batch), generator=draw).to(device)
    ones = Ragged.from_list([torch.zeros(1) for _ in range(batch)]).lengths.to(device)
    for number, new in enumerate(ids):
        few = number > 0 and batch <= triton_step.FEW
        step = triton_step.llama_step(model, new, caches[1], static, few=few)
        expected = model.next_logits(Ragged(new, ones), caches[0])
        assert off(step, expected) < LIMITS[dtype]
