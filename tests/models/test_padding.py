"""Padded batches and ragged ones go in by different doors and get the same answers."""

from collections.abc import Sequence
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from manyheads.errors import InputError, ShapeError
from manyheads.ragged import Ragged
from tests.models.zoo import DECODERS, ENCODERS, LENGTHS, SEQ2SEQS, VOCABULARY, ids, small

Padding = Literal["left", "right", "mixed"]
TEXTS = {
    **{f"encoder {name}": config for name, config in ENCODERS.items()},
    **{f"decoder {name}": config for name, config in DECODERS.items()},
}


def mask_of(lengths: Sequence[int], width: int, padding: Padding) -> Tensor:
    """Where the tokens stand; mixed padding has holes between them."""
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    generator = torch.Generator().manual_seed(sum(lengths))
    for row, length in zip(mask, lengths, strict=True):
        match padding:
            case "left":
                row[width - length :] = 1
            case "right":
                row[:length] = 1
            case "mixed":
                row[torch.randperm(width, generator=generator)[:length]] = 1
    return mask


def padded(batch: Ragged, mask: Tensor) -> Tensor:
    """The batch in its rectangle, with nonsense in the padding."""
    rectangle = torch.full(mask.shape, VOCABULARY - 1)
    rectangle[mask == 1] = batch.values
    return rectangle


@pytest.mark.parametrize("padding", ["left", "right", "mixed"])
@pytest.mark.parametrize("name", TEXTS)
def test_padded_and_ragged_agree_and_the_padding_is_zero(name: str, padding: Padding) -> None:
    model, batch = small(TEXTS[name]), ids()
    mask = mask_of(LENGTHS, 14, padding)
    with torch.no_grad():
        ragged, output = model(batch), model(padded(batch, mask), mask=mask)
    assert output.hidden.shape[:2] == mask.shape
    assert torch.equal(output.hidden[mask == 1], ragged.hidden.values)
    assert not output.hidden[mask == 0].any()
    if isinstance(ragged.logits, Ragged):
        assert torch.equal(output.logits[mask == 1], ragged.logits.values)
        assert not output.logits[mask == 0].any()
    else:
        assert torch.equal(output.logits, ragged.logits)


@pytest.mark.parametrize("padding", ["left", "right", "mixed"])
def test_source_and_target_are_padded_each_in_its_own_way(padding: Padding) -> None:
    model, source, target = small(SEQ2SEQS["2017"]), ids(), ids((2, 4, 0, 1, 3), seed=1)
    source_mask = mask_of(LENGTHS, 13, padding)
    target_mask = mask_of((2, 4, 0, 1, 3), 6, "right")
    with torch.no_grad():
        expected = model(source, target).logits
        result = model(
            padded(source, source_mask),
            padded(target, target_mask),
            source_mask=source_mask,
            target_mask=target_mask,
        ).logits
        half = model(padded(source, source_mask), target, source_mask=source_mask).logits
    assert torch.equal(result[target_mask == 1], expected.values)
    assert not result[target_mask == 0].any()
    assert torch.equal(half.values, expected.values)


@pytest.mark.parametrize("padding", ["left", "right", "mixed"])
@pytest.mark.parametrize("name", ["encoder modernbert", "encoder classes", "decoder gates"])
def test_gradients_agree_too(name: str, padding: Padding) -> None:
    model, batch = small(TEXTS[name]), ids()
    mask = mask_of(LENGTHS, 14, padding)
    gradients = []
    for output in (model(batch), model(padded(batch, mask), mask=mask)):
        model.zero_grad()
        hidden = output.hidden.values if isinstance(output.hidden, Ragged) else output.hidden
        logits = output.logits.values if isinstance(output.logits, Ragged) else output.logits
        (hidden.square().sum() + logits.square().sum()).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for ragged, rectangular in zip(*gradients, strict=True):
        torch.testing.assert_close(rectangular, ragged, rtol=1e-4, atol=1e-4)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5), st.sampled_from(["left", "mixed"]))
def test_any_lengths_pass_the_door(lengths: list[int], padding: Padding) -> None:
    model, batch = small(ENCODERS["modernbert"]), ids(lengths)
    mask = mask_of(lengths, 6, padding)
    with torch.no_grad():
        result = model(padded(batch, mask), mask=mask).logits
        assert torch.equal(result[mask == 1], model(batch).logits.values)
    assert not result[mask == 0].any()


@pytest.mark.parametrize("dtype", [torch.bool, torch.long, torch.float32])
def test_a_mask_may_have_any_type(dtype: torch.dtype) -> None:
    model, mask = small(ENCODERS["bert"]), mask_of((2, 3), 4, "right")
    rectangle = padded(ids((2, 3)), mask)
    with torch.no_grad():
        assert torch.equal(
            model(rectangle, mask=mask.to(dtype)).hidden, model(rectangle, mask=mask).hidden
        )


@pytest.mark.parametrize("name", TEXTS)
def test_without_a_mask_every_place_is_a_token(name: str) -> None:
    model, batch = small(TEXTS[name]), ids((6, 6, 6))
    with torch.no_grad():
        ragged, output = model(batch), model(torch.stack(batch.to_list()))
    assert output.hidden.shape[:2] == (3, 6)
    assert torch.equal(output.hidden.flatten(0, 1), ragged.hidden.values)


def test_types_share_the_mask_of_the_ids() -> None:
    model, mask = small(ENCODERS["bert"]), mask_of((2, 3), 4, "mixed")
    batch, types = ids((2, 3)), Ragged.from_list([torch.tensor([0, 1]), torch.tensor([1, 0, 1])])
    with torch.no_grad():
        expected = model(batch, types=types).hidden
        result = model(padded(batch, mask), mask=mask, types=types.to_padded(mask)).hidden
        without = model(batch).hidden
    assert torch.equal(result[mask == 1], expected.values)
    assert not torch.allclose(without.values, expected.values)


@pytest.mark.parametrize("shape", [(2, 3), (3, 4), (2,), (2, 4, 1)], ids=str)
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError) as caught:
        small(ENCODERS["bert"])(torch.ones(2, 4, dtype=torch.long), mask=torch.ones(shape))
    assert str(caught.value) == (
        f"the mask has shape {shape}, and the batch (2, 4): "
        "give a mask of shape (2, 4), 1 for a token and 0 for padding."
    )


def test_a_mask_of_other_numbers_is_refused() -> None:
    with pytest.raises(InputError, match="values other than 0 and 1: use 1 for a token, 0 for"):
        small(ENCODERS["bert"])(torch.ones(1, 2, dtype=torch.long), mask=torch.tensor([[1, -100]]))


@pytest.mark.parametrize("shape", [(4,), (1, 4, 2)])
def test_ids_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError) as caught:
        small(ENCODERS["bert"])(torch.ones(shape, dtype=torch.long))
    assert str(caught.value) == (
        f"ids have shape {shape}: give (batch, length), or a Ragged; one sequence is ids[None]."
    )


def test_each_side_of_a_translation_is_named_in_its_error() -> None:
    model, good, bad = small(SEQ2SEQS["2017"]), torch.ones(1, 2).long(), torch.ones(2).long()
    with pytest.raises(ShapeError, match=r"source ids have shape \(2,\)"):
        model(bad, good)
    with pytest.raises(ShapeError, match=r"target ids have shape \(2,\)"):
        model(good, bad)


def test_a_ragged_batch_has_no_mask() -> None:
    with pytest.raises(InputError, match="a Ragged has no padding to mask: leave mask out"):
        small(ENCODERS["bert"])(ids(), mask=torch.ones(5, 12))


def test_a_batch_of_nothing_gives_nothing() -> None:
    model = small(ENCODERS["modernbert"])
    with torch.no_grad():
        empty = model(ids((0, 0)))
        hidden = model(torch.ones(2, 4, dtype=torch.long), mask=torch.zeros(2, 4)).hidden
        assert model(torch.zeros(0, 3, dtype=torch.long)).hidden.shape == (0, 3, 32)
    assert empty.hidden.values.shape == (0, 32)
    assert empty.logits.values.shape == (0, VOCABULARY)
    assert hidden.shape == (2, 4, 32)
    assert not hidden.any()
