"""Long batches through a mixer piece by piece, where its state can carry over."""

from collections.abc import Iterator

import torch

from manyheads.cache import StateCache, StateSlot
from manyheads.mixers.mixer import Mixer
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import WatchContext

# Tokens that a CPU takes at once: what a layer computes of them stays in its caches, and memory
# does not grow with the text.
SEGMENT = 2048


def mix(
    mixer: Mixer, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
) -> Ragged:
    """What the mixer makes of a batch; on a CPU in segments, which give the same."""
    at_once = x.values.device.type != "cpu" or x.lengths.total <= SEGMENT or context is not None
    if (
        at_once
        or not (mixer.carries_state and mixer.config.causal)
        or torch.compiler.is_compiling()
    ):
        return mixer(x, cache=cache, context=context)
    outputs, states = [], []
    for group in _groups(x.lengths):
        store = StateCache()
        if cache is not None and cache.state is not None:
            store.tensors = tuple(tensors[group] for tensors in cache.state)
        for piece in _pieces(x, group):
            outputs.append(mixer(piece, cache=StateSlot(store)).values)
        states.append(store.tensors)
    if cache is not None:
        cache.keep(*(torch.cat(tensors) for tensors in zip(*states, strict=True)))
    return x.with_values(torch.cat(outputs))


def _groups(lengths: Lengths) -> Iterator[slice]:
    """Neighboring sequences that fit into one segment; a longer one is a group of its own."""
    start = tokens = 0
    for index, length in enumerate(lengths.each):
        if index > start and tokens + length > SEGMENT:
            yield slice(start, index)
            start, tokens = index, 0
        tokens += length
    yield slice(start, lengths.count)


def _pieces(x: Ragged, group: slice) -> Iterator[Ragged]:
    lengths = x.lengths.each[group]
    first = x.lengths.starts[group.start]
    device = x.values.device
    if len(lengths) > 1 or not sum(lengths):
        yield Ragged(x.values[first : first + sum(lengths)], Lengths.of(lengths, device))
        return
    for start in range(0, lengths[0], SEGMENT):
        values = x.values[first + start : first + min(start + SEGMENT, lengths[0])]
        yield Ragged(values, Lengths.of([values.shape[0]], device))
