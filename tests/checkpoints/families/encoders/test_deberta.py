"""DeBERTa v2 and v3 folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DebertaV2Config,
    DebertaV2Model,
)

from manyheads import Ragged, lens, load, save, surgery
from manyheads.checkpoints.families.encoders.deberta import DEBERTA
from manyheads.errors import ConfigError, InputError
from tests.checkpoints.peer_models import assert_equal, check_decoder, randomized, same_files
from tests.parity.comparing import VOCABULARY, assert_same, each_alone, texts

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 40,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "legacy": False,
    "num_labels": 5,
}
V3 = {
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "v3": V3,
    "own projections, linear, positions added": {"type_vocab_size": 2, "max_relative_positions": 9},
    "content to position": V3 | {"pos_att_type": ["c2p"], "pooler_hidden_act": "tanh"},
    "a convolution": V3 | {"conv_kernel_size": 3, "conv_act": "gelu"},
    "a wide convolution in groups": {"conv_kernel_size": 5, "conv_groups": 4},
    "position to content": {"pos_att_type": "p2c", "position_buckets": 6, "hidden_act": "relu"},
}
HEADS = {
    "words": AutoModelForMaskedLM,
    "classes": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}


def peer_model(head: str, name: str = "v3", **changes: Any) -> Any:
    return randomized(HEADS[head].from_config(DebertaV2Config(**SMALL | CONFIGS[name] | changes)))


@pytest.mark.parametrize("name", CONFIGS)
def test_same_words_here_and_back(name: str, tmp_path: Path) -> None:
    check_decoder(peer_model("words", name), AutoModelForMaskedLM.from_pretrained, tmp_path)


@pytest.mark.parametrize("head", ["classes", "tokens"])
def test_same_classes_here_and_back(head: str, tmp_path: Path) -> None:
    check_decoder(peer_model(head), HEADS[head].from_pretrained, tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_the_older_language_head_is_read_and_an_untied_one_kept(tied: bool, tmp_path: Path) -> None:
    model = peer_model("words", legacy=True, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "theirs")
    ours: Any = load(tmp_path / "theirs")
    expected = each_alone(model, texts())
    with torch.no_grad():
        assert_same(ours(Ragged.from_list(texts())).logits, expected)
    save(ours, tmp_path / "ours")
    again = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    assert again.legacy is not tied
    assert_same(Ragged.from_list(each_alone(again, texts())), expected)
    assert_equal(load(tmp_path / "ours"), ours)


def test_a_bare_model_with_what_the_hub_stores_besides(tmp_path: Path) -> None:
    model = randomized(DebertaV2Model(DebertaV2Config(**SMALL | V3)))
    model.save_pretrained(tmp_path)
    ours: Any = load(tmp_path)
    with torch.no_grad():
        states = [model(text[None]).last_hidden_state[0] for text in texts()]
        assert_same(ours(Ragged.from_list(texts())).hidden, states)
    ours.source_config = None
    assert save(ours, tmp_path / "ours").family == "deberta-v2"
    same_files(tmp_path, tmp_path / "ours")
    file = tmp_path / "model.safetensors"
    stored = {f"deberta.{name}": tensor for name, tensor in load_file(file).items()}
    stored |= {
        "mask_predictions.dense.weight": torch.zeros(24, 24),
        "lm_predictions.lm_head.bias": torch.zeros(VOCABULARY),
        "deberta.embeddings.position_embeddings.weight": torch.zeros(40, 24),
    }
    save_file(stored, file)
    assert_equal(load(tmp_path), ours)


def test_padded_texts_and_their_gradients_are_those_of_transformers(tmp_path: Path) -> None:
    model = peer_model("words", "own projections, linear, positions added")
    model.save_pretrained(tmp_path)
    batch = Ragged.from_list(texts())
    ids, mask = batch.to_padded(), batch.with_values(batch.values >= 0).to_padded()
    ours: Any = load(tmp_path)
    result = ours(ids, mask).logits[mask]
    expected = model(ids, attention_mask=mask.long()).logits[mask]
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0)
    result.sin().sum().backward()
    expected.sin().sum().backward()
    layer, theirs_layer = ours.stack.layers[0].attention, model.deberta.encoder.layer[0]
    for mine, their in (
        (layer.table.vectors, model.deberta.encoder.rel_embeddings.weight),
        (layer.distances.key.weight, theirs_layer.attention.self.pos_key_proj.weight),
        (layer.distances.query.bias, theirs_layer.attention.self.pos_query_proj.bias),
        (layer.output.weight, theirs_layer.attention.output.dense.weight),
    ):
        scale = their.grad.abs().max()
        assert scale > 0
        torch.testing.assert_close(mine.grad / scale, their.grad / scale, atol=1e-4, rtol=0)


def test_statistics_are_those_of_their_attention_weights(tmp_path: Path) -> None:
    model = peer_model("words")
    model.save_pretrained(tmp_path)
    ours, sequences = load(tmp_path), [text for text in texts() if len(text) > 1]
    result = lens.statistics(ours, sequences, progress=False)["entropy"].ranked()
    entropy = {(address.head.layer, address.head.head): value for address, value in result}
    rows: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for text in sequences:
            for layer, weights in enumerate(model(text[None], output_attentions=True).attentions):
                rows[layer].append(-torch.special.xlogy(weights[0], weights[0]).sum(-1))
    for layer in range(2):
        expected = torch.cat(rows[layer], dim=1).mean(1)
        for head in range(3):
            assert entropy[layer, head] == pytest.approx(float(expected[head]), abs=1e-4)


def test_a_convolution_stays_when_heads_are_pruned_and_is_not_attributed(tmp_path: Path) -> None:
    peer_model("tokens", "a convolution").save_pretrained(tmp_path)
    ours: Any = load(tmp_path)
    smaller, batch = surgery.prune(ours, ["L0H1"]), Ragged.from_list(texts())
    with torch.no_grad():
        ours.stack.layers[0].attention.output.weight[:, 8:16] = 0
        assert_same(smaller(batch).logits, ours(batch).logits.to_list())
    assert save(smaller, tmp_path / "smaller").family == "manyheads"
    assert_equal(load(tmp_path / "smaller"), smaller)
    with pytest.raises(InputError, match="layer 0 has a convolution"):
        lens.attribute_logits(ours, [texts()[2]], [5])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"conv_kernel_size": 4}, "size must be odd, got 4"),
        ({"embedding_size": 12}, "embedding_size=12"),
        ({"pos_att_type": ["p2p"]}, "use c2p and p2c"),
        ({"pos_att_type": []}, "relative_attention=false"),
        ({"architectures": ["DebertaV2ForMultipleChoice"]}, "use one of DebertaV2Model"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DEBERTA.read_config({"model_type": "deberta-v2", **SMALL, **changes})
