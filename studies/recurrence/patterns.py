"""Patterns of letters that come twice in a text, and what of far tokens reaches a prediction."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.models import Decoder
from manyheads.ragged import Ragged
from studies.byte_texts import ByteTexts
from studies.training import Batch, even_lengths, logits_of, losses_of

# Letters of a pattern, those of its second copy that cannot be predicted, and their bytes.
LETTERS, CUE = 12, 4
FIRST, ALPHABET = ord("a"), 26


class PatternTexts(ByteTexts):
    """Passages of which the first half has a pattern twice, at any distance.

    A batch is the passages, and a mask of the letters that the first copy predicts.
    """

    def pattern_batches(self, count: int, length: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        half = count // 2
        while True:
            ids = self.passages("train", count, length + 1, generator)
            places = torch.rand(half, 2, generator=generator).sort(dim=1).values
            # Two starts in order, with room for the first copy before the second begins.
            starts = (places * (length + 1 - 2 * LETTERS)).long()
            starts[:, 1] += LETTERS
            write_patterns(ids[:half], starts, generator)
            answers = starts[:, 1:] + torch.arange(CUE - 1, LETTERS - 1)
            mask = torch.zeros(count, length)
            mask[:half].scatter_(1, answers, 1.0)
            yield ids, mask.to(self.device)

    def patterns_at(self, distance: int, count: int, length: int, seed: int = 0) -> Tensor:
        """Held-out passages whose pattern comes again at the end, so many bytes after its start."""
        generator = torch.Generator().manual_seed(seed)
        ids = self.passages("held out", count, length + 1, generator)
        end = length + 1 - LETTERS
        write_patterns(ids, torch.tensor([[end - distance, end]] * count), generator)
        return ids


def write_patterns(ids: Tensor, starts: Tensor, generator: torch.Generator) -> None:
    """Write one pattern of random letters per text at both of its starts [b 2]."""
    letters = FIRST + torch.randint(ALPHABET, (len(ids), LETTERS), generator=generator)
    for start in starts.T:
        places = start[:, None] + torch.arange(LETTERS)
        ids.scatter_(1, places.to(ids.device), letters.to(ids.device))


def loss_with_patterns(model: nn.Module, batch: Batch) -> Tensor:
    """All letters that can be recalled weigh together as much as all the text."""
    ids, mask = batch
    losses = losses_of(model, ids)
    return losses.mean() + (losses * mask).sum() / mask.sum()


@torch.no_grad()
def recalled(model: nn.Module, texts: Tensor, batch: int = 16) -> float:
    """How often the most likely byte is the next letter of the pattern at the end of a text."""
    hits = []
    for part in texts.split(batch):
        logits = logits_of(model, part[:, :-1]).unflatten(0, (len(part), -1))
        answers = slice(CUE - LETTERS, None)
        hits.append(logits[:, answers].argmax(-1) == part[:, 1:][:, answers])
    return float(torch.cat(hits).float().mean())


def gradient_by_distance(model: Decoder, texts: Tensor, batch: int = 16) -> Tensor:
    """The norm of the gradient of the last byte's loss by the embedding of each byte before it.

    The mean over texts; the first is that of the last byte that is read.
    """
    norms = []
    for part in texts.split(batch):
        ids = part[:, :-1]
        read = Ragged(ids.flatten(), even_lengths(*ids.shape, ids.device))
        x = model.embedding.embed(read, read.lengths.positions)
        values = x.values.detach().requires_grad_()
        hidden, _ = model.stack(x.with_values(values))
        assert model.readout is not None
        logits = model.readout(hidden, model.table).values.unflatten(0, ids.shape)
        loss = F.cross_entropy(logits[:, -1].float(), part[:, -1], reduction="sum")
        [gradient] = torch.autograd.grad(loss, values)
        norms.append(gradient.float().norm(dim=-1).unflatten(0, ids.shape).flip(1))
    return torch.cat(norms).mean(0)
