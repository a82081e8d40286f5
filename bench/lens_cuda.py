"""A Llama-like model on CUDA: all statistics of all heads against the plain forward, bfloat16."""

import os
import time
from functools import cache
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from side_by_side import Race, Work, alone, count, peak_extra, race, say, show
from torch import Tensor

from manyheads.lens.measure import watcher
from manyheads.lens.measure.row_sums import (
    RowSums,
    RowSumSpec,
    stream_rows_and_output,
    sum_rows,
)
from manyheads.lens.measure.score_tiles import TiledScores
from manyheads.lens.measure.statistics import statistics
from manyheads.models.build import build
from manyheads.models.decoder import Decoder
from manyheads.ragged import Ragged

__all__ = ["run"]

DEVICE = "cuda"
HEADS, SIZE, HIDDEN, VOCABULARY = 32, 128, 11008, 32_000
FORWARD, OURS = "plain forward", "all statistics"
CLASSES = {f"class {number}": range(100 * number, 100 * number + 100) for number in range(5)}
# What the first call of a process is timed with, in the shape of Llama's 1.24 billion weights.
TEXTS, SHORT_TEXT = 8, 1024
# Of the largest entropy, distance and so on: products of bfloat16 in another order.
LIMIT = 1e-3


def run(*, rounds: int, layers: int, tokens: int) -> dict[str, float]:
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, random weights")
    say(f"{layers} layers x {HEADS} heads of {SIZE}; words as frequent as Zipf has them\n")
    _check(layers, min(tokens, 4096))
    works = {FORWARD: _forward(layers, tokens), OURS: _statistics(layers, tokens)}
    halves = {FORWARD: _forward(layers, tokens // 2), OURS: _statistics(layers, tokens // 2)}
    memory = {name: peak_extra(work, DEVICE) for name, work in works.items()}
    half = {name: peak_extra(work, DEVICE) for name, work in halves.items()}
    times = race(works, device=DEVICE, rounds=rounds, warmups=0)
    first, second = alone(_first_calls)
    work = f"16 layers x {HEADS} heads of 64, {TEXTS} texts of {SHORT_TEXT:,} tokens"
    say(f"{work}, no kernel compiled before: {first:.1f} s, then {second:.2f} s\n")
    figures = _report(times, memory, half, layers, tokens)
    return figures | {"first call, s": first, "second call, s": second}


def _first_calls() -> tuple[float, float]:
    """Seconds of the first and the second statistics after a forward, in a process of their own."""
    model = build("llama-1b-shape", seed=0, device=DEVICE, dtype=torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1000, (TEXTS, SHORT_TEXT), generator=draw)
    batch = Ragged.from_padded(ids).to(DEVICE)
    with TemporaryDirectory() as folder, torch.inference_mode():
        os.environ["TRITON_CACHE_DIR"] = folder
        assert isinstance(model, Decoder)
        model.hidden(batch)
        torch.cuda.synchronize()
        seconds = []
        for _ in range(2):
            started = time.perf_counter()
            statistics(model, batch, classes=CLASSES, offsets=(-2, -3), progress=False)
            seconds.append(time.perf_counter() - started)
    return seconds[0], seconds[1]


@cache
def _model(layers: int) -> Decoder:
    model = build(
        "llama-1b-shape",
        seed=0,
        device=DEVICE,
        dtype=torch.bfloat16,
        width=HEADS * SIZE,
        heads=HEADS,
        kv_heads=HEADS,
        head_size=SIZE,
        hidden=HIDDEN,
        layers=layers,
        vocabulary=VOCABULARY,
    )
    assert isinstance(model, Decoder)
    return model


@cache
def _text(tokens: int) -> Tensor:
    shares = 1 / torch.arange(1, VOCABULARY + 1, dtype=torch.float64)
    draw = torch.Generator().manual_seed(0)
    return torch.multinomial(shares, tokens, replacement=True, generator=draw).to(DEVICE)


def _forward(layers: int, tokens: int) -> Work:
    model, batch = _model(layers), Ragged.from_list([_text(tokens)])

    def work() -> Tensor:
        with torch.inference_mode():
            return model.hidden(batch)[0].values

    return work


def _statistics(layers: int, tokens: int) -> Work:
    model, batch = _model(layers), Ragged.from_list([_text(tokens)])

    def work() -> Tensor:
        result = statistics(model, batch, classes=CLASSES, offsets=(-2, -3), progress=False)
        return torch.stack([torch.from_numpy(result.means[name]) for name in result.names])

    return work


def _check(layers: int, tokens: int) -> None:
    """Streamed sums are those of the strips, where both read the same activations."""
    result = _statistics(layers, tokens)()
    mix = stream_rows_and_output

    def by_strips(
        tiled: TiledScores, spec: RowSumSpec, value: Tensor | None
    ) -> tuple[RowSums, Tensor | None]:
        return sum_rows(tiled, spec), mix(tiled, spec, value)[1]

    with patch.object(watcher, "stream_rows_and_output", by_strips):
        expected = _statistics(layers, tokens)()
    largest = expected.abs().amax(1).clamp(min=1e-3)
    worst = ((result - expected).abs().amax(1) / largest).max().item()
    if not worst <= LIMIT:
        raise SystemExit(f"streamed statistics differ by {worst:.1e} from those by strips")
    say(f"{len(result)} measures at {tokens:,} tokens: at most {worst:.1e} of the largest apart\n")


def _report(
    times: Race, memory: dict[str, int], half: dict[str, int], layers: int, tokens: int
) -> dict[str, float]:
    rows = [
        [
            name,
            count(times.seconds(name), "s"),
            count(times.seconds(name) / layers, "s"),
            f"{times.ratio(name, FORWARD):.2f}",
            count(memory[name], "B"),
            f"{memory[name] / half[name]:.2f}",
        ]
        for name in times.elapsed
    ]
    columns = ["", "device", "a layer", "/ forward", "extra memory", "/ at half the tokens"]
    show(f"one text of {tokens:,} tokens", columns, rows)
    pattern = count(layers * HEADS * tokens**2 * 2, "B")
    say("goal: all statistics within 1.6 times the forward, in memory linear in tokens")
    say(f"all patterns would be {pattern}")
    ratio = times.ratio(OURS, FORWARD)
    say(f"limit: the plain forward; all statistics reach {1 / ratio:.0%} of its rate")
    return {
        "times a forward": ratio,
        "share of limit": 1 / ratio,
        "memory, times that at half the tokens": memory[OURS] / half[OURS],
    }
