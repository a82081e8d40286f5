"""Masks as kernels read them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads.parts.masks import (
    Band,
    Blocks,
    Causal,
    Full,
    GlobalTokens,
    Mask,
    Prefix,
    Window,
    exact_band,
    simple_form,
    visible,
)

CPU = torch.device("cpu")

masks = st.one_of(
    st.builds(Full),
    st.builds(Causal),
    st.builds(Window, st.integers(0, 9), st.integers(0, 9)),
    st.builds(Prefix, st.integers(0, 5)),
    st.builds(Blocks, st.integers(1, 4)),
    st.just(Window(2, 2) | GlobalTokens((0, -1))),
    st.builds(lambda before: Causal() & Window(before, 9), st.integers(0, 9)),
    st.builds(lambda before: Window(before) | Window(0, 3), st.integers(0, 9)),
)


@given(mask=masks, queries=st.integers(0, 8), keys=st.integers(0, 8))
def test_the_simple_form_never_lies(mask: Mask, queries: int, keys: int) -> None:
    seen = visible(mask, range(queries), queries, keys, CPU)
    match simple_form(mask, queries, keys):
        case "all":
            assert seen.all()
        case "causal":
            assert queries == keys
            assert torch.equal(seen, torch.ones(queries, keys).tril().bool())


@given(before=st.integers(0, 9), after=st.integers(0, 9), length=st.integers(1, 8))
def test_a_window_that_hides_nothing_or_the_future_alone_is_found(
    before: int, after: int, length: int
) -> None:
    seen = visible(Window(before, after), range(length), length, length, CPU)
    form = simple_form(Window(before, after), length, length)
    assert (form == "all") == bool(seen.all())
    if not seen.all():
        assert (form == "causal") == torch.equal(seen, torch.ones(length, length).tril().bool())


@pytest.mark.parametrize(
    ("mask", "queries", "keys", "form"),
    [
        (Full(), 3, 9, "all"),
        (Full(), 9, 3, "all"),
        (Causal(), 4, 4, "causal"),
        (Causal(), 1, 9, "all"),
        (Causal(), 2, 9, "other"),
        (Window(8), 1, 9, "all"),
        (Window(7), 1, 9, "other"),
        (Prefix(2), 4, 4, "other"),
    ],
)
def test_a_step_with_a_cache_has_a_simple_form_of_its_own(
    mask: Mask, queries: int, keys: int, form: str
) -> None:
    assert simple_form(mask, queries, keys) == form


@given(mask=masks, queries=st.integers(0, 6), older=st.integers(0, 6), data=st.data())
def test_rows_and_steps_are_pieces_of_the_whole_table(
    mask: Mask, queries: int, older: int, data: st.DataObject
) -> None:
    keys = queries + older
    whole = visible(mask, range(keys), keys, keys, CPU)
    start = data.draw(st.integers(0, queries))
    stop = data.draw(st.integers(start, queries))
    rows = visible(mask, range(start, stop), queries, keys, CPU)
    assert torch.equal(rows, whole[older + start : older + stop])


def test_only_a_mask_that_is_a_band_has_an_exact_one() -> None:
    assert exact_band(Causal() & Window(3, 3)) == Band(3, 0)
    assert exact_band(Window(3, 3) & Blocks(2)) is None
