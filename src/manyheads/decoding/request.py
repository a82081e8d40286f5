"""One call of `generate`, checked and resolved before the first step."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from numbers import Integral
from random import Random
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from manyheads.bridge.wrapped_model import WrappedModel
from manyheads.bridge.wrapped_steps import WrappedSteps
from manyheads.cache import DynamicCache, FullLayerCache, StaticCache
from manyheads.decoding.generation_config import GenerationConfig, GenerationDefaults
from manyheads.decoding.sampling import RepetitionPenalty, TokenConstraints
from manyheads.decoding.steps.cached import CachedSteps, Steps
from manyheads.decoding.steps.cuda_graph import cannot, cuda_graph_steps
from manyheads.decoding.stopping import decode_after, decoding_context
from manyheads.errors import ConfigError, InputError
from manyheads.formatting import kind_of
from manyheads.models.build import Model
from manyheads.models.decoder import Decoder
from manyheads.models.readout import LanguageHead
from manyheads.models.seq2seq import Seq2Seq
from manyheads.parts.positions import Axial, Learned
from manyheads.ragged import Lengths, Ragged
from manyheads.tokenizers import plain_copy, surrogates_refused

# A list holds texts, lists of ids or tensors of ids, all of one kind. Not a Sequence, because a
# text is one too.
Prompts = list[Any] | tuple[Any, ...] | Tensor | Ragged

ID_DTYPES = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)

# Recording a CUDA graph takes about as long as this many steps without one.
WORTH_RECORDING = 16


class GenerationRequest:
    """A model, the ids of its prompts, and how to continue them."""

    def __init__(self, model: Model, prompts: Prompts, config: GenerationConfig) -> None:
        self.model: Decoder | Seq2Seq = check_generates(model)
        self.config = config
        self.defaults = GenerationDefaults.of(model)
        self.prompts = read_prompts(self.model, prompts, self.defaults)
        self._check_length()
        longest, new = max(map(len, self.prompts), default=0), config.max_new_tokens
        if isinstance(self.model, Seq2Seq):
            self.model.warn_if_longer(max(longest, new), "a prompt or its answer")
        else:
            self.model.warn_if_longer(longest + new, f"a prompt with {new:,} new tokens")
        self.tokenizer = getattr(model, "tokenizer", None)
        self.start_id = self._start_id()
        self.eos_token_ids, self.stop_strings = self._stops()
        self.constraints = TokenConstraints(
            max_new_tokens=config.max_new_tokens,
            suppressed=self._token_ids("suppress_tokens"),
            forced_first=self.defaults.forced_first,
            forced_last=self.defaults.forced_last,
        )

    @property
    def vocabulary(self) -> int:
        return self.model.config.embedding.vocabulary

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def on_device(self) -> AbstractContextManager[object]:
        """Within it kernels and events are those of the model's GPU, of which there may be many."""
        device = self.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def batch(self) -> Ragged:
        """The prompts as the model takes them."""
        # Five times as fast as a tensor of each prompt, and the GPU is waiting for it.
        values = torch.from_numpy(np.fromiter(chain.from_iterable(self.prompts), np.int64))
        lengths = Lengths.of([len(ids) for ids in self.prompts], self.device)
        return Ragged(values.to(self.device), lengths)

    def steps(self) -> Steps:
        """How the steps are computed; the only place where that is decided."""
        config, model = self.config, self.model
        if isinstance(model, WrappedModel):
            return WrappedSteps(model, self.start_id)
        longest = max(map(len, self.prompts), default=0) + config.max_new_tokens
        # Beams reorder their caches, and a StaticCache is used as it was requested.
        free = isinstance(config.cache, DynamicCache) and not config.uses_beams
        if free and config.max_new_tokens >= WORTH_RECORDING and cannot(model, self.device) is None:
            assert isinstance(model, Decoder)
            return cuda_graph_steps(
                model, len(self.prompts), longest, compiled=config.compiled, user=self
            )
        return CachedSteps(model, config.cache, self.start_id)

    def repetition_penalty(self) -> RepetitionPenalty | None:
        """Tokens of the prompt count as seen; in a `Seq2Seq` only those of the new text do."""
        penalty = self.config.repetition_penalty
        if penalty == 1.0:
            return None
        seen = self.prompts if self.start_id is None else [[self.start_id]] * len(self.prompts)
        return RepetitionPenalty.of(penalty, seen, self.vocabulary, self.device)

    def random(self, index: int) -> Random:
        """The random numbers of a prompt; of one prompt given twice, each has its own."""
        return Random(None if self.config.seed is None else f"{self.config.seed}/{index}")

    def text(self, index: int, ids: Sequence[int]) -> str | None:
        """The text of a prompt's new tokens, if the model has a tokenizer."""
        if self.tokenizer is None:
            return None
        return decode_after(self.tokenizer, self.context(index), ids)

    def context(self, index: int) -> list[int]:
        """The tokens right before the new ones of a prompt, to decode them after."""
        before = self.prompts[index] if self.start_id is None else []
        return decoding_context(self.tokenizer, before)

    def _check_length(self) -> None:
        """Refuse texts longer than the model's positions or a cache of fixed size."""
        model, max_new_tokens = self.model, self.config.max_new_tokens
        if not (self.prompts and max_new_tokens):
            return
        longest = max(map(len, self.prompts))
        position = model.config.embedding.position
        before = 1 if model.reads_pairs else longest
        if isinstance(position, Learned | Axial):
            limit = position.longest
            if max(longest, before) > limit:
                raise InputError(
                    f"a prompt of {longest} tokens is longer than the model's {limit} positions",
                    f"shorten it to {limit}",
                )
            if before + max_new_tokens > limit:
                raise InputError(
                    f"a prompt of {before} tokens and max_new_tokens={max_new_tokens} exceed the "
                    f"model's {limit} positions",
                    f"use max_new_tokens={limit - before} or less, or a shorter prompt",
                )
        sizes = [
            store.config.size
            for store in model.new_cache(self.config.cache).stores
            if isinstance(store, FullLayerCache) and isinstance(store.config, StaticCache)
        ]
        # The last token is chosen and never read.
        needed = before + max_new_tokens - 1
        if sizes and needed > min(sizes):
            raise ConfigError(
                f"a cache of {min(sizes)} tokens cannot hold the {before} of the longest prompt "
                f"and {max_new_tokens} new ones",
                f"use StaticCache(size={needed}) or more, or DynamicCache()",
            )

    def _start_id(self) -> int | None:
        start = self.config.decoder_start_token_id
        if not isinstance(self.model, Seq2Seq):
            if start != "model":
                raise InputError(
                    f"decoder_start_token_id={start} is for encoder-decoders, and a decoder "
                    "continues its prompt",
                    "leave it out",
                )
            return None
        token = self.defaults.decoder_start_token_id if start == "model" else start
        if token is None:
            problem = "the model does not name the token its decoder starts from"
            raise InputError(problem, "pass decoder_start_token_id")
        self._check_vocabulary("decoder_start_token_id", (token,))
        return token

    def _stops(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Special tokens are not part of a text, so a stop string that names one becomes its id."""
        ids, stops = self._token_ids("eos_token_ids"), self.config.stop_strings
        if not stops:
            return ids, ()
        tokenizer = tokenizer_of(self.model, "a stop string")
        special = {
            token.content: number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        named = [special[stop] for stop in stops if stop in special]
        strings = tuple(stop for stop in stops if stop not in special)
        return tuple(dict.fromkeys([*ids, *named])), strings

    def _token_ids(self, name: str) -> tuple[int, ...]:
        """Those of the config, or of the model where the config leaves them to it."""
        ids: tuple[int, ...] | Literal["model"] = getattr(self.config, name)
        if ids == "model":
            defaults: tuple[int, ...] = getattr(self.defaults, name)
            return defaults
        self._check_vocabulary(name, ids)
        return ids

    def _check_vocabulary(self, name: str, ids: tuple[int, ...]) -> None:
        for token in ids:
            if not 0 <= token < self.vocabulary:
                problem = f"{name} must be below vocabulary={self.vocabulary}, got {token}"
                raise ConfigError(problem, f"use 0 to {self.vocabulary - 1}")


def check_generates(model: Model) -> Decoder | Seq2Seq:
    """Refuse a model that cannot generate text."""
    if not isinstance(model, Decoder | Seq2Seq):
        name = type(model).__name__
        article = "an" if name[0] in "AEIOU" else "a"
        raise InputError(
            f"{article} {name} cannot generate text", "load a decoder or an encoder-decoder"
        )
    if not isinstance(model.config.readout, LanguageHead):
        raise InputError(
            f"a model with readout={type(model.config.readout).__name__} cannot generate text",
            "use a model with readout=LanguageHead()",
        )
    if model.training:
        raise InputError(
            "the model is in training mode, where dropout is active", "call model.eval() first"
        )
    return model


def read_prompts(
    model: Decoder | Seq2Seq, prompts: Prompts, defaults: GenerationDefaults
) -> list[list[int]]:
    """The ids of every prompt, checked; an empty prompt becomes the beginning-of-text token."""
    vocabulary = model.config.embedding.vocabulary
    checked = []
    for index, ids in enumerate(_ids_of_all(model, prompts)):
        if not ids and defaults.bos_token_id is None:
            raise InputError(
                f"prompt {index} is empty and the model has no beginning-of-text token",
                "give it at least one token",
            )
        ids = ids or [int(defaults.bos_token_id or 0)]
        wrong = [token for token in (min(ids), max(ids)) if not 0 <= token < vocabulary]
        if wrong:
            raise InputError(
                f"prompt {index}: token id {wrong[0]} is outside vocabulary={vocabulary}",
                f"use ids from 0 to {vocabulary - 1}",
            )
        checked.append(ids)
    return checked


def tokenizer_of(model: Model, purpose: str) -> Any:
    """The model's tokenizer, without truncation and padding."""
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is None:
        raise InputError(
            f"{purpose} needs a tokenizer and this model has none",
            "load a folder with a tokenizer.json, set model.tokenizer, or give token ids",
        )
    if tokenizer.truncation is None and tokenizer.padding is None:
        return tokenizer
    return plain_copy(tokenizer)


def _ids_of_all(model: Model, prompts: Prompts) -> list[list[int]]:
    if isinstance(prompts, Ragged):
        prompts = prompts.to_list()
    if not isinstance(prompts, Sequence | Tensor):
        raise InputError(
            f"prompts must be a sequence, got {kind_of(prompts)}",
            "give texts, or a list of token ids per prompt",
        )
    if isinstance(prompts, Tensor) and prompts.dim() != 2:
        raise InputError(
            f"prompts must have the shape (batch, length), got {tuple(prompts.shape)}",
            "give a list of prompts or a Ragged; a single prompt is ids[None]",
        )
    if isinstance(prompts, Tensor) and prompts.dtype in ID_DTYPES:
        rows: list[list[int]] = prompts.tolist()
        return rows
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if not texts:
        return [_plain(prompt, index) for index, prompt in enumerate(prompts)]
    if len(texts) < len(prompts):
        raise InputError("prompts mix texts and token ids", "give all of one kind")
    tokenizer = tokenizer_of(model, "a text prompt")
    with surrogates_refused(texts):
        return [list(encoding.ids) for encoding in tokenizer.encode_batch(texts)]


def _plain(prompt: Any, index: int) -> list[int]:
    if isinstance(prompt, int):
        remedy = "give a list of prompts, [[5, 6, 7]]"
        raise InputError(f"prompt {index} is the single number {prompt}", remedy)
    try:
        ids = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    except TypeError:
        ids = None
    if isinstance(ids, list) and set(map(type, ids)) <= {int}:
        # By far the most frequent case, and the fastest to check.
        return ids
    if not isinstance(ids, list) or not all(
        isinstance(token, Integral) and not isinstance(token, bool) for token in ids
    ):
        remedy = "give one list of integers per prompt"
        raise InputError(f"prompt {index} is not a list of token ids", remedy)
    return [int(token) for token in ids]
