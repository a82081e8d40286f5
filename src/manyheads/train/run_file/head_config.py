"""Settings for all attention layers of a model: head dropping, head scales, dropout."""

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, cast

from manyheads.attention import AttentionConfig
from manyheads.errors import ConfigError
from manyheads.models.build import Model, build

Config = TypeVar("Config")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """Changes to every attention layer of the model.

    `drop` is the fraction of heads dropped per sequence in training (DropHead, arXiv 2004.13342);
    `scale="learned"` multiplies the output of every head by a learned number, as `L1Scales` needs;
    `dropout` is the dropout of attention weights, which needs the attention pattern. "kept" keeps
    the setting of the model.
    """

    drop: float | Literal["kept"] = "kept"
    scale: Literal["kept", "learned"] = "kept"
    dropout: float | Literal["kept"] = "kept"

    def __post_init__(self) -> None:
        for name, share in (("drop", self.drop), ("dropout", self.dropout)):
            if share != "kept" and not 0 <= share < 1:
                raise ConfigError(
                    f"{name} must be in [0, 1), got {share:g}", "use a smaller fraction"
                )

    @property
    def changes(self) -> dict[str, Any]:
        """The changes as fields of AttentionConfig."""
        values = {"drop_heads": self.drop, "head_scale": self.scale, "dropout": self.dropout}
        return {name: value for name, value in values.items() if value != "kept"}

    def put_on(self, config: Config) -> Config:
        """A model config with these changes."""
        return _changed(config, lambda attention: replace(attention, **self.changes))

    def apply_to_model(self, model: Model) -> Model:
        """A model with these changes and its own weights."""
        if not self.changes:
            return model
        # New scales start at one.
        fresh = build(self.put_on(cast(Any, model.config)))
        fresh.load_state_dict({**fresh.state_dict(), **model.state_dict()})
        fresh.comes_from(model)
        return fresh.to(next(iter(model.parameters())).dtype)


def without_head_dropping(config: Config) -> Config:
    """The config without head dropping, which is for training only and is not saved."""
    return _changed(config, lambda attention: replace(attention, drop_heads=0.0))


def _changed(value: Any, change: Callable[[AttentionConfig], AttentionConfig]) -> Any:
    """The same config with every AttentionConfig in it changed."""
    if isinstance(value, AttentionConfig):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_changed(each, change) for each in value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = {each.name: getattr(value, each.name) for each in fields(value) if each.init}
        return replace(value, **{name: _changed(each, change) for name, each in inside.items()})
    return value
