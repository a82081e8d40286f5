"""Which kernel runs, and why."""

from dataclasses import dataclass
from types import ModuleType

from torch.compiler import is_compiling

from manyheads.errors import KernelError
from manyheads.kernels import banded, batched, flex, fused, reference, step, varlen, window
from manyheads.kernels.contract import AttentionResult, Keys, Queries, Request, TensorFacts, Values
from manyheads.kernels.uneven_groups import attend_by_group, attend_repeated
from manyheads.parts.masks import MaskBySequence
from manyheads.parts.positions.relative import DenseBias

KERNELS: dict[str, ModuleType] = {
    "reference": reference,
    "fused": fused,
    "banded": banded,
    "batched": batched,
    "window": window,
    "varlen": varlen,
    "flex": flex,
    "step": step,
}

# On CUDA a compiled kernel takes seconds at first, and up to this many lengths a call each is fine.
FEW_LENGTHS = 8
# Beyond so many keys a query, flash attention has the faster backward pass.
WIDEST_WINDOW = 512
# In training on the CPU, sequences of different lengths up to this are padded into blocks.
PADDED_UP_TO = 128
# On CUDA, the bias of sequences up to this is learned by padded blocks.
LEARNED_BIAS_UP_TO = 512


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel that runs, and why each faster one was skipped."""

    kernel: str
    skipped: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        reasons = "; ".join(f"not {name}: {why}" for name, why in self.skipped)
        return f"{self.kernel} ({reasons})" if reasons else self.kernel


def choose(request: Request, facts: TensorFacts) -> Choice:
    """The fastest kernel of the device that supports the request."""
    skipped: list[tuple[str, str]] = []
    for name in _order(request, facts):
        reason = _refusal(name, request, facts) or _not_worth(name, request, facts)
        if reason is None:
            return Choice(name, tuple(skipped))
        skipped.append((name, reason))
    # The reference supports everything else.
    raise KernelError(
        f"a step of fixed shape does not support this: {skipped[-1][1]}", "use DynamicCache()"
    )


def attend(
    q: Queries, k: Keys, v: Values, request: Request, kernel: str = "auto"
) -> AttentionResult:
    """Attention by the fastest kernel, or by the one that is named."""
    facts = TensorFacts.of(q, k, v, request)
    if kernel == "auto":
        kernel = choose(request, facts).kernel
    elif kernel not in KERNELS:
        raise KernelError(f"there is no kernel {kernel!r}", f"use auto, {', '.join(KERNELS)}")
    elif reason := _refusal(kernel, request, facts):
        able = [name for name in KERNELS if _refusal(name, request, facts) is None]
        raise KernelError(f"kernel {kernel!r}: {reason}", f"use auto, {', '.join(able)}")
    if request.rotation is not None and not _rotates(kernel, request, facts):
        q, k, v = request.rotation.turn(q, k, v)
    if request.groups is not None and kernel != "reference":
        # A decoding step reads all keys and should read them only once.
        repeats = facts.device == "cuda" and kernel != "step"
        unevenly = attend_repeated if repeats else attend_by_group
        return unevenly(KERNELS[kernel].attend, q, k, v, request)
    return KERNELS[kernel].attend(q, k, v, request)


def _order(request: Request, facts: TensorFacts) -> tuple[str, ...]:
    """The kernels of a device, fastest first."""
    if request.keys.filled is not None:
        return ("step",)
    if facts.device == "cuda" and request.uniform:
        return ("fused", "window", "varlen", "flex", "batched", "reference")
    if facts.device == "cuda":
        return ("window", "varlen", "flex", "fused", "batched", "reference")
    return ("banded", "fused", "batched", "reference")


def _rotates(name: str, request: Request, facts: TensorFacts) -> bool:
    """Whether the kernel rotates queries and keys as it reads them."""
    return name == "window" and window.rotates(request, facts.size)


def _refusal(name: str, request: Request, facts: TensorFacts) -> str | None:
    """Why a kernel does not support the request; a few things only the definition computes."""
    if name not in ("reference", "batched", "step") and request.softcap is not None:
        return "it has no soft cap"
    if name != "reference" and isinstance(request.mask, MaskBySequence):
        return "each sequence has its own mask"
    if name not in ("reference", "fused") and isinstance(request.bias, DenseBias):
        return "the bias is a tensor without room for padding"
    return KERNELS[name].cannot(request, facts)


def _not_worth(name: str, request: Request, facts: TensorFacts) -> str | None:
    reach, longest = request.mask.reach, request.queries.longest
    if name == "banded" and reach.before + reach.after + 1 >= longest / 2:
        return f"the window saves nothing on sequences of at most {longest} tokens"
    if name == "window" and facts.grad and reach.before + reach.after + 1 > WIDEST_WINDOW:
        return f"flash attention is faster backwards where more than {WIDEST_WINDOW} keys are seen"
    longest = max(longest, request.keys.longest)
    learned = facts.grad and request.bias is not None and request.bias.requires_grad
    if name == "flex" and learned and longest <= LEARNED_BIAS_UP_TO:
        return (
            "its threads add the gradient of a learned bias to the same few numbers, and padding "
            f"to at most {longest} tokens costs less"
        )
    few = name == "flex" and not is_compiling() and len(request.shapes) <= FEW_LENGTHS
    if few and _refusal("fused", request, facts) is None:
        return f"a call for each of at most {FEW_LENGTHS} lengths needs no compiling"
    trains = facts.device == "cpu" and facts.grad and not request.uniform
    if name == "fused" and trains and longest <= PADDED_UP_TO:
        return f"one call per length costs more than padding to at most {longest} tokens"
    return None
