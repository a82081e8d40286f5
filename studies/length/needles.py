"""Passages with needles in them, written on the device.

A needle is a mark, a key and a value anywhere in a text; at its end the mark and the key come
again, and the value must follow (see `studies.mixers.tasks`, which does the same with numpy).
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from studies.byte_texts import ByteTexts
from studies.mixers.tasks import KEYS, MARK, NEEDLES, SYMBOLS, VALUES
from studies.training import Batch, logits_of, losses_of

# Where the values at the end of a text are predicted, and as targets.
ANSWERS = slice(2 - 3 * NEEDLES, None, 3)


class NeedleTexts(ByteTexts):
    """Passages of a text as bytes; the first half of each training batch has needles."""

    def batches(self, count: int, length: int, seed: int) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            ids = self.passages("train", count, length + 1, generator)
            add_needles(ids[: count // 2], generator)
            yield ids

    def needles(self, count: int, length: int, seed: int = 0) -> Tensor:
        """Held-out passages, all with needles; the same for every arm."""
        generator = torch.Generator().manual_seed(seed)
        ids = self.passages("held out", count, length + 1, generator)
        add_needles(ids, generator)
        return ids


def add_needles(ids: Tensor, generator: torch.Generator) -> None:
    """Write needles into texts [b t], and at their ends the questions with their answers."""
    count, end = ids.shape[0], ids.shape[1] - 3 * NEEDLES

    def draw(options: int) -> Tensor:
        """For each text, numbers below `options`, none twice."""
        return torch.rand(count, options, generator=generator).argsort(1)[:, :NEEDLES]

    keys = KEYS + draw(SYMBOLS)
    values = VALUES + torch.randint(0, SYMBOLS, keys.shape, generator=generator)
    needles = torch.stack([torch.full_like(keys, MARK), keys, values], dim=2)
    places = (3 * draw(end // 3))[..., None] + torch.arange(3)
    order = draw(NEEDLES)[..., None].expand(-1, -1, 3)
    ids.scatter_(1, places.flatten(1).to(ids.device), needles.flatten(1).to(ids.device))
    ids[:, end:] = needles.gather(1, order).flatten(1).to(ids.device)


def loss_with_needles(model: nn.Module, batch: Batch) -> Tensor:
    """All answers together weigh as much as all the text."""
    losses = losses_of(model, batch[0])
    return losses.mean() + losses[: len(losses) // 2, ANSWERS].mean()


@torch.no_grad()
def needle_accuracy(model: nn.Module, texts: Tensor, batch: int = 8) -> float:
    """How often the most likely token is the value that belongs to the key."""
    hits = []
    for part in texts.split(batch):
        logits = logits_of(model, part[:, :-1]).unflatten(0, (len(part), -1))
        hits.append(logits[:, ANSWERS].argmax(-1) == part[:, 1:][:, ANSWERS])
    return float(torch.cat(hits).float().mean())


@torch.no_grad()
def bits_at_end(model: nn.Module, texts: Tensor, length: int, batch: int = 8) -> float:
    """Bits per byte of the last `length` bytes of each text."""
    losses = [losses_of(model, part)[:, -length:].mean(1) for part in texts.split(batch)]
    return float(torch.cat(losses).mean() / torch.log(torch.tensor(2.0)))
