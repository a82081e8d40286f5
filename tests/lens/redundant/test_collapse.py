"""Layers whose heads or tokens were made alike are told, the others not."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.attention_maps.overlap import overlap
from manyheads.lens.redundant.collapse import collapse
from manyheads.models.build import build
from manyheads.parts.positions import Rotary
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Sublayer, Tap
from tests.messages import refuses
from tests.models.zoo import DECODERS, SEQ2SEQS, decoder, small, writes

TEXTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2, 8], [1, 1, 2, 3], [4]]


def planted() -> Any:
    """The heads of layer 0 look alike; after layer 1 all tokens are near one vector."""
    model = build(decoder(*[writes(position=Rotary())] * 2), seed=0)
    with torch.no_grad():
        rows = model.stack.layers[0].attention.projections()
        for name in ("query", "key"):
            rows[name].copy_(rows[name][:8].repeat(4, 1))
        model.stack.layers[1].feedforward.contract.bias.fill_(100.0)
    return model


def test_each_layer_has_its_own_reasons() -> None:
    result = collapse(planted(), TEXTS, progress=False)
    assert result.head_collapse == (0,)
    assert result.token_collapse == (1,)
    assert result.layers[0].heads == pytest.approx(1, abs=1e-5)
    assert "2 of 2 layers have collapsed" in str(result)
    assert "layer 0: its heads attend alike" in str(result)
    assert "layer 1: its tokens are alike" in str(result)


@pytest.mark.parametrize("name", ["uneven", "windows and whole"])
def test_both_numbers_are_their_definitions(name: str) -> None:
    model = small(DECODERS[name])
    result = collapse(model, TEXTS, batch_tokens=7, progress=False)
    pairs = overlap(model, TEXTS, progress=False)
    for state, config in zip(result.layers, model.stack.config.layers, strict=True):
        last = Sublayer.ATTENTION if config.feedforward is None else Sublayer.FEEDFORWARD
        record = Record([Site(state.layer, Tap.AFTER, last)])
        with torch.no_grad():
            model(Ragged.from_list([torch.tensor(text) for text in TEXTS]), watch=record)
        after = record[Site(state.layer, Tap.AFTER, last)]
        assert isinstance(after, Ragged)
        cosines = [
            float(torch.cosine_similarity(text[one], text[other], dim=0))
            for text in after.to_list()
            for one in range(len(text))
            for other in range(one)
        ]
        assert state.tokens == pytest.approx(np.mean(cosines), abs=1e-5)
        mine = [a for a in pairs.addresses if a.head.layer == state.layer]
        if len(mine) < 2:
            assert state.heads is None
        else:
            of_two = [pairs.of(one, other) for one in mine for other in mine if one != other]
            assert state.heads == pytest.approx(np.mean(of_two), abs=1e-5)


def test_a_stack_of_two_is_read_by_name(tmp_path: Path) -> None:
    model = small(SEQ2SEQS["one layer looks back"])
    texts = [([1, 2, 3], [4, 5, 6]), ([7, 8], [9, 1])]
    assert len(collapse(model, texts, stack="encoder", progress=False).layers) == 1
    result = collapse(model, texts, progress=False)
    assert [state.heads is None for state in result.layers] == [False, True, False]
    assert len(result.frame()) == result.table().row_count == 3
    for ending in ("json", "safetensors"):
        result.save(tmp_path / f"found.{ending}")
        assert lens.load(tmp_path / f"found.{ending}") == result


def test_a_threshold_that_is_none_is_refused() -> None:
    with refuses(InputError, "heads_above", "got 3.0", "-1 to 1"):
        collapse(small(DECODERS["gpt2"]), TEXTS, heads_above=3.0)
