"""The checks that the root's conftest.py installs do refuse what an annotation does not allow."""

import pytest
import torch

from manyheads.lens.attention_maps.rollout import roll_out
from manyheads.ragged import Lengths, Ragged

pytest.importorskip("beartype")


def test_a_letter_means_one_size() -> None:
    assert roll_out(torch.eye(3).expand(2, 3, 3)).shape == (3, 3)
    with pytest.raises(Exception, match="roll_out"):
        roll_out(torch.ones(2, 3, 4))


def test_the_number_of_dimensions_is_checked() -> None:
    # In one file the first, second, fourth ... call of a function are checked.
    roll_out(torch.eye(3).expand(2, 3, 3))
    with pytest.raises(Exception, match="roll_out"):
        roll_out(torch.eye(3))


def test_fields_and_methods_are_checked() -> None:
    with pytest.raises(Exception, match=r"Ragged|values"):
        Ragged("no tensor", Lengths.of([1]))  # type: ignore[arg-type]
    with pytest.raises(Exception, match="of"):
        Lengths.of(3)  # type: ignore[arg-type]
