"""Tests that give every head a score on each text: needles, repetitions, and unrelated texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.formatting import percent
from manyheads.lens.attention_maps.patterns import PatternWatcher
from manyheads.lens.head_kinds.criteria import KindScores, Threshold, with_draws
from manyheads.lens.inputs import synthetic
from manyheads.lens.inputs.cached_run import ActivationEditor, head_scope, last_head_site, run_until
from manyheads.lens.inputs.texts import for_each_batch, large_batch_tokens
from manyheads.lens.results.addresses import Block, blocks_of
from manyheads.lens.weights.circuits import Circuits, TokenVectors
from manyheads.models import build, model_interface
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Site, Tap

# Rows with fewer visible keys are alike in all texts.
MIN_KEYS = 8


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ScoresByText:
    """The score of each head on each text (NaN: not measured), and which draw a text belongs to.

    `chance` is the score of a head that knows nothing; `facts` are numbers about the texts.
    """

    values: Float[np.ndarray, "b h"]
    draws: Int[np.ndarray, " b"]
    chance: float = 0.0
    facts: dict[str, float] = field(default_factory=dict)


def score_texts(
    kind: str,
    measured: ScoresByText,
    threshold: Threshold,
    evidence: Callable[[str], str],
    unit: str,
) -> KindScores:
    """A kind by mean scores of texts; `evidence` makes a sentence of a percentage."""

    def score(values: Float[np.ndarray, "b h"]) -> KindScores:
        valid = ~np.isnan(values)
        count = valid.sum(0)
        total = np.where(valid, values, 0.0).sum(0)
        means = np.where(count > 0, total / np.fmax(count, 1), np.nan)
        squares = np.where(valid, (values - means) ** 2, 0.0).sum(0)
        errors = np.sqrt(squares / np.fmax(count - 1, 1) / np.fmax(count, 1))
        return KindScores(
            kind=kind,
            scores=means,
            thresholds=threshold.over_uniform(np.full_like(means, measured.chance)),
            evidence=lambda index: evidence(percent(float(means[index]))),
            errors=np.where(count > 1, errors, np.nan),
            samples=count.astype(float),
            unit=unit,
        )

    draws = [score(measured.values[measured.draws == draw]) for draw in np.unique(measured.draws)]
    return with_draws(score(measured.values), draws)


class _ScoreTable:
    """The scores of all heads on each text, filled batch by batch."""

    def __init__(self, model: build.Model, rows: int) -> None:
        self.model, self.blocks = model, blocks_of(model)
        ends = np.cumsum([block.heads for block in self.blocks]).tolist()
        self._columns = {
            block: slice(end - block.heads, end)
            for block, end in zip(self.blocks, ends, strict=True)
        }
        self.values = np.full((rows, sum(block.heads for block in self.blocks)), np.nan)

    def fill(self, row: int, block: Block, scores: Float[Tensor, " h"]) -> None:
        self.values[row, self._columns[block]] = scores.float().cpu().numpy()

    def read(
        self,
        texts: Sequence[Sequence[int]],
        visit: Callable[[model_interface.ModelInputs, list[int]], None],
        label: str,
        *,
        together: int = 1,
        progress: bool,
    ) -> bool:
        """Visit all texts, so many of equal length `together`; False if it was interrupted."""
        special = synthetic.SpecialTokens.of(self.model)
        inputs = synthetic.inputs_from_ids(self.model, special, texts)
        batch_tokens = large_batch_tokens(self.model)
        if together > 1:
            group = together * max(inputs.sizes(self.model))
            batch_tokens = max(1, batch_tokens // group) * group
        return for_each_batch(
            self.model, inputs, visit, label=label, batch_tokens=batch_tokens, progress=progress
        ).complete

    def result(
        self, sizes: Sequence[int], *, chance: float = 0.0, facts: dict[str, float] | None = None
    ) -> ScoresByText:
        """The scores, where each draw has so many texts."""
        draws = np.repeat(np.arange(len(sizes)), sizes)
        return ScoresByText(values=self.values, draws=draws, chance=chance, facts=facts or {})


class _PatternsAndFinal:
    """Watches patterns, and records what the readout receives."""

    def __init__(self, patterns: PatternWatcher, final: Site) -> None:
        self.patterns, self.record = patterns, Record([final])

    def wants(self, site: Site) -> bool:
        return self.patterns.wants(site) or self.record.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        (self.record if self.record.wants(site) else self.patterns).see(site, value)


def measure_needles(
    model: build.Model, needles: Sequence[synthetic.Needle], sizes: Sequence[int], *, progress: bool
) -> tuple[ScoresByText, bool]:
    """The retrieval score of every head (Wu et al., arXiv 2404.15574), and if all texts were read.

    It is the fraction of a needle's tokens that the model copies while the head attends most to
    that token in the needle. A token counts as copied where it is the most likely one after the
    question and the answer before it.
    """
    table, copied = _ScoreTable(model, len(needles)), np.full(len(needles), np.nan)
    final = Site(-1, Tap.FINAL, stack=model.readout_stack)

    def visit(inputs: model_interface.ModelInputs, numbers: list[int]) -> None:
        batch = [needles[number] for number in numbers]
        hits: dict[tuple[int, Block], Bool[Tensor, "h k"]] = {}

        def attend(
            block: Block,
            text: int,
            rows: range,
            weights: Float[Tensor, "h t s"],
            visible: Bool[Tensor, "t s"],  # noqa: ARG001
        ) -> None:
            before, target = torch.tensor(batch[text].copies).T
            hits[text, block] = weights.cpu()[:, before - rows.start].argmax(-1) == target

        def answer_rows(text: int) -> range:
            return range(batch[text].copies[0][0], batch[text].copies[-1][0] + 1)

        patterns = PatternWatcher(model.stacks(), attend, rows_of=answer_rows)
        watcher = _PatternsAndFinal(patterns, final)
        with torch.inference_mode():
            model.run_hidden(inputs, watcher)
            hidden = watcher.record[final]
            assert isinstance(hidden, Ragged), "the readout receives tokens"
            for text, (number, needle) in enumerate(zip(numbers, batch, strict=True)):
                right = synthetic.copied_tokens(model, hidden.of(text), needle)
                copied[number] = float(right.float().mean())
                for block in table.blocks:
                    if (text, block) in hits:
                        table.fill(number, block, (hits[text, block] & right).float().mean(1))

    texts = [needle.ids for needle in needles]
    complete = table.read(texts, visit, "testing retrieval heads", progress=progress)
    # A head with preferences at random attends most to any of the different tokens.
    chance = float(np.mean([1 / len(set(ids)) for ids in texts]))
    facts = {"copied": float(np.nanmean(copied))}
    return table.result(sizes, chance=chance, facts=facts), complete


def measure_repetitions(
    model: build.Model, texts: Sequence[Sequence[int]], sizes: Sequence[int], *, progress: bool
) -> tuple[ScoresByText, bool]:
    """How often the output of each head continues a repetition, and if all texts were read.

    `texts` are those of `synthetic.repeated_tokens`. By direct logit attribution (arXiv
    2211.00593): what the head writes, up to the divisors of norms, on the logits of the tokens of
    the block. A token counts where the one that came next is raised above all others.
    """
    table, scope = _ScoreTable(model, len(texts)), head_scope(model, mixers=False)
    special, circuits = synthetic.SpecialTokens.of(model), Circuits(scope)
    unembed, start = TokenVectors.of(model).unembed, max(1, len(special.prefix))
    lengths = [(len(text) - start - len(special.suffix)) // 2 for text in texts]
    sites = {block: scope.site(block.layer, Tap.HEAD_OUTPUT) for block in scope.blocks}
    writes = {
        block: torch.stack([circuits.writes(address.head) for address in block.addresses]).float()
        for block in scope.blocks
    }
    last = last_head_site(model, Tap.HEAD_OUTPUT)

    def visit(inputs: model_interface.ModelInputs, numbers: list[int]) -> None:
        record = ActivationEditor({}, sites.values())
        with torch.inference_mode():
            run_until(partial(model.run_hidden, inputs), record, last)
            for text, number in enumerate(numbers):
                size = lengths[number]
                tokens = unembed[list(texts[number][start : start + size])]
                following = torch.arange(1, size, device=tokens.device)
                for block, site in sites.items():
                    outputs = record[site].of(text)[start + size : start + 2 * size - 1].float()
                    written = torch.einsum("nhd,hcd->hnc", outputs, writes[block])
                    logits = written @ tokens.T
                    # A head that writes nothing raises none.
                    raised = logits.amax(-1) > logits.amin(-1)
                    right = (logits.argmax(-1) == following) & raised
                    table.fill(number, block, right.float().mean(1))

    complete = table.read(texts, visit, "testing repetition heads", progress=progress)
    return table.result(sizes, chance=1 / min(lengths)), complete


def measure_sameness(
    model: build.Model, texts: Sequence[Sequence[int]], sizes: Sequence[int], *, progress: bool
) -> tuple[ScoresByText, bool]:
    """How much of its weights each head shares between two texts, and if all pairs were read.

    `texts` are those of `synthetic.unrelated_pairs`. The overlap of two rows is the sum over keys
    of the smaller weight, and the score its mean over rows with enough keys.
    """
    table = _ScoreTable(model, len(texts) // 2)
    last = last_head_site(model, Tap.KEY)

    def visit(inputs: model_interface.ModelInputs, numbers: list[int]) -> None:
        firsts: dict[int, Float[Tensor, "h t s"]] = {}

        def compare(
            block: Block,
            text: int,
            rows: range,
            weights: Float[Tensor, "h t s"],
            visible: Bool[Tensor, "t s"],
        ) -> None:
            assert len(rows) == weights.shape[1], "overlaps need complete patterns"
            number, second = divmod(numbers[text], 2)
            if not second:
                firsts[number] = weights
                return
            rich, first = visible.sum(-1) >= MIN_KEYS, firsts.pop(number)
            if rich.any():
                # A learned sink takes what is missing from the sum of a row.
                shared = torch.minimum(first, weights).sum(-1)
                in_sink = torch.minimum(1 - first.sum(-1), 1 - weights.sum(-1)).clamp(min=0)
                table.fill(number, block, (shared + in_sink)[:, rich].mean(-1))

        with torch.inference_mode():
            watcher = PatternWatcher(model.stacks(), compare)
            run_until(partial(model.run_hidden, inputs), watcher, last)

    label = "testing context-blind heads"
    complete = table.read(texts, visit, label, together=2, progress=progress)
    return table.result(sizes), complete
