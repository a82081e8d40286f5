"""Heads set by hand for capitals, sentences, acronyms and verbs, and those that come near."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from manyheads.lens.head_kinds import head_tests
from manyheads.lens.head_kinds.criteria import KindScores, threshold_table
from manyheads.lens.head_kinds.head_tests import HeadTests
from manyheads.lens.inputs import word_texts
from manyheads.lens.inputs.annotated import AnnotatedText
from manyheads.lens.inputs.synthetic import FALLBACK_WORDS, plain_words
from tests.lens.planted import SHARP, Look, offset_look, text_model

CAPITALS = [word.capitalize() for word in FALLBACK_WORDS]
LETTERS = sorted({word[0] for word in CAPITALS})
PLACES = 160


def word_tokenizer(*more: str) -> Any:
    """Every word a token."""
    verbs = [form for forms in word_texts.VERBS for form in forms]
    words = ["[UNK]", *'()[]{}-.,;!?"', *"123456789", *LETTERS, *FALLBACK_WORDS, *CAPITALS]
    vocabulary = dict.fromkeys((*words, *verbs, "the", *more))
    split = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(vocabulary)}, "[UNK]")
    )
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    return split


def looks(tokenizer: Any) -> dict[str, Look]:
    """A head for each kind, and heads that come near it."""
    size = tokenizer.get_vocab_size()

    def ids(*words: str) -> list[int]:
        return [tokenizer.token_to_id(word) for word in words]

    capitals, letters, tenses, verbs = (torch.zeros(size, size) for _ in range(4))
    capitals[:, ids(*CAPITALS)] = SHARP
    for letter in LETTERS:
        words = [word for word in CAPITALS if word[0] == letter]
        letters[torch.tensor(ids(letter))[:, None], ids(*words)] = SHARP
    every = [form for forms in word_texts.VERBS for form in forms]
    for tense in zip(*word_texts.VERBS, strict=True):
        tenses[torch.tensor(ids(*tense))[:, None], ids(*tense)] = SHARP
    verbs[torch.tensor(ids(*every))[:, None], ids(*every)] = SHARP
    not_itself = -2 * SHARP * torch.eye(PLACES)
    latest = torch.arange(PLACES).float().expand(PLACES, PLACES) * 0.5 + not_itself
    return {
        "capitals": Look(capitals, not_itself),
        "sentence-start": Look(capitals, latest),
        "acronym letters": Look(letters),
        "tense": Look(tenses, not_itself),
        "verbs of any tense": Look(verbs, not_itself),
        "the latest verb": Look(verbs, latest),
        "three before": offset_look(-3, PLACES),
        "even": Look(),
    }


@pytest.fixture(scope="module")
def scores() -> dict[str, KindScores]:
    """By column, of the tests on words alone."""
    tokenizer = word_tokenizer()
    model = text_model([*looks(tokenizer).values()], tokenizer=tokenizer, places=PLACES)
    tests = HeadTests(model, threshold_table(), progress=False)
    with pytest.MonkeyPatch.context() as patch:
        tested = {kind: head_tests.WORD_KINDS[kind] for kind in TESTED}
        patch.setattr(head_tests, "WORD_KINDS", tested)
        head_tests.measure_word_kinds(tests, plain_words(tokenizer), seed=0)
    return {kind.name: kind for kind in tests.scores}


TESTED = ("capitals", "sentence-start", "acronym", "tense")
EXPECTED = {
    "capitals": {"capitals"},
    # The latest word with a capital is one of them.
    "sentence-start": {"sentence-start", "capitals"},
    "acronym letters": {"acronym letters"},
    "tense": {"tense"},
}


def test_planted_heads_get_their_kind_and_those_beside_them_do_not(
    scores: dict[str, KindScores],
) -> None:
    for index, name in enumerate(looks(word_tokenizer())):
        labels = {kind for kind in scores if not scores[kind].refusal(index)}
        assert labels == EXPECTED.get(name, set()), name


def test_a_planted_kind_holds_in_all_five_draws(scores: dict[str, KindScores]) -> None:
    for index, name in enumerate(EXPECTED):
        label = scores[name].score(index)
        assert label.score == pytest.approx(1.0), name
        assert label.draws == (5, 5), name
        assert label.samples >= 20


def test_a_head_for_verbs_of_any_tense_lacks_the_difference(scores: dict[str, KindScores]) -> None:
    for index in (4, 5):
        assert scores["tense"].scores[index] < 0.7


def test_capitals_need_a_tokenizer_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = word_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    model = text_model([Look()], tokenizer=tokenizer, places=PLACES)
    tests = HeadTests(model, threshold_table(), progress=False)
    tested = {"capitals": head_tests.WORD_KINDS["capitals"]}
    monkeypatch.setattr(head_tests, "WORD_KINDS", tested)
    head_tests.measure_word_kinds(tests, FALLBACK_WORDS, seed=0)
    assert tests.missing == {"capitals": "the tokenizer ignores case"}


MAKERS = (
    word_texts.capital_texts,
    word_texts.sentence_texts,
    word_texts.acronym_texts,
    word_texts.verb_texts,
)


@pytest.mark.parametrize("make", MAKERS)
def test_texts_repeat_with_their_seed_and_no_offset_is_always_right(
    make: Callable[..., Iterator[AnnotatedText]],
) -> None:
    texts = list(make(FALLBACK_WORDS, 20, seed=3))
    assert texts == list(make(FALLBACK_WORDS, 20, seed=3))
    assert texts != list(make(FALLBACK_WORDS, 20, seed=4))
    pairs = [pair for text in texts for pair in text.pairs]
    assert pairs
    for pair in pairs:
        assert pair.source not in pair.targets
        assert not set(pair.targets) & set(pair.rivals)
    for offset in range(-10, 11):
        right = sum(pair.source + offset in pair.targets for pair in pairs)
        assert right < 0.5 * len(pairs)


def test_a_letter_stands_for_one_word_of_its_name() -> None:
    for text in word_texts.acronym_texts(FALLBACK_WORDS, 10):
        words = [text.text[start:stop] for start, stop in text.words]
        for pair in text.pairs:
            letter = words[pair.source + (pair.task == "letters, ahead")]
            assert words[pair.targets[0]].startswith(letter)
