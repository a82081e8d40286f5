"""The CUDA kernels against PyTorch's flash, cuDNN and flex attention, in bfloat16."""

import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from problem import Problem
from side_by_side import Race, Work, check_agreement, count, peak_extra, race, say, show
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from manyheads.parts.masks import Causal, Full, GlobalTokens, Mask, Window
from manyheads.parts.positions import Alibi

__all__ = ["run"]

DEVICE = "cuda"
LIMIT = 2e-2
CALLS = 4
SECONDS = 150
LONGFORMER = GlobalTokens((0,)) | Window(256, 256)
PEERS = ("flash", "cuDNN", "flex")

problem_on_cuda = partial(Problem, device=DEVICE, dtype=torch.bfloat16)


def run(rounds: int, quick: bool) -> None:
    say(f"{torch.cuda.get_device_name()}, bfloat16, torch {torch.__version__}")
    started = time.monotonic()
    torch._dynamo.config.recompile_limit = 256
    peak = _peak(rounds)
    longest = 8192 if quick else 32768
    sections: dict[str, Callable[[], None]] = {
        "fixed lengths": partial(_fixed, rounds, peak, longest),
        "fixed lengths with gradients": partial(_trained, rounds, peak),
        "ragged batches": partial(_ragged, rounds, peak),
        "biases and global tokens": partial(_flexible, rounds, peak),
        "memory": partial(_memory, longest),
    }
    for name, section in sections.items():
        if time.monotonic() - started > SECONDS:
            say(f"left out for want of time: {name}")
        else:
            section()
    say(f"{time.monotonic() - started:.0f} s in all")


def _peak(rounds: int) -> float:
    """The rate of a large product of matrices, which no attention can exceed."""
    a, b = torch.randn(2, 8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    times = race({"matmul": lambda: a @ b}, device=DEVICE, rounds=rounds, calls=CALLS)
    rate = 2 * 8192**3 / times.seconds("matmul")
    say(f"limit: a product of 8192 x 8192 matrices reaches {count(rate, 'FLOP/s')}\n")
    return rate


def _fixed(rounds: int, peak: float, longest: int) -> None:
    """The best of three on every shape: our path must be within a tenth of it."""
    shapes = [
        (heads, size, length, mask)
        for heads, size, lengths in ((16, 128, (1024, 2048, 8192, 32768)), (12, 64, (1024, 8192)))
        for length in lengths
        for mask in (Causal(), Full())
        if length <= longest
    ]
    rows = []
    with torch.no_grad():
        for heads, size, length, mask in shapes:
            batch = max(1, 16384 // length)
            problem = problem_on_cuda(lengths=(length,) * batch, mask=mask, heads=heads, size=size)
            rows.append(_fixed_row(problem, rounds, peak))
    _show_fixed("fixed lengths, forward", rows)


def _trained(rounds: int, peak: float) -> None:
    rows = []
    for heads, size, length, mask in (
        (16, 128, 2048, Causal()),
        (16, 128, 8192, Causal()),
        (12, 64, 1024, Full()),
    ):
        problem = problem_on_cuda(
            lengths=(length,) * (16384 // length), mask=mask, heads=heads, size=size, grad=True
        )
        rows.append(_fixed_row(problem, rounds, peak))
    _show_fixed("fixed lengths, forward and backward", rows)


def _show_fixed(title: str, rows: list[list[str]]) -> None:
    columns = ["", "kernel", "ours", "of limit", *PEERS, "of the best", "host"]
    show(f"{title}: TFLOP/s of visible pairs (goal: 0.9 of the best peer)", columns, rows)


def _fixed_row(problem: Problem, rounds: int, peak: float) -> list[str]:
    entrants: dict[str, Work] = {"ours": partial(_ours, problem, "auto")}
    for name in PEERS:
        work = partial(_peer, problem, name)
        try:
            work()
        except RuntimeError as error:
            say(f"{name} cannot do {problem.lengths[0]}: {str(error).splitlines()[0][:80]}")
        else:
            entrants[name] = work
    peers = [name for name in PEERS if name in entrants]
    check_agreement(entrants, truth=peers[0], limit=LIMIT, answer=problem.to_packed)
    times = race(entrants, device=DEVICE, rounds=rounds, calls=CALLS)
    # A backward pass multiplies five times where the forward multiplies twice.
    flops = problem.flops * (3.5 if problem.grad else 1.0)
    rates = {name: flops / times.seconds(name) for name in entrants}
    return [
        f"{problem.heads} x {problem.size}, {problem.longest}, {_short(problem.mask)}",
        problem.chosen(),
        f"{rates['ours'] / 1e12:.0f}",
        f"{rates['ours'] / peak:.0%}",
        *(f"{rates[name] / 1e12:.0f}" if name in rates else "-" for name in PEERS),
        f"{1 / times.ratio('ours', times.fastest(peers)):.2f}",
        count(times.host_seconds("ours"), "s"),
    ]


def _ours(problem: Problem, kernel: str) -> Tensor:
    output = problem.attend(kernel)
    if not problem.grad:
        return output
    return torch.autograd.grad(output, problem.tokens, problem.cotangent)[0]


def _peer(problem: Problem, name: str) -> Tensor:
    causal = problem.mask == Causal()
    if name == "flex":
        blocks = _causal_blocks(problem.longest) if causal else None
        output = _compiled_flex()(*problem.padded, blocks)
    else:
        backend = SDPBackend.FLASH_ATTENTION if name == "flash" else SDPBackend.CUDNN_ATTENTION
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(*problem.padded, is_causal=causal)
    if not problem.grad:
        return output
    return torch.autograd.grad(output, problem.padded, problem.padded_cotangent)[0]


@cache
def _compiled_flex() -> Callable[..., Any]:
    def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: BlockMask | None) -> Any:
        return flex_attention(q, k, v, block_mask=block_mask)

    # Every shape gets a kernel of its own, the fastest that flex can be.
    return torch.compile(attend, dynamic=False, fullgraph=True)


@cache
def _causal_blocks(length: int) -> BlockMask:
    def causal(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return query >= key

    return create_block_mask(causal, None, None, length, length, device=DEVICE)


@torch.no_grad()
def _ragged(rounds: int, peak: float) -> None:
    """Lengths spread around half of 8,192, as texts are."""
    drawn = torch.normal(4096.0, 8192 / 6, (16,), generator=torch.Generator().manual_seed(1))
    lengths = tuple(int(length) for length in drawn.clamp(16, 8192))
    rows = []
    for mask in (Full(), Causal(), Window(64, 64)):
        problem = problem_on_cuda(lengths=lengths, mask=mask, heads=12, size=64)
        entrants: dict[str, Work] = {
            "ours": problem.attend,
            "ours by flex": partial(problem.attend, "flex"),
            "padded SDPA": partial(_padded, problem, _padded_mask(problem)),
        }
        check_agreement(entrants, truth="padded SDPA", limit=LIMIT, answer=problem.to_packed)
        times = race(entrants, device=DEVICE, rounds=rounds, calls=2)
        rows += _rows(f"{_short(mask)}, ours by {problem.chosen()}", problem, times, peak)
    title = f"ragged: 16 sequences of {min(lengths)} to {max(lengths)} tokens, 12 heads of 64"
    _show_rows(title, rows)


def _padded_mask(problem: Problem) -> Tensor | None:
    if problem.mask == Causal():
        # Behind the last token a causal query never looks.
        return None
    places = torch.arange(problem.longest, device=DEVICE)
    real = (places < torch.tensor(problem.lengths, device=DEVICE)[:, None])[:, None, None, :]
    if problem.mask == Full():
        return real
    near = problem.mask.allows(places[:, None], places[None, :], places[:1, None] + problem.longest)
    # A query in the padding sees something too: rows without a key are another matter.
    return (real & near) | torch.eye(problem.longest, dtype=torch.bool, device=DEVICE)


def _padded(problem: Problem, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(*problem.padded, attn_mask=mask, is_causal=mask is None)


@torch.no_grad()
def _flexible(rounds: int, peak: float) -> None:
    """What flash and cuDNN cannot do: our flex against our reference in chunks."""
    slopes = Alibi().bias(12, torch.device(DEVICE))
    rows = []
    for name, problem in {
        "ALiBi, causal": problem_on_cuda(lengths=(8192,), mask=Causal(), heads=12, bias=slopes),
        "Longformer": problem_on_cuda(lengths=(8192,), mask=LONGFORMER, heads=12),
    }.items():
        entrants: dict[str, Work] = {
            "ours": problem.attend,
            "reference in chunks": partial(problem.attend, "reference"),
        }
        check_agreement(entrants, truth="reference in chunks", limit=LIMIT)
        times = race(entrants, device=DEVICE, rounds=min(rounds, 3))
        rows += _rows(f"{name}, ours by {problem.chosen()}", problem, times, peak)
    _show_rows("biases and global tokens, 8,192 tokens, 12 heads of 64", rows)


def _rows(name: str, problem: Problem, times: Race, peak: float) -> list[list[str]]:
    rows = []
    for entrant in times.elapsed:
        rate = problem.flops / times.seconds(entrant)
        rows.append(
            [
                name if entrant == "ours" else f"  {entrant}",
                count(times.seconds(entrant), "s"),
                f"{rate / 1e12:.1f}",
                f"{rate / peak:.0%}",
                f"{times.ratio(entrant, 'ours'):.2f}",
                count(times.host_seconds(entrant), "s"),
            ]
        )
    return rows


def _show_rows(title: str, rows: list[list[str]]) -> None:
    show(title, ["", "device", "useful TFLOP/s", "of limit", "times ours", "host"], rows)


def _memory(longest: int) -> None:
    """Twice the tokens should take twice the memory; the making of block masks is counted."""
    sizes = (longest // 4, longest // 2, longest)
    rows = []
    for kernel, mask in (
        ("fused", Causal()),
        ("varlen", Window(64, 64)),
        ("flex", LONGFORMER),
        ("reference", LONGFORMER),
    ):
        for way, grad in (("forward", False), ("and backward", True)):
            problem = problem_on_cuda(lengths=(1024,), mask=mask, grad=grad)
            _ours(problem, kernel)
            extra = [_extra(replace(problem, lengths=(size,)), kernel) for size in sizes]
            growth = f"{extra[1] / extra[0]:.1f}, {extra[2] / extra[1]:.1f}"
            name = f"{kernel}, {_short(mask)}, {way}"
            rows.append([name, *(count(each, "B") for each in extra), growth])
    pattern = [8 * size**2 * 2 for size in sizes]
    rows.append(["the pattern itself", *(count(each, "B") for each in pattern), "4.0, 4.0"])
    show(
        "peak extra memory, one sequence, 8 heads of 64",
        ["", *(f"{size:,} tokens" for size in sizes), "grows"],
        rows,
    )


def _extra(problem: Problem, kernel: str) -> int:
    # The tokens are made on first use and are no part of the call.
    assert problem.tokens[0].shape == problem.cotangent.shape
    return peak_extra(partial(_ours, problem, kernel), DEVICE)


def _short(mask: Mask) -> str:
    return "global and window" if mask == LONGFORMER else type(mask).__name__.lower()
