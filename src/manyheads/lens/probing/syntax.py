"""The attention-only syntactic probe: dependency heads predicted from attention weights."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.formatting import kind_of, percent
from manyheads.lens.inputs.cached_run import HeadScope, StackName, head_scope
from manyheads.lens.inputs.metrics import weighted_mean
from manyheads.lens.probing.linear import split_words
from manyheads.lens.results import files, tables
from manyheads.lens.results.addresses import Address, Block
from manyheads.models import build, decoder, encoder
from manyheads.progress import Progress
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Record, Tap

KIND = "syntactic probe"
MAX_OFFSET = 10
OFFSETS = tuple(offset for offset in range(-MAX_OFFSET, MAX_OFFSET + 1) if offset)
STEPS = 100


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class SyntaxProbe(tables.OfBlocks, tables.Tabular):
    """Unlabeled attachment scores, with standard errors over sentences.

    "probe" combines all heads; "offset" is the best fixed distance, "head" the best single head,
    both chosen on the training sentences. `to_head` and `from_head` are the probe's weights: of
    attention from a word to its head, and from the head to the word.
    """

    scores: dict[str, tuple[float, float]]
    blocks: tuple[Block, ...]
    to_head: Float[np.ndarray, " h"]
    from_head: Float[np.ndarray, " h"]
    metadata: files.Metadata

    def ranked(self, top_k: int | None = None) -> list[tuple[Address, float, float]]:
        """Heads by how much the probe relies on them, in either direction."""
        order = np.argsort(-np.fmax(abs(self.to_head), abs(self.from_head)), kind="stable")
        columns = self.addresses, self.to_head.tolist(), self.from_head.tolist()
        heads = list(zip(*columns, strict=True))
        return [heads[index] for index in order[:top_k]]

    def rows(self) -> list[dict[str, Any]]:
        """One record per method."""
        return [
            {"by": name, "score": score, "score_error": error}
            for name, (score, error) in self.scores.items()
        ]

    def table(self) -> Any:
        """A rich table of the scores."""
        table = tables.titled_table(KIND, ["method"], ["attachment score"])
        for name, (score, error) in self.scores.items():
            table.add_row(name, f"{percent(score)} ±{percent(error)}")
        return table

    def _lines(self) -> Iterator[str]:
        scores = [f"{percent(score)} by {name}" for name, (score, _) in self.scores.items()]
        chosen = "(the offset is {offset:+d}, the head {head})".format(**self.metadata)
        yield f"heads of {self.metadata['words']} words: {', '.join(scores)} {chosen}"


@wrapping_models
def probe_syntax(
    model: build.Model,
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
    embeddings of both words. Attention to a word of several tokens is summed, from it averaged.
    Roots and words without a token are left out. Patterns are formed for one sentence at a time;
    memory grows with the square of its words.
    """
    if not isinstance(model, encoder.Encoder | decoder.Decoder):
        raise InputError(
            f"{kind_of(model)} does not read single sentences",
            "use an Encoder or a Decoder",
        )
    if not 0 < test < 1:
        raise InputError(f"test must be in (0, 1), got {test}", "use 0 < test < 1")
    scope = head_scope(model, stack)
    scope.check_patterns(scope.layers)
    trees = _trees(scope, sentences, progress)
    if len(trees) < 2:
        raise InputError(
            f"the probe needs at least 2 sentences with a dependency, got {len(trees)}",
            "give two or more",
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(trees), generator=generator).tolist()
    count = min(len(trees) - 1, max(1, round(test * len(trees))))
    shuffled = [trees[index] for index in order]
    tested, trained = shuffled[:count], shuffled[count:]
    scorer = _Scorer(trees[0].attention.shape[0], trees[0].vectors.shape[1] if with_words else 0)
    _fit(scorer, trained, decay, progress)
    return _result(scope, scorer, trained, tested)


@dataclass(frozen=True, slots=True, eq=False)
class _Tree:
    """One sentence: attention between its words, and the head of each word."""

    attention: Float[Tensor, "h w w"]
    vectors: Float[Tensor, "w c"]
    has_token: Bool[Tensor, " w"]
    words: Int[Tensor, " k"]
    heads: Int[Tensor, " k"]

    @property
    def candidates(self) -> Bool[Tensor, "k w"]:
        """The candidate heads of each word: any other word with a token."""
        words = self.has_token.expand(len(self.words), -1).clone()
        words[torch.arange(len(self.words)), self.words] = False
        return words


class _Scorer(nn.Module):
    """The scores of each word as the head of each other word."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.to_head = nn.Parameter(torch.zeros(heads))
        self.from_head = nn.Parameter(torch.zeros(heads))
        # By direction and head, linear in the embeddings of the dependent and of the head.
        self.by_words = nn.Parameter(torch.zeros(2, 2, heads, width)) if width else None

    def forward(self, tree: _Tree) -> Float[Tensor, "k w"]:
        scores = torch.einsum("hjw,h->jw", tree.attention, self.to_head)
        scores = scores + torch.einsum("hwj,h->jw", tree.attention, self.from_head)
        if self.by_words is not None:
            added = torch.einsum("wc,dshc->dshw", tree.vectors, self.by_words)
            for direction, axes in enumerate(("hjw", "hwj")):
                for side, word in enumerate("jw"):
                    by_word = added[direction, side]
                    scores = scores + torch.einsum(f"{axes},h{word}->jw", tree.attention, by_word)
        return scores[tree.words].masked_fill(~tree.candidates, -torch.inf)


def _trees(scope: HeadScope, sentences: Sequence[Any], progress: bool) -> list[_Tree]:
    for number, (words, heads) in enumerate(sentences):
        if len(words) != len(heads):
            raise InputError(
                f"sentence {number} has {len(words)} words and {len(heads)} heads",
                "give one head per word",
            )
        wrong = next((head for head in heads if not 0 <= head <= len(words)), None)
        if wrong is not None:
            raise InputError(
                f"sentence {number} has a head {wrong}", f"use 0 for the root, 1 to {len(words)}"
            )
    inputs, positions = split_words(scope.model, [words for words, _ in sentences])
    trees = []
    with (
        Progress("reading", total=len(sentences), unit="sentences", enabled=progress) as bar,
        build.eval_mode(scope.model),
    ):
        for number, (_, heads) in enumerate(sentences):
            ids = inputs.select([number]).ids
            assert ids is not None
            trees.append(_tree(scope, ids, positions[number], heads))
            bar.advance()
    return [tree for tree in trees if tree is not None]


def _tree(
    scope: HeadScope, ids: Ragged, positions: Sequence[Sequence[int]], heads: Sequence[int]
) -> _Tree | None:
    has_token = [bool(tokens) for tokens in positions]
    pairs = [
        (word, head - 1)
        for word, head in enumerate(heads)
        if head and word != head - 1 and has_token[word] and has_token[head - 1]
    ]
    if not pairs:
        return None
    belongs = torch.zeros(len(positions), ids.lengths.total)
    for word, tokens in enumerate(positions):
        belongs[word, list(tokens)] = 1.0
    mean = belongs / belongs.sum(1, keepdim=True).clamp(min=1)
    watcher = _WordAttention(scope, mean, belongs)
    with torch.no_grad():
        assert isinstance(scope.model, encoder.Encoder | decoder.Decoder), (
            "checked in probe_syntax()"
        )
        scope.model.hidden(ids, watch=watcher)
        vectors = mean @ scope.model.table[ids.values].float().cpu()
    words, above = torch.tensor(pairs).unbind(1)
    # Normalized, so that the scale of a model's embeddings does not matter.
    vectors = vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    return _Tree(torch.cat(watcher.by_layer), vectors, torch.tensor(has_token), words, above)


class _WordAttention(Record):
    """Records the attention between words, and drops that between tokens."""

    def __init__(self, scope: HeadScope, mean: Tensor, belongs: Tensor) -> None:
        super().__init__(scope.site(layer, Tap.PATTERN) for layer in scope.layers)
        self.by_layer: list[Tensor] = []
        self._mean, self._belongs = mean, belongs

    def see(self, _: Any, value: Ragged | Patterns) -> None:
        assert isinstance(value, Patterns)
        self.by_layer.append(self._mean @ value.shares(0).float().cpu() @ self._belongs.T)


def _fit(scorer: _Scorer, trees: Sequence[_Tree], decay: float, progress: bool) -> None:
    """Maximum likelihood with weight decay, by L-BFGS."""
    words = sum(len(tree.words) for tree in trees)
    optimizer = torch.optim.LBFGS(
        scorer.parameters(), max_iter=STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-7
    )
    with Progress("learning", unit="rounds", enabled=progress) as bar:

        def loss() -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for tree in trees:
                logs = scorer(tree).log_softmax(-1)
                total = total - logs.gather(1, tree.heads[:, None]).sum()
            squares = sum(
                (weight.square().sum() for weight in scorer.parameters()), torch.zeros(())
            )
            total = total / words + decay * squares
            total.backward()
            bar.advance()
            return total

        with torch.enable_grad():
            optimizer.step(loss)


def _result(
    scope: HeadScope, scorer: _Scorer, trained: Sequence[_Tree], tested: Sequence[_Tree]
) -> SyntaxProbe:
    distances = torch.cat([tree.heads - tree.words for tree in trained])
    offset = OFFSETS[int(np.argmax([float((distances == offset).sum()) for offset in OFFSETS]))]
    best = int(torch.stack([_by_head(tree).sum(1) for tree in trained]).sum(0).argmax())
    ways: dict[str, Callable[[_Tree], Bool[Tensor, " k"]]] = {
        "probe": lambda tree: scorer(tree).argmax(-1) == tree.heads,
        "head": lambda tree: _by_head(tree)[best],
        "offset": lambda tree: tree.heads - tree.words == offset,
    }
    scores = {}
    with torch.no_grad():
        for name, way in ways.items():
            hits = [way(tree).double() for tree in tested]
            counts = torch.tensor([float(len(words)) for words in hits])
            mean, error = weighted_mean(torch.stack([words.mean() for words in hits]), counts)
            scores[name] = (float(mean), float(error))
    names = scope.addresses
    direction = "to the head" if best < len(names) else "from the head"
    return SyntaxProbe(
        scores=scores,
        blocks=scope.blocks,
        to_head=scorer.to_head.detach().double().numpy(),
        from_head=scorer.from_head.detach().double().numpy(),
        metadata={
            "words": sum(len(tree.words) for tree in tested),
            "sentences": [len(trained), len(tested)],
            "offset": offset,
            "head": f"{names[best % len(names)]} {direction}",
            "with_words": scorer.by_words is not None,
        },
    )


def _by_head(tree: _Tree) -> Bool[Tensor, "ways k"]:
    """Whether each single head, in either direction, finds each word's head."""
    both = torch.cat((tree.attention, tree.attention.transpose(1, 2)))[:, tree.words]
    return both.masked_fill(~tree.candidates, -1.0).argmax(-1) == tree.heads
