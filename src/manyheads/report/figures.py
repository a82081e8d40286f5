"""The figures of a report as plain JSON: a row a head, and what they were measured on."""

import math
from dataclasses import asdict
from typing import Any

from manyheads.report.examine import Findings, Worth

__all__ = ["figures_of"]


def figures_of(found: Findings) -> dict[str, Any]:
    """What the tables of a report show; what `manyheads inspect --json` holds as well is called so.

    `statistics` says what was read, and the largest activation of each layer. In a row each
    measure has its standard error beside it as `<name>_error`; what is not known is null.
    """
    rows, reasons, worth = found.seen.rows(), found.dead.reasons, found.worth
    pairs = [(each.one, each.other) for each in found.alike.doubles]
    pairs += [(other, one) for one, other in pairs]
    for place, (address, row) in enumerate(zip(found.seen.addresses, rows, strict=True)):
        if worth is not None:
            row["worth"] = float(worth.loses[place])
            row["worth_error"] = float(worth.errors[place])
            row["harmful"] = place in worth.harmful
        row["kinds"] = [asdict(label) for label in found.kinds.of(address)]
        row["dead"] = list(reasons.get(address, ()))
        row["doubles"] = [str(other) for one, other in pairs if one == address]
    known: dict[str, Any] = _known(
        {
            "kind": "report",
            "name": found.name,
            "statistics": found.seen.facts,
            "worth": None if worth is None else _about(worth),
            "rows": rows,
        }
    )
    return known


def _about(worth: Worth) -> dict[str, Any]:
    """How it was told what the model would lose."""
    told = ("metric", "by", "baseline", "texts")
    return {name: getattr(worth, name) for name in told}


def _known(value: Any) -> Any:
    """JSON knows no NaN.

    >>> _known({"entropy": [1.0, math.nan]})
    {'entropy': [1.0, None]}
    """
    if isinstance(value, dict):
        return {name: _known(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_known(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
