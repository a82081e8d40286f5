"""A run file may change the heads of any model, and what it leaves others still open."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from manyheads.attention import Attention
from manyheads.checkpoints.folder import load
from manyheads.errors import ConfigError
from manyheads.models.build import build
from manyheads.ragged import Ragged
from manyheads.train.loop.session import train
from manyheads.train.run_file.run_config import HeadOptions, parse_run, without_head_dropping
from tests.messages import refuses
from tests.train.tiny import tables, write_corpus


def test_every_attention_is_changed_and_nothing_else() -> None:
    sizes = {"layers": 2, "width": 16, "heads": 2, "hidden": 16, "vocabulary": 40}
    config = build("transformer-base", **sizes).config
    changed = HeadOptions(drop=0.25, scale="learned", dropout=0.0).apply_to_config(config)
    result = [each.config for each in build(changed).modules() if isinstance(each, Attention)]
    assert len(result) == 6
    assert {(each.drop_heads, each.head_scale) for each in result} == {(0.25, "learned")}
    assert without_head_dropping(HeadOptions(drop=0.25).apply_to_config(config)) == config
    assert HeadOptions().apply_to_config(config) == config


def test_a_model_keeps_its_weights_and_new_scales_change_nothing() -> None:
    model = build("gpt2", layers=1, width=16, heads=2, vocabulary=40, dropout=0.0, seed=0).eval()
    scaled = HeadOptions(scale="learned").apply_to_model(model).eval()
    assert sum("head_scale" in name for name, _ in scaled.named_parameters()) == 1
    ids = Ragged.from_list([torch.arange(5), torch.arange(3)])
    torch.testing.assert_close(scaled(ids).logits.values, model(ids).logits.values)


@pytest.mark.parametrize("inputs", [{"drop": 1.0}, {"dropout": -0.5}])
def test_a_share_that_is_none_is_refused(inputs: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"must be in \[0, 1\)"):
        HeadOptions(**inputs)  # type: ignore[arg-type]


def regularized(folder: Path, start: dict[str, Any], heads: dict[str, Any], out: str) -> Any:
    settings = tables(folder, steps=2)
    settings["model"] = {**start, "heads": heads}
    settings["run"]["folder"] = str(folder / out)
    return settings


def test_heads_are_dropped_in_training_and_the_model_stays_one_of_its_family(
    tmp_path: Path,
) -> None:
    write_corpus(tmp_path, documents=40)
    size = tables(tmp_path)["model"]
    train(parse_run(regularized(tmp_path, size, {}, "plain")), progress=False)
    saved = train(
        parse_run(regularized(tmp_path, size, {"drop": 0.5}, "dropped")), progress=False
    ).saved
    assert saved is not None
    assert saved.family == "gpt2"
    still = regularized(tmp_path, size, {"dropout": 0.25}, "still")
    assert "gpt2" in str(train(parse_run(still), progress=False).saved)
    one, other = ((tmp_path / run / "metrics.jsonl").read_text() for run in ("plain", "dropped"))
    assert json.loads(one.splitlines()[0])["loss"] != json.loads(other.splitlines()[0])["loss"]
    # And from a folder, with scales to be thinned out.
    settings = regularized(
        tmp_path, {"folder": str(tmp_path / "plain/model")}, {"scale": "learned"}, "scaled"
    )
    settings["regularizer"] = [{"kind": "L1Scales", "weight": 0.1}]
    train(parse_run(settings), progress=False)
    first = json.loads((tmp_path / "scaled/metrics.jsonl").read_text().splitlines()[0])
    assert first["parts"]["head scales"] == pytest.approx(0.4)
    scales = [
        each.head_scale
        for each in load(tmp_path / "scaled/model").modules()
        if isinstance(each, Attention)
    ]
    assert all(scale is not None and (scale < 1).all() for scale in scales)


def test_a_misspelt_change_is_named(tmp_path: Path) -> None:
    settings = regularized(tmp_path, {"size": "gpt2"}, {"dropp": 0.1}, "out")
    with refuses(ConfigError, "model.heads.dropp is not a known key: use model.heads.drop."):
        parse_run(settings)
