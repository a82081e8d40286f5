"""Routes: what a head adds to a logit, by the token that it reads."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from manyheads.errors import InputError
from manyheads.lens.attribution.direct_logits import attribute_logits
from manyheads.lens.attribution.source_tokens import token_routes
from manyheads.lens.causal.attention_links import cut
from manyheads.lens.inputs.metrics import LogitDifference
from manyheads.lens.result_types import load
from manyheads.models.build import build
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm, NoNorm, PreNorm
from manyheads.parts.positions import Rotary
from manyheads.taps import Head, Site, Tap
from tests.messages import refuses
from tests.models.zoo import (
    DECODERS,
    ENCODERS,
    VISIONS,
    decoder,
    ids,
    images,
    layer,
    own,
    small,
    writes,
)
from tests.parity.copying import scramble

TEXT = ids((9,))
GATED = (Gate(at="output"), Gate(at="value"), Gate(at="final"))
READERS = {name: DECODERS[name] for name in ("gpt2", "llama", "sinks", "capped")} | {
    "gated": decoder(*[writes(position=Rotary(), kv_heads=2, gates=GATED)] * 2),
    "normed": decoder(*[writes(output_norm=LayerNorm(), head_scale="learned")] * 2),
    "uneven": decoder(*[writes(position=Rotary(), kv_heads=(3, 1))] * 2),
}


def scrambled(config: Any) -> Any:
    model = build(config, seed=0)
    scramble(model)
    return model


@pytest.mark.parametrize("name", READERS)
def test_routes_of_a_head_sum_to_what_it_adds(name: str) -> None:
    model = scrambled(READERS[name])
    result = token_routes(model, TEXT, 3, 4, at=6)
    expected = attribute_logits(model, TEXT, [3], [4], at=[6])
    assert torch.equal(result.direct.by_head, expected.by_head)
    total = result.values.sum(1) + result.rest
    torch.testing.assert_close(total, expected.by_head[0], atol=1e-9, rtol=0)
    if name != "normed":  # A norm has a bias, which no token brings.
        torch.testing.assert_close(result.values.sum(1), expected.by_head[0], atol=1e-4, rtol=1e-4)
    assert not result.values[:, 7:].any()
    assert "strongest routes" in str(result)


def test_without_norms_a_route_is_what_its_link_adds() -> None:
    bare = layer(own(mask=Causal(), position=Rotary()), None, norm=PreNorm(NoNorm()))
    config = decoder(bare, bare)
    model = build(replace(config, stack=replace(config.stack, final_norm=NoNorm())), seed=0)
    routes = token_routes(model, TEXT, 3, 4)
    metric = LogitDifference(answer=(3,), distractor=(4,))
    for token in (0, 8):
        link = [("L1H2", "last", token)]
        without = cut(model, TEXT, link, renormalize=False, metric=metric, progress=False)
        assert float(routes.values[6, token]) == pytest.approx(-without.change, abs=1e-6)
    best = routes.ranked(1)[0]
    index = routes.heads.index(best.head)
    assert best.value == float(routes.values[index, best.token])
    assert best.weight == float(routes.weights[index, best.token])


def test_a_cut_link_has_no_route_and_an_edited_head_none_at_all() -> None:
    model = small(DECODERS["llama"])
    whole = token_routes(model, TEXT, 3)
    result = token_routes(model, TEXT, 3, links=[("L0H1", "last", 2)])
    assert result.values[1, 2] == 0.0
    assert float(result.weights[1].sum()) == pytest.approx(1.0)
    assert float(result.values[1, 1]) != float(whole.values[1, 1])
    torch.testing.assert_close(result.values.sum(1), result.direct.by_head[0], atol=1e-5, rtol=0)

    def silent(values: torch.Tensor) -> torch.Tensor:
        edited = values.clone()
        edited[:, 2] = 0.0
        return edited

    result = token_routes(model, TEXT, 3, edits={Site(0, Tap.HEAD_OUTPUT): silent})
    assert not result.values[2].any()
    assert result.direct.heads["logit"].of(Head(0, 2)) == 0.0
    assert torch.equal(result.weights[1], whole.weights[1])
    assert result.values[1].any()


def test_images_and_wrapped_models_have_routes(tmp_path: Any) -> None:
    model = small(VISIONS["vit"])
    result = token_routes(model, [images()[0]], 1)
    torch.testing.assert_close(result.values.sum(1), result.direct.by_head[0], atol=1e-5, rtol=0)
    pooled = small(ENCODERS["classes"])
    result = token_routes(pooled, TEXT, 1)
    torch.testing.assert_close(result.values.sum(1), result.direct.by_head[0], atol=1e-5, rtol=0)
    result.save(tmp_path / "routes.json")
    assert torch.equal(load(tmp_path / "routes.json").values, result.values)
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=16)
    wrapped = GPT2LMHeadModel(config).eval()
    result = token_routes(wrapped, TEXT, 3, 4, at=5)
    torch.testing.assert_close(result.values.sum(1), result.direct.by_head[0], atol=1e-5, rtol=0)


def test_routes_need_one_text() -> None:
    with refuses(InputError, "one text", "pass one text"):
        token_routes(small(DECODERS["gpt2"]), ids((3, 4)))
