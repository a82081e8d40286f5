"""The recorded step of decoders of many kinds on CUDA, beside the same step launched by the host.

Windows, caps, sinks, gates, experts, state-space and delta layers, and a hybrid of the shape of
Qwen3-Next; eight layers each, random weights, bfloat16. No peer has all of them, so the judge is
our own step without a recording, whose logits are compared at every step.
"""

import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from side_by_side import race, show
from torch import Tensor

from manyheads import AttentionConfig, DecoderConfig, build
from manyheads.cache import DynamicCache
from manyheads.decoding.steps.cached import CachedSteps
from manyheads.decoding.steps.cuda_graph import CudaGraphSteps
from manyheads.mixers import GatedDelta, Mamba2
from manyheads.models import Branch, Embedding, LanguageHead, LayerConfig, StackConfig
from manyheads.parts import Causal, Gate, PreNorm, RMSNorm, Rotary, SwiGLU, Window
from manyheads.parts.experts import Experts
from manyheads.ragged import Ragged

__all__ = ["run"]

WIDTH, HIDDEN, LAYERS, VOCABULARY = 2048, 8192, 8, 32_000
PROMPT, STEPS = 128, 32
BATCHES = (1, 8)
# Of the length of a step's logits; with experts a token may go to another one by rounding.
LIMIT, EXPERTS_LIMIT = 5e-2, 1e-1
NORM = PreNorm(RMSNorm(eps=1e-6))


def run(rounds: int) -> dict[str, float]:
    rows, figures = [], {}
    for name, config in _kinds().items():
        row = [name]
        for batch in BATCHES:
            recorded, launched, off = _steps(config, batch, rounds, name)
            row += [f"{recorded * 1e3:.2f} ms", f"{launched * 1e3:.2f} ms"]
            row += [f"{launched / recorded:.1f}", f"{off:.0e}"]
            figures[f"{name}, {batch}, recorded step, ms"] = recorded * 1e3
            figures[f"{name}, {batch}, times a launched step"] = launched / recorded
        rows.append(row)
    columns = [""]
    for batch in BATCHES:
        columns += [f"recorded, {batch}", "launched", "ratio", "differ"]
    show(f"a step of decoders of {LAYERS} layers, width {WIDTH}", columns, rows)
    return figures


@torch.inference_mode()
def _steps(config: Any, batch: int, rounds: int, name: str) -> tuple[float, float, float]:
    """Seconds of the recorded and the launched step, and how far their logits are apart."""
    gc.collect()
    torch.cuda.empty_cache()
    model: Any = build(config, seed=0, device="cuda", dtype=torch.bfloat16).eval()
    draw = torch.Generator().manual_seed(batch)
    ids = torch.randint(VOCABULARY, (batch, PROMPT + STEPS), generator=draw).cuda()
    prompts = Ragged.from_padded(ids[:, :PROMPT])
    fixed = CudaGraphSteps(model, batch, 1024)
    launched = CachedSteps(model, DynamicCache())
    off = _apart(fixed.start(prompts), launched.start(prompts))
    for step in range(PROMPT, PROMPT + STEPS):
        off = max(off, _apart(fixed.next(ids[:, step]), launched.next(ids[:, step])))
    limit = EXPERTS_LIMIT if "experts" in name else LIMIT
    if not off <= limit:
        raise SystemExit(f"{name}: logits differ by {off:.1e} of their length, more than {limit}")
    program = fixed.latest
    assert program is not None

    def replay() -> Tensor:
        program.graph.replay()
        return program.logits

    def launch() -> Tensor:
        return launched.next(ids[:, 0])

    works = {"recorded": replay, "launched": launch}
    times = race(works, device="cuda", rounds=rounds, calls=5)
    # The host is behind the device where it launches every kernel of a step.
    host = max(times.seconds("launched"), times.host_seconds("launched"))
    return times.seconds("recorded"), host, off


def _apart(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def _kinds() -> dict[str, DecoderConfig]:
    dense = SwiGLU(width=WIDTH, hidden=HIDDEN)
    experts = Experts(width=WIDTH, hidden=512, count=64, top_k=10, shared=512)
    mamba = Mamba2(width=WIDTH, heads=64, head_size=64, state_size=128)
    delta = GatedDelta(width=WIDTH, heads=32, head_size=128, key_heads=16, key_size=128)
    full, local = _attention(), _attention(mask=Window(1023))
    capped = [replace(one, softcap=50.0) for one in (local, full)]
    sinks = [replace(one, sink="learned") for one in (local, full)]
    gated = replace(full, gates=(Gate(at="output", per="channel"),))
    wide = AttentionConfig(
        width=WIDTH,
        heads=16,
        kv_heads=2,
        head_size=256,
        position=Rotary(fraction=0.25),
        mask=Causal(),
        gates=(Gate(at="output", per="channel"),),
    )
    return {
        "grouped heads": _decoder([full], dense),
        "windows, capped scores": _decoder(capped, dense),
        "windows, sinks, experts": _decoder(sinks, experts),
        "gated heads": _decoder([gated], dense),
        "Mamba-2": _decoder([mamba], None),
        "gated delta net": _decoder([delta], dense),
        "Qwen3-Next, 64 experts": _decoder([delta, delta, delta, wide], experts),
    }


def _attention(**options: Any) -> AttentionConfig:
    choices: dict[str, Any] = {"position": Rotary(), "mask": Causal()} | options
    return AttentionConfig(width=WIDTH, heads=32, kv_heads=8, **choices)


def _decoder(inner: Sequence[Any], feedforward: Any) -> DecoderConfig:
    """Layers that take these in turn."""
    layers = []
    for number in range(LAYERS):
        one = inner[number % len(inner)]
        attends = isinstance(one, AttentionConfig)
        layer = LayerConfig(
            attention=Branch(one, NORM) if attends else None,
            mixer=None if attends else Branch(one, NORM),
            feedforward=None if feedforward is None else Branch(feedforward, NORM),
        )
        layers.append(layer)
    return DecoderConfig(
        embedding=Embedding(vocabulary=VOCABULARY, width=WIDTH),
        stack=StackConfig(width=WIDTH, layers=tuple(layers), final_norm=NORM.norm),
        readout=LanguageHead(),
    )
