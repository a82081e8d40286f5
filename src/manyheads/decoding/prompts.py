"""Prompts as people give them, and the token ids that a model reads."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from manyheads.decoding.habits import Habits
from manyheads.errors import InputError
from manyheads.ragged import Ragged
from manyheads.tokenizing import plain_copy

__all__ = ["Prompts", "encoder_of", "read_prompts"]

# A list holds texts, lists of ids or tensors of ids, all of one kind; no Sequence, which a text is.
Prompts = list[Any] | tuple[Any, ...] | Tensor | Ragged


def read_prompts(model: Any, prompts: Prompts, habits: Habits) -> list[list[int]]:
    """The ids of every prompt, checked; an empty one becomes the token that begins texts."""
    vocabulary = model.config.embedding.vocabulary
    found = []
    for index, ids in enumerate(_ids_of_all(model, prompts)):
        if not ids and habits.begin_id is None:
            raise InputError(
                f"prompt {index} is empty and the model has no token that begins texts",
                "give it at least one token",
            )
        ids = ids or [int(habits.begin_id or 0)]
        wrong = [one for one in (min(ids), max(ids)) if not 0 <= one < vocabulary]
        if wrong:
            raise InputError(
                f"prompt {index}: token id {wrong[0]} is outside vocabulary={vocabulary}",
                f"use ids of 0 to {vocabulary - 1}",
            )
        found.append(ids)
    return found


def encoder_of(model: Any, what: str) -> Any:
    """The model's tokenizer, one that neither cuts nor pads what it is given."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise InputError(
            f"{what} needs a tokenizer and this model has none",
            "load a folder with a tokenizer.json, set model.tokenizer, or give token ids",
        )
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    return plain_copy(tokenizer)


def _ids_of_all(model: Any, prompts: Prompts) -> list[list[int]]:
    if isinstance(prompts, Ragged):
        return [ids.tolist() for ids in prompts.to_list()]
    if isinstance(prompts, Tensor):
        if prompts.dim() != 2:
            raise InputError(
                f"prompts have shape {tuple(prompts.shape)}",
                "give (batch, length), a list of prompts, or a Ragged; one prompt is ids[None]",
            )
        return [_plain(ids, index) for index, ids in enumerate(prompts)]
    if any(isinstance(prompt, str) for prompt in prompts):
        return _encoded(model, prompts)
    return [_plain(prompt, index) for index, prompt in enumerate(prompts)]


def _encoded(model: Any, prompts: Sequence[Any]) -> list[list[int]]:
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if len(texts) < len(prompts):
        raise InputError("prompts mix texts and token ids", "give all of one kind")
    tokenizer = encoder_of(model, "a prompt of text")
    return [list(encoding.ids) for encoding in tokenizer.encode_batch(texts)]


def _plain(prompt: Any, index: int) -> list[int]:
    if isinstance(prompt, int):
        raise InputError(
            f"prompt {index} is the single number {prompt}", "give a list of prompts, [[5, 6, 7]]"
        )
    ids = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise InputError(f"prompt {index} is no row of token ids", "give whole numbers in one row")
    return ids
