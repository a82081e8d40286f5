"""Training steps with a learned bias on the CPU: T5 beside transformers, Shaw beside plain torch.

Pairs are short and of different lengths, where the costs per sequence count most.
"""

import random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from side_by_side import Work, check_agreement, race, say, show
from torch import Tensor, nn

from manyheads.attention import Attention, AttentionConfig
from manyheads.checkpoints.folder import load
from manyheads.parts.positions import Shaw
from manyheads.parts.positions.relative import ShawTable
from manyheads.ragged import Ragged

__all__ = ["run_shaw", "run_t5"]

OURS, THEIRS = "manyheads, packed", "transformers, padded"
PLAIN = "plain torch, padded"
PAIRS, SHORTEST, LONGEST, VOCABULARY = 32, 4, 32, 1024
# Of the largest value, in float32.
LIMIT, GRADIENT_LIMIT = 1e-4, 1e-3
SHAPES: dict[str, dict[str, int]] = {
    "width 128": {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4},
    "T5-small": {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8},
}


def run_t5(rounds: int) -> dict[str, float]:
    say(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}")
    say(f"a step of a T5, {PAIRS} pairs of {SHORTEST} to {LONGEST} tokens")
    figures = {}
    for shape, sizes in SHAPES.items():
        for dropout in (0.0, 0.1):
            ratio, message = _t5(sizes, dropout, rounds)
            say(f"{shape}, dropout {dropout}: {message}")
            figures[f"{shape}{', dropout' if dropout else ''}, times transformers"] = ratio
    return figures


def _t5(sizes: dict[str, int], dropout: float, rounds: int) -> tuple[float, str]:
    peer, ours = _same_weights(sizes, dropout)
    source, target = _texts(0), _texts(1)
    (reads, read_mask), (writes, mask) = ((x.to_padded(), _mask(x)) for x in (source, target))
    padded = {"input_ids": reads, "attention_mask": read_mask.long()}
    padded |= {"decoder_input_ids": writes, "decoder_attention_mask": mask.long()}
    logits: dict[str, Work] = {
        OURS: lambda: ours(source, target).logits.values,
        THEIRS: lambda: peer(**padded).logits[mask],
    }
    agreed = ""
    # With dropout each draws its own numbers.
    if not dropout:
        off = check_agreement(logits, truth=THEIRS, limit=LIMIT)
        first = peer.encoder.block[0].layer[0].SelfAttention
        biases = {
            OURS: ours.encoder.layers[0].attention.table.table,
            THEIRS: first.relative_attention_bias.weight,
        }
        gradients = {name: _gradient(logits[name], biases[name], target.values) for name in logits}
        slope = check_agreement(gradients, truth=THEIRS, limit=GRADIENT_LIMIT)
        agreed = f"; logits within {off:.1e}, gradients of the bias within {slope:.1e}"
    models = {OURS: ours, THEIRS: peer}
    steps = {name: _step(models[name], logits[name], target.values) for name in logits}
    times = race(steps, device="cpu", rounds=rounds)
    return times.host_ratio(THEIRS, OURS), (
        f"{times.host_seconds(OURS) * 1e3:.0f} ms of core time, "
        f"transformers {times.host_seconds(THEIRS) * 1e3:.0f} ms, "
        f"{times.host_ratio(THEIRS, OURS):.2f} times as long{agreed}"
    )


def run_shaw(rounds: int) -> dict[str, float]:
    say(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}")
    table = [
        _shaw(width, heads, values, rounds)
        for width, heads in ((128, 4), (512, 8))
        for values in (False, True)
    ]
    title = f"forward and backward of a layer, {PAIRS} texts of {SHORTEST} to {LONGEST} tokens"
    show(title, ["core time", OURS, PLAIN, "plain by ours", "off by"], table)
    return {f"{row[0]}, times plain": float(row[3]) for row in table}


def _shaw(width: int, heads: int, values: bool, rounds: int) -> list[str]:
    position = Shaw(reach=16, values=values)
    torch.manual_seed(0)
    layer = Attention(AttentionConfig(width=width, heads=heads, position=position))
    assert isinstance(layer.table, ShawTable)
    texts = _texts(0)
    x = texts.with_values(torch.randn(texts.values.shape[0], width))
    rows, mask = x.to_padded(), _mask(x)
    outputs: dict[str, Work] = {
        OURS: lambda: layer(x).values,
        PLAIN: lambda: _plain_shaw(layer, position, rows, mask)[mask],
    }
    off = check_agreement(outputs, truth=PLAIN, limit=LIMIT)
    steps = {name: _pulled(outputs[name], layer.table.keys) for name in outputs}
    slope = check_agreement(steps, truth=PLAIN, limit=GRADIENT_LIMIT)
    times = race(steps, device="cpu", rounds=rounds, calls=4)
    return [
        f"width {width}, {heads} heads" + (", with values" if values else ""),
        *(f"{times.host_seconds(name) * 1e3:.1f} ms" for name in steps),
        f"{times.host_ratio(PLAIN, OURS):.2f}",
        f"{max(off, slope):.1e}",
    ]


def _texts(
    seed: int, count: int = PAIRS, shortest: int = SHORTEST, longest: int = LONGEST
) -> Ragged:
    drawn = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = [drawn.randint(shortest, longest) for _ in range(count)]
    return Ragged.from_list(
        [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]
    )


def _mask(batch: Ragged) -> Tensor:
    device = batch.values.device
    each = torch.tensor(batch.lengths.each, device=device)
    return torch.arange(batch.lengths.longest, device=device) < each[:, None]


def _same_weights(sizes: dict[str, int], dropout: float) -> tuple[Any, Any]:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, dropout_rate=dropout, decoder_start_token_id=0, **sizes
    )
    kind: Any = T5ForConditionalGeneration
    peer = kind(config)
    with TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        return peer.train(), load(folder).train()


def _gradient(logits: Work, weight: Tensor, answers: Tensor) -> Work:
    def work() -> Tensor:
        loss = nn.functional.cross_entropy(logits(), answers)
        return torch.autograd.grad(loss, weight)[0]

    return work


def _step(model: nn.Module, logits: Work, answers: Tensor) -> Work:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> Tensor:
        loss = nn.functional.cross_entropy(logits(), answers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def _pulled(output: Work, weight: Tensor) -> Work:
    """A backward pass through the whole layer; the answer is the gradient of one weight."""

    def work() -> Tensor:
        weight.grad = None
        output().square().sum().backward()
        assert weight.grad is not None
        return weight.grad.clone()

    return work


def _plain_shaw(layer: Attention, position: Shaw, x: Tensor, mask: Tensor) -> Tensor:
    """Self-attention with relative vectors, as it is usually written (arXiv 1803.02155)."""
    config, table = layer.config, layer.table
    assert isinstance(table, ShawTable)
    batch, length, _ = x.shape
    shape = (batch, length, config.heads, config.size)
    q, k, v = (each.view(shape).transpose(1, 2) for each in layer.project(x).chunk(3, dim=-1))
    at = torch.arange(length, device=x.device)
    distance = (at - at[:, None]).clamp(-position.reach, position.reach) + position.reach
    scores = q @ k.transpose(2, 3) + torch.einsum("bhtd,tsd->bhts", q, table.keys[distance])
    scores = (scores * config.score_scale).masked_fill(~mask[:, None, None], -torch.inf)
    pattern = scores.softmax(-1)
    mixed = pattern @ v
    if table.values is not None:
        mixed = mixed + torch.einsum("bhts,tsd->bhtd", pattern, table.values[distance])
    written: Tensor = layer.output(mixed.transpose(1, 2).flatten(2))
    return written
