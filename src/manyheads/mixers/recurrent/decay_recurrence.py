"""The recurrence of linear attention, retention and Mamba-2: a state that decays and grows.

For every head, with a state h of key size times value size:

    h_t = exp(g_t) h_{t-1} + k_t v_t^T        o_t = q_t^T h_t

The state is zero, or `state`, at the start of every sequence. Four ways compute the same:
`naive_decay_recurrence`, the formula token by token; `recur_in_chunks` for whole sequences, in time
linear in the number of tokens; `recur_one_token` for generation; `decay_pattern` as a matrix of
weights, which is what a head attends to.

Letters, as in fla: `g` the log decay of a token, `g_cumsum` its sum from the start of a chunk up to
and including each token, `g_chunk` that of the whole chunk, `kv` what a chunk adds to the state,
`h` the state before each chunk, `h0` before and `ht` after each sequence.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.devices import runs_triton, triton_precision, without_autocast
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.ragged import Lengths

# Tokens per chunk, and chunks that are joined by one product of matrices.
CHUNK = 64
FAN = 4
# Channels of a key or a value that the kernels take.
LARGEST_OF_TRITON = 128
# Channels of a key in a step of one token, whose state a program holds.
LARGEST_KEY = 512

# Of n tokens: values of h heads, of which some may share one of g keys; b states.
Keys = Float[Tensor, "n g d"]
Values = Float[Tensor, "n h e"]
LogDecay = Float[Tensor, "n h"] | None
State = Float[Tensor, "b h d e"]
# The outputs of all tokens, and the state after each sequence.
Result = tuple[Values, State]


def suits_kernels(x: Tensor, largest: int) -> bool:
    """Whether kernels compute with heads of so many channels.

    Exact products of float32 are left to torch: their kernels take minutes to compile.
    """
    return runs_triton(x) and triton_precision(x) == "tf32" and largest <= LARGEST_OF_TRITON


def steps_by_triton(x: Tensor, state: Tensor) -> bool:
    """Whether a kernel serves one more token of each sequence."""
    grad = torch.is_grad_enabled() and (x.requires_grad or state.requires_grad)
    return runs_triton(x) and not grad and state.shape[2] <= LARGEST_KEY


def naive_decay_recurrence(
    q: Keys, k: Keys, v: Values, log_decay: LogDecay, lengths: Lengths, state: State
) -> Result:
    """The formula token by token: the oracle of the tests."""
    outputs, states = torch.zeros_like(v), []
    for h, tokens in zip(state, lengths.slices(), strict=True):
        for t in range(tokens.start, tokens.stop):
            if log_decay is not None:
                h = log_decay[t].exp()[:, None, None] * h
            h = h + k[t].unsqueeze(-1) * v[t].unsqueeze(-2)
            outputs[t] = (q[t].unsqueeze(-2) @ h).squeeze(-2)
        states.append(h)
    return outputs, torch.stack(states)


def run_decay_recurrence(
    q: Keys, k: Keys, v: Values, log_decay: LogDecay, lengths: Lengths, state: State | None
) -> Result:
    """The outputs and the state after each sequence, by the way that suits the lengths."""
    if state is None or lengths.longest != 1 or not lengths.uniform:
        return recur_in_chunks(q, k, v, log_decay, lengths, state)
    return recur_one_token(q, k, v, log_decay, state)


@without_autocast
def recur_in_chunks(
    q: Keys,
    k: Keys,
    v: Values,
    log_decay: LogDecay,
    lengths: Lengths,
    state: State | None = None,
    *,
    chunk: int | None = None,
    by_triton: bool | None = None,
) -> Result:
    """The outputs, and the state after each sequence, in float32 as the state itself.

    Neighboring heads may share queries and keys: decays are applied to values and outputs, so
    that products of shared keys are computed once. On CUDA kernels compute all this where they can,
    unless `by_triton` says otherwise.
    """
    if by_triton is None:
        by_triton = suits_kernels(q, max(q.shape[2], v.shape[2]))
    wide = by_triton and max(q.shape[2], v.shape[2]) <= CHUNK
    chunks = ChunkLayout.of(lengths, chunk or (2 * CHUNK if wide else CHUNK))
    heads, groups = v.shape[1], q.shape[1]
    h0 = v.new_zeros(lengths.count, heads, q.shape[2], v.shape[2], dtype=torch.float32)
    h0 = h0 if state is None else state.float()
    if not lengths.total:
        return v, h0
    if by_triton:
        # These keep what a chunk computes inside the chip.
        from manyheads.mixers.kernels.triton_decay import chunk_outputs, chunk_states
        from manyheads.mixers.kernels.triton_states import joined_states

        precision = triton_precision(q)
        kv, g_chunk = chunk_states(k, v, log_decay, chunks, precision)
        h, ht = joined_states(kv, g_chunk, h0, chunks.counts, log_decay is not None)
        return chunk_outputs(q, k, v, log_decay, h, chunks, precision), ht
    query, key, value = (chunks.cut(x).float().transpose(1, 2) for x in (q, k, v))
    scores = query @ key.transpose(2, 3)
    if log_decay is None:
        g_cumsum = value.new_zeros(*value.shape[:2], 1)
        output = (scores.tril().repeat_interleave(heads // groups, dim=1)) @ value
        v_decayed = value
    else:
        g_cumsum = chunks.cut(log_decay).float().transpose(1, 2).cumsum(-1)
        weights = _decay_within(g_cumsum).unflatten(1, (groups, -1)) * scores.unsqueeze(2)
        output = weights.flatten(1, 2) @ value
        v_decayed = value * (g_cumsum[..., -1:] - g_cumsum).exp().unsqueeze(-1)
    kv = _product_by_group(key.transpose(2, 3), v_decayed)
    h, ht = _join_states(kv, g_cumsum[..., -1], h0, chunks)
    earlier = _product_by_group(query, h)
    scale = None if log_decay is None else g_cumsum.exp().unsqueeze(-1)
    output = output + earlier if scale is None else torch.addcmul(output, earlier, scale)
    return chunks.join(output.transpose(1, 2)).to(v.dtype), ht


def _join_states(
    kv: Float[Tensor, "c h d e"], g_chunk: Float[Tensor, "c h"], h0: State, chunks: ChunkLayout
) -> tuple[Float[Tensor, "c h d e"], State]:
    """The state before each chunk and after each sequence."""
    first = chunks.first_of_sequence
    h0_present = h0[chunks.sequence_of_first]
    kv = kv.index_add(0, first, h0_present * g_chunk[first].exp()[..., None, None])
    after = _scan(kv, g_chunk, chunks)
    ht = h0.index_copy(0, chunks.sequence_of_first, after[chunks.last_of_sequence])
    return chunks.shifted(after, h0_present), ht


def _product_by_group(
    left: Float[Tensor, "c g i j"], right: Float[Tensor, "c h j e"]
) -> Float[Tensor, "c h i e"]:
    """The product of each head's matrix with that of its group: one wide product per group."""
    groups, heads, size = left.shape[1], right.shape[1], right.shape[3]
    if groups == heads:
        return left @ right
    wide = right.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)
    return (left @ wide).unflatten(3, (-1, size)).transpose(2, 3).flatten(1, 2)


def recur_one_token(q: Keys, k: Keys, v: Values, log_decay: LogDecay, state: State) -> Result:
    """One more token of each sequence: its output and the new state."""
    if steps_by_triton(v, state):
        from manyheads.mixers.kernels.triton_one_token import one_token

        return one_token(q, k, v, log_decay, None, state)
    if v.shape[1] != q.shape[1]:
        q, k = (x.repeat_interleave(v.shape[1] // q.shape[1], dim=1) for x in (q, k))
    if log_decay is not None:
        state = state * log_decay.float().exp()[..., None, None]
    state = state + k.float().unsqueeze(-1) * v.float().unsqueeze(-2)
    output = (q.float().unsqueeze(-2) @ state).squeeze(-2)
    return output.to(v.dtype), state


def decay_pattern(q: Keys, k: Keys, log_decay: LogDecay) -> Float[Tensor, "h n n"]:
    """The weight of every key in the output of every query of one sequence."""
    products = torch.einsum("nhd,mhd->hnm", q.float(), k.float())
    g_cumsum = q.new_zeros(q.shape[:2]) if log_decay is None else log_decay
    return products * _decay_within(g_cumsum.float().T.cumsum(-1))


def _decay_within(g_cumsum: Float[Tensor, "*b s"]) -> Float[Tensor, "*b s s"]:
    """What is left of an earlier token (the second axis) at a later one; 0 for those after it."""
    between = g_cumsum.unsqueeze(-1) - g_cumsum.unsqueeze(-2)
    visible = torch.ones(between.shape[-2:], dtype=torch.bool, device=g_cumsum.device).tril()
    return between.masked_fill(~visible, -torch.inf).exp()


def _scan(
    kv: Float[Tensor, "c h d e"], g_chunk: Float[Tensor, "c h"], chunks: ChunkLayout
) -> Float[Tensor, "c h d e"]:
    """The state after every chunk, given what each adds and how it decays the state before it.

    The chunks of a sequence are joined `FAN` at a time by a product with the matrix of their
    decays, then groups of them in the same way, so that no loop runs over all chunks.
    """
    if chunks.counts.longest == 1:
        return kv
    groups = ChunkLayout.of(chunks.counts, min(FAN, chunks.counts.longest))
    g_cumsum = groups.cut(g_chunk).cumsum(1)
    weights = _decay_within(g_cumsum.transpose(1, 2))
    local = torch.einsum("ghij,gjhde->gihde", weights, groups.cut(kv))
    if groups.counts.longest > 1:
        h_group = _scan(local[:, -1], g_cumsum[:, -1], groups)
        h = groups.shifted(h_group, torch.zeros_like(h_group[groups.first_of_sequence]))
        local = local + g_cumsum.exp()[..., None, None] * h.unsqueeze(1)
    return groups.join(local)
