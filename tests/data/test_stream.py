"""The stream: one order for any number of processes, restored exactly from any step."""

from collections.abc import Callable
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyheads.data.chunks import Chunks, DocumentChunks, FixedChunks
from manyheads.data.stream import Stream, StreamPosition, StreamStep
from manyheads.errors import ConfigError
from tests.data.tiny import store_of
from tests.messages import refuses

LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=40).filter(lambda each: sum(each) >= 8)
KINDS: list[Callable[[list[int]], Chunks]] = [
    lambda lengths: DocumentChunks(store_of(lengths), length=8),
    lambda lengths: DocumentChunks(store_of(lengths), length=9, opening=7, closing=8),
    lambda lengths: FixedChunks(store_of(lengths), length=5),
]
BEGINNING = StreamPosition()
LATER = 8
EACH_KIND = pytest.mark.parametrize("kind", KINDS, ids=["documents", "framed", "fixed"])


def growing(*sizes: int) -> Callable[[int], int]:
    """Each of these many micro-batches for two steps, the last for ever."""
    return lambda step: sizes[min(step // 2, len(sizes) - 1)]


def chunks_of(step: StreamStep) -> list[tuple[int, list[list[int]]]]:
    """A step as plain numbers: the place and the sequences of each micro-batch."""
    shown = []
    for place, batch in zip(step.indices, step.batches, strict=True):
        assert batch.texts is not None
        shown.append((place, [each.tolist() for each in batch.texts.to_list()]))
    return shown


def first_steps(stream: Stream, count: int, since: StreamPosition = BEGINNING) -> list[StreamStep]:
    return list(islice(stream.steps(since), count))


@EACH_KIND
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_an_epoch_holds_every_piece_once(
    kind: Callable[[list[int]], Chunks], lengths: list[int], seed: int
) -> None:
    pieces = kind(lengths)
    stream = Stream(pieces, batch_tokens=20, seed=seed)
    for epoch in (0, 3):
        numbers = [number for batch in stream.epoch(epoch) for number in batch]
        assert sorted(numbers) == list(range(len(pieces)))


@given(lengths=LENGTHS, length=st.integers(3, 50), framed=st.booleans())
def test_every_token_is_streamed_once_within_its_document(
    lengths: list[int], length: int, framed: bool
) -> None:
    store = store_of(lengths)
    frame = {"opening": 1_000_000, "closing": 1_000_001} if framed else {}
    stream = Stream(DocumentChunks(store, length=length, **frame), batch_tokens=60)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    seen: list[int] = []
    for batch in stream.single_epoch():
        assert batch.texts is not None
        assert batch.tokens <= 60
        for sequence in batch.texts.to_list():
            tokens = sequence.tolist()
            assert len(tokens) <= length
            if framed:
                assert (tokens[0], tokens[-1]) == (1_000_000, 1_000_001)
                tokens = tokens[1:-1]
            assert tokens == list(range(tokens[0], tokens[-1] + 1))
            assert len(set(owner[tokens])) == 1
            seen += tokens
    assert sorted(seen) == list(range(store.size))


@given(lengths=LENGTHS)
def test_fixed_sequences_are_cuts_of_all_documents_end_to_end(lengths: list[int]) -> None:
    store = store_of(lengths)
    stream = Stream(FixedChunks(store, length=4), batch_tokens=12, seed=1)
    result = [sequence for batch in stream.single_epoch() for sequence in batch.texts.to_list()]  # type: ignore[union-attr]
    assert {len(each) for each in result} == {4}
    tokens = sorted(torch.cat(result).tolist())
    assert tokens == list(range(store.size // 4 * 4))
    shapes = {batch.tokens for step in first_steps(stream, 20) for batch in step.batches}
    assert shapes == {12}


@EACH_KIND
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("micro_batches", [3, 5, growing(3, 4)])
def test_processes_together_do_what_one_does(
    kind: Callable[[list[int]], Chunks], world: int, micro_batches: int | Callable[[int], int]
) -> None:
    stream = Stream(kind([17, 3, 40, 9]), batch_tokens=16, micro_batches=micro_batches, seed=3)
    alone = stream.steps()
    shares = [stream.steps(rank=rank, world_size=world) for rank in range(world)]
    for _ in range(12):
        whole, parts = next(alone), [next(share) for share in shares]
        assert sorted(pair for part in parts for pair in chunks_of(part)) == chunks_of(whole)
        assert [list(part.indices) for part in parts] == [
            list(range(rank, len(whole.batches), world)) for rank in range(world)
        ]
        assert {(part.number, part.tokens, part.sequences, part.after) for part in parts} == {
            (whole.number, whole.tokens, whole.sequences, whole.after)
        }
        assert whole.tokens == sum(batch.tokens for batch in whole.batches)
        assert whole.sequences == sum(len(batch.texts or ()) for batch in whole.batches)


@EACH_KIND
@settings(max_examples=10)
@given(lengths=LENGTHS, seed=st.integers(0, 9), micro_batches=st.integers(1, 5))
def test_going_on_from_any_step_is_as_never_having_stopped(
    kind: Callable[[list[int]], Chunks], lengths: list[int], seed: int, micro_batches: int
) -> None:
    pieces = kind(lengths)
    stream = Stream(pieces, batch_tokens=25, micro_batches=micro_batches, seed=seed)
    whole = first_steps(stream, LATER)
    for done in range(LATER):
        since = BEGINNING if done == 0 else whole[done - 1].after
        anew = Stream(pieces, batch_tokens=25, micro_batches=micro_batches, seed=seed)
        rest = first_steps(anew, min(3, LATER - done), since)
        assert [chunks_of(step) for step in rest] == [
            chunks_of(step) for step in whole[done : done + 3]
        ]
        assert [step.number for step in rest] == [*range(done, LATER)][:3]
        assert [step.after for step in rest] == [step.after for step in whole[done : done + 3]]
        assert anew.position(done) == since


@EACH_KIND
def test_a_function_of_the_step_grows_the_batch(kind: Callable[[list[int]], Chunks]) -> None:
    stream = Stream(kind([50, 60]), batch_tokens=10, micro_batches=growing(1, 2, 5))
    assert [len(step.batches) for step in first_steps(stream, 8)] == [1, 1, 2, 2, 5, 5, 5, 5]
    assert stream.position(5) == first_steps(stream, 5)[-1].after


def test_epochs_differ_and_seeds_differ() -> None:
    pieces = FixedChunks(store_of([400]), length=2)
    orders = {
        tuple(map(tuple, Stream(pieces, batch_tokens=100, seed=seed).epoch(epoch)))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9
    plain = Stream(pieces, batch_tokens=100, shuffle=False)
    assert [number for batch in plain.epoch(0) for number in batch] == list(range(200))


@EACH_KIND
def test_processes_share_one_epoch_between_them(kind: Callable[[list[int]], Chunks]) -> None:
    stream = Stream(kind([50, 3, 60]), batch_tokens=10)
    values = [batch.texts.values.tolist() for batch in stream.single_epoch()]  # type: ignore[union-attr]
    for rank in range(3):
        mine = [
            batch.texts.values.tolist() for batch in stream.single_epoch(rank=rank, world_size=3)
        ]  # type: ignore[union-attr]
        assert mine == values[rank::3]


def test_what_cannot_be_streamed_is_refused() -> None:
    store = store_of([10, 20])
    with refuses(ConfigError, "batch_tokens=7 cannot hold a sequence of 8 tokens: use 8 or more."):
        Stream(DocumentChunks(store, length=8), batch_tokens=7)
    with refuses(ConfigError, "length=2 leaves no space for text: use 3 or more."):
        DocumentChunks(store, length=2, opening=0, closing=1)
    with refuses(
        ConfigError, "30 tokens are fewer than length=31: use more text, or a smaller length."
    ):
        FixedChunks(store, length=31)
    with refuses(ConfigError, "length must be at least 1, got 0: use 1 or more."):
        FixedChunks(store, length=0)
    with refuses(ConfigError, "there is nothing to stream: use a source that has text."):
        Stream(DocumentChunks(store_of([]), length=8), batch_tokens=7)
    stream = Stream(DocumentChunks(store, length=8), batch_tokens=8, micro_batches=2)
    with refuses(ConfigError, "rank=2 is out of range for world_size=2: use 0 to 1."):
        next(stream.steps(rank=2, world_size=2))
    with refuses(
        ConfigError,
        "step 0 has micro_batches=2 for 3 processes: use 3 or more.",
    ):
        next(stream.steps(rank=0, world_size=3))


def test_pieces_with_a_stride_overlap_and_cover_the_text() -> None:
    pieces = FixedChunks(store_of([30, 5]), length=8, stride=3)
    assert len(pieces) == 10
    batch = pieces.batch(range(10))
    assert batch.texts is not None
    rows = batch.texts.to_padded()
    assert torch.equal(rows[1:, :5], rows[:-1, 3:])
    with refuses(ConfigError, "stride=9 would skip tokens: use 1 to length=8."):
        FixedChunks(store_of([30]), length=8, stride=9)
