"""Statistics of texts that processes share are those of one process, measure by measure."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from manyheads.errors import InputError
from manyheads.lens.measure.statistics import Statistics, statistics
from manyheads.models.build import Model, build, get_config
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Window
from manyheads.parts.positions import Alibi
from tests.processes import in_processes

# Longer ones are divided, and process 0 has all of the short ones.
LENGTHS = (200, 9, 1, 150, 300)


def texts() -> list[list[int]]:
    """Few different tokens, so that many are repeated."""
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(0, 30, (length,), generator=draw).tolist() for length in LENGTHS]


def mixed() -> Model:
    """A decoder whose layers have ALiBi and a sink, a window and a soft cap, uneven groups."""
    config = get_config("gpt2", layers=3, width=16, heads=4, vocabulary=40, positions=300)
    gate = Gate(at="output", per="head", reads="input")
    changes: list[dict[str, Any]] = [
        {"position": Alibi(), "sink": "learned", "kv_heads": 2},
        {"mask": Window(20), "softcap": 2.0, "gates": (gate,)},
        {"kv_heads": (3, 1), "sink": "learned"},
    ]
    layers = []
    for layer, change in zip(config.stack.layers, changes, strict=True):
        inner = replace(layer.attention.inner, **change)
        layers.append(replace(layer, attention=replace(layer.attention, inner=inner)))
    model = build(replace(config, stack=replace(config.stack, layers=tuple(layers))), seed=1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sink"):
                parameter.copy_(torch.linspace(-1, 2, 4))
    return model


@cache
def models() -> list[Model]:
    """Learned positions; rotary and windows to both sides; and a mixture of the rest."""
    small: dict[str, Any] = {"width": 16, "heads": 2, "vocabulary": 40, "seed": 0}
    gpt = build("gpt2", layers=1, positions=300, **small)
    return [gpt, build("modernbert-base", layers=2, hidden=16, **small), mixed()]


def measure(model: Model, context_parallel: bool) -> Statistics:
    return statistics(
        model,
        texts(),
        classes={"low": range(10), "rare": [3]},
        offsets=(-5, 3, -120),
        batch_tokens=700,
        context_parallel=context_parallel,
        progress=False,
    )


def same(result: Statistics, expected: Statistics) -> None:
    assert result.names == expected.names
    for name in expected.names:
        means, errors = expected.means[name], expected.errors[name]
        np.testing.assert_allclose(result.means[name], means, atol=2e-5, rtol=2e-4, err_msg=name)
        np.testing.assert_allclose(result.errors[name], errors, atol=2e-4, rtol=2e-3, err_msg=name)
    for activation, alone in zip(result.activations, expected.activations, strict=True):
        assert activation.largest == pytest.approx(alone.largest, rel=1e-4)
        assert activation.median == pytest.approx(alone.median, rel=1e-4)
        assert replace(activation, largest=alone.largest, median=alone.median) == alone
    for name in ("texts", "tokens", "errors_over", "class_fractions", "complete"):
        assert result.metadata[name] == expected.metadata[name]


def check(expected: Sequence[Statistics]) -> None:
    for model, alone in zip(models(), expected, strict=True):
        same(measure(model, context_parallel=True), alone)


def test_every_measure_is_that_of_one_process() -> None:
    expected = [measure(model, context_parallel=False) for model in models()]
    assert {"sink", "induction", "spread", "on_low", "offset-120", "on_no_key"} <= set(
        expected[2].names
    )
    assert in_processes(4, lambda: check(expected))


def test_what_processes_cannot_share_is_refused() -> None:
    with pytest.raises(InputError, match="torchrun"):
        measure(models()[0], context_parallel=True)
    vision = build("vit-b16", layers=1, width=16, heads=2)
    assert in_processes(1, lambda: refuse(vision, "Vision"))


def refuse(model: Model, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        statistics(model, [torch.zeros(3, 16, 16)], context_parallel=True, progress=False)
