"""Last tokens that run alone give what whole texts give."""

from typing import Any

import pytest
import torch

from manyheads.bridge.wrapped_model import wrap
from manyheads.lens.causal.last_token_runs import LastTokenRuns, decodes_last_token, last_rows
from manyheads.lens.inputs.cached_run import head_scope
from manyheads.mixers import LinearAttention
from manyheads.models.build import eval_mode
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.model_interface import ModelInputs
from manyheads.ragged import Ragged
from manyheads.taps import Site, Tap
from tests.bridge.zoo import tiny
from tests.lens.causal.test_patching import Put
from tests.models.zoo import DECODERS, WIDTH, decoder, ids, small

NATIVE = ["gpt2", "llama", "windows and whole", "alibi", "gates", "sinks", "both norms", "parallel"]
WRAPPED = ["llama", "gemma2"]
FINAL = Site(-1, Tap.FINAL)


def batch_for(model: Any) -> Ragged:
    return ids((5, 1, 7)) if model.native else ids((5, 2, 7))


def check(model: Any) -> None:
    batch = batch_for(model)
    scope, rows = head_scope(model), last_rows(batch.lengths)
    site = scope.site(1, Tap.HEAD_OUTPUT)
    entering = Site(1, Tap.BEFORE)
    generator = torch.Generator().manual_seed(0)
    with eval_mode(model), torch.no_grad():
        runs = LastTokenRuns(scope, ModelInputs(ids=batch))
        new = torch.randn(runs.head_outputs(1).shape, generator=generator)
        added = torch.randn(runs.run(1).shape, generator=generator)

        def whole(changes: dict[Site, Any]) -> torch.Tensor:
            put = Put({at: over_last(change) for at, change in changes.items()}, [FINAL])
            model.run_inputs(ModelInputs(ids=batch), put)
            return put.recorded[FINAL].values[rows]

        def over_last(change: Any) -> Any:
            return lambda values: values.index_copy(0, rows, change(values[rows]))

        plain = whole({})
        for result, expected in (
            (runs.hidden, plain),
            (runs.run(0), plain),
            (runs.run(1, {site: lambda _: new}), whole({site: lambda _: new})),
            (runs.run(0, {site: lambda _: new}), whole({site: lambda _: new})),
            (runs.run(1, added=added), whole({entering: lambda x: x + added})),
            # Nothing of a run is left for the next.
            (runs.run(1), plain),
        ):
            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NATIVE)
def test_last_tokens_alone_are_those_of_whole_texts(name: str) -> None:
    model = small(DECODERS[name])
    assert decodes_last_token(head_scope(model))
    check(model)


@pytest.mark.parametrize("name", WRAPPED)
def test_wrapped_models_run_whole_texts(name: str) -> None:
    model = wrap(tiny(name))
    assert not decodes_last_token(head_scope(model))
    check(model)


def test_models_with_mixers_run_whole_texts() -> None:
    mixer = LayerConfig(
        attention=None, mixer=Branch(LinearAttention(width=WIDTH, heads=2)), feedforward=None
    )
    model = small(decoder(mixer, mixer))
    scope = head_scope(model)
    assert not decodes_last_token(scope)
    batch = ids((4, 6))
    with eval_mode(model), torch.no_grad():
        runs = LastTokenRuns(scope, ModelInputs(ids=batch))
        torch.testing.assert_close(runs.run(1), runs.hidden)
