"""Mentions and pronouns in brackets are read, and heads that follow them are told."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from manyheads.errors import InputError
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.inputs.annotated import Reference, coreference_texts, read_references
from manyheads.taps import Head
from tests.lens.planted import SHARP, Look, text_model
from tests.messages import refuses


def written(folder: Path, *lines: str) -> Path:
    path = folder / "pairs.txt"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_brackets_tell_the_mention_and_its_pronouns(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "1 [The cook] thanked the mover because [she] lost [her] key.",
        "",
        "Because [he] was late, the cook called [the mover].",
        "[She] knew that [she] was late.",
    )
    first, second, third = read_references(path)
    assert first.text == "The cook thanked the mover because she lost her key."
    assert first.mention_text == "the cook"
    assert [first.text[slice(*span)] for span in first.pronouns] == ["she", "her"]
    assert second.mention_text == "the mover"
    assert [second.text[slice(*span)] for span in second.pronouns] == ["he"]
    assert third == Reference("She knew that she was late.", (0, 3), ((14, 17),))


def test_candidates_are_all_that_is_mentioned_anywhere_in_the_file(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "[The cook] thanked the mover because [she] was hungry.",
        "The cook thanked [the mover] because [he] was kind.",
        "[The chief cook] met the cook when [he] left.",
    )
    first, second, third = coreference_texts(read_references(path))
    for text, words, target in (
        (first, ["The cook", "the mover", "she"], 0),
        (second, ["The cook", "the mover", "he"], 1),
        (third, ["The chief cook", "the cook", "he"], 0),
    ):
        assert [text.text[slice(*span)] for span in text.words] == words
        (pair,) = text.pairs
        assert (pair.source, pair.targets, pair.candidates) == (2, (target,), (0, 1))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "The cook met [him].",
            "has 1 brackets: mark two",
        ),
        (
            "[The cook [met] him].",
            "has 1 brackets: mark two",
        ),
        ("[The cook] met [].", "empty bracket: put a mention"),
        (
            "[The cook] met [the mover] as [he] left.",
            "has 2 mentions in brackets: mark one",
        ),
    ],
)
def test_a_line_that_cannot_be_is_refused_by_its_number(
    line: str, message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, "[The cook] said [he] left.", line)
    with refuses(InputError, f"{path}:2", message):
        read_references(path)


def test_a_file_that_holds_no_text_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "none.txt"
    with refuses(InputError, str(missing), "pass a file of texts"):
        read_references(missing)
    empty = written(tmp_path, "", "  ")
    with refuses(InputError, str(empty), "one per line"):
        read_references(empty)


ROLES = {"he": ("mover", "guard"), "she": ("cook", "nurse")}


def sentences() -> list[str]:
    """Who is meant stands first or second, as often as not."""
    told = []
    for man, woman in product(*ROLES.values()):
        for verb in ("thanked", "saw", "met", "called"):
            told += [
                f"[the {man}] {verb} the {woman} because [he] left",
                f"the {woman} {verb} [the {man}] because [he] left",
                f"the {man} {verb} [the {woman}] because [she] left",
                f"[the {woman}] {verb} the {man} because [she] left",
            ]
    return told


def tokenizer() -> Any:
    words = ("the", "thanked", "saw", "met", "called", "because", "left", "he", "she")
    roles = [role for pair in ROLES.values() for role in pair]
    known = {word: place for place, word in enumerate(["[CLS]", *words, *roles])}
    made = Tokenizer(models.WordLevel(known, "[CLS]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[CLS]"])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 0)]
    )
    return made


def test_a_head_that_follows_pronouns_is_told_and_one_by_order_is_not(tmp_path: Path) -> None:
    made = tokenizer()
    vocabulary = made.get_vocab_size()
    follows, mentions = torch.zeros(vocabulary, vocabulary), torch.zeros(vocabulary, vocabulary)
    for pronoun, roles in ROLES.items():
        ids = [made.token_to_id(role) for role in roles]
        follows[made.token_to_id(pronoun), ids] = SHARP
        mentions[:, ids] = SHARP
    latest = torch.arange(60.0).expand(60, 60) * 0.5
    model = text_model([Look(follows), Look(mentions, latest)], tokenizer=made, places=60)
    found = kinds(model, coreference=written(tmp_path, *sentences()), sequences=2, progress=False)
    assert [str(address) for address in found.heads("coreference")] == ["L0H0"]
    (label,) = [each for each in found.of(Head(0, 0)) if each.kind == "coreference"]
    assert label.evidence == (
        "attends most to the right word for 100% of 64 words (pronoun to its mention), 50% by the "
        "first candidate, and gives it 100% of its weight"
    )
    assert found.scores["coreference"].of(Head(0, 1)) == pytest.approx(0.5)
