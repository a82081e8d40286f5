"""The recurrence of linear attention, retention and Mamba-2: a state that decays and grows.

For every head, with a state S of key size times value size:

    S_t = exp(log_decay_t) S_{t-1} + k_t v_t^T        o_t = q_t^T S_t

The state is zero, or the given one, at the start of every sequence. Three ways compute the same:
`recur_in_chunks` for whole sequences, in time linear in the number of tokens; `recur_one_token` for
generation; `decay_pattern` as a matrix of weights, which is what a head attends to.
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


def suits_kernels(x: Tensor, largest: int) -> bool:
    """Whether kernels compute with heads of so many channels.

    Exact products of float32 are left to torch: their kernels take minutes to compile.
    """
    return runs_triton(x) and triton_precision(x) == "tf32" and largest <= LARGEST_OF_TRITON


@without_autocast
def recur_in_chunks(
    q: Float[Tensor, "n g d"],
    k: Float[Tensor, "n g d"],
    v: Float[Tensor, "n h e"],
    log_decay: Float[Tensor, "n h"] | None,
    lengths: Lengths,
    state: Float[Tensor, "b h d e"] | None = None,
    *,
    chunk: int | None = None,
    by_triton: bool | None = None,
) -> tuple[Float[Tensor, "n h e"], Float[Tensor, "b h d e"]]:
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
    before = v.new_zeros(lengths.count, heads, q.shape[2], v.shape[2], dtype=torch.float32)
    before = before if state is None else state.float()
    if not lengths.total:
        return v, before
    if by_triton:
        return _recur_by_triton(q, k, v, log_decay, chunks, before)
    query, key, value = (chunks.cut(x).float().transpose(1, 2) for x in (q, k, v))
    scores = query @ key.transpose(2, 3)
    if log_decay is None:
        passed = value.new_zeros(*value.shape[:2], 1)
        output = (scores.tril().repeat_interleave(heads // groups, dim=1)) @ value
        decayed = value
    else:
        # The decay from the start of the chunk up to and including each token.
        passed = chunks.cut(log_decay).float().transpose(1, 2).cumsum(-1)
        weights = _decay_within(passed).unflatten(1, (groups, -1)) * scores.unsqueeze(2)
        output = weights.flatten(1, 2) @ value
        decayed = value * (passed[..., -1:] - passed).exp().unsqueeze(-1)
    added = _product_by_group(key.transpose(2, 3), decayed)
    entering, last = _join_states(added, passed[..., -1], before, chunks)
    earlier = _product_by_group(query, entering)
    scale = None if log_decay is None else passed.exp().unsqueeze(-1)
    output = output + earlier if scale is None else torch.addcmul(output, earlier, scale)
    return chunks.join(output.transpose(1, 2)).to(v.dtype), last


def _recur_by_triton(
    q: Float[Tensor, "n g d"],
    k: Float[Tensor, "n g d"],
    v: Float[Tensor, "n h e"],
    log_decay: Float[Tensor, "n h"] | None,
    chunks: ChunkLayout,
    before: Float[Tensor, "b h d e"],
) -> tuple[Float[Tensor, "n h e"], Float[Tensor, "b h d e"]]:
    """The same by kernels that keep what a chunk computes inside the chip."""
    from manyheads.mixers.kernels.triton_decay import added_states, chunk_outputs
    from manyheads.mixers.kernels.triton_states import joined_states

    precision = triton_precision(q)
    added, whole = added_states(k, v, log_decay, chunks, precision)
    entering, last = joined_states(
        added, whole, before, chunks.counts, decays=log_decay is not None
    )
    return chunk_outputs(q, k, v, log_decay, entering, chunks, precision), last


def _join_states(
    added: Float[Tensor, "c h d e"],
    whole: Float[Tensor, "c h"],
    before: Float[Tensor, "b h d e"],
    chunks: ChunkLayout,
) -> tuple[Float[Tensor, "c h d e"], Float[Tensor, "b h d e"]]:
    """The state before each chunk and after each sequence.

    Given are what each chunk adds, how it decays the state, and the state before each sequence.
    """
    first = chunks.first_of_sequence
    given = before[chunks.sequence_of_first]
    added = added.index_add(0, first, given * whole[first].exp()[..., None, None])
    after = _scan(added, whole, chunks)
    last = before.index_copy(0, chunks.sequence_of_first, after[chunks.last_of_sequence])
    return chunks.shifted(after, given), last


def _product_by_group(
    left: Float[Tensor, "c g i j"], right: Float[Tensor, "c h j e"]
) -> Float[Tensor, "c h i e"]:
    """The product of each head's matrix with that of its group: one wide product per group."""
    groups, heads, size = left.shape[1], right.shape[1], right.shape[3]
    if groups == heads:
        return left @ right
    wide = right.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)
    return (left @ wide).unflatten(3, (-1, size)).transpose(2, 3).flatten(1, 2)


def recur_one_token(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "b h d"],
    v: Float[Tensor, "b h e"],
    log_decay: Float[Tensor, "b h"] | None,
    state: Float[Tensor, "b h d e"],
) -> tuple[Float[Tensor, "b h e"], Float[Tensor, "b h d e"]]:
    """One more token of each sequence: its output and the new state."""
    if log_decay is not None:
        state = state * log_decay.float().exp()[..., None, None]
    state = state + k.float().unsqueeze(-1) * v.float().unsqueeze(-2)
    output = (q.float().unsqueeze(-2) @ state).squeeze(-2)
    return output.to(v.dtype), state


def decay_pattern(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "n h d"],
    log_decay: Float[Tensor, "n h"] | None,
) -> Float[Tensor, "h n n"]:
    """The weight of every key in the output of every query of one sequence."""
    products = torch.einsum("nhd,mhd->hnm", q.float(), k.float())
    passed = q.new_zeros(q.shape[:2]) if log_decay is None else log_decay
    return products * _decay_within(passed.float().T.cumsum(-1))


def _decay_within(passed: Float[Tensor, "*b s"]) -> Float[Tensor, "*b s s"]:
    """What is left of an earlier token (the second axis) at a later one; 0 for those after it."""
    between = passed.unsqueeze(-1) - passed.unsqueeze(-2)
    seen = torch.ones(between.shape[-2:], dtype=torch.bool, device=passed.device).tril()
    return between.masked_fill(~seen, -torch.inf).exp()


def _scan(
    added: Float[Tensor, "c h d e"], log_decay: Float[Tensor, "c h"], chunks: ChunkLayout
) -> Float[Tensor, "c h d e"]:
    """The state after every chunk, given what each adds and how it decays the state before it.

    The chunks of a sequence are joined `FAN` at a time by a product with the matrix of their
    decays, then groups of them in the same way, so that no loop runs over all chunks.
    """
    if chunks.counts.longest == 1:
        return added
    groups = ChunkLayout.of(chunks.counts, min(FAN, chunks.counts.longest))
    passed = groups.cut(log_decay).cumsum(1)
    weights = _decay_within(passed.transpose(1, 2))
    local = torch.einsum("ghij,gjhde->gihde", weights, groups.cut(added))
    if groups.counts.longest > 1:
        carried = _scan(local[:, -1], passed[:, -1], groups)
        entering = groups.shifted(carried, torch.zeros_like(carried[groups.first_of_sequence]))
        local = local + passed.exp()[..., None, None] * entering.unsqueeze(1)
    return groups.join(local)
