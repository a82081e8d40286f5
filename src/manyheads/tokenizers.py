"""Tokenizers that pad nothing, and cut nothing or at one's own length."""

from typing import Any

from manyheads.errors import InputError


def unbound(tokenizer: Any) -> Any:
    """The same one, which from now on neither pads nor cuts."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def plain_copy(tokenizer: Any) -> Any:
    """A copy that neither pads nor cuts."""
    return unbound(type(tokenizer).from_str(tokenizer.to_str()))


def truncating_copy(tokenizer: Any, longest: int | None) -> Any:
    """A copy that does not pad, and cuts texts to `longest` tokens, its special tokens included.

    It cuts on the side that the tokenizer does, the end unless it says otherwise.
    """
    copy = plain_copy(tokenizer)
    if longest is None:
        return copy
    added = copy.num_special_tokens_to_add(False)
    if longest <= added:
        raise InputError(
            f"longest={longest} leaves no room beside {added} special tokens",
            f"use {added + 1} or more",
        )
    side = (tokenizer.truncation or {}).get("direction", "right")
    copy.enable_truncation(longest, direction=side)
    return copy
