"""Whether several processes can share the texts of a model."""

from collections.abc import Sequence

from manyheads.errors import ConfigError
from manyheads.models.layer import LayerConfig
from manyheads.parts.experts import Experts
from manyheads.parts.halting import Halting
from manyheads.parts.positions import Disentangled, Shaw, T5Buckets


def check_context_parallel(
    layers: Sequence[LayerConfig], halting: Halting | None, *, trains: bool
) -> None:
    """Refuse layers that need whole texts, and name the first.

    Training also refuses what draws for whole texts, or is averaged over them.
    """
    if halting is not None:
        reason = "tokens of this model stop on their own, by a loss over whole texts"
        raise ConfigError(f"processes cannot share its texts: {reason}", "use halting=None")
    for index, layer in enumerate(layers):
        reason = _whole_text(layer) or (_whole_text_in_training(layer) if trains else "")
        if reason:
            raise ConfigError(
                f"processes cannot share the texts of this model: layer {index} {reason}",
                "use one process per text",
            )


def _whole_text(layer: LayerConfig) -> str:
    """What of a layer reads whole texts, besides attention that can be computed in parts."""
    if layer.mixer is not None:
        return f"mixes tokens by {type(layer.mixer.inner).__name__}"
    if layer.cross is not None:
        return "has cross-attention"
    if layer.convolution is not None:
        return "has a convolution"
    position = None if layer.attention is None else layer.attention.inner.position
    if isinstance(position, T5Buckets | Shaw | Disentangled):
        return f"has positions of {type(position).__name__}"
    return ""


def _whole_text_in_training(layer: LayerConfig) -> str:
    attention = None if layer.attention is None else layer.attention.inner
    if attention is not None and attention.dropout:
        return "drops attention weights"
    if attention is not None and attention.drop_heads:
        return "drops heads"
    if layer.feedforward is not None and isinstance(layer.feedforward.inner, Experts):
        return "has experts, whose losses are means over all tokens"
    return ""
