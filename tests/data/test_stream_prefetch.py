"""Reading ahead changes nothing but the time, and the thread goes when nobody reads."""

import gc
import threading
import time
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from manyheads.data.batch import Batch, prefetch
from manyheads.data.chunks import DocumentChunks
from manyheads.data.stream import Stream
from manyheads.errors import ConfigError
from tests.data.tiny import store_of
from tests.messages import refuses


def stream() -> Stream:
    return Stream(
        DocumentChunks(store_of([30, 5, 41, 8]), length=8), batch_tokens=16, micro_batches=2
    )


def values(batch: Batch) -> list[int]:
    assert batch.texts is not None
    return batch.texts.values.tolist()


def no_thread_is_left() -> bool:
    return not any(thread.name == "prefetch" for thread in threading.enumerate())


def test_the_same_steps_come_in_the_same_order() -> None:
    plain = list(islice(stream().steps(), 20))
    ahead = prefetch(stream().steps(), ahead=3)
    for one, other in zip(plain, ahead, strict=False):
        assert [values(batch) for batch in one.batches] == [values(b) for b in other.batches]
        assert one.after == other.after
    ahead.close()  # type: ignore[attr-defined]
    assert no_thread_is_left()


def test_the_end_comes_through() -> None:
    plain = [values(batch) for batch in stream().single_epoch()]
    assert [values(batch) for batch in prefetch(stream().single_epoch(), ahead=1)] == plain
    assert no_thread_is_left()


def failing() -> Iterator[Batch]:
    yield from islice(stream().single_epoch(), 2)
    raise OSError("the disk is gone")


def test_an_error_comes_in_its_turn() -> None:
    ahead = prefetch(failing())
    assert len([next(ahead), next(ahead)]) == 2
    with pytest.raises(OSError, match="the disk is gone"):
        next(ahead)
    assert no_thread_is_left()


def test_a_reader_that_goes_away_takes_the_thread_along() -> None:
    ahead = prefetch(stream().steps())
    next(ahead)
    del ahead
    gc.collect()
    assert no_thread_is_left()


def test_no_more_is_read_than_requested() -> None:
    read = []

    def counted() -> Iterator[Batch]:
        for number in range(100):
            read.append(number)
            yield Batch()

    ahead = prefetch(counted(), ahead=2)
    next(ahead)
    time.sleep(0.3)
    # One was handed out, two wait, one is held by the thread.
    assert len(read) <= 4
    ahead.close()  # type: ignore[attr-defined]
    with refuses(ConfigError, "ahead must be at least 1, got 0: use 1 or more."):
        prefetch(counted(), ahead=0)


def test_a_batch_is_sent_whole() -> None:
    batch = next(stream().single_epoch())
    labeled = Batch(
        texts=batch.texts, others=batch.texts, images=(torch.ones(3),), labels=torch.tensor([1])
    )
    sent = labeled.to("cpu", non_blocking=True)
    assert values(sent) == values(labeled)
    assert sent.texts is not None
    assert batch.texts is not None
    assert sent.texts.lengths.each == batch.texts.lengths.each
    assert len(sent.images) == 1
    assert labeled.to("meta", non_blocking=True).labels.device.type == "meta"  # type: ignore[union-attr]
