"""Entries of the table of names: read in both directions, bit by bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyheads.checkpoints.tensor_map import Either, Entry, Interleaved, Stacked, check_fits
from manyheads.errors import InputError

SIZES = st.integers(1, 5)


def numbered(*shape: int) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def there_and_back(entry: Entry, ours: Tensor) -> dict[str, Tensor]:
    peer = entry.write({entry.name: ours})
    shapes = {name: tuple(tensor.shape) for name, tensor in peer.items()}
    assert shapes == entry.expected({entry.name: tuple(ours.shape)})
    again = entry.read(peer.__getitem__)
    assert torch.equal(again[entry.name], ours)
    assert again[entry.name].is_contiguous()
    return peer


@given(groups=SIZES, queries=SIZES, gates=SIZES, keys=SIZES, columns=st.integers(0, 3))
def test_interleaved_rows_come_back(
    groups: int, queries: int, gates: int, keys: int, columns: int
) -> None:
    blocks = (groups * queries, groups * gates)
    rows = (sum(blocks), keys, keys)
    entry = Interleaved("mine", ("q", "k", "v"), rows, blocks=blocks, groups=groups)
    shape = (columns,) if columns else ()
    ours = numbered(sum(rows), *shape)
    peer = there_and_back(entry, ours)
    query, gate, *_ = ours.split([*blocks, keys, keys])
    for group, interleaved in enumerate(peer["q"].chunk(groups)):
        assert torch.equal(interleaved[:queries], query.chunk(groups)[group])
        assert torch.equal(interleaved[queries:], gate.chunk(groups)[group])


@given(count=SIZES, width=SIZES, hidden=SIZES)
def test_stacked_matrices_come_back(count: int, width: int, hidden: int) -> None:
    names = tuple(f"{index}.{part}" for index in range(count) for part in ("gate", "up"))
    entry = Stacked("mine", names, (hidden,) * len(names), count=count)
    ours = numbered(count, width, 2 * hidden)
    peer = there_and_back(entry, ours)
    for index, matrix in enumerate(ours):
        assert torch.equal(peer[f"{index}.gate"], matrix[:, :hidden].T)
        assert torch.equal(peer[f"{index}.up"], matrix[:, hidden:].T)


@given(shape=st.lists(SIZES, min_size=2, max_size=3))
def test_what_is_transposed_comes_back(shape: list[int]) -> None:
    peer = there_and_back(Entry("mine", ("theirs",), transposed=True), numbered(*shape))
    assert torch.equal(peer["theirs"].mT, numbered(*shape))


EITHER = Either(
    Stacked("mine", ("0", "1"), (4, 4), count=2), Entry("mine", ("whole",), transposed=True)
)


def test_either_way_is_read_and_the_usual_one_written() -> None:
    ours = numbered(2, 3, 4)
    usual, other = EITHER.usual.write({"mine": ours}), EITHER.other.write({"mine": ours})
    assert (set(usual), set(other)) == ({"0", "1"}, {"whole"})
    for file in (usual, other):
        shapes = {name: tuple(tensor.shape) for name, tensor in file.items()}
        check_fits([EITHER], {"mine": (2, 3, 4)}, shapes, "file")
        assert torch.equal(EITHER.read(file.__getitem__)["mine"], ours)
    assert EITHER.write({"mine": ours}).keys() == usual.keys()


@pytest.mark.parametrize(
    ("result", "fault"),
    [
        ({}, r"0 \(4, 3\) is missing; 1 \(4, 3\) is missing"),
        ({"0": (4, 3)}, r"1 \(4, 3\) is missing"),
        ({"whole": (2, 3, 4)}, r"whole has shape \(2, 3, 4\), expected \(2, 4, 3\)"),
        ({"0": (4, 3), "1": (4, 3), "whole": (2, 4, 3)}, "whole is not part of the model"),
    ],
)
def test_a_file_that_has_neither_way_whole_is_refused(
    result: dict[str, tuple[int, ...]], fault: str
) -> None:
    with pytest.raises(InputError, match=fault):
        check_fits([EITHER], {"mine": (2, 3, 4)}, result, "file")
