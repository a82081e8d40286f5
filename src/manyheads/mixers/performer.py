"""Performer (arXiv 2009.14794): softmax attention estimated by random features, in linear time."""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.devices import without_autocast
from manyheads.mixers.head_weights import DecayWeights
from manyheads.mixers.linear_attention import mix_both_ways
from manyheads.mixers.mixer import HeadMixer, Heads, Mixed, SizedHeadSettings, state_of
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.mixers.recurrent.decay_recurrence import run_decay_recurrence, suits_kernels
from manyheads.ragged import Lengths, Ragged

# Added to every feature, whose largest is one, so that no sum of weights is zero.
EPS = 1e-6
# Tokens over which the largest is taken one by one.
RUN = 64

# Of n tokens: h heads with d channels of queries and keys; m features of each head.
Keys = Float[Tensor, "n h d"]
Values = Float[Tensor, "n h e"]
Directions = Float[Tensor, "h m d"]
Features = Float[Tensor, "n h m"]
# A number per token and head, or per text and head.
PerToken = Float[Tensor, "n h"]
PerText = Float[Tensor, "b h"]


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Performer(SizedHeadSettings):
    """Attention whose softmax is estimated by `features` positive random features per head.

    The features (FAVOR+) are orthogonal, so that the estimate is unbiased with a smaller variance,
    and it becomes exact as their number grows.
    """

    features: PositiveInt
    causal: bool = True
    bias: bool = False


class PerformerLayer(HeadMixer):
    """Performer attention with its projections; its features are saved with the weights."""

    carries_state = True

    features: Directions

    def __init__(self, config: Performer) -> None:
        super().__init__(config)
        inner = config.heads * config.size
        self.project = nn.Linear(config.width, 3 * inner, bias=config.bias)
        self.output = nn.Linear(inner, config.width, bias=config.bias)
        shape = (config.heads, config.features, config.size)
        self.register_buffer("features", orthogonal_features(*shape))

    def mix(self, qkv: Heads, x: Ragged, cache: StateSlot | None) -> Mixed:
        query, key, value = qkv
        causal = self.config.causal
        h0, before = state_of(cache, 2)
        f_query, f_key, decay, largest = featurized(
            query, key, self.features, x.lengths, before, causal=causal
        )
        # The sum of the weights is one more channel.
        wider = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1).to(f_key.dtype)
        if causal:
            mixed, ht = run_decay_recurrence(f_query, f_key, wider, decay, x.lengths, h0)
            if cache is not None:
                cache.keep(ht, largest)
        else:
            mixed = mix_both_ways(f_query, f_key, wider, x.lengths)
        options = {"causal": causal, "normalized": True}
        weights = partial(DecayWeights, f_query, f_key, decay, x.lengths, **options)
        return (mixed[..., :-1] / mixed[..., -1:]).to(value.dtype), weights


def orthogonal_features(
    heads: int, features: int, size: int, generator: torch.Generator | None = None
) -> Directions:
    """Directions that are orthogonal within every `size` of them, as long as Gaussian vectors."""
    blocks = -(-features // size)
    square = torch.randn(heads, blocks, size, size, generator=generator)
    directions, triangle = torch.linalg.qr(square)
    # Without the signs the directions would not be evenly distributed.
    directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    lengths = torch.randn(heads, features, size, generator=generator).norm(dim=-1, keepdim=True)
    return directions.transpose(-2, -1).flatten(1, 2)[:, :features] * lengths


def naive_performer(
    query: Keys, key: Keys, value: Values, features: Directions, lengths: Lengths, *, causal: bool
) -> Values:
    """o_i = sum_j f(q_i) f(k_j) v_j / sum_j f(q_i) f(k_j), token by token: the oracle of the tests.

    f(x) = exp(w x - |x|^2 / 2), with x times d^-1/4; it overflows where scores are large.
    """
    f_query, f_key = (
        (torch.einsum("nhd,hmd->nhm", x, features) - x.square().sum(-1, keepdim=True) / 2).exp()
        for x in (query * query.shape[-1] ** -0.25, key * query.shape[-1] ** -0.25)
    )
    outputs = torch.zeros_like(value)
    for tokens in lengths.slices():
        for t in range(tokens.start, tokens.stop):
            keys = slice(tokens.start, t + 1 if causal else tokens.stop)
            weights = torch.einsum("hm,shm->hs", f_query[t], f_key[keys])
            outputs[t] = torch.einsum("hs,she->he", weights, value[keys]) / weights.sum(-1)[:, None]
    return outputs


@without_autocast
def featurized(
    query: Keys,
    key: Keys,
    features: Directions,
    lengths: Lengths,
    before: PerText | None = None,
    *,
    causal: bool,
    by_triton: bool | None = None,
) -> tuple[Features, Features, PerToken | None, PerText]:
    """The features of queries and keys, divided by the largest so that none overflows.

    A factor on a query changes nothing, so that each has its own. Keys of a text share theirs. A
    causal model knows only the keys so far: there it grows with the text, and all that was summed
    up decays by as much. Returned too: this decay, and the logarithm of the factor at the end.
    """
    if by_triton is None:
        by_triton = suits_kernels(query, max(features.shape[1:]))
    decay: PerToken | None
    if by_triton and causal:
        # The features are as precise as queries and keys are.
        from manyheads.mixers.kernels.triton_features import features_of, key_peaks

        top, decay, largest = _running_largest(key_peaks(key, features), lengths, before)
        f_query = features_of(query, features, None, EPS)
        return f_query, features_of(key, features, top, EPS), decay, largest
    scale = query.shape[-1] ** -0.25
    of_query, of_key = (
        torch.einsum("nhd,hmd->nhm", x.float() * scale, features.float()) for x in (query, key)
    )
    # exp(w . x - |x|^2 / 2): of a query the second part is such a factor, and left out.
    f_query = (of_query - of_query.detach().amax(-1, keepdim=True)).exp() + EPS
    half_norm = (key.float() * scale).square().sum(-1) / 2
    peaks = (of_key.amax(-1) - half_norm).detach()
    if causal:
        top, decay, largest = _running_largest(peaks, lengths, before)
    else:
        largest = peaks.new_full((lengths.count, peaks.shape[1]), -torch.inf)
        owners = lengths.sequence_of_token.unsqueeze(1).expand_as(peaks)
        largest = largest.scatter_reduce(0, owners, peaks, "amax")
        top, decay = largest[lengths.sequence_of_token], None
    f_key = (of_key - (half_norm + top).unsqueeze(-1)).exp() + EPS
    return f_query, f_key, decay, largest


def _running_largest(
    peaks: PerToken, lengths: Lengths, before: PerText | None
) -> tuple[PerToken, PerToken, PerText]:
    """The largest so far of each text, how much is left at every token of what was scaled by the
    one before, as a logarithm, and the largest at the end."""
    if before is None:
        before = peaks.new_full((lengths.count, peaks.shape[1]), -torch.inf)
    if not lengths.total:
        return peaks, peaks, before
    top = torch.maximum(_running_maximum(peaks, lengths), before[lengths.sequence_of_token])
    present = ChunkLayout.of(lengths, min(RUN, lengths.longest)).sequence_of_first
    starts, ends = lengths.offsets[:-1].long()[present], lengths.offsets[1:].long()[present] - 1
    earlier = torch.cat([top[:1], top[:-1]]).index_copy(0, starts, before[present])
    # Nothing was summed up before the first key.
    decay = (earlier - top).nan_to_num(nan=0.0, neginf=0.0)
    return top, decay, before.index_copy(0, present, top[ends])


def _running_maximum(x: PerToken, lengths: Lengths) -> PerToken:
    """The largest so far of each text: within chunks, then over chunks in the same way."""
    chunks = ChunkLayout.of(lengths, min(RUN, lengths.longest))
    empty = chunks.token_of_slot == lengths.total
    inside = chunks.cut(x).masked_fill(empty.unsqueeze(-1), -torch.inf).cummax(1).values
    if chunks.counts.longest > 1:
        carried = _running_maximum(inside[:, -1], chunks.counts)
        nothing = torch.full_like(carried[chunks.first_of_sequence], -torch.inf)
        inside = torch.maximum(inside, chunks.shifted(carried, nothing).unsqueeze(1))
    return chunks.join(inside)


@torch.no_grad()
def softmax_error(
    query: Keys, key: Keys, features: Directions, *, causal: bool = True
) -> Float[Tensor, "h n"]:
    """How much of the softmax weights of one text the estimate moves: 0 none, 1 all of them.

    It is the total variation distance between both rows of weights, for every query.
    """
    lengths = Lengths.of([query.shape[0]], query.device)
    f_query, f_key, decay, _ = featurized(query, key, features, lengths, causal=causal)
    estimate = DecayWeights(f_query, f_key, decay, lengths, causal=causal, normalized=True).of(0)
    scores = torch.einsum("nhd,mhd->hnm", query.float(), key.float()) * query.shape[-1] ** -0.5
    if causal:
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return (estimate - scores.softmax(-1)).abs().sum(-1) / 2
