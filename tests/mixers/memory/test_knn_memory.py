"""The memory of nearest keys against its definition, token by token."""

import pytest
import torch
from torch import Tensor

from manyheads import Ragged
from manyheads.cache import StateCache, StateSlot
from manyheads.errors import ConfigError
from manyheads.mixers.memory.knn_memory import KnnMemory, KnnMemoryLayer

WIDTH, HEADS = 8, 2


def made(window: int, memory: int, top_k: int) -> KnnMemoryLayer:
    torch.manual_seed(0)
    config = KnnMemory(width=WIDTH, heads=HEADS, window=window, memory=memory, top_k=top_k)
    layer = KnnMemoryLayer(config)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return layer


def read(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (key @ query * query.shape[-1] ** -0.5).softmax(0) @ value


def by_token(layer: KnnMemoryLayer, text: Tensor) -> Tensor:
    config, outputs = layer.config, []
    parts = [part.unflatten(1, (HEADS, -1)) for part in layer.project(text).chunk(3, dim=-1)]
    for token in range(len(text)):
        edge = max(token + 1 - config.window, 0)
        heads = []
        for head in range(HEADS):
            query, key, value = (part[:, head] for part in parts)
            local = read(query[token], key[edge : token + 1], value[edge : token + 1])
            old = slice(max(edge - config.memory, 0), edge)
            stored_key, stored_value = key[old].detach(), value[old].detach()
            if len(stored_key):
                scores = stored_key @ query[token]
                best = scores.topk(min(config.top_k, len(scores))).indices
                remembered = read(query[token], stored_key[best], stored_value[best])
                gate = layer.memory_gate[head].sigmoid()
                local = gate * remembered + (1 - gate) * local
            heads.append(local)
        outputs.append(layer.output(torch.cat(heads)))
    return torch.stack(outputs)


@pytest.mark.parametrize(("window", "memory", "top_k"), [(3, 7, 2), (4, 30, 5), (70, 4, 9)])
def test_outputs_and_gradients_are_those_of_tokens(window: int, memory: int, top_k: int) -> None:
    layer, texts = made(window, memory, top_k), [torch.randn(90, WIDTH), torch.randn(5, WIDTH)]
    gradients = []
    for run in ("ragged", "by token"):
        inputs = [text.clone().requires_grad_() for text in texts]
        if run == "ragged":
            result = layer(Ragged.from_list(inputs)).values
        else:
            result = torch.cat([by_token(layer, text) for text in inputs])
        layer.zero_grad()
        result.sin().sum().backward()
        gradients.append(
            [result.detach(), *(text.grad for text in inputs)]
            + [parameter.grad.clone() for parameter in layer.parameters()]
        )
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=5e-5, rtol=1e-4)


@torch.no_grad()
def test_the_memory_goes_on_and_stays_bounded() -> None:
    layer, text = made(3, 7, 2), torch.randn(40, WIDTH)
    slot, sizes, result = StateSlot(StateCache()), [], []
    for start, stop in ((0, 2), (2, 25), (25, 26), (26, 40)):
        result.append(layer(Ragged.from_list([text[start:stop]]), cache=slot).values)
        sizes.append(slot.store.nbytes)
    torch.testing.assert_close(torch.cat(result), by_token(layer, text), atol=1e-5, rtol=1e-5)
    assert len(set(sizes)) == 1


def test_impossible_configs_are_refused() -> None:
    with pytest.raises(ConfigError, match="memory must be at least 1, got 0"):
        KnnMemory(width=8, heads=2, window=4, memory=0)
