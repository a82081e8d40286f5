"""Time the ablation of heads against a plain loop and print the ratio: `python bench/ablation.py`.

A model of the size of GPT-2 with random weights reads 4 texts of 256 tokens, and every head is
ablated once. The plain loop runs the full model for each head, and so does TransformerLens if it is
installed. Their losses are compared before anything is timed. On a small machine all 144 heads take
long: `--heads` limits how many of each layer are ablated.
"""

import argparse
import os
from importlib.util import find_spec

# Threads that spin while they wait would count as work in the seconds of the processor.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.nn.functional as F
from lens_peers import hooked_loop
from side_by_side import check_agreement, count, race, say, show
from torch import Tensor

from manyheads.lens.causal.ablation import ablate
from manyheads.models.build import build
from manyheads.models.decoder import Decoder
from manyheads.ragged import Ragged
from manyheads.taps import Head, Patterns, Site, Tap

__all__ = ["main"]

OURS, PLAIN, THEIRS = "resumed", "plain loop", "TransformerLens"
LIMIT = 1e-6


class Silence:
    """Takes one head away."""

    def __init__(self, head: Head) -> None:
        self.site, self.head = Site(head.layer, Tap.HEAD_OUTPUT), head.head

    def wants(self, site: Site) -> bool:
        return site == self.site

    def see(self, _: Site, value: Ragged | Patterns) -> Ragged:
        assert isinstance(value, Ragged)
        spoken = value.values.clone()
        spoken[:, self.head] = 0
        return value.with_values(spoken)


def plain_loop(model: Decoder, batch: Tensor, heads: list[Head]) -> Tensor:
    """The loss without each head, by one run of the full model per head."""
    losses = []
    with torch.no_grad():
        for head in heads:
            logits = model(batch, watch=Silence(head)).logits
            assert isinstance(logits, Tensor)
            losses.append(F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()))
    return torch.stack(losses).cpu()


def resumed(model: Decoder, batch: Tensor, heads: list[Head]) -> Tensor:
    """The same by the lens."""
    result = ablate(model, Ragged.from_padded(batch), heads, progress=False)
    return torch.tensor([result["metric"].of(head) for head in heads])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="how often each entrant is timed")
    parser.add_argument("--heads", type=int, default=12, help="so many heads of each layer")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build("gpt2", seed=0, device=device).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    shape = (arguments.texts, arguments.tokens)
    batch = torch.randint(50_257, shape, generator=generator).to(device)
    heads = [Head(layer, head) for layer in range(12) for head in range(min(12, arguments.heads))]
    entrants = {
        OURS: lambda: resumed(model, batch, heads),
        PLAIN: lambda: plain_loop(model, batch, heads),
    }
    if device == "cpu" and find_spec("transformer_lens") is not None:
        entrants[THEIRS] = hooked_loop(model, batch, heads)
    worst = check_agreement(entrants, truth=PLAIN, limit=LIMIT)
    what = f"{len(heads)} heads on {shape[0]} x {shape[1]} tokens"
    say(f"{what}: losses differ by {worst:.1e} at most")
    timed = race(entrants, device=device, rounds=arguments.rounds, warmups=0)
    slowest = THEIRS if THEIRS in entrants else PLAIN
    rows = [
        [
            name,
            count(timed.seconds(name) / len(heads), "s"),
            count(timed.host_seconds(name) / len(heads), "s"),
            f"{timed.ratio(slowest, name):.2f}",
            f"{timed.host_ratio(slowest, name):.2f}",
        ]
        for name in entrants
    ]
    columns = ("", "a head", "of the processor", "times as fast", "by the processor")
    show(f"Ablation of every head, {device}", columns, rows)


if __name__ == "__main__":
    main()
