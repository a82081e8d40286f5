"""Induction heads and the previous-token heads they build on (Olsson et al., arXiv 2209.11895)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from manyheads.lens.addresses import Address
from manyheads.lens.circuits import Circuits
from manyheads.lens.trunk import StackName, part_of
from manyheads.models.build import Model
from manyheads.taps import Head

__all__ = ["Partner", "find_partners", "key_composition"]


@dataclass(frozen=True, slots=True)
class Partner:
    """The previous-token head whose writes a head's keys read most, and how much."""

    address: Address
    composition: float


def key_composition(found: Circuits, earlier: Head, later: Head) -> float:
    """How much the keys of a later head read what an earlier one writes (Elhage et al. 2021).

    |QK OV| / (|QK| |OV|) in Frobenius norms, the same as `compose(model, "key")` has for all pairs.
    """
    ov, qk = found.ov(earlier), found.qk(later)
    outer = torch.linalg.qr(qk.left).R
    inner = torch.linalg.qr(ov.right.T).R.T
    both = qk.singular_values().norm() * ov.singular_values().norm()
    return float((outer @ (qk.right @ ov.left) @ inner).norm() / both.clamp(min=1e-300))


def find_partners(
    model: Model, induction: Sequence[Address], previous: Sequence[Address]
) -> dict[Address, Partner]:
    """For each induction head the previous-token head below it that it composes with most."""
    partners = {}
    for later in induction:
        found = Circuits(part_of(model, cast(StackName, later.stack), later.sublayer))
        below = [
            each
            for each in previous
            if each.stack == later.stack
            and each.sublayer is later.sublayer
            and each.head.layer < later.head.layer
        ]
        scored = [Partner(each, key_composition(found, each.head, later.head)) for each in below]
        if scored:
            partners[later] = max(scored, key=lambda partner: partner.composition)
    return partners
