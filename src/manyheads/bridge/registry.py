"""Our attention and mask functions in the registries of `transformers`, and who listens to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from threading import Lock
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from manyheads.bridge.padded_call import LazyMask, PaddedCall
from manyheads.errors import MissingPackageError

NAME = "manyheads"
ROWS_AT_ONCE = 512


@runtime_checkable
class Listener(Protocol):
    """Somebody who computes the attention of a model's modules."""

    def owns(self, module: nn.Module) -> bool: ...

    def attend(self, module: nn.Module, call: PaddedCall) -> Tensor: ...


_LISTENER: ContextVar[Listener | None] = ContextVar("manyheads_listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Calls of the listener's modules in this thread go to it inside the block."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def current_listener() -> Listener | None:
    """Who computes the attention in this thread."""
    return _LISTENER.get()


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that `transformers` calls."""
    listener = _LISTENER.get()
    if listener is None or not listener.owns(module):
        return attend_plainly(module, query, key, value, attention_mask, **kwargs), None
    if not module.training:
        kwargs["dropout"] = 0.0
    call = PaddedCall.of(query, key, value, attention_mask, kwargs)
    return listener.attend(module, call), None


def lazy_mask(**arguments: Any) -> LazyMask:
    """The mask function that `transformers` calls."""
    return LazyMask.of(arguments)


def attend_plainly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> Tensor:
    """Attention when nobody listens: the same numbers as "sdpa" and "eager" of `transformers`."""
    call = PaddedCall.of(query, key, value, mask, kwargs)
    if call.chosen_keys is not None:
        mask = call._mask_of_chosen()
    elif isinstance(mask, LazyMask):
        mask = mask.dense()
    dropout = call.dropout if module.training else 0.0
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value))
    outputs = []
    for start in range(0, max(1, query.shape[2]), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        scores = query[:, :, rows] @ key.transpose(2, 3) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        for term in (call.position_bias, mask):
            if term is None:
                continue
            term = term[..., : key.shape[2]]
            term = term if term.shape[2] == 1 else term[:, :, rows]
            if term.dtype == torch.bool:
                scores = scores.masked_fill(~term, torch.finfo(scores.dtype).min)
            else:
                scores = scores + term
        if call.sink is not None:
            sink = call.sink.view(1, heads, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32)[..., : key.shape[2]].to(query.dtype)
        outputs.append(nn.functional.dropout(weights, dropout, dropout > 0) @ value)
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


@cache
def register() -> None:
    """Register our functions, once: a name that a model uses cannot be taken back."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError:
        raise MissingPackageError("a model of transformers", "transformers>=5") from None
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lazy_mask)


_LOCK = Lock()
# For each config that is switched to us: how often, and what it said before.
_SWITCHED: dict[int, tuple[Any, int, Any]] = {}


@contextmanager
def our_attention(model: nn.Module, *, weights: bool = False) -> Iterator[None]:
    """Let a model dispatch to us inside the block, or compute eagerly and return its weights.

    Only the outermost of nested uses switches a config, which several models and threads may share.
    """
    register()
    every: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    configs = {
        id(config): config for config in every if hasattr(config, "_attn_implementation_internal")
    }
    settings: dict[str, Any] = {"_attn_implementation_internal": "eager" if weights else NAME}
    if weights:
        settings["_output_attentions"] = True
    with _LOCK:
        for key, config in configs.items():
            own = {name: getattr(config, name, None) for name in settings}
            _, uses, before = _SWITCHED.get(key, (config, 0, own))
            _SWITCHED[key] = config, uses + 1, before
            vars(config).update(settings)
    try:
        yield
    finally:
        with _LOCK:
            for key in configs:
                config, uses, before = _SWITCHED.pop(key)
                if uses > 1:
                    _SWITCHED[key] = config, uses - 1, before
                else:
                    vars(config).update(before)
