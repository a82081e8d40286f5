"""What one call of `generate` asks for, checked and resolved before the first step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from manyheads.cache import Fixed, Growing
from manyheads.decoding.choosing import Beams, Choosing, Greedy
from manyheads.decoding.habits import Habits
from manyheads.decoding.prompts import Prompts, encoder_of, read_prompts
from manyheads.decoding.reading import context_of, text_of
from manyheads.decoding.room import check_room, check_writes
from manyheads.decoding.rules import Penalty, Rules
from manyheads.decoding.steps.cached import CachedSteps, Steps
from manyheads.decoding.steps.cuda_graph import cannot, cuda_graph_steps
from manyheads.errors import ConfigError, InputError
from manyheads.models.decoder import Decoder
from manyheads.models.seq2seq import Seq2Seq
from manyheads.ragged import Ragged

__all__ = ["Task", "Wishes"]

# A recording takes about as long as so many steps without one.
WORTH_RECORDING = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """The arguments of `generate` but for the model and the prompts."""

    new_tokens: int = 128
    choose: Choosing = Greedy()
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_ids: Literal["model"] | Sequence[int] = "model"
    never: Literal["model"] | Sequence[int] = "model"
    start_id: Literal["model"] | int = "model"
    seed: int | None = None
    logprobs: bool = False
    cache: Growing | Fixed = Growing()
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.new_tokens < 0:
            raise ConfigError(f"new_tokens={self.new_tokens} is below nothing", "use 0 or more")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ConfigError(
                f"repetition_penalty={self.repetition_penalty} cannot scale scores",
                "use a number above 0, where 1 changes nothing",
            )
        if "" in self.stop:
            raise ConfigError("an empty stop string is everywhere", "give at least one letter")
        if self.stop and self.searches:
            raise ConfigError(
                "beams are judged as whole texts and look for no stop strings",
                "use stop_ids, or Greedy()",
            )

    @property
    def searches(self) -> bool:
        """Whether several texts are tried for each prompt."""
        return isinstance(self.choose, Beams) and self.choose.width > 1


class Task:
    """A model, the ids of its prompts, and how to go on from them."""

    def __init__(self, model: Any, prompts: Prompts, wishes: Wishes) -> None:
        self.model: Decoder | Seq2Seq = check_writes(model)
        self.wishes = wishes
        habits = Habits.of(model)
        self.prompts = read_prompts(model, prompts, habits)
        check_room(self.model, self.prompts, wishes.new_tokens, wishes.cache)
        self.tokenizer = getattr(model, "tokenizer", None)
        self.start_id = self._start_id(habits)
        self.stop_ids, self.stop_strings = self._stops(habits)
        self.rules = Rules(
            new_tokens=wishes.new_tokens,
            never=habits.never if wishes.never == "model" else self._known("never", wishes.never),
            first=habits.forced_first,
            last=habits.forced_last,
        )

    @property
    def vocabulary(self) -> int:
        return self.model.config.embedding.vocabulary

    @property
    def device(self) -> torch.device:
        return self.model.embedding.tokens.weight.device

    def batch(self) -> Ragged:
        """The prompts as the model takes them."""
        return Ragged.from_list([torch.tensor(ids) for ids in self.prompts]).to(self.device)

    def steps(self) -> Steps:
        """Whoever computes the steps; the one place where that is decided."""
        wishes, model = self.wishes, self.model
        longest = max(map(len, self.prompts), default=0) + wishes.new_tokens
        # Beams reorder their caches, and a cache that was asked for is one that is used.
        free = isinstance(wishes.cache, Growing) and not wishes.searches
        if free and wishes.new_tokens >= WORTH_RECORDING and cannot(model, self.device) is None:
            assert isinstance(model, Decoder)
            return cuda_graph_steps(model, len(self.prompts), longest, compiled=wishes.compiled)
        return CachedSteps(model, wishes.cache, self.start_id)

    def penalty(self) -> Penalty | None:
        """What is read counts as said; of a `Seq2Seq` only its own text does."""
        factor = self.wishes.repetition_penalty
        if factor == 1.0:
            return None
        said = self.prompts if self.start_id is None else [[self.start_id]] * len(self.prompts)
        return Penalty.of(factor, said, self.vocabulary, self.device)

    def text(self, index: int, ids: Sequence[int]) -> str | None:
        """New tokens of a prompt in letters, if the model has any."""
        if self.tokenizer is None:
            return None
        return text_of(self.tokenizer, context_of(self.tokenizer, self.context(index)), ids)

    def context(self, index: int) -> list[int]:
        """The tokens that stand right before the new ones of a prompt."""
        return self.prompts[index] if self.start_id is None else []

    def _start_id(self, habits: Habits) -> int | None:
        if not isinstance(self.model, Seq2Seq):
            if self.wishes.start_id != "model":
                raise InputError(
                    f"start_id={self.wishes.start_id} and a decoder goes on from its prompt",
                    "leave start_id out",
                )
            return None
        given = habits.start_id if self.wishes.start_id == "model" else self.wishes.start_id
        if given is None:
            raise InputError(
                "the model does not say which token its texts start from", "give start_id"
            )
        return self._known("start_id", [given])[0]

    def _stops(self, habits: Habits) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Special tokens are no part of a text, so a stop string that names one becomes its id."""
        wished = self.wishes.stop_ids
        ids = habits.stop_ids if wished == "model" else self._known("stop_ids", wished)
        if not self.wishes.stop:
            return ids, ()
        tokenizer = encoder_of(self.model, "a stop string")
        special = {
            token.content: number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        named = [special[stop] for stop in self.wishes.stop if stop in special]
        strings = tuple(stop for stop in self.wishes.stop if stop not in special)
        return tuple(dict.fromkeys([*ids, *named])), strings

    def _known(self, name: str, ids: Sequence[int]) -> tuple[int, ...]:
        for one in ids:
            if not 0 <= one < self.vocabulary:
                raise ConfigError(
                    f"{name}={one} is outside vocabulary={self.vocabulary}",
                    f"use 0 to {self.vocabulary - 1}",
                )
        return tuple(dict.fromkeys(ids))
