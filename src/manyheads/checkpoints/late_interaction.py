"""Folders of late interaction: those of `MultiVectorEncoder`, of PyLate and of Stanford's ColBERT.

`MultiVectorEncoder` of sentence-transformers has a folder per module. PyLate keeps the settings of
all in one file. Stanford's folders have the projection among the weights of the model, as
linear.weight, and the settings in artifact.metadata.
"""

import json
import string
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from manyheads.checkpoints.files import read_json
from manyheads.checkpoints.sentence_transformers import (
    CONFIG,
    MASK,
    PYLATE_KEYS,
    SETTINGS,
    TOKENS,
    VECTORS,
    Modules,
    as_bytes,
    dense_projections,
    longest_text,
    module_files,
)
from manyheads.checkpoints.side_files import SPECIAL_TOKENS, TOKENIZER_CONFIG
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import Model
from manyheads.models.provenance import DenseProjection, LateInteractionConfig, QueryExpansion, Role
from manyheads.models.readout import NoReadout
from manyheads.models.recipes import ModelConfig

ARTIFACT = "artifact.metadata"
LINEAR = "linear.weight"
ARCHITECTURE = "HF_ColBERT"
# Families whose tensors Stanford's code expects under their own name.
STANFORD_FAMILIES = ("bert", "roberta")
MARKERS = {"query": "[unused0]", "document": "[unused1]"}
PUNCTUATION = list(string.punctuation)
DEFAULT_LENGTH = 32
TYPES = {
    "Transformer": "base.modules.transformer.Transformer",
    "Dense": "base.modules.dense.Dense",
    "MultiVectorMask": "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask",
    "Normalize": "base.modules.normalize.Normalize",
}
# Settings under the names of sentence-transformers, from whichever file they come.
Settings = dict[str, Any]


def is_stanford(description: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a folder of Stanford's ColBERT."""
    return description.get("architectures") == [ARCHITECTURE]


def late_interaction_of(
    modules: Modules,
    side_files: Mapping[str, bytes],
    config_json: Mapping[str, Any],
    config: ModelConfig,
    content: tuple[Any, Tensor | None],
) -> LateInteractionConfig | None:
    """How the folder gives vectors of tokens, or None if it does not.

    `content` is the tokenizer, in which markers such as [unused0] become tokens that texts can
    name, and Stanford's projection.
    """
    tokenizer, linear = content
    listed = modules.late
    if not listed and linear is None:
        return None
    where = modules.transformer
    if tokenizer is None:
        raise InputError(
            f"{where} has no tokenizer.json, which late interaction needs", "add the file"
        )
    settings = _settings(modules, side_files, listed=listed)
    prompts = {role: settings[role] for role in MARKERS}
    for role, prompt in prompts.items():
        if not isinstance(prompt, str):
            raise InputError(f"{where} has the {role} prompt {prompt!r:.200}", "use a text")
    if settings["marked"]:
        _register(tokenizer, list(prompts.values()))
    if settings.get("keep_only_token_ids"):
        raise InputError(
            f"{where} keeps the vectors of images only (keep_only_token_ids)", "use a model of text"
        )
    projection = dense_projections(modules.dense, config, TOKENS)
    if not listed:
        assert linear is not None
        projection = (DenseProjection(linear.float().clone(), None, "none"),)
    lengths = {
        key: _whole(settings[key], key, str(where))
        for key in ("query_length", "document_length")
        if settings.get(key) is not None
    }
    words = [str(word) for word in settings.get("skiplist_words") or ()]
    tasks = settings.get("skiplist_tasks")
    tasks = ["document"] if tasks is None else [tasks] if isinstance(tasks, str) else tasks
    roles = tuple(role for role in ROLES if role in [str(task) for task in tasks])
    return LateInteractionConfig(
        projection=projection,
        normalize=modules.normalizes or not listed,
        query_prompt=prompts["query"],
        document_prompt=prompts["document"],
        max_length=longest_text(side_files, config_json, config),
        expansion=_expansion(settings, tokenizer, side_files, str(where)),
        skipped=_known_ids(tokenizer, words),
        skipped_in=roles,
        **lengths,
    )


ROLES: tuple[Role, ...] = ("query", "document")


def _settings(modules: Modules, side_files: Mapping[str, bytes], *, listed: bool) -> Settings:
    if not listed:
        return _stanford_settings(_json(side_files, ARTIFACT))
    vectors = _json(side_files, VECTORS)
    legacy = modules.mask is None or any(key in vectors for key in PYLATE_KEYS)
    settings = _pylate_settings(vectors) if legacy else {"marked": False}
    prompts = vectors.get("prompts") or {}
    if not isinstance(prompts, Mapping):
        raise InputError(f"{VECTORS} has prompts={prompts!r:.200}", "use a text per role")
    settings = {role: prompts.get(role) or "" for role in MARKERS} | settings
    own = {
        key: value
        for key, value in _json(side_files, SETTINGS).items()
        if key in ("query_length", "document_length", "query_expansion")
    }
    return settings | own | _json(side_files, MASK)


def _stanford_settings(metadata: Mapping[str, Any]) -> Settings:
    """The settings of artifact.metadata, with Stanford's defaults."""
    marker = {"query": "query_token_id", "document": "doc_token_id"}
    expansion = {
        "strategy": "fixed",
        "attend": bool(metadata.get("attend_to_mask_tokens")),
        "length": metadata.get("query_maxlen") or DEFAULT_LENGTH,
    }
    return {
        **{role: f"{metadata.get(key) or MARKERS[role]} " for role, key in marker.items()},
        "marked": True,
        "document_length": metadata.get("doc_maxlen"),
        "query_expansion": expansion,
        "skiplist_words": PUNCTUATION if metadata.get("mask_punctuation", True) else [],
    }


def _pylate_settings(vectors: Mapping[str, Any]) -> Settings:
    """The settings that PyLate keeps beside the prompts; a prefix comes before a prompt."""
    marked = any(f"{role}_prefix" in vectors for role in MARKERS)
    words = vectors.get("skiplist_words")
    if words is None:
        words = PUNCTUATION if marked or vectors.get("model_type") == "ColBERT" else []
    settings: Settings = {
        "marked": marked,
        "skiplist_words": words,
        "document_length": vectors.get("document_length"),
    }
    for role in MARKERS:
        prefix = vectors.get(f"{role}_prefix") or ""
        prompt = (vectors.get("prompts") or {}).get(role) or ""
        settings[role] = prefix + prompt.removeprefix(prefix)
    length = vectors.get("query_length")
    if "query_expansion" in vectors or vectors.get("do_query_expansion") is False:
        expansion = vectors.get("query_expansion")
        return settings | {"query_expansion": expansion, "query_length": length}
    attend = vectors.get("attend_to_expansion_tokens", vectors.get("attend_to_mask_tokens"))
    expansion = {"strategy": "fixed", "attend": bool(attend), "length": length or DEFAULT_LENGTH}
    return settings | {"query_expansion": expansion}


def _expansion(
    settings: Settings, tokenizer: Any, side_files: Mapping[str, bytes], where: str
) -> QueryExpansion | None:
    expansion = settings.get("query_expansion")
    if expansion is None:
        return None
    if not isinstance(expansion, Mapping) or expansion.get("strategy") not in ("fixed", "min"):
        raise InputError(
            f"{where} has query_expansion={expansion!r:.200}", "use the strategy fixed or min"
        )
    length = _whole(expansion.get("length"), "the length of query_expansion", where)
    longest = settings.get("query_length")
    if longest is not None and longest < length:
        raise InputError(
            f"{where} has query_length={longest}, and expands queries to {length} tokens",
            "use a query_length that is not smaller",
        )
    name = expansion.get("token") or _mask_token(tokenizer, side_files)
    token = None if name is None else tokenizer.token_to_id(name)
    if token is None:
        raise InputError(
            f"{where} expands queries with {name!r}, which its tokenizer does not have",
            "use a token of its vocabulary",
        )
    if _json(side_files, TOKENIZER_CONFIG).get("padding_side") == "left":
        raise InputError(
            f"{where} expands queries on their left (padding_side), which is not supported",
            'use padding_side="right"',
        )
    return QueryExpansion(
        length=length,
        token=int(token),
        attend=bool(expansion.get("attend", False)),
        truncates=expansion["strategy"] == "fixed",
    )


def _mask_token(tokenizer: Any, side_files: Mapping[str, bytes]) -> str | None:
    """The mask token, or for a tokenizer without one the token that ends a text."""
    for use in ("mask_token", "eos_token"):
        for file in (TOKENIZER_CONFIG, "special_tokens_map.json"):
            named = _json(side_files, file).get(use)
            name = named.get("content") if isinstance(named, dict) else named
            if isinstance(name, str):
                return name
        for name in SPECIAL_TOKENS[use]:
            if tokenizer.token_to_id(name) is not None:
                return name
    return None


def _register(tokenizer: Any, prompts: Sequence[str]) -> None:
    """Make the marker that a prompt begins with one token, if the vocabulary has it."""
    from tokenizers import AddedToken

    for prompt in prompts:
        for marker in (prompt, *prompt.split()[:1]):
            if not marker.strip() or tokenizer.token_to_id(marker) is None:
                continue
            if tokenizer.encode(marker, add_special_tokens=False).tokens != [marker]:
                tokenizer.add_special_tokens([AddedToken(marker, normalized=False, special=True)])
            break


def _known_ids(tokenizer: Any, words: Sequence[str]) -> tuple[int, ...]:
    """The ids of words that are tokens; sentence-transformers leaves out the others too."""
    ids = (tokenizer.token_to_id(word) for word in words)
    return tuple(int(token) for token in ids if token is not None)


def _json(side_files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(side_files.get(name, b"{}"))
    return content


def _whole(value: Any, name: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{where}: {name} must be an integer of at least 1, got {value!r:.200}")
    return value


def artifact_of(modules: Modules) -> dict[str, bytes]:
    """Stanford's artifact.metadata; an older folder may have none."""
    file = modules.transformer / ARTIFACT
    if not file.is_file():
        return {ARTIFACT: b"{}"}
    read_json(file)
    return {ARTIFACT: file.read_bytes()}


def late_files(model: Model) -> dict[str, bytes]:
    """The files that `MultiVectorEncoder` needs beside the transformer."""
    late, was = model.late, model.side_files
    assert late is not None, "the caller has a model of late interaction"
    kinds = ["Transformer", *["Dense"] * len(late.projection), "MultiVectorMask"]
    kinds += ["Normalize"] * late.normalize
    mask = {
        "skiplist_words": [_token_name(model, token) for token in late.skipped],
        "skiplist_tasks": list(late.skipped_in),
        "keep_only_token_ids": None,
    }
    expansion = late.expansion and {
        "strategy": "fixed" if late.expansion.truncates else "min",
        "attend": late.expansion.attend,
        "token": _token_name(model, late.expansion.token),
        "length": late.expansion.length,
    }
    settings = {
        **_json(was, SETTINGS),
        "max_seq_length": late.max_length,
        "query_length": late.query_length,
        "document_length": late.document_length,
        "query_expansion": expansion,
    }
    before = _json(was, VECTORS)
    scores = before.get("similarity_fn_name")
    vectors = {
        **{key: value for key, value in before.items() if key not in PYLATE_KEYS},
        "model_type": "MultiVectorEncoder",
        "prompts": {"query": late.query_prompt, "document": late.document_prompt},
        "default_prompt_name": None,
        "similarity_fn_name": scores if scores == "meanmaxsim" else "maxsim",
    }
    return {
        **module_files(kinds, late.projection, TOKENS, TYPES),
        f"{kinds.index('MultiVectorMask')}_MultiVectorMask/{CONFIG}": as_bytes(mask),
        SETTINGS: as_bytes(settings),
        VECTORS: as_bytes(vectors),
    }


def _token_name(model: Model, token: int) -> str:
    name = None if model.tokenizer is None else model.tokenizer.id_to_token(token)
    if name is None:
        raise ConfigError(
            f"late interaction uses token {token}, which the model's tokenizer does not have",
            "set model.tokenizer, or model.late without it",
        )
    return str(name)


def stanford_layout(
    model: Model, description: Mapping[str, Any], tensors: dict[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, bytes]]:
    """The config.json, tensors and artifact.metadata that Stanford's code reads as well.

    They are as they were for a model that came from elsewhere, or that it could not read.
    """
    late, name = model.late, str(description["model_type"])
    bare = isinstance(model.config.readout, NoReadout) and name in STANFORD_FAMILIES
    artifact = None
    if late is not None and bare and ARTIFACT in model.side_files:
        artifact = _artifact(late, model.tokenizer, _json(model.side_files, ARTIFACT))
    if late is None or artifact is None:
        return dict(description), tensors, {}
    tensors = {f"{name}.{key}": tensor for key, tensor in tensors.items()}
    dtype = next(iter(tensors.values())).dtype
    tensors[LINEAR] = late.projection[0].weight.detach().to("cpu", dtype).contiguous()
    named = {**description, "architectures": [ARCHITECTURE]}
    return named, tensors, {ARTIFACT: as_bytes(artifact)}


def _artifact(
    late: LateInteractionConfig, tokenizer: Any, was: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The settings as artifact.metadata has them, or None if it cannot."""
    expansion, markers = late.expansion, (late.query_prompt, late.document_prompt)
    single = all(len(marker.split()) == 1 and marker == f"{marker.strip()} " for marker in markers)
    plain = [
        dense for dense in late.projection if dense.bias is None and dense.activation == "none"
    ]
    if len(late.projection) != 1 or not plain or not late.normalize or not single:
        return None
    skips, punctuation = bool(late.skipped), set(_known_ids(tokenizer, PUNCTUATION))
    sayable = not skips or (set(late.skipped) == punctuation and late.skipped_in == ("document",))
    if expansion is None or not expansion.truncates or late.query_length or not sayable:
        return None
    changed = {
        "query_token_id": markers[0].strip(),
        "doc_token_id": markers[1].strip(),
        "query_maxlen": expansion.length,
        "doc_maxlen": late.document_length,
        "attend_to_mask_tokens": expansion.attend,
        "mask_punctuation": skips,
        "dim": late.projection[0].weight.shape[0],
    }
    return {**was, **{key: value for key, value in changed.items() if value is not None}}
