"""Training steps on the CPU: real sentences packed, beside the same padded."""

import random
from collections.abc import Sequence

import torch
from corpus import prose
from side_by_side import race, say, show
from torch import Tensor, nn

from manyheads.models.build import build
from manyheads.ragged import Ragged

__all__ = ["run"]

PACKED, PADDED = "packed", "padded"
LONGEST, TEXTS = 128, 64


def run(rounds: int) -> None:
    texts = _texts()
    lengths = [len(text) for text in texts]
    model = build("bert-base", layers=4, width=256, heads=4, hidden=1024, vocabulary=256, seed=0)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ragged = Ragged.from_list([torch.tensor(text) for text in texts])
    rows = ragged.to_padded()
    asked = torch.arange(rows.shape[1]) < torch.tensor(lengths)[:, None]

    def follow(logits: Tensor, answers: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(logits, answers)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        return loss.detach()

    def packed() -> Tensor:
        return follow(model(ragged).logits.values, ragged.values)

    def padded() -> Tensor:
        # Every row as long as the longest: what a model without ragged batches computes.
        logits = model(rows).logits
        return follow(logits[asked], rows[asked])

    times = race({PACKED: packed, PADDED: padded}, device="cpu", rounds=rounds)
    useful = sum(lengths) / rows.numel()
    table = [
        [
            name,
            f"{times.seconds(name) * 1e3:.0f} ms",
            f"{sum(lengths) / times.seconds(name):,.0f}",
            f"{share:.0%}",
            f"{times.host_ratio(PADDED, name):.2f}",
        ]
        for name, share in ((PACKED, 1.0), (PADDED, useful))
    ]
    say(f"{torch.get_num_threads()} threads, float32, torch {torch.__version__}")
    title = f"{TEXTS} docstrings of at most {LONGEST} bytes, a step of a small BERT"
    columns = ["", "a step", "real tokens/s", "useful tokens", "times padded (cores)"]
    show(title, columns, table)
    say("limit: by as much as useful tokens are fewer, but for attention, which saves its square")


def _texts() -> Sequence[Sequence[int]]:
    drawn = random.Random(0).sample(prose(), TEXTS)
    return [tuple(text.encode()[:LONGEST]) for text in drawn]
