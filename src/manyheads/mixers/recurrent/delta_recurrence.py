"""The delta rule: a state that replaces what it holds under a key instead of adding to it.

For every head, with a state S of key size times value size (arXiv 2406.06484, 2412.06464):

    S'_t = exp(log_decay_t) S_{t-1}
    S_t = S'_t + beta_t k_t (v_t - S'_t^T k_t)^T        o_t = S_t^T q_t

The decay is a number per head, or one per channel of the key as in Kimi delta attention (arXiv
2510.26692). The state is zero, or the given one, at the start of every sequence.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.devices import HAS_TRITON, runs_triton, triton_precision, without_autocast
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.ragged import Lengths

# Tokens per chunk. With a decay per channel the products of a chunk have one more axis.
CHUNK = 64
CHUNK_BY_CHANNEL = 16

HAS_FLA = HAS_TRITON and find_spec("fla") is not None
# Channels of a key that the kernels of fla-core can take.
LARGEST_FLA_KEY = 256
# Channels of a key that our own kernels can take; a value may have any number.
LARGEST_TRITON_KEY = 128

Decay = Float[Tensor, "n h"] | Float[Tensor, "n h d"]


def run_delta_rule(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n h d"],
    v: Float[Tensor, "n h e"],
    beta: Float[Tensor, "n h"],
    log_decay: Decay,
    lengths: Lengths,
    state: Float[Tensor, "b h d e"] | None,
) -> tuple[Float[Tensor, "n h e"], Float[Tensor, "b h d e"]]:
    """The outputs and the state after each sequence, by the way that suits the lengths."""
    if state is not None and lengths.longest == 1 and lengths.uniform:
        return delta_one_token(q, k, v, beta, log_decay, state)
    if _fla_can(q, k, v, beta, log_decay, lengths):
        return delta_by_fla(q, k, v, beta, log_decay, lengths, state)
    return delta_in_chunks(q, k, v, beta, log_decay, lengths, state)


def delta_by_fla(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n h d"],
    v: Float[Tensor, "n h e"],
    beta: Float[Tensor, "n h"],
    log_decay: Decay,
    lengths: Lengths,
    state: Float[Tensor, "b h d e"] | None = None,
) -> tuple[Float[Tensor, "n h e"], Float[Tensor, "b h d e"]]:
    """The same as `delta_in_chunks` by the Triton kernels of fla-core, the extra `fla`."""
    if log_decay.ndim == 3:
        from fla.ops.kda import chunk_kda as rule
    else:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule as rule
    output, after = rule(
        q.unsqueeze(0),
        k.unsqueeze(0),
        v.unsqueeze(0),
        g=log_decay.float().unsqueeze(0),
        beta=beta.unsqueeze(0),
        scale=1.0,
        initial_state=None if state is None else state.float(),
        output_final_state=True,
        cu_seqlens=lengths.offsets.long(),
    )
    return output.squeeze(0).to(v.dtype), after.float()


def _fla_can(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, lengths: Lengths
) -> bool:
    """Whether fla-core is there, and its kernels take these tensors."""
    if not HAS_FLA or q.device.type != "cuda" or torch.compiler.is_compiling():
        return False
    half = q.dtype == v.dtype and v.dtype in (torch.bfloat16, torch.float16)
    if not half or q.shape[2] > LARGEST_FLA_KEY or 0 in lengths.each:
        return False
    learns = any(each.requires_grad for each in (q, k, v, beta, log_decay))
    return not (learns and torch.is_grad_enabled()) or fla_has_gradients(log_decay)


def fla_has_gradients(log_decay: Tensor) -> bool:
    """Whether fla-core gives gradients here: Triton 3.4 to 3.7.0 gets them wrong on Hopper.

    fla-core then refuses a backward pass of the decay per head (its issue 640).
    """
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:3] if part.isdigit())
    hopper = torch.cuda.get_device_capability(log_decay.device)[0] == 9
    return log_decay.ndim == 3 or not hopper or not (3, 4) <= version < (3, 7, 1)


@without_autocast
def delta_in_chunks(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n h d"],
    v: Float[Tensor, "n h e"],
    beta: Float[Tensor, "n h"],
    log_decay: Decay,
    lengths: Lengths,
    state: Float[Tensor, "b h d e"] | None = None,
    *,
    chunk: int | None = None,
    by_triton: bool | None = None,
) -> tuple[Float[Tensor, "n h e"], Float[Tensor, "b h d e"]]:
    """The outputs, and the state after each sequence, in float32 as the state itself.

    What a chunk writes depends on the state before it, so chunks run one after another; all that
    does not depend on it is computed for all chunks at once. On CUDA kernels compute the
    slowest parts where they can, unless `by_triton` says otherwise.
    """
    if by_triton is None:
        by_triton = runs_triton(q) and q.shape[2] <= LARGEST_TRITON_KEY
    by_channel = log_decay.ndim == 3
    chunks = ChunkLayout.of(lengths, chunk or (CHUNK_BY_CHANNEL if by_channel else CHUNK))
    before = v.new_zeros(lengths.count, *q.shape[1:], v.shape[2], dtype=torch.float32)
    before = before if state is None else state.float()
    if not lengths.total:
        return v, before
    parts = _prepare_chunks(q, k, v, beta, log_decay, chunks, by_triton=by_triton)
    if by_triton:
        output, last = _walk_by_triton(parts, before, chunks, triton_precision(q))
    else:
        output, last = _walk(parts, before, chunks)
    return chunks.join(output.transpose(1, 2)).to(v.dtype), last


class _ChunkParts(NamedTuple):
    """What is known of the chunks before the state is."""

    # What each token reads from the state before its chunk, and from the tokens of its chunk.
    reading: Float[Tensor, "c h s d"]
    weights: Float[Tensor, "c h s s"]
    # What each token writes if that state is zero, and how the state corrects it.
    written: Float[Tensor, "c h s e"]
    corrected: Float[Tensor, "c h s d"]
    # How what each token writes gets into the state after the chunk, and the decay of the chunk.
    kept: Float[Tensor, "c h s d"]
    whole: Float[Tensor, "c h 1 _"]


def _prepare_chunks(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n h d"],
    v: Float[Tensor, "n h e"],
    beta: Float[Tensor, "n h"],
    log_decay: Decay,
    chunks: ChunkLayout,
    *,
    by_triton: bool,
) -> _ChunkParts:
    """All that does not depend on the state, for all chunks at once."""
    query, key, value = (chunks.cut(x).float().transpose(1, 2) for x in (q, k, v))
    rate = chunks.cut(beta).float().transpose(1, 2).unsqueeze(-1)
    decay = log_decay if log_decay.ndim == 3 else log_decay.unsqueeze(-1)
    passed = chunks.cut(decay).float().transpose(1, 2).cumsum(2)
    # A token corrects what those before it in the chunk wrote: a triangular system.
    decay_before = passed.exp()
    if by_triton and log_decay.ndim == 3:
        from manyheads.mixers.kernels.triton_delta import decayed_products

        products, weights = decayed_products(key, query, passed)
    else:
        products, weights = _decayed_products((key, query), key, passed)
    overlaps = rate * products.tril(-1)
    right = rate * torch.cat([value, key * decay_before], dim=-1)
    solved = torch.linalg.solve_triangular(overlaps, right, upper=False, unitriangular=True)
    written, corrected = solved.split([v.shape[2], q.shape[2]], dim=-1)
    whole = passed[:, :, -1:]
    kept = key * (whole - passed).exp()
    return _ChunkParts(query * decay_before, weights, written, corrected, kept, whole)


def _walk(
    parts: _ChunkParts, before: Float[Tensor, "b h d e"], chunks: ChunkLayout
) -> tuple[Float[Tensor, "c h s e"], Float[Tensor, "b h d e"]]:
    """The outputs of every chunk and the state after each sequence, one chunk after another."""
    # One product reads the state, one reads and keeps what the chunk writes.
    reading = torch.cat([parts.corrected, parts.reading], dim=2)
    writing = torch.cat([parts.weights, parts.kept.transpose(2, 3)], dim=2)
    written, left = parts.written, parts.whole.exp().transpose(2, 3)
    outputs, order, size, device = [], [], written.shape[2], written.device
    last = before
    for number in range(chunks.counts.longest):
        here = [index for index, count in enumerate(chunks.counts.each) if count > number]
        start = chunks.counts.starts[here[0]] + number
        now: Any = slice(start, start + 1)
        sequences: Any = slice(here[0], here[0] + 1)
        if len(here) > 1:
            now = torch.tensor([chunks.counts.starts[index] + number for index in here])
            now, sequences = now.to(device), torch.tensor(here, device=device)
        entering = last[sequences]
        correction, earlier = (reading[now] @ entering).split(size, dim=2)
        update = writing[now] @ (written[now] - correction)
        outputs.append(earlier + update[:, :, :size])
        after = torch.addcmul(update[:, :, size:], entering, left[now])
        if len(here) == chunks.counts.count:
            last = after
        else:
            index = torch.tensor(here, device=device)
            last = last.index_copy(0, index, after)
        order += [chunks.counts.starts[index] + number for index in here]
    output = torch.cat(outputs)
    if chunks.counts.count > 1:
        output = output[torch.tensor(order, device=device).argsort()]
    return output, last


def _walk_by_triton(
    parts: _ChunkParts, before: Float[Tensor, "b h d e"], chunks: ChunkLayout, precision: str
) -> tuple[Float[Tensor, "c h s e"], Float[Tensor, "b h d e"]]:
    """The same by a kernel that walks over the chunks; all outputs are then read at once."""
    from manyheads.mixers.kernels.triton_delta import walk_over_chunks

    whole = parts.whole.squeeze(2).expand(-1, -1, before.shape[2])
    entering, new, last = walk_over_chunks(
        parts.written, parts.corrected, parts.kept, whole, before, chunks.counts, precision
    )
    return parts.reading @ entering + parts.weights @ new, last


def delta_one_token(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "b h d"],
    v: Float[Tensor, "b h e"],
    beta: Float[Tensor, "b h"],
    log_decay: Decay,
    state: Float[Tensor, "b h d e"],
) -> tuple[Float[Tensor, "b h e"], Float[Tensor, "b h d e"]]:
    """One more token of each sequence: its output and the new state."""
    decay = log_decay if log_decay.ndim == 3 else log_decay.unsqueeze(-1)
    state = state * decay.float().exp().unsqueeze(-1)
    query, key = (x.float().unsqueeze(-2) for x in (q, k))
    error = v.float().unsqueeze(-2) - key @ state
    state = state + key.transpose(-1, -2) * (error * beta.float()[..., None, None])
    return (query @ state).squeeze(-2).to(v.dtype), state


def delta_pattern(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n h d"],
    beta: Float[Tensor, "n h"],
    log_decay: Decay,
) -> Float[Tensor, "h n n"]:
    """The weight of every value in the output of every query of one sequence."""
    decay = log_decay if log_decay.ndim == 3 else log_decay.unsqueeze(-1)
    query, key = (x.float().transpose(0, 1) for x in (q, k))
    rate = beta.float().T.unsqueeze(-1)
    passed = decay.float().transpose(0, 1).cumsum(1)
    products, weights = _decayed_products((key, query), key, passed)
    overlaps = rate * products.tril(-1)
    once = torch.diag_embed(rate.squeeze(-1))
    written = torch.linalg.solve_triangular(overlaps, once, upper=False, unitriangular=True)
    return weights @ written


def _decayed_products(
    queries: Sequence[Float[Tensor, "*b s d"]],
    key: Float[Tensor, "*b s d"],
    passed: Float[Tensor, "*b s c"],
) -> list[Float[Tensor, "*b s s"]]:
    """Products of each of several queries with earlier keys, decayed; 0 with later ones."""
    size = key.shape[-2]
    if passed.shape[-1] == 1:
        between = (passed - passed.transpose(-1, -2)).clamp(max=0.0).exp().tril()
        return [(query @ key.transpose(-1, -2)) * between for query in queries]
    # Distance by distance, so that no channel is computed for later keys.
    rows: list[list[Tensor]] = [[] for _ in queries]
    for far in range(size):
        left = (passed[..., far:, :] - passed[..., : size - far, :]).exp()
        decayed = key[..., : size - far, :] * left
        for row, query in zip(rows, queries, strict=True):
            product = torch.linalg.vecdot(query[..., far:, :], decayed)
            row.append(F.pad(product, (far, 0)))
    place = torch.arange(size, device=key.device)
    apart = (place.unsqueeze(1) - place).clamp(min=0)
    stacked = [torch.stack(row, dim=-1) for row in rows]
    return [each.gather(-1, apart.expand(each.shape)).tril() for each in stacked]
