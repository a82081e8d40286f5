"""What makes a run slow where a line of its file would mend it, said once at its start."""

import warnings
from collections.abc import Iterator

import torch
from torch import nn

from manyheads.attention import Attention

__all__ = ["advice", "quiet"]


def advice(model: nn.Module, device: torch.device, *, half: bool) -> Iterator[str]:
    """Of what a processor cannot do fast; devices made for training can."""
    if device.type != "cpu":
        return
    if half and not _has_bfloat16():
        yield 'this processor has no bfloat16: run.precision="float32" is many times as fast'
    drops = [each for each in model.modules() if isinstance(each, Attention)]
    if any(each.config.dropout for each in drops):
        yield (
            "dropout of attention weights has no fast kernel on a processor: "
            "model.heads.dropout=0 is several times as fast"
        )


def quiet() -> None:
    """torch tells of a slower way to multiply with its whole stack; `advice` says it in a line."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")


def _has_bfloat16() -> bool:
    asked = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return asked is None or bool(asked())
