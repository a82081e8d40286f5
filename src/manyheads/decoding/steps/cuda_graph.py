"""Steps of fixed shape as CUDA graphs: captured once, then replayed with one launch each."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Protocol, TypeVar, cast, runtime_checkable
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.cache import Cache, CachePlan, FullLayerCache, StaticCache, StaticCachePlan
from manyheads.decoding import sampling
from manyheads.decoding.steps import triton_step
from manyheads.decoding.steps.token_choice import ChoiceState, TokenChoice
from manyheads.kernels import fused
from manyheads.mixers.mixer import Mixer
from manyheads.models.decoder import Decoder
from manyheads.parts import masks
from manyheads.parts.experts import Experts, grouped_at_once
from manyheads.parts.positions import Disentangled, NoPosition, Rotary, Shaw
from manyheads.parts.positions.rotary import ByLength
from manyheads.ragged import Lengths, Ragged

Step = Callable[[Decoder, Tensor, Cache, StaticCachePlan], Tensor]
Key = TypeVar("Key")
Program = TypeVar("Program")

# Libraries choose their kernels and compilers compile before the capture begins.
WARM_UPS = 3
# Where a step can be computed in two ways, each is timed so often.
REPLAYS = 5
# Texts of many lengths share a cache whose capacity is a power of two, at least this.
LEAST_CAPACITY, LEAST_COMPILED_CAPACITY = 256, 1024
# Prompts of at most this many tokens, padded to a power of two, are read by a recorded program:
# launching the kernels would take longer than they do.
MOST_RECORDED_TOKENS = 1024
# Steps of one model that are kept, by sizes of batches and ways to choose tokens, and ways to read
# prompts, by their length. They share their memory but for the logits.
MOST_PROGRAMS = 32
# A larger cache serves shorter texts up to this factor: some kernels read all of it.
SPARE_CAPACITY = 4


def cannot(model: object, device: torch.device) -> str | None:
    """Why the steps of this model cannot be captured in a CUDA graph; None if they can."""
    if device.type != "cuda":
        return f"a CUDA graph needs CUDA and the model is on {device.type}"
    if not isinstance(model, Decoder):
        return f"{type(model).__name__} is not a decoder"
    layers = model.config.stack.layers
    experts = (
        isinstance(layer.feedforward.inner, Experts) for layer in layers if layer.feedforward
    )
    if any(experts) and find_spec("triton") is None:
        return "without triton the host must know how many tokens each expert receives"
    attentions = [layer.attention.inner for layer in layers if layer.attention]
    mixers = [layer.mixer for layer in model.stack.layers if isinstance(layer.mixer, Mixer)]
    for mixer in mixers:
        if not mixer.carries_state:
            return f"{type(mixer).__name__} keeps more with every token"
    if not attentions and not mixers:
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
    model: Decoder,
    sequences: int,
    tokens: int,
    *,
    compiled: bool = False,
    user: object | None = None,
) -> "CudaGraphSteps":
    """Steps for a number of sequences of up to `tokens`; those of a model are kept for the next.

    What has a `user` serves no other one until the user is gone or `CudaGraphSteps.user` is None:
    of two streams that take turns, each needs a cache of its own.
    """
    capacity = capacity_for(tokens, compiled=compiled)
    steps = _latest.get(model)
    if steps is None or steps.in_use or not steps.fits(sequences, capacity, compiled):
        # The old ones are freed first, to make room for the new.
        steps = None
        _latest.pop(model, None)
        _latest[model] = steps = CudaGraphSteps(model, sequences, capacity, compiled=compiled)
    steps.user = None if user is None else ref(user)
    return steps


def capacity_for(tokens: int, *, compiled: bool) -> int:
    """The tokens per sequence that the cache of a graph has room for.

    >>> capacity_for(300, compiled=False), capacity_for(300, compiled=True)
    (512, 1024)
    """
    least = LEAST_COMPILED_CAPACITY if compiled else LEAST_CAPACITY
    return max(least, 1 << (tokens - 1).bit_length())


def rows_for(sequences: int) -> int:
    """The rows of the program that computes this many sequences: few sizes, little idle work.

    >>> [rows_for(sequences) for sequences in (1, 3, 9, 33, 50, 100)]
    [1, 4, 16, 48, 64, 128]
    """
    power = 1 << (sequences - 1).bit_length()
    return power * 3 // 4 if power > 32 and sequences <= power * 3 // 4 else power


@runtime_checkable
class RecordedGraph(Protocol):
    """What was recorded: a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Compute the same again, from and to the same memory."""

    def pool(self) -> Any:
        """The memory that it computes in."""


@dataclass(slots=True)
class RecordedRead:
    """How prompts of one padded length are read: their ids, the place of each last token."""

    graph: RecordedGraph
    ids: Int[Tensor, "rows n"]
    last: Int[Tensor, " rows"]
    logits: Float[Tensor, "rows v"]
    # What the graph reads besides, which must stay where it is.
    constants: tuple[CachePlan, Lengths]


@dataclass(slots=True)
class RecordedStep:
    """The step of the first rows of a cache: what it reads, what it writes, and its graph."""

    graph: RecordedGraph
    plan: StaticCachePlan
    ids: Int[Tensor, " rows"]
    logits: Float[Tensor, "rows v"]


class CudaGraphSteps:
    """A decoder whose every step is the replay of a CUDA graph.

    A program computes a fixed number of rows. Those without a sequence are computed and ignored;
    once half of them are, a smaller program takes over, on the same cache.
    """

    def __init__(
        self, model: Decoder, sequences: int, capacity: int, *, compiled: bool = False
    ) -> None:
        self.sequences = rows_for(sequences)
        self.capacity, self.compiled = capacity, compiled
        rings = ignores_key_order(model)
        config = StaticCache(size=capacity, ring_buffers=rings, rows=self.sequences)
        self.cache = model.new_cache(config)
        self.weights = _addresses(model)
        self.step: Step
        if triton_step.cannot(model) is None:
            self.step = triton_step.llama_step
        else:
            self.step = _compiled_step() if compiled else fixed_shape_step
        self.active = 0
        # By rows and how they choose the next token; None where the host chooses.
        self.programs: dict[tuple[int, TokenChoice | None], RecordedStep] = {}
        self.chooser: ChoiceState | None = None
        self.choice: TokenChoice | None = None
        full = all(isinstance(store, FullLayerCache) for store in self.cache.stores)
        self.reads_by_triton = self.step is triton_step.llama_step and full
        # By rows and length of the prompts.
        self.readers: dict[tuple[int, int], RecordedRead] = {}
        self.records_reading = full and _pads_unseen(model)
        # What mixers keep, by layer.
        self.states: dict[int, tuple[Tensor, ...]] = {}
        # Where the sequences are in their texts: on the host after a start, then in a program.
        self.latest: RecordedStep | None = None
        # Whose texts are in the cache, as long as they go on.
        self.user: ref[object] | None = None
        # A weak reference, so that the graphs are freed with their model.
        self._model = ref(model)

    @property
    def model(self) -> Decoder:
        model = self._model()
        assert model is not None, "the caller holds the model"
        return model

    @property
    def in_use(self) -> bool:
        return self.user is not None and self.user() is not None

    def fits(self, sequences: int, capacity: int, compiled: bool) -> bool:
        """Whether these serve such a batch, and the weights are still at their addresses."""
        room = capacity <= self.capacity <= SPARE_CAPACITY * capacity
        rows = sequences <= self.sequences
        return (
            room and rows and compiled == self.compiled and self.weights == _addresses(self.model)
        )

    @torch.inference_mode()
    def start(self, prompts: Ragged) -> Float[Tensor, "b v"]:
        self.cache.seen, self.latest, self.choice = (), None, None
        for state in self.cache.states.values():
            state.tensors = ()
        self.active = len(prompts)
        lengths = prompts.lengths
        program = self._reading_program(prompts)
        if program is None and self.reads_by_triton and self._allocated and 0 not in lengths.each:
            plan = self.cache.plan(lengths)
            last = lengths.offsets[1:].long() - 1
            logits = triton_step.llama_read(self.model, prompts, self.cache, plan, last)
            self.cache.finish(plan)
            return logits
        if program is None:
            return self.model.next_logits(prompts, self.cache)
        program.ids[: self.active] = 0
        program.ids[lengths.sequence_of_token, lengths.positions] = prompts.values
        starts = torch.arange(self.active, device=prompts.device) * program.ids.shape[1]
        program.last[: self.active] = starts + lengths.offsets.diff() - 1
        program.graph.replay()
        self.cache.seen = lengths.each
        return program.logits[: self.active]

    @torch.inference_mode()
    def next(self, ids: Int[Tensor, " active"]) -> Float[Tensor, "active v"]:
        program = self._program(ids.device)
        program.ids[: self.active] = ids
        program.graph.replay()
        return program.logits[: self.active]

    @torch.inference_mode()
    def begin_choosing(
        self,
        logits: Float[Tensor, "active v"],
        choice: TokenChoice,
        method: sampling.Sampling,
        texts: Sequence[Sequence[int]],
        uniforms: Float[Tensor, "active count"] | None,
    ) -> ChoiceState:
        """Choose the token after the prompts; from here on `advance` takes whole steps."""
        if self.chooser is None:
            self.chooser = ChoiceState(self.sequences, logits.shape[1], logits.device)
        self.choice = choice
        self.chooser.begin(choice, method, texts)
        if uniforms is not None:
            self.chooser.write_uniforms(0, uniforms)
        self.chooser.choose(logits)
        return self.chooser

    @torch.inference_mode()
    def advance(self) -> None:
        """Read the tokens chosen last and choose the next ones, all on the device."""
        assert self.chooser is not None
        self._program(self.chooser.ids.device).graph.replay()

    def fewer_rows(self, sequences: int) -> bool:
        """Whether a smaller program would serve this many sequences."""
        return 2 * rows_for(sequences) <= rows_for(self.active)

    @torch.inference_mode()
    def select(self, sequences: list[int]) -> None:
        """Continue with these sequences, in this order, in the first rows of the batch."""
        count = len(sequences)
        index = torch.tensor(sequences, device=self.cache.device)
        for tensor in self._rows_in_place():
            tensor[:count] = tensor[index]
        if self.latest is None:
            self.cache.seen = tuple(self.cache.seen[sequence] for sequence in sequences)
        else:
            positions = self.latest.plan.positions.clone()
            positions[:count] = positions[index]
            self.latest.plan.restore(positions)
        self.active = count

    def _rows_in_place(self) -> Iterator[Tensor]:
        """All that the cache holds, by sequence."""
        for store in self.cache.stores:
            if store is not None:
                yield from (store.k, store.v)
        for state in self.cache.states.values():
            yield from state.tensors
        if self.chooser is not None and self.choice is not None:
            yield from self.chooser.by_row()

    def _program(self, device: torch.device) -> RecordedStep:
        """The program for the sequences that are left, at the positions that they have reached."""
        latest = self.latest
        rows = rows_for(self.active)
        if latest is not None and 2 * rows > len(latest.ids):
            return latest
        if latest is None:
            positions = torch.zeros(rows, dtype=torch.long)
            positions[: self.active] = torch.tensor(self.cache.seen)
            positions = positions.to(device, non_blocking=True)
            self._keep_states()
        else:
            positions = latest.plan.positions[:rows].clone()
        key = rows, self.choice
        if key not in self.programs:
            self.programs[key] = self._record(positions)
        self.latest = _use(self.programs, key)
        self.latest.plan.restore(positions)
        # From here on only the device knows the positions.
        self.cache.seen = ()
        return self.latest

    def _keep_states(self) -> None:
        """Copy the states of the prompts to where the programs expect them."""
        for layer, state in self.cache.states.items():
            if layer not in self.states:
                self.states[layer] = tuple(
                    tensor.new_zeros(self.sequences, *tensor.shape[1:]) for tensor in state.tensors
                )
            for own, tensor in zip(self.states[layer], state.tensors, strict=True):
                own[: self.active] = tensor[: self.active]
            state.tensors = self.states[layer]

    def _reading_program(self, prompts: Ragged) -> RecordedRead | None:
        """The program that reads such prompts; None if the model itself is to read them.

        What is written to the cache behind the end of a prompt is overwritten before it is seen.
        """
        rows, length = rows_for(len(prompts)), 1 << (prompts.lengths.longest - 1).bit_length()
        small = rows * length <= MOST_RECORDED_TOKENS and length <= self.capacity
        if not self.records_reading or not small or 0 in prompts.lengths.each:
            return None
        if (rows, length) not in self.readers:
            if not self._allocated:
                # The cache takes the shape of the first keys and values.
                self.model.next_logits(prompts, self.cache)
                self.cache.seen = ()
            self.readers[rows, length] = self._record_reading(rows, length, prompts.device)
        return _use(self.readers, (rows, length))

    @property
    def _allocated(self) -> bool:
        """Whether the cache has its memory, which it takes for the first keys and values."""
        return all(store is not None and store.k.numel() > 0 for store in self.cache.stores)

    def _record_reading(self, rows: int, length: int, device: torch.device) -> RecordedRead:
        model, first = self.model, self.cache.first(rows)
        ids = torch.zeros(rows, length, dtype=torch.long, device=device)
        last = torch.zeros(rows, dtype=torch.long, device=device)
        plan = CachePlan((0,) * rows, Lengths.of([length] * rows, device))
        ones = Lengths.of([1] * rows, device)

        def read() -> Float[Tensor, "rows v"]:
            if self.reads_by_triton:
                prompts = Ragged(ids.flatten(), plan.new)
                return triton_step.llama_read(model, prompts, first, plan, last)
            x = model.embedding.embed(Ragged(ids.flatten(), plan.new), plan.positions)
            hidden, _ = model.stack(x, positions=plan.positions, cache=first, plan=plan)
            return _logits(model, Ragged(hidden.values[last], ones))

        graph, logits = self._capture(read)
        return RecordedRead(graph, ids, last, logits, (plan, ones))

    def _record(self, positions: Int[Tensor, " rows"]) -> RecordedStep:
        """Every warm-up computes a token at the same position, so no ring loses a key."""
        first = self.cache.first(len(positions))
        first.seen = tuple(positions.tolist())
        plan, ids = first.static_plan(), torch.zeros_like(positions)
        states = [tensor for state in first.states.values() for tensor in state.tensors]
        chooser = self.chooser if self.choice is not None else None
        if chooser is not None:
            ids = chooser.ids[: len(positions)]
            states += [tensor[: len(positions)] for tensor in chooser.by_row()]
        begin = [tensor.clone() for tensor in states]

        def go_back() -> None:
            plan.restore(positions)
            for state, old in zip(states, begin, strict=True):
                state.copy_(old)

        def record(step: Step) -> RecordedStep:
            def compute() -> Float[Tensor, "rows v"]:
                logits = self._step_in_place(step, ids, first, plan)
                if chooser is not None:
                    chooser.choose(logits)
                return logits

            graph, logits = self._capture(compute, go_back)
            return RecordedStep(graph, plan, ids, logits)

        program = record(self.step)
        if self.step is triton_step.llama_step and triton_step.few_fit(self.model, len(positions)):
            # Which products are faster depends on their sizes and on the device.
            own = record(partial(triton_step.llama_step, few=True))
            if _seconds(own.graph, go_back) < _seconds(program.graph, go_back):
                return own
        return program

    def _capture(
        self, compute: Callable[[], Tensor], go_back: Callable[[], None] = lambda: None
    ) -> tuple[RecordedGraph, Tensor]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                compute()
                go_back()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # The graphs compute in the same memory, since they never run at the same time.
        recorded: list[RecordedStep | RecordedRead] = [*self.programs.values()]
        recorded += self.readers.values()
        # cuBLAS keeps a workspace for each stream, that of the warm-ups too. A graph needs one in
        # its own memory: another may be freed while this graph still writes to it.
        torch._C._cuda_clearCublasWorkspaces()
        with torch.cuda.graph(graph, pool=recorded[0].graph.pool() if recorded else None):
            result = compute()
        torch._C._cuda_clearCublasWorkspaces()
        return graph, result

    def _step_in_place(
        self, step: Step, ids: Int[Tensor, " rows"], cache: Cache, plan: StaticCachePlan
    ) -> Float[Tensor, "rows v"]:
        """A step after which the states of mixers are where they were before it."""
        places = {layer: state.tensors for layer, state in cache.states.items()}
        logits = step(self.model, ids, cache, plan)
        for layer, state in cache.states.items():
            for place, tensor in zip(places[layer], state.tensors, strict=True):
                place.copy_(tensor)
            state.tensors = places[layer]
        return logits


def _use(programs: dict[Key, Program], key: Key) -> Program:
    """The program of a key, which is the last in use now; those used longest ago are dropped.

    One that the device still computes is freed when it has ended.
    """
    programs[key] = programs.pop(key)
    while len(programs) > MOST_PROGRAMS:
        programs.pop(next(iter(programs)))
    return programs[key]


def _seconds(graph: RecordedGraph, go_back: Callable[[], None]) -> float:
    """The shortest of a few replays, each of the same step."""
    seconds = []
    for _ in range(REPLAYS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        go_back()
        stop.synchronize()
        seconds.append(start.elapsed_time(stop))
    return min(seconds)


def fixed_shape_step(
    model: Decoder, ids: Int[Tensor, " b"], cache: Cache, plan: StaticCachePlan
) -> Float[Tensor, "b v"]:
    """The logits after one more token per sequence, through the layers of any decoder.

    The cache and the plan advance by one.
    """
    x = model.embedding.embed(Ragged(ids, plan.new), plan.positions)
    hidden, _ = model.stack(x, positions=plan.positions, cache=cache, plan=plan)
    plan.advance()
    return _logits(model, hidden)


def _logits(model: Decoder, hidden: Ragged) -> Float[Tensor, "b v"]:
    assert model.readout is not None
    return cast(Ragged, model.readout(hidden, model.embedding.tokens.weight)).values


@cache
def _compiled_step() -> Step:
    return torch.compile(fixed_shape_step, fullgraph=True, dynamic=False)


def _addresses(model: Decoder) -> tuple[object, ...]:
    """The addresses of the weights, and the class and active adapters of every projection."""
    marks: list[object] = []
    for module in model.modules():
        tensors = (*module._parameters.values(), *module._buffers.values())
        marks += [tensor.data_ptr() for tensor in tensors if tensor is not None]
        if isinstance(module, nn.Linear):
            marks.append((type(module), module.__dict__.get("active")))
    return tuple(marks)


def _pads_unseen(model: Decoder) -> bool:
    """Whether tokens behind the end of a prompt change nothing before it, and can be recorded.

    A flash kernel reads the prompts, every layer attends, and no position depends on the length of
    the longest text.
    """
    config, weight = model.config, next(model.parameters())
    if weight.dtype not in triton_step.HALF or find_spec("triton") is None:
        return False
    if not isinstance(config.embedding.position, NoPosition):
        return False
    for layer in config.stack.layers:
        if layer.attention is None or layer.mixer is not None:
            return False
        feedforward = None if layer.feedforward is None else layer.feedforward.inner
        if isinstance(feedforward, Experts) and not grouped_at_once(feedforward, weight.dtype):
            return False
        attention = layer.attention.inner
        if not isinstance(attention.position, NoPosition | Rotary) or attention.softcap != "none":
            return False
        position = attention.position
        if isinstance(position, Rotary) and isinstance(position.scaling, ByLength):
            return False
        if masks.exact_band(attention.mask) is None or attention.groups is not None:
            return False
        if attention.size > fused.LARGEST_HEAD or attention.size % 8:
            return False
    return True


def ignores_key_order(model: Decoder) -> bool:
    """Whether a ring may hold the keys in any order: only biases by distance depend on it."""
    positions = [
        layer.attention.inner.position
        for layer in model.config.stack.layers
        if layer.attention is not None
    ]
    return all(isinstance(position, NoPosition | Rotary) for position in positions)
