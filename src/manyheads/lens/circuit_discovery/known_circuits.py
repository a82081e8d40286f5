"""Models with a known circuit: RASP programs compiled into weights, and hidden among noise."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise, product
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.random import Generator, default_rng
from torch import Tensor

from manyheads.errors import InputError, short_repr
from manyheads.lens.circuit_discovery import rasp_models, rasp_programs, wiring
from manyheads.lens.circuit_discovery.graph import Edge
from manyheads.lens.circuit_discovery.rasp_programs import Value
from manyheads.lens.inputs.metrics import CustomMetric
from manyheads.models.decoder import Decoder
from manyheads.models.encoder import Encoder
from manyheads.ragged import Ragged

# Outputs are one-hot or small numbers; float32 computes them to about 1e-5.
TOLERANCE = 1e-3
# Inputs to choose pairs from, and those whose activations say which edges carry something.
POOL, TRUTH_INPUTS = 1024, 512
# Draws of as many pairs as requested.
ROUNDS = 20


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProgramPairs:
    """Token ids of clean and corrupted inputs of the same lengths, and a metric for both.

    The metric is 1 higher in the clean run than in the corrupted one, for every pair: the mean
    difference between the logits of the clean and the corrupted output where both differ, or
    between the outputs of a numerical program.
    """

    clean: list[list[int]]
    corrupted: list[list[int]]
    metric: CustomMetric


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KnownCircuit:
    """A model that computes a RASP program, and the circuit by which it does.

    `wired` are the edges along which weights can carry something to the logits: the reader reads a
    direction that the writer writes. `edges`, the truth, are those of them whose content differs
    between inputs of the same length, as do all edges on the way from there to the logits. The
    others carry constants (the mark of the beginning, the index of a position), so that no
    exchange of activations between two runs can show them. `heads` are the heads on true edges.
    """

    program: Any
    model: Encoder | Decoder
    tokens: tuple[Value, ...]
    outputs: tuple[Value, ...] | None
    max_length: int
    causal: bool
    heads: tuple[str, ...]
    edges: tuple[Edge, ...]
    wired: tuple[Edge, ...]

    def encode(self, values: Sequence[Value], padding: int = 0) -> list[int]:
        """Token ids: the mark of the beginning, the values, and tokens that programs ignore."""
        if len(values) + padding > self.max_length:
            raise InputError(
                f"the input has {len(values) + padding} values",
                f"use at most max_length={self.max_length}",
            )
        ids = {value: number for number, value in enumerate(self.tokens)}
        marked = [rasp_programs.BEGIN, *values, *[rasp_programs.PAD] * padding]
        for value in marked:
            if value not in ids:
                raise InputError(
                    f"{short_repr(value)} is not in the vocabulary", f"use {list(self.tokens)}"
                )
        return [ids[value] for value in marked]

    def decode(self, logits: Float[Tensor, "n v"]) -> list[Any]:
        """The outputs that logits stand for; None where a categorical program has none."""
        if self.outputs is None:
            return logits[:, 0].tolist()
        largest, best = logits[:, : len(self.outputs)].max(dim=1)
        rows = zip(largest.tolist(), best.tolist(), strict=True)
        return [self.outputs[number] if value > 0.5 else None for value, number in rows]

    def run(self, inputs: Sequence[Sequence[Value]]) -> list[list[Any]]:
        """The outputs of the model."""
        outputs = self._run([self.encode(values) for values in inputs])
        return [row[: len(values)] for row, values in zip(outputs, inputs, strict=True)]

    def wrong(self, inputs: Sequence[Sequence[Value]]) -> int:
        """How many outputs of the model differ from those of the program."""
        count = 0
        for values, outputs in zip(inputs, self.run(inputs), strict=True):
            expected = rasp_programs.evaluate(self.program, values, causal=self.causal)
            if expected is None:
                raise InputError(
                    f"the program has no output for {list(values)} that a model can compute",
                    "use inputs of draw()",
                )
            count += sum(not _equal(*pair) for pair in zip(outputs, expected, strict=True))
        return count

    def draw(self, count: int, seed: int = 0) -> list[tuple[Value, ...]]:
        """Inputs for which the program has an output; all there are, if those are fewer."""
        draws = self._valid(_candidates(self._values, self.max_length, default_rng(seed)))
        return [values for values, _ in zip(draws, range(count), strict=False)]

    def pairs(self, count: int = 64, seed: int = 0) -> ProgramPairs:
        """Clean and corrupted inputs with different outputs, all kinds of output as often.

        In a third of the pairs one input is shorter and padded, so that what depends on the length
        differs; in the others one or more tokens differ.
        """
        generator = default_rng(seed)
        pool = list(_candidates(self._values, self.max_length, generator))
        by_output: dict[Any, list[int]] = {}
        for number, outputs in enumerate(self._run([self.encode(values) for values in pool])):
            for output in outputs[: len(pool[number])]:
                by_output.setdefault(_rounded(output), []).append(number)
        strata = [by_output[key] for key in sorted(by_output, key=repr)]
        pairs = list[_WeightedPair]()
        for _ in range(ROUNDS):
            chosen = [strata[number % len(strata)] for number in range(count)]
            drawn = [pool[numbers[generator.integers(len(numbers))]] for numbers in chosen]
            if clean := list(self._valid(drawn)):
                corrupted = [self._corrupt(values, pool, generator) for values in clean]
                pairs += self._compare(clean, corrupted)
            if len(pairs) >= count:
                break
        if not pairs:
            raise InputError(
                "no two inputs of the same length have different outputs",
                "use a program whose output depends on its tokens",
            )
        pairs = pairs[:count]
        return ProgramPairs(
            clean=[pair.clean for pair in pairs],
            corrupted=[pair.corrupted for pair in pairs],
            metric=_metric([pair.weights for pair in pairs]),
        )

    @property
    def _values(self) -> list[Value]:
        marks = (rasp_programs.BEGIN, rasp_programs.PAD)
        return [value for value in self.tokens if value not in marks]

    def _valid(self, inputs: Iterable[tuple[Value, ...]]) -> Iterator[tuple[Value, ...]]:
        for values in inputs:
            if rasp_programs.evaluate(self.program, values, causal=self.causal) is not None:
                yield values

    def _logits(self, ids: Sequence[Sequence[int]]) -> Ragged:
        with torch.no_grad():
            logits = self.model(Ragged.from_list([torch.tensor(row) for row in ids])).logits
        assert isinstance(logits, Ragged), "ragged in, ragged out"
        return logits

    def _run(self, ids: Sequence[Sequence[int]]) -> list[list[Any]]:
        """The outputs behind the mark of the beginning."""
        outputs = self.decode(self._logits(ids).values)
        ends = [0, *accumulate(map(len, ids))]
        return [outputs[start + 1 : end] for start, end in pairwise(ends)]

    def _corrupt(
        self, clean: tuple[Value, ...], pool: Sequence[tuple[Value, ...]], generator: Generator
    ) -> tuple[Value, ...]:
        """An input of another length, or one of the same length with one or more other tokens."""
        if generator.random() < 1 / 3:
            changed = pool[int(generator.integers(len(pool)))]
            shared = min(len(clean), len(changed))
            return clean[:shared] + changed[shared:]
        count = generator.integers(1, len(clean) + 1) if generator.random() < 0.5 else 1
        at = set(generator.choice(len(clean), count, replace=False).tolist())
        values = self._values
        return tuple(
            values[generator.integers(len(values))] if place in at else value
            for place, value in enumerate(clean)
        )

    def _compare(
        self, clean: Sequence[tuple[Value, ...]], corrupted: Sequence[tuple[Value, ...]]
    ) -> Iterator["_WeightedPair"]:
        """The pairs whose outputs differ, with the weights of their metric."""
        lengths = [max(len(a), len(b)) for a, b in zip(clean, corrupted, strict=True)]
        ids = [
            [
                self.encode(values, length - len(values))
                for values, length in zip(side, lengths, strict=True)
            ]
            for side in (clean, corrupted)
        ]
        logits = [self._logits(side).values.split([n + 1 for n in lengths]) for side in ids]
        for number, sides in enumerate(zip(*logits, strict=True)):
            shared = min(len(clean[number]), len(corrupted[number]))
            weights = self._weights(*(rows[1 : shared + 1] for rows in sides))
            if weights is not None:
                whole = torch.zeros(lengths[number] + 1, weights.shape[1])
                whole[1 : shared + 1] = weights
                yield _WeightedPair(ids[0][number], ids[1][number], whole)

    def _weights(
        self, clean: Float[Tensor, "n v"], corrupted: Float[Tensor, "n v"]
    ) -> Float[Tensor, "n v"] | None:
        """The weights of logits in a metric that is 1 higher for clean than for corrupted."""
        weights = torch.zeros_like(clean)
        outputs = enumerate(zip(self.decode(clean), self.decode(corrupted), strict=True))
        for place, (right, changed) in outputs:
            if _equal(right, changed):
                continue
            if self.outputs is None:
                weights[place, 0] = 1.0 if right > changed else -1.0
                continue
            for output, sign in ((right, 1), (changed, -1)):
                if output is not None:
                    weights[place, self.outputs.index(output)] += sign
        moved = float(((clean - corrupted) * weights).sum())
        return weights / moved if weights.any() else None


@dataclass(frozen=True, slots=True, eq=False)
class _WeightedPair:
    clean: list[int]
    corrupted: list[int]
    weights: Float[Tensor, "n v"]


def _metric(weights: Sequence[Float[Tensor, "_ v"]]) -> CustomMetric:
    def output_difference(logits: Ragged | Tensor, texts: Sequence[int]) -> Float[Tensor, " b"]:
        assert isinstance(logits, Ragged), "a language head scores tokens"
        values = logits.values
        weighted = values * torch.cat([weights[text] for text in texts]).to(values)
        return values.new_zeros(len(texts)).index_add(
            0, logits.lengths.sequence_of_token, weighted.sum(1)
        )

    return CustomMetric(output_difference)


def _equal(output: Any, expected: Any) -> bool:
    if isinstance(output, str | None) or isinstance(expected, str | None):
        return bool(output == expected)
    if isinstance(output, float) or isinstance(expected, float):
        return abs(output - expected) < TOLERANCE
    return bool(output == expected)


def _rounded(output: Any) -> Any:
    return round(output, 3) if isinstance(output, float) else output


def _candidates(
    values: Sequence[Value], max_length: int, generator: Generator
) -> Iterator[tuple[Value, ...]]:
    """All inputs in random order, or a sample of lengths and tokens, some with many repeats."""
    if sum(len(values) ** length for length in range(1, max_length + 1)) <= POOL:
        every = [
            row for length in range(1, max_length + 1) for row in product(values, repeat=length)
        ]
        yield from (every[number] for number in generator.permutation(len(every)))
        return
    for _ in range(POOL):
        length = max(generator.integers(1, max_length + 1, 2))
        few = generator.permutation(len(values))[: generator.integers(1, len(values) + 1)]
        yield tuple(values[number] for number in generator.choice(few, length))


def _padded(
    values: Sequence[Value], max_length: int, tokens: Sequence[Value], generator: Generator
) -> tuple[Int[np.ndarray, "b n"], Bool[np.ndarray, "b n"]]:
    """Inputs padded to one length, and which of their tokens are no padding."""
    numbers = {value: number for number, value in enumerate(tokens)}
    inputs = list(islice(_candidates(values, max_length, generator), TRUTH_INPUTS))
    ids = np.full((len(inputs), max_length + 1), numbers[rasp_programs.PAD])
    ids[:, 0] = numbers[rasp_programs.BEGIN]
    for row, item in zip(ids, inputs, strict=True):
        row[1 : len(item) + 1] = [numbers[value] for value in item]
    return ids, ids != numbers[rasp_programs.PAD]


def compile_rasp(
    program: Any,
    vocabulary: Iterable[Value],
    max_length: int,
    *,
    causal: bool = False,
    idle_heads: int = 1,
    noise_heads: int = 1,
    rotate: bool = True,
    seed: int = 0,
) -> KnownCircuit:
    """A model that computes a RASP program, compiled by Tracr (arXiv 2301.05062).

    Every layer has as many heads: those of the program and at least `idle_heads` that write nothing
    and `noise_heads` that attend at random and write where no part of the program reads, as do some
    units of every feed-forward. With `rotate` the residual stream, the channels of each head and
    the hidden units have a random basis, and heads a random order, so that coordinates and places
    say nothing. With `causal` the model is a decoder. Tokens are the values in `vocabulary` behind
    a mark of the beginning. It needs the packages tracr-pypi, absl-py and networkx, and no jax.
    """
    values = sorted(set(vocabulary), key=lambda value: (str(type(value)), value))
    weights = rasp_programs.compile_program(program, values, max_length)
    generator = default_rng(seed)
    disguise = rasp_models.Disguise.draw(
        weights,
        idle_heads=idle_heads,
        noise_heads=noise_heads,
        rotate=rotate,
        generator=generator,
    )
    ids, real = _padded(values, max_length, weights.tokens, generator)
    wired, edges = wiring.true_edges(weights, disguise.places, ids, real, causal=causal)
    return KnownCircuit(
        program=program,
        model=rasp_models.assemble(weights, disguise, causal=causal),
        tokens=weights.tokens,
        outputs=weights.outputs,
        max_length=max_length,
        causal=causal,
        heads=tuple(sorted({edge.writer for edge in edges if "H" in edge.writer})),
        edges=edges,
        wired=wired,
    )
