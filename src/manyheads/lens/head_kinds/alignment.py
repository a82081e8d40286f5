"""Cross-attention heads that read a source, such as speech, in the order in which they write."""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.formatting import percent, pluralise
from manyheads.lens.attention_maps.patterns import PatternWatcher
from manyheads.lens.head_kinds.criteria import KindScores
from manyheads.lens.head_kinds.head_tests import HeadTests
from manyheads.lens.inputs.texts import for_each_batch
from manyheads.lens.results.addresses import Block, blocks_of
from manyheads.models.model_interface import ModelInputs
from manyheads.taps import Sublayer

# Weights in memory at once: sounds are long.
CHUNK_WEIGHTS = 2**22
# The rows without which a text has no order to speak of: the first is that of the start token.
MIN_ROWS = 5


def fraction_in_order(peaks: Int[Tensor, "h t"]) -> Float[Tensor, " h"]:
    """The fraction of pairs of tokens that attend in their own order; ties count half.

    >>> fraction_in_order(torch.tensor([[1, 4, 6], [6, 4, 1], [5, 5, 5]])).tolist()
    [1.0, 0.0, 0.5]
    """
    steps = peaks[:, None, :] - peaks[:, :, None]
    first, second = torch.triu_indices(peaks.shape[1], peaks.shape[1], offset=1)
    return steps[:, first, second].sign().add(1).div(2).mean(1)


def measure_alignment(tests: HeadTests, inputs: ModelInputs) -> None:
    """Score cross-attention by whether the key with the most weight moves on with the text."""
    model, blocks = tests.model, blocks_of(tests.model)
    by_text: list[dict[Block, Float[Tensor, " h"]]] = []

    def visit(batch: ModelInputs, numbers: list[int]) -> None:
        peaks: list[dict[Block, list[Tensor]]] = [{} for _ in numbers]

        def add(block: Block, text: int, _: range, weights: Tensor, __: Tensor) -> None:
            peaks[text].setdefault(block, []).append(weights.argmax(-1).cpu())

        with torch.inference_mode():
            watcher = PatternWatcher(model.stacks(), add, CHUNK_WEIGHTS, Sublayer.CROSS)
            model.run_hidden(batch, watcher)
        for text in peaks:
            rows = {block: torch.cat(parts, dim=1) for block, parts in text.items()}
            if all(row.shape[1] >= MIN_ROWS for row in rows.values()):
                by_text.append(
                    {block: fraction_in_order(row[:, 1:]) for block, row in rows.items()}
                )

    summary = for_each_batch(
        model, inputs, visit, label="testing alignment heads", progress=tests.progress
    )
    tests.complete &= summary.complete
    if not by_text:
        tests.missing["alignment"] = f"no text has {MIN_ROWS} tokens"
        return
    unknown = {block: torch.full((block.heads,), torch.nan) for block in blocks}
    table = torch.stack(
        [torch.cat([text.get(block, unknown[block]) for block in blocks]) for text in by_text]
    )
    tests.scores.append(alignment_scores(table.double().numpy(), tests))


def alignment_scores(table: Float[np.ndarray, "texts h"], tests: HeadTests) -> KindScores:
    """The kind, from the scores of each text; self-attention has none."""
    count, scores = len(table), table.mean(0)
    spread = table.std(0, ddof=1) if count > 1 else np.full_like(scores, np.nan)

    def evidence(index: int) -> str:
        return (
            f"of {percent(float(scores[index]))} of the pairs of tokens the later one attends to a "
            f"later place of the source, over {pluralise(count, 'text')}"
        )

    return KindScores(
        kind="alignment",
        scores=scores,
        thresholds=np.full_like(scores, tests.thresholds["alignment"].above),
        evidence=evidence,
        errors=spread / np.sqrt(count),
        samples=np.full_like(scores, count),
        unit="texts",
    )
