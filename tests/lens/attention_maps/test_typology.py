"""What patterns look like, on pictures drawn by hand."""

import pytest
import torch

from manyheads.errors import InputError
from manyheads.lens.attention_maps.typology import typology
from tests.lens.handmade import column_head, even_head, offset_head
from tests.messages import refuses


def blocks(length: int, size: int) -> torch.Tensor:
    owner = torch.arange(length) // size
    same = (owner[:, None] == owner).float()
    return same / same.sum(-1, keepdim=True)


PICTURES = {
    "diagonal": (torch.eye(12), None),
    "previous": (offset_head(12, -1), None),
    "next": (offset_head(12, 1), None),
    "offset": (offset_head(12, -4), -4),
    "vertical": (column_head(12, 2), 2),
    "block": (blocks(12, 4), 4),
    "uniform": (torch.full((12, 12), 1 / 12), None),
}


@pytest.mark.parametrize("name", PICTURES)
def test_an_ideal_pattern_gets_its_type_and_score(name: str) -> None:
    pattern, detail = PICTURES[name]
    result = typology(pattern)
    assert (result.name, result.detail) == (name, detail)
    assert result.score == pytest.approx(1.0)
    assert result.scores[name] == result.score == max(result.scores.values())


@pytest.mark.parametrize("name", PICTURES)
def test_a_fifth_of_noise_changes_no_picture(name: str) -> None:
    pattern, detail = PICTURES[name]
    noise = torch.rand(12, 12, generator=torch.Generator().manual_seed(0))
    noisy = 0.8 * pattern + 0.2 * noise / noise.sum(-1, keepdim=True)
    result = typology(noisy)
    assert (result.name, result.detail) == (name, detail)
    assert 0.8 <= result.score <= 1.0


def test_a_causal_picture_is_known_by_its_empty_half() -> None:
    assert typology(even_head(12)).name == "uniform"
    assert typology(even_head(12)).score == pytest.approx(1.0)
    assert typology(offset_head(12, -1)).name == "previous"
    lower = torch.ones(12, 12).tril() * (blocks(12, 3) > 0)
    assert str(typology(lower / lower.sum(-1, keepdim=True))) == "block 3 (1.00)"


def test_half_of_this_and_half_of_that_is_the_first_or_mixed() -> None:
    third = (torch.eye(12) + offset_head(12, -3) + column_head(12, 6)) / 3
    result = typology(third)
    assert result.name == "mixed"
    assert result.detail is None
    assert result.score < 0.5


def test_segments_are_blocks_of_any_size() -> None:
    starts = [0, 2, 9]
    owner = torch.bucketize(torch.arange(12), torch.tensor(starts), right=True)
    same = (owner[:, None] == owner).float()
    pattern = same / same.sum(-1, keepdim=True)
    assert typology(pattern, segments=starts).score == pytest.approx(1.0)
    assert typology(pattern, segments=starts).name == "block"
    assert typology(pattern).score < 1.0


def test_long_patterns_get_a_type_too() -> None:
    assert str(typology(blocks(300, 32))) == "block 32 (1.00)"
    assert str(typology(offset_head(300, -100))) == "offset -100 (1.00)"


def test_an_empty_pattern_is_refused() -> None:
    with refuses(InputError, "(0, 4)", "t x s weights"):
        typology(torch.zeros(0, 4))
