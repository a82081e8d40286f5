"""Config and weights of an attention with fewer heads, or a feed-forward with fewer neurons."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.models.layer import FeedForwardConfig
from manyheads.parts.feedforward import FeedForward
from manyheads.parts.gates import Gate
from manyheads.parts.positions import Alibi
from manyheads.parts.positions.relative import BucketTable

HeadMeans = Float[Tensor, "h d"]


def attention_with(
    config: AttentionConfig, kept: Sequence[int], *, writes_mean: bool = False
) -> AttentionConfig:
    """The config of the heads that stay; a head of keys goes with the last query that reads it.

    One that writes the mean of the others needs a bias for it.

    >>> config = AttentionConfig(width=64, heads=8, kv_heads=2)
    >>> attention_with(config, [0, 1, 2, 5]).kv_heads
    (3, 1)
    """
    if writes_mean:
        biased = config.bias in ("inputs", "all")
        config = replace(config, bias="all" if biased else "output")
    if len(kept) == config.heads:
        return config
    owners = [config.owners[head] for head in kept]
    groups = tuple(owners.count(key) for key in _keys(config, kept))
    position = config.position
    if isinstance(position, Alibi):
        position = position.keep(kept, config.heads)
    return replace(
        config,
        heads=len(kept),
        kv_heads="each" if config.kv_heads == "each" else groups,
        head_size=config.size,
        position=position,
        gates=tuple(_uncut(gate, config.heads) for gate in config.gates),
    )


def attention_weights(
    attention: Attention, kept: Sequence[int], means: HeadMeans | None = None
) -> dict[str, Tensor]:
    """The weights of the heads that stay, by name; `means` of the others go into the bias.

    A table of buckets is not among them: it may belong to another layer.
    """
    found: dict[str, Tensor] = {}
    for name, linear, rows in (
        ("project", attention.project, attention.our_rows),
        ("project_memory", attention.project_memory, attention.memory_rows),
    ):
        for kind in ("weight", "bias"):
            joined = None if linear is None else getattr(linear, kind)
            if joined is not None:
                parts = zip(rows, joined.split(list(rows.values())), strict=True)
                chosen = [_rows(attention.config, part, values, kept) for part, values in parts]
                found[f"{name}.{kind}"] = torch.cat(chosen)
    columns = attention.output.weight.unflatten(1, (attention.config.heads, -1))
    found["output.weight"] = columns[:, list(kept)].flatten(1)
    bias = written_by(attention, kept, means)
    if bias is not None:
        found["output.bias"] = bias
    for name in ("sink", "head_scale"):
        if getattr(attention, name) is not None:
            found[name] = getattr(attention, name)[list(kept)]
    for name in ("query_norm", "key_norm", "table"):
        part = getattr(attention, name)
        if part is not None and not isinstance(part, BucketTable):
            found |= {f"{name}.{own}": each for own, each in part.state_dict().items()}
    return found


def written_by(
    attention: Attention, kept: Sequence[int], means: HeadMeans | None
) -> Float[Tensor, " c"] | None:
    """The bias of the output projection, with what the heads that go write on average."""
    bias = attention.output.bias
    if means is None:
        return bias
    gone = [head for head in range(attention.config.heads) if head not in kept]
    weight = attention.output.weight
    columns = weight.unflatten(1, (attention.config.heads, -1))[:, gone].flatten(1)
    said = columns.double() @ means[gone].flatten().to(weight.device).double()
    return (said if bias is None else bias.double() + said).to(weight.dtype)


def feedforward_with(config: FeedForwardConfig, hidden: int) -> FeedForwardConfig:
    return config if config.hidden == hidden else replace(config, hidden=hidden)


def feedforward_weights(feedforward: FeedForward, kept: Sequence[int]) -> dict[str, Tensor]:
    """The rows of the input projections and the columns of the output's that stay."""
    found: dict[str, Tensor] = {}
    parts = 2 if feedforward.gated else 1
    for name, joined in feedforward.expand.state_dict().items():
        chosen = [half[list(kept)] for half in joined.chunk(parts)]
        found[f"expand.{name}"] = torch.cat(chosen)
    found["contract.weight"] = feedforward.contract.weight[:, list(kept)]
    if feedforward.contract.bias is not None:
        found["contract.bias"] = feedforward.contract.bias
    return found


def _keys(config: AttentionConfig, kept: Sequence[int]) -> list[int]:
    """The heads of keys that somebody still reads."""
    return sorted({config.owners[head] for head in kept})


def _uncut(gate: Gate, heads: int) -> Gate:
    """A final gate meets slices of the width, which stay as wide as they were."""
    return gate if gate.at != "final" else replace(gate, slices=gate.cut(heads))


def _rows(
    config: AttentionConfig, part: str, values: Float[Tensor, "rows *c"], kept: Sequence[int]
) -> Float[Tensor, "fewer *c"]:
    """Of one part of an input projection the rows that belong to the heads that stay."""
    name = part.removeprefix("gate_")
    heads = _keys(config, kept) if name in ("key", "value") else list(kept)
    gate = next((each for each in config.gates if part == f"gate_{each.at}"), None)
    if gate is not None and (gate.heads == "shared" or gate.at == "final"):
        return values
    count = config.key_heads if name in ("key", "value") else config.heads
    return values.unflatten(0, (count, -1))[heads].flatten(0, 1)
