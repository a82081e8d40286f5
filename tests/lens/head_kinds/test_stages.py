"""A head is in a stage by its labels, and in none without them."""

from manyheads.lens.head_kinds.criteria import Label, threshold_table
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.head_kinds.stages import STAGES, group_by_stage, stage_of
from manyheads.lens.results.addresses import Address
from manyheads.taps import Head
from tests.architecture.house import ROOT
from tests.lens.planted import planted_model


def label(kind: str) -> Label:
    return Label(kind=kind, score=0.9, threshold=0.5, evidence="...")


def test_every_kind_has_at_most_one_stage() -> None:
    kinds_of_stages = [kind for kinds in STAGES.values() for kind in kinds]
    assert len(set(kinds_of_stages)) == len(kinds_of_stages)
    assert set(kinds_of_stages) <= set(threshold_table())
    for kind in ("self", "sink", "broad", "context-blind", "class-token"):
        assert stage_of(kind) == ""


def test_a_head_is_in_every_stage_that_its_labels_are_evidence_for() -> None:
    labels = {
        Address(Head(0, 0)): (label("induction"), label("copying"), label("sink")),
        Address(Head(0, 1)): (label("sink"),),
        Address(Head(0, 2)): (),
    }
    stages = group_by_stage(labels)
    assert list(stages) == [
        "recalling knowledge",
        "identifying context",
        "reasoning",
        "expressing",
    ]
    assert stages["reasoning"] == {Address(Head(0, 0)): (label("induction"),)}
    assert stages["expressing"] == {Address(Head(0, 0)): (label("copying"),)}
    assert not stages["recalling knowledge"]
    assert not stages["identifying context"]


def test_stages_of_planted_heads_are_in_the_result_and_its_rows() -> None:
    result = kinds(planted_model()[0], sequences=5, progress=False)
    assert list(result.stages["reasoning"]) == [Address(Head(1, 0))]
    assert set(result.stages["identifying context"]) == {
        Address(Head(0, 0)),
        Address(Head(0, 2)),
    }
    assert "1 reasoning" in str(result)
    by_kind = {row["kind"]: row["stage"] for row in result.rows()}
    assert by_kind["induction"] == "reasoning"
    assert by_kind["sink"] == by_kind["mixed"] == ""


def test_the_page_has_every_kind_with_its_threshold_and_every_stage() -> None:
    page = (ROOT / "docs/concepts/kinds-of-heads.md").read_text("utf-8")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    above = {
        kind: float(threshold)
        for names, _, thresholds, *_ in (row for row in rows if len(row) > 3 and row[0] != "kind")
        for kind, threshold in zip(names.split(", "), thresholds.split(", "), strict=True)
    }
    table = {kind: threshold.above for kind, threshold in threshold_table().items()}
    assert above == {kind: table[kind] for kind in table if kind != "silent"}
    stages = {row[0]: set(row[1].split(", ")) for row in rows if row[0] in STAGES}
    assert stages == {stage: set(kinds) for stage, kinds in STAGES.items()}
