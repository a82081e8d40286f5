"""Heads set by hand for capitals, sentences, acronyms and verbs, and those that come near."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from manyheads.lens.head_kinds.kinds import Kinds, kinds
from manyheads.lens.inputs import word_texts
from manyheads.lens.inputs.annotated import AnnotatedText
from manyheads.lens.inputs.synthetic import FALLBACK_WORDS
from manyheads.taps import Head
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
def result() -> Kinds:
    tokenizer = word_tokenizer()
    model = text_model([*looks(tokenizer).values()], tokenizer=tokenizer, places=PLACES)
    return kinds(model, sequences=2, progress=False)


EXPECTED = {
    "capitals": {"capitals"},
    # The latest word with a capital is one of them.
    "sentence-start": {"sentence-start", "capitals"},
    "acronym letters": {"acronym letters"},
    "tense": {"tense"},
}


def test_planted_heads_get_their_kind_and_those_beside_them_do_not(result: Kinds) -> None:
    tested = {"capitals", "sentence-start", "acronym", "tense"}
    for index, name in enumerate(looks(word_tokenizer())):
        labels = {label.name for label in result.of(Head(0, index)) if label.kind in tested}
        assert labels == EXPECTED.get(name, set()), name


def test_a_label_counts_five_draws_of_texts(result: Kinds) -> None:
    for index in range(4):
        drawn = [label for label in result.of(Head(0, index)) if label.unit == "words"]
        assert all(label.draws == (5, 5) and label.samples >= 20 for label in drawn)
        assert drawn


def test_a_head_for_verbs_of_any_tense_lacks_the_difference(result: Kinds) -> None:
    assert result.scores["tense"].of(Head(0, 3)) == pytest.approx(1.0)
    for index in (4, 5):
        assert result.scores["tense"].of(Head(0, index)) < 0.7


def test_capitals_need_a_tokenizer_that_has_them() -> None:
    from tokenizers import normalizers

    tokenizer = word_tokenizer()
    tokenizer.normalizer = normalizers.Lowercase()
    model = text_model([Look()], tokenizer=tokenizer, places=PLACES)
    missing = kinds(model, sequences=1, progress=False).missing
    assert missing["capitals"] == "the tokenizer ignores case"
    assert "sentence-start" not in missing


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
