"""A head that was copied is found, in its layer and in another, and nothing else is."""

from inspect import unwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import fcluster, linkage
from scipy.spatial.distance import squareform

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.redundant.heads import Redundancy, average_linkage, cut, redundancy
from manyheads.models.build import build
from manyheads.parts.positions import Rotary
from manyheads.taps import Head
from tests.messages import refuses
from tests.models.zoo import decoder, layer, own, writes

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3]]


def copied(model: Any, source: tuple[int, int], target: tuple[int, int]) -> None:
    """One head's weights put in the place of another's."""
    ours, peer = (model.stack.layers[place].attention for place, _ in (source, target))
    mine, other = (slice(8 * head, 8 * head + 8) for _, head in (source, target))
    with torch.no_grad():
        for name, rows in peer.projections().items():
            rows[other] = ours.projections()[name][mine]
        peer.output.weight[:, other] = ours.output.weight[:, mine]


@pytest.fixture
def measured() -> Redundancy:
    model: Any = build(decoder(*[writes(position=Rotary())] * 2), seed=0)
    copied(model, (0, 1), (0, 3))
    return redundancy(model, TEXTS, progress=False)


def test_the_copy_is_found_and_nothing_else(measured: Redundancy) -> None:
    (double,) = measured.duplicates
    assert (str(double.one), str(double.other)) == ("L0H1", "L0H3")
    assert (double.patterns, double.outputs, double.weights) == pytest.approx((1, 1, 1), abs=1e-5)
    assert [[str(head) for head in group] for group in measured.clusters] == [["L0H1", "L0H3"]]
    assert measured.of(Head(0, 1), Head(0, 3))["joint"] == pytest.approx(1, abs=1e-5)


def test_a_copy_in_a_later_layer_is_found() -> None:
    """Where nothing is written in between, both layers read the same."""
    model: Any = build(
        decoder(*[layer(own(mask=writes().attention.inner.mask), None)] * 2),  # type: ignore[union-attr]
        seed=0,
    )
    with torch.no_grad():
        # The first layer writes so little that the second reads what it read.
        model.stack.layers[0].attention.output.weight.mul_(1e-4)
    copied(model, (0, 2), (1, 0))
    pairs = [(str(each.one), str(each.other)) for each in redundancy(model, TEXTS).duplicates]
    assert pairs == [("L0H2", "L1H0")]


def test_it_reads_well(measured: Redundancy, tmp_path: Path) -> None:
    assert "1 duplicate pairs, 1 clusters" in str(measured)
    assert "cluster 0: L0H1, L0H3" in str(measured)
    rows = {row["head"]: row for row in measured.rows()}
    assert rows["L0H1"]["nearest"] == "L0H3"
    assert rows["L0H1"]["cluster"] == 0
    assert rows["L1H0"]["cluster"] is None
    assert len(measured.frame()) == 8
    assert measured.table().row_count == 8
    assert len(measured.cut(0.0)[0]) == 8
    for ending in ("json", "safetensors"):
        measured.save(tmp_path / f"found.{ending}")
        again = lens.load(tmp_path / f"found.{ending}")
        assert again.duplicates == measured.duplicates
        assert again.metadata == measured.metadata
        np.testing.assert_allclose(again.similarity["outputs"], measured.similarity["outputs"])


def test_a_head_that_writes_nothing_doubles_nobody() -> None:
    model: Any = build(decoder(*[writes()] * 1), seed=0)
    with torch.no_grad():
        model.stack.layers[0].attention.output.weight[:, :16] = 0
    measured = redundancy(model, TEXTS, by="patterns", progress=False)
    assert measured.duplicates == ()
    assert np.isnan(measured.of(Head(0, 0), Head(0, 1))["outputs"])
    assert "outputs" in measured.rows()[0]


def test_a_threshold_that_is_none_is_refused() -> None:
    model = build(decoder(writes()), seed=0)
    with refuses(InputError, "duplicate_above", "got 1.5", "at most 1"):
        redundancy(model, [[1, 2]], duplicate_above=1.5)


def similarity(count: int, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).random((count, count))
    values = (values + values.T) / 2
    np.fill_diagonal(values, 1.0)
    return values


@pytest.mark.parametrize("seed", range(5))
def test_it_is_scipys_average_linkage(seed: int) -> None:
    values = similarity(17, seed)
    peer = linkage(squareform(1 - values, checks=False), method="average")
    merges = average_linkage(values)
    np.testing.assert_allclose([1 - merge.similarity for merge in merges], peer[:, 2])
    for above in (0.4, 0.55, 0.7):
        labels = fcluster(peer, 1 - above, criterion="distance")
        expected = {tuple(np.flatnonzero(labels == label).tolist()) for label in set(labels)}
        assert set(cut(merges, above, 17)) == expected


def test_what_has_no_likeness_is_never_joined() -> None:
    values = similarity(4, 0)
    values[:2, 2:] = values[2:, :2] = np.nan
    assert {merge.one + merge.other for merge in average_linkage(values)} == {(0, 1), (2, 3)}
    assert cut(average_linkage(values), -1.0, 4) == ((0, 1), (2, 3))


def test_one_or_none_has_nothing_to_join() -> None:
    assert average_linkage(np.ones((1, 1))) == ()
    assert average_linkage(np.ones((0, 0))) == ()
    assert cut((), 0.5, 2) == ((0,), (1,))


def test_values_that_are_of_no_pairs_are_refused() -> None:
    with refuses(InputError, "(2, 3)", "h x h"):
        unwrap(average_linkage)(np.ones((2, 3)))
