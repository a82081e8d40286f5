"""Longformer: RoBERTa whose attention is a window, with global tokens."""

from typing import Any, Literal

from manyheads.checkpoints.families.config_keys import ConfigJson, Key, Parts, dropout
from manyheads.checkpoints.families.encoders.bert import LAYER, ROBERTA, RobertaFamily
from manyheads.errors import ConfigError
from manyheads.mixers.sparse.longformer import Longformer
from manyheads.models.readout import ClassHead, SpanHead


class LongformerFamily(RobertaFamily):
    """Longformer, with the global tokens that `transformers` chooses if it receives no others.

    That is the first token for a classifier of sequences, the question for answers, else none.
    """

    name = "longformer"
    classes = {"longformer": "Longformer"}
    keys = {
        **ROBERTA.keys,
        "num_attention_heads": Key("mixer.heads"),
        "attention_probs_dropout_prob": dropout("mixer", 0.1),
    }

    prefix = "longformer."
    other_prefixes = ()
    layer = {
        **LAYER,
        "mixer.project_global_query": "attention.self.query_global",
        "mixer.project_global": ("attention.self.key_global", "attention.self.value_global"),
    }
    unused_heads = ()
    buffers = ("position_ids",)
    older = {}

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        return config_json

    def read_inner(self, parts: Parts, index: int) -> Longformer:
        window, head = _windows(parts.json)[index], self.read_readout(parts)
        places: tuple[int, ...] | Literal["given"] = (0,) if isinstance(head, ClassHead) else ()
        places = "given" if isinstance(head, SpanHead) else places
        return Longformer(window=window // 2, global_positions=places, **parts.mixer)

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:  # noqa: ARG002
        mixers = [layer.mixer.inner for layer in config.stack.layers if layer.mixer is not None]
        if not all(isinstance(mixer, Longformer) for mixer in mixers):
            return None
        return {"attention_window": [2 * mixer.window for mixer in mixers]}


LONGFORMER = LongformerFamily()


def _windows(config_json: ConfigJson) -> list[int]:
    """The width of each layer's window, both sides together."""
    windows, count = config_json.get("attention_window", 512), config_json["num_hidden_layers"]
    windows = [windows] * count if isinstance(windows, int) else list(windows)
    if len(windows) != count:
        raise ConfigError(
            f"attention_window has {len(windows)} entries, and num_hidden_layers={count}",
            "give one window per layer",
        )
    for window in windows:
        if not isinstance(window, int) or window < 2 or window % 2:
            raise ConfigError(f"attention_window must be even and above 0, got {window!r:.50}")
    return windows
