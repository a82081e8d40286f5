"""Language modeling: next tokens, masked tokens, sequence to sequence."""

from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from manyheads.annotations import NonNegativeFloat
from manyheads.argument_checks import check_fields
from manyheads.data.batch import Batch
from manyheads.data.masking import Masking, MaskingVocabulary, mask_tokens, masking_vocabulary
from manyheads.errors import ConfigError, InputError
from manyheads.models import encoder, seq2seq
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig
from manyheads.taps import Watcher
from manyheads.train.loss.chunked_cross_entropy import cross_entropy_sums
from manyheads.train.objectives import objective
from manyheads.train.objectives.objective import Loss, PreparedBatch

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModeling(objective.RoutedObjective):
    """Tokens are predicted; their cross-entropy is computed in chunks.

    Ids of special tokens come from the model's tokenizer, or from the one of `with_tokenizer`.
    """

    z_loss: NonNegativeFloat = 0.0
    _tokenizer: Any = field(default=None, init=False, repr=False, compare=False)

    def with_tokenizer(self, tokenizer: "Tokenizer | None") -> "LanguageModeling":
        bound = copy(self)
        object.__setattr__(bound, "_tokenizer", tokenizer)
        return bound

    def tokenizer_for(self, model: Any) -> "Tokenizer | None":
        tokenizer: Tokenizer | None = self._tokenizer or model.tokenizer
        return tokenizer

    def _check_causal(self, stack: StackConfig) -> None:
        for index in range(len(stack.layers)):
            attention = stack.attention(index)
            if attention is not None and attention.mask.reach.after > 0:
                raise ConfigError(
                    f"layer {index} sees the tokens that {type(self).__name__} predicts, "
                    f"with {attention.mask}",
                    "use Causal() or a window without `after`",
                )

    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        read = model.hidden(prepared.batch.texts, watch=watch)
        return self._language_loss(model, read, prepared)

    def _language_loss(
        self, model: Any, read: tuple[Any, Any], prepared: PreparedBatch, smoothing: float = 0.0
    ) -> Loss:
        (hidden, router), readout = read, model.readout
        sums = cross_entropy_sums(
            readout.features(hidden.values.index_select(0, prepared.positions)),
            readout.vectors(model.table),
            readout.bias,
            prepared.labels,
            smoothing=smoothing,
            squares=self.z_loss > 0,
            softcap=readout.softcap,
        )
        loss = self.with_router_losses(sums[0], prepared, router)
        if self.z_loss:
            loss = replace(loss, parts={"z": self.z_loss * sums[1], **loss.parts})
        return loss


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLM(LanguageModeling):
    """Prediction of the next token; `z_loss` as in arXiv 2204.02311."""

    def check(self, model: nn.Module) -> None:
        objective.check_readout(self, model, encoder.TextModel, LanguageHead)
        assert isinstance(model, encoder.TextModel)
        self._check_causal(model.config.stack)

    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedBatch:
        del model, generator
        texts = objective.require_texts(self, batch)
        lengths = texts.lengths
        ends = lengths.offsets.diff()[lengths.sequence_of_token] - 1
        positions = (lengths.positions < ends).nonzero().squeeze(1)
        return PreparedBatch(batch=batch, positions=positions, labels=texts.values[positions + 1])


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLM(LanguageModeling):
    """Prediction of masked tokens; the fractions and `whole_words` are as in `Masking`.

    The ids of the mask and of the special tokens, which are never masked, come from the model's
    tokenizer by default.
    """

    mask_fraction: float = 0.3
    mask_token_fraction: float = 0.8
    random_token_fraction: float = 0.1
    whole_words: bool = False
    mask: int | Literal["tokenizer"] = "tokenizer"
    specials: tuple[int, ...] | Literal["tokenizer"] = "tokenizer"

    def __post_init__(self) -> None:
        _ = self.masking

    @property
    def masking(self) -> Masking:
        return Masking(
            mask_fraction=self.mask_fraction,
            mask_token_fraction=self.mask_token_fraction,
            random_token_fraction=self.random_token_fraction,
            whole_words=self.whole_words,
        )

    def vocabulary(self, model: encoder.TextModel) -> MaskingVocabulary:
        tokenizer, size = self.tokenizer_for(model), model.config.embedding.vocabulary
        return masking_vocabulary(tokenizer, size, mask=self.mask, specials=self.specials)

    def check(self, model: nn.Module) -> None:
        objective.check_readout(self, model, encoder.TextModel, LanguageHead)
        assert isinstance(model, encoder.TextModel)
        stack = model.config.stack
        attentions = filter(None, map(stack.attention, range(len(stack.layers))))
        masks = [attention.mask for attention in attentions]
        if masks and all(mask.reach.after == 0 for mask in masks):
            raise ConfigError(
                f"no layer sees the tokens after a masked one, with {masks[0]}, and MaskedLM needs "
                "both sides",
                "use CausalLM, or an encoder",
            )
        words = self.vocabulary(model)
        if self.whole_words and words.continues_word is None:
            raise ConfigError("whole_words needs a tokenizer", "give the model its tokenizer")

    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedBatch:
        texts = objective.require_texts(self, batch)
        masked = mask_tokens(texts, self.vocabulary(model), self.masking, generator)
        batch = replace(batch, texts=masked.texts)
        return PreparedBatch(batch=batch, positions=masked.positions, labels=masked.labels)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqLM(LanguageModeling):
    """Prediction of every token of `others` from those before it and from `texts`.

    The decoder reads `start` and then all tokens but the last. `start` is the id of a token or its
    name, such as "<|end|>"; "model" is the start token of the model's config.json.
    """

    label_smoothing: objective.Smoothing = 0.1
    start: int | str = "model"

    def check(self, model: nn.Module) -> None:
        objective.check_readout(self, model, seq2seq.Seq2Seq, LanguageHead)
        assert isinstance(model, seq2seq.Seq2Seq)
        self._check_causal(model.config.decoder)
        start, words = self.start_of(model), model.config.embedding.vocabulary
        if not 0 <= start < words:
            raise ConfigError(
                f"start={start} is outside the vocabulary of {words} tokens",
                f"use 0 to {words - 1}",
            )

    def start_of(self, model: seq2seq.Seq2Seq) -> int:
        if isinstance(self.start, int):
            return self.start
        if self.start != "model":
            tokenizer = self.tokenizer_for(model)
            number = None if tokenizer is None else tokenizer.token_to_id(self.start)
            if number is None:
                raise ConfigError(
                    f"start: the tokenizer has no token {self.start!r}", "use one of its tokens"
                )
            return int(number)
        for settings in (model.generation, model.source_config or {}):
            for name in ("decoder_start_token_id", "bos_token_id"):
                if isinstance(settings.get(name), int):
                    return int(settings[name])
        raise ConfigError(
            "the model has no start token for its decoder",
            "set start to the id or the name of a token",
        )

    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedBatch:
        del generator
        if batch.texts is None or batch.others is None:
            raise InputError("Seq2SeqLM needs pairs of texts", "give texts and others")
        labels, firsts = batch.others.values, batch.others.lengths.positions == 0
        inputs = torch.where(firsts, self.start_of(model), labels.roll(1))
        positions = torch.arange(labels.shape[0], device=labels.device)
        batch = replace(batch, others=batch.others.with_values(inputs))
        return PreparedBatch(batch=batch, positions=positions, labels=labels)

    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        read = model.hidden(prepared.batch.texts, prepared.batch.others, watch=watch)
        return self._language_loss(model, read, prepared, self.label_smoothing)
