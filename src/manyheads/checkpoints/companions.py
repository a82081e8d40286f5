"""The small files that travel with a model: what its tokenizer, its writing and its images need."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyheads.checkpoints.files import read_json
from manyheads.checkpoints.sentences import lowers
from manyheads.errors import InputError, MissingExtraError
from manyheads.models.origin import Origin
from manyheads.tokenizing import plain_copy, unbound

__all__ = ["companions", "read_companions", "read_generation", "read_tokenizer"]

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
# The tokenizer's vocabulary in other words: a lie beside another tokenizer.json.
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
    "preprocessor_config.json",
    "special_tokens_map.json",
    "surgery.json",
    TOKENIZER_CONFIG,
)
KNOWN = (TOKENIZER, *VOCABULARY, *OTHERS)


def read_companions(folder: Path) -> dict[str, bytes]:
    """Those of the known files that a folder has, whole."""
    found = {name: folder / name for name in KNOWN if (folder / name).is_file()}
    for name in found.keys() & {GENERATION, TOKENIZER_CONFIG}:
        read_json(found[name])
    return {name: file.read_bytes() for name, file in found.items()}


def read_tokenizer(files: Mapping[str, bytes], folder: Path) -> Any:
    """The tokenizer of tokenizer.json, which cuts and pads nothing: a batch here has no padding.

    Where sentence-transformers would lower the case of texts first, it does that itself.
    """
    if TOKENIZER not in files:
        return None
    try:
        from tokenizers import Tokenizer, normalizers
    except ImportError:
        raise MissingExtraError(
            f"{folder / TOKENIZER} needs the package tokenizers", "pip install tokenizers"
        ) from None
    try:
        tokenizer = Tokenizer.from_str(files[TOKENIZER].decode())
    # The package raises nothing more special.
    except Exception as error:
        raise InputError(
            f"{folder / TOKENIZER} is no tokenizer ({error})", "copy or download it again"
        ) from None
    if lowers(files):
        rest = [] if tokenizer.normalizer is None else [tokenizer.normalizer]
        tokenizer.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
    return unbound(tokenizer)


def read_generation(files: Mapping[str, bytes]) -> dict[str, Any]:
    """What generation_config.json says; nothing where there is none."""
    found: dict[str, Any] = json.loads(files.get(GENERATION, b"{}"))
    return found


def companions(model: Origin, folder: Path) -> dict[str, bytes]:
    """The files to write beside a model: as they were, but for what was changed since."""
    files = {name: data for name, data in model.side_files.items() if name in KNOWN}
    if dict(model.generation) != read_generation(files):
        files[GENERATION] = json.dumps(dict(model.generation), indent=2).encode()
    if _said(model.tokenizer) == _said(read_tokenizer(model.side_files, folder)):
        return files
    files = {name: data for name, data in files.items() if name not in (TOKENIZER, *VOCABULARY)}
    if model.tokenizer is not None:
        files[TOKENIZER] = model.tokenizer.to_str().encode()
    return files


def _said(tokenizer: Any) -> str | None:
    """All that a tokenizer says but where it cuts and how it pads, which callers set as they go."""
    if tokenizer is None:
        return None
    said: str = plain_copy(tokenizer).to_str()
    return said
