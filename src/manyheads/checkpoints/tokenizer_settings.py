"""What `transformers` needs to know of a tokenizer that came as a tokenizer.json alone."""

import json
from collections.abc import Mapping
from typing import Any

from manyheads.checkpoints.companions import TOKENIZER, TOKENIZER_CONFIG
from manyheads.models.build import Model

__all__ = ["padding_id", "settings_file"]

# What the special tokens of ours, BERT, GPT-2, T5, Llama and Gemma are called, by their use.
NAMES = {
    "bos_token": ("<s>", "<bos>"),
    "eos_token": ("<|end|>", "<|endoftext|>", "</s>", "<eos>"),
    "unk_token": ("[UNK]", "<unk>"),
    "sep_token": ("[SEP]",),
    "pad_token": ("[PAD]", "<pad>", "<|pad|>"),
    "cls_token": ("[CLS]",),
    "mask_token": ("[MASK]", "<mask>", "<|mask|>"),
}

PLAIN = ("tokenizer_class", "clean_up_tokenization_spaces", "model_input_names")


def settings_file(model: Model, beside: Mapping[str, bytes]) -> dict[str, bytes]:
    """A tokenizer_config.json, if there is a tokenizer and none that fits it beside it.

    Without it the tokenizer is opened as the family's own: that of GPT-2 gets a token more than the
    model has words, and that of ModernBERT does not know which token masks.
    """
    if model.tokenizer is None or TOKENIZER not in beside:
        return {}
    if TOKENIZER_CONFIG in beside and not _outdated(beside[TOKENIZER_CONFIG], model.tokenizer):
        return {}
    types = getattr(getattr(model.config, "embedding", None), "types", 0)
    inputs = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": inputs,
        **_specials(model.tokenizer, model.generation),
    }
    return {TOKENIZER_CONFIG: json.dumps(told, indent=2).encode()}


def padding_id(model: Model, beside: Mapping[str, bytes]) -> int | None:
    """The token that fills up texts of a batch, as the tokenizer's files or the model say.

    One that texts of this tokenizer end with, as some are told to pad with, would hide their end.
    """
    tokenizer, found = model.tokenizer, model.generation.get("pad_token_id")
    told = json.loads(beside.get(TOKENIZER_CONFIG, b"{}")).get("pad_token")
    name = told.get("content") if isinstance(told, dict) else told
    ends: list[int] = []
    if tokenizer is not None:
        known = tokenizer.token_to_id(name) if isinstance(name, str) else None
        found, ends = found if known is None else known, tokenizer.encode("a").ids[-1:]
    return found if isinstance(found, int) and found not in ends else None


def _outdated(written: bytes, tokenizer: Any) -> bool:
    """Whether a file says no more than ours does, and names a token that another tokenizer had."""
    told = json.loads(written)
    if told.keys() - {*PLAIN, *NAMES}:
        return False
    named = [told[use] for use in NAMES if use in told]
    return any(isinstance(name, str) and tokenizer.token_to_id(name) is None for name in named)


def _specials(tokenizer: Any, generation: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that it has of those that have a use; what ends a text is the model's to say."""
    found = {
        use: next((name for name in names if tokenizer.token_to_id(name) is not None), None)
        for use, names in NAMES.items()
    }
    end = generation.get("eos_token_id")
    if isinstance(end, int):
        found["eos_token"] = tokenizer.id_to_token(end)
    return {use: name for use, name in found.items() if name is not None}
