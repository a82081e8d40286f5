"""Which expert a byte is sent to, and what that depends on."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.models import Decoder
from manyheads.parts.experts import MixtureOfExperts, RouterLosses
from studies.byte_texts import BYTES, ByteTexts
from studies.training import Batch, Loss, logits_of, run_decoder

# Bytes by class; the class of all others is the last.
CLASSES = (
    b"abcdefghijklmnopqrstuvwxyz",
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    b"0123456789",
    b" ",
    b"\n\t",
    b"[]{}<>|=*#&_/\\`@",
    b".,;:!?'\"()-",
)
# An expert with less than this share of an even load is dead.
DEAD = 0.05


def balanced_loss(weight: float) -> Loss:
    """The mean loss of the next byte, and the balance of the routers times a weight."""

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        ids = batch[0]
        logits, added = run_decoder(model, ids[:, :-1])
        total = F.cross_entropy(logits.float(), ids[:, 1:].flatten())
        routed = [losses.balance for losses in added if isinstance(losses, RouterLosses)]
        return total + weight * torch.stack(routed).sum() if weight and routed else total

    return loss


@torch.no_grad()
def find_routes(model: nn.Module, ids: Tensor, batch: int = 16) -> Tensor:
    """The experts of each byte of passages [b t], most likely first: [layers, b, t, k]."""
    assert isinstance(model, Decoder)
    chosen: dict[int, list[Tensor]] = {}

    def note(layer: int, top_k: int, module: nn.Module, inputs: Any, logits: Tensor) -> None:
        del module, inputs
        chosen.setdefault(layer, []).append(logits.float().topk(top_k, dim=-1).indices)

    hooks = []
    for number, layer in enumerate(model.stack.layers):
        experts = layer.feedforward
        assert isinstance(experts, MixtureOfExperts)
        look = partial(note, number, experts.config.top_k)
        hooks.append(experts.router.register_forward_hook(look))
    for part in ids.split(batch):
        logits_of(model, part)
    for hook in hooks:
        hook.remove()
    routes = torch.stack([torch.cat(parts) for parts in chosen.values()])
    return routes.unflatten(1, tuple(ids.shape)).cpu()


def read_documents(texts: ByteTexts, count: int, passages: int, length: int) -> Tensor:
    """Stretches of the held-out text far apart, each in passages that follow one another: [b t]."""
    data = texts.parts["held out"]
    stretch = passages * length
    starts = torch.arange(count, device=data.device) * ((len(data) - stretch) // max(count - 1, 1))
    offsets = torch.arange(stretch, device=data.device)
    return data[starts[:, None] + offsets].long().view(count * passages, length)


def entropy(x: Tensor) -> float:
    """Of whole numbers, in bits."""
    shares = torch.bincount(x.flatten()).double() / x.numel()
    return -float(torch.xlogy(shares, shares).sum()) / math.log(2)


def mutual_information(x: Tensor, y: Tensor) -> float:
    """Of two rows of whole numbers, in bits, less what chance alone would show."""
    rows, columns = (values.flatten().unique(return_inverse=True) for values in (x, y))
    width = len(columns[0])
    joint = entropy(rows[1] * width + columns[1])
    chance = (len(rows[0]) - 1) * (width - 1) / (2 * x.numel() * math.log(2))
    return entropy(rows[1]) + entropy(columns[1]) - joint - chance


def byte_classes(ids: Tensor) -> Tensor:
    table = torch.full((BYTES,), len(CLASSES))
    for number, members in enumerate(CLASSES):
        table[list(members)] = number
    return table[ids.cpu()]


def measure_loads(routes: Tensor, experts: int) -> dict[str, float]:
    """How even the load is, over layers: the largest above the mean (as in arXiv 2408.15664),

    the entropy of the load as a share of the highest, and the share of dead experts.
    """
    loads = torch.stack([torch.bincount(layer.flatten(), minlength=experts) for layer in routes])
    shares = loads.double() / loads.sum(1, keepdim=True) * experts
    spread = -torch.xlogy(shares / experts, shares / experts).sum(1) / math.log(experts)
    return {
        "violation": float(shares.amax(1).mean()) - 1,
        "evenness": float(spread.mean()),
        "dead": float((shares < DEAD).double().mean()),
        "most_dead": float((shares < DEAD).double().mean(1).max()),
    }


def measure_choices(routes: Tensor, ids: Tensor, documents: int) -> dict[str, Any]:
    """What the first choice depends on, as shares of its entropy, by layer and on average."""
    sources = {
        "class": byte_classes(ids),
        "byte": ids.cpu(),
        "document": torch.arange(documents).repeat_interleave(len(ids) // documents)[:, None],
    }
    firsts = routes[..., 0]
    layers: dict[str, list[float]] = {name: [] for name in (*sources, "repeated", "by chance")}
    for first in firsts:
        highest = max(entropy(first), 1e-9)
        for name, values in sources.items():
            layers[name].append(mutual_information(first, values.expand_as(first)) / highest)
        shares = torch.bincount(first.flatten()).double() / first.numel()
        layers["repeated"].append(float((first[:, 1:] == first[:, :-1]).double().mean()))
        layers["by chance"].append(float(shares.square().sum()))
    means = {name: sum(values) / len(values) for name, values in layers.items()}
    return {**means, "excess": means["repeated"] - means["by chance"], "layers": layers}


def overlap(routes: Tensor, final: Tensor) -> float:
    """The share of choices that are among the final ones of the same byte."""
    return float((routes[..., :, None] == final[..., None, :]).any(-1).double().mean())


def write_routes(routes: Tensor, count: int) -> list[str]:
    """First choices of the first bytes, a letter for each expert, by layer."""
    return [
        "".join(chr(ord("A") + expert) for expert in layer.flatten()[:count].tolist())
        for layer in routes[..., 0]
    ]


def agreement(runs: Sequence[Sequence[str]]) -> float:
    """What the choices of one seed say about those of another: a share of their entropy."""
    shares = []
    for number, first in enumerate(runs):
        for second in runs[number + 1 :]:
            for pair in zip(first, second, strict=True):
                one, two = (torch.tensor([*text.encode()]) for text in pair)
                least = max(min(entropy(one), entropy(two)), 1e-9)
                shares.append(mutual_information(one, two) / least)
    return sum(shares) / len(shares) if shares else math.nan
