"""Encode texts as one vector per token, for late interaction."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.bridge.wrapped_model import WrappedModel
from manyheads.encoding.encode import (
    BATCH_TOKENS,
    TEXTS_AT_ONCE,
    Device,
    last_states,
    read_ahead,
    text_stack,
    vector_dtype,
)
from manyheads.encoding.text_reader import (
    Ids,
    Reader,
    TextReader,
    Texts,
    batch_by_length,
    open_reader,
    require_text_model,
    resolve_max_length,
    to_device,
    to_device_batch,
)
from manyheads.errors import InputError, TruncationWarning
from manyheads.models.build import Model, eval_mode
from manyheads.models.provenance import LateInteractionConfig, Role
from manyheads.parts.linear_layout import column_major_weights
from manyheads.progress import Progress
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Patterns, Site, Tap

ROLES: tuple[Role, ...] = ("query", "document")


@dataclass(frozen=True, slots=True, eq=False)
class RoleBatch:
    """Token ids of queries or documents, prompts and expansion included.

    Of each text no token attends to those beyond the first `attended`, and only the `kept` tokens
    get a vector.
    """

    ids: Ragged
    attended: tuple[int, ...]
    kept: Bool[Tensor, " n"]

    @property
    def kept_lengths(self) -> Lengths:
        """How many tokens of each text get a vector."""
        counts = [int(each.sum()) for each in self.ids.with_values(self.kept).to("cpu").to_list()]
        return Lengths.of(counts, self.ids.device)


def encode_tokens(
    model: Model,
    texts: Texts,
    *,
    role: Role = "document",
    batch_tokens: int | None = None,
    longest: int | None = None,
    device: Device = "cpu",
    progress: bool = True,
) -> Ragged:
    """One vector per token of each text, in the order of the texts, at least in float32.

    `model.late` says how texts of a role are read: behind which prompt, how long, which tokens get
    no vector, how queries are expanded, and how hidden states are projected. Without it the vectors
    are the model's last hidden states, normalized. Texts of more than `longest` tokens are
    truncated, and a `TruncationWarning` counts them. Token ids, in lists or a `Ragged`, are
    used as they are, without a prompt. The vectors are returned on `device`.

    >>> from manyheads.models.build import build
    >>> encode_tokens(build("tiny-encoder", seed=0), [[5, 6, 7], [8]]).lengths.each
    (3, 1)
    """
    if batch_tokens is not None and batch_tokens < 1:
        raise InputError(f"batch_tokens must be at least 1, got {batch_tokens}")
    reader, late = open_role_reader(model, texts, role, longest), late_of(model)
    source = reader.model
    home, width = source.table.device, late.width(text_stack(source).config.width)
    kind = "cpu" if home.type == "cpu" else "cuda"
    batch_tokens = batch_tokens or BATCH_TOKENS[kind]
    values = [torch.zeros(0, width, dtype=vector_dtype(source), device=device)]
    each: list[int] = []
    tokens = cut = 0
    with Progress("encoding", unit="tokens", enabled=progress) as bar, eval_mode(source):
        for ids, cut_here in read_ahead(reader, TEXTS_AT_ONCE[kind]):
            read = [late_ids(late, one, role) for one in ids]
            tokens, cut = tokens + sum(map(len, read)), cut + cut_here
            counts = [int(kept_tokens(late, one, role).sum()) for one in read]
            bar.expect(tokens * len(reader) / (len(each) + len(ids)))
            made = _encode_some(source, ids, role, counts, batch_tokens, bar)
            values.append(made.to(device, non_blocking=True))
            each += counts
    if home.type == "cuda":
        torch.cuda.synchronize(home)
    if cut:
        sentence = f"{cut:,} of {len(reader):,} texts were truncated to {reader.longest:,} tokens"
        warnings.warn(sentence, TruncationWarning, stacklevel=2)
    return Ragged(torch.cat(values), Lengths.of(each, device))


def late_of(model: Model) -> LateInteractionConfig:
    """How the model gives vectors of tokens; by default its last states, normalized."""
    return model.late or LateInteractionConfig()


def open_role_reader(model: Model, texts: Texts, role: Role, longest: int | None = None) -> Reader:
    """A reader of texts as token ids, behind the prompt of the role and without expansion."""
    if role not in ROLES:
        raise InputError(f"role must be {' or '.join(ROLES)}, got {role!r}")
    source, late = require_text_model(model), late_of(model)
    bound = resolve_max_length(source, longest)
    length = late.length(role) if longest is None else longest
    if length is not None:
        bound = length if bound is None else min(bound, length)
    prompt = late.prompt(role)
    if prompt and not isinstance(texts, Ragged):
        listed = [texts] if isinstance(texts, str) else list(texts)
        texts = [prompt + text if isinstance(text, str) else text for text in listed]
    return open_reader(source, texts, bound)


def late_ids(late: LateInteractionConfig, ids: Ids, role: Role) -> Ids:
    """The ids of a text, and the tokens that expand it if it is a query."""
    if role != "query" or late.expansion is None:
        return ids
    missing = max(late.expansion.length - len(ids), 0)
    return np.concatenate([ids, np.full(missing, late.expansion.token, dtype=np.int64)])


def kept_tokens(late: LateInteractionConfig, ids: Ids, role: Role) -> np.ndarray:
    """Which tokens of a text, expanded already, get a vector."""
    if role not in late.skipped_in or not late.skipped:
        return np.ones(len(ids), dtype=bool)
    return ~np.isin(ids, late.skipped)


def role_batch(
    model: Model, ids: Sequence[Ids], role: Role, device: torch.device | None = None
) -> RoleBatch:
    """A batch of texts as `open_role_reader` reads them; queries are expanded here."""
    late = late_of(model)
    read = [late_ids(late, one, role) for one in ids]
    attends = late.expansion is None or late.expansion.attend
    attended = tuple(len(one) for one in (read if attends else ids))
    home = require_text_model(model).table.device if device is None else device
    kept = np.concatenate([kept_tokens(late, one, role) for one in read])
    return RoleBatch(to_device_batch(read, home), attended, to_device(torch.from_numpy(kept), home))


def token_vectors(model: Model, batch: RoleBatch) -> Ragged:
    """The vectors of the kept tokens, with gradients where they are enabled.

    >>> from manyheads.models.build import build
    >>> model = build("tiny-encoder", seed=0)
    >>> batch = role_batch(model, [np.array([5, 6, 7]), np.array([8])], "query")
    >>> token_vectors(model, batch).values.requires_grad
    True
    """
    return Ragged(_kept_vectors(require_text_model(model), batch), batch.kept_lengths)


def _kept_vectors(model: TextReader, batch: RoleBatch) -> Float[Tensor, "k c"]:
    hidden = batch.attended != batch.ids.lengths.each
    if hidden:
        _check_can_hide(model)
    watch = HiddenKeys(batch.attended) if hidden else None
    states = last_states(model, text_stack(model), batch.ids, watch).values[batch.kept]
    return late_of(model).project(states.to(vector_dtype(model)))


def _check_can_hide(model: TextReader) -> None:
    mixes = any(layer.mixer is not None for layer in text_stack(model).config.layers)
    if mixes or isinstance(model, WrappedModel):
        what = "a model with mixers" if mixes else "a wrapped model"
        raise InputError(
            f"the tokens that expand a query cannot be hidden from the others in {what}",
            "use an expansion with attend=True, or none",
        )


class HiddenKeys:
    """A watcher that lets no token attend to those beyond the first `attended` of its sequence."""

    def __init__(self, attended: Sequence[int]) -> None:
        self.attended = attended

    def wants(self, site: Site) -> bool:
        return site.tap is Tap.SCORES

    def see(self, site: Site, value: Ragged | Patterns) -> Patterns:  # noqa: ARG002, a watcher
        assert isinstance(value, Patterns)
        pairs = zip(value.each, self.attended, strict=True)
        return Patterns(tuple(_without_keys(scores, count) for scores, count in pairs))


def _without_keys(scores: Float[Tensor, "h t s"], attended: int) -> Float[Tensor, "h t s"]:
    keys = torch.arange(scores.shape[-1], device=scores.device)
    return scores.masked_fill(keys >= attended, -torch.inf)


def _encode_some(
    model: TextReader,
    ids: list[Ids],
    role: Role,
    counts: list[int],
    batch_tokens: int,
    bar: Progress,
) -> Float[Tensor, "k c"]:
    """The vectors of texts of all lengths, in their order, on the model's device."""
    stack, home, late = text_stack(model), model.table.device, late_of(model)
    lengths = [len(late_ids(late, one, role)) for one in ids]
    width = late.width(stack.config.width)
    starts = np.cumsum([0, *counts])
    made = torch.zeros(int(starts[-1]), width, dtype=vector_dtype(model), device=home)
    with column_major_weights(stack, sum(lengths)), torch.inference_mode():
        for indices in batch_by_length(lengths, batch_tokens):
            batch = role_batch(model, [ids[index] for index in indices], role, home)
            rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in indices])
            made[to_device(torch.from_numpy(rows), home)] = _kept_vectors(model, batch)
            bar.advance(batch.ids.values.shape[0])
    return made
