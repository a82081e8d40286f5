"""Small folders of late interaction: of sentence-transformers, of PyLate and of Stanford."""

import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    ModernBertConfig,
    ModernBertModel,
    PreTrainedTokenizerFast,
)

from tests.checkpoints.peer_models import randomized

__all__ = ["QUERIES", "TEXTS", "multi_vector", "opened", "pylate_folder", "stanford_folder"]

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "[unused1]"]
WORDS = ["the", "a", "model", "of", "words", "heat", "flow", "over", "wing", "layer", "how", "is"]
VOCABULARY = [*SPECIAL, *WORDS, *string.punctuation.replace("~", "")]
TEXTS = ["The model, of words.", "heat flow (over) a wing!", "a", ". , ;", "layer " * 40]
QUERIES = ["how is heat flow?", "words", "the layer of a wing is heat, over the words of it" * 2]


def backbone(place: Path, family: str = "bert") -> Path:
    """A transformer with random weights and its tokenizer."""
    size: dict[str, Any] = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 32,
        "max_position_embeddings": 48,
    }
    bert = family == "bert"
    modern = ModernBertConfig(**size, pad_token_id=0, local_attention=8) if not bert else None
    made = BertModel(BertConfig(**size)) if modern is None else ModernBertModel(modern)
    randomized(made).save_pretrained(place)
    tokenizer = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]"}
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=40,
        **special,
    ).save_pretrained(place)
    return place


def multi_vector(
    place: Path,
    *,
    family: str = "bert",
    words: list[str] | None = None,
    prompts: dict[str, str] | None = None,
    **settings: Any,
) -> Path:
    """What `MultiVectorEncoder` saves."""
    transformer = Transformer(str(backbone(place / "backbone", family)), **settings)
    torch.manual_seed(0)
    dense = Dense(
        24, 16, bias=False, activation_function=None, module_input_name="token_embeddings"
    )
    modules = [
        transformer,
        dense,
        MultiVectorMask(skiplist_words=words),
        Normalize(module_input_name="token_embeddings"),
    ]
    MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu").save(str(place / "theirs"))
    return place / "theirs"


def stanford_folder(place: Path, **metadata: Any) -> Path:
    """A folder of Stanford's ColBERT: the projection is among the weights of the model."""
    backbone(place)
    tensors = {
        f"bert.{name}": each for name, each in load_file(place / "model.safetensors").items()
    }
    tensors["linear.weight"] = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    (place / "artifact.metadata").write_text(json.dumps(metadata))
    return place


def pylate_folder(place: Path, **settings: Any) -> Path:
    """A folder of PyLate: a transformer and a projection, all settings in one file."""
    backbone(place)
    (place / "1_Dense").mkdir()
    projection = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    save_file({"linear.weight": projection}, place / "1_Dense" / "model.safetensors")
    dense = {
        "in_features": 24,
        "out_features": 16,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
        "use_residual": False,
    }
    (place / "1_Dense" / "config.json").write_text(json.dumps(dense))
    names = ["sentence_transformers.models.Transformer", "pylate.models.Dense.Dense"]
    listed = [
        {"idx": index, "name": str(index), "path": "1_Dense" if index else "", "type": name}
        for index, name in enumerate(names)
    ]
    (place / "modules.json").write_text(json.dumps(listed))
    (place / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return place


def opened(place: Path) -> MultiVectorEncoder:
    return MultiVectorEncoder(str(place), device="cpu", local_files_only=True)
