"""Ragged: nothing is lost on the way in or out, and no padding token gets inside."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyheads.errors import InputError, ShapeError
from manyheads.models.build import build
from manyheads.ragged import Lengths, Ragged
from tests.messages import refuses

lengths = st.lists(st.integers(0, 5), max_size=5)
some_lengths = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def drawn(each: list[int], *rest: int) -> list[Tensor]:
    return [torch.randn(length, *rest) for length in each]


@given(each=lengths)
def test_lengths_know_where_every_token_stands(each: list[int]) -> None:
    result = Lengths.of(each)
    assert result.each == tuple(each)
    assert result.total == sum(each)
    assert result.longest == max(each, default=0)
    assert len(result) == result.count == len(each)
    assert result.uniform == (len(set(each)) <= 1)
    assert result.tight
    assert result.offsets.tolist() == [sum(each[:index]) for index in range(len(each) + 1)]
    assert result.positions.tolist() == [place for length in each for place in range(length)]
    assert result.sequence_of_token.tolist() == [
        index for index, length in enumerate(each) for _ in range(length)
    ]
    tokens = list(range(sum(each)))
    assert [token for place in result.slices() for token in tokens[place]] == tokens


@given(each=lengths, spare=st.integers(0, 3))
def test_room_moves_the_starts_and_nothing_else(each: list[int], spare: int) -> None:
    room = max(each, default=0) + spare
    result, tight = Lengths.with_capacity(each, room, "cpu"), Lengths.of(each)
    assert result.starts == tuple(room * index for index in range(len(each)))
    assert result.each == tight.each
    assert torch.equal(result.positions, tight.positions)
    assert result.tight == (room * len(each) == sum(each))


@given(each=some_lengths)
def test_a_list_comes_back_as_it_went_in(each: list[int]) -> None:
    sequences = drawn(each, 3)
    batch = Ragged.from_list(sequences)
    assert batch.values.shape == (sum(each), 3)
    for index, (ours, peer) in enumerate(zip(batch.to_list(), sequences, strict=True)):
        assert torch.equal(ours, peer)
        assert torch.equal(batch.of(index), peer)
        assert torch.equal(batch.of(index - len(each)), peer)


@given(
    rows=st.integers(1, 4).flatmap(
        lambda width: st.lists(
            st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=4
        )
    ),
    kind=st.sampled_from([torch.bool, torch.long, torch.float32]),
)
def test_any_padding_falls_away_and_comes_back(rows: list[list[bool]], kind: torch.dtype) -> None:
    mask = torch.tensor(rows).to(kind)
    values = torch.randn(*mask.shape, 2)
    batch = Ragged.from_padded(values, mask)
    assert batch.lengths.each == tuple(map(sum, rows))
    kept = values * mask.unsqueeze(-1)
    assert torch.equal(batch.to_padded(mask), kept)
    for index, row in enumerate(rows):
        assert torch.equal(batch.of(index), values[index, torch.tensor(row)])


@given(each=some_lengths, side=st.sampled_from(["left", "right"]))
def test_padding_goes_to_the_chosen_side(each: list[int], side: str) -> None:
    batch = Ragged.from_list(drawn(each, 2))
    padded = batch.to_padded(side=side, fill=-7.0)
    assert padded.shape == (len(each), max(each), 2)
    for row, sequence in zip(padded, batch.to_list(), strict=True):
        empty = torch.full((max(each) - len(sequence), 2), -7.0)
        parts = (empty, sequence) if side == "left" else (sequence, empty)
        assert torch.equal(row, torch.cat(parts))


def test_without_a_mask_every_token_is_real() -> None:
    values = torch.arange(6).reshape(2, 3)
    batch = Ragged.from_padded(values)
    assert batch.lengths.each == (3, 3)
    assert torch.equal(batch.to_padded(), values)


def test_ids_stay_whole_numbers() -> None:
    batch = Ragged.from_padded(torch.tensor([[5, 0], [6, 7]]), torch.tensor([[1, 0], [1, 1]]))
    assert batch.to_padded(fill=9).tolist() == [[5, 9], [6, 7]]
    assert batch.values.dtype == torch.long


def test_gradients_pass_through_the_doors() -> None:
    values = torch.randn(2, 3, 2, requires_grad=True)
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]])
    Ragged.from_padded(values, mask).to_padded(mask).sum().backward()
    assert torch.equal(values.grad, mask.unsqueeze(-1).expand(2, 3, 2).float())


@given(each=some_lengths, data=st.data())
def test_select_takes_sequences_in_the_order_of_the_indices(
    each: list[int], data: st.DataObject
) -> None:
    batch = Ragged.from_list(drawn(each, 2))
    chosen = data.draw(st.lists(st.integers(0, len(each) - 1), max_size=6))
    selected = batch.select(chosen)
    assert selected.lengths.each == tuple(each[index] for index in chosen)
    for place, index in enumerate(chosen):
        assert torch.equal(selected.of(place), batch.of(index))


@given(each=some_lengths, data=st.data())
def test_concatenate_undoes_split(each: list[int], data: st.DataObject) -> None:
    batch = Ragged.from_list(drawn(each, 2))
    cuts = data.draw(st.lists(st.integers(0, len(each)), max_size=3))
    bounds = [0, *sorted(cuts), len(each)]
    counts = [stop - start for start, stop in pairwise(bounds)]
    parts = batch.split(counts)
    assert [len(part) for part in parts] == counts
    whole = Ragged.concatenate(parts)
    assert whole.lengths.each == batch.lengths.each
    assert torch.equal(whole.values, batch.values)


def test_a_batch_moves_with_its_lengths() -> None:
    batch = Ragged.from_list(drawn([2, 3], 4)).to("meta")
    assert batch.device.type == "meta"
    tensors = (batch.values, batch.lengths.offsets, batch.lengths.positions)
    assert {tensor.device.type for tensor in tensors} == {"meta"}
    assert batch.lengths.each == (2, 3)


def test_map_and_with_values_keep_the_sequences() -> None:
    batch = Ragged.from_list(drawn([2, 0, 3], 4))
    doubled = batch.map(lambda values: 2 * values[:, :1])
    assert doubled.lengths.each == (2, 0, 3)
    assert torch.equal(doubled.values, 2 * batch.values[:, :1])


def test_what_cannot_be_a_batch_is_refused() -> None:
    values = torch.zeros(3, 2)
    with refuses(InputError, "at least 0, got (2, -1)"):
        Lengths.of([2, -1])
    with refuses(
        ShapeError,
        "3 values, and lengths (2, 2) sum to 4",
        "give lengths that sum to the number of tokens",
    ):
        Ragged(values, Lengths.of([2, 2]))
    with refuses(ShapeError, "use Lengths.of(each)"):
        Ragged(values, Lengths.with_capacity([1, 2], 4, "cpu"))
    with refuses(InputError, "give at least one"):
        Ragged.from_list([])
    with refuses(
        ShapeError,
        "[(2,), (3,)]: make all axes but the first equal",
    ):
        Ragged.from_list([torch.zeros(1, 3), torch.zeros(4, 2)])
    with refuses(InputError, "give at least one"):
        Ragged.concatenate([])


@pytest.mark.parametrize("shape", [(2, 4), (3, 3), (6,), (2, 3, 1)])
def test_a_mask_of_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with refuses(
        ShapeError,
        f"shape {shape}, and the batch (2, 3)",
        "give a mask of shape (2, 3), 1 for a token and 0 for padding",
    ):
        Ragged.from_padded(torch.zeros(2, 3), torch.ones(shape))


@pytest.mark.parametrize("value", [2, -1, 0.5])
def test_a_mask_of_other_values_is_refused(value: float) -> None:
    with refuses(InputError, "use 1 for a token, 0 for padding"):
        Ragged.from_padded(torch.zeros(1, 2), torch.tensor([[1, value]]))


def test_a_mask_that_keeps_other_counts_cannot_pad() -> None:
    batch = Ragged.from_list(drawn([1, 2]))
    with refuses(ShapeError, "the mask has (2, 1) tokens per row, and the sequences have (1, 2)"):
        batch.to_padded(torch.tensor([[1, 1], [0, 1]]))


def test_missing_sequences_are_refused() -> None:
    batch = Ragged.from_list(drawn([1, 2]))
    for index in (2, -3):
        with refuses(InputError, f"0 to 1, got {index}"):
            batch.of(index)
    with refuses(InputError, "sum to the 2 sequences", "got (1, 2)"):
        batch.split([1, 2])


def test_lengths_that_fit_no_machine_are_refused_before_memory_is_taken() -> None:
    with pytest.raises(InputError, match="10,000,000,000,000 tokens"):
        Lengths.of([10**13])
    with pytest.raises(InputError, match="10,000,000,000,000 tokens"):
        Lengths.with_capacity([10**13], 4, "cpu")


def test_sparse_tensors_are_refused() -> None:
    ids = torch.tensor([[1, 0, 2]])
    model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    for call in (
        lambda: model(ids.to_sparse()),
        lambda: model(ids, ids.bool().to_sparse()),
        lambda: Ragged.from_list([ids[0].to_sparse()]),
        lambda: Ragged(ids[0].to_sparse(), Lengths.of([3])),
    ):
        with pytest.raises(InputError, match=r"must be dense, got .*sparse.*to_dense"):
            call()
