"""The figures of a report as plain JSON: a row a head, and what they were measured on."""

from dataclasses import asdict
from typing import Any

from manyheads.report.examine import Findings, Worth
from manyheads.wording import without_nan

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
    known: dict[str, Any] = without_nan(
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
