"""The CPU's kernels beside PyTorch's own attention."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from problem import Problem
from side_by_side import Work, check_agreement, count, peak_extra, race, say, show
from torch import Tensor

from manyheads.parts.masks import All, Causal, GlobalTokens, Mask, Window
from manyheads.parts.masks.render import visible

__all__ = ["run"]

LIMIT = 1e-4
RAGGED = (2048, 724, 256, 64)
LONGFORMER = GlobalTokens((0,)) | Window(64, 64)


def run(rounds: int, quick: bool) -> None:
    say(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}\n")
    peak = _peak(rounds)
    scale = 4 if quick else 1
    _window(rounds, 8192 // scale, peak)
    _ragged(rounds, tuple(length // scale for length in RAGGED), All())
    _ragged(rounds, tuple(length // scale for length in RAGGED), Causal())
    _log_sum_exp(rounds, 2048 // scale, peak)
    _memory(8192 // scale)


def _peak(rounds: int) -> float:
    """The rate of a large product of matrices, which no attention can exceed."""
    a, b = torch.randn(2, 2048, 2048)
    seconds = race({"matmul": lambda: a @ b}, device="cpu", rounds=rounds).seconds("matmul")
    rate = 2 * 2048**3 / seconds
    say(f"limit: a product of 2048 x 2048 matrices reaches {count(rate, 'FLOP/s')}\n")
    return rate


def _sdpa(problem: Problem, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(*problem.padded, attn_mask=mask, is_causal=causal)


@torch.inference_mode()
def _window(rounds: int, tokens: int, peak: float) -> None:
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
    _compare(
        f"window of 64 each side, {tokens:,} tokens, 8 heads of 64: {problem.chosen()}",
        problem,
        entrants,
        "manyheads",
        rounds,
        peak,
    )
    gain = race(same_work, device="cpu", rounds=rounds).ratio("masked SDPA", "manyheads")
    say(f"goal at least 20 times masked SDPA: {gain:.1f} (largest difference {difference:.1e})\n")


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
    gain = _compare(
        f"ragged batch of {lengths}, 12 heads of 64, {mask}: {problem.chosen()}",
        problem,
        entrants,
        "manyheads",
        rounds,
    )["padded SDPA"]
    say(f"goal at least 2.5 times padded: {gain:.2f} (largest difference {difference:.1e})\n")


def _one_by_one(problem: Problem, causal: bool) -> Tensor:
    q, k, v = problem.padded
    answers = []
    for row, length in enumerate(problem.lengths):
        one = (x[row : row + 1, :, :length] for x in (q, k, v))
        answers.append(F.scaled_dot_product_attention(*one, is_causal=causal)[0].transpose(0, 1))
    return torch.cat(answers)


@torch.inference_mode()
def _log_sum_exp(rounds: int, tokens: int, peak: float) -> None:
    problem = Problem(lengths=(tokens,) * 4, mask=Causal())
    entrants: dict[str, Work] = {
        "with log-sum-exp": partial(problem.attend, lse=True),
        "without": problem.attend,
        "SDPA": partial(_sdpa, problem, causal=True),
    }
    check_agreement(entrants, truth="SDPA", limit=LIMIT, answer=problem.to_packed)
    title = f"log-sum-exp, 4 sequences of {tokens:,}, 8 heads of 64, causal: {problem.chosen()}"
    _compare(title, problem, entrants, "with log-sum-exp", rounds, peak)


def _compare(
    title: str,
    problem: Problem,
    entrants: dict[str, Work],
    ours: str,
    rounds: int,
    peak: float | None = None,
) -> dict[str, float]:
    """Prints a table of all entrants; how many times longer than ours each takes."""
    times = race(entrants, device="cpu", rounds=rounds)
    ratios = {name: times.ratio(name, ours) for name in entrants}
    rows = []
    for name in entrants:
        rate = problem.flops / times.seconds(name)
        share = f"{rate / peak:.0%}" if peak else ""
        rows.append(
            [
                name,
                count(times.seconds(name), "s"),
                count(times.host_seconds(name), "s"),
                count(rate, "FLOP/s"),
                share,
                f"{ratios[name]:.2f}",
            ]
        )
    columns = ["", "wall", "all cores", "useful rate", "of limit" if peak else "", "times ours"]
    show(title, columns, rows)
    return ratios


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
                _extra(Problem(lengths=(length,), mask=mask, grad=grad), kernel)
                for length in (tokens // 2, tokens)
            )
            name = f"{kernel}, {_short(mask)}, {way}"
            rows.append([name, count(small, "B"), count(large, "B"), f"{large / small:.1f}"])
    pattern = 8 * tokens**2 * 4
    rows.append(["the pattern itself", count(pattern / 4, "B"), count(pattern, "B"), "4.0"])
    columns = ["peak extra memory", f"{tokens // 2:,} tokens", f"{tokens:,} tokens", "grows"]
    show("memory, 8 heads of 64, one sequence", columns, rows)


def _extra(problem: Problem, kernel: str) -> int:
    work: Callable[[], Tensor] = partial(problem.attend, kernel)
    if problem.grad:
        work = partial(_forward_and_backward, problem, kernel)
    # What is made on first use (tokens, threads) is no part of a call.
    assert problem.cotangent.shape == problem.tokens[0].shape
    return peak_extra(work, "cpu")


def _forward_and_backward(problem: Problem, kernel: str) -> Tensor:
    return torch.autograd.grad(problem.attend(kernel), problem.tokens, problem.cotangent)[0]


def _short(mask: Mask) -> str:
    return "global and window" if mask == LONGFORMER else type(mask).__name__.lower()
