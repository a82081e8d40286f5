"""What ends a text, by what a tokenizer does and has."""

from typing import Any

END = "<|end|>"
# Ours, and what ends a document in GPT-2, T5 and Llama, Gemma, and between the sentences of BERT.
ENDS = (END, "<|endoftext|>", "</s>", "<eos>", "[SEP]")


def own_end(tokenizer: Any) -> int | None:
    """The id of what the tokenizer itself puts behind a text."""
    bare, whole = (tokenizer.encode("a", add_special_tokens=how).ids for how in (False, True))
    return None if bare[-1:] == whole[-1:] else int(whole[-1])


def known_end(tokenizer: Any) -> str | None:
    """The name of what it has to end a text with."""
    return next((name for name in ENDS if tokenizer.token_to_id(name) is not None), None)
