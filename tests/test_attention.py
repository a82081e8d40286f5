"""The layer gives what PyTorch's and plain einsums give, for every choice of its parts."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from manyheads.attention import Attention, AttentionConfig
from manyheads.errors import ConfigError, InputError, KernelError, ShapeError
from manyheads.parts.masks import Causal, Full, Mask, Window
from manyheads.parts.norms import LayerNorm, RMSNorm
from manyheads.parts.positions import Alibi, AttentionPosition, Rotary, Shaw, T5Buckets
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Record, Site, Tap, WatchContext
from tests.kernels.oracle import t5_bucket
from tests.messages import refuses

POSITIONS: dict[str, AttentionPosition] = {
    "rotary": Rotary(),
    "part rotary": Rotary(fraction=0.5, theta=100.0),
    "alibi": Alibi(),
    "t5": T5Buckets(buckets=8, reach=10),
    "shaw": Shaw(reach=2),
    "shaw with values": Shaw(reach=2, values=True),
}


def made(**choices: Any) -> Attention:
    """A layer whose every parameter is drawn, so that none of them can be forgotten."""
    layer = Attention(AttentionConfig(**{"width": 12, "heads": 4, "head_size": 8} | choices))
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.eval()


def drawn(*each: int, width: int = 12) -> Ragged:
    return Ragged.from_list([torch.randn(length, width) for length in each])


def spread(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def turned(x: Tensor, rotary: Rotary) -> Tensor:
    """Channels i and i + half as one complex number, turned by position times frequency."""
    half = int(x.shape[-1] * rotary.fraction) // 2
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    frequency = rotary.theta ** (-torch.arange(half) / half)
    angle = torch.arange(x.shape[0])[:, None, None] * frequency
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)


def naive(layer: Attention, x: Tensor, memory: Tensor | None = None) -> Tensor:
    """One sequence through the layer, written out."""
    config, source = layer.config, x if memory is None else memory
    heads, size = config.heads, config.size
    rows = layer.projections()
    bias = dict.fromkeys(rows, 0.0)
    if layer.project.bias is not None:
        biases = [layer.project.bias]
        biases += [layer.project_memory.bias] if layer.project_memory is not None else []
        joined = torch.cat(biases).split([len(each) for each in rows.values()])
        bias = dict(zip(rows, joined, strict=True))
    q, k, v = (
        (y @ rows[name].T + bias[name]).unflatten(1, (-1, size))
        for name, y in (("query", x), ("key", source), ("value", source))
    )
    q, k = layer.query_norm(q), layer.key_norm(k)
    if isinstance(config.position, Rotary):
        q, k = turned(q, config.position), turned(k, config.position)
    k, v = spread(k, heads), spread(v, heads)
    scores = torch.einsum("thd,shd->hts", q, k)
    place = torch.arange(max(len(x), len(source)))
    distance = place[None, : len(source)] - place[: len(x), None]
    near = distance.clamp(-2, 2) + 2
    if isinstance(config.position, Shaw):
        scores = scores + torch.einsum("thd,tsd->hts", q, layer.table.keys[near])
    scores = scores * (size**-0.5 if config.scale == "root" else config.scale)
    if isinstance(config.position, Alibi):
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
        scores = scores - slopes[:, None, None] * distance.abs()
    if isinstance(config.position, T5Buckets):
        buckets = [[t5_bucket(int(d), 8, 10, True) for d in row] for row in distance]
        scores = scores + layer.table.table[torch.tensor(buckets)].permute(2, 0, 1)
    length = torch.full((1, 1), len(source))
    seen = config.mask.allows(place[: len(x), None], place[None, : len(source)], length)
    scores = scores.masked_fill(~seen, -torch.inf)
    if layer.sink is not None:
        sink = layer.sink[:, None, None].expand(-1, len(x), 1)
        pattern = torch.cat((scores, sink), -1).softmax(-1)[..., :-1]
    else:
        pattern = scores.softmax(-1)
    read = torch.einsum("hts,shd->thd", pattern, v)
    if isinstance(config.position, Shaw) and config.position.values:
        read = read + torch.einsum("hts,tsd->thd", pattern, layer.table.values[near])
    if layer.head_scale is not None:
        read = read * layer.head_scale[:, None]
    return layer.output(read.flatten(1))


def agrees(layer: Attention, *each: int) -> None:
    """Output and every gradient of a ragged batch are those of its sequences written out."""
    batch = drawn(*each)
    leaves = [batch.values.requires_grad_(), *layer.parameters()]
    result = layer(batch).values
    expected = torch.cat([naive(layer, sequence) for sequence in batch.to_list()])
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    pull = torch.randn_like(result)
    gradients, others = (torch.autograd.grad((y * pull).sum(), leaves) for y in (result, expected))
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mask", [Full(), Causal()])
@pytest.mark.parametrize("bias", ["none", "all"])
def test_multi_head_attention_is_pytorchs(mask: Mask, bias: str) -> None:
    peer = nn.MultiheadAttention(12, 4, bias=bias == "all", batch_first=True)
    ours = Attention(AttentionConfig(width=12, heads=4, mask=mask, bias=bias))
    with torch.no_grad():
        ours.project.weight.copy_(peer.in_proj_weight)
        ours.output.weight.copy_(peer.out_proj.weight)
        if bias == "all":
            ours.project.bias.copy_(peer.in_proj_bias.normal_())
            ours.output.bias.copy_(peer.out_proj.bias.normal_())
    batch = drawn(5, 2, 7)
    x = batch.to_padded()
    padding = torch.arange(7) >= torch.tensor([[5], [2], [7]])
    future = torch.ones(7, 7).triu(1).bool() if mask == Causal() else None
    expected, _ = peer(x, x, x, key_padding_mask=padding, attn_mask=future, need_weights=False)
    expected = Ragged.from_padded(expected, ~padding)
    torch.testing.assert_close(ours(batch).values, expected.values)


@given(
    kv_heads=st.integers(1, 3),
    share=st.integers(1, 3),
    size=st.sampled_from([2, 5, 8]),
    each=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    bias=st.sampled_from(["none", "inputs", "all"]),
)
def test_any_number_of_heads_of_any_size_is_a_plain_einsum(
    kv_heads: int, share: int, size: int, each: list[int], bias: str
) -> None:
    layer = made(heads=kv_heads * share, kv_heads=kv_heads, head_size=size, bias=bias)
    agrees(layer, *each)


@pytest.mark.parametrize("mask", [Full(), Causal(), Window(2, 1)], ids=str)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_is_its_formula(position: str, kv_heads: int, mask: Mask) -> None:
    agrees(made(position=POSITIONS[position], kv_heads=kv_heads, mask=mask), 5, 1, 3)


@pytest.mark.parametrize(
    "choices",
    [
        {"scale": 1.0},
        {"sink": "learned"},
        {"head_scale": "learned"},
        {"query_norm": RMSNorm(), "key_norm": RMSNorm()},
        {"query_norm": LayerNorm(), "position": Rotary()},
        {"key_norm": RMSNorm(centered=True), "bias": "inputs"},
        {"sink": "learned", "head_scale": "learned", "position": Alibi(), "bias": "all"},
    ],
    ids=str,
)
def test_every_choice_is_its_formula(choices: dict[str, Any]) -> None:
    agrees(made(kv_heads=2, mask=Causal(), **choices), 4, 1, 6)


@pytest.mark.parametrize("kernel", ["reference", "fused", "banded", "batched"])
def test_the_kernel_named_is_the_kernel_that_runs(kernel: str) -> None:
    layer = made(mask=Window(2, 2), position=Rotary(), kernel=kernel)
    agrees(layer, 7, 0, 3)
    with refuses(
        KernelError,
        "there is no kernel 'fast'",
        "auto, reference, fused, banded, batched, window, varlen, flex, step",
    ):
        made(kernel="fast")(drawn(3))


@pytest.mark.parametrize(
    ("bias", "count"), [("none", 0), ("inputs", 32 + 2 * 16), ("all", 32 + 2 * 16 + 12)]
)
def test_parameters_are_as_many_as_those_of_the_shape(bias: str, count: int) -> None:
    layer = made(kv_heads=2, bias=bias)
    weights = 12 * (32 + 2 * 16) + 32 * 12
    assert sum(p.numel() for p in layer.parameters()) == weights + count


def test_projections_are_views_of_their_rows() -> None:
    layer = made(kv_heads=2)
    with torch.no_grad():
        layer.projections()["value"].zero_()
    assert [bool(rows.any()) for rows in layer.project.weight.split([32, 16, 16])] == [1, 1, 0]


def test_a_batch_of_nothing_gives_nothing() -> None:
    layer = made(mask=Causal())
    assert layer(drawn(0, 0)).lengths.each == (0, 0)
    empty = Ragged(torch.zeros(0, 12), Lengths.of([]))
    assert layer(empty).values.shape == (0, 12)


def test_a_layer_without_a_table_uses_the_one_handed_in() -> None:
    config = AttentionConfig(width=12, heads=4, position=T5Buckets(buckets=8, reach=10))
    owner, guest = Attention(config), Attention(config, owns_table=False)
    guest.load_state_dict(owner.state_dict(), strict=False)
    assert "table.table" not in guest.state_dict()
    batch = drawn(4, 2)
    encoding = owner.encode_positions(batch.lengths.positions)
    assert torch.equal(guest(batch, encoding=encoding).values, owner(batch).values)


# Said once by PyTorch on a CPU without bfloat16.
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype: torch.dtype) -> None:
    layer = made(mask=Causal(), position=Rotary(), kv_heads=2, query_norm=RMSNorm())
    batch = drawn(9, 4)
    expected = layer(batch).values
    result = layer.to(dtype)(batch.map(lambda values: values.to(dtype))).values
    assert result.dtype == dtype
    scale = expected.abs().max()
    torch.testing.assert_close(result.float() / scale, expected / scale, rtol=0, atol=4e-2)


def test_cross_attention_reads_a_memory_of_another_length() -> None:
    layer = made(keys_from="memory", kv_heads=2, bias="all")
    batch, memory = drawn(3, 5, 0), drawn(4, 2, 3)
    result = layer(batch, memory=memory)
    for index in range(2):
        expected = naive(layer, batch.of(index), memory.of(index))
        torch.testing.assert_close(result.of(index), expected, rtol=1e-4, atol=1e-5)


def test_a_memory_kept_is_a_memory_read() -> None:
    layer = made(keys_from="memory")
    batch, memory = drawn(3, 5), drawn(4, 2)
    kept = layer.remember(memory)
    assert torch.equal(layer(batch, memory=kept).values, layer(batch, memory=memory).values)


def test_an_empty_memory_leaves_the_bias_alone() -> None:
    layer = made(keys_from="memory", bias="all")
    batch = drawn(3, 2)
    values = batch.values.requires_grad_()
    result = layer(batch, memory=drawn(0, 4))
    torch.testing.assert_close(result.of(0), layer.output.bias.expand(3, 12))
    result.values.sum().backward()
    assert not values.grad.isnan().any()
    assert not values.grad[:3].any()


def head_output(layer: Attention, batch: Ragged) -> Tensor:
    record = Record([Site(0, Tap.HEAD_OUTPUT)])
    layer(batch, context=WatchContext(record, layer=0))
    return record[Site(0, Tap.HEAD_OUTPUT)].values


def test_drop_head_drops_whole_heads_of_a_sequence_and_scales_up_the_rest() -> None:
    layer = made(drop_heads=0.5)
    batch = drawn(6, 3, 1)
    full = head_output(layer, batch)
    layer.train()
    for _ in range(20):
        ratio = head_output(layer, batch) / full
        for sequence in batch.with_values(ratio).to_list():
            factors = sequence[0, :, 0]
            torch.testing.assert_close(sequence, factors[:, None].expand_as(sequence))
            kept = int((factors != 0).sum())
            expected = torch.full((kept,), 4 / max(kept, 1))
            torch.testing.assert_close(factors[factors != 0], expected)


def test_drop_head_keeps_the_mean_and_its_share() -> None:
    torch.manual_seed(0)
    layer = made(drop_heads=0.25).train()
    batch = drawn(*[1] * 4000)
    ratio = head_output(layer, batch) / head_output(layer.eval(), batch)
    dropped = (ratio[..., 0] == 0).float()
    assert dropped.mean().item() == pytest.approx(0.25, abs=0.01)
    # All four heads are lost once in 256 sequences; of the rest the mean is one.
    torch.testing.assert_close(ratio.mean((0, 2)), torch.full((4,), 1 - 0.25**4), rtol=0, atol=0.04)


def test_dropout_acts_in_training_alone() -> None:
    torch.manual_seed(0)
    plain = made(mask=Causal())
    layer = made(mask=Causal(), dropout=0.3)
    layer.load_state_dict(plain.state_dict())
    batch = drawn(5, 3)
    expected = plain(batch).values
    assert torch.equal(layer(batch).values, expected)
    layer.train()
    draws = torch.stack([layer(batch).values.detach() for _ in range(150)])
    assert draws.std(0).min() > 0
    error = (draws.mean(0) - expected).abs() / draws.std(0)
    assert error.max() < 0.45


def test_explain_names_the_kernel_and_the_reasons() -> None:
    lengths = Lengths.of([400])
    layer = made(mask=Window(8), position=Alibi())
    encoding = layer.encode_positions(lengths.positions)
    assert layer.explain(lengths, lengths, encoding).kernel == "banded"
    learned = made(mask=Window(8), sink="learned")
    choice = learned.explain(lengths, lengths, None)
    assert choice.kernel == "batched"
    assert [name for name, _ in choice.skipped] == ["banded", "fused"]


def test_inputs_that_do_not_fit_are_refused() -> None:
    with refuses(ShapeError, "8 channels, and the layer's width is 12"):
        made()(drawn(3, width=8))
    cross = made(keys_from="memory")
    with refuses(InputError, "cross-attention got no memory: pass memory="):
        cross(drawn(3))
    with refuses(ShapeError, "2 sequences, and the memory 1: give one memory per sequence"):
        cross(drawn(3, 2), memory=drawn(4))
    with refuses(InputError, "takes no memory", 'keys_from="memory"'):
        made().remember(drawn(3))


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        (
            {"width": 768, "heads": 12, "kv_heads": 5},
            "kv_heads must divide heads=12 (1, 2, 3, 4, 6 or 12), got 5",
        ),
        (
            {"width": 768, "heads": 7},
            "heads must divide width=768, got 7: use 3, 4, 6 or 8 heads, or set head_size.",
        ),
        ({"width": 8, "heads": 0}, "heads must be at least 1, got 0"),
        (
            {"width": 12, "heads": 4, "dropout": 1.0},
            "dropout must be in [0, 1), got 1.0",
        ),
        (
            {"width": 12, "heads": 4, "drop_heads": -0.1},
            "drop_heads must be in [0, 1), got -0.1",
        ),
        (
            {"width": 12, "heads": 4, "position": Rotary()},
            "head size 3 x fraction 1 gives 3 rotated channels: choose an even number",
        ),
        (
            {"width": 12, "heads": 4, "position": Alibi(), "keys_from": "memory"},
            "the memory is another one: use NoPosition() in cross-attention",
        ),
    ],
)
def test_configs_that_contradict_themselves_are_refused(
    choices: dict[str, Any], message: str
) -> None:
    with refuses(ConfigError, message):
        AttentionConfig(**choices)


def test_a_config_is_a_value() -> None:
    choices = {"width": 16, "heads": 4, "mask": Causal() & Window(3), "position": Rotary()}
    assert AttentionConfig(**choices) == AttentionConfig(**choices)
    assert len({AttentionConfig(**choices), AttentionConfig(**choices)}) == 1


class Mixer:
    """Answers with what it is given, or leaves the output to the kernels."""

    def __init__(self, answer: Tensor | None) -> None:
        self.answer = answer
        self.calls: list[tuple[Site, Any]] = []

    def wants(self, site: Site) -> bool:  # noqa: ARG002
        return False

    def see(self, site: Site, value: Any) -> None: ...

    def mix(self, site: Site, *inputs: Any) -> Tensor | None:
        self.calls.append((site, inputs))
        return self.answer


def test_a_watcher_may_mix_the_values_itself() -> None:
    layer, batch = made(), drawn(5, 3)
    plain = layer(batch)
    silent = Mixer(None)
    assert torch.equal(layer(batch, context=WatchContext(silent, layer=2)).values, plain.values)
    (site, (query, key, value, request)) = silent.calls[0]
    assert site == Site(2, Tap.MIXED)
    assert query.shape == key.shape == value.shape == (8, 4, 8)
    assert request.queries.each == (5, 3)
    zero = Mixer(torch.zeros_like(query))
    written = layer(batch, context=WatchContext(zero, layer=2)).values
    assert torch.equal(written, layer.output(torch.zeros(8, 32)))
