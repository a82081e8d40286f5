"""Steps of fixed shape as a CUDA graph: captured once, then replayed with one launch each."""

from collections.abc import Callable
from functools import cache
from typing import cast
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.cache import Cache, StaticCache, StaticCachePlan
from manyheads.decoding.steps import triton_step
from manyheads.models.decoder import Decoder
from manyheads.parts.experts import Experts
from manyheads.parts.positions import Disentangled, NoPosition, Rotary, Shaw
from manyheads.ragged import Ragged

Step = Callable[[Decoder, Tensor, Cache, StaticCachePlan], Tensor]

# Libraries choose their kernels and compilers compile before the capture begins.
WARM_UPS = 3
# The capacity of a cache is a multiple of this, so that one graph serves texts of many lengths.
CAPACITY_MULTIPLE = 256
# A compiled step is compiled for one capacity, so this is the least and it only ever doubles.
LEAST_COMPILED_CAPACITY = 1024


def cannot(model: object, device: torch.device) -> str | None:
    """Why the steps of this model cannot be captured in a CUDA graph; None if they can."""
    if device.type != "cuda":
        return f"a CUDA graph needs CUDA and the model is on {device.type}"
    if not isinstance(model, Decoder):
        return f"{type(model).__name__} is not a decoder"
    layers = model.config.stack.layers
    if any(isinstance(layer.feedforward.inner, Experts) for layer in layers if layer.feedforward):
        return "the host must know how many tokens each expert receives"
    attentions = [layer.attention.inner for layer in layers if layer.attention]
    if not attentions:
        return "the model has no attention"
    if model.stack.rotation_switch is not None:
        return "LongRoPE rotates the keys in the cache again when a text becomes long"
    for attention in attentions:
        if attention.kernel != "auto":
            return f"a layer requires the kernel {attention.kernel!r}"
        if isinstance(attention.position, Shaw) and attention.position.values:
            return "Shaw's value vectors need the pattern"
        if isinstance(attention.position, Disentangled):
            return "the cache keeps no scores of keys with distances"
    return None


_latest: WeakKeyDictionary[Decoder, "CudaGraphSteps"] = WeakKeyDictionary()


def cuda_graph_steps(
    model: Decoder, sequences: int, tokens: int, *, compiled: bool = False
) -> "CudaGraphSteps":
    """Steps for a number of sequences of up to `tokens`; the latest graph of a model is reused."""
    capacity = capacity_for(tokens, compiled=compiled)
    steps = _latest.get(model)
    if steps is None or not steps.fits(sequences, capacity, compiled):
        # The old one is freed first, to make room for the new one.
        steps = None
        _latest.pop(model, None)
        _latest[model] = steps = CudaGraphSteps(model, sequences, capacity, compiled=compiled)
    return steps


def capacity_for(tokens: int, *, compiled: bool) -> int:
    """The tokens per sequence that the cache of a graph has room for.

    >>> capacity_for(300, compiled=False), capacity_for(300, compiled=True)
    (512, 1024)
    """
    if not compiled:
        return -(-tokens // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE
    return max(LEAST_COMPILED_CAPACITY, 1 << (tokens - 1).bit_length())


class CudaGraphSteps:
    """A decoder whose every step is the replay of one CUDA graph.

    The size of the batch is fixed: the rows of sequences that leave it are computed and ignored.
    """

    def __init__(
        self, model: Decoder, sequences: int, capacity: int, *, compiled: bool = False
    ) -> None:
        self.sequences, self.capacity, self.compiled = sequences, capacity, compiled
        rings = ignores_key_order(model)
        self.cache = model.new_cache(StaticCache(size=capacity, ring_buffers=rings))
        self.weights = _addresses(model)
        self.step: Step
        if triton_step.cannot(model, sequences, capacity) is None:
            self.step = triton_step.llama_step
        else:
            self.step = _compiled_step() if compiled else fixed_shape_step
        self.active = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        # A weak reference, so that the graph is freed with its model.
        self._model = ref(model)

    @property
    def model(self) -> Decoder:
        model = self._model()
        assert model is not None, "the caller holds the model"
        return model

    def fits(self, sequences: int, capacity: int, compiled: bool) -> bool:
        """Whether this graph serves such a batch, and the weights are still at its addresses.

        A compiled one also serves shorter texts, which costs less than compiling another.
        """
        shape = (self.sequences, self.compiled) == (sequences, compiled)
        room = self.capacity >= capacity if compiled else self.capacity == capacity
        return shape and room and self.weights == _addresses(self.model)

    @torch.inference_mode()
    def start(self, prompts: Ragged) -> Float[Tensor, "b v"]:
        self.cache.seen = ()
        self.active = len(prompts)
        return self.model.next_logits(prompts, self.cache)

    @torch.inference_mode()
    def next(self, ids: Int[Tensor, " active"]) -> Float[Tensor, "active v"]:
        if self.graph is None:
            self._capture(ids)
        elif self.cache.seen:
            self.plan.restore(torch.tensor(self.cache.seen).to(ids.device, non_blocking=True))
        # From here on only the device knows the positions.
        self.cache.seen = ()
        self.ids[: self.active] = ids
        assert self.graph is not None
        self.graph.replay()
        return self.logits[: self.active]

    @torch.inference_mode()
    def select(self, sequences: list[int]) -> None:
        """Continue with these sequences, in this order, in the first rows of the batch."""
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
        self.active = len(sequences)

    def _capture(self, ids: Int[Tensor, " b"]) -> None:
        """Every warm-up computes the same token at the same position, so no ring loses a key."""
        self.plan = self.cache.static_plan()
        self.ids = ids.new_zeros(self.sequences)
        self.ids[: self.active] = ids
        begin = self.plan.positions.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.step(self.model, self.ids, self.cache, self.plan)
                self.plan.restore(begin)
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self.step(self.model, self.ids, self.cache, self.plan)


def fixed_shape_step(
    model: Decoder, ids: Int[Tensor, " b"], cache: Cache, plan: StaticCachePlan
) -> Float[Tensor, "b v"]:
    """The logits after one more token per sequence, through the layers of any decoder.

    The cache and the plan advance by one.
    """
    x = model.embedding.embed(Ragged(ids, plan.new), plan.positions)
    hidden, _ = model.stack(x, positions=plan.positions, cache=cache, plan=plan)
    assert model.readout is not None
    logits = cast(Ragged, model.readout(hidden, model.embedding.tokens.weight)).values
    plan.advance()
    return logits


@cache
def _compiled_step() -> Step:
    return torch.compile(fixed_shape_step, fullgraph=True, dynamic=False)


def _addresses(model: Decoder) -> tuple[object, ...]:
    """The addresses of the weights, and the class and active adapters of every projection."""
    tensors = (*model.parameters(), *model.buffers())
    kinds = (
        (type(module), module.__dict__.get("active"))
        for module in model.modules()
        if isinstance(module, nn.Linear)
    )
    return (*(tensor.data_ptr() for tensor in tensors), *kinds)


def ignores_key_order(model: Decoder) -> bool:
    """Whether a ring may hold the keys in any order: only biases by distance depend on it."""
    positions = [
        layer.attention.inner.position
        for layer in model.config.stack.layers
        if layer.attention is not None
    ]
    return all(isinstance(position, NoPosition | Rotary) for position in positions)
