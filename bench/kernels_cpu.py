"""The CPU kernels against PyTorch's own attention."""

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from problem import Problem
from side_by_side import Race, Work, alone, check_agreement, count, peak_extra, race, say, show
from torch import Tensor

from manyheads.parts.masks import Causal, Full, GlobalTokens, Mask, Window, visible

__all__ = ["run"]

OURS = "manyheads"
LIMIT = 1e-4
SIDE = 2048
RAGGED = (2048, 724, 256, 64)
LONGFORMER = GlobalTokens((0,)) | Window(64, 64)


def run(rounds: int, quick: bool) -> None:
    say(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}")
    say(f"limit: the rate of a product of {SIDE} x {SIDE} matrices, timed in the same rounds")
    say(
        "wall: by the clock; cores: time of all cores together, which other work does not stretch\n"
    )
    scale = 4 if quick else 1
    _window(rounds, 8192 // scale)
    _ragged(rounds, tuple(length // scale for length in RAGGED), Full())
    _ragged(rounds, tuple(length // scale for length in RAGGED), Causal())
    _log_sum_exp(rounds, 2048 // scale)
    _memory(8192 // scale)


def _sdpa(problem: Problem, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(*problem.padded, attn_mask=mask, is_causal=causal)


@torch.inference_mode()
def _window(rounds: int, tokens: int) -> None:
    problem = Problem(lengths=(tokens,), mask=Window(64, 64))
    table = visible(problem.mask, range(tokens), tokens, tokens, torch.device("cpu"))
    entrants: dict[str, Work] = {
        "manyheads": problem.attend,
        "masked SDPA": partial(_sdpa, problem, table),
        "full SDPA, no window": partial(_sdpa, problem),
    }
    same_work = {name: entrants[name] for name in ("manyheads", "masked SDPA")}
    difference = check_agreement(
        same_work, truth="masked SDPA", limit=LIMIT, answer=problem.to_packed
    )
    title = f"window of 64 each side, {tokens:,} tokens, 8 heads of 64: {problem.chosen()}"
    times = _compare(title, problem, entrants, rounds)
    _goal(times, "masked SDPA", 20, difference)


@torch.inference_mode()
def _ragged(rounds: int, lengths: tuple[int, ...], mask: Mask) -> None:
    problem = Problem(lengths=lengths, mask=mask, heads=12)
    places = torch.arange(problem.longest)
    real = (places < torch.tensor(lengths)[:, None])[:, None, None, :]
    causal = mask == Causal()
    # Behind the last token a causal query never looks, so the causal padded batch needs no mask.
    padded = partial(_sdpa, problem, causal=True) if causal else partial(_sdpa, problem, real)
    entrants: dict[str, Work] = {
        "manyheads": problem.attend,
        "padded SDPA": padded,
        "SDPA, a call a sequence": partial(_one_by_one, problem, causal),
    }
    difference = check_agreement(
        entrants, truth="padded SDPA", limit=LIMIT, answer=problem.to_packed
    )
    title = f"ragged batch of {lengths}, 12 heads of 64, {_short(mask)}: {problem.chosen()}"
    times = _compare(title, problem, entrants, rounds)
    _goal(times, "padded SDPA", 2.5, difference)


def _one_by_one(problem: Problem, causal: bool) -> Tensor:
    answers = []
    for row, length in enumerate(problem.lengths):
        q, k, v = (x[row : row + 1, :, :length] for x in problem.padded)
        answer = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        answers.append(answer[0].transpose(0, 1))
    return torch.cat(answers)


@torch.inference_mode()
def _log_sum_exp(rounds: int, tokens: int) -> None:
    problem = Problem(lengths=(tokens,) * 4, mask=Causal())
    entrants: dict[str, Work] = {
        "manyheads": problem.attend,
        "manyheads, with log-sum-exp": partial(problem.attend, lse=True),
        "SDPA": partial(_sdpa, problem, causal=True),
    }
    check_agreement(entrants, truth="SDPA", limit=LIMIT, answer=problem.to_packed)
    title = f"log-sum-exp, 4 sequences of {tokens:,}, 8 heads of 64, causal: {problem.chosen()}"
    _compare(title, problem, entrants, rounds)


def _compare(title: str, problem: Problem, entrants: dict[str, Work], rounds: int) -> Race:
    """Print a table of all entrants against ours; only visible pairs count as useful."""
    a, b = torch.randn(2, SIDE, SIDE)
    times = race({**entrants, "matmul": lambda: a @ b}, device="cpu", rounds=rounds)
    rows = []
    for name in entrants:
        share = problem.flops / (2 * SIDE**3) / times.host_ratio(name, "matmul")
        rows.append(
            [
                name,
                count(times.seconds(name), "s"),
                count(times.host_seconds(name), "s"),
                count(problem.flops / times.seconds(name), "FLOP/s"),
                f"{share:.0%}",
                f"{times.ratio(name, OURS):.2f}",
                f"{times.host_ratio(name, OURS):.2f}",
            ]
        )
    columns = ["", "wall", "cores", "useful rate", "of limit", "wall / ours", "cores / ours"]
    show(title, columns, rows)
    return times


def _goal(times: Race, peer: str, goal: float, difference: float) -> None:
    wall, cores = times.ratio(peer, OURS), times.host_ratio(peer, OURS)
    say(
        f"goal: at least {goal:g} times as fast as {peer}; by the clock {wall:.1f}, by the cores' "
        f"time {cores:.1f} (answers differ by at most {difference:.1e})\n"
    )


def _memory(tokens: int) -> None:
    """Peak extra memory at two lengths: twice the tokens should take twice the memory."""
    rows = []
    for kernel, mask in (
        ("banded", Window(64, 64)),
        ("fused", Causal()),
        ("fused", LONGFORMER),
        ("reference", LONGFORMER),
    ):
        for way, grad in (("forward", False), ("forward and backward", True)):
            small, large = (
                alone(_extra, Problem(lengths=(length,), mask=mask, heads=2, grad=grad), kernel)
                for length in (tokens // 2, tokens)
            )
            name = f"{kernel}, {_short(mask)}, {way}"
            rows.append([name, count(small, "B"), count(large, "B"), f"{large / small:.1f}"])
    pattern = 2 * tokens**2 * 4
    rows.append(["the pattern itself", count(pattern / 4, "B"), count(pattern, "B"), "4.0"])
    columns = ["peak extra memory", f"{tokens // 2:,} tokens", f"{tokens:,} tokens", "grows"]
    show("memory, 2 heads of 64, one sequence, each in a process of its own", columns, rows)


def _extra(problem: Problem, kernel: str) -> int:
    # A small call first: the code itself and the threads also take room.
    _call(replace(problem, lengths=(512,)), kernel)
    # The tokens are made on first use and are no part of the call.
    assert problem.tokens[0].shape == problem.cotangent.shape
    return peak_extra(partial(_call, problem, kernel), "cpu")


def _call(problem: Problem, kernel: str) -> Tensor:
    output = problem.attend(kernel)
    if not problem.grad:
        return output
    return torch.autograd.grad(output, problem.tokens, problem.cotangent)[0]


def _short(mask: Mask) -> str:
    return "global and window" if mask == LONGFORMER else type(mask).__name__.lower()
