"""Gates: all 80 kinds by their formula, several in a layer, and what cannot be."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.errors import ConfigError
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal
from manyheads.parts.norms import RMSNorm
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Tap, WatchContext
from tests.messages import refuses

WIDTH, HEADS, KV_HEADS, SIZE = 12, 4, 2, 6
PLACES = ("query", "key", "value", "output", "final")
GATES = [
    Gate(at=at, per=per, heads=heads, operation=operation, activation=activation)
    for at, per, heads, operation, activation in product(
        PLACES, ("head", "channel"), ("own", "shared"), ("multiply", "add"), ("sigmoid", "silu")
    )
]


def layer_with(*gates: Gate) -> Attention:
    config = AttentionConfig(
        width=WIDTH,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_size=SIZE,
        gates=gates,
        mask=Causal(),
        query_norm=RMSNorm(),
        key_norm=RMSNorm(),
    )
    layer = Attention(config)
    torch.nn.init.normal_(layer.project.weight)
    return layer


def met_by(gate: Gate) -> tuple[int, int]:
    """Heads and channels at the gate's place."""
    heads = KV_HEADS if gate.at in ("key", "value") else HEADS
    return heads, WIDTH // HEADS if gate.at == "final" else SIZE


def numbers(gate: Gate) -> int:
    heads, size = met_by(gate)
    return (heads if gate.heads == "own" else 1) * (size if gate.per == "channel" else 1)


def by_hand(layer: Attention, gates: tuple[Gate, ...], x: Tensor) -> Tensor:
    """One sequence through a layer: rows of queries, their gates, keys, values, their gates."""
    on_queries = [gate for gate in gates if gate.at in ("query", "output", "final")]
    on_keys = [gate for gate in gates if gate.at in ("key", "value")]
    rows = {"q": HEADS * SIZE} | {gate.at: numbers(gate) for gate in on_queries}
    rows |= {"k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE}
    rows |= {gate.at: numbers(gate) for gate in on_keys}
    parts = dict(zip(rows, (x @ layer.project.weight.T).split(list(rows.values()), 1), strict=True))

    def gated(at: str, value: Tensor) -> Tensor:
        for gate in gates:
            if gate.at == at:
                heads, size = met_by(gate)
                shape = (
                    -1,
                    heads if gate.heads == "own" else 1,
                    size if gate.per == "channel" else 1,
                )
                logits = parts[at].reshape(shape)
                sigmoid = 1 / (1 + torch.exp(-logits))
                opened = sigmoid if gate.activation == "sigmoid" else logits * sigmoid
                value = value * opened if gate.operation == "multiply" else value + opened
        return value

    q = F.rms_norm(gated("query", parts["q"].reshape(-1, HEADS, SIZE)), (SIZE,), eps=1e-6)
    k = F.rms_norm(gated("key", parts["k"].reshape(-1, KV_HEADS, SIZE)), (SIZE,), eps=1e-6)
    v = gated("value", parts["v"].reshape(-1, KV_HEADS, SIZE))
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * SIZE**-0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    read = gated("output", torch.einsum("hts,shd->thd", scores.softmax(-1), v))
    written = read.flatten(1) @ layer.output.weight.T
    return gated("final", written.reshape(-1, HEADS, WIDTH // HEADS)).flatten(1)


def agrees(layer: Attention, gates: tuple[Gate, ...]) -> None:
    batch = Ragged.from_list([torch.randn(length, WIDTH) for length in (5, 1, 3)])
    result = layer(batch)
    for index in range(3):
        expected = by_hand(layer, gates, batch.of(index))
        torch.testing.assert_close(result.of(index), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_every_gate_is_its_formula_and_has_its_number_of_parameters(gate: Gate) -> None:
    layer, plain = layer_with(gate), layer_with()
    counts = [sum(p.numel() for p in each.parameters()) for each in (layer, plain)]
    assert counts[0] - counts[1] == WIDTH * numbers(gate) == WIDTH * gate.rows(*met_by(gate))
    agrees(layer, (gate,))


@pytest.mark.parametrize("order", [PLACES, PLACES[::-1]])
def test_gates_at_all_places_work_together(order: tuple[str, ...]) -> None:
    gates = tuple(Gate(at=at, per="channel") for at in order)
    agrees(layer_with(*gates), gates)


def test_two_different_gates_keep_their_own_rows() -> None:
    gates = (
        Gate(at="output", per="channel", heads="shared", activation="silu"),
        Gate(at="value", per="head", operation="add"),
        Gate(at="query", per="head", heads="shared"),
    )
    agrees(layer_with(*gates), gates)


@pytest.mark.parametrize("at", PLACES)
def test_a_gates_values_can_be_watched_and_replaced(at: str) -> None:
    gate = Gate(at=at, per="channel")
    layer, plain = layer_with(gate), layer_with()
    tap = Tap[f"GATE_{at.upper()}"]
    batch = Ragged.from_list([torch.randn(length, WIDTH) for length in (4, 2)])
    record = Record([Site(0, tap)])
    layer(batch, context=WatchContext(record, layer=0))
    values = record[Site(0, tap)].values
    assert values.shape == (6, *met_by(gate))
    assert ((values > 0) & (values < 1)).all()

    class Open:
        """Holds the gate open."""

        def wants(self, site: Site) -> bool:
            return site.tap is tap

        def see(self, site: Site, value: Ragged) -> Ragged:  # noqa: ARG002
            return value.map(torch.ones_like)

    state = {name: rows.detach() for name, rows in layer.projections().items()}
    with torch.no_grad():
        plain.project.weight.copy_(torch.cat([state[name] for name in ("query", "key", "value")]))
        plain.output.weight.copy_(layer.output.weight)
    opened = layer(batch, context=WatchContext(Open(), layer=0))
    torch.testing.assert_close(opened.values, plain(batch).values)


def test_gates_no_layer_can_have_are_refused() -> None:
    with refuses(ConfigError, "2 gates at 'output': keep one"):
        layer_with(Gate(at="output"), Gate(at="output", per="channel"))
    with refuses(
        ConfigError,
        "divide width=10, got 4",
    ):
        AttentionConfig(width=10, heads=4, head_size=4, gates=(Gate(at="final"),))
