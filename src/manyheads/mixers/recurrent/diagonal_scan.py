"""The recurrence of Mamba and S4D: states that decay and grow, each on its own.

    h_t = decay_t h_{t-1} + added_t

The state is zero, or the given one, at the start of every sequence.
"""

import torch
from jaxtyping import Inexact
from torch import Tensor

from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.ragged import Lengths

# Tokens that a loop visits one by one, in all groups at once.
GROUP = 16


def diagonal_scan(
    decay: Inexact[Tensor, "n *states"],
    added: Inexact[Tensor, "n *states"],
    lengths: Lengths,
    state: Inexact[Tensor, "b *states"] | None = None,
) -> tuple[Inexact[Tensor, "n *states"], Inexact[Tensor, "b *states"]]:
    """The state after every token, and after every sequence."""
    before = added.new_zeros(lengths.count, *added.shape[1:]) if state is None else state
    if not lengths.total:
        return added, before
    present = [index for index, length in enumerate(lengths.each) if length]
    sequences = torch.tensor(present, device=added.device)
    offsets = lengths.offsets.long()
    first, last = offsets[sequences], offsets[sequences + 1] - 1
    if state is not None:
        added = added.index_add(0, first, decay[first] * state[sequences])
    states = _scan(decay, added, lengths)
    return states, before.index_copy(0, sequences, states[last])


def _scan(
    decay: Inexact[Tensor, "n *states"], added: Inexact[Tensor, "n *states"], lengths: Lengths
) -> Inexact[Tensor, "n *states"]:
    """Groups of tokens side by side, then the groups as if each were a token.

    Only products of decays are formed, never their inverses, so that nothing overflows.
    """
    if lengths.longest <= 1:
        return added
    groups = ChunkLayout.of(lengths, min(GROUP, lengths.longest))
    factors, terms = groups.cut(decay).unbind(1), groups.cut(added).unbind(1)
    states, kept = [terms[0]], [factors[0]]
    for factor, term in zip(factors[1:], terms[1:], strict=True):
        states.append(torch.addcmul(term, factor, states[-1]))
        kept.append(kept[-1] * factor)
    local = torch.stack(states, 1)
    if groups.counts.longest > 1:
        after = _scan(kept[-1], states[-1], groups.counts)
        entering = groups.shifted(after, torch.zeros_like(after[groups.first_of_sequence]))
        local = torch.addcmul(local, torch.stack(kept, 1), entering.unsqueeze(1))
    return groups.join(local)
