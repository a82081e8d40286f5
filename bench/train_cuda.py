"""Training steps on CUDA against transformers: GPT-2, masked ModernBERT, T5; the cost of gates.

All but those with a learned bias are compiled.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
import train_bias_cuda
from side_by_side import Work, count, race, say, show
from torch import Tensor, nn

from manyheads.checkpoints.folder import load
from manyheads.data.batch import Batch
from manyheads.data.stream import StreamPosition, StreamStep
from manyheads.models.build import build, get_config
from manyheads.parts.gates import Gate
from manyheads.ragged import Ragged
from manyheads.train.distributed import ModelWrapper, join_processes
from manyheads.train.loop.reporting import training_flops
from manyheads.train.loop.train_step import Updater, can_run_ahead, prepare_steps
from manyheads.train.objectives import CausalLM, MaskedLM, Objective
from manyheads.train.optim.optimizers import AdamW

__all__ = ["PARTS", "run"]

PARTS = ("gpt2", "masked", "gates", "t5", "shaw")
BIASES = {"t5": train_bias_cuda.run_t5, "shaw": train_bias_cuda.run_shaw}
OURS, HALF, THEIRS = "manyheads", "manyheads, half weights", "transformers"
EAGER = "transformers, not compiled"
# Steps timed together, one behind the other as in a run: the host is ahead of the device.
STEPS = 4
LENGTH, TEXTS, VOCABULARY = 1024, 32, 50304
# Texts of a masked step: with fewer the host takes longer to queue it than the device to do it.
MASKED_TEXTS = 48
MASK = 50284
# Of the loss; both round every product to eight bits.
LIMIT = 2e-2


def run(part: str, rounds: int) -> dict[str, float]:
    say(f"{torch.cuda.get_device_name()}, bfloat16, torch {torch.__version__}")
    if part in BIASES:
        torch.set_float32_matmul_precision("highest")
        return BIASES[part](rounds)
    torch.set_float32_matmul_precision("high")
    return {"gpt2": _gpt2, "masked": _masked, "gates": _gates}[part](rounds)


@dataclass(frozen=True, slots=True)
class _Ours:
    """One update of our loop again and again, on the same texts: clipped, AdamW, loss in chunks."""

    model: Any
    objective: Objective
    texts: Ragged

    def work(self) -> Work:
        with join_processes("none", "cuda") as processes:
            step = StreamStep(
                number=0,
                batches=(Batch(texts=self.texts),),
                indices=(0,),
                tokens=self.texts.lengths.total,
                sequences=len(self.texts.lengths),
                after=StreamPosition(),
            )
            [prepared] = prepare_steps(iter((step,)), self.objective, self.model, seed=0, first=0)
            pinned = prepared.pin_memory()
            optimizer = AdamW(lr=1e-4).build(self.model)
            updater = Updater(
                wrapper=ModelWrapper(self.model.train(), processes),
                optimizer=optimizer,
                score=torch.compile(self.objective.score),
                seed=0,
                half=next(self.model.parameters()).dtype == torch.float32,
                clip=1.0,
                ahead=can_run_ahead(optimizer),
            )
        # Its first two numbers are the loss and the targets of a step that the device is at.
        return lambda: updater.begin(pinned).numbers


def _peer(model: nn.Module, loss: Callable[[Any], Tensor], *, compiled: bool = True) -> Work:
    """The plain loop around a model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    called = torch.compile(model.train()) if compiled else model.train()

    def work() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            result = loss(called)
        result.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return result.detach()

    return work


def _gpt2(rounds: int) -> dict[str, float]:
    """The goal asks for steps of 56 ms.

    In a profile on an H200, beside processes that compiled, products took 35 of 65 ms (31 at the
    rate of large ones), attention 10, norms 6, GELU 5, the loss 2.4, sums for biases 2, and the
    optimizer 2. Not worth a kernel: GELU with the gradient of its bias, 1.4 % of a step. Of
    fourteen tiles of the cross-entropy it has the fastest, 0.61 ms per chunk.
    """
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        resid_pdrop=0, attn_pdrop=0, embd_pdrop=0, vocab_size=VOCABULARY, pad_token_id=0
    )
    peer, ours = _pair(GPT2LMHeadModel, config)
    _, half = _pair(GPT2LMHeadModel, config)
    ids = _ids(TEXTS * LENGTH).view(TEXTS, LENGTH)

    def loss(model: Any) -> Tensor:
        logits = model(input_ids=ids).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    texts = Ragged.from_padded(ids.cpu())
    entrants = {
        OURS: _Ours(ours, CausalLM(), texts).work(),
        HALF: _Ours(half.bfloat16(), CausalLM(), texts).work(),
        THEIRS: _peer(peer, loss),
    }
    title = f"GPT-2 124M, {TEXTS} texts of {LENGTH}"
    return _tell(title, entrants, ours, ids.numel(), rounds, "580 thousand tokens/s")


def _masked(rounds: int) -> dict[str, float]:
    """The goal asks for steps of 47 ms.

    In a profile on an H200 (a run of its own), products took 24 of 53.5 ms, global attention 7.5,
    norms 6.4, windows 4.8, GeGLU 2.8, rotary positions 2 and the optimizer 1.5. The norms take 1.1
    to 1.3 times what the memory bandwidth allows: autocast keeps the residual stream in float32.
    The host queues a step in 51 ms.
    """
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    peer, ours = _pair(ModernBertForMaskedLM, ModernBertConfig())
    eager, _ = _pair(ModernBertForMaskedLM, ModernBertConfig())
    draw = torch.Generator().manual_seed(0)
    drawn = torch.normal(LENGTH / 2, LENGTH / 6, (MASKED_TEXTS,), generator=draw).clamp(16, LENGTH)
    ids = _ids(int(drawn.int().sum())).cpu()
    texts = Ragged.from_list(list(ids.split(drawn.int().tolist())))
    objective = MaskedLM(mask=MASK, specials=(MASK,))
    generator = torch.Generator().manual_seed(0)
    prepared = objective.prepare(ours, Batch(texts=texts), generator).to("cuda")
    assert prepared.batch.texts is not None
    labels = torch.full((texts.lengths.total,), -100, device="cuda")
    labels[prepared.positions] = prepared.labels
    packed = prepared.batch.texts.values, labels, torch.ones_like(labels)
    padded, labels, seen = (_padded(values, texts) for values in packed)
    labels = labels.masked_fill(seen == 0, -100)

    def loss(model: Any) -> Tensor:
        logits = model(input_ids=padded, attention_mask=seen).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    entrants = {
        OURS: _Ours(ours, objective, texts).work(),
        THEIRS: _peer(peer, loss),
        EAGER: _peer(eager, loss, compiled=False),
    }
    tokens = texts.lengths.total
    mean = tokens / MASKED_TEXTS
    title = f"masked ModernBERT-base, {MASKED_TEXTS} texts of {mean:.0f} tokens in the mean"
    return _tell(title, entrants, ours, tokens, rounds, "4 times theirs", length=round(mean))


def _padded(values: Tensor, texts: Ragged) -> Tensor:
    """To the longest that texts may be: one shape for all batches, as compiling wants it."""
    rows = torch.zeros(len(texts.lengths), LENGTH, dtype=values.dtype, device=values.device)
    for row, place in zip(rows, texts.lengths.slices(), strict=True):
        row[: place.stop - place.start] = values[place]
    return rows


def _gates(rounds: int) -> dict[str, float]:
    texts = Ragged.from_padded(_ids(TEXTS * LENGTH).view(TEXTS, LENGTH).cpu())
    entrants = {}
    for gate in ("none", "head", "channel"):
        config: Any = get_config("gpt2", dropout=0.0, vocabulary=VOCABULARY)
        layers = tuple(_gated(layer, gate) for layer in config.stack.layers)
        config = replace(config, stack=replace(config.stack, layers=layers))
        model = build(config, seed=0, device="cuda")
        entrants[gate] = _Ours(model, CausalLM(), texts).work()
    times = race(entrants, device="cuda", rounds=rounds, warmups=2, calls=STEPS)
    rows = [
        [gate, f"{times.seconds(gate) * 1e3:.2f} ms", f"{times.ratio(gate, 'none') - 1:+.1%}", goal]
        for gate, goal in (("none", ""), ("head", "1.5%"), ("channel", "7.0%"))
    ]
    show("output gates in GPT-2 124M, a step", ["gate", "time", "cost", "at most"], rows)
    return {f"cost of a {gate} gate": times.ratio(gate, "none") - 1 for gate in ("head", "channel")}


def _gated(layer: Any, gate: Any) -> Any:
    if gate == "none":
        return layer
    inner = replace(layer.attention.inner, gates=(Gate(at="output", per=gate),))
    return replace(layer, attention=replace(layer.attention, inner=inner))


def _pair(kind: Any, config: Any) -> tuple[Any, Any]:
    """One set of random weights in both."""
    torch.manual_seed(0)
    peer = kind._from_config(config, attn_implementation="sdpa")
    with TemporaryDirectory() as folder:
        peer.save_pretrained(folder)
        ours = load(folder, device="cuda")
    return peer.to("cuda"), ours


def _ids(count: int) -> Tensor:
    draw = torch.Generator().manual_seed(1)
    return torch.randint(10, 50000, (count,), generator=draw).cuda()


def _tell(
    title: str,
    entrants: dict[str, Work],
    model: Any,
    tokens: int,
    rounds: int,
    goal: str,
    *,
    length: int = LENGTH,
) -> dict[str, float]:
    first = {name: _loss(work()) for name, work in entrants.items()}
    off = max(abs(first[name] / first[THEIRS] - 1) for name in entrants)
    if not off <= LIMIT:
        raise SystemExit(f"the first losses {first} differ by {off:.1e}, more than {LIMIT}")
    times = race(entrants, device="cuda", rounds=rounds, warmups=2, calls=STEPS)
    peak = _matmul_peak()
    work = training_flops(model, length)
    rows = [
        [
            name,
            f"{tokens / times.seconds(name) / 1e3:,.0f}",
            f"{times.seconds(name) * 1e3:.1f} ms",
            f"{times.host_seconds(name) * 1e3:.1f} ms",
            f"{times.ratio(THEIRS, name):.2f}",
            f"{tokens * work / times.seconds(name) / peak:.0%}",
        ]
        for name in entrants
    ]
    columns = ["", "thousand tokens/s", "a step", "to queue it", "times theirs", "of matmul peak"]
    show(f"{title}; first losses within {off:.1e}", columns, rows)
    say(f"limit: a product of large matrices, {count(peak, 'FLOP/s')}; goal: {goal}\n")
    figures = {
        "times transformers": times.ratio(THEIRS, OURS),
        "thousand tokens/s": tokens / times.seconds(OURS) / 1e3,
        "share of limit": tokens * work / times.seconds(OURS) / peak,
    }
    if EAGER in entrants:
        figures["times transformers, not compiled"] = times.ratio(EAGER, OURS)
    if HALF in entrants:
        figures["half weights, times transformers"] = times.ratio(THEIRS, HALF)
        figures["half weights, thousand tokens/s"] = tokens / times.seconds(HALF) / 1e3
    return figures


def _loss(result: Tensor) -> float:
    torch.cuda.synchronize()
    return float(result if result.dim() == 0 else result[0] / result[1])


def _matmul_peak() -> float:
    size = 8192
    square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    product: Work = partial(torch.matmul, square, square)
    return 2 * size**3 / race({"product": product}, device="cuda", rounds=10).seconds("product")
