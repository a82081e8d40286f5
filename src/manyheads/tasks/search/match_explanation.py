"""Explain a match: how the words of two texts and the heads of the model make up their score."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.argument_checks import checked
from manyheads.encoding import encode, text_reader, token_vectors
from manyheads.errors import InputError
from manyheads.lens.attribution.gradients import integrate_inputs
from manyheads.lens.causal import ablation, evaluate, gradient_importance
from manyheads.lens.inputs import cached_run, metrics
from manyheads.lens.results.tables import ByHead
from manyheads.models import build, provenance, seq2seq
from manyheads.ragged import Ragged
from manyheads.tasks.search import match_result
from manyheads.tasks.search.index import Hit, Index
from manyheads.tokenizers import surrogates_refused, token_text

# Steps of the integral from zero embeddings to the tokens.
GRADIENT_STEPS = 32
HEADS = "the contributions of heads to a match"


@checked
def explain_match(
    model: build.Model,
    query: str,
    text: str,
    *,
    kind: match_result.MatchKind | None = None,
    by: match_result.HeadMethod = "ablation",
    tokens_by: match_result.TokenMethod | None = None,
    heads: bool = True,
    replace_with: Literal["zero", "mean"] = "zero",
    progress: bool = True,
) -> match_result.MatchExplanation:
    """Why `text` matches `query`: what each word and each head adds to their score.

    `kind` is "late" for a model of late interaction and else "dense", the cosine of two vectors.
    A late score is a sum over the query's tokens, each with its best match. The score of a dense
    model that takes the mean of its tokens is a sum over pairs of tokens, so that every word has an
    exact share ("decomposition"). Other models need `tokens_by` "removal", where each word is left
    out in turn, or "gradient" (integrated gradients, arXiv 1703.01365); by default that of `by`.

    A head's contribution is the score minus the score without it, on either side, exact by
    "ablation" or to first order by "gradient" (arXiv 1905.10650). `replace_with` is what an ablated
    head writes: zeros, or its mean over the text. `heads=False` leaves the heads out. Queries that
    are expanded with tokens that no other token attends to have no contributions of heads.

    >>> from manyheads.models.build import build
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> model = build("tiny-encoder", seed=0)
    >>> words = {word: index for index, word in enumerate(["[UNK]", "wing", "lift", "of", "a"])}
    >>> model.tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    >>> model.tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> found = explain_match(model, "wing", "lift of a wing", progress=False)
    >>> [word.text for word in found.document.words()], found.tokens_by
    (['lift', 'of', 'a', 'wing'], 'decomposition')
    >>> bool(abs(found.document.contributions.sum() - found.score) < 1e-6)
    True
    """
    reader = text_reader.require_text_model(model)
    if reader.reads_pairs:
        raise InputError(
            "the heads of an encoder-decoder are not explained", "use an encoder or a decoder"
        )
    late = reader.late is not None if kind is None else kind == "late"
    scorer = _LateScorer(reader) if late else _DenseScorer(reader)
    method = _token_method(scorer, tokens_by, by)
    with build.eval_mode(model), torch.no_grad():
        query_side, text_side = scorer.read(query, "query"), scorer.read(text, "document")
        score = float(scorer.score(query_side.states, query_side, text_side)[0])
        matrix = scorer.matrix(query_side, text_side)
        shares = scorer.shares(query_side, text_side) if method == "decomposition" else None
    if shares is None:
        measure = _removals if method == "removal" else _gradients
        shares = (
            measure(scorer, query_side, text_side, progress),
            measure(scorer, text_side, query_side, progress),
        )
    head_shares = (
        _heads(scorer, query_side, text_side, by, replace_with, progress) if heads else None
    )
    return match_result.MatchExplanation(
        kind=scorer.kind,
        by=by,
        tokens_by=method,
        score=score,
        query=query_side.explained(shares[0]),
        document=text_side.explained(shares[1]),
        similarity=None if matrix is None else matrix.double().cpu().numpy(),
        heads=head_shares,
    )


@checked
def explain_hit(
    index: Index,
    query: str,
    hit: Hit,
    *,
    by: match_result.HeadMethod = "ablation",
    tokens_by: match_result.TokenMethod | None = None,
    heads: bool = True,
    progress: bool = True,
) -> match_result.MatchExplanation:
    """`explain_match` for a document that an index has found: its best chunk behind its title.

    The score is that of the hit, up to rounding and the format of stored vectors; a "hybrid" index
    ranks by both words and vectors, and its vectors are explained.
    """
    check_explains(index)
    assert index.model is not None, "checked above"
    return explain_match(
        index.model,
        query,
        f"{hit.title}\n{hit.text}" if hit.title else hit.text,
        kind="late" if index.kind == "late" else "dense" if index.kind == "dense" else None,
        by=by,
        tokens_by=tokens_by,
        heads=heads,
        progress=progress,
    )


def check_explains(index: Index) -> None:
    """Refuse an index without a model that could explain its matches."""
    if index.kind == "bm25" or index.model is None:
        raise InputError(
            f"a {index.kind} index has no model that could explain a match",
            "make one of the kind dense, late or hybrid",
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _ReadText:
    """One text as the model reads it. `tokens` are the positions that count in the score."""

    role: match_result.SideName
    text: str
    tokenizer: Any
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    words: tuple[int, ...]
    tokens: tuple[int, ...]
    states: Ragged
    # Whether some of its tokens are hidden from the others.
    hides: bool = False

    def explained(self, contributions: Float[np.ndarray, " t"]) -> match_result.MatchSide:
        spans = [self.spans[token] for token in self.tokens]
        words = tuple(self.words[token] for token in self.tokens)
        # The characters of each token in the text, or its name where it stands for none.
        names = (
            self.text[start:end] if word >= 0 else token_text(self.tokenizer, self.ids[token])
            for token, (start, end), word in zip(self.tokens, spans, words, strict=True)
        )
        return match_result.MatchSide(
            text=self.text,
            tokens=tuple(names),
            starts=tuple(start for start, _ in spans),
            ends=tuple(end for _, end in spans),
            word_of_token=words,
            contributions=contributions,
        )


Shares = tuple[Float[np.ndarray, " q"], Float[np.ndarray, " d"]]


class _LateScorer:
    """One vector per token; the score is the sum of the best products of the query's tokens."""

    kind: match_result.MatchKind = "late"
    exact = True

    def __init__(self, model: text_reader.TextReader) -> None:
        self.model, self.late = model, token_vectors.late_of(model)

    def read(self, text: str, role: match_result.SideName) -> _ReadText:
        tokenizer = token_vectors.open_role_reader(self.model, [text], role).tokenizer
        return _read(self.model, tokenizer, self.late, text, role)

    def score(self, states: Ragged, side: _ReadText, against: _ReadText) -> Float[Tensor, " b"]:
        against_vectors = self._vectors(against.states.values, against)
        scores = []
        for values in states.to_list():
            products = self._vectors(values, side) @ against_vectors.T
            scores.append(products.amax(1 if side.role == "query" else 0).sum())
        return torch.stack(scores)

    def matrix(self, query: _ReadText, document: _ReadText) -> Float[Tensor, "q d"]:
        vectors = self._vectors(query.states.values, query)
        return vectors @ self._vectors(document.states.values, document).T

    def shares(self, query: _ReadText, document: _ReadText) -> Shares:
        best = self.matrix(query, document).max(1)
        totals = torch.zeros(len(document.tokens), dtype=best.values.dtype)
        totals = totals.index_add(0, best.indices.cpu(), best.values.cpu())
        return _array(best.values), _array(totals)

    def _vectors(self, values: Float[Tensor, "t c"], side: _ReadText) -> Float[Tensor, "k o"]:
        wide = torch.promote_types(values.dtype, torch.float32)
        return self.late.project(values[list(side.tokens)].to(wide))


class _DenseScorer:
    """One vector per text; the score is their cosine."""

    kind: match_result.MatchKind = "dense"

    def __init__(self, model: text_reader.TextReader) -> None:
        self.model = model
        self.sentence = model.sentence or provenance.SentenceConfig()
        linear = all(dense.activation == "none" for dense in self.sentence.dense)
        self.exact = linear and self.sentence.pooling == "mean"

    def read(self, text: str, role: match_result.SideName) -> _ReadText:
        max_length = text_reader.resolve_max_length(self.model, None)
        tokenizer = text_reader.truncating_tokenizer(self.model, max_length)
        return _read(self.model, tokenizer, provenance.LateInteractionConfig(), text, role)

    def score(self, states: Ragged, side: _ReadText, against: _ReadText) -> Float[Tensor, " b"]:  # noqa: ARG002
        return self._vector(states) @ self._vector(against.states)[0]

    def matrix(self, query: _ReadText, document: _ReadText) -> Float[Tensor, "q d"] | None:
        return self._parts(query) @ self._parts(document).T if self.exact else None

    def shares(self, query: _ReadText, document: _ReadText) -> Shares:
        pairs = self._parts(query) @ self._parts(document).T
        return _array(pairs.sum(1)), _array(pairs.sum(0))

    def _vector(self, states: Ragged) -> Float[Tensor, "b c"]:
        return encode.pool(
            states, self.sentence.pooling, normalize=True, project=self.sentence.project
        )

    def _parts(self, side: _ReadText) -> Float[Tensor, "t c"]:
        """Vectors of the tokens that sum to the vector of the text."""
        values = self.sentence.project(side.states.values.double())
        return values / values.sum(0).norm().clamp(min=1e-12)


_MatchScorer = _LateScorer | _DenseScorer


def _token_method(
    scorer: _MatchScorer, wished: match_result.TokenMethod | None, by: match_result.HeadMethod
) -> match_result.TokenMethod:
    if wished is None:
        return "decomposition" if scorer.exact else "removal" if by == "ablation" else "gradient"
    if wished == "decomposition" and not scorer.exact:
        raise InputError(
            "tokens_by='decomposition' needs a score that is a sum over tokens, and this model "
            "does not take the mean of its tokens",
            "use 'removal' or 'gradient'",
        )
    if wished != "decomposition" and scorer.kind == "late":
        raise InputError(
            f"tokens_by={wished!r} is for dense models",
            "leave it out, as a late score is a sum over tokens",
        )
    return wished


def _read(
    model: text_reader.TextReader,
    tokenizer: Any,
    late: provenance.LateInteractionConfig,
    text: str,
    role: match_result.SideName,
) -> _ReadText:
    """The text behind the prompt of its role; a query with the tokens that expand it."""
    prompt = late.prompt(role)
    with surrogates_refused([text]):
        encoding = tokenizer.encode(prompt + text)
    read = np.array(encoding.ids, dtype=np.int64)
    ids = token_vectors.late_ids(late, read, role)
    added = len(ids) - len(read)
    pairs = zip(_words(encoding), encoding.offsets, strict=True)
    words = [-1 if end <= len(prompt) else word for word, (_, end) in pairs] + [-1] * added
    spans = [
        (max(0, start - len(prompt)), max(0, end - len(prompt))) for start, end in encoding.offsets
    ] + [(0, 0)] * added
    kept = np.flatnonzero(token_vectors.kept_tokens(late, ids, role))
    if not len(kept):
        raise InputError(f"the {role} has no tokens with a vector", "give at least one word")
    hides = added > 0 and late.expansion is not None and not late.expansion.attend
    assert not isinstance(model, seq2seq.Seq2Seq), "refused before"
    batch = Ragged.from_list([torch.from_numpy(ids)]).to(next(model.parameters()).device)
    watch = token_vectors.HiddenKeys([len(read)]) if hides else None
    return _ReadText(
        role=role,
        text=text,
        tokenizer=tokenizer,
        ids=tuple(ids.tolist()),
        spans=tuple(spans),
        words=tuple(words),
        tokens=tuple(kept.tolist()),
        states=model.hidden(batch, watch=watch)[0],
        hides=hides,
    )


def _words(encoding: Any) -> list[int]:
    """The word of each token, -1 for special tokens; without word borders each is its own."""
    special = [
        bool(mask) or start == end
        for mask, (start, end) in zip(encoding.special_tokens_mask, encoding.offsets, strict=True)
    ]
    words = [
        -1 if is_special or word is None else int(word)
        for word, is_special in zip(encoding.word_ids, special, strict=True)
    ]
    if max(words, default=-1) < 1:
        return [-1 if is_special else index for index, is_special in enumerate(special)]
    return words


def _metric(scorer: _MatchScorer, side: _ReadText, against: _ReadText) -> metrics.StateMetric:
    return metrics.StateMetric(lambda states, _: scorer.score(states, side, against))


def _removals(
    scorer: _MatchScorer, side: _ReadText, against: _ReadText, progress: bool
) -> Float[np.ndarray, " t"]:
    """The score minus the score without each word, shared by the tokens of the word."""
    whole = list(side.ids)
    words = match_result.tokens_of_words(side.words)
    shorter = [[token for at, token in enumerate(whole) if at not in word] for word in words]
    kept = [index for index, ids in enumerate(shorter) if ids]
    texts = [whole, *(shorter[index] for index in kept)]
    evaluation = evaluate.Evaluation.of(
        scorer.model, texts, _metric(scorer, side, against), progress=progress
    )
    scores = evaluation.measure([], "leaving out words").baseline
    contributions = np.zeros(len(whole))
    for index, score in zip(kept, scores[1:].tolist(), strict=True):
        contributions[words[index]] = (float(scores[0]) - score) / len(words[index])
    if len(kept) < len(words):
        # The only word of a text without special tokens is all of it.
        contributions[:] = float(scores[0]) / len(whole)
    return contributions


def _gradients(
    scorer: _MatchScorer, side: _ReadText, against: _ReadText, progress: bool
) -> Float[np.ndarray, " t"]:
    metric = _metric(scorer, side, against)
    gradients = integrate_inputs(
        scorer.model,
        [list(side.ids)],
        metric,
        baseline="zero",
        steps=GRADIENT_STEPS,
        progress=progress,
    )
    return _array(gradients.of(0))


def _heads(
    scorer: _MatchScorer,
    query: _ReadText,
    document: _ReadText,
    by: match_result.HeadMethod,
    replace_with: Literal["zero", "mean"],
    progress: bool,
) -> ByHead | None:
    """What each head adds on either side; None for a model without heads."""
    scope = cached_run.head_scope(scorer.model, headless=True)
    if not scope.heads:
        return None
    means = {}
    for name, side, against in (("query", query, document), ("document", document, query)):
        if side.hides:
            # Runs without a head would let the hidden tokens be seen.
            continue
        metric, texts = _metric(scorer, side, against), [list(side.ids)]
        measured: ByHead
        if by == "gradient":
            measured = gradient_importance.importance(
                scorer.model, texts, metric, progress=progress
            )
        else:
            measured = ablation.ablate(
                scorer.model, texts, replace_with=replace_with, metric=metric, progress=progress
            )
        means[name] = -measured["predicted" if by == "gradient" else "change"].means
    about = {"by": by, "replace_with": replace_with if by == "ablation" else None}
    return ByHead(kind=HEADS, blocks=scope.blocks, means=means, metadata=about)


def _array(values: Tensor) -> Float[np.ndarray, " t"]:
    array: np.ndarray = values.double().cpu().numpy()
    return array
