"""The tokenizer of a GGUF file, as the tokenizer.json and other side files of a folder."""

import json
import warnings
from collections.abc import Mapping
from typing import Any

from manyheads.checkpoints import gguf_file, side_files
from manyheads.errors import InputError, MissingPackageError, UnknownTokenizerWarning
from manyheads.tokenizers import BYTE_LEVEL, unreadable_refused

CHAT_TEMPLATE = "chat_template.jinja"
# The types of tokens in a file.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+"
# Upper, title and other letters, and lower and other letters.
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA3 = WORDS + r"|\p{N}{1,3}" + REST
QWEN2 = WORDS + r"|\p{N}" + REST
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a byte-level tokenizer splits a text before it merges, by tokenizer.ggml.pre.
SPLITS = {
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "dbrx": LLAMA3,
    "smaug-bpe": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "megrez": QWEN2,
    "tekken": TEKKEN,
}
# These split as GPT-2 does, some after cutting digits apart.
GPT2_SPLITS = ("gpt-2", "gpt2", "phi-2", "mpt", "olmo", "jina-en")
DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone")
# A whole word that is a token is one, whatever the merges say; and texts begin with a special one.
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken")
NFC = ("qwen2", "deepseek-r1-qwen")


def side_files_from(file: gguf_file.GGUFFile) -> dict[str, bytes]:
    """tokenizer.json, tokenizer_config.json, the chat template and generation_config.json."""
    metadata = file.metadata
    ids = _special_ids(metadata)
    generation: dict[str, Any] = {
        f"{use}_token_id": ids[use] for use in ("bos", "eos", "pad") if use in ids
    }
    # An answer of a chat may end with another token than a text.
    if "eos" in ids and ids.get("eot", ids["eos"]) != ids["eos"]:
        generation["eos_token_id"] = [ids["eos"], ids["eot"]]
    files = {side_files.GENERATION: json.dumps(generation, indent=2).encode()}
    tokenizer = _tokenizer(file)
    if tokenizer is None:
        return files
    tokens = metadata["tokenizer.ggml.tokens"]
    length = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        **({"model_max_length": length} if isinstance(length, int) else {}),
        **{f"{use}_token": tokens[token] for use, token in ids.items() if use != "eot"},
    }
    files |= {side_files.TOKENIZER: tokenizer.to_str().encode()}
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
        files[CHAT_TEMPLATE] = template.encode()
    return files | {side_files.TOKENIZER_CONFIG: json.dumps(config, indent=2).encode()}


def _special_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The tokens with a use: to begin and end a text, and so on."""
    uses = {"bos": "bos", "eos": "eos", "eot": "eot", "unk": "unknown", "pad": "padding"}
    ids = {use: metadata.get(f"tokenizer.ggml.{key}_token_id") for use, key in uses.items()}
    tokens = range(len(metadata.get("tokenizer.ggml.tokens", ())))
    return {use: token for use, token in ids.items() if isinstance(token, int) and token in tokens}


def _tokenizer(file: gguf_file.GGUFFile) -> Any:
    """The tokenizer, or None with a warning if its rules are not known."""
    metadata = file.metadata
    kind, rule = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind in (None, "none", "no_vocab"):
        return None
    tokens, types = _vocabulary(file)
    splits = rule in SPLITS or rule in GPT2_SPLITS or rule in DIGIT_SPLITS
    if kind not in ("gpt2", "llama") or (kind == "gpt2" and not splits):
        warnings.warn(
            f"the tokenizer of {file.file} ({kind!r:.50}, {rule!r:.50}) is not known, so the model "
            "was loaded without one: save it to a folder and put its tokenizer.json there",
            UnknownTokenizerWarning,
            stacklevel=2,
        )
        return None
    try:
        import tokenizers
    except ImportError:
        raise MissingPackageError(f"the tokenizer of {file.file}", "tokenizers") from None
    with unreadable_refused(f"{file.file} has a tokenizer that cannot be read", gguf_file.DAMAGED):
        if kind == "gpt2":
            tokenizer = _byte_level(metadata, tokens, str(rule))
        else:
            tokenizer = _sentencepiece(metadata, tokens, types)
        added = [
            tokenizers.AddedToken(token, special=token_type != USER_DEFINED, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in (CONTROL, USER_DEFINED) or (token_type == UNKNOWN and kind == "llama")
        ]
        tokenizer.add_special_tokens([token for token in added if token.special])
        tokenizer.add_tokens([token for token in added if not token.special])
        _add_ends(tokenizer, metadata, tokens, str(rule))
        tokenizer.encode("a b")
    return tokenizer


def _vocabulary(file: gguf_file.GGUFFile) -> tuple[list[str], list[int]]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise InputError(f"{file.file} has a tokenizer without tokens", gguf_file.DAMAGED)
    types = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise InputError(
            f"{file.file} has {len(tokens)} tokens, and not as many token types", gguf_file.DAMAGED
        )
    return tokens, types


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], rule: str) -> Any:
    """BPE over bytes, as of GPT-2."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    letters = set(BYTE_LEVEL)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Merges of what is no token are left out, where a file has them.
    merges = [
        (first, second)
        for first, second in merges
        if first in vocabulary and second in vocabulary and first + second in vocabulary
        if letters >= set(first + second)
    ]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule in WHOLE_WORDS))
    if rule in NFC:
        tokenizer.normalizer = normalizers.NFC()
    if rule in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[rule]), behavior="isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if rule in DIGIT_SPLITS else []
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*digits, last])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> Any:
    """The BPE of SentencePiece, with bytes for what it does not know, as of Llama 2 and Gemma."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    gemma = str(metadata.get("general.architecture")).startswith("gemma")
    if gemma:
        # Files of Gemma have spaces where its vocabulary has the letter for them.
        tokens[:] = [
            "▁" * len(token) if token and not token.strip(" ") else token for token in tokens
        ]
    scores = metadata.get("tokenizer.ggml.scores")
    # Gemma's scores do not follow the order of its merges, its tokens do.
    if gemma or not isinstance(scores, list) or len(scores) != len(tokens):
        scores = [-float(index) for index in range(len(tokens))]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    unknown = types.index(UNKNOWN) if UNKNOWN in types else unknown
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _merges(vocabulary, scores),
            unk_token=tokens[unknown] if isinstance(unknown, int) else None,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", not gemma)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefixed else spaces
    )
    first = [decoders.Strip(" ", 1, 0)] if prefixed else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *first]
    )
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a token of two others, the best token first."""
    ordered = sorted(vocabulary.items(), key=lambda item: -scores[item[1]])
    merges = []
    for token, _ in ordered:
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        halves = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        merges += sorted(halves, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    return merges


def _add_ends(tokenizer: Any, metadata: Mapping[str, Any], tokens: list[str], rule: str) -> None:
    """Add the tokens that begin and end every text, if the file says so."""
    from tokenizers import processors

    spm = metadata.get("tokenizer.ggml.model") == "llama"
    uses = {
        "bos": metadata.get("tokenizer.ggml.add_bos_token", spm or rule in WHOLE_WORDS),
        "eos": metadata.get("tokenizer.ggml.add_eos_token", False),
    }
    ids = _special_ids(metadata)
    ends = {use: tokens[ids[use]] for use in uses if uses[use] and use in ids}
    if ends:
        first = [ends["bos"]] if "bos" in ends else []
        last = [ends["eos"]] if "eos" in ends else []
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1"]
            + [f"{token}:1" for token in last],
            special_tokens=[(token, ids[use]) for use, token in ends.items()],
        )
