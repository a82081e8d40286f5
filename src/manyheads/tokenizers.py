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


def token_text(tokenizer: Any, token: int) -> str:
    """The text of a token, or its own name where it has none."""
    text: str = tokenizer.decode([token], skip_special_tokens=True)
    return text or str(tokenizer.id_to_token(token) or f"token {token}")


def token_texts(tokenizer: Any, text: str, ids: list[int]) -> list[str]:
    """The part of the text that each token covers; its own name where it covers none."""
    encoding = tokenizer.encode(text)
    if list(encoding.ids[: len(ids)]) != ids:
        return [token_text(tokenizer, token) for token in ids]
    parts, before = [], (-1, -1)
    for token, span in zip(ids, encoding.offsets, strict=False):
        part = text[span[0] : span[1]]
        # Tokens within one character share its span.
        parts.append(part if part and span != before else token_text(tokenizer, token))
        before = span
    return parts
