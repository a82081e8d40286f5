"""Gates: every kind by its formula, several in a layer, the controls, and what cannot be."""

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.errors import ConfigError
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal
from manyheads.parts.norms import NoNorm, Norm, Normalize, RMSNorm
from manyheads.parts.positions import Rotary
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Tap, WatchContext
from tests.messages import refuses

NO_NORM = NoNorm()
WIDTH, HEADS, KV_HEADS, SIZE = 12, 4, 2, 6
PLACES = ("query", "key", "value", "output", "final")
GATES = [
    Gate(at=at, per=per, heads=heads, operation=operation, activation=activation)
    for at, per, heads, operation, activation in product(
        PLACES, ("head", "channel"), ("own", "shared"), ("multiply", "add"), ("sigmoid", "silu")
    )
]

CONTROLS = [
    *[Gate(at=at, per="channel", activation="raised_sigmoid") for at in PLACES],
    *[Gate(at=at, per="channel", reads="nothing") for at in PLACES],
    *[Gate(at=at, per="channel", reads="itself") for at in PLACES],
    Gate(at="output", reads="nothing"),
    Gate(at="key", reads="nothing", heads="shared", operation="add", activation="silu"),
    Gate(at="value", reads="itself", per="channel", operation="add", activation="silu"),
]


def layer_with(*gates: Gate, output_norm: Norm = NO_NORM) -> Attention:
    config = AttentionConfig(
        width=WIDTH,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_size=SIZE,
        gates=gates,
        mask=Causal(),
        query_norm=RMSNorm(),
        key_norm=RMSNorm(),
        output_norm=output_norm,
    )
    layer = Attention(config)
    for parameter in (layer.project.weight, *layer.gate_parameters.values()):
        torch.nn.init.normal_(parameter)
    if output_norm != NO_NORM:
        torch.nn.init.normal_(layer.output_norm.weight)
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
    reading = [gate for gate in gates if gate.reads == "input"]
    on_queries = [gate for gate in reading if gate.at in ("query", "output", "final")]
    on_keys = [gate for gate in reading if gate.at in ("key", "value")]
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
                sources = parts | {f"no {name[5:]}": p for name, p in layer.gate_parameters.items()}
                name = at if gate.reads == "input" else f"no {at}"
                logits = value if gate.reads == "itself" else sources[name].reshape(shape)
                sigmoid = 1 / (1 + torch.exp(-logits))
                activated = {"silu": logits * sigmoid, "raised_sigmoid": (1 + sigmoid) / 2}
                opened = activated.get(gate.activation, sigmoid)
                value = value * opened if gate.operation == "multiply" else value + opened
        return value

    q = F.rms_norm(gated("query", parts["q"].reshape(-1, HEADS, SIZE)), (SIZE,), eps=1e-6)
    k = F.rms_norm(gated("key", parts["k"].reshape(-1, KV_HEADS, SIZE)), (SIZE,), eps=1e-6)
    v = gated("value", parts["v"].reshape(-1, KV_HEADS, SIZE))
    k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * SIZE**-0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    read = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
    if isinstance(layer.output_norm, Normalize):
        read = read / (read.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        read = read * layer.output_norm.weight
    read = gated("output", read)
    written = read.flatten(1) @ layer.output.weight.T
    return gated("final", written.reshape(-1, HEADS, WIDTH // HEADS)).flatten(1)


def agrees(layer: Attention, gates: tuple[Gate, ...]) -> None:
    """Output and gradients are those by hand."""
    tokens = [torch.randn(length, WIDTH, requires_grad=True) for length in (5, 1, 3)]
    result = layer(Ragged.from_list(tokens))
    expected = torch.cat([by_hand(layer, gates, x) for x in tokens])
    torch.testing.assert_close(result.values, expected, rtol=1e-4, atol=1e-5)
    pull, inputs = torch.randn_like(expected), [*tokens, *layer.parameters()]
    gradients = [
        torch.autograd.grad(values, inputs, pull, allow_unused=True)
        for values in (result.values, expected)
    ]
    for ours, by_formula in zip(*gradients, strict=True):
        if by_formula is not None:
            torch.testing.assert_close(ours, by_formula, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("gate", GATES, ids=str)
def test_every_gate_is_its_formula_and_has_its_number_of_parameters(gate: Gate) -> None:
    layer, plain = layer_with(gate), layer_with()
    counts = [sum(p.numel() for p in each.parameters()) for each in (layer, plain)]
    assert counts[0] - counts[1] == WIDTH * numbers(gate) == WIDTH * gate.rows(*met_by(gate))
    agrees(layer, (gate,))


@pytest.mark.parametrize("gate", CONTROLS, ids=str)
def test_every_control_is_its_formula_and_has_its_number_of_parameters(gate: Gate) -> None:
    layer, plain = layer_with(gate), layer_with()
    counts = [sum(p.numel() for p in module.parameters()) for module in (layer, plain)]
    per_number = {"input": WIDTH, "nothing": 1, "itself": 0}[gate.reads]
    assert counts[0] - counts[1] == per_number * numbers(gate)
    agrees(layer, (gate,))


def test_a_norm_of_head_outputs_is_its_formula_with_and_without_a_gate() -> None:
    for gates in ((), (Gate(at="output", per="channel"),), (Gate(at="final", reads="nothing"),)):
        agrees(layer_with(*gates, output_norm=RMSNorm()), gates)


def test_an_output_gate_that_reads_itself_is_silu_of_head_outputs() -> None:
    layer, plain = layer_with(Gate(at="output", per="channel", reads="itself")), layer_with()
    plain.load_state_dict(layer.state_dict())
    batch = Ragged.from_list([torch.randn(length, WIDTH) for length in (4, 2)])
    outputs = []
    for module in (layer, plain):
        record = Record([Site(0, Tap.HEAD_OUTPUT)])
        module(batch, context=WatchContext(record, layer=0))
        outputs.append(record[Site(0, Tap.HEAD_OUTPUT)].values)
    torch.testing.assert_close(outputs[0], F.silu(outputs[1]))


def test_a_rotated_query_is_gated_before_it_is_rotated() -> None:
    gate = Gate(at="query", per="channel", reads="nothing")
    config = AttentionConfig(width=WIDTH, heads=2, position=Rotary(), gates=(gate,))
    layer, plain = Attention(config), Attention(replace(config, gates=()))
    torch.nn.init.normal_(layer.gate_query)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state["project.weight"][:WIDTH] *= state.pop("gate_query").sigmoid()[:, None]
    plain.load_state_dict(state)
    batch = Ragged.from_list([torch.randn(length, WIDTH) for length in (4, 2)])
    torch.testing.assert_close(layer(batch).values, plain(batch).values)


@pytest.mark.parametrize("reads", ["nothing", "itself"])
def test_controls_keep_the_dtype_under_autocast(reads: str) -> None:
    gates = tuple(Gate(at=at, per="channel", reads=reads) for at in PLACES)
    layer = layer_with(*gates, output_norm=RMSNorm())
    batch = Ragged.from_list([torch.randn(length, WIDTH) for length in (4, 2)])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = layer(batch).values
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), layer(batch).values, atol=0.1, rtol=0.1)


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
    with refuses(ConfigError, "per='head'", 'per="channel"'):
        Gate(at="output", reads="itself")
