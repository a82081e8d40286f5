"""Causal tracing: equal to whole runs put together by hand, and right on a planted model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.checkpoints.folder import load
from manyheads.errors import ConfigError, InputError
from manyheads.lens.causal import restoration
from manyheads.lens.causal.restoration import restore
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Sublayer, Tap
from tests.bridge.zoo import tiny
from tests.lens.causal.test_patching import Put
from tests.lens.planted import offset_look, text_model
from tests.messages import refuses
from tests.models.zoo import DECODERS, ENCODERS, SEQ2SEQS, ids, small

TEXT = [3, 1, 4, 1, 5]
SITES = {
    "residual": lambda layer: Site(layer, Tap.AFTER, Sublayer.FEEDFORWARD),
    "attention": lambda layer: Site(layer, Tap.OUTPUT),
    "feedforward": lambda layer: Site(layer, Tap.OUTPUT, Sublayer.FEEDFORWARD),
}


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama", "parallel"])
def test_every_state_is_that_of_a_whole_run(name: str, window: int) -> None:
    model = small(DECODERS[name])
    result = restore(
        model, [TEXT], [1, 2], answer=7, samples=2, seed=4, window=window, batch_tokens=12
    )
    batch = Ragged.from_list([torch.tensor(TEXT)])
    places = [site(layer) for site in SITES.values() for layer in (0, 1)]
    record = Record(places)
    with torch.no_grad():
        clean = float(model(batch, watch=record).logits.values[-1].softmax(-1)[7])
    assert result.clean == pytest.approx(clean, rel=1e-4)
    generator = torch.Generator().manual_seed(4)
    deviation = 3 * model.embedding.tokens.weight.detach().std()
    assert result.noise == pytest.approx(float(deviation), rel=1e-5)
    noises = deviation * torch.randn(2, 2, model.config.stack.width, generator=generator)

    def run(changes: dict[Site, Any], noise: torch.Tensor) -> float:
        def add(values: torch.Tensor) -> torch.Tensor:
            values = values.clone()
            values[[1, 2]] += noise
            return values

        with torch.no_grad():
            put = Put({Site(-1, Tap.EMBEDDINGS): add} | changes)
            return float(model(batch, watch=put).logits.values[-1].softmax(-1)[7])

    noisy = [run({}, noise) for noise in noises]
    assert result.corrupted == pytest.approx(np.mean(noisy), rel=1e-4)
    for state, site in SITES.items():
        for layer in range(2):
            layers = [layer]
            if state != "residual" and window == 2:
                layers = [0] if layer == 0 else [0, 1]
            for position in range(5):

                def put(values: torch.Tensor, own: Site, at: int = position) -> torch.Tensor:
                    values = values.clone()
                    values[at] = record[own].values[at]
                    return values

                changes = {
                    site(own): (lambda values, own=own, site=site: put(values, site(own)))
                    for own in layers
                }
                values = [run(changes, noise) for noise in noises]
                got = result.restored[state][layer, position]
                assert got == pytest.approx(np.mean(values), rel=1e-3), (state, layer, position)
                effects = np.subtract(values, noisy)
                error = effects.std(ddof=1) / 2**0.5
                assert result.errors[state][layer, position] == pytest.approx(error, abs=1e-5)


def test_the_token_that_reads_the_subject_brings_the_answer_back() -> None:
    model = text_model([offset_look(-1)])
    metric = lens.StateMetric(
        lambda states, _: torch.stack([x[-1, -48:].norm() for x in states.to_list()])
    )
    text = list(range(8))
    result = restore(model, [text], [6], metric=metric, samples=3, progress=False)
    assert abs(result.corrupted - result.clean) > 0.1
    attention, residual = result.effects("attention")[0], result.effects("residual")[0]
    whole = result.clean - result.corrupted
    # The last token reads the one before it; the rest does not matter.
    assert attention[7] == pytest.approx(whole, rel=1e-3)
    assert residual[7] == pytest.approx(whole, rel=1e-3)
    assert np.abs(attention[:7]).max() < 1e-4
    assert result.ranked("attention")[0][:2] == (0, 7)
    assert "feedforward" not in result.restored


def test_a_wrapped_model_is_traced_as_the_native_one_it_is() -> None:
    peer = tiny("gpt2")
    wrapped = restore(peer, [TEXT], [2], answer=3, samples=2, progress=False)
    assert list(wrapped.restored) == ["residual", "attention"]
    last = wrapped.restored["residual"][-1]
    assert last[-1] == pytest.approx(wrapped.clean, rel=1e-4)
    assert last[:-1] == pytest.approx(wrapped.corrupted, rel=1e-3)
    with refuses(InputError, "feedforward", "residual"):
        restore(peer, [TEXT], [2], states=["feedforward"])


def test_a_part_of_the_text_names_its_tokens() -> None:
    model = load("house-gpt")
    result = restore(
        model,
        "The old captain sailed",
        "old captain",
        states=["attention"],
        positions=[1],
        samples=1,
    )
    marked = "".join(result.tokens[position] for position in result.corrupt)
    assert marked.strip() == "old captain"
    assert np.isnan(result.errors["attention"]).all()
    measured = ~np.isnan(result.restored["attention"])
    assert measured[:, 1].all()
    assert measured.sum() == len(measured)
    with refuses(InputError, "queen", "part"):
        restore(model, "The old captain sailed", "queen")
    with refuses(InputError, "tokens", "one token"):
        restore(model, "The old captain sailed", "old", answer="captain of the ship")


def test_noise_of_a_seed_is_the_same() -> None:
    model = small(DECODERS["gpt2"])
    one, same, other = (
        restore(model, [TEXT], [1], states=["residual"], samples=2, seed=seed) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one.restored["residual"], same.restored["residual"])
    assert one.corrupted != other.corrupted


def test_ctrl_c_keeps_what_was_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = restoration._Tracing._restore, []

    def impatient(self: Any, *args: Any) -> Any:
        calls.append(args)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return original(self, *args)

    monkeypatch.setattr(restoration._Tracing, "_restore", impatient)
    result = restore(small(DECODERS["gpt2"]), [TEXT], [1], samples=2, progress=False)
    assert not result.complete
    assert (~np.isnan(result.restored["residual"])).sum() == 5
    assert "interrupted" in str(result)


def test_it_can_be_saved_and_loaded(tmp_path: Path) -> None:
    result = restore(small(DECODERS["gpt2"]), [TEXT], [1], samples=2, progress=False)
    for ending in ("json", "safetensors"):
        result.save(tmp_path / f"trace.{ending}")
        loaded = lens.load(tmp_path / f"trace.{ending}")
        assert str(loaded) == str(result)
        assert loaded.rows() == result.rows()


def test_refusals() -> None:
    model = small(DECODERS["gpt2"])
    for arguments, error, parts in (
        ({"corrupt": [9]}, InputError, ["token 9", "0 to 4"]),
        ({"corrupt": []}, InputError, ["no positions"]),
        ({"corrupt": "a word"}, InputError, ["token ids", "positions"]),
        ({"corrupt": [1], "samples": 0}, ConfigError, ["samples"]),
        ({"corrupt": [1], "noise": 0.0}, InputError, ["noise", "0"]),
    ):
        with refuses(error, *parts):
            restore(model, [TEXT], **arguments)
    with refuses(InputError, "one text"):
        restore(model, [TEXT, TEXT], [1])
    with refuses(InputError, "one text"):
        restore(small(SEQ2SEQS["t5"]), (ids((4,)), ids((3,))), [1])
    with refuses(InputError, "every token", "at"):
        restore(small(ENCODERS["tags"]), [TEXT], [1])
