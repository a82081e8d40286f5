"""Known shapes have their published sizes, and a seed gives the same model each time."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.errors import ConfigError, ManyheadsError
from manyheads.models.build import build, get_config, list_configs
from manyheads.models.decoder import Decoder
from manyheads.models.encoder import Encoder
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.parts.experts import MixtureOfExperts
from tests.models.zoo import (
    DECODERS,
    ENCODERS,
    MODELS,
    SEQ2SEQS,
    VISIONS,
    answer,
    values,
)

MILLIONS = {
    "bert-base": 109.51,
    "bert-large": 335.17,
    "gpt2": 124.44,
    "gpt2-medium": 354.82,
    "gpt2-large": 774.03,
    "gpt2-xl": 1557.61,
    "modernbert-base": 149.66,
    "modernbert-large": 395.88,
    "vit-b16": 86.57,
    "vit-l16": 304.33,
    "llama-1b-shape": 1235.81,
}
ABOUT = {
    "transformer-base": (65e6, 0.04),
    "transformer-big": (213e6, 0.04),
    "gated-1.7b": (1.7e9, 0.10),
    "gated-1.7b-48": (1.7e9, 0.10),
    "moe-15b-a2.5b": (15e9, 0.05),
}


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", MILLIONS)
def test_a_known_shape_has_its_published_parameters(name: str) -> None:
    assert round(count(build(name, device="meta")) / 1e6, 2) == MILLIONS[name]


@pytest.mark.parametrize("name", ABOUT)
def test_a_shape_published_in_round_numbers_comes_near(name: str) -> None:
    published, share = ABOUT[name]
    assert count(build(name, device="meta")) == pytest.approx(published, rel=share)


def test_every_known_shape_is_held_to_a_size() -> None:
    assert set(list_configs()) == {*MILLIONS, *ABOUT, "tiny-encoder"}


def test_a_token_of_the_mixture_meets_the_published_parameters() -> None:
    model = build("moe-15b-a2.5b", device="meta")
    idle = 0.0
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            assert (module.config.count, module.config.top_k) == (128, 8)
            experts = module.expand.numel() + module.contract.numel()
            idle += experts * (1 - module.config.top_k / module.config.count)
    assert count(model) - idle == pytest.approx(2.54e9, rel=0.05)


@pytest.mark.parametrize(("name", "layers"), [("gated-1.7b", 28), ("gated-1.7b-48", 48)])
def test_gated_shapes_have_their_depths_and_gates(name: str, layers: int) -> None:
    config = get_config(name)
    assert len(config.stack.layers) == layers
    assert all(layer.attention.inner.gates for layer in config.stack.layers)


def test_council_has_eight_heads_of_sixteen() -> None:
    attention = get_config("tiny-encoder").stack.layers[0].attention.inner
    assert (attention.width, attention.heads, attention.size) == (128, 8, 16)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError) as caught:
        build("bert-huge")
    assert "there is no config named 'bert-huge'" in str(caught.value)
    for name in list_configs():
        assert name in caught.value.remedy


def test_a_known_shape_can_be_changed_and_a_config_cannot() -> None:
    changed = build("bert-base", device="meta", layers=1, vocabulary=100)
    assert len(changed.stack.layers) == 1
    assert changed.embedding.tokens.weight.shape == (100, 768)
    with pytest.raises(
        ConfigError, match=r"\['layers'\] can only be given with the name of a config: change"
    ):
        build(get_config("tiny-encoder"), layers=2)


def test_the_config_chooses_the_kind_of_model() -> None:
    for group, kind in (
        (ENCODERS, Encoder),
        (DECODERS, Decoder),
        (SEQ2SEQS, Seq2Seq),
        (VISIONS, Vision),
    ):
        for config in group.values():
            assert type(build(config, device="meta")) is kind


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_gives_the_same_weights_and_leaves_the_global_state(name: str) -> None:
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build(MODELS[name], seed=7).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    second = build(MODELS[name], seed=7).state_dict()
    other = build(MODELS[name], seed=8).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


def test_a_seed_leaves_the_generators_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeded.append)
    # That of tests seeds no other device.
    monkeypatch.setattr(torch, "manual_seed", torch.random.manual_seed)
    build(ENCODERS["bert"], seed=7)
    assert seeded == []


def test_without_a_seed_the_global_state_decides() -> None:
    torch.manual_seed(3)
    first, second = (build(ENCODERS["bert"]).embedding.tokens.weight for _ in range(2))
    torch.manual_seed(3)
    again = build(ENCODERS["bert"]).embedding.tokens.weight
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


class Allocated(TorchDispatchMode):
    """Counts the bytes that come to lie on a real device."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **kwargs or {})
        if isinstance(result, torch.Tensor) and not result.is_meta:
            self.bytes += result.nbytes
        return result


@pytest.mark.parametrize("name", MODELS)
def test_meta_takes_no_memory(name: str) -> None:
    with Allocated() as allocated:
        model = build(MODELS[name], device="meta", seed=0)
    assert allocated.bytes == 0
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_is_drawn(name: str) -> None:
    assert all(parameter.isfinite().all() for parameter in build(MODELS[name]).parameters())


def test_a_fresh_model_is_ready_to_run() -> None:
    assert not build(ENCODERS["bert"]).training


@pytest.mark.parametrize("name", MODELS)
def test_every_kind_runs_and_learns_in_bfloat16(name: str) -> None:
    half, whole = (build(MODELS[name], seed=0, dtype=dtype) for dtype in (torch.bfloat16, None))
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    whole.load_state_dict(half.state_dict())
    output = answer(half)
    result, expected = values(output.hidden), values(answer(whole).hidden)
    assert result.dtype == values(output.logits).dtype == torch.bfloat16
    error = (result.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    # The median: a token that rounding sends to another expert is another token.
    assert error.median() < 0.05
    values(output.logits).float().square().sum().backward()
    assert all(
        parameter.grad is not None and parameter.grad.isfinite().all()
        for parameter in half.parameters()
    )


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"layers": 10**9}, "layers must be at most 1,000, got 1,000,000,000"),
        ({"vocabulary": 10**13}, "10,000,000,000,000 x 32"),
        ({"positions": 10**13}, "10,000,000,000,000 x 32"),
        ({"vocabulary": 10**18}, "too large"),
        ({"hidden": 10**12}, "1,000,000,000,000"),
    ],
)
def test_a_model_that_fits_no_machine_is_refused_before_memory_is_taken(
    changes: dict[str, int], value: str
) -> None:
    with pytest.raises(ManyheadsError, match=re.escape(value)):
        build("gpt2", **{"layers": 1, "width": 32, "heads": 2, "vocabulary": 50} | changes)
