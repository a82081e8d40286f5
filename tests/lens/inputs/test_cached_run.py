"""A run that is taken up again ends where one from the beginning ends."""

from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.lens.inputs.cached_run import ActivationEditor, CachedRun, HeadScope, head_scope
from manyheads.lens.inputs.texts import read_inputs
from manyheads.models.model_interface import ModelInputs
from manyheads.ragged import Ragged
from manyheads.taps import Sublayer, Tap
from tests.models.zoo import DECODERS, ENCODERS, SEQ2SEQS, VISIONS, small

MODELS = {
    **{f"decoder {name}": config for name, config in DECODERS.items()},
    **{f"encoder {name}": config for name, config in ENCODERS.items()},
    **{f"seq2seq {name}": config for name, config in SEQ2SEQS.items()},
    **{f"vision {name}": config for name, config in VISIONS.items()},
}


def parts_of(model: Any) -> list[HeadScope]:
    if not hasattr(model, "encoder"):
        return [head_scope(model)]
    parts = [head_scope(model, name) for name in ("encoder", "decoder")]
    return [*parts, head_scope(model, "decoder", Sublayer.CROSS)]


def given_to(model: Any, name: str) -> ModelInputs:
    if name.startswith("vision"):
        draw = torch.Generator().manual_seed(0)
        side = model.config.patches.image
        return read_inputs(model, [torch.randn(3, side, side, generator=draw) for _ in range(2)])
    texts = [[3, 5, 7, 3, 9, 11], [2, 4, 6]]
    if name.startswith("seq2seq"):
        return read_inputs(model, [(texts[0], texts[1]), (texts[1], texts[0])])
    return read_inputs(model, texts)


def silence_first(spoken: Tensor) -> Tensor:
    """The first head says nothing."""
    kept = torch.ones_like(spoken)
    kept[:, 0] = 0
    return spoken * kept


def silence_first_in_one_copy(spoken: Tensor) -> Tensor:
    one, other = spoken.chunk(2)
    return torch.cat((silence_first(one), other))


@pytest.mark.parametrize("name", MODELS)
def test_heads_that_say_something_else_lead_where_a_whole_run_leads(name: str) -> None:
    model: Any = small(MODELS[name]).eval()
    inputs = given_to(model, name)
    for part in parts_of(model):
        for layer in (part.layers[0], part.layers[-1]):
            site = part.site(layer, Tap.HEAD_OUTPUT)
            with torch.no_grad():
                trunk = CachedRun(part, inputs, layers=[layer])
                result = trunk.resume_after_heads(
                    layer, ActivationEditor({site: silence_first_in_one_copy}), copies=2
                )
                changes: tuple[dict[Any, Any], ...] = ({site: silence_first}, {})
                whole = [
                    model.run_inputs(inputs, ActivationEditor(each)).hidden for each in changes
                ]
            for values, expected in zip(result.values.chunk(2), whole, strict=True):
                assert isinstance(expected, Ragged)
                torch.testing.assert_close(values, expected.values, atol=2e-6, rtol=1e-5)
