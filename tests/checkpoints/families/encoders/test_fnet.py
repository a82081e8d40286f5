"""FNet folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    FNetConfig,
    FNetForPreTraining,
    FNetModel,
)

from manyheads import Ragged, load
from manyheads.checkpoints.families.encoders.fnet import FNET
from manyheads.checkpoints.onnx_file import save_onnx
from manyheads.errors import ConfigError, InputError
from manyheads.mixers import Fourier
from tests.checkpoints.peer_models import check_decoder, randomized
from tests.parity.comparing import VOCABULARY, assert_same, texts

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 80,
}
CONFIGS = {
    "fnet": FNetConfig(**SMALL),
    "relu, other eps": FNetConfig(
        **SMALL | {"hidden_size": 15}, hidden_act="relu", layer_norm_eps=1e-3, num_labels=5
    ),
}
HEADS = {
    "words": AutoModelForMaskedLM,
    "classes": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}


@pytest.mark.parametrize(
    ("name", "head"),
    [("fnet", head) for head in HEADS] + [("relu, other eps", "words")],
)
def test_same_logits_here_and_back(name: str, head: str, tmp_path: Path) -> None:
    peer = randomized(HEADS[head].from_config(CONFIGS[name]))
    check_decoder(peer, HEADS[head].from_pretrained, tmp_path)


def test_same_states_and_answers(tmp_path: Path) -> None:
    bare = randomized(FNetModel(CONFIGS["fnet"]))
    bare.save_pretrained(tmp_path / "bare")
    span = randomized(AutoModelForQuestionAnswering.from_config(CONFIGS["fnet"]))
    span.save_pretrained(tmp_path / "span")
    ours: Any = load(tmp_path / "bare")
    answers: Any = load(tmp_path / "span")
    batch = Ragged.from_list(texts())
    with torch.no_grad():
        expected = [bare(text[None]).last_hidden_state[0] for text in texts()]
        assert_same(ours(batch).hidden, expected)
        starts = [span(text[None]).start_logits[0] for text in texts()]
        result = answers(batch).logits.values[:, 0]
    torch.testing.assert_close(result, torch.cat(starts), atol=1e-4, rtol=0)


def test_a_pretrained_model_loads_without_its_next_sentence_task(tmp_path: Path) -> None:
    peer = randomized(FNetForPreTraining(CONFIGS["fnet"]))
    peer.save_pretrained(tmp_path)
    model: Any = load(tmp_path)
    with torch.no_grad():
        expected = [peer(text[None]).prediction_logits[0] for text in texts()]
        assert_same(model(Ragged.from_list(texts())).logits, expected)
    assert model.config.stack.layers[0].mixer.inner == Fourier(width=24)
    with pytest.raises(InputError, match="a projected embedding"):
        save_onnx(model, tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "selu"}, "hidden_act='selu'"),
        ({"architectures": ["FNetForMultipleChoice"]}, "use one of FNetModel, FNetForMaskedLM"),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        FNET.read_config({"model_type": "fnet", **SMALL, **changes})
