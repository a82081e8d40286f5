"""Models of `transformers` in folders, to be loaded, compared and handed back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from manyheads import Ragged, load, save
from tests.parity.comparing import assert_same, each_alone, texts

__all__ = ["check_decoder", "randomised", "same_files"]


def randomised(model: Any, *, seed: int = 0) -> Any:
    """Weights large enough that a difference would show, norms and biases not at their start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise + (1.0 if parameter.dim() == 1 else 0.0))
    return model.eval()


def check_decoder(theirs: Any, opener: Callable[..., Any], place: Path) -> None:
    """Load what they saved, compare, save it, and let them open it again."""
    theirs.save_pretrained(place / "theirs")
    sequences = texts()
    expected = each_alone(theirs, sequences)
    model: Any = load(place / "theirs")
    with torch.no_grad():
        assert_same(model(Ragged.from_list(sequences)).logits, expected)
    model.described = None  # our own words must do
    saved = save(model, place / "ours")
    assert saved.family == theirs.config.model_type
    again = opener(place / "ours").eval()
    assert_same(Ragged.from_list(each_alone(again, sequences)), expected)
    same_files(place / "theirs", place / "ours")
    second: Any = load(place / "ours")
    assert second.config == model.config
    assert all(
        torch.equal(second.state_dict()[name], tensor)
        for name, tensor in model.state_dict().items()
    )


def same_files(one: Path, other: Path) -> None:
    """The same names with the same bits."""
    first, second = (load_file(place / "model.safetensors") for place in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
