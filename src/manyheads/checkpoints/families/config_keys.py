"""Keys of config.json that have one field of our config each: one table reads and writes them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from manyheads.errors import ConfigError
from manyheads.models import recipes, seq2seq
from manyheads.parts.feedforward import Activation
from manyheads.parts.norms import NoNorm

# The content of a config.json.
ConfigJson = Mapping[str, Any]
MISSING: Any = object()
# The activations of feed-forwards by their names in config.json; the first of ours is written.
HIDDEN_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python": "gelu",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
# Those of gated feed-forwards.
GATED_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
}


@dataclass(frozen=True, slots=True)
class Form:
    """How the value of a key becomes that of a field, and back; MISSING if there is no way."""

    read: Callable[[str, Any], Any] = lambda _, value: value
    write: Callable[[Any], Any] = lambda value: value


def _read_eps(key: str, value: Any) -> float:
    """Like `transformers`, refuse what is not a decimal number."""
    if not isinstance(value, float) or not 0 <= value < 1e6:
        raise ConfigError(f"{key} must be a number such as 1e-6, got {value!r:.200}")
    return value


PLAIN = Form()
FLOAT = Form(lambda _, value: float(value))
BOOL = Form(lambda _, value: bool(value))
EPS = Form(_read_eps)
# Bounds of scores or logits, which may be null.
CAP = Form(
    lambda _, value: float(value) if value else "none",
    lambda value: None if value == "none" else value,
)


def flag(yes: str, no: str) -> Form:
    """True and false for two names of ours."""
    return Form(lambda _, value: yes if value else no, lambda value: value == yes)


def one_of(names: Mapping[str, Any]) -> Form:
    """Names in config.json for ours; where several mean one of ours, the first is written."""

    def read(key: str, name: Any) -> Any:
        if name not in names:
            raise ConfigError(f"{key}={name!r:.200} is not supported", f"use {', '.join(names)}")
        return names[name]

    return Form(read, lambda value: next((name for name in names if names[name] == value), MISSING))


@dataclass(frozen=True, slots=True)
class Key:
    """A key of config.json, by the field that has its value, such as "attention.heads".

    `default` holds where config.json lacks the key, and is written for a model that lacks the
    field. A field that may be a rule, such as "even", is written from a `computed` property.
    """

    field: str
    default: Any = MISSING
    form: Form = PLAIN
    computed: str = ""
    written: Literal["always", "changed", "never"] = "always"


WIDTH = Key("stack.width")
DEPTH = Key("stack.depth", form=Form(write=len), computed="stack.layers")
HEADS = Key("attention.heads")
KV_HEADS = Key("attention.kv_heads", computed="attention.key_heads")
HEAD_SIZE = Key("attention.head_size", computed="attention.size")
HIDDEN = Key("feedforward.hidden")
VOCABULARY = Key("embedding.vocabulary")
POSITIONS = Key("position.count")
STD = Key("init.std", 0.02, FLOAT)
UNWRITTEN_STD = Key("init.std", 0.02, FLOAT, written="never")
TIED = Key("readout.tied", True, BOOL)
UNTIED = Key("readout.tied", False, BOOL)
BIAS = Key("attention.bias", False, flag("all", "none"))
# The names that most families have for these.
SIZES = {
    "hidden_size": WIDTH,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "intermediate_size": HIDDEN,
    "vocab_size": VOCABULARY,
}


def eps(default: Any = MISSING) -> Key:
    return Key("norm.eps", default, EPS)


def dropout(part: str, default: Any = 0.0) -> Key:
    return Key(f"{part}.dropout", default, FLOAT)


def activation(default: Any = MISSING, names: Mapping[str, str] = HIDDEN_ACTIVATIONS) -> Key:
    return Key("feedforward.activation", default, one_of(names))


@dataclass(slots=True, kw_only=True)
class Parts:
    """The parts of a model that keys describe: those of the first layer that has them.

    When config.json is read, each part is a dict with the arguments of its class, except for the
    norm, which comes first because others contain it, and for `json`, all that config.json says.
    """

    json: ConfigJson = field(default_factory=dict)
    stack: Any = field(default_factory=dict)
    embedding: Any = field(default_factory=dict)
    position: Any = field(default_factory=dict)
    patches: Any = field(default_factory=dict)
    attention: Any = field(default_factory=dict)
    mixer: Any = field(default_factory=dict)
    feedforward: Any = field(default_factory=dict)
    residual: Any = field(default_factory=dict)
    norm: Any = field(default_factory=dict)
    readout: Any = field(default_factory=dict)
    init: Any = field(default_factory=dict)

    @property
    def width(self) -> Any:
        return self.stack["width"]

    @property
    def depth(self) -> Any:
        return self.stack["depth"]

    def dropout(self, part: str) -> float:
        """The dropout of a part; 0 where config.json has none for it, or for no part."""
        return float(getattr(self, part).get("dropout", 0.0)) if part else 0.0


def parts_of(config: recipes.ModelConfig) -> Parts | None:
    """The parts of a model; None if it has no layers."""
    stack = config.encoder if isinstance(config, seq2seq.Seq2SeqConfig) else config.stack
    if not stack.layers:
        return None
    branches = {
        name: next((own for layer in stack.layers if (own := getattr(layer, name))), None)
        for name in ("attention", "mixer", "feedforward")
    }
    inner: dict[str, Any] = {
        name: getattr(branch, "inner", None) for name, branch in branches.items()
    }
    embedding, norm = getattr(config, "embedding", None), stack.final_norm
    return Parts(
        stack=stack,
        embedding=embedding,
        position=getattr(embedding, "position", None),
        patches=getattr(config, "patches", None),
        residual=branches["attention"] or branches["mixer"],
        norm=getattr(embedding, "norm", norm) if isinstance(norm, NoNorm) else norm,
        readout=config.readout,
        init=config.init,
        **inner,
    )


def read_keys(keys: Mapping[str, Key], config_json: ConfigJson, norm: Callable[..., Any]) -> Parts:
    """What a config.json says, by part; all parts have the width of the model."""
    parts = Parts(json=config_json)
    for name, key in keys.items():
        required = key.default is MISSING
        value = config_json[name] if required else config_json.get(name, key.default)
        part, _, argument = key.field.partition(".")
        getattr(parts, part)[argument] = key.form.read(name, value)
    for part in (parts.embedding, parts.patches, parts.attention, parts.mixer, parts.feedforward):
        part.setdefault("width", parts.width)
    parts.norm = norm(**parts.norm)
    return parts


def write_keys(keys: Mapping[str, Key], parts: Parts) -> dict[str, Any] | None:
    """What config.json says about a model; None if it lacks what some key must say."""
    described: dict[str, Any] = {}
    for name, key in keys.items():
        value: Any = parts
        for attribute in (key.computed or key.field).split("."):
            value = getattr(value, attribute, MISSING)
        value = value if value is MISSING else key.form.write(value)
        value = key.default if value is MISSING else value
        if value is MISSING:
            return None
        if key.written == "always" or (key.written == "changed" and value != key.default):
            described[name] = value
    return described
