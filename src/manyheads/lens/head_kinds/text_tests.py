"""The tests of kinds that are scored text by text, or by pairs of words in the weights."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from manyheads.encoding.text_reader import TextReader
from manyheads.formatting import percent, pluralise
from manyheads.lens.head_kinds import associations, scores_by_text
from manyheads.lens.head_kinds.head_tests import HeadTests, deal, why_no_circuits
from manyheads.lens.head_kinds.stored_tests import StoredTest
from manyheads.lens.inputs import synthetic

# Texts with needles, repeated sequences, and pairs of texts, over all draws.
NEEDLES, REPETITIONS, PAIRS = 10, 5, 5


def measure_retrieval(tests: HeadTests, model: TextReader, words: Sequence[str], seed: int) -> None:
    """Needles that the model copies."""
    if not model.predicts_next_token or model.reads_pairs:
        tests.missing["retrieval"] = "the model does not continue a text"
        return
    needles = synthetic.needle_texts(model, words, NEEDLES, seed)
    if not needles:
        tests.missing["retrieval"] = "no needle fits into the context"
        return
    sizes = deal(len(needles))

    def measure() -> tuple[scores_by_text.ScoresByText, bool]:
        return scores_by_text.measure_needles(model, needles, sizes, progress=tests.progress)

    measured = _recall(tests, "retrieval", needles, measure)
    copied, over = percent(measured.facts["copied"]), pluralise(len(needles), "text")

    def evidence(score: str) -> str:
        return (
            f"attends most to the token that is copied from a needle for {score} of its tokens "
            f"over {over}, of which the model copies {copied}"
        )

    _add(tests, "retrieval", measured, evidence, "texts")


def measure_repetition(tests: HeadTests, model: TextReader, seed: int) -> None:
    """What heads write where random tokens repeat."""
    why = "" if model.predicts_next_token else "the model does not predict the next token"
    why = why or why_no_circuits(model)
    if why or model.reads_pairs:
        tests.missing["repetition"] = why or "the model does not continue a text"
        return
    texts = synthetic.repeated_tokens(model, REPETITIONS, seed)
    sizes = deal(len(texts))

    def measure() -> tuple[scores_by_text.ScoresByText, bool]:
        return scores_by_text.measure_repetitions(model, texts, sizes, progress=tests.progress)

    measured = _recall(tests, "repetition", texts, measure)

    def evidence(score: str) -> str:
        return (
            f"raises the token that came next above all others of the block for {score} of them "
            f"over {pluralise(len(texts), 'random sequence')} repeated once"
        )

    _add(tests, "repetition", measured, evidence, "sequences")


def measure_context(tests: HeadTests, model: TextReader, seed: int) -> None:
    """Patterns that do not depend on the tokens."""
    texts = synthetic.unrelated_pairs(model, PAIRS, seed)
    if not texts:
        tests.missing["context-blind"] = "the context is too short"
        return
    sizes = deal(PAIRS)

    def measure() -> tuple[scores_by_text.ScoresByText, bool]:
        return scores_by_text.measure_sameness(model, texts, sizes, progress=tests.progress)

    measured = _recall(tests, "context-blind", texts, measure)

    def evidence(score: str) -> str:
        pairs = pluralise(PAIRS, "pair")
        return f"has {score} of its weights alike in unrelated texts of one length over {pairs}"

    _add(tests, "context-blind", measured, evidence, "pairs")


def measure_recall(tests: HeadTests, model: TextReader) -> None:
    """Pairs of words, from the weights alone."""
    if why := why_no_circuits(model):
        tests.missing["recall"] = why
        return
    if model.reads_pairs:
        tests.missing["recall"] = "the words of a source and a target are not the same"
        return
    pairs = associations.token_pairs(model.tokenizer)
    if not pairs:
        tests.missing["recall"] = "too few words of the pairs are single tokens"
        return
    for relation, fractions in associations.recall_fractions(model, pairs).items():
        count = len(pairs[relation])
        tests.scores.append(
            associations.recall_scores(relation, fractions, count, tests.thresholds)
        )


def _recall(
    tests: HeadTests,
    name: str,
    inputs: object,
    measure: Callable[[], tuple[scores_by_text.ScoresByText, bool]],
) -> scores_by_text.ScoresByText:
    def store() -> StoredTest:
        scores, complete = measure()
        tests.complete &= complete
        return StoredTest(texts=scores)

    scores = tests.recall(name, inputs, store).texts
    assert scores is not None, "every stored test of texts has them"
    return scores


def _add(
    tests: HeadTests,
    kind: str,
    measured: scores_by_text.ScoresByText,
    evidence: Callable[[str], str],
    unit: str,
) -> None:
    scores = scores_by_text.score_texts(kind, measured, tests.thresholds[kind], evidence, unit)
    tests.scores.append(replace(scores, can_be_nearest=kind != "context-blind"))
