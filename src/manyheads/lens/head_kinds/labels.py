"""What the heads of a model are called, with the score and the evidence behind each name."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manyheads.errors import InputError
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.by_head import ByHead, Tabular
from manyheads.lens.results.files import Facts
from manyheads.taps import Head

KIND = "kinds"
# What a head is called that has no kind.
MIXED = "mixed"
# A page of a terminal; the whole is in the frame and in the file.
MOST_ROWS = 40
MOST_NAMES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One kind of a head: its score, what it had to reach, and in a sentence what was seen.

    >>> label = Label(kind="positional", detail="-3", score=0.8, threshold=0.5, evidence="...")
    >>> str(label), label.margin
    ('positional -3 (0.80)', 0.6)
    """

    kind: str
    score: float
    threshold: float
    evidence: str
    detail: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.detail}".rstrip()

    @property
    def margin(self) -> float:
        """How much of the way from the threshold to a perfect score it has gone."""
        room = 1 - self.threshold
        return round((self.score - self.threshold) / room, 6) if room > 0 else 0.0

    def __str__(self) -> str:
        return f"{self.name} ({self.score:.2f})"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Kinds(Tabular):
    """The labels of every head, best first, and all scores they were told from.

    `scores` has one column per kind, those of heads that miss the threshold too. `facts` says what
    was read, which thresholds held, and what could not be measured and why.
    """

    labels: Mapping[Address, tuple[Label, ...]]
    scores: ByHead
    facts: Facts = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """False where the measuring was interrupted."""
        return bool(self.facts.get("complete", True))

    @property
    def missing(self) -> dict[str, str]:
        """Kinds that were not measured, and why."""
        return dict(self.facts.get("missing", {}))

    def of(self, head: Head | Address) -> tuple[Label, ...]:
        """All labels of one head, best first; none for a mixed one."""
        address = Address(head) if isinstance(head, Head) else head
        if address not in self.labels:
            known = list(self.labels)
            raise InputError(f"there is no head {address}", f"use {known[0]} to {known[-1]}")
        return self.labels[address]

    def best(self, head: Head | Address) -> str:
        """The name of the best label, or "mixed"."""
        found = self.of(head)
        return found[0].name if found else MIXED

    def heads(self, kind: str) -> tuple[Address, ...]:
        """The heads of a kind, by score; "mixed" gives those of none."""
        if kind == MIXED:
            return tuple(address for address, labels in self.labels.items() if not labels)
        found = [
            (max(label.score for label in mine), address)
            for address, labels in self.labels.items()
            if (mine := [label for label in labels if kind in (label.kind, label.name)])
        ]
        known = {label.kind for labels in self.labels.values() for label in labels}
        if not found and kind not in known | set(self.facts.get("thresholds", {})):
            measured = ", ".join(self.facts.get("thresholds", {}))
            raise InputError(f"no kind of head is called {kind!r}", f"use {measured} or {MIXED}")
        return tuple(address for _, address in sorted(found, key=lambda each: -each[0]))

    def rows(self) -> list[dict[str, Any]]:
        """One record per label; a head without any has one that says so."""
        records = []
        for address, labels in self.labels.items():
            where = address.record()
            if not labels:
                records.append(where | _described(None, self._why_none(address)))
            records += [where | _described(label, label.evidence) for label in labels]
        return records

    def table(self, *, max_rows: int | None = MOST_ROWS) -> Any:
        """A rich table: each head, its kinds, and the evidence for the best."""
        from rich.table import Table

        table = Table(
            "head", "kinds", "evidence", box=None, pad_edge=False, title=KIND, title_justify="left"
        )
        for address, labels in list(self.labels.items())[:max_rows]:
            evidence = labels[0].evidence if labels else self._why_none(address)
            table.add_row(str(address), _told(labels), evidence)
        if max_rows is not None and len(self.labels) > max_rows:
            more = len(self.labels) - max_rows
            table.caption = f"{more} more heads: table(max_rows=None), frame() or save()"
            table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        counted = Counter(
            kind for labels in self.labels.values() for kind in {label.kind for label in labels}
        )
        told = [f"{count} {kind}" for kind, count in counted.most_common()]
        told.append(f"{len(self.heads(MIXED))} {MIXED}")
        lines = [f"kinds of {len(self.labels)} heads: {', '.join(told)}"]
        named = [(address, labels) for address, labels in self.labels.items() if labels]
        width = max((len(str(address)) for address, _ in named), default=0)
        lines += [
            f"  {address!s:<{width}}  {_told(labels)}" for address, labels in named[:MOST_ROWS]
        ]
        if len(named) > MOST_ROWS:
            lines.append(f"  and {len(named) - MOST_ROWS} more: table(max_rows=None), frame()")
        for why in dict.fromkeys(self.missing.values()):
            these = ", ".join(kind for kind, reason in self.missing.items() if reason == why)
            lines.append(f"  not measured: {these} ({why})")
        if not self.complete:
            lines.append("  interrupted before all was measured")
        return "\n".join(lines)

    __repr__ = __str__

    def _why_none(self, address: Address) -> str:
        if str(address) in self.facts.get("silent", ()):
            return "writes nothing to the residual stream"
        return "reaches no threshold"


def _told(labels: tuple[Label, ...]) -> str:
    if not labels:
        return MIXED
    told = ", ".join(str(label) for label in labels[:MOST_NAMES])
    return told if len(labels) <= MOST_NAMES else f"{told} and {len(labels) - MOST_NAMES} more"


def _described(label: Label | None, evidence: str) -> dict[str, Any]:
    if label is None:
        return {"kind": MIXED, "detail": "", "score": None, "threshold": None, "evidence": evidence}
    return {
        "kind": label.kind,
        "detail": label.detail,
        "score": label.score,
        "threshold": label.threshold,
        "evidence": evidence,
    }
