"""What can be checked before training: whether model, data and run file fit together."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from manyheads.checkpoints.deferred.sharded_load import model_layers
from manyheads.data import images, labeled
from manyheads.errors import ConfigError, InputError
from manyheads.models import build, vision
from manyheads.parts.positions import Axial, Learned
from manyheads.quantization.integer_layers import REMEDY
from manyheads.quantization.model_weights import weights_of
from manyheads.renamed_keys import with_new_keys
from manyheads.train import distributed, tiling
from manyheads.train.context_parallel import check_shared_texts
from manyheads.train.loop.checkpoint import check_disk_space
from manyheads.train.loop.model_setup import run_tokenizer
from manyheads.train.objectives import Contrastive, Objective
from manyheads.train.objectives.text_similarity import TextSimilarity
from manyheads.train.run_file.data_config import Data, Images, Pairs, Texts
from manyheads.train.run_file.data_sources import PhaseData
from manyheads.train.run_file.run_config import Run

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def check_run(run: Run, model: build.Model, processes: distributed.ProcessGroup) -> None:
    """Check everything that can be checked before training."""
    if weights := weights_of(model):
        raise ConfigError(f"a model with {weights} weights cannot be trained", REMEDY)
    run.full_objective.attach(model)
    ranks = processes.data_size
    for data in run.data:
        tokenizer = run_tokenizer(data, model)
        check_fits(model, data, tokenizer)
        for count in (size // data.micro_batch_size for size in data.sizes):
            if count % ranks:
                readers = "processes" if processes.context == 1 else "groups of processes"
                raise ConfigError(
                    f"{count} micro-batches per step cannot be divided among {ranks} {readers}",
                    f"choose data.micro_batch so that their number is a multiple of {ranks}",
                )
        run.full_objective.with_tokenizer(tokenizer).check(model)
    # This also checks the patterns of learning-rate factors.
    run.optimizer.build(model)
    for phase in run.phases.each:
        if phase.rotary != "kept":
            try:
                tiling.with_rotary_base(cast(Any, model.config), phase.rotary)
            except ConfigError as error:
                raise ConfigError(
                    f"phase.rotary={phase.rotary:g}: {error.problem}", "leave it out"
                ) from None
    _check_options(run, model, processes)
    state = 3 * sum(weight.numel() * weight.element_size() for weight in model.parameters())
    check_disk_space(run.run.folder, state * (run.run.keep + 1 + len(run.data)))


def _check_options(run: Run, model: build.Model, processes: distributed.ProcessGroup) -> None:
    recompute, layers = run.run.recompute, len(model_layers(model))
    wrong = () if isinstance(recompute, str) else [n for n in recompute if not 0 <= n < layers]
    if wrong:
        raise ConfigError(f"run.recompute has layer {wrong[0]}", f"use 0 to {layers - 1}")
    if run.run.validate_every and not all(data.validation for data in run.data):
        raise ConfigError(
            f"run.validate_every={run.run.validate_every} needs validation data",
            "set data.validation to files or a fraction",
        )
    if processes.context > 1:
        check_shared_texts(run, model)
    # FSDP gathers weights for every part, and processes may have different numbers of parts.
    cached = isinstance(run.objective, TextSimilarity) and run.objective.cache_tokens
    if cached and run.run.distributed == "fsdp" and not processes.is_single:
        raise ConfigError(
            "objective.cache_tokens cannot be used with FSDP on several processes",
            'set run.distributed="ddp", or cache_tokens to 0',
        )


def check_fits(model: build.Model, data: Data, tokenizer: "Tokenizer | None") -> None:
    """Raise if the model has too small a vocabulary or too few positions for the data."""
    if isinstance(model, vision.Vision):
        if isinstance(data, Images):
            _check_image_shape(data, model)
        return
    if tokenizer is None:
        raise ConfigError("the model has no tokenizer", "set data.tokenizer")
    embedding = model.config.embedding
    words = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if words > embedding.vocabulary:
        raise ConfigError(
            f"the tokenizer has {words} tokens, and the model a vocabulary of "
            f"{embedding.vocabulary}",
            f"set model.change.vocabulary={words}, or use the model's own tokenizer",
        )
    if isinstance(data, Texts | Pairs):
        data.check_tokens(tokenizer)
    position = embedding.position
    if isinstance(position, Learned | Axial) and data.max_length > position.longest:
        raise ConfigError(
            f"data.max_length={data.max_length}, and the model has {position.longest} positions",
            f"use {position.longest} or less",
        )


def _check_image_shape(data: Images, model: vision.Vision) -> None:
    patches, size = model.config.patches, data.size or images.image_size(model)
    if size % patches.size:
        below = max(size // patches.size, 1) * patches.size
        raise ConfigError(
            f"data.size={size} is not a multiple of the patch size {patches.size}", f"use {below}"
        )
    if data.channels not in ("model", patches.channels):
        raise ConfigError(
            f"data.channels={data.channels}, and the model reads {patches.channels}", "leave it out"
        )


def check_negatives(objective: Objective, data: Data, phase_data: PhaseData) -> None:
    """Raise if a text has nothing to be compared with in any micro-batch."""
    training = phase_data.training
    if not isinstance(objective, Contrastive) or not isinstance(training, labeled.Examples):
        return
    if training.negatives is not None:
        return
    smallest = np.sort(training.sizes)[:2]
    if len(smallest) < 2:
        raise InputError("Contrastive needs negatives, and there is one pair", "give more pairs")
    if smallest.sum() > data.micro_batch_size:
        key = "micro_batch" if data.micro_batch else "batch"
        raise ConfigError(
            f"data.{key}={data.micro_batch_size} holds one pair at a time, and the negatives of "
            "Contrastive are the other pairs",
            f"use at least {2 * data.max_length * 2}, or set data.negatives",
        )


def check_optimizer_state(
    checkpoint: Path, before: Mapping[str, Any], tables: Mapping[str, Any]
) -> None:
    """Muon's optimizer state differs from that of the others."""
    files = (with_new_keys(file, ("optimizer",)) for file in (before, tables))
    was, now = (file.get("optimizer", {}).get("kind", "AdamW") for file in files)
    if was != now and "Muon" in (was, now):
        raise InputError(
            f"{checkpoint} has the optimizer state of {was}, which {now} cannot use",
            f'use optimizer.kind="{was}", or start a run with the saved model as model.folder',
        )
