"""Heads have addresses, sites are typed, and a watcher sees or replaces what it asks for alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads.errors import ConfigError, InputError
from manyheads.ragged import Ragged
from manyheads.taps import (
    Head,
    Patterns,
    Record,
    Site,
    Sublayer,
    Tap,
    WatchContext,
    Watcher,
    observe,
)
from tests.messages import refuses

BATCH = Ragged.from_list([torch.randn(2, 3), torch.randn(1, 3)])


class Doubling:
    """Doubles what it sees at one site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.asked: list[Site] = []

    def wants(self, site: Site) -> bool:
        self.asked.append(site)
        return site == self.site

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns | None:
        assert site == self.site
        assert isinstance(value, Ragged)
        return value.map(lambda values: 2 * values)


@given(layer=st.integers(0, 99), head=st.integers(0, 99))
def test_a_heads_address_can_be_read_back(layer: int, head: int) -> None:
    address = Head(layer=layer, head=head)
    assert str(address) == f"L{layer}H{head}"
    assert Head.parse(str(address)) == address
    assert Head.parse(f" l{layer}h{head} ") == address


def test_heads_are_ordered_by_layer_then_head() -> None:
    heads = [Head(1, 0), Head(0, 7), Head(0, 2)]
    assert list(map(str, sorted(heads))) == ["L0H2", "L0H7", "L1H0"]


@pytest.mark.parametrize("text", ["", "5.1", "L5", "H1", "L5H1x", "L-1H0"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with refuses(InputError, f"{text!r} is not the address of a head: write it as L5H1."):
        Head.parse(text)


def test_sites_that_no_model_has_are_refused() -> None:
    with refuses(ConfigError, "EMBEDDINGS belongs to no layer: use layer=-1."):
        Site(0, Tap.EMBEDDINGS)
    with refuses(ConfigError, "FINAL belongs to no layer: use layer=-1."):
        Site(3, Tap.FINAL)
    with refuses(ConfigError, "add Sublayer.FEEDFORWARD"):
        Site(0, Tap.INSIDE)
    with refuses(
        ConfigError, "a feed-forward has no PATTERN: use BEFORE, READ, INSIDE, OUTPUT or AFTER."
    ):
        Site(0, Tap.PATTERN, Sublayer.FEEDFORWARD)


def test_sites_are_values() -> None:
    assert Site(1, Tap.QUERY) == Site(1, Tap.QUERY, Sublayer.ATTENTION, "main")
    sites = {Site(1, Tap.QUERY), Site(1, Tap.KEY), Site(1, Tap.QUERY, stack="decoder")}
    assert len(sites) == 3
    assert repr(Site(1, Tap.QUERY, Sublayer.CROSS)) == "Site(1, QUERY, CROSS)"


def test_nobody_looking_leaves_the_very_tensor() -> None:
    assert observe(None, Tap.QUERY, BATCH.values, BATCH) is BATCH.values
    elsewhere = WatchContext(Record([Site(9, Tap.QUERY)]), layer=1)
    assert observe(elsewhere, Tap.QUERY, BATCH.values, BATCH) is BATCH.values


def test_a_record_keeps_its_sites_and_nothing_else() -> None:
    record = Record([Site(1, Tap.QUERY), Site(1, Tap.KEY)])
    look = WatchContext(record, layer=1)
    values = torch.randn(3, 2, 4)
    assert observe(look, Tap.QUERY, values, BATCH) is values
    observe(look, Tap.VALUE, values, BATCH)
    kept = record[Site(1, Tap.QUERY)]
    assert isinstance(kept, Ragged)
    assert torch.equal(kept.of(0), values[:2])
    assert Site(1, Tap.QUERY) in record
    assert Site(1, Tap.VALUE) not in record
    assert isinstance(record, Watcher)


def test_a_site_that_is_not_recorded_is_refused_by_name() -> None:
    record = Record([Site(1, Tap.KEY), Site(0, Tap.QUERY)])
    with refuses(
        InputError,
        "Site(1, KEY)",
        "run a model that has this site, with watch=record",
    ):
        record[Site(1, Tap.KEY)]
    with refuses(
        InputError,
        "Site(2, KEY)",
        "add it to Record([...]), which has Site(0, QUERY), Site(1, KEY)",
    ):
        record[Site(2, Tap.KEY)]


def test_a_look_knows_where_it_stands() -> None:
    watcher = Doubling(Site(4, Tap.OUTPUT, Sublayer.CROSS, stack="decoder"))
    look = WatchContext(watcher, stack="decoder").within(layer=4, sublayer=Sublayer.CROSS)
    assert look.wants(Tap.OUTPUT)
    assert torch.equal(look.at(Tap.OUTPUT, BATCH).values, 2 * BATCH.values)
    other = look.within(layer=3, sublayer=Sublayer.CROSS)
    assert other.at(Tap.OUTPUT, BATCH) is BATCH
    assert Site(3, Tap.OUTPUT, Sublayer.CROSS, "decoder") in watcher.asked


def test_what_a_watcher_hands_back_takes_the_place_of_the_value() -> None:
    look = WatchContext(Doubling(Site(0, Tap.HEAD_OUTPUT)), layer=0)
    values = torch.randn(3, 2, 4)
    assert torch.equal(observe(look, Tap.HEAD_OUTPUT, values, BATCH), 2 * values)


def test_an_answer_of_another_kind_is_refused() -> None:
    class Wrong(Doubling):
        def see(self, site: Site, value: Ragged | Patterns) -> Patterns:  # noqa: ARG002
            return Patterns((torch.zeros(1, 1, 1),))

    look = WatchContext(Wrong(Site(0, Tap.QUERY)), layer=0)
    with refuses(
        InputError,
        "Patterns at Site(0, QUERY): return a Ragged, or None to change nothing.",
    ):
        look.at(Tap.QUERY, BATCH)


def test_patterns_are_held_a_sequence() -> None:
    patterns = Patterns((torch.zeros(2, 3, 3), torch.ones(2, 1, 1)))
    assert torch.equal(patterns.of(1), torch.ones(2, 1, 1))
