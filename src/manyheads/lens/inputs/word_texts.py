"""Synthetic texts in which words attend to others: capitals, sentences, acronyms and verbs."""

import random
from collections.abc import Iterator, Sequence

from manyheads.lens.inputs.annotated import AnnotatedText, WordPair

# Verbs in the present and in the past.
VERBS = (
    *(("takes", "took"), ("gives", "gave"), ("sees", "saw"), ("makes", "made"), ("says", "said")),
    *(("knows", "knew"), ("writes", "wrote"), ("brings", "brought"), ("keeps", "kept")),
    *(("holds", "held"), ("sells", "sold"), ("leaves", "left"), ("wins", "won")),
    *(("loses", "lost"), ("builds", "built"), ("sends", "sent"), ("finds", "found")),
    *(("calls", "called"), ("opens", "opened"), ("turns", "turned"), ("moves", "moved")),
    *(("plays", "played"), ("helps", "helped"), ("starts", "started"), ("uses", "used")),
    *(("shows", "showed"), ("follows", "followed"), ("changes", "changed"), ("joins", "joined")),
)
TENSES = ("present", "past")


def capital_texts(words: Sequence[str], texts: int = 32, seed: int = 0) -> Iterator[AnnotatedText]:
    """Random words, a few of them with a capital letter, at random places but the first.

    All other words should attend to those with a capital.
    """
    draw = random.Random(seed)
    for _ in range(texts):
        count = draw.randint(16, 24)
        capitals = sorted(draw.sample(range(1, count), draw.randint(3, 5)))
        text = [draw.choice(words) for _ in range(count)]
        for place in capitals:
            text[place] = text[place].capitalize()
        pairs = [
            WordPair(task="capitals", source=place, targets=tuple(capitals))
            for place in range(count)
            if place not in capitals
        ]
        yield AnnotatedText.from_words(text, pairs)


def sentence_texts(words: Sequence[str], texts: int = 32, seed: int = 0) -> Iterator[AnnotatedText]:
    """Sentences of random words: their words should attend to the first word of their own sentence.

    The first words of all other sentences are rivals. The first sentence asks nothing, as its first
    word is often a sink.
    """
    draw = random.Random(seed)
    for _ in range(texts):
        text: list[str] = []
        sentences: list[range] = []
        for _ in range(4):
            start, size = len(text), draw.randint(5, 10)
            text += [
                draw.choice(words).capitalize(),
                *(draw.choice(words) for _ in range(size - 1)),
            ]
            sentences.append(range(start, len(text)))
            text.append(".")
        starts = [sentence[0] for sentence in sentences]
        pairs = [
            WordPair(
                task="sentence-start",
                source=place,
                targets=(sentence[0],),
                rivals=tuple(start for start in starts if start != sentence[0]),
            )
            for sentence in sentences[1:]
            for place in sentence[2:]
        ]
        yield AnnotatedText.from_words(text, pairs)


def acronym_texts(words: Sequence[str], texts: int = 32, seed: int = 0) -> Iterator[AnnotatedText]:
    """Names of two to five words with their acronyms, as in Green River Bank ( G R B ).

    A letter should attend to the word that it begins ("letters"), and what stands before a letter
    to the word of that letter ("letters, ahead"), as in arXiv 2405.04156. All other words of the
    names are rivals.
    """
    draw = random.Random(seed)
    by_letter: dict[str, list[str]] = {}
    for word in words:
        by_letter.setdefault(word[0].upper(), []).append(word.capitalize())
    letters = sorted(by_letter)
    for _ in range(texts):
        text: list[str] = []
        # The task, source and target of each pair.
        pairs: list[tuple[str, int, int]] = []
        # No letter stands for two words of a text.
        order = draw.sample(letters, len(letters))
        for _ in range(2):
            text += [draw.choice(words) for _ in range(draw.randint(2, 5))]
            count = min(len(letters) // 2, draw.randint(2, 5))
            initials, order = order[:count], order[count:]
            first, place = len(text), len(text) + len(initials) + 1
            text += [draw.choice(by_letter[letter]) for letter in initials]
            text += ["(", *initials, ")"]
            for index in range(len(initials)):
                pairs.append(("letters", place + index, first + index))
                pairs.append(("letters, ahead", place + index - 1, first + index))
        names = {target for *_, target in pairs}
        yield AnnotatedText.from_words(
            text,
            [
                WordPair(
                    task=task,
                    source=source,
                    targets=(target,),
                    rivals=tuple(sorted(names - {target})),
                )
                for task, source, target in pairs
            ],
        )


def verb_texts(words: Sequence[str], texts: int = 32, seed: int = 0) -> Iterator[AnnotatedText]:
    """Clauses with verbs in the present and in the past, no verb twice.

    Of all other verbs a verb should attend to those in its own tense.
    """
    draw = random.Random(seed)
    for _ in range(texts):
        text: list[str] = []
        tenses: dict[int, int] = {}
        for forms in draw.sample(VERBS, 7):
            text += ["the", draw.choice(words)]
            tenses[len(text)] = draw.randrange(len(TENSES))
            text += [forms[tenses[len(text)]], draw.choice(words), ","]
        pairs = []
        for place, tense in tenses.items():
            same = tuple(verb for verb in tenses if tenses[verb] == tense and verb != place)
            different = tuple(verb for verb in tenses if tenses[verb] != tense)
            if same and different:
                pairs.append(
                    WordPair(
                        task="tense",
                        source=place,
                        targets=same,
                        candidates=tuple(sorted((*same, *different))),
                        rivals=different,
                    )
                )
        yield AnnotatedText.from_words(text, pairs)
