"""Arguments of public functions are refused in one line if they do not fit their annotations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from manyheads import generate, lens, parts
from manyheads.argument_checks import check_fields, checked
from manyheads.decoding.sampling import BeamSearch, Sample
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import build
from tests.messages import refuses


@checked
def function(
    count: int = 1,
    rate: float = 0.5,
    name: Literal["zero", "mean"] = "zero",
    file: Path | str | None = None,
    heads: Sequence[int] | Literal["all"] = "all",
    anything: Any = None,
    *,
    seed: int = 0,
    progress: bool = True,
) -> str:
    return f"{count} {rate} {name} {file} {heads} {anything} {seed} {progress}"


@pytest.mark.parametrize(
    ("arguments", "parts_of_message"),
    [
        ({"count": 2.5}, ("count", "an integer", "got 2.5")),
        ({"count": True}, ("count", "got True")),
        ({"rate": math.nan}, ("rate", "a number", "got nan")),
        ({"rate": "fast"}, ("rate", "'fast'")),
        ({"name": "median"}, ("name", "'zero' or 'mean'", "'median'")),
        ({"file": 5}, ("file", "path", "got 5")),
        ({"file": "a\0b"}, ("file",)),
        ({"heads": [1, 2.5]}, ("heads", "a sequence of integers or 'all'")),
        ({"heads": "some"}, ("heads", "'some'")),
        ({"seed": -1}, ("seed", "got -1")),
        ({"seed": 2**64}, ("seed",)),
        ({"progress": "no"}, ("progress", "True or False", "'no'")),
    ],
)
def test_what_does_not_fit_is_refused(
    arguments: dict[str, Any], parts_of_message: tuple[str, ...]
) -> None:
    with refuses(InputError, *parts_of_message) as caught:
        function(**arguments)
    assert "\n" not in str(caught.value)


def test_what_fits_is_passed_on() -> None:
    array = np.zeros((99, 99))
    message = function(np.int64(3), 1, "mean", Path("x"), (1, 2), array, seed=5, progress=False)
    assert message.startswith("3 1 mean x (1, 2) ")
    assert function.__name__ == "function"
    with pytest.raises(TypeError):
        function(nonsense=1)


@pytest.mark.shapes_unchecked
def test_fields_of_configs_are_checked() -> None:
    @check_fields
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Config:
        rate: float
        sizes: tuple[int, ...] = ()

    assert Config(rate=1, sizes=(2,)).sizes == (2,)
    with refuses(ConfigError, "rate", "got nan"):
        Config(rate=math.nan)
    with refuses(ConfigError, "sizes", "integers"):
        Config(rate=1, sizes=(2.5,))  # type: ignore[arg-type]
    with refuses(ConfigError, "dropout"):
        parts.MLP(width=16, hidden=32, dropout=math.nan)
    with refuses(ConfigError, "before"):
        parts.Window(before="x")  # type: ignore[arg-type]


@pytest.mark.shapes_unchecked
def test_floats_for_counts_are_refused_where_tokens_are_chosen() -> None:
    with refuses(ConfigError, "top_k", "2.5"):
        Sample(top_k=2.5)  # type: ignore[arg-type]
    with refuses(ConfigError, "num_beams", "2.5"):
        BeamSearch(num_beams=2.5)  # type: ignore[arg-type]
    model = build("gpt2", layers=1, width=16, heads=2, vocabulary=40, seed=0).eval()
    with refuses(ConfigError, "max_new_tokens", "2.5"):
        generate(model, [[1, 2]], max_new_tokens=2.5)  # type: ignore[arg-type]
    for prompts in ([[1.5, 2.0]], torch.tensor([[1.5]]), None, [None], 5):
        with pytest.raises(InputError):
            generate(model, prompts, max_new_tokens=1)  # type: ignore[arg-type,call-overload]


@pytest.mark.shapes_unchecked
def test_ids_that_are_not_integers_are_refused() -> None:
    model = build("gpt2", layers=1, width=16, heads=2, vocabulary=40, seed=0).eval()
    with refuses(InputError, "float32", ".long()"):
        model(torch.tensor([[1.0, 2.0]]))
    with refuses(InputError, "on meta", "on cpu"):
        model(torch.zeros(1, 2, dtype=torch.long, device="meta"))
    for texts in (None, 5, {"a": "b"}, torch.tensor(3), [[1.5, 2.0]], [None], b"x"):
        with pytest.raises(InputError):
            lens.statistics(model, texts, progress=False)
    with refuses(InputError, "a model", "'house-gpt'"):
        lens.statistics("house-gpt", [[1, 2]])  # type: ignore[arg-type]


def test_integers_of_numpy_are_integers() -> None:
    assert function(np.int64(3), seed=np.int64(4)).startswith("3 0.5 zero None all None 4")
    with refuses(InputError, "seed", "got -1"):
        function(seed=np.int64(-1))
