"""Encode texts as one vector per token, for late interaction."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.bridge.wrapped_model import WrappedModel
from manyheads.encoding import encode, text_reader
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
        masks = self.ids.with_values(self.kept).to("cpu").to_list()
        return Lengths.of([int(mask.sum()) for mask in masks], self.ids.device)


def encode_tokens(
    model: Model,
    texts: text_reader.Texts,
    *,
    role: Role = "document",
    batch_tokens: int | None = None,
    max_length: int | None = None,
    device: encode.Device = "cpu",
    progress: bool = True,
) -> Ragged:
    """One vector per token of each text, in the order of the texts, at least in float32.

    `model.late` says how texts of a role are read: behind which prompt, how long, which tokens get
    no vector, how queries are expanded, and how hidden states are projected. Without it the vectors
    are the model's last hidden states, normalized. Texts of more than `max_length` tokens are
    truncated, and a `TruncationWarning` counts them. Token ids, in lists or a `Ragged`, are
    used as they are, without a prompt. The vectors are returned on `device`.

    >>> from manyheads.models.build import build
    >>> encode_tokens(build("tiny-encoder", seed=0), [[5, 6, 7], [8]]).lengths.each
    (3, 1)
    """
    options = text_reader.ReadOptions(batch_tokens=batch_tokens)
    reader, late = open_role_reader(model, texts, role, max_length), late_of(model)
    source, stack = reader.model, encode.text_stack(reader.model)
    home, dtype = encode.home_of(source), encode.vector_dtype(source)
    width, batch_tokens = late.width(stack.config.width), options.tokens_per_batch(home)
    values = [torch.zeros(0, width, dtype=dtype, device=device)]
    vectors_per_text: list[int] = []
    tokens = truncated = 0
    with Progress("encoding", unit="tokens", enabled=progress) as bar, eval_mode(source):
        for ids, truncated_now in encode.read_ahead(reader):
            expanded = [late_ids(late, text, role) for text in ids]
            lengths = [len(text) for text in expanded]
            tokens, truncated = tokens + sum(lengths), truncated + truncated_now
            counts = [int(kept_tokens(late, text, role).sum()) for text in expanded]
            bar.expect(tokens * len(reader) / (len(vectors_per_text) + len(ids)))
            starts = np.cumsum([0, *counts])
            vectors = torch.zeros(int(starts[-1]), width, dtype=dtype, device=home)
            with column_major_weights(stack, sum(lengths)), torch.inference_mode():
                for indices in text_reader.batch_by_length(lengths, batch_tokens):
                    batch = role_batch(source, [ids[index] for index in indices], role, home)
                    rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in indices])
                    places = text_reader.to_device(torch.from_numpy(rows), home)
                    vectors[places] = _kept_vectors(source, batch)
                    bar.advance(batch.ids.values.shape[0])
            values.append(vectors.to(device, non_blocking=True))
            vectors_per_text += counts
    if home.type == "cuda":
        torch.cuda.synchronize(home)
    if truncated:
        message = text_reader.truncation_message(truncated, len(reader), reader.max_length)
        warnings.warn(message, TruncationWarning, stacklevel=2)
    return Ragged(torch.cat(values), Lengths.of(vectors_per_text, device))


def late_of(model: Model) -> LateInteractionConfig:
    """How the model gives vectors of tokens; by default its last states, normalized."""
    return model.late or LateInteractionConfig()


def open_role_reader(
    model: Model, texts: text_reader.Texts, role: Role, max_length: int | None = None
) -> text_reader.Reader:
    """A reader of texts as token ids, behind the prompt of the role and without expansion."""
    if role not in ROLES:
        raise InputError(f"role must be {' or '.join(ROLES)}, got {role!r}")
    source, late = text_reader.require_text_model(model), late_of(model)
    bound = text_reader.resolve_max_length(source, max_length)
    length = late.length(role) if max_length is None else max_length
    if length is not None:
        bound = length if bound is None else min(bound, length)
    prompt = late.prompt(role)
    if prompt and not isinstance(texts, Ragged):
        listed = [texts] if isinstance(texts, str) else list(texts)
        texts = [prompt + text if isinstance(text, str) else text for text in listed]
    return text_reader.open_reader(source, texts, bound)


def late_ids(late: LateInteractionConfig, ids: text_reader.Ids, role: Role) -> text_reader.Ids:
    """The ids of a text, and the tokens that expand it if it is a query."""
    if role != "query" or late.expansion is None:
        return ids
    missing = max(late.expansion.length - len(ids), 0)
    return np.concatenate([ids, np.full(missing, late.expansion.token, dtype=np.int64)])


def kept_tokens(late: LateInteractionConfig, ids: text_reader.Ids, role: Role) -> np.ndarray:
    """Which tokens of a text, expanded already, get a vector."""
    if role not in late.skipped_in or not late.skipped:
        return np.ones(len(ids), dtype=bool)
    return ~np.isin(ids, late.skipped)


def role_batch(
    model: Model, ids: Sequence[text_reader.Ids], role: Role, device: torch.device | None = None
) -> RoleBatch:
    """A batch of texts as `open_role_reader` reads them; queries are expanded here."""
    late = late_of(model)
    expanded = [late_ids(late, text, role) for text in ids]
    attends = late.expansion is None or late.expansion.attend
    attended = tuple(len(text) for text in (expanded if attends else ids))
    home = encode.home_of(text_reader.require_text_model(model)) if device is None else device
    mask = torch.from_numpy(np.concatenate([kept_tokens(late, text, role) for text in expanded]))
    return RoleBatch(
        text_reader.to_device_batch(expanded, home), attended, text_reader.to_device(mask, home)
    )


def token_vectors(model: Model, batch: RoleBatch) -> Ragged:
    """The vectors of the kept tokens, with gradients where they are enabled.

    >>> from manyheads.models.build import build
    >>> model = build("tiny-encoder", seed=0)
    >>> batch = role_batch(model, [np.array([5, 6, 7]), np.array([8])], "query")
    >>> token_vectors(model, batch).values.requires_grad
    True
    """
    return Ragged(_kept_vectors(text_reader.require_text_model(model), batch), batch.kept_lengths)


def _kept_vectors(model: text_reader.TextReader, batch: RoleBatch) -> Float[Tensor, "k c"]:
    watch = None
    if batch.attended != batch.ids.lengths.each:
        mixes = any(layer.mixer is not None for layer in encode.text_stack(model).config.layers)
        if mixes or isinstance(model, WrappedModel):
            what = "a model with mixers" if mixes else "a wrapped model"
            raise InputError(
                f"the tokens that expand a query cannot be hidden from the others in {what}",
                "use an expansion with attend=True, or none",
            )
        watch = HiddenKeys(batch.attended)
    states = encode.last_states(model, encode.text_stack(model), batch.ids, watch)
    return late_of(model).project(states.values[batch.kept].to(encode.vector_dtype(model)))


class HiddenKeys:
    """A watcher that lets no token attend to those beyond the first `attended` of its sequence."""

    def __init__(self, attended: Sequence[int]) -> None:
        self.attended = attended

    def wants(self, site: Site) -> bool:
        return site.tap is Tap.SCORES

    def see(self, site: Site, value: Ragged | Patterns) -> Patterns:  # noqa: ARG002, a watcher
        assert isinstance(value, Patterns)
        masked = []
        for scores, count in zip(value.each, self.attended, strict=True):
            keys = torch.arange(scores.shape[-1], device=scores.device)
            masked.append(scores.masked_fill(keys >= count, -torch.inf))
        return Patterns(tuple(masked))
