"""Training on texts that several processes share: what each of them gets of a batch."""

from dataclasses import replace

import torch

from manyheads.errors import ConfigError
from manyheads.models.build import Model
from manyheads.models.context_parallel import check_context_parallel
from manyheads.ragged import ContextShard
from manyheads.train.distributed import ProcessGroup
from manyheads.train.objectives import CausalLM, MaskedLM
from manyheads.train.objectives.objective import PreparedBatch
from manyheads.train.regularizers import L1Scales
from manyheads.train.run_file.run_config import Run


def check_shared_texts(run: Run, model: Model) -> None:
    """Refuse a run whose texts processes cannot share."""
    problem = f"run.context_parallel={run.run.context_parallel}"
    remedy = "set run.context_parallel to 1"
    if not isinstance(run.objective, CausalLM | MaskedLM):
        name = type(run.objective).__name__
        raise ConfigError(
            f"{problem} cannot be used with {name}", f"use CausalLM or MaskedLM, or {remedy}"
        )
    for regularizer in run.regularizer:
        if not isinstance(regularizer, L1Scales):
            name = type(regularizer).__name__
            raise ConfigError(f"{problem} cannot be used with {name}", f"leave it out, or {remedy}")
    if run.run.compile:
        raise ConfigError(f"{problem} cannot be compiled", "set run.compile to false")
    try:
        for stack in model.stacks().values():
            check_context_parallel(stack.config.layers, stack.config.halting, trains=True)
    except ConfigError as error:
        raise ConfigError(f"{problem}: {error.problem}", f"change that, or {remedy}") from None


def own_part(prepared: PreparedBatch, processes: ProcessGroup) -> PreparedBatch:
    """The tokens of this process, and the labels that they predict."""
    if processes.context == 1:
        return prepared
    texts = prepared.batch.texts
    assert texts is not None, "checked by `check_shared_texts`"
    shard = ContextShard.in_group(texts.lengths.each, processes.context_group)
    rows = shard.rows()
    place = torch.full((len(texts.values),), -1)
    place[rows] = torch.arange(len(rows))
    positions = place[prepared.positions]
    own = positions >= 0
    return replace(
        prepared,
        batch=replace(prepared.batch, texts=texts.shard(shard), labels=None),
        positions=positions[own],
        labels=prepared.labels[own],
    )
