"""The model that a run starts with, and the one that it leaves."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from manyheads.checkpoints.classes import Classified, name_classes, with_classes
from manyheads.checkpoints.companions import TOKENIZER, read_tokenizer
from manyheads.checkpoints.folder import Saved, load, save
from manyheads.data.image_preprocessing import image_range, tell_image_habits
from manyheads.data.images import ByChannel
from manyheads.errors import ConfigError, InputError, ManyheadsError
from manyheads.models.build import Model, build
from manyheads.models.readout import ClassHead, TokenHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.sentence import Sentence
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision, VisionConfig
from manyheads.parts.positions import Learned
from manyheads.train.loop.model_wrapper import Entrance
from manyheads.train.objectives import CausalLM, Contrastive, Objective, Seq2SeqLM
from manyheads.train.regularisers import folded
from manyheads.train.run_file.data_config import Data, Images, Pairs, Texts
from manyheads.train.run_file.head_config import without_drops
from manyheads.train.run_file.run_config import Start
from manyheads.train.tiling import tile


def first_model(start: Start, seed: int, classified: Classified | None = None) -> Model:
    """Fresh weights by seed, a folder's, or a smaller model's laid out over a larger one.

    Where classes are asked for it has a new head for them, if the objective asks for any.
    """
    model = _body(start, seed)
    if not start.classes:
        return model
    if classified is None:
        raise ConfigError(
            f"model.classes={start.classes} and the objective asks for no class",
            "leave it out, or use SequenceClassification, TokenClassification or "
            "ImageClassification",
        )
    return with_classes(model, start.classes, classified, seed=seed)


def _body(start: Start, seed: int) -> Model:
    config = start.described()
    if config is None:
        return start.heads.given_to(load(start.folder))
    if not start.tile:
        return build(config, seed=seed)
    grown: Model = tile(load(start.tile), config, seed=seed)
    return grown


def tokenizer_of(data: Data, model: Model) -> Any:
    """The tokenizer that a data section names, or the model's own."""
    if not data.tokenizer:
        return model.tokenizer
    file = Path(data.tokenizer)
    file = file / TOKENIZER if file.is_dir() else file
    if not file.is_file():
        raise InputError(f"data.tokenizer: there is no {file}", "name a tokenizer.json")
    try:
        return read_tokenizer({TOKENIZER: file.read_bytes()}, file.parent)
    except ManyheadsError as error:
        told = error.problem.replace(str(file.parent / TOKENIZER), str(file))
        raise InputError(f"data.tokenizer: {told}", "name a tokenizer.json") from None


def check_fits(model: Model, data: Data, tokenizer: Any) -> None:
    """Refuse data that the model has no words or no places for."""
    if isinstance(model.config, VisionConfig):
        return
    if tokenizer is None:
        raise ConfigError("data.tokenizer is not given and the model has none", "name one")
    embedding = model.config.embedding
    words = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if words > embedding.vocabulary:
        raise ConfigError(
            f"the tokenizer has {words} tokens and the model a vocabulary of "
            f"{embedding.vocabulary}",
            f"set model.change.vocabulary={words}, or use the model's own tokenizer",
        )
    if isinstance(data, Texts | Pairs):
        data.check_words(tokenizer)
    if isinstance(embedding.position, Learned) and data.length > embedding.position.longest:
        raise ConfigError(
            f"data.length={data.length} and the model has {embedding.position.longest} positions",
            f"use {embedding.position.longest} or less",
        )


def name_as(model: Model, names: tuple[str, ...]) -> None:
    """Call the classes of a model as the data do, unless it has names for them."""
    head = model.config.readout
    if not names or model.class_names or not isinstance(head, ClassHead | TokenHead):
        return
    if len(names) != head.classes:
        raise ConfigError(
            f"the data name {len(names)} classes ({', '.join(names)}) and the model has "
            f"{head.classes}",
            f"set model.classes={len(names)}, or name all of them there",
        )
    name_classes(model, names)


def ranged(data: Data, model: Model) -> Data:
    """The data with the range that the model brings its images to, where none is given."""
    if not isinstance(data, Images) or not isinstance(model, Vision):
        return data
    mean, std = _range(data, model)
    return replace(data, mean=mean, std=std)


def _range(data: Images, model: Vision) -> tuple[ByChannel, ByChannel]:
    mean, std = image_range(model)
    return (
        mean if data.mean == "model" else data.mean,
        std if data.std == "model" else data.std,
    )


def tell_habits(model: Model, objective: Objective, data: Data) -> None:
    """Say how the texts that a model has learnt to write start and end, unless it says so.

    Of one that has learnt from images it says how they were brought to numbers, of one that gives
    vectors of texts how they are pooled.
    """
    if isinstance(data, Images) and isinstance(model, Vision):
        tell_image_habits(model, *_range(data, model), data.size)
    if isinstance(objective, Contrastive) and objective.pooling != "model":
        model.sentence = replace(model.sentence or Sentence(), pooling=objective.pooling)
    found: dict[str, int | None] = {}
    if isinstance(objective, Seq2SeqLM) and isinstance(model, Seq2Seq):
        found["decoder_start_token_id"] = objective.start_of(model)
    if isinstance(objective, CausalLM | Seq2SeqLM) and isinstance(data, Texts | Pairs):
        found["eos_token_id"] = data.ends_with(model.tokenizer)
    said = {**(model.described or {}), **model.generation}
    new = {
        key: value for key, value in found.items() if value is not None and said.get(key) is None
    }
    model.generation = {**model.generation, **new}


def dressed(config: ModelConfig, weights: Mapping[str, Tensor], like: Model) -> Model:
    """A model with these weights and all else that came with another."""
    fresh = build(config, device="meta")
    fresh.load_state_dict(folded(like, weights), assign=True)
    fresh.comes_from(like)
    return fresh


def export(entrance: Entrance, folder: Path) -> Saved | None:
    """Save the model as others read it; the first process does, and all help to gather it."""
    weights = entrance.gathered()
    if not entrance.crew.leads:
        return None
    config = without_drops(cast(ModelConfig, entrance.model.config))
    with torch.no_grad():
        return save(dressed(config, weights, entrance.model), folder)
