"""Training steps with a learned bias on CUDA: T5 beside transformers, Shaw beside plain torch.

The pairs are of different lengths; the answers are compared in float32, the steps are timed under
autocast to bfloat16, neither of them compiled.
"""

from typing import Any

import torch
from side_by_side import Work, check_agreement, race, say, show
from torch import Tensor, nn
from train_bias_cpu import (
    GRADIENT_LIMIT,
    LIMIT,
    SHAPES,
    _gradient,
    _mask,
    _plain_shaw,
    _pulled,
    _same_weights,
    _texts,
)

from manyheads.attention import Attention, AttentionConfig
from manyheads.parts.positions import Shaw
from manyheads.parts.positions.relative import ShawTable

__all__ = ["run_shaw", "run_t5"]

DEVICE = "cuda"
OURS, THEIRS = "manyheads, packed", "transformers, padded"
PLAIN = "plain torch, padded"
PAIRS, SHORTEST, LONGEST = 128, 16, 256
# Steps timed together, one behind the other as in a run.
STEPS = 4


def run_t5(rounds: int) -> dict[str, float]:
    say(f"a step of a T5, {PAIRS} pairs of {SHORTEST} to {LONGEST} tokens")
    figures = {}
    for shape, sizes in SHAPES.items():
        ratio, message = _t5(sizes, rounds)
        say(f"{shape}: {message}")
        figures[f"{shape}, times transformers"] = ratio
    return figures


def _t5(sizes: dict[str, int], rounds: int) -> tuple[float, str]:
    peer, ours = (model.to(DEVICE) for model in _same_weights(sizes, 0.0))
    source, target = (_texts(seed, PAIRS, SHORTEST, LONGEST).to(DEVICE) for seed in (0, 1))
    answers = target.values
    mask = _mask(target)
    padded = {"input_ids": source.to_padded(), "attention_mask": _mask(source).long()}
    padded |= {"decoder_input_ids": target.to_padded(), "decoder_attention_mask": mask.long()}
    # Where the tokens are, without which the host would wait for their number.
    real = mask.flatten().nonzero()[:, 0]
    logits: dict[str, Work] = {
        OURS: lambda: ours(source, target).logits.values,
        THEIRS: lambda: peer(**padded).logits.flatten(0, 1)[real],
    }
    off = check_agreement(logits, truth=THEIRS, limit=LIMIT)
    first = peer.encoder.block[0].layer[0].SelfAttention
    biases = {
        OURS: ours.encoder.layers[0].attention.table.table,
        THEIRS: first.relative_attention_bias.weight,
    }
    gradients = {name: _gradient(logits[name], biases[name], answers) for name in logits}
    slope = check_agreement(gradients, truth=THEIRS, limit=GRADIENT_LIMIT)
    models = {OURS: ours, THEIRS: peer}
    steps = {name: _step(models[name], logits[name], answers) for name in logits}
    times = race(steps, device=DEVICE, rounds=rounds, warmups=2, calls=STEPS)
    return times.ratio(THEIRS, OURS), (
        f"{times.seconds(OURS) * 1e3:.1f} ms, of which the host queues "
        f"{times.host_seconds(OURS) * 1e3:.1f}, transformers {times.seconds(THEIRS) * 1e3:.1f} ms, "
        f"{times.ratio(THEIRS, OURS):.2f} times as long; logits within {off:.1e}, gradients of "
        f"the bias within {slope:.1e}"
    )


def run_shaw(rounds: int) -> dict[str, float]:
    rows, figures = [], {}
    for values in (False, True):
        name = "width 512, 8 heads" + (", with values" if values else "")
        ratio, row = _shaw(512, 8, values, rounds)
        figures[f"{name}, times plain"] = ratio
        rows.append([name, *row])
    title = f"forward and backward of a layer, {PAIRS} texts of {SHORTEST} to {LONGEST} tokens"
    show(title, ["", OURS, PLAIN, "plain by ours", "off by"], rows)
    return figures


def _shaw(width: int, heads: int, values: bool, rounds: int) -> tuple[float, list[str]]:
    position = Shaw(reach=16, values=values)
    torch.manual_seed(0)
    layer = Attention(AttentionConfig(width=width, heads=heads, position=position)).to(DEVICE)
    assert isinstance(layer.table, ShawTable)
    texts = _texts(0, PAIRS, SHORTEST, LONGEST).to(DEVICE)
    x = texts.with_values(torch.randn(texts.values.shape[0], width, device=DEVICE))
    rows, mask = x.to_padded(), _mask(x)
    real = mask.flatten().nonzero()[:, 0]
    outputs: dict[str, Work] = {
        OURS: lambda: layer(x).values,
        PLAIN: lambda: _plain_shaw(layer, position, rows, mask).flatten(0, 1)[real],
    }
    off = check_agreement(outputs, truth=PLAIN, limit=LIMIT)
    exact = {name: _pulled(outputs[name], layer.table.keys) for name in outputs}
    slope = check_agreement(exact, truth=PLAIN, limit=GRADIENT_LIMIT)
    steps = {name: _in_half(exact[name]) for name in exact}
    times = race(steps, device=DEVICE, rounds=rounds, warmups=2, calls=STEPS)
    ratio = times.ratio(PLAIN, OURS)
    milliseconds = [f"{times.seconds(name) * 1e3:.2f} ms" for name in steps]
    return ratio, [*milliseconds, f"{ratio:.2f}", f"{max(off, slope):.1e}"]


def _in_half(work: Work) -> Work:
    def half() -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16):
            return work()

    return half


def _step(model: Any, logits: Work, answers: Tensor) -> Work:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    half = _in_half(logits)

    def step() -> Tensor:
        loss = nn.functional.cross_entropy(half().float(), answers)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
