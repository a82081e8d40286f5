"""The end-of-sequence token of a tokenizer."""

from typing import Any

EOS = "<|end|>"
# Ours; then those of GPT-2, of T5 and Llama, of Gemma, and the separator of BERT.
KNOWN_EOS = (EOS, "<|endoftext|>", "</s>", "<eos>", "[SEP]")


def appended_eos(tokenizer: Any) -> int | None:
    """The id of the token that the tokenizer itself appends to a text, if any."""
    bare, whole = (
        tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True)
    )
    return None if bare[-1:] == whole[-1:] else int(whole[-1])


def find_eos(tokenizer: Any) -> str | None:
    """The first known end-of-sequence token that the tokenizer has."""
    return next((name for name in KNOWN_EOS if tokenizer.token_to_id(name) is not None), None)
