"""Steps of fixed shape give the logits of steps with any cache.

The capture itself needs CUDA and is tested in tests/gpu; the step that is captured runs everywhere.
"""

import pytest
import torch

from manyheads import DynamicCache, Ragged, StaticCache, build
from manyheads.cache import RingLayerCache
from manyheads.decoding.steps.cached import CachedSteps
from manyheads.decoding.steps.cuda_graph import (
    cannot,
    capacity_for,
    cuda_graph_steps,
    fixed_shape_step,
    ignores_key_order,
)
from manyheads.decoding.steps.triton_step import few_fit
from manyheads.models.decoder import Decoder
from tests.models.zoo import DECODERS, SEQ2SEQS, VOCABULARY

PROMPTS = (6, 1, 3)


def made(name: str) -> Decoder:
    model = build(DECODERS[name], seed=0)
    assert isinstance(model, Decoder)
    return model.eval()


@pytest.mark.parametrize("name", DECODERS)
@torch.inference_mode()
def test_a_step_of_fixed_shape_gives_the_logits_of_any_other(name: str) -> None:
    model = made(name)
    draw = torch.Generator().manual_seed(0)
    prompts = Ragged.from_list(
        [torch.randint(VOCABULARY, (length,), generator=draw) for length in PROMPTS]
    )
    cached = CachedSteps(model, DynamicCache())
    cached.start(prompts)
    cache = model.new_cache(StaticCache(size=16, ring_buffers=ignores_key_order(model)))
    model.next_logits(prompts, cache)
    plan = cache.static_plan()
    for _ in range(8):
        ids = torch.randint(VOCABULARY, (len(PROMPTS),), generator=draw)
        torch.testing.assert_close(
            fixed_shape_step(model, ids, cache, plan), cached.next(ids), rtol=1e-4, atol=1e-5
        )


@torch.inference_mode()
def test_restoring_a_position_repeats_the_step_bit_by_bit() -> None:
    model = made("windows and whole")
    cache = model.new_cache(StaticCache(size=16))
    model.next_logits(Ragged.from_list([torch.arange(5), torch.arange(9)]), cache)
    plan = cache.static_plan()
    ids, begin = torch.tensor([3, 4]), plan.positions.clone()
    first = fixed_shape_step(model, ids, cache, plan)
    plan.restore(begin)
    assert torch.equal(first, fixed_shape_step(model, ids, cache, plan))
    assert plan.positions.tolist() == [6, 10]


def test_rings_are_used_only_where_no_bias_depends_on_the_order_of_keys() -> None:
    for name, rings in (("window", True), ("alibi in a window", False), ("t5 in a window", False)):
        model = made(name)
        stores = model.new_cache(StaticCache(size=16, ring_buffers=ignores_key_order(model))).stores
        assert all(isinstance(store, RingLayerCache) for store in stores) is rings


def test_a_model_that_cannot_be_captured_is_refused_with_the_reason() -> None:
    cuda = torch.device("cuda")
    assert cannot(made("llama"), cuda) is None
    assert "on cpu" in str(cannot(made("llama"), torch.device("cpu")))
    assert "Seq2Seq" in str(cannot(build(SEQ2SEQS["t5"], seed=0), cuda))


def test_compiled_steps_serve_texts_of_other_lengths() -> None:
    model = made("llama")
    steps = cuda_graph_steps(model, 2, 300, compiled=True)
    assert cuda_graph_steps(model, 2, 900, compiled=True) is steps
    longer = cuda_graph_steps(model, 2, 1500, compiled=True)
    assert longer is not steps
    assert cuda_graph_steps(model, 2, 20, compiled=True) is longer
    assert cuda_graph_steps(model, 3, 20, compiled=True) is not longer


def test_steps_in_use_serve_no_other_batch() -> None:
    model, first, second = made("llama"), Sampling(), Sampling()
    steps = cuda_graph_steps(model, 2, 300, user=first)
    others = cuda_graph_steps(model, 2, 300, user=second)
    assert others is not steps
    del second
    assert cuda_graph_steps(model, 2, 300, user=first) is others
    others.user = None
    assert cuda_graph_steps(model, 2, 300) is others


class Sampling:
    """Somebody who uses steps."""


def test_our_products_of_few_tokens_are_not_for_float16() -> None:
    # The sum of the squares comes last, so a large channel times a large weight would be infinite.
    model = made("llama").bfloat16()
    assert [few_fit(model, sequences) for sequences in (1, 2, 16, 17)] == [False, True, True, False]
    assert not few_fit(model.half(), 2)


@pytest.mark.shapes_unchecked
@torch.inference_mode()
def test_a_step_is_compiled_once_for_prompts_of_any_length() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:  # noqa: ARG001
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(fixed_shape_step, fullgraph=True, dynamic=False, backend=backend)
    model, ids = made("window"), torch.tensor([3, 4])
    for lengths, tokens in (((5, 2), 300), ((1, 9), 700)):
        prompts = Ragged.from_list([torch.arange(length) for length in lengths])
        cache = model.new_cache(StaticCache(size=capacity_for(tokens, compiled=True)))
        model.next_logits(prompts, cache)
        expected = made("window").new_cache()
        model.next_logits(prompts, expected)
        result = step(model, ids, cache, cache.static_plan())
        ones = Ragged.from_list([each[None] for each in ids])
        torch.testing.assert_close(result, model.next_logits(ones, expected), rtol=1e-4, atol=1e-5)
    assert len(graphs) == 1
