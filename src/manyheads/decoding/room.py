"""Whether a model can write what it is asked to, seen before the first step."""

from collections.abc import Sequence
from typing import Any

from manyheads.cache import Fixed, Growing, Slots
from manyheads.errors import ConfigError, InputError
from manyheads.models.decoder import Decoder
from manyheads.models.readout import LanguageHead
from manyheads.models.seq2seq import Seq2Seq
from manyheads.parts.positions import Learned

__all__ = ["check_room", "check_writes"]


def check_writes(model: Any) -> Decoder | Seq2Seq:
    """Refuse a model that writes no words."""
    if not isinstance(model, Decoder | Seq2Seq):
        raise InputError(
            f"{type(model).__name__} reads and does not write", "use a Decoder or a Seq2Seq"
        )
    if not isinstance(model.config.readout, LanguageHead):
        raise InputError(
            f"a readout of {type(model.config.readout).__name__} names no words",
            "use a model with readout=LanguageHead()",
        )
    if model.training:
        raise InputError("the model is in training and drops at random", "call model.eval() first")
    return model


def check_room(
    model: Decoder | Seq2Seq,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    cache: Growing | Fixed,
) -> None:
    """Refuse to run past the model's positions, or out of a cache of fixed size."""
    if not (prompts and new_tokens):
        return
    longest = max(map(len, prompts))
    position = model.config.embedding.position
    before = 1 if isinstance(model, Seq2Seq) else longest
    if isinstance(position, Learned):
        _check_positions(position.longest, longest, before, new_tokens)
    sizes = [
        store.config.size
        for store in model.new_cache(cache).stores
        if isinstance(store, Slots) and isinstance(store.config, Fixed)
    ]
    # The last token is chosen and never read.
    needed = before + new_tokens - 1
    if sizes and needed > min(sizes):
        raise ConfigError(
            f"a cache of {min(sizes)} tokens cannot hold the {before} of the longest prompt and "
            f"{new_tokens} new ones",
            f"use Fixed(size={needed}) or more, or Growing()",
        )


def _check_positions(limit: int, longest: int, before: int, new_tokens: int) -> None:
    if max(longest, before) > limit:
        raise InputError(
            f"a prompt of {longest} tokens is longer than the model's {limit} positions",
            f"cut it to {limit}",
        )
    if before + new_tokens > limit:
        raise InputError(
            f"{before} tokens and new_tokens={new_tokens} go past the model's {limit} positions",
            f"use new_tokens={limit - before} or less, or a shorter prompt",
        )
