"""Statistics of a model larger than memory: all texts pass one layer before the next is read."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch

from manyheads.argument_checks import checked
from manyheads.checkpoints.deferred.layer_stream import LayerStream
from manyheads.errors import InputError
from manyheads.formatting import kind_of
from manyheads.lens.inputs.cached_run import run_until
from manyheads.lens.inputs.texts import Inputs, NumberedBatch, PassSummary, read_batches
from manyheads.lens.inputs.token_classes import TokenClasses
from manyheads.lens.measure import measures
from manyheads.lens.measure.statistics import (
    Statistics,
    StatisticsTotals,
    check_heads,
    ids_by_stack,
    make_plan,
)
from manyheads.lens.measure.watcher import MeasurementPlan, StatisticsWatcher
from manyheads.models.model_interface import ModelInputs
from manyheads.models.stack import Stack
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Tap

# The residual streams that wait between two layers; beyond this the layers are read once more.
MAX_WAITING_BYTES = 2**28


@checked
def statistics_from_folder(
    where: str | Path | LayerStream,
    texts: Inputs,
    *,
    classes: TokenClasses = None,
    offsets: Sequence[int] = (),
    sink_above: float = measures.SINK_ABOVE,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    progress: bool = True,
) -> Statistics:
    """The same as `statistics(load(where), texts)`, with at most two layers in memory at a time.

    `where` is a folder with safetensors of an encoder or a decoder. All texts pass one layer before
    the next one is read. If their residual streams take more than 256 MB, they pass in several
    groups, and the layers are read once per group; Ctrl-C keeps the finished groups.

    >>> import tempfile
    >>> from manyheads.checkpoints.folder import save
    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = statistics_from_folder(save(model, folder).folder, [[5, 6, 7, 5, 6]])
    >>> len(result.addresses)
    4
    """
    stream = where
    if not isinstance(stream, LayerStream):
        stream = LayerStream(stream, dtype=dtype, device=device)
    model = stream.model
    if model.reads_pairs or len(model.stacks()) > 1:
        raise InputError(
            f"{model.source} is {kind_of(model)} with several stacks, whose layers cannot "
            "be read one by one",
            "use an encoder or a decoder, or lens.statistics",
        )
    check_heads(model)
    plan = make_plan(model, classes, offsets, sink_above)
    [stack] = model.stacks().values()
    totals, texts_done, tokens, complete = StatisticsTotals(), 0, 0, True
    total = len(stack.layers)
    with Progress("measuring", total=total, unit="layers", enabled=progress) as bar:
        for group in _groups(read_batches(model, texts, bar, max_length, batch_tokens), stack):
            if texts_done:
                bar.total = (bar.total or 0) + total
            try:
                watchers = _measure(stream, stack, group, plan, bar)
            except KeyboardInterrupt:
                if not texts_done:
                    raise
                complete = False
                break
            for batch, watcher in zip(group, watchers, strict=True):
                totals.add(watcher)
                texts_done += len(batch.numbers)
                tokens += batch.tokens
    if not texts_done:
        raise InputError("there are no texts", "pass at least one")
    return totals.result(model, plan, PassSummary(texts_done, tokens, complete=complete))


def _groups(batches: Iterator[NumberedBatch], stack: Stack) -> Iterator[list[NumberedBatch]]:
    """Batches whose residual streams fit into memory together."""
    weight = next(stack.parameters())
    row_bytes = stack.config.output_width * weight.element_size()
    group: list[NumberedBatch] = []
    for batch in batches:
        waiting = sum(before.tokens for before in group) + batch.tokens
        if group and waiting * row_bytes > MAX_WAITING_BYTES:
            yield group
            group = []
        group.append(batch)
    if group:
        yield group


@torch.inference_mode()
def _measure(
    stream: LayerStream,
    stack: Stack,
    group: list[NumberedBatch],
    plan: MeasurementPlan,
    bar: Progress,
) -> list[StatisticsWatcher]:
    model = stream.model
    watchers = [
        StatisticsWatcher(plan, ids_by_stack(model, batch.inputs), batch.numbers) for batch in group
    ]
    streams = [_embed(stream, stack, batch.inputs) for batch in group]
    for layer in stream.layers(stack):
        for index, watcher in enumerate(watchers):
            x = streams[index]
            streams[index] = stack.resume(x, layer, stop=layer + 1, watch=watcher)[0]
            bar.advance(1 / len(group))
    return watchers


def _embed(stream: LayerStream, stack: Stack, inputs: ModelInputs) -> Ragged:
    """What enters the first layer."""
    site = Site(-1, Tap.EMBEDDINGS, stack=stack.name)
    record = Record([site])
    run_until(partial(stream.model.run_hidden, inputs), record, site)
    embedded = record[site]
    assert isinstance(embedded, Ragged), "embeddings are no patterns"
    return embedded
