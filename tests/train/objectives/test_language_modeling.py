"""Words to be named: losses against torch and `transformers`, and what is asked of a model."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, ModernBertConfig, ModernBertForMaskedLM

from manyheads.data.batch import Batch
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import build
from manyheads.models.readout import LanguageHead, ReadoutTransform
from manyheads.models.recipes import gpt2, modernbert
from manyheads.parts.masks import Causal
from manyheads.ragged import Ragged
from manyheads.train.objectives import CausalLM, MaskedLM, Routing, Seq2SeqLM
from tests.compiled import keep_einops_whole
from tests.messages import refuses
from tests.models.zoo import (
    DECODERS,
    ENCODERS,
    SEQ2SEQS,
    TARGETS,
    decoder,
    ids,
    layer,
    own,
    seq2seq,
    vision,
)
from tests.parity import copying
from tests.parity.comparing import VOCABULARY, texts

WORDS = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
MASKED = MaskedLM(mask=1, specials=(0, 2))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fresh(config: Any) -> Any:
    return build(config, seed=0)


def gradients(loss: Tensor, model: Any) -> list[Tensor]:
    result = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    return [each for each in result if each is not None]


def test_causal_loss_is_that_of_transformers() -> None:
    peer = GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=2, n_head=4, n_positions=32, **WORDS))
    peer.eval()
    copying.scramble(peer)
    ours = build(gpt2(width=48, heads=4, layers=2, vocabulary=VOCABULARY, positions=32))
    copying.gpt2(peer, ours)
    expected = torch.zeros(())
    for text in texts():
        if len(text) > 1:
            one = peer(text[None], labels=text[None]).loss
            expected = expected + one * (len(text) - 1)
    loss = CausalLM().loss(ours, Batch(texts=Ragged.from_list(texts())), generator())
    assert loss.targets == sum(max(len(text) - 1, 0) for text in texts())
    torch.testing.assert_close(loss.total, expected, rtol=1e-5, atol=1e-5)
    expected.backward()
    result = gradients(loss.total, ours)[0]
    wanted = peer.transformer.wte.weight.grad
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5 * float(wanted.abs().max()))


def test_masked_loss_is_that_of_transformers() -> None:
    numbers = {"pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 0}
    peer = ModernBertForMaskedLM(
        ModernBertConfig(
            hidden_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            intermediate_size=72,
            local_attention=8,
            **WORDS,
            **numbers,
        )
    ).eval()
    copying.scramble(peer)
    shape = {"width": 48, "heads": 4, "hidden": 72, "layers": 3, "window": 8}
    ours = build(modernbert(**shape, vocabulary=VOCABULARY))
    copying.modernbert(peer, ours)
    batch = Batch(texts=Ragged.from_list(texts((23, 9, 31))))
    prepared = MASKED.prepare(ours, batch, generator())
    labels = torch.full_like(batch.texts.values, -100)
    labels[prepared.positions] = prepared.labels
    expected = torch.zeros(())
    for text, settings in zip(
        prepared.batch.texts.to_list(), batch.texts.with_values(labels).to_list(), strict=True
    ):
        count = int((settings >= 0).sum())
        expected = expected + peer(text[None], labels=settings[None]).loss * count
    loss = MASKED.loss(ours, batch, generator())
    assert loss.targets == int((labels >= 0).sum()) > 10
    torch.testing.assert_close(loss.total, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_seq2seq_loss_is_torchs_with_the_words_shifted_by_hand(smoothing: float) -> None:
    model = fresh(SEQ2SEQS["2017"])
    batch = Batch(texts=ids(), others=ids(TARGETS, seed=1))
    loss = Seq2SeqLM(label_smoothing=smoothing, start=7).loss(model, batch, generator())
    shifted = [torch.cat((torch.tensor([7]), text))[: len(text)] for text in batch.others.to_list()]
    logits = model(batch.texts, Ragged.from_list(shifted)).logits.values
    expected = F.cross_entropy(
        logits, batch.others.values, label_smoothing=smoothing, reduction="sum"
    )
    assert loss.targets == sum(TARGETS)
    torch.testing.assert_close(loss.total, expected)
    for one, other in zip(gradients(loss.total, model), gradients(expected, model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


HEADS = {
    "tied": LanguageHead(),
    "own": LanguageHead(tied=False, bias=True),
    "scaled": LanguageHead(scale=0.3),
    "transformed": LanguageHead(transform=ReadoutTransform(), bias=True, scale=2.0),
}


@pytest.mark.parametrize("head", HEADS)
def test_every_head_learns_as_from_its_logits(head: str) -> None:
    model = fresh(replace(DECODERS["llama"], readout=HEADS[head]))
    texts = ids()
    loss = CausalLM().loss(model, Batch(texts=texts), generator())
    expected = torch.zeros(())
    for logits, text in zip(model(texts).logits.to_list(), texts.to_list(), strict=True):
        expected = expected + F.cross_entropy(logits[:-1], text[1:], reduction="sum")
    torch.testing.assert_close(loss.total, expected)
    for one, other in zip(gradients(loss.total, model), gradients(expected, model), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_z_loss_stands_apart_and_counts() -> None:
    model, batch = fresh(DECODERS["llama"]), Batch(texts=ids())
    plain = CausalLM().loss(model, batch, generator())
    loss = CausalLM(z_loss=0.1).loss(model, batch, generator())
    torch.testing.assert_close(loss.total, plain.total)
    logits = [each[:-1] for each in model(batch.texts).logits.to_list()]
    expected = 0.1 * torch.cat(logits).logsumexp(1).square().sum()
    torch.testing.assert_close(loss.parts["z"], expected)
    for one, other in zip(
        gradients(loss.combined, model), gradients(plain.total + expected, model), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_router_losses_are_weighted_sums_over_layers_times_the_targets() -> None:
    model, batch = fresh(DECODERS["experts"]), Batch(texts=ids())
    loss = CausalLM(routing=Routing(balance=0.5, z=0.25)).loss(model, batch, generator())
    router = model(batch.texts).router
    balance = sum(each.balance for each in router) * 0.5 * loss.targets
    torch.testing.assert_close(loss.parts["router balance"], balance)
    z = sum(each.z for each in router) * 0.25 * loss.targets
    torch.testing.assert_close(loss.parts["router z"], z)
    silent = CausalLM(routing=Routing(balance=0.0, z=0.0)).loss(model, batch, generator())
    assert not silent.parts


def test_experts_of_both_stacks_are_balanced() -> None:
    from manyheads.parts.masks import Causal
    from tests.models.zoo import EXPERTS

    config = seq2seq(
        [layer(own(), EXPERTS)],
        [layer(own(mask=Causal()), EXPERTS, cross=own(keys_from="memory"))],
    )
    model = fresh(config)
    texts, others = ids((5, 3)), ids((2, 4), seed=1)
    assert len(model(texts, others).router) == 2
    loss = Seq2SeqLM(start=0).loss(model, Batch(texts=texts, others=others), generator())
    loss.parts["router balance"].backward()
    assert model.encoder.layers[0].feedforward.router.weight.grad.abs().sum() > 0


def test_micro_batches_add_up_to_the_batch() -> None:
    model, texts = fresh(DECODERS["gpt2"]), ids()
    whole = CausalLM(z_loss=0.01).loss(model, Batch(texts=texts), generator())
    parts = [
        CausalLM(z_loss=0.01).loss(model, Batch(texts=one), generator())
        for one in texts.split((2, 3))
    ]
    assert sum(part.targets for part in parts) == whole.targets
    torch.testing.assert_close(sum(part.combined for part in parts), whole.combined)


@pytest.mark.parametrize("objective", [CausalLM(), CausalLM(z_loss=0.1), MASKED])
def test_nothing_to_guess_gives_zero_and_zero_gradients(objective: Any) -> None:
    causal = isinstance(objective, CausalLM)
    model = fresh(DECODERS["experts"] if causal else ENCODERS["modernbert"])
    alone = Ragged.from_list([torch.tensor([0]), torch.tensor([2])])
    loss = objective.loss(model, Batch(texts=alone), generator())
    assert loss.targets == 0
    assert loss.combined.item() == 0
    loss.combined.backward()
    for parameter in model.parameters():
        assert parameter.grad is None or (parameter.grad == 0).all()


def test_masked_loss_follows_the_generator_alone() -> None:
    model, batch = fresh(ENCODERS["modernbert"]), Batch(texts=ids())
    losses = [MASKED.loss(model, batch, generator(seed)).total.item() for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


def test_the_start_comes_from_the_models_own_description() -> None:
    model = fresh(SEQ2SEQS["2017"])
    with refuses(
        ConfigError,
        "the model has no start token for its decoder: set start to the id or the name of a token.",
    ):
        Seq2SeqLM().check(model)
    model.source_config = {"decoder_start_token_id": 5, "bos_token_id": 6}
    assert Seq2SeqLM().start_of(model) == 5
    model.generation = {"decoder_start_token_id": 4}
    assert Seq2SeqLM().start_of(model) == 4
    model.tokenizer = Tokenizer(WordLevel({"<s>": 3}))
    assert Seq2SeqLM(start="<s>").start_of(model) == 3
    with refuses(ConfigError, "start: the tokenizer has no token '</s>': use one of its tokens."):
        Seq2SeqLM(start="</s>").start_of(model)


def test_models_that_do_not_fit_are_refused() -> None:
    with refuses(
        ConfigError,
        "layer 0 sees the tokens that CausalLM predicts, with Full(): "
        "use Causal() or a window without `after`.",
    ):
        CausalLM().check(fresh(ENCODERS["t5"]))
    with refuses(
        ConfigError,
        "CausalLM cannot use the readout ClassHead: build the model "
        "with readout=LanguageHead(...).",
    ):
        CausalLM().check(fresh(ENCODERS["classes"]))
    with refuses(ConfigError, "MaskedLM cannot train a Vision: use a text encoder or decoder."):
        MASKED.check(fresh(vision(layer())))
    with refuses(
        ConfigError,
        "no layer sees the tokens after a masked one, with Causal(), and MaskedLM needs "
        "both sides: use CausalLM, or an encoder.",
    ):
        MASKED.check(fresh(DECODERS["gpt2"]))
    with refuses(ConfigError, "mask comes from the tokenizer", "set mask, or model.tokenizer"):
        MaskedLM().check(fresh(ENCODERS["modernbert"]))
    with refuses(
        ConfigError,
        "whole_words needs a tokenizer: give the model its tokenizer.",
    ):
        replace(MASKED, whole_words=True).check(fresh(ENCODERS["modernbert"]))
    with refuses(
        ConfigError, "label_smoothing must be in [0, 1), got 1.0: use a value such as 0.1."
    ):
        Seq2SeqLM(label_smoothing=1.0)
    with refuses(InputError, "CausalLM needs texts: give a batch of texts."):
        CausalLM().loss(fresh(DECODERS["gpt2"]), Batch(), generator())
    with refuses(InputError, "Seq2SeqLM needs pairs of texts: give texts and others."):
        Seq2SeqLM(start=0).loss(fresh(SEQ2SEQS["2017"]), Batch(texts=ids()), generator())


@pytest.mark.parametrize("name", ["llama", "experts"])
def test_autocast_stays_near_single_precision(name: str) -> None:
    model, batch = fresh(DECODERS[name]), Batch(texts=ids())
    expected = CausalLM(z_loss=0.1).loss(model, batch, generator())
    with torch.autocast("cpu", torch.bfloat16):
        result = CausalLM(z_loss=0.1).loss(model, batch, generator())
    assert result.total.dtype == torch.float32
    torch.testing.assert_close(result.combined, expected.combined, rtol=0.05, atol=0.0)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.shapes_unchecked
def test_a_step_compiles_with_its_loss_apart() -> None:
    keep_einops_whole()
    # One bare layer: shapes that are free make every operation dear to trace.
    model = fresh(decoder(layer(own(mask=Causal()), None)))
    objective = CausalLM()
    compiled = torch.compile(objective.score, dynamic=True, backend="aot_eager_default_partitioner")
    prepared = objective.prepare(model, Batch(texts=ids((5, 7))), generator())
    result, expected = compiled(model, prepared), objective.score(model, prepared)
    assert result.targets == expected.targets
    torch.testing.assert_close(result.total, expected.total)
    for one, other in zip(
        gradients(result.combined, model), gradients(expected.combined, model), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4 * float(other.abs().max()))


def test_a_start_outside_the_vocabulary_is_refused_before_any_work() -> None:
    model = fresh(SEQ2SEQS["2017"])
    words = model.config.embedding.vocabulary
    message = f"start={words} is outside the vocabulary of {words} tokens: use 0 to {words - 1}."
    with refuses(ConfigError, message):
        Seq2SeqLM(start=words).check(model)
    Seq2SeqLM(start=words - 1).check(model)
