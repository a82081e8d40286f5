"""What a run gives every attention of its model: heads that are dropped, or have scales."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, cast

from manyheads.attention import AttentionConfig
from manyheads.errors import ConfigError
from manyheads.models.build import Model, build

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Changes of every attention, whatever the model is made from.

    `drop` is the share of heads that a sequence goes without in training (DropHead,
    arXiv 2004.13342); `scale="learned"` gives every head a number that its output is multiplied by,
    as `L1Scales` needs; `dropout` is the share of attention weights that training leaves out, for
    which a pattern must be formed. "kept" leaves what is there.
    """

    drop: float | Literal["kept"] = "kept"
    scale: Literal["kept", "learned"] = "kept"
    dropout: float | Literal["kept"] = "kept"

    def __post_init__(self) -> None:
        for name, share in (("drop", self.drop), ("dropout", self.dropout)):
            if share != "kept" and not 0 <= share < 1:
                raise ConfigError(f"{name}={share:g} is no share", "use 0 <= share < 1")

    @property
    def changes(self) -> dict[str, Any]:
        """By the names of AttentionConfig."""
        asked = {"drop_heads": self.drop, "head_scale": self.scale, "dropout": self.dropout}
        return {name: value for name, value in asked.items() if value != "kept"}

    def put_on(self, config: Config) -> Config:
        """A model's config with these heads."""
        return _changed(config, lambda attention: replace(attention, **self.changes))

    def given_to(self, model: Model) -> Model:
        """A model with these heads and its own weights."""
        if not self.changes:
            return model
        # New scales start at one, and all else is what it was.
        fresh = build(self.put_on(cast(Any, model.config)))
        fresh.load_state_dict({**fresh.state_dict(), **model.state_dict()})
        fresh.comes_from(model)
        return fresh.to(next(iter(model.parameters())).dtype)


def without_drops(config: Config) -> Config:
    """The config as it is saved: heads are dropped in training alone, and no family says so."""
    return _changed(config, lambda attention: replace(attention, drop_heads=0.0))


def _changed(value: Any, change: Callable[[AttentionConfig], AttentionConfig]) -> Any:
    """The same values with every attention in them changed."""
    if isinstance(value, AttentionConfig):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_changed(each, change) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return replace(value, **{name: _changed(each, change) for name, each in inside.items()})
    return value
