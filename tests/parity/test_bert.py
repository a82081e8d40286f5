"""BERT gives the words and the classes of `transformers`."""

import torch
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification

from manyheads.models.build import build
from manyheads.models.readout import ClassHead, ReadoutTransform
from manyheads.models.recipes import bert
from manyheads.parts.norms import NoNorm
from manyheads.ragged import Ragged
from tests.parity import copying
from tests.parity.comparing import VOCABULARY, assert_same, each_alone, texts

THEIRS = BertConfig(
    hidden_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=80,
    vocab_size=VOCABULARY,
    max_position_embeddings=40,
    num_labels=5,
    attn_implementation="eager",
)
OURS = {
    "width": 48,
    "heads": 4,
    "hidden": 80,
    "layers": 3,
    "vocabulary": VOCABULARY,
    "positions": 40,
}


def test_masked_words_are_those_of_transformers() -> None:
    peer, ours = BertForMaskedLM(THEIRS).eval(), build(bert(**OURS))
    copying.scramble(peer)
    copying.bert(peer, ours)
    with torch.no_grad():
        assert_same(ours(Ragged.from_list(texts())).logits, each_alone(peer, texts()))


def test_classes_of_typed_texts_are_those_of_transformers() -> None:
    pooler = ReadoutTransform(activation="tanh", norm=NoNorm())
    ours = build(bert(**OURS, readout=ClassHead(classes=5, transform=pooler)))
    peer = BertForSequenceClassification(THEIRS).eval()
    copying.scramble(peer)
    copying.bert(peer, ours)
    types = [(torch.arange(len(text)) > len(text) // 2).long() for text in texts()]
    with torch.no_grad():
        result = ours(Ragged.from_list(texts()), types=Ragged.from_list(types)).logits
        expected = [
            peer(text[None], token_type_ids=kinds[None]).logits[0]
            for text, kinds in zip(texts(), types, strict=True)
        ]
    assert result.shape == (len(types), 5)
    assert_same(result, expected)
