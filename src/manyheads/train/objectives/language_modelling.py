"""Words to be named: the next, the masked, the translated."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.data.batch import Batch
from manyheads.data.masking import Masking, Vocabulary, mask_tokens, vocabulary_of
from manyheads.errors import ConfigError, InputError
from manyheads.models.readout import LanguageHead
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.stack import StackConfig
from manyheads.models.text import TextModel
from manyheads.parts.experts import RouterLosses
from manyheads.taps import Watcher
from manyheads.train.loss.chunked_cross_entropy import word_losses
from manyheads.train.objectives.objective import (
    Loss,
    Objective,
    RoutedObjective,
    Task,
    check_readout,
    check_smoothing,
    check_weight,
    texts_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WordObjective(RoutedObjective):
    """Words are asked for, and scored a chunk at a time."""

    z_loss: float = 0.0

    def __post_init__(self) -> None:
        check_weight("z_loss", self.z_loss)

    def _score_words(
        self,
        model: Any,
        hidden: Float[Tensor, "n c"],
        task: Task,
        router: tuple[RouterLosses, ...],
        smoothing: float = 0.0,
    ) -> Loss:
        readout = model.readout
        sums = word_losses(
            readout.features(hidden.index_select(0, task.places)),
            readout.vectors(model.table),
            readout.bias,
            task.answers,
            smoothing=smoothing,
            squares=self.z_loss > 0,
        )
        loss = self.summed(sums[0], task, router)
        if self.z_loss:
            loss = replace(loss, parts={"z": self.z_loss * sums[1], **loss.parts})
        return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLM(WordObjective):
    """The next word after each but the last of a sequence; `z_loss` as in arXiv 2204.02311."""

    def check(self, model: nn.Module) -> None:
        check_readout(self, model, TextModel, LanguageHead)
        assert isinstance(model, TextModel)
        _check_causal(self, model.config.stack)

    def prepare(self, model: Any, batch: Batch, draw: torch.Generator) -> Task:
        del model, draw
        texts = texts_of(self, batch)
        lengths = texts.lengths
        ends = lengths.offsets.diff()[lengths.sequence_of_token] - 1
        places = (lengths.positions < ends).nonzero().squeeze(1)
        return Task(batch=batch, places=places, answers=texts.values[places + 1])

    def score(self, model: Any, task: Task, *, watch: Watcher | None = None) -> Loss:
        hidden, router = model.hidden(task.batch.texts, watch=watch)
        return self._score_words(model, hidden.values, task, router)


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskedLM(WordObjective):
    """The words behind the masks: `share`, `hidden`, `replaced` and `whole` as in `Masking`.

    The ids of the mask and of the special tokens, which are never chosen, come from the model's
    tokenizer unless they are given.
    """

    share: float = 0.3
    hidden: float = 0.8
    replaced: float = 0.1
    whole: Literal["tokens", "words"] = "tokens"
    mask: int | Literal["tokenizer"] = "tokenizer"
    specials: tuple[int, ...] | Literal["tokenizer"] = "tokenizer"

    def __post_init__(self) -> None:
        WordObjective.__post_init__(self)
        _ = self.masking

    @property
    def masking(self) -> Masking:
        return Masking(
            share=self.share, hidden=self.hidden, replaced=self.replaced, whole=self.whole
        )

    def vocabulary(self, model: TextModel) -> Vocabulary:
        size = model.config.embedding.vocabulary
        return vocabulary_of(model.tokenizer, size, mask=self.mask, specials=self.specials)

    def check(self, model: nn.Module) -> None:
        check_readout(self, model, TextModel, LanguageHead)
        assert isinstance(model, TextModel)
        _check_sees_on(self, model.config.stack)
        words = self.vocabulary(model)
        if self.whole == "words" and words.follows is None:
            raise ConfigError(
                'whole="words" asks which tokens make a word', "give the model its tokenizer"
            )

    def prepare(self, model: Any, batch: Batch, draw: torch.Generator) -> Task:
        masked = mask_tokens(texts_of(self, batch), self.vocabulary(model), self.masking, draw)
        return Task(
            batch=replace(batch, texts=masked.texts), places=masked.places, answers=masked.answers
        )

    def score(self, model: Any, task: Task, *, watch: Watcher | None = None) -> Loss:
        hidden, router = model.hidden(task.batch.texts, watch=watch)
        return self._score_words(model, hidden.values, task, router)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seq2SeqLM(WordObjective):
    """Every word of `others`, given those before it and the whole of `texts`.

    The decoder reads `start` and then all but the last: the id of a token or its name, such as
    "<|end|>"; "model" takes the start that the model's config.json names.
    """

    label_smoothing: float = 0.1
    start: int | str = "model"

    def __post_init__(self) -> None:
        WordObjective.__post_init__(self)
        check_smoothing(self.label_smoothing)

    def check(self, model: nn.Module) -> None:
        check_readout(self, model, Seq2Seq, LanguageHead)
        assert isinstance(model, Seq2Seq)
        _check_causal(self, model.config.decoder)
        start, words = self.start_of(model), model.config.embedding.vocabulary
        if not 0 <= start < words:
            raise ConfigError(
                f"start={start} is no token of a vocabulary of {words}", f"use 0 to {words - 1}"
            )

    def start_of(self, model: Seq2Seq) -> int:
        if isinstance(self.start, int):
            return self.start
        if self.start != "model":
            known = None if model.tokenizer is None else model.tokenizer.token_to_id(self.start)
            if known is None:
                raise ConfigError(
                    f"the tokenizer has no token {self.start!r} to start with", "name one it has"
                )
            return int(known)
        for said in (model.generation, model.described or {}):
            for name in ("decoder_start_token_id", "bos_token_id"):
                if isinstance(said.get(name), int):
                    return int(said[name])
        raise ConfigError(
            "the model does not say with which token its texts start",
            "give start, its id or its name",
        )

    def prepare(self, model: Any, batch: Batch, draw: torch.Generator) -> Task:
        del draw
        if batch.texts is None or batch.others is None:
            raise InputError("Seq2SeqLM wants pairs of texts", "give texts and others")
        answers = batch.others.values
        read = answers.roll(1)
        read = torch.where(batch.others.lengths.positions == 0, self.start_of(model), read)
        places = torch.arange(answers.shape[0], device=answers.device)
        return Task(
            batch=replace(batch, others=batch.others.with_values(read)),
            places=places,
            answers=answers,
        )

    def score(self, model: Any, task: Task, *, watch: Watcher | None = None) -> Loss:
        hidden, router = model.hidden(task.batch.texts, task.batch.others, watch=watch)
        return self._score_words(model, hidden.values, task, router, self.label_smoothing)


def _check_sees_on(objective: Objective, stack: StackConfig) -> None:
    masks = [each.mask for each in map(stack.attention, range(len(stack.layers))) if each]
    if masks and all(mask.reach.after == 0 for mask in masks):
        raise ConfigError(
            f"no layer sees what follows a masked word, under {masks[0]}, and "
            f"{type(objective).__name__} asks for it by both sides",
            "use CausalLM, or an encoder",
        )


def _check_causal(objective: Objective, stack: StackConfig) -> None:
    for index in range(len(stack.layers)):
        attention = stack.attention(index)
        if attention is not None and attention.mask.reach.after > 0:
            raise ConfigError(
                f"layer {index} sees the words that {type(objective).__name__} asks for, "
                f"under {attention.mask}",
                "use Causal() or a window without `after`",
            )
