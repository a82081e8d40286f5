"""The delta rule: a state that replaces what it holds under a key instead of adding to it.

For every head, with a state h of key size times value size (arXiv 2406.06484, 2412.06464):

    h'_t = exp(g_t) h_{t-1}
    h_t = h'_t + beta_t k_t (v_t - h'_t^T k_t)^T        o_t = h_t^T q_t

The log decay g is a number per head, or one per channel of the key as in Kimi delta attention
(arXiv 2510.26692). The state is zero, or `state`, at the start of every sequence.

Chunks use the WY form of the papers, with the letters of fla: `g_cumsum` is the sum of g from the
start of a chunk up to each token, `g_chunk` that of the whole chunk; `h` the state before a chunk,
`h0` before and `ht` after a sequence; `u` what the tokens of a chunk write if `h` is zero, `w` how
`h` corrects that, so that they write v_new = u - w h; `k_decayed` the keys times the decay up to
the end of the chunk, `q_decayed` the queries times the decay from its start.
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
from manyheads.mixers.recurrent.decay_recurrence import steps_by_triton
from manyheads.ragged import Lengths

# Tokens per chunk. With a decay per channel the products of a chunk have one more axis.
CHUNK = 64
CHUNK_BY_CHANNEL = 16

HAS_FLA = HAS_TRITON and find_spec("fla") is not None
# Channels of a key that the kernels of fla-core can take.
LARGEST_FLA_KEY = 256
# Channels of a key that our own kernels can take; a value may have any number.
LARGEST_TRITON_KEY = 128

# Of n tokens: h heads with d channels of keys and e of values; a state for each of b sequences.
Keys = Float[Tensor, "n h d"]
# Heads of values may share those of queries and keys.
SharedKeys = Float[Tensor, "n g d"]
Values = Float[Tensor, "n h e"]
Rate = Float[Tensor, "n h"]
Decay = Float[Tensor, "n h"] | Float[Tensor, "n h d"]
State = Float[Tensor, "b h d e"]
# The outputs of all tokens, and the state after each sequence.
Result = tuple[Values, State]


def naive_delta_rule(
    q: Keys, k: Keys, v: Values, beta: Rate, log_decay: Decay, lengths: Lengths, state: State
) -> Result:
    """The formulas token by token: the oracle of the tests."""
    outputs, states = torch.zeros_like(v), []
    decay = log_decay.exp() if log_decay.ndim == 3 else log_decay.exp().unsqueeze(-1)
    for h, tokens in zip(state, lengths.slices(), strict=True):
        for t in range(tokens.start, tokens.stop):
            h = decay[t].unsqueeze(-1) * h
            error = v[t] - torch.einsum("hde,hd->he", h, k[t])
            h = h + torch.einsum("h,hd,he->hde", beta[t], k[t], error)
            outputs[t] = torch.einsum("hde,hd->he", h, q[t])
        states.append(h)
    return outputs, torch.stack(states)


def run_delta_rule(
    q: SharedKeys,
    k: SharedKeys,
    v: Values,
    beta: Rate,
    log_decay: Decay,
    lengths: Lengths,
    state: State | None,
) -> Result:
    """The outputs and the state after each sequence, by the way that suits the lengths."""
    if state is not None and lengths.longest == 1 and lengths.uniform:
        return delta_one_token(q, k, v, beta, log_decay, state)
    q, k = (_by_value_head(x, v) for x in (q, k))
    if _fla_can(q, k, v, beta, log_decay, lengths):
        return delta_by_fla(q, k, v, beta, log_decay, lengths, state)
    return delta_in_chunks(q, k, v, beta, log_decay, lengths, state)


def delta_by_fla(
    q: Keys,
    k: Keys,
    v: Values,
    beta: Rate,
    log_decay: Decay,
    lengths: Lengths,
    state: State | None = None,
) -> Result:
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
    learns = any(tensor.requires_grad for tensor in (q, k, v, beta, log_decay))
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
    q: Keys,
    k: Keys,
    v: Values,
    beta: Rate,
    log_decay: Decay,
    lengths: Lengths,
    state: State | None = None,
    *,
    chunk: int | None = None,
    by_triton: bool | None = None,
) -> Result:
    """The outputs, and the state after each sequence, in float32 as the state itself.

    What a chunk writes depends on the state before it, so chunks run one after another; all that
    does not depend on it is computed for all chunks at once. On CUDA kernels compute the
    slowest parts where they can, unless `by_triton` says otherwise.
    """
    if by_triton is None:
        by_triton = runs_triton(q) and q.shape[2] <= LARGEST_TRITON_KEY
    by_channel = log_decay.ndim == 3 and not by_triton
    chunks = ChunkLayout.of(lengths, chunk or (CHUNK_BY_CHANNEL if by_channel else CHUNK))
    h0 = v.new_zeros(lengths.count, *q.shape[1:], v.shape[2], dtype=torch.float32)
    h0 = h0 if state is None else state.float()
    if not lengths.total:
        return v, h0
    if by_triton:
        return _delta_by_triton(q, k, v, beta, log_decay, chunks, h0)
    parts = _prepare_chunks(q, k, v, beta, log_decay, chunks)
    output, ht = _walk(parts, h0, chunks)
    return chunks.join(output.transpose(1, 2)).to(v.dtype), ht


def _delta_by_triton(
    q: Keys, k: Keys, v: Values, beta: Rate, log_decay: Decay, chunks: ChunkLayout, h0: State
) -> Result:
    """Chunks by kernels: their parts, the walk of the state over them, then all outputs."""
    from manyheads.mixers.kernels import triton_delta, triton_delta_chunks

    precision, dtype = triton_precision(q), v.dtype
    if not q.dtype == k.dtype == v.dtype:
        q, k, v = q.float(), k.float(), v.float()
    g_cumsum = triton_delta_chunks.cumsum_in_chunks(log_decay, chunks)
    parts = triton_delta_chunks.chunk_parts(q, k, v, beta, g_cumsum, chunks, precision)
    q_decayed, weights, u, w, k_decayed, g_chunk = parts
    h, v_new, ht = triton_delta.walk_over_chunks(
        u, w, k_decayed, g_chunk, h0, chunks.counts, precision
    )
    output = triton_delta_chunks.chunk_outputs(
        q_decayed, weights, h, v_new, chunks, dtype, precision
    )
    return output, ht


class _ChunkParts(NamedTuple):
    """What does not depend on the state: o = q_decayed h + weights v_new."""

    q_decayed: Float[Tensor, "c h s d"]
    weights: Float[Tensor, "c h s s"]
    u: Float[Tensor, "c h s e"]
    w: Float[Tensor, "c h s d"]
    k_decayed: Float[Tensor, "c h s d"]
    g_chunk: Float[Tensor, "c h 1 _"]


def _prepare_chunks(
    q: Keys, k: Keys, v: Values, beta: Rate, log_decay: Decay, chunks: ChunkLayout
) -> _ChunkParts:
    """All that does not depend on the state, for all chunks at once."""
    query, key, value = (chunks.cut(x).float().transpose(1, 2) for x in (q, k, v))
    beta = chunks.cut(beta).float().transpose(1, 2).unsqueeze(-1)
    decay = log_decay if log_decay.ndim == 3 else log_decay.unsqueeze(-1)
    g_cumsum = chunks.cut(decay).float().transpose(1, 2).cumsum(2)
    # A token corrects what those before it in the chunk wrote: a triangular system.
    decay_so_far = g_cumsum.exp()
    products, weights = _decayed_products((key, query), key, g_cumsum)
    overlaps = beta * products.tril(-1)
    right = beta * torch.cat([value, key * decay_so_far], dim=-1)
    solved = torch.linalg.solve_triangular(overlaps, right, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[2], q.shape[2]], dim=-1)
    g_chunk = g_cumsum[:, :, -1:]
    k_decayed = key * (g_chunk - g_cumsum).exp()
    return _ChunkParts(query * decay_so_far, weights, u, w, k_decayed, g_chunk)


def _walk(
    parts: _ChunkParts, h0: State, chunks: ChunkLayout
) -> tuple[Float[Tensor, "c h s e"], State]:
    """The outputs of every chunk and the state after each sequence, one chunk after another."""
    # One product reads the state, one reads and keeps what the chunk writes.
    reading = torch.cat([parts.w, parts.q_decayed], dim=2)
    writing = torch.cat([parts.weights, parts.k_decayed.transpose(2, 3)], dim=2)
    u, decay = parts.u, parts.g_chunk.exp().transpose(2, 3)
    outputs, order, size, device = [], [], u.shape[2], u.device
    ht = h0
    for number in range(chunks.counts.longest):
        active = [index for index, count in enumerate(chunks.counts.each) if count > number]
        places = [chunks.counts.starts[index] + number for index in active]
        now: Any = slice(places[0], places[0] + 1)
        sequences: Any = slice(active[0], active[0] + 1)
        if len(active) > 1:
            now, sequences = (torch.tensor(rows, device=device) for rows in (places, active))
        h = ht[sequences]
        correction, earlier = (reading[now] @ h).split(size, dim=2)
        update = writing[now] @ (u[now] - correction)
        outputs.append(earlier + update[:, :, :size])
        after = torch.addcmul(update[:, :, size:], h, decay[now])
        every = len(active) == chunks.counts.count
        ht = after if every else ht.index_copy(0, torch.tensor(active, device=device), after)
        order += places
    output = torch.cat(outputs)
    if chunks.counts.count > 1:
        output = output[torch.tensor(order, device=device).argsort()]
    return output, ht


def delta_one_token(
    q: SharedKeys, k: SharedKeys, v: Values, beta: Rate, log_decay: Decay, state: State
) -> Result:
    """One more token of each sequence: its output and the new state."""
    if steps_by_triton(v, state):
        from manyheads.mixers.kernels.triton_one_token import one_token

        return one_token(q, k, v, log_decay, beta, state)
    q, k = (_by_value_head(x, v) for x in (q, k))
    decay = log_decay if log_decay.ndim == 3 else log_decay.unsqueeze(-1)
    state = state * decay.float().exp().unsqueeze(-1)
    query, key = (x.float().unsqueeze(-2) for x in (q, k))
    error = v.float().unsqueeze(-2) - key @ state
    state = state + key.transpose(-1, -2) * (error * beta.float()[..., None, None])
    return (query @ state).squeeze(-2).to(v.dtype), state


def _by_value_head(x: SharedKeys, v: Values) -> Keys:
    """Queries or keys for each head of values."""
    repeats = v.shape[1] // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def delta_pattern(q: Keys, k: Keys, beta: Rate, log_decay: Decay) -> Float[Tensor, "h n n"]:
    """The weight of every value in the output of every query of one sequence."""
    decay = log_decay if log_decay.ndim == 3 else log_decay.unsqueeze(-1)
    query, key = (x.float().transpose(0, 1) for x in (q, k))
    beta = beta.float().T.unsqueeze(-1)
    g_cumsum = decay.float().transpose(0, 1).cumsum(1)
    products, weights = _decayed_products((key, query), key, g_cumsum)
    overlaps = beta * products.tril(-1)
    once = torch.diag_embed(beta.squeeze(-1))
    u = torch.linalg.solve_triangular(overlaps, once, upper=False, unitriangular=True)
    return weights @ u


def _decayed_products(
    queries: Sequence[Float[Tensor, "*b s d"]],
    key: Float[Tensor, "*b s d"],
    g_cumsum: Float[Tensor, "*b s c"],
) -> list[Float[Tensor, "*b s s"]]:
    """Products of each of several queries with earlier keys, decayed; 0 with later ones."""
    size = key.shape[-2]
    if g_cumsum.shape[-1] == 1:
        between = (g_cumsum - g_cumsum.transpose(-1, -2)).clamp(max=0.0).exp().tril()
        return [(query @ key.transpose(-1, -2)) * between for query in queries]
    # Distance by distance, so that no channel is computed for later keys.
    rows: list[list[Tensor]] = [[] for _ in queries]
    for far in range(size):
        decay = (g_cumsum[..., far:, :] - g_cumsum[..., : size - far, :]).exp()
        decayed = key[..., : size - far, :] * decay
        for row, query in zip(rows, queries, strict=True):
            product = torch.linalg.vecdot(query[..., far:, :], decayed)
            row.append(F.pad(product, (far, 0)))
    place = torch.arange(size, device=key.device)
    apart = (place.unsqueeze(1) - place).clamp(min=0)
    stacked = [torch.stack(row, dim=-1) for row in rows]
    return [product.gather(-1, apart.expand(product.shape)).tril() for product in stacked]
