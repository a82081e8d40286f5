"""BigBird folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BigBirdConfig,
    BigBirdModel,
)

from manyheads import Ragged, load
from manyheads.checkpoints.families.encoders.big_bird import BIG_BIRD
from manyheads.errors import ConfigError
from tests.checkpoints.peer_models import check_decoder, randomized
from tests.parity.comparing import VOCABULARY, assert_same, texts

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 200,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    # Texts of more than 14 tokens are sparse.
    "block_size": 2,
    "num_random_blocks": 1,
    "num_labels": 5,
}
CONFIGS = {
    "sparse": BigBirdConfig(**SMALL),
    "sparse, scaled, no bias": BigBirdConfig(
        **SMALL, use_bias=False, rescale_embeddings=True, hidden_act="relu"
    ),
    # With a bias it would be a BERT.
    "full": BigBirdConfig(**SMALL, attention_type="original_full", use_bias=False),
}
HEADS = {
    "words": AutoModelForMaskedLM,
    "classes": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}


def as_configured(model: Any) -> Any:
    """Their model, which after a short text would be fully attentive for good."""
    kind, inside = model.config.attention_type, getattr(model, "bert", model)
    model.register_forward_pre_hook(lambda *_: inside.set_attention_type(kind))
    return model


@pytest.mark.parametrize(
    ("name", "head"),
    [
        *(("sparse", head) for head in HEADS),
        ("sparse, scaled, no bias", "words"),
        ("full", "classes"),
    ],
)
def test_same_logits_here_and_back(name: str, head: str, tmp_path: Path) -> None:
    auto = HEADS[head]
    peer = as_configured(randomized(auto.from_config(CONFIGS[name])))
    check_decoder(peer, lambda place: as_configured(auto.from_pretrained(place)), tmp_path)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("random_blocks", [1, 2])
def test_same_states_with_the_same_random_blocks(
    random_blocks: int, training: bool, tmp_path: Path
) -> None:
    config = BigBirdConfig(**SMALL | {"num_random_blocks": random_blocks, "block_size": 4})
    peer = as_configured(randomized(BigBirdModel(config))).train(training)
    peer.save_pretrained(tmp_path)
    model: Any = load(tmp_path).train(training)
    sequences = texts((101, 36, 37, 120, 5))
    with torch.no_grad():
        expected = [peer(text[None]).last_hidden_state[0] for text in sequences]
        assert_same(model(Ragged.from_list(sequences)).hidden, expected)


@pytest.mark.parametrize("random_blocks", [1, 2, 3])
def test_a_text_gives_the_same_whatever_was_read_before(random_blocks: int, tmp_path: Path) -> None:
    blocks = {"block_size": 5, "num_random_blocks": random_blocks}
    peer = randomized(BigBirdModel(BigBirdConfig(**SMALL | blocks)))
    peer.save_pretrained(tmp_path)
    ours: Any = load(tmp_path)
    [text], [short] = texts((60,)), texts((9,))
    with torch.no_grad():
        expected = peer(text[None]).last_hidden_state[0]
        ours(Ragged.from_list([short]))
        assert_same(ours(Ragged.from_list([text, short])).hidden.of(0)[None], [expected])
        # Theirs is fully attentive from its first short text on.
        peer(short[None])
        changed = peer(text[None]).last_hidden_state[0]
    assert (changed - expected).abs().max() > 1e-3 * expected.abs().max()


def test_texts_of_the_paper_draw_as_in_the_paper(tmp_path: Path) -> None:
    config = BigBirdConfig(
        **SMALL
        | {"block_size": 64, "num_random_blocks": 3, "max_position_embeddings": 1500}
        | {"num_hidden_layers": 1, "num_attention_heads": 2}
    )
    peer = randomized(BigBirdModel(config)).train()
    peer.save_pretrained(tmp_path)
    model: Any = load(tmp_path).train()
    [text] = texts((1000,))
    with torch.no_grad():
        expected = peer(text[None]).last_hidden_state[0]
        assert_same(model(Ragged.from_list([text])).hidden, [expected])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_type": "sparse"}, "use original_full or block_sparse"),
        ({"is_decoder": True}, "is_decoder=true"),
        ({"architectures": ["BigBirdForQuestionAnswering"]}, "BigBirdForMaskedLM or a classifier"),
        ({"block_size": 0}, "block must be at least 1"),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        BIG_BIRD.read_config({"model_type": "big_bird", **SMALL, **changes})
