"""Key heads that serve different numbers of query heads, with kernels that need equal numbers."""

from collections import defaultdict
from collections.abc import Callable
from itertools import accumulate, pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.kernels.contract import AttentionResult, Keys, Queries, Request, Values

Kernel = Callable[[Tensor, Tensor, Tensor, Request], AttentionResult]


def attend_by_group(
    attend: Kernel, q: Queries, k: Keys, v: Values, request: Request
) -> AttentionResult:
    """One call of the kernel per group size; no key is repeated.

    It only slices and concatenates, so that a CUDA graph can record it.
    """
    groups = request.groups
    assert groups is not None
    spans = [slice(*ends) for ends in pairwise(accumulate(groups, initial=0))]
    alike: dict[int, list[int]] = defaultdict(list)
    for key, size in enumerate(groups):
        alike[size].append(key)
    outputs: dict[int, Tensor] = {}
    lses: dict[int, Tensor] = {}
    for size, keys in alike.items():
        queries = [spans[key] for key in keys]
        mine = [slice(key, key + 1) for key in keys]
        result = attend(_take(q, queries), _take(k, mine), _take(v, mine), _part(request, queries))
        outputs |= zip(keys, result.output.split(size, dim=1), strict=True)
        if result.lse is not None:
            lses |= zip(keys, result.lse.split(size, dim=1), strict=True)
    order = range(len(groups))
    lse = torch.cat([lses[key] for key in order], dim=1) if lses else None
    return AttentionResult(torch.cat([outputs[key] for key in order], dim=1), lse)


def attend_repeated(
    attend: Kernel, q: Queries, k: Keys, v: Values, request: Request
) -> AttentionResult:
    """One call, with a copy of the key for every query head: better where launches are slow."""
    groups = request.groups
    assert groups is not None
    every = [slice(0, q.shape[1])]
    return attend(q, _repeated(k, groups), _repeated(v, groups), _part(request, every))


def _repeated(x: Float[Tensor, "m g d"], groups: tuple[int, ...]) -> Float[Tensor, "m h d"]:
    heads = x.split(1, dim=1)
    return torch.cat([x.expand(-1, n, -1) for x, n in zip(heads, groups, strict=True)], dim=1)


def _part(request: Request, queries: list[slice]) -> Request:
    """The request for some of the heads."""
    return Request(
        queries=request.queries,
        keys=request.keys,
        mask=request.mask,
        scale=request.scale,
        bias=None if request.bias is None else request.bias.of_heads(queries),
        sink=None if request.sink is None else torch.cat([request.sink[span] for span in queries]),
        softcap=request.softcap,
        dropout=request.dropout,
        rotation=request.rotation,
        want=request.want,
    )


def _take(x: Float[Tensor, "n h d"], spans: list[slice]) -> Float[Tensor, "n some d"]:
    return torch.cat([x[:, span] for span in spans], dim=1)
