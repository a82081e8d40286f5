"""The options of `generate`, what the model's own files say, and what `generate` returns."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from numbers import Integral
from typing import Any, Literal, TypedDict, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from manyheads.annotations import NonNegativeInt, PositiveFloat
from manyheads.argument_checks import check_argument, check_fields
from manyheads.cache import DynamicCache, StaticCache
from manyheads.decoding.guard import Guard, GuardReport
from manyheads.decoding.sampling import BeamSearch, Greedy, Sample, Sampling
from manyheads.errors import ConfigError, InputError, check_int, short_repr
from manyheads.models.build import Model

FinishReason = Literal["length", "eos", "stop string", "guard"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The new tokens of one prompt, without the prompt itself.

    `ids` holds every generated token, including the end-of-text token or the tokens of a stop
    string, and `logprobs` has one number per token. `text` ends before the end-of-text token or the
    stop string; it is None where the model has no tokenizer. With a guard that stops, `ids` has the
    tokens of the refused sentence too, and `text` ends before it.

    >>> print(Generation(ids=(5, 6), text=" and so on", finish_reason="length"))
     and so on
    """

    ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    logprobs: tuple[float, ...] | None = None
    guard: GuardReport | None = None

    def __str__(self) -> str:
        return " ".join(map(str, self.ids)) if self.text is None else self.text


TokenIds = Literal["model"] | NonNegativeInt | Iterable[NonNegativeInt] | Tensor | NDArray[Any]
Function = TypeVar("Function", bound=Callable[..., Any])


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The options of `generate` and `stream`.

    - `max_new_tokens`: generate at most this many tokens per prompt.
    - `sampling`: `Greedy()`, `Sample(...)` or `BeamSearch(...)`.
    - `repetition_penalty`: above 1, tokens of the prompt and of the new text become less likely.
    - `stop_strings`: end a text before any of these strings, wherever the tokens begin.
    - `eos_token_ids`: end a text at any of these tokens.
    - `suppress_tokens`: never generate these tokens.
    - `decoder_start_token_id`: the token that the decoder of a `Seq2Seq` starts from.
    - `seed`: with a seed, a prompt gives the same tokens at the same index of any batch.
    - `logprobs`: also return the log-probability of each token, before penalties and temperature.
    - `cache`: `DynamicCache(...)` or `StaticCache(...)` for the keys and values.
    - `compiled`: on CUDA, compile the step first, once for all texts of up to 1,024 tokens; takes
      half a minute and pays off for many texts.
    - `guard`: a classifier, or a `Guard(...)`, that reads every new sentence and stops or marks it;
      the texts of a beam search are read in the end.

    For the three token options "model" means what generation_config.json and config.json of the
    model say.

    >>> GenerationConfig(max_new_tokens=20, stop_strings="END").stop_strings
    ('END',)
    """

    max_new_tokens: NonNegativeInt = 128
    sampling: Sampling = Greedy()
    repetition_penalty: PositiveFloat = 1.0
    stop_strings: str | Iterable[str] = ()
    eos_token_ids: TokenIds = "model"
    suppress_tokens: TokenIds = "model"
    decoder_start_token_id: Literal["model"] | NonNegativeInt = "model"
    seed: int | None = None
    logprobs: bool = False
    cache: DynamicCache | StaticCache = DynamicCache()
    compiled: bool = False
    guard: Guard | Model | None = None

    def __post_init__(self) -> None:
        if self.guard is not None:
            guard = self.guard if isinstance(self.guard, Guard) else Guard(self.guard)
            object.__setattr__(self, "guard", guard)
        # One string or id stands for a sequence of one, and a tuple can be hashed.
        object.__setattr__(self, "stop_strings", _strings(self.stop_strings))
        for name in ("eos_token_ids", "suppress_tokens"):
            object.__setattr__(self, name, _token_ids(name, getattr(self, name)))
        if self.stop_strings and self.uses_beams:
            raise ConfigError(
                "stop_strings cannot be combined with BeamSearch",
                "use eos_token_ids, or sampling=Greedy()",
            )

    @property
    def uses_beams(self) -> bool:
        """Whether several texts are tried for each prompt."""
        return isinstance(self.sampling, BeamSearch) and self.sampling.num_beams > 1


class GenerationOptions(TypedDict, total=False):
    """The fields of `GenerationConfig` as keyword arguments, for type checkers."""

    max_new_tokens: int
    sampling: Sampling
    repetition_penalty: float
    stop_strings: str | Iterable[str]
    eos_token_ids: TokenIds
    suppress_tokens: TokenIds
    decoder_start_token_id: Literal["model"] | int
    seed: int | None
    logprobs: bool
    cache: DynamicCache | StaticCache
    compiled: bool
    guard: Guard | Model | None


def with_options(config: GenerationConfig | None, options: GenerationOptions) -> GenerationConfig:
    """A config with some of its fields replaced; the defaults where there is no config."""
    check_argument("config", config, GenerationConfig | None)
    names = [field.name for field in fields(GenerationConfig)]
    for name in options:
        if name not in names:
            raise ConfigError(f"generate has no option {name!r}", _suggestion(name, names))
    return replace(config or GenerationConfig(), **options)


def show_options(function: Function) -> Function:
    """Let `help` list every option with its default where the source says `**options`."""
    signature = inspect.signature(function)
    # The last parameter is `**options`.
    listed = list(signature.parameters.values())[:-1]
    keyword = inspect.Parameter.KEYWORD_ONLY
    for field in fields(GenerationConfig):
        option = inspect.Parameter(field.name, keyword, default=field.default)
        listed.append(option.replace(annotation=field.type))
    function.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    return function


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """Special tokens that a model's generation_config.json names, or else its config.json."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    decoder_start_token_id: int | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    forced_first: int | None = None
    forced_last: int | None = None

    @classmethod
    def of(cls, model: Model) -> "GenerationDefaults":
        """Those of a loaded model; a model built from a config has none."""
        settings: dict[str, Any] = {}
        for table in (getattr(model, name, None) for name in ("generation", "source_config")):
            if isinstance(table, Mapping):
                missing = {key: value for key, value in table.items() if settings.get(key) is None}
                settings |= missing
        eos = _as_tuple(settings.get("eos_token_id"))
        bos = settings.get("bos_token_id")
        start = settings.get("decoder_start_token_id")
        forced_last = _as_tuple(settings.get("forced_eos_token_id"))
        # Marian lists its padding here; an end-of-text token is left out, or no text might end.
        words = [tuple(word) for word in settings.get("bad_words_ids") or ()]
        words = [word for word in words if word not in {(token,) for token in eos}]
        words += [(token,) for token in settings.get("suppress_tokens") or ()]
        return cls(
            eos_token_ids=eos,
            bos_token_id=bos,
            decoder_start_token_id=bos if start is None else start,
            bad_words=tuple(dict.fromkeys(words)),
            forced_first=settings.get("forced_bos_token_id"),
            forced_last=forced_last[0] if forced_last else None,
        )

    @property
    def suppress_tokens(self) -> tuple[int, ...]:
        """The tokens that must not be generated."""
        if any(len(word) != 1 for word in self.bad_words):
            raise InputError(
                "bad_words_ids of this model has words of several tokens, which are not supported",
                "pass suppress_tokens=, the ids to suppress, or suppress_tokens=()",
            )
        return tuple(token for (token,) in self.bad_words)


def _strings(value: Any) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    several = isinstance(strings, list | tuple | Set)
    if not several or not all(isinstance(string, str) for string in strings):
        raise ConfigError(f"stop_strings must be a string or several, got {short_repr(value)}")
    if "" in strings:
        raise ConfigError(
            "stop_strings must not contain an empty string, which would end every text",
            "give at least one character",
        )
    return tuple(strings)


def _token_ids(name: str, value: object) -> Literal["model"] | tuple[int, ...]:
    if isinstance(value, str) and value == "model":
        return "model"
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    ids = [value] if isinstance(value, Integral) else value
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise ConfigError(f'{name} must be token ids or "model", got {short_repr(value)}')
    listed = list(ids)
    for token in listed:
        check_int(name, token, minimum=0)
    return tuple(dict.fromkeys(map(int, listed)))


def _suggestion(name: str, names: Sequence[str]) -> str:
    near = get_close_matches(name, names, n=1)
    if near:
        return f"did you mean {near[0]}"
    for sampling in (Sample, BeamSearch):
        if name in (field.name for field in fields(sampling)):
            return f"pass sampling={sampling.__name__}({name}=...)"
    return f"use {', '.join(names)}"


def _as_tuple(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
