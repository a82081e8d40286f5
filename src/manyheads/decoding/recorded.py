"""Steps of fixed shape: on CUDA recorded once and replayed with one launch each."""

from collections.abc import Callable
from functools import cache
from typing import cast
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.cache import Cache, StaticCache, StaticCachePlan
from manyheads.decoding import lean
from manyheads.models.decoder import Decoder
from manyheads.parts.experts import Experts
from manyheads.parts.positions import NoPosition, Rotary, Shaw
from manyheads.ragged import Ragged

__all__ = ["Recorded", "cannot", "general", "order_is_free", "recorded"]

Program = Callable[[Decoder, Tensor, Cache, StaticCachePlan], Tensor]

# Kernels choose their ways and compilers do their work before the recording begins.
WARM_UPS = 3
# Rooms come in multiples of this, so that one recording serves texts of many lengths.
ROOM = 256


def cannot(model: object, device: torch.device) -> str | None:
    """Why the steps of this model are not recorded; None if they can be."""
    if device.type != "cuda":
        return f"steps are recorded on CUDA and this is {device.type}"
    if not isinstance(model, Decoder):
        return f"steps of a {type(model).__name__} are not recorded"
    layers = model.config.stack.layers
    if any(isinstance(one.feedforward.inner, Experts) for one in layers if one.feedforward):
        return "experts get as many tokens as the host has to learn first"
    attentions = [layer.attention.inner for layer in layers if layer.attention]
    if not attentions:
        return "there is no attention"
    for attention in attentions:
        if attention.kernel != "auto":
            return f"the kernel {attention.kernel} was asked for by name"
        if isinstance(attention.position, Shaw) and attention.position.values:
            return "Shaw's value vectors need the pattern"
    return None


_last: WeakKeyDictionary[Decoder, "Recorded"] = WeakKeyDictionary()


def recorded(model: Decoder, sequences: int, tokens: int, *, compiled: bool = False) -> "Recorded":
    """Steps for so many sequences of so many tokens; the last recording of a model is kept."""
    room = -(-tokens // ROOM) * ROOM
    kept = _last.get(model)
    if kept is None or not kept.fits(sequences, room, compiled):
        # The old one goes first, so that there is room for the new.
        _last.pop(model, None)
        _last[model] = kept = Recorded(model, sequences, room, compiled=compiled)
    return kept


class Recorded:
    """A decoder whose every step is the replay of one recording.

    The batch keeps its size: texts that leave it are no longer answered for, and their rows run on.
    """

    def __init__(
        self, model: Decoder, sequences: int, room: int, *, compiled: bool = False
    ) -> None:
        self.sequences, self.room, self.compiled = sequences, room, compiled
        self.cache = model.new_cache(StaticCache(size=room, ring_buffers=order_is_free(model)))
        self.weights = _addresses(model)
        self.program = _program(model, sequences, room, compiled)
        self.alive = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        # Whoever lets go of the model lets go of its recording too.
        self._model = ref(model)

    @property
    def model(self) -> Decoder:
        model = self._model()
        assert model is not None, "a recording is used by those who hold its model"
        return model

    def fits(self, sequences: int, room: int, compiled: bool) -> bool:
        """Whether this recording serves such a batch, and the weights still lie where they lay."""
        shape = (self.sequences, self.compiled) == (sequences, compiled)
        return shape and self.room == room and self.weights == _addresses(self.model)

    @torch.inference_mode()
    def start(self, prompts: Ragged) -> Float[Tensor, "b v"]:
        self.cache.seen = ()
        self.alive = len(prompts)
        return self.model.next_logits(prompts, self.cache)

    @torch.inference_mode()
    def next(self, ids: Int[Tensor, " alive"]) -> Float[Tensor, "alive v"]:
        if self.graph is None:
            self._record(ids)
        elif self.cache.seen:
            self.plan.restore(torch.tensor(self.cache.seen).to(ids.device, non_blocking=True))
        # From here on only the device knows.
        self.cache.seen = ()
        self.ids[: self.alive] = ids
        assert self.graph is not None
        self.graph.replay()
        return self.logits[: self.alive]

    @torch.inference_mode()
    def select(self, sequences: list[int]) -> None:
        """Go on with these, in this order, written over the first rows."""
        rows = sequences + list(range(len(sequences), self.sequences))
        stores = [store for store in self.cache.stores if store is not None]
        index = torch.tensor(rows, device=stores[0].k.device)
        for store in stores:
            store.k.copy_(store.k[index])
            store.v.copy_(store.v[index])
        if self.cache.seen:
            self.cache.seen = tuple(self.cache.seen[row] for row in rows)
        else:
            self.plan.restore(self.plan.positions[index])
        self.alive = len(sequences)

    def _record(self, ids: Int[Tensor, " b"]) -> None:
        """The same token at the same place each time, so that no ring loses what it needs."""
        self.plan = self.cache.static_plan()
        self.ids = ids.new_zeros(self.sequences)
        self.ids[: self.alive] = ids
        begin = self.plan.positions.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.program(self.model, self.ids, self.cache, self.plan)
                self.plan.restore(begin)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.program(self.model, self.ids, self.cache, self.plan)


def _program(model: Decoder, sequences: int, room: int, compiled: bool) -> Program:
    if lean.cannot(model, sequences, room) is None:
        return lean.program
    return _compiled() if compiled else general


def general(
    model: Decoder, ids: Int[Tensor, " b"], cache: Cache, plan: StaticCachePlan
) -> Float[Tensor, "b v"]:
    """The scores after one more token a sequence, by any decoder; cache and plan go on by one."""
    x = model.embedding.embed(Ragged(ids, plan.new), plan.positions)
    hidden, _ = model.stack(x, positions=plan.positions, cache=cache, plan=plan)
    assert model.readout is not None
    logits = cast(Ragged, model.readout(hidden, model.embedding.tokens.weight)).values
    plan.advance()
    return logits


@cache
def _compiled() -> Program:
    return torch.compile(general, fullgraph=True, dynamic=False)


def _addresses(model: Decoder) -> tuple[object, ...]:
    """Where the weights lie, and which of a projection's own and its adapters' it computes with."""
    tensors = (*model.parameters(), *model.buffers())
    kinds = (
        (type(module), module.__dict__.get("active"))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    )
    return (*(tensor.data_ptr() for tensor in tensors), *kinds)


def order_is_free(model: Decoder) -> bool:
    """Rings lose the order of keys, which only biases by distance ask for."""
    positions = [
        layer.attention.inner.position
        for layer in model.config.stack.layers
        if layer.attention is not None
    ]
    return all(isinstance(position, NoPosition | Rotary) for position in positions)
