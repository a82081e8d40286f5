"""The small files beside the weights: tokenizer, generation, image preprocessing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyheads.checkpoints.files import MAX_TOML_BYTES, file_in, parse_toml, read_json, read_small
from manyheads.checkpoints.sentence_transformers import lowercases
from manyheads.errors import InputError, MissingPackageError
from manyheads.models.build import Model
from manyheads.tokenizers import disable_padding_and_truncation, plain_copy, unreadable_refused

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
PREPROCESSING = "preprocessor_config.json"
# The same vocabulary in other formats, which is wrong beside another tokenizer.json.
VOCABULARY = (
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "sentencepiece.model",
    "source.spm",
    "spiece.model",
    "spm.model",
    "target.spm",
    "target_vocab.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
)
OTHERS = (
    "chat_template.jinja",
    GENERATION,
    PREPROCESSING,
    "special_tokens_map.json",
    "surgery.json",
    TOKENIZER_CONFIG,
)
SIDE_FILES = (TOKENIZER, *VOCABULARY, *OTHERS)

# Special tokens of our models, BERT, GPT-2, T5, Llama and Gemma, by their use.
SPECIAL_TOKENS = {
    "bos_token": ("<s>", "<bos>"),
    "eos_token": ("<|end|>", "<|endoftext|>", "</s>", "<eos>"),
    "unk_token": ("[UNK]", "<unk>"),
    "sep_token": ("[SEP]",),
    "pad_token": ("[PAD]", "<pad>", "<|pad|>"),
    "cls_token": ("[CLS]",),
    "mask_token": ("[MASK]", "<mask>", "<|mask|>"),
}

# The other keys that we write to tokenizer_config.json.
MAX_LENGTH = "model_max_length"
WRITTEN = ("tokenizer_class", "clean_up_tokenization_spaces", "model_input_names", MAX_LENGTH)
# The run file, which may lie beside a model, and what `transformers` writes for an unknown length.
RUN_FILE = "run.toml"
NO_LENGTH = 10**7


def read_side_files(folder: Path) -> dict[str, bytes]:
    """The content of the side files that a folder has."""
    files = {name: file for name in SIDE_FILES if (file := file_in(folder, name)) is not None}
    for name in files.keys() & {GENERATION, TOKENIZER_CONFIG, PREPROCESSING}:
        read_json(files[name])
    return {name: file.read_bytes() for name, file in files.items()}


def read_tokenizer(files: Mapping[str, bytes], folder: Path) -> Any:
    """The tokenizer of tokenizer.json, without truncation and padding.

    If sentence-transformers would lowercase texts first, the tokenizer does so itself.
    """
    if TOKENIZER not in files:
        return None
    try:
        from tokenizers import Tokenizer, normalizers
    except ImportError:
        raise MissingPackageError(str(folder / TOKENIZER), "tokenizers") from None
    problem = f"{folder / TOKENIZER} is not a tokenizer"
    with unreadable_refused(problem, "copy or download it again"):
        tokenizer = Tokenizer.from_str(files[TOKENIZER].decode())
        # Some that can be read fail on every text.
        tokenizer.encode("a b")
    if lowercases(files):
        rest = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
    return disable_padding_and_truncation(tokenizer)


def read_generation(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The content of generation_config.json; empty if there is none."""
    generation: dict[str, Any] = json.loads(files.get(GENERATION, b"{}"))
    return generation


def read_trained_length(files: Mapping[str, bytes], folder: Path) -> int | None:
    """The length of the texts a model was trained on: as run.toml or its tokenizer's files say."""
    run_file = file_in(folder, RUN_FILE)
    if run_file is not None:
        try:
            data = parse_toml(read_small(run_file, MAX_TOML_BYTES), RUN_FILE).get("data")
        except InputError:
            data = None
        # Run files of earlier versions say "length".
        data = data if isinstance(data, dict) else {}
        length = data.get("max_length", data.get("length"))
        if isinstance(length, int) and length > 0:
            return length
    length = json.loads(files.get(TOKENIZER_CONFIG, b"{}")).get(MAX_LENGTH)
    return length if isinstance(length, int) and 0 < length < NO_LENGTH else None


def side_files_of(model: Model, folder: Path) -> dict[str, bytes]:
    """The files to write beside a model: as they were read, except for what has changed."""
    files = {name: data for name, data in model.side_files.items() if name in SIDE_FILES}
    if dict(model.generation) != read_generation(files):
        files[GENERATION] = json.dumps(dict(model.generation), indent=2).encode()
    if _content(model.tokenizer) != _content(read_tokenizer(model.side_files, folder)):
        files = {name: data for name, data in files.items() if name not in (TOKENIZER, *VOCABULARY)}
        if model.tokenizer is not None:
            files[TOKENIZER] = model.tokenizer.to_str().encode()
    return files | _tokenizer_config(model, files)


def _content(tokenizer: Any) -> str | None:
    """A tokenizer as text, without truncation and padding, which callers may have set."""
    if tokenizer is None:
        return None
    content: str = plain_copy(tokenizer).to_str()
    return content


def _tokenizer_config(model: Model, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """A tokenizer_config.json, if there is a tokenizer and none that fits it.

    Without it `transformers` opens the tokenizer as the family's own: GPT-2's gets one token more
    than the model has, and ModernBERT's does not know its mask token.
    """
    if model.tokenizer is None or TOKENIZER not in files:
        return {}
    length = {} if model.trained_length is None else {MAX_LENGTH: model.trained_length}
    if TOKENIZER_CONFIG in files and not _outdated(files[TOKENIZER_CONFIG], model.tokenizer):
        content = json.loads(files[TOKENIZER_CONFIG])
        changed = content | length | _padding(model, content)
        if content == changed:
            return {}
        return {TOKENIZER_CONFIG: json.dumps(changed, indent=2).encode()}
    types = getattr(getattr(model.config, "embedding", None), "types", 0)
    inputs = ["input_ids", *(["token_type_ids"] if types else []), "attention_mask"]
    # The model decides which of the special tokens ends a text.
    specials = {
        use: next((name for name in names if model.tokenizer.token_to_id(name) is not None), None)
        for use, names in SPECIAL_TOKENS.items()
    }
    end = model.generation.get("eos_token_id")
    if isinstance(end, int) and 0 <= end < 2**32:
        specials["eos_token"] = model.tokenizer.id_to_token(end)
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": inputs,
        **length,
        **{use: name for use, name in specials.items() if name is not None},
    }
    content |= _padding(model, content)
    return {TOKENIZER_CONFIG: json.dumps(content, indent=2).encode()}


def _padding(model: Model, content: Mapping[str, Any]) -> dict[str, Any]:
    """A token to pad with, which sentence-transformers asks for; padding is not attended to."""
    if model.sentence is None and model.late is None:
        return {}
    uses = ("pad_token", "eos_token", "mask_token")
    return next(({"pad_token": content[use]} for use in uses if content.get(use)), {})


def padding_id(model: Model, files: Mapping[str, bytes]) -> int | None:
    """The padding token, as the files of the tokenizer or the model name it.

    A token that texts end with, which some models also pad with, would hide their end.
    """
    tokenizer, padding = model.tokenizer, model.generation.get("pad_token_id")
    named = json.loads(files.get(TOKENIZER_CONFIG, b"{}")).get("pad_token")
    name = named.get("content") if isinstance(named, dict) else named
    ends: list[int] = []
    if tokenizer is not None:
        token = tokenizer.token_to_id(name) if isinstance(name, str) else None
        padding, ends = padding if token is None else token, tokenizer.encode("a").ids[-1:]
    return padding if isinstance(padding, int) and padding not in ends else None


def _outdated(written: bytes, tokenizer: Any) -> bool:
    """Whether a file has only our own keys and names a token that this tokenizer does not have."""
    content = json.loads(written)
    if content.keys() - {*WRITTEN, *SPECIAL_TOKENS}:
        return False
    named = [content[use] for use in SPECIAL_TOKENS if use in content]
    return any(isinstance(name, str) and tokenizer.token_to_id(name) is None for name in named)
