"""A copy of a model with a new classification head."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import Tensor

from manyheads.checkpoints import folder, side_files
from manyheads.checkpoints.config_json import description_of, facts_of, family_of, matches
from manyheads.checkpoints.families.family import Family, label_maps, unnamed
from manyheads.checkpoints.families.native import NATIVE
from manyheads.checkpoints.tensor_map import Entry, TensorMap, to_file
from manyheads.errors import ConfigError
from manyheads.models import decoder, readout, seq2seq, vision
from manyheads.models.build import Model, build
from manyheads.models.provenance import Classified
from manyheads.models.recipes import ModelConfig

# How the class names of `transformers` end.
CLASS_SUFFIXES: dict[Classified, str] = {
    "texts": "ForSequenceClassification",
    "tokens": "ForTokenClassification",
    "images": "ForImageClassification",
}
COPIED_FILES = tuple(name for name in side_files.SIDE_FILES if name != side_files.GENERATION)
OTHER_HEADS = re.compile(r"(For[A-Z]\w*|LMHeadModel|DoubleHeadsModel|Model)$")


# The keys of config.json that a new head does not keep.
SETTINGS = (readout.PROBLEM_TYPE, readout.TEMPERATURE, readout.THRESHOLDS)
# More classes than any readout has, and fewer than take minutes to name.
MAX_CLASSES = 1_000_000


def with_classes(
    model: Model,
    classes: int | Sequence[str],
    of: Classified = "texts",
    *,
    multi_label: bool = False,
    seed: int = 0,
) -> Model:
    """A copy of a model with a new head that classifies texts, tokens or images.

    The head is the one that the family has in `transformers`, and like there it starts with what
    the model already has of it: the pooler of BERT, the dense layer of ModernBERT. The rest is
    initialized with `seed`. Names of the classes are saved with the model, and with `multi_label`
    that any number of them may be right for a text.

    >>> from manyheads.models.build import build
    >>> words = build("bert-base", layers=1, width=16, heads=2, hidden=16, vocabulary=50, seed=0)
    >>> moods = with_classes(words, ("glad", "sad"))
    >>> moods.config.readout.classes, moods.class_names
    (2, ('glad', 'sad'))
    """
    names, state = _names(classes), model.state_dict()
    _check_has(model, of)
    folder.refuse_changed(model, state)
    config, described = _headed(model, names, of)
    fresh = build(config, seed=seed)
    like = next(iter(model.parameters()))
    body = {name: tensor for name, tensor in state.items() if not name.startswith("readout.")}
    body |= _shared_parts(model, config, fresh.state_dict())
    fresh.load_state_dict({**fresh.state_dict(), **body})
    described = {key: value for key, value in described.items() if key not in SETTINGS}
    fresh.source_config, fresh.tokenizer = described, model.tokenizer
    if multi_label:
        set_classifier(fresh, readout.ClassifierSettings(multi_label=True))
    # What describes generation or sentence embeddings no longer holds.
    fresh.side_files = {
        name: model.side_files[name] for name in COPIED_FILES if name in model.side_files
    }
    return fresh.to(device=like.device, dtype=like.dtype)


def name_classes(model: Model, names: Sequence[str]) -> None:
    """Name the classes; the names are saved with the model."""
    classes = _class_count(model)
    if len(names) != classes:
        some = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ConfigError(f"there must be {classes} names, one per class, got {len(names)}: {some}")
    model.source_config = {**description_of(model), **label_maps(names)}


def set_classifier(model: Model, settings: readout.ClassifierSettings) -> None:
    """Say how logits become labels; this is saved with the model, in its config.json."""
    classes, count = _class_count(model), len(settings.thresholds)
    if count not in (1, classes):
        raise ConfigError(f"there must be 1 threshold or {classes}, got {count}")
    others = {key: value for key, value in description_of(model).items() if key not in SETTINGS}
    model.source_config = {**others, **settings.description()}


def _class_count(model: Model) -> int:
    head = model.config.readout
    if not isinstance(head, readout.ClassHead | readout.TokenHead):
        raise ConfigError("the model has no classes", "add some with with_classes")
    return head.classes


def _names(classes: int | Sequence[str]) -> tuple[str, ...]:
    count = len(classes) if isinstance(classes, Sequence) else int(classes)
    if not 2 <= count <= MAX_CLASSES:
        raise ConfigError(f"there must be 2 to {MAX_CLASSES:,} classes, got {count:,}")
    names = tuple(classes) if isinstance(classes, Sequence) else unnamed(count)
    for name, times in Counter(names).items():
        if times > 1:
            raise ConfigError(f"two classes have the name {name!r}", "give each its own")
    return names


def _check_has(model: Model, of: Classified) -> None:
    config = model.config
    if isinstance(config, seq2seq.Seq2SeqConfig):
        raise ConfigError(
            "an encoder-decoder cannot classify texts", "give an encoder or a decoder"
        )
    if isinstance(config, vision.VisionConfig) != (of == "images"):
        inputs = "images" if isinstance(config, vision.VisionConfig) else "texts"
        raise ConfigError(
            f"of={of!r} does not fit a model that reads {inputs}",
            'use "images"' if inputs == "images" else 'use "texts" or "tokens"',
        )


def _headed(
    model: Model, names: Sequence[str], of: Classified
) -> tuple[ModelConfig, dict[str, Any]]:
    """The config with the head that the family has, and its config.json; else with a plain head."""
    family, before = family_of(model), description_of(model)
    stem = OTHER_HEADS.sub("", (before.get("architectures") or [""])[0])
    if stem:
        headed = {**before, "architectures": [stem + CLASS_SUFFIXES[of]], **label_maps(names)}
        headed.pop("num_labels", None)
        # ModernBERT can pool either way; if texts have no [CLS] token, it pools all tokens.
        pools = {} if _opens(model.tokenizer) else {"classifier_pooling": "mean"}
        for config_json in ({**headed, **pools}, headed):
            config = _with_head_of(family, config_json, cast(ModelConfig, model.config), of)
            if config is not None:
                return config, config_json
    config = replace(cast(Any, model.config), readout=_plain(model, len(names), of))
    described = NATIVE.write_config(config)
    return config, {**described, **facts_of(before), **label_maps(names)}


def _with_head_of(
    family: Family, config_json: Mapping[str, Any], before: ModelConfig, of: Classified
) -> ModelConfig | None:
    """The config with the head that a config.json describes, if it fits."""
    try:
        head = family.read_config(config_json).readout
    except ConfigError:
        return None
    if not isinstance(head, readout.TokenHead if of == "tokens" else readout.ClassHead):
        return None
    config: ModelConfig = replace(cast(Any, before), readout=head)
    return config if matches(family, config_json, config) else None


def _plain(model: Model, classes: int, of: Classified) -> readout.ClassHead | readout.TokenHead:
    """The head of a model that no family of transformers has."""
    if of == "tokens":
        return readout.TokenHead(classes=classes)
    if isinstance(model.config, decoder.DecoderConfig):
        return readout.ClassHead(classes=classes, pool="last")
    return readout.ClassHead(classes=classes, pool="first" if _opens(model.tokenizer) else "mean")


def _opens(tokenizer: Any) -> bool:
    """Whether texts begin with a special token such as [CLS]; assumed without a tokenizer."""
    if tokenizer is None:
        return True
    plain, special = (tokenizer.encode("a", add_special_tokens=own).ids for own in (False, True))
    return bool(plain[:1] != special[:1])


def _shared_parts(
    model: Model, config: ModelConfig, fresh: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of the new head, below its classes, that the model already has."""
    family = family_of(model)
    if family is NATIVE:
        return {}
    state = model.state_dict()
    have = to_file(_below_classes(family.tensor_map(cast(ModelConfig, model.config), state)), state)
    have = {family.canonical_name(name) or name: tensor for name, tensor in have.items()}
    have |= model.unread
    shared: dict[str, Tensor] = {}
    for entry in _below_classes(family.tensor_map(config, fresh)):
        shapes = entry.shapes(tuple(fresh[entry.name].shape))
        if all(name in have and tuple(have[name].shape) == shapes[name] for name in shapes):
            shared |= entry.read(have.__getitem__)
    return shared


def _below_classes(entries: TensorMap) -> list[Entry]:
    """The entries of a head without the vectors of its tokens or classes."""
    plain = (entry for entry in entries if isinstance(entry, Entry))
    return [entry for entry in plain if entry.name.startswith("readout.transform.")]
