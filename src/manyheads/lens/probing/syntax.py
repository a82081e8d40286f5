"""The syntactic probe on attention alone: who is whose head, told from what heads look at."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import Part, StackName, part_of
from manyheads.lens.inputs.metrics import weighed
from manyheads.lens.probing.items import split_words
from manyheads.lens.results.addresses import Address, Block
from manyheads.lens.results.by_head import Tabular
from manyheads.lens.results.files import Facts
from manyheads.models.build import Model
from manyheads.models.decoder import Decoder
from manyheads.models.encoder import Encoder
from manyheads.models.eval_mode import resting
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Tap

KIND = "syntactic probe"
FURTHEST = 10
OFFSETS = tuple(offset for offset in range(-FURTHEST, FURTHEST + 1) if offset)
STEPS = 100


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class SyntaxProbe(Tabular):
    """Shares of words whose head is found (unlabelled attachment), with errors over sentences.

    "probe" weighs all heads together; "offset" is the best fixed distance, "head" the best head
    alone, both chosen on the sentences to learn from. `to_head` and `from_head` are the probe's
    weights: of what a word gives its head, and of what its head gives it.
    """

    scores: dict[str, tuple[float, float]]
    blocks: tuple[Block, ...]
    to_head: Float[np.ndarray, " h"]
    from_head: Float[np.ndarray, " h"]
    facts: Facts

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(address for block in self.blocks for address in block.addresses)

    def ranked(self, top_k: int | None = None) -> list[tuple[Address, float, float]]:
        """Heads by how much the probe relies on them, in either direction."""
        found = list(
            zip(self.addresses, self.to_head.tolist(), self.from_head.tolist(), strict=True)
        )
        return sorted(found, key=lambda each: -max(abs(each[1]), abs(each[2])))[:top_k]

    def rows(self) -> list[dict[str, Any]]:
        """One record per way of telling heads."""
        return [
            {"by": name, "share": share, "share_error": error}
            for name, (share, error) in self.scores.items()
        ]

    def table(self) -> Any:
        """A rich table of the scores."""
        from rich.table import Table

        table = Table("told by", box=None, pad_edge=False, title=KIND, title_justify="left")
        table.add_column("heads found", justify="right")
        for name, (share, error) in self.scores.items():
            table.add_row(name, f"{share:.1%} ±{error:.1%}")
        return table

    def __str__(self) -> str:
        told = ", ".join(f"{share:.1%} by {name}" for name, (share, _) in self.scores.items())
        offset, head = self.facts["offset"], self.facts["head"]
        return (
            f"heads of {self.facts['words']} words: {told} "
            f"(the offset is {offset:+d}, the head {head})"
        )

    __repr__ = __str__


def probe_syntax(
    model: Model,
    sentences: Sequence[tuple[Sequence[str], Sequence[int]]],
    *,
    with_words: bool = False,
    test: float = 0.25,
    decay: float = 1e-3,
    stack: StackName | None = None,
    seed: int = 0,
    progress: bool = True,
) -> SyntaxProbe:
    """The attention-only probe of Clark et al. (arXiv 1906.04341), and the one with words.

    A sentence is its words and, as in CoNLL-U, the number of each word's head, 0 for the root. The
    probability that i is the head of j is the softmax over i of a sum over heads k of
    w_k A_k[j, i] + u_k A_k[i, j]. `with_words` lets w and u depend linearly on the model's own
    vectors of both words. The weight to a word of several tokens is their sum, from it their mean.
    Roots are not asked for, nor are words without a token. The patterns of one sentence are formed
    at a time; what is kept grows with the square of its words.
    """
    if not isinstance(model, Encoder | Decoder):
        raise InputError(
            f"a {type(model).__name__} reads no single sentence", "use an Encoder or a Decoder"
        )
    if not 0 < test < 1:
        raise InputError(f"test={test} is no share of the sentences", "use 0 < test < 1")
    part = part_of(model, stack)
    trees = _trees(part, sentences, progress)
    if len(trees) < 2:
        raise InputError(
            f"{len(trees)} sentences have a word with a head", "give two or more of them"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(trees), generator=generator).tolist()
    count = min(len(trees) - 1, max(1, round(test * len(trees))))
    tested, learned = (
        [trees[place] for place in order[:count]],
        [trees[place] for place in order[count:]],
    )
    scorer = _Scorer(trees[0].looks.shape[0], trees[0].vectors.shape[1] if with_words else 0)
    _learn(scorer, learned, decay, progress)
    return _result(part, scorer, learned, tested)


@dataclass(frozen=True, slots=True, eq=False)
class _Tree:
    """One sentence: what heads look at from word to word, and which words have which head."""

    looks: Float[Tensor, "h w w"]
    vectors: Float[Tensor, "w c"]
    there: Bool[Tensor, " w"]
    words: Int[Tensor, " k"]
    heads: Int[Tensor, " k"]

    @property
    def open(self) -> Bool[Tensor, "k w"]:
        """What each word may hang on: any word with a token but itself."""
        every = self.there.expand(len(self.words), -1).clone()
        every[torch.arange(len(self.words)), self.words] = False
        return every


class _Scorer(nn.Module):
    """How much speaks for each word as the head of each other."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.to_head = nn.Parameter(torch.zeros(heads))
        self.from_head = nn.Parameter(torch.zeros(heads))
        # By direction and head, what the vectors of the dependent and of the head add.
        self.by_words = nn.Parameter(torch.zeros(2, 2, heads, width)) if width else None

    def forward(self, tree: _Tree) -> Float[Tensor, "k w"]:
        there = torch.einsum("hjw,h->jw", tree.looks, self.to_head)
        back = torch.einsum("hwj,h->jw", tree.looks, self.from_head)
        scores = there + back
        if self.by_words is not None:
            given = torch.einsum("wc,dshc->dshw", tree.vectors, self.by_words)
            scores = scores + torch.einsum("hjw,hj->jw", tree.looks, given[0, 0])
            scores = scores + torch.einsum("hjw,hw->jw", tree.looks, given[0, 1])
            scores = scores + torch.einsum("hwj,hj->jw", tree.looks, given[1, 0])
            scores = scores + torch.einsum("hwj,hw->jw", tree.looks, given[1, 1])
        return scores[tree.words].masked_fill(~tree.open, -torch.inf)


def _trees(part: Part, sentences: Sequence[Any], progress: bool) -> list[_Tree]:
    for number, (words, heads) in enumerate(sentences):
        if len(words) != len(heads):
            raise InputError(
                f"sentence {number} has {len(words)} words and {len(heads)} heads", "give one each"
            )
        wrong = next((head for head in heads if not 0 <= head <= len(words)), None)
        if wrong is not None:
            raise InputError(
                f"sentence {number} has a head {wrong}", f"use 0 for the root, 1 to {len(words)}"
            )
    given, places = split_words(part.model, [words for words, _ in sentences])
    found = []
    with (
        Progress("reading", total=len(sentences), unit="sentences", enabled=progress) as bar,
        resting(part.model),
    ):
        for number, (_, heads) in enumerate(sentences):
            ids = given.select([number]).ids
            assert ids is not None
            tree = _tree(part, ids, places[number], heads)
            if tree is not None:
                found.append(tree)
            bar.advance()
    return found


def _tree(
    part: Part, ids: Ragged, places: Sequence[Sequence[int]], heads: Sequence[int]
) -> _Tree | None:
    there = [bool(mine) for mine in places]
    asked = [
        (word, head - 1)
        for word, head in enumerate(heads)
        if head and word != head - 1 and there[word] and there[head - 1]
    ]
    if not asked:
        return None
    belongs = torch.zeros(len(places), ids.lengths.total)
    for word, mine in enumerate(places):
        belongs[word, list(mine)] = 1.0
    mean = belongs / belongs.sum(1, keepdim=True).clamp(min=1)
    looking = _WordLooks(part, mean, belongs)
    with torch.no_grad():
        assert isinstance(part.model, Encoder | Decoder), "probe_syntax() has refused the others"
        part.model.hidden(ids, watch=looking)
        vectors = mean @ part.model.table[ids.values].float().cpu()
    words, above = torch.tensor(asked).unbind(1)
    # Vectors of any model's size enter alike.
    vectors = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    return _Tree(torch.cat(looking.found), vectors, torch.tensor(there), words, above)


class _WordLooks(Record):
    """Keeps what words look at; the patterns of tokens are let go."""

    def __init__(self, part: Part, mean: Tensor, belongs: Tensor) -> None:
        super().__init__(part.site(layer, Tap.PATTERN) for layer in part.layers)
        self.found: list[Tensor] = []
        self._mean, self._belongs = mean, belongs

    def see(self, _: Any, value: Ragged | Patterns) -> None:
        assert isinstance(value, Patterns)
        self.found.append(self._mean @ value.of(0).float().cpu() @ self._belongs.T)


def _learn(scorer: _Scorer, trees: Sequence[_Tree], decay: float, progress: bool) -> None:
    """The likeliest weights under a small penalty of their squares."""
    words = sum(len(tree.words) for tree in trees)
    optimiser = torch.optim.LBFGS(
        scorer.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-7
    )
    with Progress("learning", unit="rounds", enabled=progress) as bar:

        def loss() -> Tensor:
            optimiser.zero_grad()
            total = torch.zeros(())
            for tree in trees:
                logs = scorer(tree).log_softmax(-1)
                total = total - logs.gather(1, tree.heads[:, None]).sum()
            squares = sum((each.square().sum() for each in scorer.parameters()), torch.zeros(()))
            total = total / words + decay * squares
            total.backward()
            bar.advance()
            return total

        with torch.enable_grad():
            optimiser.step(loss)


def _result(
    part: Part, scorer: _Scorer, learned: Sequence[_Tree], tested: Sequence[_Tree]
) -> SyntaxProbe:
    offset = int(np.argmax([_share(learned, _by_offset(each)) for each in OFFSETS]))
    single = torch.stack([_single_hits(tree) for tree in learned]).sum(0)
    best = int(single.argmax())
    ways = {
        "probe": lambda tree: scorer(tree).argmax(-1) == tree.heads,
        "head": lambda tree: _by_head(tree)[best],
        "offset": _by_offset(OFFSETS[offset]),
    }
    scores = {}
    with torch.no_grad():
        for name, way in ways.items():
            hits = [way(tree).double() for tree in tested]
            counts = torch.tensor([float(len(each)) for each in hits])
            mean, error = weighed(torch.stack([each.mean() for each in hits]), counts)
            scores[name] = (float(mean), float(error))
    names = [address for block in part.blocks for address in block.addresses]
    direction = "to the head" if best < len(names) else "from the head"
    return SyntaxProbe(
        scores=scores,
        blocks=part.blocks,
        to_head=scorer.to_head.detach().double().numpy(),
        from_head=scorer.from_head.detach().double().numpy(),
        facts={
            "words": sum(len(tree.words) for tree in tested),
            "sentences": [len(learned), len(tested)],
            "offset": OFFSETS[offset],
            "head": f"{names[best % len(names)]} {direction}",
            "with_words": scorer.by_words is not None,
        },
    )


def _by_offset(offset: int) -> Any:
    return lambda tree: tree.heads - tree.words == offset


def _share(trees: Sequence[_Tree], way: Any) -> float:
    return float(torch.cat([way(tree) for tree in trees]).float().mean())


def _by_head(tree: _Tree) -> Bool[Tensor, "ways k"]:
    """Whether each head alone, looking to the head and then from it, finds each word's head."""
    both = torch.cat((tree.looks, tree.looks.transpose(1, 2)))[:, tree.words]
    return both.masked_fill(~tree.open, -1.0).argmax(-1) == tree.heads


def _single_hits(tree: _Tree) -> Float[Tensor, " ways"]:
    return _by_head(tree).double().sum(1)
