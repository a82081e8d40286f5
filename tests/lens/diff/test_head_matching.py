"""Heads of two models are matched by address, and those of a pruned layer by their weights."""

from typing import Any

import numpy as np
import pytest
import torch

from manyheads.errors import InputError
from manyheads.lens.diff.head_matching import match_heads, weight_changes
from manyheads.lens.results.addresses import Address, blocks_of
from manyheads.models.build import build
from manyheads.parts.masks import Causal
from manyheads.parts.positions import Rotary
from manyheads.taps import Head
from tests.messages import refuses
from tests.models.zoo import ENCODERS, SEQ2SEQS, VISIONS, decoder, layer, own, small, writes

SIZE = 8


def whole(**changes: Any) -> Any:
    return build(decoder(*[writes(position=Rotary(), **changes)] * 2), seed=0)


def pruned(kept: tuple[int, ...]) -> Any:
    """The same model, of whose second layer only some heads are left."""
    model = build(
        decoder(
            writes(position=Rotary()),
            writes(position=Rotary(), heads=len(kept), head_size=SIZE),
        ),
        seed=1,
    )
    source = whole()
    rows = [SIZE * head + place for head in kept for place in range(SIZE)]
    state = source.state_dict()
    prefix = "stack.layers.1.attention"
    inputs = state[f"{prefix}.project.weight"].unflatten(0, (3, -1))[:, rows].flatten(0, 1)
    state[f"{prefix}.project.weight"] = inputs
    state[f"{prefix}.output.weight"] = state[f"{prefix}.output.weight"][:, rows]
    model.load_state_dict(state)
    return model


def test_equal_shapes_are_matched_by_address() -> None:
    match = match_heads(whole(), whole())
    assert all(head == other for head, other in match.after.items())
    assert match.removed == ()


def test_a_pruned_layer_is_matched_by_weights() -> None:
    match = match_heads(whole(), pruned((0, 2, 3)))
    message = {
        str(head): None if other is None else str(other) for head, other in match.after.items()
    }
    assert [str(head) for head in match.removed] == ["L1H1"]
    assert message["L1H2"] == "L1H1"
    assert message["L1H3"] == "L1H2"
    values = match.rearranged(np.arange(7.0), blocks_of(pruned((0, 2, 3))))
    np.testing.assert_array_equal(values, [0, 1, 2, 3, 4, np.nan, 5, 6])
    moved = weight_changes(whole(), pruned((0, 2, 3)), match)
    assert np.nanmax(moved.means["all"]) == 0
    assert np.isnan(moved["all"].of(Head(1, 1)))


def test_origins_are_taken_at_their_word() -> None:
    """Of a model whose first layer is removed, and whose second has two heads left."""
    left = build(decoder(writes(position=Rotary(), heads=2, head_size=SIZE)), seed=0)
    one, two = Address(Head(0, 0)), Address(Head(0, 1))
    origins = {one: Address(Head(1, 3)), two: Address(Head(1, 0))}
    match = match_heads(whole(), left, origins)
    assert match.after[Address(Head(1, 3))] == one
    assert match.after[Address(Head(1, 0))] == two
    assert len(match.removed) == 6
    with refuses(InputError, "L0H1", "every head"):
        match_heads(whole(), left, {one: one})
    with refuses(
        InputError,
        "L9H0",
        "L0H0 to L1H3",
    ):
        match_heads(whole(), left, {one: Address(Head(9, 0)), two: two})
    with refuses(InputError, "L0H0 and L0H1", "once"):
        match_heads(whole(), left, {one: one, two: one})


def test_a_layer_without_heads_has_lost_all() -> None:
    model = build(decoder(writes(position=Rotary()), layer(None)), seed=0)
    assert [str(head) for head in match_heads(whole(), model).removed] == [
        f"L1H{head}" for head in range(4)
    ]


def test_changes_of_weights_are_listed_by_slice() -> None:
    one, two = whole(kv_heads=2), whole(kv_heads=2)
    with torch.no_grad():
        rows = two.stack.layers[0].attention.projections()
        rows["query"][8:16] *= 3
        rows["key"][:8] *= 0.5
        two.stack.layers[1].attention.output.weight[:, 24:] = 0
    moved = weight_changes(one, two, match_heads(one, two))
    assert moved["query"].of(Head(0, 1)) == pytest.approx(2)
    # Two heads share the keys that were halved.
    np.testing.assert_allclose(moved["key"].layers()[0], [0.5, 0.5, 0, 0], atol=1e-7)
    assert moved["output"].of(Head(1, 3)) == pytest.approx(1)
    assert moved["value"].ranked()[0][1] == 0
    slices = one.stack.layers[0].attention
    norms = [slices.projections()[name][:8].norm().item() for name in ("query", "key", "value")]
    norms.append(slices.output.weight[:, :8].norm().item())
    expected = 0.5 * norms[1] / np.linalg.norm(norms)
    assert moved["all"].of(Head(0, 0)) == pytest.approx(expected, rel=1e-5)


def test_other_shapes_are_refused() -> None:
    one = whole()
    with refuses(
        InputError,
        "layers",
        "2 and 1",
        "same shape",
    ):
        match_heads(one, build(decoder(writes()), seed=0))
    with refuses(
        InputError,
        "texts and images",
        "same shape",
    ):
        match_heads(one, small(VISIONS["vit"]))
    with refuses(
        InputError,
        "Decoder and Encoder",
        "same shape",
    ):
        match_heads(one, small(ENCODERS["bert"]))
    with refuses(
        InputError,
        "['main'] and ['decoder', 'encoder']",
        "same shape",
    ):
        match_heads(one, small(SEQ2SEQS["t5"]))
    with refuses(
        InputError,
        "layer 1 of main has 3 heads",
        "4",
        "more heads first",
    ):
        match_heads(pruned((0, 2, 3)), one)
    with refuses(
        InputError,
        "layer 0 of main has heads of size 8",
        "16",
        "equal head sizes",
    ):
        match_heads(one, build(decoder(*[layer(own(mask=Causal(), heads=2))] * 2), seed=0))
    with refuses(
        InputError,
        "layer 1 of main",
        "same layers",
    ):
        match_heads(build(decoder(writes(), layer(None)), seed=0), one)
    assert match_heads(small(ENCODERS["bert"]), small(ENCODERS["bert"])).removed == ()
