"""Classifiers of words whose last step is attention over all words, with weights of any origin."""

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from studies.labeled_texts import read_labeled

Kind = Literal["LSTM", "transformer", "words"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PADDING, UNKNOWN = 0, 1
# A share of the texts that nothing is trained on.
HELD_OUT = 0.15
WORDS = re.compile(r"\w+|[^\w\s]")


class LabeledWords:
    """Texts as ids of words [b t] with padding at the end, and their classes."""

    def __init__(self, source: str, device: str, limit: int, length: int, vocabulary: int) -> None:
        texts = read_labeled(source)[:limit]
        split = [WORDS.findall(text.lower())[:length] for text, _ in texts]
        cut = int(len(texts) * (1 - HELD_OUT))
        counts = Counter(word for words in split[:cut] for word in words)
        names = {word: index for index, (word, _) in enumerate(counts.most_common(vocabulary), 2)}
        rows = [[names.get(word, UNKNOWN) for word in words] for words in split]
        ids = torch.tensor([row + [PADDING] * (length - len(row)) for row in rows], device=device)
        labels = torch.tensor([label for _, label in texts], device=device)
        self.size = len(names) + 2
        self.train, self.held_out = (ids[:cut], labels[:cut]), (ids[cut:], labels[cut:])


def batches(count: int, seed: int, *columns: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same random rows of all columns, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        rows = torch.randint(len(columns[0]), (count,), generator=generator)
        yield tuple(column[rows.to(column.device)] for column in columns)


class WordClassifier(nn.Module):
    """Words, their context, and attention over them that the classes are read from.

    The LSTM reads in both directions and has one head of additive attention, as in arXiv
    1902.10186; "words" has a layer over each word alone instead (arXiv 1908.04626). The last layer
    of the transformer is the attention of a start vector, with several heads and a residual.
    """

    def __init__(
        self, kind: Kind, vocabulary: int, *, width: int, heads: int, length: int, dropout: float
    ) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads if kind == "transformer" else 1
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=PADDING)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.dropout = nn.Dropout(dropout)
        if kind == "transformer":
            self.positions = nn.Parameter(0.02 * torch.randn(length, width))
            self.start = nn.Parameter(0.02 * torch.randn(width))
            self.layer = nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout, batch_first=True, norm_first=True
            )
            self.norm = nn.LayerNorm(width)
            self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
            self.value, self.output = nn.Linear(width, width), nn.Linear(width, width)
        elif kind == "LSTM":
            self.forwards = nn.LSTM(width, width // 2, batch_first=True)
            self.backwards = nn.LSTM(width, width // 2, batch_first=True)
        else:
            self.word_layer = nn.Linear(width, width)
        if kind != "transformer":
            self.score = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.classes = nn.Linear(width, 2)

    def forward(self, ids: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Logits [b 2] and the weights [b h t] that they come from: its own, or others."""
        states = self.states(self.embedding(ids), ids)
        weights = self.weights(states, ids) if weights is None else weights
        return self.answer(states, weights), weights

    def states(self, x: Tensor, ids: Tensor) -> Tensor:
        """Words in their context [b t c], from their vectors; a start comes first, if any."""
        x, padding = self.dropout(x), ids == PADDING
        if self.kind == "LSTM":
            # Each text backwards, its padding still at the end; twice gives the text again.
            last = (~padding).sum(1, keepdim=True) - 1
            turned = (last - torch.arange(ids.shape[1], device=ids.device)) % ids.shape[1]
            index = turned.unsqueeze(-1)
            back, _ = self.backwards(x.gather(1, index.expand_as(x)))
            ahead, _ = self.forwards(x)
            return torch.cat((ahead, back.gather(1, index.expand_as(back))), dim=-1)
        if self.kind == "words":
            return self.word_layer(x).tanh()
        start = self.start.expand(len(x), 1, -1)
        x = torch.cat((start, x + self.positions[: ids.shape[1]]), dim=1)
        padding = torch.cat((padding.new_zeros(len(x), 1), padding), dim=1)
        return self.layer(x, src_key_padding_mask=padding)

    def weights(self, states: Tensor, ids: Tensor) -> Tensor:
        """The attention over words of each head [b h t]."""
        if self.kind == "transformer":
            normed = self.norm(states)
            query, key = (
                self._split(self.query(normed[:, :1])),
                self._split(self.key(normed[:, 1:])),
            )
            scores = (query @ key.transpose(-1, -2)).squeeze(-2) / math.sqrt(key.shape[-1])
        else:
            scores = self.score(states).transpose(1, 2)
        return scores.masked_fill((ids == PADDING).unsqueeze(1), -1e9).softmax(-1)

    def answer(self, states: Tensor, weights: Tensor) -> Tensor:
        """Logits of the classes; weights of one head [b 1 t] serve all."""
        if self.kind == "transformer":
            value = self._split(self.value(self.norm(states)[:, 1:]))
            mixed = (weights.unsqueeze(-2) @ value).flatten(1)
            return self.classes(states[:, 0] + self.output(mixed))
        return self.classes((weights @ states).squeeze(1))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def uniform(ids: Tensor) -> Tensor:
    """The same weight for every word [b 1 t]."""
    words = (ids != PADDING).float()
    return (words / words.sum(1, keepdim=True).clamp(min=1)).unsqueeze(1)


@torch.no_grad()
def outputs_of(
    model: WordClassifier, ids: Tensor, weights: Tensor | None = None, batch: int = 512
) -> tuple[Tensor, Tensor]:
    """Probabilities and weights of all texts, some at a time."""
    parts = zip(ids.split(batch), _split_or_none(weights, ids, batch), strict=True)
    outputs = [model(rows, own) for rows, own in parts]
    logits, used = zip(*outputs, strict=True)
    return torch.cat(logits).softmax(-1), torch.cat(used)


def accuracy(probabilities: Tensor, labels: Tensor) -> float:
    return float((probabilities.argmax(-1) == labels).float().mean())


def _split_or_none(weights: Tensor | None, ids: Tensor, batch: int) -> Sequence[Tensor | None]:
    if weights is None:
        return [None] * len(ids.split(batch))
    return weights.split(batch)
