"""Configs as JSON and back: every value carries the name of its type."""

from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from manyheads import attention
from manyheads.errors import InputError
from manyheads.models import (
    decoder,
    embedding,
    encoder,
    init,
    layer,
    readout,
    recipes,
    seq2seq,
    stack,
    vision,
)
from manyheads.parts import constant, experts, feedforward, gates, norms
from manyheads.parts.masks import rules
from manyheads.parts.positions import alibi, learned, nowhere, relative, rotary, sinusoidal

__all__ = ["TYPES", "from_json", "to_json"]

# The only types a file may name; nothing else is ever made from one.
TYPES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        attention.AttentionConfig,
        decoder.DecoderConfig,
        embedding.Embedding,
        encoder.EncoderConfig,
        init.Init,
        layer.Branch,
        layer.LayerConfig,
        readout.ClassHead,
        readout.LanguageHead,
        readout.NoReadout,
        readout.TokenHead,
        readout.Transform,
        seq2seq.Seq2SeqConfig,
        stack.StackConfig,
        vision.Patches,
        vision.VisionConfig,
        constant.Constant,
        experts.Experts,
        feedforward.GeGLU,
        feedforward.MLP,
        feedforward.SwiGLU,
        gates.Gate,
        norms.Both,
        norms.LayerNorm,
        norms.NoNorm,
        norms.Post,
        norms.Pre,
        norms.RMSNorm,
        rules.All,
        rules.And,
        rules.Blocks,
        rules.Causal,
        rules.GlobalTokens,
        rules.Or,
        rules.Prefix,
        rules.RandomBlocks,
        rules.Window,
        alibi.Alibi,
        learned.Learned,
        nowhere.NoPosition,
        relative.Shaw,
        relative.T5Buckets,
        rotary.Linear,
        rotary.Llama3,
        rotary.NTK,
        rotary.Rotary,
        rotary.Unscaled,
        rotary.YaRN,
        sinusoidal.Sinusoidal,
    )
}


def to_json(value: object) -> Any:
    """A config, or a part of one, as plain dictionaries, lists, strings and numbers.

    >>> to_json(rules.Window(64, 64))
    {'type': 'Window', 'before': 64, 'after': 64}
    """
    if is_dataclass(value):
        assert TYPES.get(type(value).__name__) is type(value), f"{type(value)} is not in TYPES"
        named = {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
        return {"type": type(value).__name__, **named}
    if isinstance(value, tuple):
        return [to_json(each) for each in value]
    return value


def from_json(value: Any, where: str = "config") -> Any:
    """The config that `to_json` wrote; `where` leads the reader of an error to the place.

    >>> from_json({"type": "Window", "before": 64, "after": 64})
    Window(before=64, after=64)
    """
    if isinstance(value, list):
        return tuple(from_json(each, f"{where}[{index}]") for index, each in enumerate(value))
    if not isinstance(value, dict):
        return value
    kind = TYPES.get(str(value.get("type")))
    if kind is None:
        raise InputError(
            f"{where} is of type {value.get('type')!r}, which manyheads does not know",
            f"use one of {', '.join(sorted(TYPES))}",
        )
    known = {field.name for field in fields(kind)}
    given = {name: each for name, each in value.items() if name != "type"}
    for name in given.keys() - known:
        near = get_close_matches(name, sorted(known), n=1) or sorted(known)
        raise InputError(f"{where} has {name!r}, which {kind.__name__} lacks", f"use {near[0]!r}")
    for name, each in given.items():
        if isinstance(each, str):
            _check_word(each, get_type_hints(kind)[name], f"{where}.{name}")
    try:
        return kind(**{name: from_json(each, f"{where}.{name}") for name, each in given.items()})
    except TypeError as error:
        raise InputError(f"{where} is no {kind.__name__}: {error}", "give what it lacks") from None


def _check_word(word: str, hint: Any, where: str) -> None:
    """Refuse a word that a field of this type does not know: taken, it would do something else."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)]
    if str in kinds or word in words:
        return
    named = ", ".join(map(repr, words))
    raise InputError(
        f"{where} is {word!r}", f"use one of {named}" if words else "give no word here"
    )


def is_model(value: object) -> bool:
    """Whether this is the config of a whole model."""
    return isinstance(value, recipes.ModelConfig)
