"""Tokens that the device chooses are those that the host would choose.

Without CUDA a recorded step is computed anew at every replay; all the rest is what runs on CUDA.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import pytest
from torch import Tensor

from manyheads import Greedy, Sample, build, generate
from manyheads.decoding import request, token_source
from manyheads.decoding.generation import SamplingLoop
from manyheads.decoding.generation_config import GenerationConfig
from manyheads.decoding.request import GenerationRequest
from manyheads.decoding.steps import cuda_graph
from manyheads.decoding.steps.cuda_graph import CudaGraphSteps, RecordedGraph
from manyheads.models.decoder import Decoder
from tests.models.zoo import DECODERS, VOCABULARY

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [3, 5, 8, 9, 7, 9, 3], [2, 3], [8, 4, 6], [2, 6], [4]]


class Replay:
    """A graph that computes instead of replaying."""

    def __init__(self, compute: Callable[[], Tensor], result: Tensor) -> None:
        self.compute, self.result = compute, result

    def replay(self) -> None:
        self.result.copy_(self.compute())

    def pool(self) -> None:
        """Memory is that of the tensors."""


class EagerSteps(CudaGraphSteps):
    """Steps that are recorded nowhere."""

    def _capture(
        self, compute: Callable[[], Tensor], go_back: Callable[[], None] = lambda: None
    ) -> tuple[RecordedGraph, Tensor]:
        result = compute().clone()
        go_back()
        return Replay(compute, result), result


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> list[EagerSteps]:
    """Let `generate` take recorded steps; all that it took."""
    taken: list[EagerSteps] = []

    def steps(request: GenerationRequest) -> EagerSteps:
        assert isinstance(request.model, Decoder)
        taken.append(EagerSteps(request.model, len(request.prompts), 64))
        return taken[-1]

    monkeypatch.setattr(token_source, "CudaGraphSteps", EagerSteps)
    monkeypatch.setattr(GenerationRequest, "steps", steps)
    return taken


def made(name: str) -> Decoder:
    model = build(DECODERS[name], seed=0)
    assert isinstance(model, Decoder)
    return model.eval()


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"sampling": Sample(temperature=3.0), "seed": 5},
    "filtered": {"sampling": Sample(temperature=2.0, top_k=20, top_p=0.9, min_p=0.01), "seed": 5},
    "penalty": {"repetition_penalty": 1.7},
    "suppressed": {"suppress_tokens": tuple(range(0, VOCABULARY, 2)), "seed": 1},
    "logprobs": {"sampling": Sample(temperature=2.0), "logprobs": True, "seed": 2},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("stops", [(), tuple(range(0, VOCABULARY, 5))])
def test_the_device_chooses_what_the_host_chooses(
    name: str, stops: tuple[int, ...], on_device: list[EagerSteps], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made("llama")
    options: dict[str, Any] = {"max_new_tokens": 45, "eos_token_ids": stops} | OPTIONS[name]
    recorded = generate(model, PROMPTS, **options)
    assert on_device
    monkeypatch.undo()
    expected = generate(model, PROMPTS, **options)
    assert [one.ids for one in recorded] == [one.ids for one in expected]
    assert [one.finish_reason for one in recorded] == [one.finish_reason for one in expected]
    if "logprobs" in options:
        for one, other in zip(recorded, expected, strict=True):
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    ended_early = sum(one.finish_reason == "eos" for one in recorded)
    if ended_early > 4:
        # Four are served by a smaller program.
        assert {rows for rows, _ in on_device[0].programs} > {8}


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `generate` take recorded steps, and keep those of a model for the next call."""
    monkeypatch.setattr(CudaGraphSteps, "_capture", EagerSteps._capture)
    monkeypatch.setattr(request, "cannot", lambda *_: None)


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("immediate", [False, True])
def test_texts_that_take_turns_do_not_meet(
    immediate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config = made("llama"), GenerationConfig(max_new_tokens=30, eos_token_ids=())
    batches = (PROMPTS[:2], PROMPTS[3:4], PROMPTS[4:7])
    loops = [
        SamplingLoop(
            GenerationRequest(model, batch, config), decode_each_step=False, immediate=immediate
        )
        for batch in batches
    ]
    for _ in zip_longest(*(loop.run() for loop in loops)):
        pass
    monkeypatch.undo()
    for loop, batch in zip(loops, batches, strict=True):
        assert isinstance(loop.source, token_source.DeviceTokens)
        expected = generate(model, batch, config, progress=False)
        assert [one.ids for one in loop.generations()] == [one.ids for one in expected]


@pytest.mark.usefixtures("recorded")
def test_the_next_batch_takes_the_steps_of_one_that_has_ended() -> None:
    model, config = made("llama"), GenerationConfig(max_new_tokens=20, eos_token_ids=())
    loops = []
    for batch in (PROMPTS, PROMPTS[:3], PROMPTS[2:4]):
        loops.append(SamplingLoop(GenerationRequest(model, batch, config), decode_each_step=False))
        list(loops[-1].run())
    sources = [loop.source for loop in loops]
    assert all(isinstance(source, token_source.DeviceTokens) for source in sources)
    assert len({id(source.steps) for source in sources}) == 1


@pytest.mark.usefixtures("recorded")
def test_programs_used_longest_ago_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "MOST_PROGRAMS", 2)
    model, stops = made("llama"), tuple(range(0, VOCABULARY, 5))
    options: dict[str, Any] = {"max_new_tokens": 45, "eos_token_ids": stops, "seed": 1}
    results = [
        generate(model, PROMPTS, **options, sampling=sampling)
        for sampling in (Sample(temperature=3.0), Sample(top_k=30), Greedy(), Greedy())
    ]
    steps = cuda_graph.cuda_graph_steps(model, len(PROMPTS), 52)
    assert len(steps.programs) == 2
    monkeypatch.undo()
    expected = [
        generate(model, PROMPTS, **options, sampling=sampling)
        for sampling in (Sample(temperature=3.0), Sample(top_k=30), Greedy(), Greedy())
    ]
    for result, plain in zip(results, expected, strict=True):
        assert [one.ids for one in result] == [one.ids for one in plain]
