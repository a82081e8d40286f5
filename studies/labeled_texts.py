"""Texts with labels: film reviews and entities, or in a quick run the help topics of Python.

`reviews` are 10,605 sentences about films with their sentiment, the mean of twenty ratings from -4
to 4, in the sdist of vaderSentiment (Hutto and Gilbert 2014, MIT); `wnut17` are the entities of
WNUT-17 (Derczynski and others 2017, CC BY 4.0). Both are read from the folder of `byte_texts`:

    pip download vaderSentiment==3.3.2 --no-deps --no-binary :all:
    tar xzOf vaderSentiment-3.3.2.tar.gz --wildcards '*hutto*.gz' \
        | tar xzO hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt \
        | gzip > studies/data/reviews.gz
    git clone https://github.com/leondz/emerging_entities_17
    cat emerging_entities_17/{wnut17train,emerging.dev}.conll | gzip > studies/data/wnut17.gz

The help topics have no sentiment: their classes are the two longest topics, special names and
compound statements, in passages of 16 words; their entities are the words that they quote as code,
without the quotation marks.
"""

import gzip
import random
import re
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import TypeVar

from manyheads.errors import InputError
from studies.byte_texts import data_folder

Text = TypeVar("Text")
# Sentences that are rated between are neither.
NEUTRAL = 0.5
PASSAGE = 16
TOPICS = ("specialnames", "compound")
# Without spaces at its ends, so that an end and the next start are not taken for a pair.
CODE = re.compile(r'"([^\s"](?:[^"\n]*[^\s"])?)"')


def read_labeled(source: str) -> list[tuple[str, int]]:
    """Sentences with their class, 0 or 1, of "reviews" or "topics", in a fixed random order."""
    if source == "topics":
        texts = [
            (" ".join(words[start : start + PASSAGE]), label)
            for label, words in enumerate(_topic(name).split() for name in TOPICS)
            for start in range(0, len(words), PASSAGE)
        ]
    else:
        texts = []
        for line in _lines(source):
            _, rating, text = line.split("\t", 2)
            if abs(float(rating)) > NEUTRAL:
                texts.append((text.strip(), int(float(rating) > 0)))
    return shuffled(texts)


def read_tagged(source: str) -> list[tuple[list[str], list[str]]]:
    """Words and their tags, "O" or a type, of "wnut17" or "topics", in a fixed random order."""
    texts = []
    if source == "topics":
        words: list[str] = []
        tags: list[str] = []
        # Code and the rest take turns.
        for index, part in enumerate(CODE.split(" ".join(map(_topic, TOPICS)))):
            words += part.split()
            tags += ["code" if index % 2 else "O"] * len(part.split())
        starts = range(0, len(words), PASSAGE)
        texts = [(words[at : at + PASSAGE], tags[at : at + PASSAGE]) for at in starts]
    else:
        for is_word, lines in groupby(_lines(source), key=lambda line: bool(line.strip())):
            if is_word:
                pairs = [line.rstrip().split("\t") for line in lines]
                tags = [tag[2:] or tag for _, tag in pairs]
                texts.append(([word for word, _ in pairs], tags))
    return shuffled(texts)


def shuffled(texts: Sequence[Text]) -> list[Text]:
    """In the same random order every time."""
    return random.Random(0).sample(texts, len(texts))


@cache
def _lines(source: str) -> list[str]:
    file = data_folder() / f"{source}.gz"
    if not file.is_file():
        raise InputError(
            f"{file} is missing", "see studies/labeled_texts.py for where it comes from"
        )
    with gzip.open(file, "rt", encoding="utf-8", errors="replace") as stream:
        return stream.read().splitlines()


def _topic(name: str) -> str:
    from pydoc_data.topics import topics

    return topics[name]
