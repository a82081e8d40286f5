"""Patching: whole runs put together by hand give the same shares."""

from typing import Any

import numpy as np
import pytest
import torch

from manyheads.errors import InputError
from manyheads.lens.causal import patching
from manyheads.lens.causal.patching import Patch, patch
from manyheads.lens.causal.path_patching import patch_paths
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.ragged import Ragged
from manyheads.taps import Head, Record, Site, Sublayer, Tap
from tests.messages import refuses
from tests.models.zoo import DECODERS, SEQ2SEQS, VISIONS, ids, images, small

CLEAN, CORRUPTED = ids((5, 7, 4)), ids((5, 7, 4), seed=3)
METRIC = LogitDifference(answer=(1, 2, 3), distractor=(4, 5, 6))


class Put:
    """A plain watcher that answers with whatever its functions say."""

    def __init__(self, changes: dict[Site, Any], keep: Any = ()) -> None:
        self.changes, self.recorded = changes, Record(keep)

    def wants(self, site: Site) -> bool:
        return site in self.changes or self.recorded.wants(site)

    def see(self, site: Site, value: Any) -> Any:
        if self.recorded.wants(site):
            self.recorded.see(site, value)
        return value.with_values(self.changes[site](value.values)) if site in self.changes else None


def difference(logits: Ragged) -> float:
    rows = [each[-1] for each in logits.to_list()]
    pairs = zip(rows, METRIC.answer, METRIC.distractor, strict=True)
    return float(torch.stack([row[a] - row[b] for row, a, b in pairs]).mean())


def observe(model: Any, batch: Ragged, sites: list[Site]) -> dict[Site, Any]:
    record = Record(sites)
    with torch.no_grad():
        model(batch, watch=record)
    return {site: record[site].values for site in sites}


def run(model: Any, batch: Ragged, changes: dict[Site, Any]) -> float:
    with torch.no_grad():
        return difference(model(batch, watch=Put(changes)).logits)


def only(good: Any, head: int) -> Any:
    def change(values: Any) -> Any:
        values = values.clone()
        values[:, head] = good[:, head]
        return values

    return change


SPOTS = {
    "residual": lambda layer: Site(layer, Tap.BEFORE),
    "attention": lambda layer: Site(layer, Tap.OUTPUT),
    "feedforward": lambda layer: Site(layer, Tap.OUTPUT, Sublayer.FEEDFORWARD),
}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gates", "parallel"])
def test_shares_are_those_of_whole_runs(name: str) -> None:
    model = small(DECODERS[name])
    result = patch(
        model,
        CLEAN,
        CORRUPTED,
        METRIC,
        components=("head", *SPOTS),
        batch_tokens=70,
        progress=False,
    )
    clean, corrupted = run(model, CLEAN, {}), run(model, CORRUPTED, {})
    assert (result.clean, result.corrupted) == pytest.approx((clean, corrupted), abs=1e-5)
    for layer in range(2):
        site = Site(layer, Tap.HEAD_OUTPUT)
        good = observe(model, CLEAN, [site])[site]
        for head in range(4):
            value = run(model, CORRUPTED, {site: only(good, head)})
            expected = (value - corrupted) / (clean - corrupted)
            assert result[Patch("head", layer, head)] == pytest.approx(expected, abs=1e-4)
        for component, where in SPOTS.items():
            good = observe(model, CLEAN, [where(layer)])[where(layer)]
            value = run(model, CORRUPTED, {where(layer): lambda _, good=good: good})
            expected = (value - corrupted) / (clean - corrupted)
            assert result[Patch(component, layer)] == pytest.approx(expected, abs=1e-4)
    assert result[Patch("residual", 0)] == pytest.approx(1.0, abs=1e-4)
    assert len(result.rows()) == 2 * (4 + 3)


def test_positions_are_patched_one_by_one() -> None:
    model = small(DECODERS["llama"])
    result = patch(
        model,
        CLEAN,
        CORRUPTED,
        METRIC,
        components=("head", "residual"),
        positions="each",
        progress=False,
    )
    site = Site(1, Tap.HEAD_OUTPUT)
    good = observe(model, CLEAN, [site])[site]

    def change(values: Any) -> Any:
        values = values.clone()
        for start in (0, 5, 12):
            values[start + 3, 2] = good[start + 3, 2]
        return values

    value = run(model, CORRUPTED, {site: change})
    expected = (value - result.corrupted) / (result.clean - result.corrupted)
    assert result[Patch("head", 1, 2, 3)] == pytest.approx(expected, abs=1e-4)
    # The last layer's stream matters at the last positions alone.
    assert result[Patch("head", 1, 0, 0)] == pytest.approx(0, abs=1e-5)
    assert len(result.recovered) == 7 * (2 * 4 + 2)
    best, fraction = result.ranked(1)[0]
    assert fraction == max(result.recovered.values())
    assert str(best) in str(result)


def test_every_head_of_an_uneven_model_is_patched() -> None:
    result = patch(small(DECODERS["uneven"]), CLEAN, CORRUPTED, METRIC, progress=False)
    assert len(result.recovered) == 8 + 3 + 2


def test_pairs_and_images_are_patched_too() -> None:
    pair: Any = small(SEQ2SEQS["window"])
    clean = ids((5, 3)), ids((4, 6), seed=1)
    corrupted = ids((5, 3), seed=2), ids((4, 6), seed=1)
    result = patch(
        pair, clean, corrupted, stack="encoder", components=("residual", "head"), progress=False
    )
    assert result[Patch("residual", 0)] == pytest.approx(1.0, abs=1e-4)
    cross = patch(
        pair, clean, corrupted, sublayer=Sublayer.CROSS, components=("head",), progress=False
    )
    assert max(cross.recovered.values()) > 0
    vit = small(VISIONS["vit"])
    metric = LogitDifference(answer=(0, 1, 2, 3), distractor=(1, 2, 3, 4))
    others = [image.flip(0) for image in images()]
    seen_whole = patch(vit, images(), others, metric, components=("residual",), progress=False)
    assert seen_whole[Patch("residual", 0)] == pytest.approx(1.0, abs=1e-4)


def by_hand(
    model: Any, sender: Head, receiver: Head | None, through: str, frozen: bool
) -> tuple[float, float, float]:
    """Path patching in whole runs: clean, corrupted, and clean with the one path corrupted."""
    layers = range(len(model.stack.layers))
    heads = [Site(layer, Tap.HEAD_OUTPUT) for layer in layers]
    fed = [Site(layer, Tap.OUTPUT, Sublayer.FEEDFORWARD) for layer in layers]
    good, bad = observe(model, CLEAN, heads + fed), observe(model, CORRUPTED, heads)
    changes: dict[Site, Any] = {site: lambda _, v=good[site]: v for site in heads}
    if frozen:
        changes |= {site: lambda _, v=good[site]: v for site in fed}
    speaks = heads[sender.layer]
    changes[speaks] = lambda _: only(bad[speaks], sender.head)(good[speaks])
    ends = run(model, CLEAN, {}), run(model, CORRUPTED, {})
    if receiver is None:
        # What the layers below say is the clean run's own.
        return (*ends, run(model, CLEAN, changes))
    taps = {"query": Tap.QUERY, "key": Tap.KEY, "value": Tap.VALUE}
    site = Site(receiver.layer, taps[through])
    watch = Put(changes, [site])
    with torch.no_grad():
        model(CLEAN, watch=watch)
    attention = model.config.stack.attention(receiver.layer)
    shared = 1 if through == "query" else attention.heads // attention.key_heads
    heard = watch.recorded[site].values
    return (*ends, run(model, CLEAN, {site: only(heard, receiver.head // shared)}))


@pytest.mark.parametrize("through", ["query", "key", "value"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "parallel"])
def test_a_path_carries_what_two_whole_runs_say(name: str, through: Any, frozen: bool) -> None:
    model = small(DECODERS[name])
    result = patch_paths(
        model,
        CLEAN,
        CORRUPTED,
        METRIC,
        receivers=["L1H2"],
        through=through,
        feedforward="frozen" if frozen else "free",
        progress=False,
    )
    for head in range(4):
        clean, corrupted, value = by_hand(model, Head(0, head), Head(1, 2), through, frozen)
        expected = (value - clean) / (corrupted - clean)
        assert result["effect"].of(Head(0, head)) == pytest.approx(expected, abs=1e-4)
        assert result["effect"].of(Head(1, head)) == pytest.approx(0, abs=1e-5)
    assert np.abs(result["effect"].means).max() > 1e-4


def test_a_path_to_the_logits_holds_all_other_heads_still() -> None:
    model = small(DECODERS["gates"])
    result = patch_paths(
        model,
        CLEAN,
        CORRUPTED,
        METRIC,
        receivers="logits",
        senders=["L0H1", "L1H3"],
        progress=False,
    )
    for sender in (Head(0, 1), Head(1, 3)):
        clean, corrupted, value = by_hand(model, sender, None, "query", False)
        expected = (value - clean) / (corrupted - clean)
        assert result["effect"].of(sender) == pytest.approx(expected, abs=1e-4)
    assert np.isnan(result["effect"].of(Head(0, 0)))


def test_from_a_corrupted_base_the_ends_change_places() -> None:
    model = small(DECODERS["llama"])
    one = patch_paths(
        model, CLEAN, CORRUPTED, METRIC, receivers="logits", base="corrupted", progress=False
    )
    other = patch_paths(model, CORRUPTED, CLEAN, METRIC, receivers="logits", progress=False)
    np.testing.assert_allclose(one["effect"].means, other["effect"].means, atol=1e-5)


def test_ctrl_c_keeps_what_was_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(DECODERS["llama"])
    measured = patching._run
    runs = 0

    def tired(*inputs: Any) -> Any:
        nonlocal runs
        runs += 1
        if runs > 3:
            raise KeyboardInterrupt
        return measured(*inputs)

    monkeypatch.setattr(patching, "_run", tired)
    result = patch(model, CLEAN, CORRUPTED, METRIC, batch_tokens=1, progress=False)
    assert not result.complete
    assert list(result.recovered) == [Patch("head", 0, head) for head in range(3)]


def test_runs_that_do_not_match_are_refused() -> None:
    model = small(DECODERS["llama"])
    with refuses(InputError, "pair 0", "5 tokens", "one for one"):
        patch(model, ids((5,)), ids((4,)))
    with refuses(InputError, "the metric is", "corrupt a token"):
        patch(model, CLEAN, CLEAN, METRIC)
    with refuses(InputError, "'cross'", '"feedforward"'):
        patch(model, CLEAN, CORRUPTED, METRIC, components=("cross",))


def test_layers_and_positions_are_patched_one_by_one_as_together() -> None:
    model = small(DECODERS["gpt2"])
    options: dict[str, Any] = {"components": ("residual",), "positions": "each"}
    together = patch(model, CLEAN, CORRUPTED, METRIC, **options).recovered
    alone = patch(model, CLEAN, CORRUPTED, METRIC, layers=[1], **options).recovered
    assert alone == {
        site: pytest.approx(value) for site, value in together.items() if site.layer == 1
    }
    with refuses(InputError, "there is no layer 2", "use 0 to 1"):
        patch(model, CLEAN, CORRUPTED, METRIC, layers=[2], **options)
    options["positions"] = [3, 6]
    listed = patch(model, CLEAN, CORRUPTED, METRIC, **options).recovered
    assert listed == {
        site: pytest.approx(value) for site, value in together.items() if site.position in (3, 6)
    }
    options["positions"] = [7]
    with refuses(InputError, "there is no position 7", "use 0 to 6"):
        patch(model, CLEAN, CORRUPTED, METRIC, **options)
