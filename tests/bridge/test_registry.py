"""The registries and configs of `transformers` are left as they were found."""

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads import lens
from manyheads.bridge.registry import NAME, our_attention
from manyheads.bridge.wrapped_model import wrap
from manyheads.lens.measure.live_statistics import monitor
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Site, Tap
from tests.bridge.zoo import SOURCES, tiny


def test_nested_uses_switch_once_and_restore() -> None:
    model = tiny("llama")
    before = model.config._attn_implementation
    with our_attention(model):
        with our_attention(model):
            assert model.config._attn_implementation == NAME
        assert model.config._attn_implementation == NAME
    assert model.config._attn_implementation == before


def test_nothing_is_left_behind_after_an_error() -> None:
    class Fails:
        def wants(self, site: Site) -> bool:
            return site.tap is Tap.KEY

        def see(self, *_: Site | Ragged | Patterns) -> None:
            raise RuntimeError("the watcher fails")

    model = tiny("llama")
    before = model.config._attn_implementation
    model(torch.tensor([[5, 6, 7]]))
    hooks = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    wrapped = wrap(model)
    with pytest.raises(RuntimeError, match="the watcher fails"):
        wrapped(torch.tensor([[5, 6, 7]]), watch=Fails())
    assert model.config._attn_implementation == before
    assert hooks == [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_same_config_can_serve_two_models() -> None:
    first = tiny("llama")
    second = type(first)(first.config).eval()
    wrapped = wrap(first)

    class RunsTheOther:
        seen: Tensor | None = None

        def wants(self, site: Site) -> bool:
            return site.tap is Tap.KEY and site.layer == 0

        def see(self, *_: Site | Ragged | Patterns) -> None:
            with torch.no_grad():
                self.seen = second(torch.tensor([[5, 6, 7]])).logits

    watcher = RunsTheOther()
    wrapped(torch.tensor([[8, 9]]), watch=watcher)
    assert watcher.seen is not None
    with torch.no_grad():
        expected = second(torch.tensor([[5, 6, 7]])).logits
    torch.testing.assert_close(watcher.seen, expected, rtol=1e-4, atol=1e-5)


def test_threads_do_not_hear_each_other() -> None:
    models = {name: wrap(tiny(name)) for name in ("llama", "gpt2")}
    alone = {
        name: lens.statistics(model, SOURCES, progress=False) for name, model in models.items()
    }
    result: dict[str, Any] = {}

    def measure(name: str) -> None:
        for _ in range(3):
            result[name] = lens.statistics(models[name], SOURCES, progress=False)

    threads = [threading.Thread(target=measure, args=(name,)) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, each in alone.items():
        assert result[name]["entropy"].ranked() == each["entropy"].ranked()


def test_a_watched_forward_leaves_the_weights_and_the_mode() -> None:
    model = tiny("gpt2")
    before = {name: each.clone() for name, each in model.state_dict().items()}
    wrapped = wrap(model)
    record = Record([Site(0, Tap.PATTERN)])
    wrapped(torch.tensor([[5, 6, 7]]), watch=record)
    assert isinstance(record[Site(0, Tap.PATTERN)], Patterns)
    assert not model.training
    for name, each in model.state_dict().items():
        assert torch.equal(each, before[name])


def test_a_compiled_model_is_measured_and_left_as_it_was() -> None:
    model = tiny("llama")
    compiled = torch.compile(model, backend="eager")
    ids, before = torch.tensor([[5, 6, 7]]), model.config._attn_implementation
    with torch.no_grad():
        expected = compiled(ids).logits
    result = lens.statistics(compiled, SOURCES, progress=False)
    assert result["entropy"].ranked() == lens.statistics(model, SOURCES)["entropy"].ranked()
    with torch.no_grad():
        assert torch.equal(compiled(ids).logits, expected)
    assert model.config._attn_implementation == before


def test_two_models_are_measured_at_once_while_one_generates() -> None:
    models = tiny("llama"), tiny("gpt2")
    prompt = torch.tensor([[5, 6, 7]])
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = models[0].generate(prompt, **options)
    before = [model.config._attn_implementation for model in models]
    with monitor(models[0]) as first, monitor(models[1]) as second:
        written = models[0].generate(prompt, **options)
        with torch.no_grad():
            models[1](prompt)
    assert torch.equal(written, expected)
    steps = written.shape[1] - prompt.shape[1]
    assert first.statistics().metadata["texts"] == steps
    assert second.statistics().metadata["texts"] == 1
    assert [model.config._attn_implementation for model in models] == before
