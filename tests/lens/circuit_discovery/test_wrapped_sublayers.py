"""Circuits of models of transformers: the same as of the same models opened natively."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from manyheads.checkpoints.folder import load
from manyheads.errors import NativeModelError
from manyheads.lens.circuit_discovery.circuit import circuit
from manyheads.lens.circuit_discovery.edge_scores import Level, Method
from manyheads.lens.inputs.metrics import LogitDifference
from tests.messages import refuses

METRIC = LogitDifference(answer=(1,) * 3, distractor=(2,) * 3)
CLEAN = [[5, 9, 8, 7, 6], [4, 8, 12], [11, 3, 14, 6]]
CORRUPTED = [[5, 9, 20, 7, 6], [4, 15, 12], [11, 13, 14, 6]]
COMMON = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4}


@cache
def outside(name: str) -> Any:
    import transformers

    configs = {
        "grouped keys": transformers.LlamaConfig(**COMMON, **HEADS, num_key_value_heads=2),
        "parallel": transformers.GPTNeoXConfig(**COMMON, **HEADS, rotary_pct=1.0),
        "normed writes": transformers.Gemma3TextConfig(
            **COMMON, **HEADS, num_key_value_heads=2, head_dim=4, sliding_window=2
        ),
    }
    torch.manual_seed(0)
    config = configs[name]
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.1)
    return model


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def native(name: str) -> Any:
        folder = tmp_path_factory.mktemp("model")
        outside(name).save_pretrained(folder)
        return load(folder)

    return native


@pytest.mark.parametrize("name", ["grouped keys", "parallel", "normed writes"])
@pytest.mark.parametrize(
    ("method", "level"),
    [("exact", "edge"), ("eap", "edge"), ("atp*", "edge"), ("eap-ig-activations", "head")],
)
def test_scores_are_those_of_the_native_model(
    opened: Any, name: str, method: Method, level: Level
) -> None:
    wrapped, native = (
        circuit(model, CLEAN, CORRUPTED, METRIC, method, level, steps=1, progress=False)
        for model in (outside(name), opened(name))
    )
    assert (wrapped.readers, wrapped.writers) == (native.readers, native.writers)
    np.testing.assert_allclose(wrapped.scores, native.scores, atol=1e-5)


@pytest.mark.parametrize("name", ["grouped keys", "parallel", "normed writes"])
def test_circuits_are_evaluated_as_in_the_native_model(opened: Any, name: str) -> None:
    results = [
        circuit(model, CLEAN, CORRUPTED, METRIC, "eap", progress=False)
        for model in (outside(name), opened(name))
    ]
    edges = results[0].top(30)
    for replacement in ("corrupted", "mean", "zero"):
        values = [result.evaluate(edges, replacement, progress=False) for result in results]
        torch.testing.assert_close(*values, atol=1e-5, rtol=1e-5)


def test_rules_of_relevance_need_a_native_model() -> None:
    with refuses(NativeModelError, "relp"):
        circuit(outside("parallel"), CLEAN, CORRUPTED, METRIC, "relp", progress=False)
