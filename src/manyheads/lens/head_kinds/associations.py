"""Words that the weights of a head connect: the one it reads, and the one whose logit it raises."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from manyheads.formatting import percent, pluralise
from manyheads.lens import inputs
from manyheads.lens.head_kinds.criteria import KindScores, Thresholds
from manyheads.lens.inputs.cached_run import head_scope
from manyheads.lens.inputs.synthetic import single_token
from manyheads.lens.results.addresses import blocks_of
from manyheads.lens.weights.circuits import Circuits, TokenVectors
from manyheads.models import build
from manyheads.tokenizers import plain_tokenizer

# A relation with fewer pairs of single tokens is not tested: chance completes half of a few.
MIN_PAIRS = 12
Pairs = tuple[tuple[int, int], ...]


@cache
def word_pairs() -> dict[str, dict[str, str]]:
    """The pairs of each relation, such as France and Paris.

    >>> word_pairs()["partners"]["king"]
    'queen'
    """
    text = files(inputs.__name__).joinpath("word_pairs.toml").read_text("utf-8")
    return tomllib.loads(text)


def token_pairs(tokenizer: Any) -> dict[str, Pairs]:
    """The pairs of each relation as token ids: those of single tokens, where there are enough."""
    tokenizer, by_relation = plain_tokenizer(tokenizer), {}
    for relation, words in word_pairs().items():
        ids = [tuple(single_token(tokenizer, word) for word in pair) for pair in words.items()]
        pairs = tuple(
            (read, raised) for read, raised in ids if read is not None and raised is not None
        )
        if len(pairs) >= MIN_PAIRS:
            by_relation[relation] = pairs
    return by_relation


def recall_fractions(
    model: build.Model, pairs: Mapping[str, Pairs]
) -> dict[str, Float[np.ndarray, " h"]]:
    """By relation, the fraction of pairs that each head completes (NaN: not a head of attention).

    It reads the embedding of the first word, and must raise the second above the second words of
    all other pairs and above the first word itself, which a copying head would raise.
    """
    scope = head_scope(model, mixers=False)
    tokens, circuits = TokenVectors.of(model), Circuits(scope)
    addresses = [address for block in blocks_of(model) for address in block.addresses]
    fractions = {relation: np.full(len(addresses), np.nan) for relation in pairs}
    own = set(scope.addresses)
    for index, address in enumerate(addresses):
        if address not in own:
            continue
        ov = circuits.ov(address.head)
        left, right = ov.left.float(), ov.right.float()
        for relation, ids in pairs.items():
            first, second = torch.tensor(ids, device=left.device).T
            read = tokens.embed[first] @ right.T
            logits = read @ (tokens.unembed[second] @ left).T
            itself = (read * (tokens.unembed[first] @ left)).sum(1)
            target = logits.diagonal()
            beaten = (logits >= target[:, None]).sum(1) > 1
            fraction = ((target > itself) & ~beaten).float().mean()
            fractions[relation][index] = float(fraction)
    return fractions


def recall_scores(
    relation: str, scores: Float[np.ndarray, " h"], pairs: int, table: Thresholds
) -> KindScores:
    """Heads whose weights alone know a relation of words."""

    def evidence(index: int) -> str:
        return (
            f"raises the right word for {percent(float(scores[index]))} of "
            f"{pluralise(pairs, 'pair')} ({relation}) above all others, by weights alone"
        )

    return KindScores(
        kind="recall",
        scores=scores,
        thresholds=table["recall"].over_uniform(np.full_like(scores, 1 / pairs)),
        evidence=evidence,
        errors=np.sqrt(scores * (1 - scores) / pairs),
        samples=np.full_like(scores, pairs),
        unit="pairs",
        fraction=True,
        details=[relation] * len(scores),
        column=f"recall {relation}",
    )
