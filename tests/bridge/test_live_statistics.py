"""Statistics of models that somebody else trains or runs."""

import copy

import pytest
import torch
from torch import nn

import manyheads
from manyheads import lens
from manyheads.errors import ConfigError, InputError
from manyheads.lens.measure.live_statistics import trainer_callback
from tests.bridge.zoo import SOURCES, tiny


def padded() -> dict[str, torch.Tensor]:
    longest = max(map(len, SOURCES))
    rows = [[*ids, *[0] * (longest - len(ids))] for ids in SOURCES]
    mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in SOURCES]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_forward_of_your_own_gives_the_statistics_of_the_lens(name: str) -> None:
    model = tiny(name)
    with manyheads.patch_attention(model) as heads, torch.no_grad():
        model(**padded())
    found, expected = heads.statistics(), lens.statistics(model, SOURCES, progress=False)
    assert set(expected.names) <= set(found.names)
    for address in expected.addresses:
        for measure, value in expected.of(address).items():
            assert found.of(address)[measure] == pytest.approx(value, abs=1e-5, nan_ok=True)


def test_gradients_stay_the_same() -> None:
    model = copy.deepcopy(tiny("llama")).train()
    inputs = padded()

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        logits = model(**inputs).logits
        logits[inputs["attention_mask"] > 0].float().logsumexp(-1).sum().backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    plain = gradients()
    with manyheads.patch_attention(model) as heads:
        watched = gradients()
    assert heads.statistics().metadata["texts"] == 2
    for one, other in zip(plain, watched, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_every_other_forward_is_measured() -> None:
    model = tiny("gpt2")
    with manyheads.patch_attention(model, every=2) as heads, torch.no_grad():
        for _ in range(4):
            model(torch.tensor([SOURCES[0]]))
    assert heads.statistics().metadata["texts"] == 2
    heads.clear()
    with pytest.raises(InputError):
        heads.statistics()
    with pytest.raises(ConfigError, match="0"):
        manyheads.patch_attention(model, every=0)


def test_the_model_inside_another_is_found() -> None:
    outer = nn.Sequential(nn.Identity())
    outer.append(tiny("bert"))
    with manyheads.patch_attention(outer) as heads, torch.no_grad():
        outer[1](**padded())
    assert heads.statistics().metadata["texts"] == 2
    with pytest.raises(InputError, match="Linear"):
        manyheads.patch_attention(nn.Linear(2, 2))


def test_a_callback_writes_for_tensorboard(tmp_path: pytest.TempPathFactory) -> None:
    model = tiny("gpt2")
    heads = manyheads.patch_attention(model)
    callback = trainer_callback(heads, str(tmp_path))
    with heads, torch.no_grad():
        model(torch.tensor([SOURCES[0]]))

    class State:
        global_step = 7

    callback.on_log(None, State(), None)
    files = list(tmp_path.iterdir())  # type: ignore[attr-defined]
    assert len(files) == 1
    assert b"entropy/L1H3" in files[0].read_bytes()
