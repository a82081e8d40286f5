"""The LSTM equals its formulas and torch.nn.LSTM, in one piece or several."""

import pytest
import torch
from torch import Tensor, nn

from manyheads import Ragged
from manyheads.cache import StateCache, StateSlot
from manyheads.mixers.recurrent.lstm import Lstm, LstmLayer, lstm_of_texts, naive_lstm
from manyheads.ragged import Lengths
from manyheads.train.optim.param_groups import describe_parameters

WIDTH, INNER = 3, 5


def layer_with(inner: int = INNER) -> LstmLayer:
    layer = LstmLayer(Lstm(width=WIDTH, inner=inner))
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def agree(ways: list[Tensor], leaves: list[Tensor]) -> None:
    """Both ways give the same outputs and gradients."""
    torch.testing.assert_close(ways[0], ways[1], atol=1e-5, rtol=1e-5)
    pull = torch.randn_like(ways[0])
    gradients = [torch.autograd.grad(way, leaves, pull) for way in ways]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("each", [(7, 0, 1, 4, 4), (5, 5, 5), (1,), (0, 0)])
def test_packed_texts_equal_the_formulas(each: tuple[int, ...]) -> None:
    layer, lengths = layer_with(), Lengths.of(each)
    x = torch.randn(lengths.total, WIDTH, requires_grad=True)
    h, c = torch.randn(2, len(each), INNER)
    output, (ht, ct) = lstm_of_texts(x, layer.weights, lengths, (h, c))
    texts = zip(lengths.slices(), h, c, strict=True)
    expected = [naive_lstm(x[rows], layer.weights, *states) for rows, *states in texts]
    for index, states in enumerate((ht, ct), 1):
        torch.testing.assert_close(states, torch.stack([text[index] for text in expected]))
    if lengths.total:
        agree([output, torch.cat([text[0] for text in expected])], [x, *layer.weights])


def test_it_equals_the_module_of_torch_in_outputs_and_gradients() -> None:
    layer = layer_with()
    x = torch.randn(4, 6, WIDTH, requires_grad=True)
    by_torch, _ = layer.lstm(x.transpose(0, 1))
    by_torch = by_torch.transpose(0, 1).flatten(0, 1) @ layer.output.weight.T
    ours = layer(Ragged(x.flatten(0, 1), Lengths.of([6] * 4))).values
    agree([ours, by_torch], [x, *layer.parameters()])


def test_texts_of_a_batch_never_meet() -> None:
    layer, x = layer_with(), torch.randn(24, WIDTH)
    batch = Ragged.from_list([x[:13], x[13:]])
    together = layer(batch).values
    x[:13] = torch.nan
    assert torch.equal(layer(batch.with_values(x)).values[13:], together[13:])


@torch.no_grad()
def test_texts_of_several_lengths_continue_from_the_cache() -> None:
    layer, slot = layer_with(), StateSlot(StateCache())
    texts = [torch.randn(length, WIDTH) for length in (9, 4, 6)]
    whole = layer(Ragged.from_list(texts))
    layer(Ragged.from_list([text[:3] for text in texts]), cache=slot)
    rest = layer(Ragged.from_list([text[3:] for text in texts]), cache=slot)
    for index in range(3):
        torch.testing.assert_close(rest.of(index), whole.of(index)[3:], atol=1e-5, rtol=1e-5)


def test_cells_remember_at_first_and_matrices_decay() -> None:
    layer = LstmLayer(Lstm(width=WIDTH))
    assert layer.config.size == WIDTH
    i, f, g, o = layer.lstm.bias_ih_l0.detach().chunk(4)
    assert (f == 1).all()
    assert not torch.cat([i, g, o, layer.lstm.bias_hh_l0.detach()]).any()
    decays = {name: info.decays for info in describe_parameters(layer) for name, _ in info.parts}
    assert {name for name, decayed in decays.items() if decayed} == {
        "lstm.weight_ih_l0",
        "lstm.weight_hh_l0",
        "output.weight",
    }


def test_gradients_exist_in_evaluation_too() -> None:
    layer = layer_with().eval()
    layer(Ragged.from_list([torch.randn(4, WIDTH)])).values.sum().backward()
    assert layer.lstm.weight_hh_l0.grad is not None
