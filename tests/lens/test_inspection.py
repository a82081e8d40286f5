"""The joined inspection says what its parts say, and comes back from disk as it was."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from manyheads import lens
from manyheads.lens.inspection import Inspection, inspect, summarize_model
from manyheads.models.build import build
from manyheads.taps import Head
from tests.studio import models

TEXTS = [[5, 6, 7, 8, 5, 6, 7, 8], [9, 10, 11, 12, 13]]


@pytest.fixture(scope="module")
def measured() -> Inspection:
    model = build("gpt2", layers=2, width=32, heads=2, vocabulary=60, seed=0)
    return inspect(model, TEXTS, sequences=4, progress=False)


def test_parts_are_those_of_the_lens(measured: Inspection) -> None:
    model = build("gpt2", layers=2, width=32, heads=2, vocabulary=60, seed=0)
    kinds = lens.kinds(model, TEXTS, sequences=4, progress=False)
    assert measured.kinds is not None
    assert measured.kinds.rows() == kinds.rows()
    alike = lens.redundancy(model, TEXTS, progress=False)
    np.testing.assert_allclose(
        measured.redundancy[0].similarity["patterns"], alike.similarity["patterns"], atol=1e-6
    )
    dead = lens.dead_heads(model, TEXTS, replace_with=None, progress=False)
    assert measured.dead.reasons == dead.reasons


@pytest.mark.parametrize("ending", [".json", ".safetensors"])
def test_what_is_saved_comes_back(measured: Inspection, tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"inspection{ending}"
    measured.save(path)
    again = lens.load(path)
    assert str(again) == str(measured)
    assert again.labels(Head(0, 0)) == measured.labels(Head(0, 0))
    assert len(again.rows()) == 4
    for name, values in measured.statistics.means.items():
        np.testing.assert_allclose(again.statistics.means[name], values)
    assert again.table().row_count == 4


def test_a_head_takes_one_line_of_the_table(measured: Inspection) -> None:
    printed = StringIO()
    console = Console(width=120, file=printed)
    console.print(measured.table())
    lines = printed.getvalue().splitlines()
    assert len(lines) == 2 + 4
    assert all(
        measured._describe(head) in line
        for head, line in zip(measured.addresses, lines[2:], strict=True)
    )


def test_an_image_model_needs_no_text() -> None:
    measured = inspect(models.vision(), progress=False)
    assert measured.complete
    assert measured.model.vocabulary is None
    assert measured.metadata["default_texts"]


def test_every_head_and_parameter_is_counted() -> None:
    model = models.decoder(layers=3)
    measured = summarize_model(model)
    assert measured.stacks == {"main": [4, 4, 4]}
    assert measured.parameters == sum(each.numel() for each in model.parameters())
    assert "12 heads" in str(measured)


def test_an_encoder_is_no_decoder() -> None:
    assert str(summarize_model(models.encoder())).startswith("An Encoder of 2 layers")
