"""The model that a run starts with, and the export of the trained one."""

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from manyheads.checkpoints import classification_head
from manyheads.checkpoints.deferred.sharded_load import ShardedFolder
from manyheads.checkpoints.folder import Saved, load, save
from manyheads.checkpoints.side_files import TOKENIZER, read_tokenizer
from manyheads.data import images
from manyheads.errors import ConfigError, InputError, ManyheadsError
from manyheads.models.build import Model, build
from manyheads.models.provenance import Classified
from manyheads.models.readout import ClassHead, ClassifierSettings, TokenHead, classifier_of
from manyheads.models.recipes import ModelConfig
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.train.distributed import ModelWrapper, ProcessGroup
from manyheads.train.objectives import CausalLM, MultiLabelClassification, Objective, Seq2SeqLM
from manyheads.train.objectives.language_modeling import LanguageModeling
from manyheads.train.objectives.late_interaction import fold_projection
from manyheads.train.objectives.text_similarity import TextSimilarity
from manyheads.train.regularizers import fold_gates
from manyheads.train.run_file import data_config
from manyheads.train.run_file.run_config import ModelSource, Run, without_head_dropping
from manyheads.train.tiling import tile

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def initial_model(source: ModelSource, seed: int, classified: Classified | None = None) -> Model:
    """A model with random weights, loaded from a folder, or tiled from a smaller model.

    With `classes` it gets a new classification head.
    """
    config = source.model_config()
    if config is None:
        model = source.heads.apply_to_model(load(source.folder))
    elif source.tile:
        model = tile(load(source.tile), config, seed=seed)
    else:
        model = build(config, seed=seed)
    if not source.classes:
        return model
    if classified is None:
        raise ConfigError(
            f"model.classes={source.classes}, and the objective has no classes",
            "remove it, or use SequenceClassification, TokenClassification or ImageClassification",
        )
    assert source.classes != "data", "found by with_found_classes"
    return classification_head.with_classes(model, source.classes, classified, seed=seed)


def unread_model(run: Run, processes: ProcessGroup, whole: bool) -> ShardedFolder | None:
    """The model of a folder before its weights are read, where FSDP shards it as it is.

    So no process holds all weights. `whole` is whether nothing else changes the model.
    """
    source = run.model
    sharded = run.run.distributed == "fsdp" and not processes.is_single
    changed = bool(source.classes or source.heads.changes or run.regularizer) or not whole
    if not sharded or not source.folder or changed:
        return None
    return ShardedFolder(source.folder) if isinstance(run.objective, LanguageModeling) else None


def with_found_classes(source: ModelSource, data: data_config.Data) -> ModelSource:
    """The source with the classes that the data have, where it says so."""
    if source.classes != "data":
        return source
    if not isinstance(data, data_config.Labeled | data_config.Tagged):
        raise ConfigError(
            f'model.classes="data" needs labels, and data.kind is "{type(data).__name__.lower()}"',
            "set model.classes to the names of the classes",
        )
    return replace(source, classes=data.find_classes())


def set_problem_type(model: Model, objective: Objective) -> None:
    """Say in the model how the objective reads its logits; an old temperature no longer holds."""
    head = model.config.readout
    if objective.classified is None or not isinstance(head, ClassHead | TokenHead):
        return
    several, before = isinstance(objective, MultiLabelClassification), classifier_of(model)
    thresholds = before.thresholds if several else (0.5,)
    after = ClassifierSettings(multi_label=several, thresholds=thresholds)
    if after != before:
        classification_head.set_classifier(model, after)


def run_tokenizer(data: data_config.Data, model: Model) -> "Tokenizer | None":
    """The tokenizer of a data section, or the model's own."""
    if not data.tokenizer:
        return cast("Tokenizer | None", model.tokenizer)
    file = Path(data.tokenizer)
    file = file / TOKENIZER if file.is_dir() else file
    remedy = "give the path of a tokenizer.json"
    if not file.is_file():
        raise InputError(f"data.tokenizer: there is no {file}", remedy)
    try:
        return cast("Tokenizer", read_tokenizer({TOKENIZER: file.read_bytes()}, file.parent))
    except ManyheadsError as error:
        problem = error.problem.replace(str(file.parent / TOKENIZER), str(file))
        raise InputError(f"data.tokenizer: {problem}", remedy) from None


def set_class_names(model: Model, names: tuple[str, ...]) -> None:
    """Give the classes of a model the names from the data, unless it has names already."""
    head = model.config.readout
    if not names or model.class_names or not isinstance(head, ClassHead | TokenHead):
        return
    if len(names) != head.classes:
        raise ConfigError(
            f"the data have {len(names)} classes ({', '.join(names)}), and the model has "
            f"{head.classes}",
            f"set model.classes={len(names)}, or to a list of all names",
        )
    classification_head.name_classes(model, names)


def with_image_preprocessing(data: data_config.Data, model: Model) -> data_config.Data:
    """The data with the model's own size, channels and normalization of images where not set.

    So image files are read as `read_image` reads them for the trained model.
    """
    if not isinstance(data, data_config.Images) or not isinstance(model, Vision):
        return data
    mean, std = _range(data, model)
    channels = cast(Any, model.config.patches.channels)
    return replace(
        data, size=data.size or images.image_size(model), channels=channels, mean=mean, std=std
    )


def with_late_roles(data: data_config.Data, model: Model, objective: Objective) -> data_config.Data:
    """Pairs as the late interaction of the model reads them, with its prompts and lengths."""
    if not isinstance(objective, TextSimilarity) or not isinstance(data, data_config.Pairs):
        return data
    late = model.late
    if late is None or not objective.is_late(model):
        return data
    query, document = late.length("query"), late.length("document")
    values = {entry.name: getattr(data, entry.name) for entry in fields(data)}
    values["max_length"] = data.max_length if document is None else min(data.max_length, document)
    return data_config.RolePairs(
        **values,
        query_prompt=late.prompt("query"),
        document_prompt=late.prompt("document"),
        query_length=data.max_length if query is None else min(data.max_length, query),
    )


def _range(data: data_config.Images, model: Vision) -> tuple[images.PerChannel, images.PerChannel]:
    mean, std = images.image_mean_std(model)
    return (mean if data.mean == "model" else data.mean, std if data.std == "model" else data.std)


def record_inference_settings(
    model: Model, objective: Objective, data: data_config.Data, tokenizer: "Tokenizer | None"
) -> None:
    """Record in the model how to use it: tokenizer, start and end tokens, images, pooling.

    Start and end tokens that the model has already are kept. The tokenizer of an encoder-decoder
    ends texts as training did, so that `generate` encodes a source in the same way.
    """
    model.tokenizer = tokenizer
    if isinstance(data, data_config.Images) and isinstance(model, Vision):
        size = data.size or images.image_size(model)
        images.record_image_preprocessing(model, *_range(data, model), size)
    if isinstance(objective, TextSimilarity) and not objective.is_late(model):
        model.sentence = objective.sentence_of(model)
    result: dict[str, int | None] = {}
    if isinstance(objective, Seq2SeqLM) and isinstance(model, Seq2Seq):
        result["decoder_start_token_id"] = objective.start_of(model)
    if isinstance(objective, CausalLM | Seq2SeqLM) and isinstance(
        data, data_config.Texts | data_config.Pairs
    ):
        result["eos_token_id"] = data.eos_id(tokenizer)
    if isinstance(objective, Seq2SeqLM) and isinstance(data, data_config.Pairs):
        model.tokenizer = data.ending_tokenizer(tokenizer)
    if isinstance(data, data_config.Texts | data_config.Pairs):
        model.trained_length = data.max_length
    settings = {**(model.source_config or {}), **model.generation}
    missing = {key: value for key, value in result.items() if settings.get(key) is None}
    new = {key: value for key, value in missing.items() if value is not None}
    model.generation = {**model.generation, **new}


def model_with_weights(config: ModelConfig, weights: Mapping[str, Tensor], like: Model) -> Model:
    """A model with these weights, and tokenizer, class names and files of another."""
    fresh = build(config, device="meta")
    tensors, late = fold_projection(like, fold_gates(like, weights))
    fresh.load_state_dict(tensors, assign=True)
    fresh.copy_provenance(like)
    fresh.late = late
    return fresh


def export(wrapper: ModelWrapper, folder: Path) -> Saved | None:
    """Save the model; all processes gather the weights, and the main process writes them."""
    weights = wrapper.full_state_dict()
    if not wrapper.processes.is_main:
        return None
    config = without_head_dropping(cast(ModelConfig, wrapper.model.config))
    with torch.no_grad():
        return save(model_with_weights(config, weights, wrapper.model), folder)
