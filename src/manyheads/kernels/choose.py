"""Which kernel runs: the one readable place where that is decided."""

from dataclasses import dataclass
from types import ModuleType

from jaxtyping import Float
from torch import Tensor

from manyheads.errors import KernelError
from manyheads.kernels import banded, flex, fused, reference, step, varlen
from manyheads.kernels.contract import Attended, Facts, Request
from manyheads.kernels.uneven import attend_by_group, attend_repeated

KERNELS: dict[str, ModuleType] = {
    "reference": reference,
    "fused": fused,
    "banded": banded,
    "varlen": varlen,
    "flex": flex,
    "step": step,
}


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel that runs, and why each faster one was passed over."""

    kernel: str
    passed_over: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        reasons = "; ".join(f"not {name}: {why}" for name, why in self.passed_over)
        return f"{self.kernel} ({reasons})" if reasons else self.kernel


def choose(request: Request, facts: Facts) -> Choice:
    """The first of the device's kernels, fastest first, that can do what is asked."""
    passed_over: list[tuple[str, str]] = []
    for name in _order(request, facts):
        reason = KERNELS[name].cannot(request, facts) or _not_worth(name, request)
        if reason is None:
            return Choice(name, tuple(passed_over))
        passed_over.append((name, reason))
    # The reference can do everything but this.
    raise KernelError(
        f"no step of fixed shape can do this, {passed_over[-1][1]}", "use DynamicCache()"
    )


def attend(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "m g d"],
    v: Float[Tensor, "m g e"],
    request: Request,
    kernel: str = "auto",
) -> Attended:
    """Attention by the chosen kernel, or by the named one."""
    facts = Facts.of(q, k, v, request)
    if kernel == "auto":
        kernel = choose(request, facts).kernel
    elif kernel not in KERNELS:
        raise KernelError(f"there is no kernel {kernel!r}", f"use auto, {', '.join(KERNELS)}")
    elif reason := KERNELS[kernel].cannot(request, facts):
        able = [name for name, one in KERNELS.items() if one.cannot(request, facts) is None]
        raise KernelError(f"{kernel} cannot do this, {reason}", f"use auto, {', '.join(able)}")
    if request.groups is not None and kernel != "reference":
        # A step of decoding reads all keys, and should read them once.
        repeats = facts.device == "cuda" and kernel != "step"
        unevenly = attend_repeated if repeats else attend_by_group
        return unevenly(KERNELS[kernel].attend, q, k, v, request)
    return KERNELS[kernel].attend(q, k, v, request)


def _order(request: Request, facts: Facts) -> tuple[str, ...]:
    """Kernels of a device, fastest first."""
    if request.keys.filled is not None:
        return ("step",)
    if facts.device == "cuda" and request.uniform:
        return ("fused", "varlen", "flex", "reference")
    if facts.device == "cuda":
        return ("varlen", "flex", "fused", "reference")
    return ("banded", "fused", "reference")


def _not_worth(name: str, request: Request) -> str | None:
    if name != "banded":
        return None
    reach, longest = request.mask.reach, request.queries.longest
    if reach.before + reach.after + 1 >= longest / 2:
        return f"the window saves nothing on sequences of at most {longest} tokens"
    return None
