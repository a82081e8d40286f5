"""Small folders of sentence-transformers, in the layouts of its versions."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from tests.checkpoints.peer_models import randomized

__all__ = ["TEXTS", "flags", "opened", "sentence_folder", "vectors", "write_json"]

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "model", "of", "words", "A", "Words"]
TEXTS = ["a model", "words of a model of words", "A Words", "a " * 40]
MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")


def write_json(place: Path, value: object) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(json.dumps(value))


def flags(mode: str) -> dict[str, Any]:
    """A pooling config as older versions write it."""
    return {"word_embedding_dimension": 24} | {
        f"pooling_mode_{each}": each == mode for each in MODES
    }


def sentence_folder(
    place: Path, *, inner: str = "", pooling: dict[str, Any] | None = None, norm: bool = True
) -> Path:
    """A whole folder with random weights; `inner` is where the transformer lies."""
    home = place / inner
    config = BertConfig(
        vocab_size=len(WORDS),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=32,
        max_position_embeddings=32,
    )
    randomized(BertModel(config)).save_pretrained(home)
    _tokenizer().save_pretrained(home)
    write_json(home / "sentence_bert_config.json", {"max_seq_length": 16, "do_lower_case": False})
    write_json(place / "1_Pooling" / "config.json", pooling or flags("mean_tokens"))
    prefix = "sentence_transformers.models."
    row = [("Transformer", inner), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": prefix + kind}
        for index, (kind, path) in enumerate(row if norm else row[:2])
    ]
    write_json(place / "modules.json", modules)
    return place


def opened(place: Path) -> SentenceTransformer:
    return SentenceTransformer(str(place), device="cpu", local_files_only=True)


def vectors(place: Path) -> np.ndarray[Any, Any]:
    result = np.asarray(opened(place).encode(TEXTS))
    assert result.std() > 0.01
    return result


def _tokenizer() -> Any:
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, sep_token="[SEP]", model_max_length=24, **special
    )
