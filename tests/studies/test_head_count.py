"""Three ways to compute the same heads, and what is measured of them."""

import pytest
import torch

from studies.byte_texts import ByteTexts
from studies.head_count.head_loop import WAYS, measure_ways
from studies.head_count.study import compare_heads
from studies.small_models import language_model


@pytest.mark.parametrize("heads", [1, 4])
def test_a_loop_a_batched_product_and_a_fused_kernel_agree(heads: int) -> None:
    x, project, output = torch.randn(2, 6, 8), torch.randn(3, 8, 8), torch.randn(8, 8)
    outputs = [way(x, project, output, heads) for way in WAYS.values()]
    for result in outputs[1:]:
        torch.testing.assert_close(result, outputs[0], rtol=1e-4, atol=1e-4)


def test_every_way_has_its_times() -> None:
    values = measure_ways(2, width=8, batch=1, length=4, device="cpu")
    assert set(values) == set(WAYS)
    assert all(times["train ms"] > 0 and times["run ms"] > 0 for times in values.values())


def test_equal_heads_overlap_and_silent_ones_are_free() -> None:
    model = language_model(width=16, layers=1, heads=2)
    attention = model.stack.layers[0].attention
    with torch.no_grad():
        attention.project.weight.zero_()
        attention.output.weight.zero_()
    passages = ByteTexts("topics", "cpu", 10_000).held_out(2, 12)
    values = compare_heads(model, passages)
    assert values["overlap"] == pytest.approx(1)
    assert values["alike"] == values["free"] == values["dead"] == 1


def test_a_single_head_has_no_pair() -> None:
    model = language_model(width=16, layers=2, heads=1)
    passages = ByteTexts("topics", "cpu", 10_000).held_out(2, 12)
    assert "overlap" not in compare_heads(model, passages)
