"""Encoders: every token may see both ways, as far as its mask lets it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.models.build import build
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import EncoderConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.masks import Blocks, Causal, Full, GlobalTokens, Mask, Window
from tests.models.zoo import ENCODERS, VOCABULARY, WIDTH, encoder, ids, layer, own, small


def moved(config: EncoderConfig, changed: int, length: int = 12) -> list[int]:
    """The tokens whose answer changes when one word does."""
    model, text = small(config), ids((length,)).values
    other = text.clone()
    other[changed] = (text[changed] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(text[None]).hidden[0], model(other[None]).hidden[0]
    return (before != after).any(-1).nonzero().flatten().tolist()


SEES: dict[str, tuple[Mask, Callable[[int, int], bool]]] = {
    "all": (Full(), lambda query, key: min(query, key) >= 0),
    "causal": (Causal(), lambda query, key: key <= query),
    "window": (Window(2, 1), lambda query, key: query - 2 <= key <= query + 1),
    "blocks": (Blocks(4, before=0, after=0), lambda query, key: query // 4 == key // 4),
    "longformer": (
        Window(1, 1) | GlobalTokens((0,)),
        lambda query, key: abs(query - key) <= 1 or 0 in (query, key),
    ),
}


@pytest.mark.parametrize("changed", [0, 5, 11])
@pytest.mark.parametrize("name", SEES)
def test_a_word_moves_only_those_who_see_it(name: str, changed: int) -> None:
    mask, sees = SEES[name]
    expected = [query for query in range(12) if sees(query, changed)]
    assert moved(encoder(layer(own(mask=mask))), changed) == expected


def test_windows_reach_further_layer_by_layer() -> None:
    local = layer(own(mask=Window(1, 1)))
    assert moved(encoder(local), 6) == [5, 6, 7]
    assert moved(encoder(local, local), 6) == [4, 5, 6, 7, 8]
    assert moved(encoder(local, layer(None), local, local), 6) == list(range(3, 10))


def test_without_positions_order_does_not_matter() -> None:
    model, text = small(encoder(layer(), layer())), ids((9,)).values
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        straight, shuffled = model(text[None]).hidden[0], model(text[order][None]).hidden[0]
    torch.testing.assert_close(shuffled, straight[order], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "modernbert", "longformer", "t5", "shaw"])
def test_with_positions_order_matters(name: str) -> None:
    model, text = small(ENCODERS[name]), ids((9,)).values
    with torch.no_grad():
        straight, turned = model(text[None]).hidden[0], model(text.flip(0)[None]).hidden[0]
    assert not torch.allclose(turned, straight.flip(0), atol=1e-2)


def test_an_embedding_of_another_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="the embedding has width 16, and the stack 32: give bo"):
        EncoderConfig(
            embedding=Embedding(vocabulary=5, width=16),
            stack=StackConfig(width=WIDTH, layers=(layer(),)),
        )


def loss_of(model: torch.nn.Module, labels: Tensor) -> Tensor:
    logits = model(ids((6, 3))).logits.values
    return torch.nn.functional.cross_entropy(logits, labels)


def test_an_encoder_learns_a_batch_by_heart() -> None:
    model = build(ENCODERS["modernbert"], seed=0).train()
    labels = torch.randint(VOCABULARY, (9,), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = loss_of(model, labels).detach()
    for _ in range(12):
        optimizer.zero_grad()
        loss = loss_of(model, labels)
        loss.backward()
        optimizer.step()
    assert loss < 0.5 * first
