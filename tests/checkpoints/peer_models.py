"""Models of `transformers` in folders, to be loaded, compared and handed back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from manyheads import Ragged, load, save
from tests.parity.comparing import assert_same, each_alone, texts

__all__ = ["alone", "assert_equal", "check_decoder", "check_seq2seq", "randomized", "same_files"]


def randomized(model: Any, *, seed: int = 0) -> Any:
    """Weights large enough that a difference would show, norms and biases not at their start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.2 * noise + (1.0 if parameter.dim() == 1 else 0.0))
    return model.eval()


def check_decoder(peer: Any, opener: Callable[..., Any], place: Path) -> None:
    """Load what they saved, compare, save it, and let them open it again."""
    peer.save_pretrained(place / "theirs")
    sequences = texts()
    expected = each_alone(peer, sequences)
    model: Any = load(place / "theirs")
    with torch.no_grad():
        assert_same(model(Ragged.from_list(sequences)).logits, expected)
    model.source_config = None  # our own words must do
    saved = save(model, place / "ours")
    assert saved.family == peer.config.model_type
    again = opener(place / "ours").eval()
    assert_same(Ragged.from_list(each_alone(again, sequences)), expected)
    same_files(place / "theirs", place / "ours")
    assert_equal(load(place / "ours"), model)


def alone(model: Any, sources: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """Their logits, one pair of texts at a time."""
    with torch.no_grad():
        return [
            model(source[None], decoder_input_ids=target[None]).logits[0]
            for source, target in zip(sources, targets, strict=True)
        ]


def check_seq2seq(
    peer: Any,
    opener: Callable[..., Any],
    texts_of: tuple[list[Tensor], list[Tensor]],
    place: Path,
) -> None:
    """As for decoders, with a source and a target; their own class reads the very same bits."""
    sources, targets = texts_of
    peer.save_pretrained(place / "theirs")
    expected = alone(peer, sources, targets)
    ours: Any = load(place / "theirs")
    with torch.no_grad():
        result = ours(Ragged.from_list(sources), Ragged.from_list(targets)).logits
    assert_same(result, expected)
    ours.source_config = None  # our own words must do
    assert save(ours, place / "ours").family == peer.config.model_type
    same_files(place / "theirs", place / "ours")
    again = opener(place / "ours").eval()
    # Products may end in other bits: some processors sum up weights by where in memory they are.
    assert_same(Ragged.from_list(alone(again, sources, targets)), expected)
    assert_equal(load(place / "ours"), ours)


def assert_equal(one: Any, other: Any) -> None:
    """Two models of ours with one config and the same bits."""
    assert one.config == other.config
    result, expected = one.state_dict(), other.state_dict()
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def same_files(one: Path, other: Path) -> None:
    """The same names with the same bits."""
    first, second = (load_file(place / "model.safetensors") for place in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
