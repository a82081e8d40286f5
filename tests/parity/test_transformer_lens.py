"""Patterns, detector scores and losses without a head are those of TransformerLens."""

from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers
import torch
from torch import Tensor
from transformer_lens.head_detector import detect_head
from transformer_lens.model_bridge import TransformerBridge
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from manyheads.lens.attention_maps.patterns import patterns
from manyheads.lens.attention_maps.typology import (
    detect,
    duplicate_ideal,
    induction_ideal,
    offset_ideal,
)
from manyheads.lens.causal.ablation import ablate
from manyheads.lens.measure.statistics import statistics
from manyheads.models.build import build
from manyheads.models.decoder import Decoder
from manyheads.models.recipes import gpt2
from manyheads.taps import Head
from tests.parity import copying

LAYERS, HEADS, VOCABULARY = 3, 4, 61
FIRST = "<first>"
TEXTS = {
    "a repeated block": " ".join([*(f"t{each}" for each in range(5, 25))] * 2),
    "few words, often": "t3 t4 t3 t3 t9 t4 t3 t1 t1",
}
EVERY_HEAD = [Head(layer, head) for layer in range(LAYERS) for head in range(HEADS)]


@dataclass(frozen=True)
class Both:
    """One set of weights in their house and in ours."""

    peer: Any
    ours: Decoder

    def tokens(self, text: str) -> Tensor:
        """The ids of a text after its first token, which the detectors can leave out."""
        return self.peer.to_tokens(text)[0]


@pytest.fixture(scope="module")
def both() -> Both:
    config = GPT2Config(
        n_embd=48,
        n_layer=LAYERS,
        n_head=HEADS,
        n_positions=64,
        vocab_size=VOCABULARY,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config).eval()
    copying.scramble(model)
    ours = build(gpt2(width=48, heads=HEADS, layers=LAYERS, vocabulary=VOCABULARY, positions=64))
    copying.gpt2(model, ours)
    bridge = TransformerBridge.boot_transformers("gpt2", hf_model=model, tokenizer=tokenizer())
    return Both(bridge, ours)


def tokenizer() -> PreTrainedTokenizerFast:
    """Words t1 to t60; the real one would come over the network."""
    words = {FIRST: 0} | {f"t{each}": each for each in range(1, VOCABULARY)}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=FIRST))
    split.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=split, eos_token=FIRST, unk_token=FIRST)


def ideal(name: str, ids: Tensor) -> Tensor:
    match name:
        case "previous_token_head":
            return offset_ideal(len(ids), -1)
        case "duplicate_token_head":
            return duplicate_ideal(ids)
        case _:
            return induction_ideal(ids)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_patterns_equal_those_of_transformer_lens(both: Both, text: str) -> None:
    ids = both.tokens(text)
    with torch.no_grad():
        _, cache = both.peer.run_with_cache(ids[None], remove_batch_dim=True)
    result = patterns(both.ours, [ids.tolist()])
    for head in EVERY_HEAD:
        expected = cache["pattern", head.layer][head.head]
        torch.testing.assert_close(result.of(head).weights, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("first", [True, False], ids=["all tokens", "without the first"])
@pytest.mark.parametrize("how", ["mul", "abs"])
@pytest.mark.parametrize("name", ["previous_token_head", "duplicate_token_head", "induction_head"])
def test_detectors_score_as_transformer_lens(
    both: Both, name: Any, how: Any, first: bool, text: str
) -> None:
    ids = both.tokens(text)
    with torch.no_grad():
        peer = detect_head(both.peer, text, name, exclude_bos=not first, error_measure=how)
    result = patterns(both.ours, [ids.tolist()])
    # They round "abs" to three digits.
    near = 1e-4 if how == "mul" else 5e-4 + 1e-4
    for head in EVERY_HEAD:
        ours = detect(
            result.of(head).weights, ideal(name, ids), error_measure=how, exclude_first=not first
        )
        assert ours == pytest.approx(float(peer[head.layer, head.head]), abs=near)
    assert float(peer.std()) > 0.003


def test_the_scores_of_one_pass_are_their_detectors(both: Both) -> None:
    text = TEXTS["a repeated block"]
    result = statistics(both.ours, [both.tokens(text).tolist()], progress=False)
    for column, exclude in (("induction_score", False), ("induction_score_without_first", True)):
        with torch.no_grad():
            peer = detect_head(both.peer, text, "induction_head", exclude_bos=exclude)
        for head in EVERY_HEAD:
            expected = float(peer[head.layer, head.head])
            assert result[column].of(head) == pytest.approx(expected, abs=1e-4)


def test_losses_without_a_head_equal_those_of_transformer_lens(both: Both) -> None:
    ids = both.tokens(TEXTS["a repeated block"])
    ours = ablate(both.ours, [ids.tolist()], progress=False)
    for head in EVERY_HEAD:

        def silence(spoken: Tensor, hook: Any, head: int = head.head) -> Tensor:  # noqa: ARG001
            return spoken.index_fill(2, torch.tensor([head]), 0.0)

        site = f"blocks.{head.layer}.attn.hook_z"
        with torch.no_grad():
            expected = both.peer.run_with_hooks(
                ids[None], return_type="loss", fwd_hooks=[(site, silence)]
            )
        assert ours["metric"].of(head) == pytest.approx(float(expected), abs=1e-5)
