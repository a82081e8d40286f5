"""What a model's folder says of how it writes: where texts begin and end, what never comes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyheads.errors import InputError

__all__ = ["Habits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """Token ids with a meaning, read from generation_config.json and then from config.json."""

    stop_ids: tuple[int, ...] = ()
    begin_id: int | None = None
    start_id: int | None = None
    forbidden: tuple[tuple[int, ...], ...] = ()
    forced_first: int | None = None
    forced_last: int | None = None

    @classmethod
    def of(cls, model: Any) -> "Habits":
        """Those of a loaded model; one built from a config has none."""
        tables = [getattr(model, name, None) for name in ("generation", "described")]
        said: dict[str, Any] = {}
        for table in tables:
            if isinstance(table, Mapping):
                said |= {key: value for key, value in table.items() if said.get(key) is None}
        stop_ids = _ids(said.get("eos_token_id"))
        begin = said.get("bos_token_id")
        start = said.get("decoder_start_token_id")
        forced_last = _ids(said.get("forced_eos_token_id"))
        return cls(
            stop_ids=stop_ids,
            begin_id=begin,
            start_id=begin if start is None else start,
            forbidden=_forbidden(said, stop_ids),
            forced_first=said.get("forced_bos_token_id"),
            forced_last=forced_last[0] if forced_last else None,
        )

    @property
    def never(self) -> tuple[int, ...]:
        """The tokens that must not come."""
        if any(len(word) != 1 for word in self.forbidden):
            raise InputError(
                "bad_words_ids of this model holds words of several tokens, not known here",
                "pass never=, the ids that must not come, or never=()",
            )
        return tuple(token for (token,) in self.forbidden)


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _forbidden(said: Mapping[str, Any], stop_ids: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Marian names its padding here; a stop id counts not, or a text might never end."""
    words = [tuple(word) for word in said.get("bad_words_ids") or ()]
    tokens = [(token,) for token in said.get("suppress_tokens") or ()]
    ends = {(token,) for token in stop_ids}
    return tuple(dict.fromkeys([*(word for word in words if word not in ends), *tokens]))
