"""Tokenizers without padding, and with no truncation or one of our own."""

from typing import Any

from manyheads.errors import InputError


def disable_padding_and_truncation(tokenizer: Any) -> Any:
    """The same tokenizer, which from now on neither pads nor truncates."""
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def plain_copy(tokenizer: Any) -> Any:
    """A copy that neither pads nor truncates."""
    return disable_padding_and_truncation(type(tokenizer).from_str(tokenizer.to_str()))


def truncating_copy(tokenizer: Any, longest: int | None) -> Any:
    """A copy that does not pad and truncates texts to `longest` tokens, special tokens included.

    It truncates on the same side as the tokenizer, by default at the end.
    """
    copy = plain_copy(tokenizer)
    if longest is None:
        return copy
    added = copy.num_special_tokens_to_add(False)
    if longest <= added:
        raise InputError(
            f"longest must be above the {added} special tokens, got {longest}",
            f"use {added + 1} or more",
        )
    side = (tokenizer.truncation or {}).get("direction", "right")
    copy.enable_truncation(longest, direction=side)
    return copy
