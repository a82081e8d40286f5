"""The recurrence of Mamba: states that decay and grow, each on its own.

    h_t = decay_t h_{t-1} + added_t

The state h0 at the start of every sequence is zero, or `state`.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.ragged import Lengths

# Tokens that a loop visits one by one, in all groups at once.
GROUP = 16

# The states of n tokens, and those after each of b sequences.
States = Float[Tensor, "n *states"]
Ends = Float[Tensor, "b *states"]


def naive_diagonal_scan(
    decay: States, added: States, lengths: Lengths, state: Ends
) -> tuple[States, Ends]:
    """The formula token by token: the oracle of the tests."""
    states, ends = torch.zeros_like(added), []
    for h, tokens in zip(state, lengths.slices(), strict=True):
        for t in range(tokens.start, tokens.stop):
            h = decay[t] * h + added[t]
            states[t] = h
        ends.append(h)
    return states, torch.stack(ends)


def diagonal_scan(
    decay: States, added: States, lengths: Lengths, state: Ends | None = None
) -> tuple[States, Ends]:
    """The state after every token, and after every sequence."""
    h0 = added.new_zeros(lengths.count, *added.shape[1:]) if state is None else state
    if not lengths.total:
        return added, h0
    offsets = lengths.offsets.long()
    present = [index for index, length in enumerate(lengths.each) if length]
    sequences: Tensor | slice = slice(None)
    first, ends = offsets[:-1], offsets[1:] - 1
    if len(present) < lengths.count:
        sequences = torch.tensor(present, device=added.device)
        first, ends = first[sequences], ends[sequences]
    if state is not None:
        added = added.index_add(0, first, decay[first] * state[sequences])
    states = _scan(decay, added, lengths)
    if isinstance(sequences, slice):
        return states, states[ends]
    return states, h0.index_copy(0, sequences, states[ends])


def _scan(decay: States, added: States, lengths: Lengths) -> States:
    """Groups of tokens side by side, then the groups as if each were a token.

    Only products of decays are formed, never their inverses, so that nothing overflows.
    """
    if lengths.longest <= 1:
        return added
    groups = ChunkLayout.of(lengths, min(GROUP, lengths.longest))
    factors, terms = groups.cut(decay).unbind(1), groups.cut(added).unbind(1)
    states, decays = [terms[0]], [factors[0]]
    for factor, term in zip(factors[1:], terms[1:], strict=True):
        states.append(torch.addcmul(term, factor, states[-1]))
        decays.append(decays[-1] * factor)
    local = torch.stack(states, 1)
    if groups.counts.longest > 1:
        after = _scan(decays[-1], states[-1], groups.counts)
        h = groups.shifted(after, torch.zeros_like(after[groups.first_of_sequence]))
        local = torch.addcmul(local, torch.stack(decays, 1), h.unsqueeze(1))
    return groups.join(local)
