"""Statistics of wrapped models against the weights that `transformers` itself returns."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from manyheads import lens
from manyheads.bridge.wrapped_model import wrap
from manyheads.taps import Sublayer
from tests.bridge.zoo import MODELS, arguments_of, texts_of, tiny

MEASURES = ("entropy", "previous_token", "first_token", "induction")


def eager_weights(model: Any, text: Any) -> dict[tuple[str, Sublayer], tuple[Tensor, ...]]:
    """The weights of every attention on one text, by stack and sublayer."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            result = model(**arguments_of(text), output_attentions=True)
    finally:
        model.set_attn_implementation(before)
    if not model.config.is_encoder_decoder:
        return {("main", Sublayer.ATTENTION): result.attentions}
    return {
        ("encoder", Sublayer.ATTENTION): result.encoder_attentions,
        ("decoder", Sublayer.ATTENTION): result.decoder_attentions,
        ("decoder", Sublayer.CROSS): result.cross_attentions,
    }


def ids_of(text: Any, stack: str) -> list[int] | None:
    result = arguments_of(text)
    name = "decoder_input_ids" if stack == "decoder" else "input_ids"
    return result[name][0].tolist() if name in result else None


def measured(weights: Tensor, ids: list[int] | None) -> dict[str, list[float]]:
    """The values of each measure over the queries of one head on one text."""
    values: dict[str, list[float]] = {name: [] for name in MEASURES}
    for i, row in enumerate(weights.double()):
        values["entropy"].append(float(-torch.special.xlogy(row, row).sum()))
        values["first_token"].append(float(row[0]))
        if i:
            values["previous_token"].append(float(row[i - 1]) if i <= len(row) else np.nan)
        if ids is not None and ids[i] in ids[:i]:
            after = [j + 1 for j in range(i) if ids[j] == ids[i]]
            values["induction"].append(float(row[after].sum()))
    return values


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_the_eager_weights(name: str) -> None:
    model, texts = tiny(name), texts_of(name)
    result = lens.statistics(wrap(model), texts, progress=False)
    expected: dict[tuple[str, Sublayer, int, int], dict[str, list[float]]] = {}
    for text in texts:
        for (stack, sublayer), layers in eager_weights(model, text).items():
            ids = ids_of(text, stack) if sublayer is Sublayer.ATTENTION else None
            for layer, weights in enumerate(layers):
                for head, each in enumerate(weights[0]):
                    here = expected.setdefault((stack, sublayer, layer, head), {})
                    for measure, values in measured(each, ids).items():
                        here.setdefault(measure, []).extend(values)
    assert len(result.addresses) == len(expected)
    for address in result.addresses:
        at = address.head
        here = expected[address.stack, address.sublayer, at.layer, at.head]
        for measure in MEASURES:
            crosses = address.sublayer is Sublayer.CROSS
            if measure not in result.names or (crosses and measure != "entropy"):
                continue
            if here[measure]:
                value = result.of(address)[measure]
                assert value == pytest.approx(np.mean(here[measure]), abs=1e-5), (address, measure)


@pytest.mark.parametrize("name", MODELS)
def test_a_watched_model_gives_the_same_logits(name: str) -> None:
    model, texts = tiny(name), texts_of(name)
    from manyheads.lens.inputs.texts import read_inputs
    from manyheads.taps import Record, Site, Tap

    wrapped = wrap(model)
    inputs = read_inputs(wrapped, texts)
    record = Record([Site(0, Tap.QUERY, stack=wrapped.readout_stack)])
    for number in range(len(texts)):
        with torch.no_grad():
            result = wrapped.run_inputs(inputs.select([number]), record)
            plain = model(**arguments_of(texts[number]))
        expected = plain.logits[0] if "logits" in plain else plain.last_hidden_state[0]
        got = result.hidden if result.logits is None else result.logits
        values = got if isinstance(got, Tensor) else got.values
        torch.testing.assert_close(values.reshape(expected.shape), expected, rtol=1e-4, atol=1e-4)


def test_the_lens_wraps_a_model_by_itself() -> None:
    model = tiny("llama")
    result = lens.statistics(model, texts_of("llama"), progress=False)
    wrapped = lens.statistics(wrap(model), texts_of("llama"), progress=False)
    assert result["entropy"].ranked() == wrapped["entropy"].ranked()
    assert model.config._attn_implementation != "manyheads"


def test_signatures_show_that_models_of_transformers_are_taken() -> None:
    for function in (lens.kinds, lens.ablate, lens.patterns):
        annotation = inspect.signature(function).parameters["model"].annotation
        assert annotation == "Model | PreTrainedModel"
