"""Longformer: RoBERTa whose attention is a window, with global tokens."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.encoders.bert import LAYER, ROBERTA, RobertaFamily
from manyheads.errors import ConfigError
from manyheads.mixers.sparse.longformer import Longformer
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import ClassHead, Readout, SpanHead
from manyheads.parts.feedforward import MLP
from manyheads.parts.norms import LayerNorm, PostNorm


class LongformerFamily(RobertaFamily):
    """Longformer, with the global tokens that `transformers` chooses if it receives no others.

    That is the first token for a classifier of sequences, the question for answers, else none.
    """

    name = "longformer"
    classes: Mapping[str, str] = {"longformer": "Longformer"}
    keys: Mapping[str, config_keys.Key] = {
        **ROBERTA.keys,
        "num_attention_heads": config_keys.Key("mixer.heads"),
        "attention_probs_dropout_prob": config_keys.Key("mixer.dropout", 0.1, config_keys.FLOAT),
    }

    prefix = "longformer."
    other_prefixes = ()
    layer: Mapping[str, family.Sources] = {
        **LAYER,
        "mixer.project_global_query": "attention.self.query_global",
        "mixer.project_global": ("attention.self.key_global", "attention.self.value_global"),
    }
    unused_heads = ()
    buffers = ("position_ids",)
    older: Mapping[str, str] = {}

    def complete(self, config_json: Mapping[str, Any]) -> Mapping[str, Any]:
        return config_json

    def read_layers(
        self, parts: config_keys.Parts, norm: LayerNorm, config_json: Mapping[str, Any]
    ) -> Iterator[LayerConfig]:
        places = _global_positions(self.read_readout(parts, norm, config_json))
        dropout, feedforward = parts.embedding["dropout"], MLP(**parts.feedforward)
        for window in _windows(config_json):
            mixer = Longformer(window=window // 2, global_positions=places, **parts.mixer)
            yield family.layer_of(mixer, feedforward, PostNorm(norm), dropout)

    def describe(self, config: Any, parts: config_keys.Parts) -> dict[str, Any] | None:  # noqa: ARG002
        mixers = [layer.mixer.inner for layer in config.stack.layers if layer.mixer is not None]
        if not all(isinstance(mixer, Longformer) for mixer in mixers):
            return None
        return {"attention_window": [2 * mixer.window for mixer in mixers]}


LONGFORMER = LongformerFamily()


def _global_positions(readout: Readout) -> tuple[int, ...] | Literal["given"]:
    if isinstance(readout, SpanHead):
        return "given"
    return (0,) if isinstance(readout, ClassHead) else ()


def _windows(config_json: Mapping[str, Any]) -> list[int]:
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
