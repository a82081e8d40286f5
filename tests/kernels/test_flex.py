"""What of the flex kernel can be held without CUDA: the block masks it is given."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from manyheads import Attention, AttentionConfig, Ragged
from manyheads.kernels import flex
from manyheads.parts.masks import Causal, Full, GlobalTokens, Mask, RandomBlocks, Window
from manyheads.parts.positions import Rotary
from manyheads.ragged import Lengths

MASKS = [Full(), Causal(), Window(30, 5), Window(40, 40) | GlobalTokens((0, -1)), RandomBlocks(64)]
EACH = [(700, 0, 1, 300), (256, 128), (5,)]


@pytest.mark.shapes_unchecked  # torch counts the arguments of the mask function itself
def test_strips_give_the_block_mask_of_the_whole_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "LARGEST_STRIP", 128 * 600)
    for mask, each in product(MASKS, EACH):
        check_block_mask(mask, Lengths.of(each))


def check_block_mask(mask: Mask, lengths: Lengths) -> None:
    result = flex._make_block_mask(mask, lengths, lengths)
    tokens = lengths.total
    may_see = flex._mask_mod(mask, lengths, lengths)
    expected = create_block_mask(may_see, None, None, tokens, tokens, device="cpu")
    assert torch.equal(result.to_dense(), expected.to_dense())
    assert result.full_kv_num_blocks is not None
    assert expected.full_kv_num_blocks is not None
    assert torch.equal(result.full_kv_num_blocks, expected.full_kv_num_blocks)
    assert torch.equal(result.kv_num_blocks, expected.kv_num_blocks)
    assert result.seq_lengths == expected.seq_lengths


def test_queries_are_placed_at_the_end_of_their_keys() -> None:
    queries, keys = Lengths.of((3, 2)), Lengths.of((5, 2))
    may_see = flex._mask_mod(Causal(), queries, keys)
    nothing = torch.zeros((), dtype=torch.long)
    seen = may_see(nothing, nothing, torch.arange(5)[:, None], torch.arange(7)[None, :])
    expected = [
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    assert seen.int().tolist() == expected


def test_a_block_mask_made_in_inference_may_be_trained_with() -> None:
    flex._cached_block_mask.cache_clear()
    with torch.inference_mode():
        made = flex._cached_block_mask(Causal(), (9,), (9,), torch.device("cpu"))
    assert not made.kv_indices.is_inference()


@pytest.mark.shapes_unchecked
@torch.no_grad()
def test_rotary_positions_are_compiled_for_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "cannot", lambda *_: None)
    attention = Attention(AttentionConfig(width=64, heads=2, mask=Causal(), position=Rotary()))
    x = Ragged.from_list([torch.randn(length, 64) for length in (200, 0, 31)])
    expected = attention(x).values
    attention.config = replace(attention.config, kernel="flex")
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x).values, expected)
