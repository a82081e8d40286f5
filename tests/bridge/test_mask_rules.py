"""Masks of `transformers` as rules, compared with the functions that they are read from."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils

from manyheads.bridge.mask_rules import FunctionMask, agrees, read_rule, runs
from manyheads.bridge.padded_call import LazyMask, PackedCall, PaddedCall
from manyheads.kernels import reference
from manyheads.parts.masks import Causal, Full, Mask, Window, visible
from manyheads.ragged import Lengths

NO_PADDING = torch.zeros(2, dtype=torch.long)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal": masking_utils.causal_mask_function,
    "all": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(3),
    "chunks": masking_utils.chunked_causal_mask_function(5, NO_PADDING),
    "either": masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.sliding_window_bidirectional_overlay(2)
    ),
}


def dense(function: Callable[..., Any], count: int) -> torch.Tensor:
    query, key = torch.arange(count)[:, None], torch.arange(count)[None]
    zero = torch.zeros(1, 1, dtype=torch.long)
    return function(zero, zero, query, key).expand(count, count)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_rule_sees_what_its_function_sees(name: str) -> None:
    rule = read_rule(FUNCTIONS[name])
    assert rule is not None
    seen = visible(rule, range(17), 17, 17, torch.device("cpu"))
    assert torch.equal(seen, dense(FUNCTIONS[name], 17))
    assert agrees(rule, FUNCTIONS[name], range(17), range(17), "cpu")


def test_a_window_that_is_causal_is_a_band() -> None:
    assert read_rule(FUNCTIONS["window"]) == Window(3)
    assert read_rule(FUNCTIONS["both sides"]) == Window(3, 3)


@pytest.mark.parametrize("wrong", [Full(), Window(2), Window(4)])
def test_a_wrong_rule_is_noticed(wrong: Mask) -> None:
    assert not agrees(wrong, FUNCTIONS["window"], range(40), range(40), "cpu")


def test_an_unknown_function_is_evaluated() -> None:
    def odd(batch: Any, head: Any, query: Any, key: Any) -> Any:
        del head
        return (key <= query) & ((key + batch) % 2 == 0)

    assert read_rule(odd) is None
    mask = FunctionMask(odd, sequence=1, start=2)
    seen = visible(mask, range(4), 4, 4, torch.device("cpu"))
    assert seen.int().tolist() == [[0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 1]]


def test_runs_of_tokens() -> None:
    tokens = torch.tensor([[1, 1, 0], [0, 1, 1], [0, 0, 0]]) > 0
    assert runs(tokens) == [(0, 2), (1, 3), (0, 0)]
    assert runs(torch.tensor([[1, 0, 1]]) > 0) is None


def lazy(function: Callable[..., Any], padding: torch.Tensor | None, **changes: Any) -> LazyMask:
    arguments = {
        "batch_size": 2,
        "q_length": 6,
        "kv_length": 6,
        "q_offset": 0,
        "kv_offset": 0,
        "mask_function": function,
        "attention_mask": padding,
        "dtype": torch.float32,
        "device": "cpu",
    }
    return LazyMask.of({**arguments, **changes})


def test_a_mask_stays_lazy_until_it_is_computed_with() -> None:
    mask = lazy(FUNCTIONS["causal"], None)
    assert mask.shape == (2, 1, 6, 6)
    assert mask.untyped_storage().nbytes() == 4
    assert mask.contiguous() is mask
    assert mask[:, :, :, :6] is mask
    assert not isinstance(mask + 1, LazyMask)
    assert torch.equal((mask + 0)[0, 0] == 0, dense(FUNCTIONS["causal"], 6))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_packed_call_is_the_dense_call(name: str, side: str) -> None:
    padding = torch.ones(2, 6, dtype=torch.bool)
    padding[1, slice(2) if side == "left" else slice(4, 6)] = False
    function = FUNCTIONS[name]
    if name == "chunks":
        left = torch.tensor([0, 2 if side == "left" else 0])
        function = masking_utils.chunked_causal_mask_function(5, left)
    mask = lazy(function, padding)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 6, 4, generator=generator) for heads in (4, 2, 2))
    call = PaddedCall.of(q, k, v, mask, {"softcap": 3.0, "s_aux": torch.randn(4)})
    packed = PackedCall.of(call, cross=False, true_lengths=None)
    values = (packed.query.values, packed.key.values, packed.value.values)
    output = packed.unpack(reference.attend(*values, packed.request).output)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.5
    scores = 3 * torch.tanh(scores / 3) + mask.dense()
    assert call.sink is not None
    sink = call.sink.view(1, 4, 1, 1).expand(2, 4, 6, 1)
    weights = torch.cat((scores, sink), -1).softmax(-1)[..., :6]
    expected = (weights @ v.repeat_interleave(2, 1)).transpose(1, 2)
    real = padding[:, :, None, None].expand_as(expected)
    torch.testing.assert_close(output[real], expected[real], rtol=1e-5, atol=1e-5)


def test_room_behind_a_static_cache_is_cut() -> None:
    mask = lazy(FUNCTIONS["causal"], None, q_length=2, kv_length=8, q_offset=torch.tensor(3))
    q, k, v = torch.randn(2, 1, 2, 4), torch.randn(2, 1, 8, 4), torch.randn(2, 1, 8, 4)
    packed = PackedCall.of(PaddedCall.of(q, k, v, mask, {}), cross=False, true_lengths=None)
    assert packed.request.keys.each == (5, 5)
    assert packed.request.mask == Causal()


@pytest.mark.parametrize("low", [-10000.0, torch.finfo(torch.float32).min])
def test_padding_in_a_dense_mask_is_left_out(low: float) -> None:
    lengths = Lengths.of([6, 4])
    mask = torch.zeros(2, 1, 1, 6)
    mask[1, ..., 4:] = low
    q, k, v = (torch.randn(2, 2, 6, 4) for _ in range(3))
    packed = PackedCall.of(PaddedCall.of(q, k, v, mask, {}), cross=False, true_lengths=lengths)
    assert packed.request.queries.each == packed.request.keys.each == (6, 4)
    assert packed.request.bias is None
    assert packed.request.mask == Full()
