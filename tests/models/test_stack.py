"""Stacks: layers of any shape, and what they share."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.models.stack import Stack, StackConfig
from manyheads.parts.masks import Causal
from manyheads.parts.positions import Rotary, T5Buckets
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Record, Site, Sublayer, Tap
from tests.messages import refuses
from tests.models.zoo import (
    DECODERS,
    WIDTH,
    answer,
    encoder,
    ids,
    layer,
    own,
    small,
)


def test_layers_may_have_any_heads() -> None:
    counts = ((8, 8, 4), (3, 1, 6), (2, 2, 16), (7, 7, 6))
    layers = [
        layer(own(heads=heads, kv_heads=kv_heads, head_size=size, position=Rotary()))
        for heads, kv_heads, size in counts
    ]
    model = build(encoder(*layers), seed=0)
    for module, (heads, kv_heads, size) in zip(model.stack.layers, counts, strict=True):
        assert module.attention.project.weight.shape == ((heads + 2 * kv_heads) * size, WIDTH)
    model(ids()).logits.values.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_positions_are_worked_out_once_for_layers_that_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turned: list[tuple[float, int]] = []
    turn = Rotary.rotation

    def counted(self: Rotary, positions: Tensor, size: int, *lengths: Any) -> Any:
        turned.append((self.theta, size))
        return turn(self, positions, size, *lengths)

    monkeypatch.setattr(Rotary, "rotation", counted)
    near, far = own(position=Rotary(theta=10.0)), own(position=Rotary(theta=99.0))
    other = own(position=Rotary(theta=10.0), heads=2, head_size=16)
    model = small(encoder(layer(near), layer(far), layer(near), layer(other), layer(far)))
    with torch.no_grad():
        model(ids())
    assert turned == [(10.0, 8), (99.0, 8), (10.0, 16)]


def test_a_shared_table_is_shared_by_layers_that_agree() -> None:
    shared = own(position=T5Buckets(buckets=8, reach=9))
    fewer = own(position=T5Buckets(buckets=8, reach=9), heads=2)
    private = own(position=T5Buckets(buckets=8, reach=9, shared=False))
    stack = StackConfig(
        width=WIDTH, layers=tuple(map(layer, (shared, shared, fewer, private, private)))
    )
    tables = [name for name, _ in Stack(stack).named_parameters() if "table" in name]
    assert tables == [f"layers.{index}.attention.table.table" for index in (0, 2, 3, 4)]


def test_a_shared_table_learns_from_every_layer() -> None:
    attention = own(position=T5Buckets(buckets=8, reach=9))
    model = build(encoder(layer(attention), layer(attention)), seed=0)
    model(ids()).logits.values.square().sum().backward()
    both = model.stack.layers[0].attention.table.table.grad.clone()
    model.zero_grad()
    x = model.embedding(ids(), ids().lengths.positions)
    encoding = model.stack.layers[0].attention.encode_positions(x.lengths.positions)
    first, _ = model.stack.layers[0](x, encoding=encoding)
    # The second layer reads the same table, held still.
    still = replace(encoding, table=encoding.table.detach())
    second, _ = model.stack.layers[1](first, encoding=still)
    hidden = second.map(model.stack.final_norm)
    model.readout(hidden, model.embedding.tokens.weight).values.square().sum().backward()
    one = model.stack.layers[0].attention.table.table.grad
    assert one.abs().max() > 0
    assert not torch.allclose(both, one, rtol=1e-2)


def test_experts_of_all_layers_report_in_order() -> None:
    with torch.no_grad():
        output = answer(small(DECODERS["experts"]))
    assert len(output.router) == 2
    assert answer(small(DECODERS["llama"])).router == ()
    with torch.inference_mode():
        assert answer(small(DECODERS["experts"])).router == ()


def test_a_stack_takes_its_positions_from_outside() -> None:
    config = StackConfig(width=WIDTH, layers=(layer(own(position=Rotary(), mask=Causal())),))
    torch.manual_seed(0)
    stack = Stack(config).eval().requires_grad_(False)
    x = Ragged(torch.randn(6, WIDTH), Lengths.of([4, 2]))
    near = stack(x)[0].values
    torch.testing.assert_close(stack(x, positions=x.lengths.positions + 9)[0].values, near)
    stretched = stack(x, positions=2 * x.lengths.positions)[0].values
    assert not torch.allclose(stretched, near, atol=1e-3)


@pytest.mark.parametrize("name", DECODERS)
def test_resuming_at_any_layer_gives_the_whole_run(name: str) -> None:
    model = small(DECODERS[name])
    batch = ids()
    sites = [Site(-1, Tap.EMBEDDINGS), Site(-1, Tap.FINAL)]
    for index, config in enumerate(model.config.stack.layers):
        first = Sublayer.FEEDFORWARD if config.attention is None else Sublayer.ATTENTION
        sites.append(Site(index, Tap.BEFORE, first))
    whole = Record(sites)
    with torch.no_grad():
        expected = model(batch, watch=whole).hidden.values
        for site in sites[2:]:
            again = Record(sites)
            hidden, _ = model.stack.resume(whole[site], site.layer, watch=again)
            assert torch.equal(hidden.values, expected)
            assert [each in again for each in sites[2:]] == [
                each.layer >= site.layer for each in sites[2:]
            ]
            assert sites[0] not in again


def test_resuming_after_the_last_layer_norms_and_no_more() -> None:
    model = small(DECODERS["llama"])
    x = Ragged(torch.randn(6, WIDTH), Lengths.of([4, 2]))
    with torch.no_grad():
        result, losses = model.stack.resume(x, 2)
        torch.testing.assert_close(result.values, model.stack.final_norm(x.values))
    assert losses == ()
    with refuses(InputError, "0 to 2, got 3"):
        model.stack.resume(x, 3)
