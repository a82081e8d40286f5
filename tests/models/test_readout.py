"""Readouts: words, classes of sequences, classes of tokens."""

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F

from manyheads.models.build import build
from manyheads.models.readout import (
    ClassHead,
    LanguageHead,
    NoReadout,
    ReadoutTransform,
    TokenHead,
    make_readout,
    pooled,
)
from manyheads.parts.norms import LayerNorm, NoNorm
from manyheads.ragged import Lengths, Ragged
from tests.models.zoo import DECODERS, ENCODERS, VOCABULARY, WIDTH, encoder, ids, layer

Pool = Literal["first", "mean", "last"]
HOW = {
    "first": lambda sequence: sequence[0],
    "last": lambda sequence: sequence[-1],
    "mean": lambda sequence: sequence.mean(0),
}


@pytest.mark.parametrize("pool", HOW)
@pytest.mark.parametrize(
    "lengths", [(3, 1, 4), (0, 3, 0, 2, 0), (0,), (0, 0), (1,), (), (2, 0)], ids=str
)
def test_pooling_reads_each_sequence_and_nothing_of_an_empty_one(
    pool: Pool, lengths: tuple[int, ...]
) -> None:
    x = torch.randn(sum(lengths), 6, requires_grad=True)
    result = pooled(x, Lengths.of(lengths), pool)
    each = x.split(lengths) if lengths else ()
    expected = [HOW[pool](sequence) if len(sequence) else x.new_zeros(6) for sequence in each]
    assert result.shape == (len(lengths), 6)
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other)
    if x.numel():
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert gradient.isfinite().all()
        filled = sum(length > 0 for length in lengths)
        torch.testing.assert_close(gradient.sum(), torch.tensor(6.0 * filled))


@pytest.mark.parametrize("pool", HOW)
def test_a_class_head_pools_then_scores(pool: Pool) -> None:
    model = build(encoder(layer(), readout=ClassHead(classes=3, pool=pool)), seed=0)
    with torch.no_grad():
        model.readout.bias.normal_()
        output = model(ids())
    assert output.logits.shape == (5, 3)
    for hidden, logits in zip(output.hidden.to_list(), output.logits, strict=True):
        vector = HOW[pool](hidden) if len(hidden) else torch.zeros(WIDTH)
        torch.testing.assert_close(
            logits, F.linear(vector, model.readout.weight, model.readout.bias)
        )


def test_a_token_head_scores_every_token() -> None:
    model = build(encoder(layer(), readout=TokenHead(classes=3, bias=False)), seed=0)
    with torch.no_grad():
        output = model(ids())
    assert output.logits.lengths.each == output.hidden.lengths.each
    torch.testing.assert_close(output.logits.values, output.hidden.values @ model.readout.weight.T)


@pytest.mark.parametrize("bias", [True, False])
def test_a_transform_is_dense_activation_norm(bias: bool) -> None:
    transform = ReadoutTransform(activation="gelu", norm=LayerNorm(), bias=bias)
    readout = make_readout(LanguageHead(transform=transform), WIDTH, VOCABULARY)
    table, x = torch.randn(VOCABULARY, WIDTH), torch.randn(4, WIDTH)
    dense = readout.transform.dense
    assert (dense.bias is not None) == bias
    inner = F.layer_norm(F.gelu(F.linear(x, dense.weight, dense.bias)), (WIDTH,))
    result = readout(Ragged(x, Lengths.of([1, 3])), table)
    torch.testing.assert_close(result.values, inner @ table.T)


def test_a_pooler_without_norm_is_dense_and_tanh() -> None:
    head = ClassHead(classes=3, transform=ReadoutTransform(activation="tanh", norm=NoNorm()))
    readout, x = make_readout(head, WIDTH), torch.randn(4, WIDTH)
    dense = readout.transform.dense
    inner = torch.tanh(F.linear(x[[0, 1]], dense.weight, dense.bias))
    result = readout(Ragged(x, Lengths.of([1, 3])), None)
    torch.testing.assert_close(result, inner @ readout.weight.T + readout.bias)


def test_a_scale_multiplies_the_words_and_not_their_bias() -> None:
    readout = make_readout(LanguageHead(scale=0.5, bias=True), WIDTH, VOCABULARY)
    table, x = torch.randn(VOCABULARY, WIDTH), torch.randn(2, WIDTH)
    with torch.no_grad():
        readout.bias.normal_()
    result = readout(Ragged(x, Lengths.of([2])), table).values
    torch.testing.assert_close(result, 0.5 * x @ table.T + readout.bias)


def test_a_model_without_readout_answers_with_hidden_states_alone() -> None:
    config = encoder(layer(), readout=NoReadout())
    with torch.no_grad():
        output = build(config, seed=0)(ids())
    assert output.logits is None
    assert output.hidden.values.shape == (ids().values.shape[0], WIDTH)


def gradient_of_table(tied: bool) -> tuple[Any, Any]:
    """Of the words' vectors, by a loss on the scores of one text."""
    config = replace(DECODERS["llama"], readout=LanguageHead(tied=tied))
    model = build(config, seed=0)
    text = torch.tensor([[3, 5]])
    F.cross_entropy(model(text).logits[0], torch.tensor([5, 7])).backward()
    weight = model.readout.weight
    return model.embedding.tokens.weight.grad, None if weight is None else weight.grad


def test_a_tied_table_is_one_tensor_and_learns_from_both_its_uses() -> None:
    model = build(DECODERS["llama"], seed=0)
    assert model.readout.weight is None
    assert [name for name, _ in model.named_parameters() if name.startswith("readout")] == []
    gradient, _ = gradient_of_table(tied=True)
    read = torch.tensor([3, 5])
    unread = [word for word in range(VOCABULARY) if word not in read]
    # Words that were never read move only because they are scored.
    assert (gradient[unread].abs().sum(1) > 0).all()
    with torch.no_grad():
        hidden = model(torch.tensor([[3, 5]])).hidden[0]
        error = (hidden @ model.embedding.tokens.weight.T).softmax(-1)
        error[[0, 1], [5, 7]] -= 1
        scored = error.T @ hidden / 2
    torch.testing.assert_close(gradient[unread], scored[unread], rtol=1e-3, atol=1e-5)
    assert not torch.allclose(gradient[read], scored[read], atol=1e-3)


def test_an_untied_table_learns_only_from_reading() -> None:
    table, scores = gradient_of_table(tied=False)
    touched = [word for word in range(VOCABULARY) if table[word].abs().sum() > 0]
    assert touched == [3, 5]
    assert scores is not None
    assert (scores.abs().sum(1) > 0).all()


def test_a_tied_table_follows_the_embedding_when_it_changes() -> None:
    model = build(ENCODERS["bert"], seed=0)
    with torch.no_grad():
        model.embedding.tokens.weight.zero_()
        assert not model(ids()).logits.values.any()
