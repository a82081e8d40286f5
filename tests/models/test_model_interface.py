"""What every model has, whatever it reads."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.models.build import Model, build
from manyheads.models.model_interface import ModelInputs
from manyheads.models.readout import (
    ClassHead,
    LanguageHead,
    NoReadout,
    Readout,
    SpanHead,
    TokenHead,
)
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Tap

IDS = Ragged.from_list([torch.tensor([1, 2, 3]), torch.tensor([4, 5])])
IMAGES = (torch.zeros(3, 32, 32), torch.zeros(3, 64, 32))
PAIRS = ModelInputs(ids=IDS, source=Ragged.from_list([torch.tensor([6]), torch.tensor([7, 8])]))


def models() -> dict[str, tuple[Model, ModelInputs]]:
    return {
        "encoder": (build("tiny-encoder", seed=0), ModelInputs(ids=IDS)),
        "decoder": (
            build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0),
            ModelInputs(ids=IDS),
        ),
        "seq2seq": (
            build("transformer-base", layers=1, width=32, heads=2, vocabulary=50, seed=0),
            PAIRS,
        ),
        "vision": (
            build("vit-b16", layers=1, width=32, heads=2, seed=0),
            ModelInputs(images=IMAGES),
        ),
    }


@pytest.mark.parametrize("name", ["encoder", "decoder", "seq2seq", "vision"])
def test_every_model_runs_on_its_inputs_and_has_the_stack_of_its_readout(name: str) -> None:
    model, inputs = models()[name]
    seen = Record([Site(-1, Tap.FINAL, stack=model.readout_stack)])
    with torch.no_grad():
        output = model.run_inputs(inputs)
        model.run_hidden(inputs, seen)
    assert len(output.hidden) == len(inputs) == 2
    assert model.readout_stack in model.stacks()
    final = seen[Site(-1, Tap.FINAL, stack=model.readout_stack)]
    assert isinstance(output.hidden, Ragged)
    assert isinstance(final, Ragged)
    assert torch.equal(final.values, output.hidden.values)


def test_what_a_model_reads_and_writes_is_known_without_its_class() -> None:
    flags = {
        name: (model.reads_images, model.reads_pairs, model.generates, model.predicts_next_token)
        for name, (model, _) in models().items()
    }
    assert flags == {
        "encoder": (False, False, False, False),
        "decoder": (False, False, True, True),
        "seq2seq": (False, True, True, True),
        "vision": (True, False, False, False),
    }


@pytest.mark.parametrize(
    ("head", "output", "of_decoder"),
    [
        (LanguageHead(tied=False), "masked token", "next token"),
        (TokenHead(classes=3), "token classes", "token classes"),
        (ClassHead(classes=3), "classes", "classes"),
        (SpanHead(), "none", "none"),
        (NoReadout(), "none", "none"),
    ],
)
def test_the_readout_decides_what_a_model_predicts(
    head: Readout, output: str, of_decoder: str
) -> None:
    bodies = [models()["encoder"][0], models()["decoder"][0]]
    built: list[Any] = [build(replace(body.config, readout=head), seed=0) for body in bodies]
    assert [model.predicted_output for model in built] == [output, of_decoder]


def test_only_a_model_of_images_has_no_token_table() -> None:
    assert [name for name, (model, _) in models().items() if model.table is None] == ["vision"]


def test_sizes_count_tokens_of_source_and_target_or_patches_with_the_class_token() -> None:
    for name, sizes in {"encoder": [3, 2], "seq2seq": [4, 4], "vision": [5, 9]}.items():
        model, inputs = models()[name]
        assert inputs.sizes(model) == sizes
