"""Mentions and pronouns in brackets are read, and heads that follow them are told."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from manyheads.errors import InputError
from manyheads.lens.head_kinds.criteria import (
    bias_gap_scores,
    coreference_scores,
    correct_for_chance,
    threshold_table,
)
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.head_kinds.word_targets import WordTargetScores
from manyheads.lens.inputs.annotated import Reference, coreference_texts, read_references
from manyheads.lens.results.addresses import Address
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


def sentences(*, pro: bool = True) -> list[str]:
    """Who is meant stands first or second, as often as not; `pro` says that the pronoun fits."""
    he, she = ("he", "she") if pro else ("she", "he")
    message = []
    for man, woman in product(*ROLES.values()):
        for verb in ("thanked", "saw", "met", "called"):
            for end in ("left", "came"):
                message += [
                    f"[the {man}] {verb} the {woman} because [{he}] {end}",
                    f"the {woman} {verb} [the {man}] because [{he}] {end}",
                    f"the {man} {verb} [the {woman}] because [{she}] {end}",
                    f"[the {woman}] {verb} the {man} because [{she}] {end}",
                ]
    return message


def tokenizer() -> Any:
    words = ("the", "thanked", "saw", "met", "called", "because", "left", "came", "he", "she")
    roles = [role for pair in ROLES.values() for role in pair]
    known = {word: place for place, word in enumerate(["[CLS]", *words, *roles])}
    made = Tokenizer(models.WordLevel(known, "[CLS]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens(["[CLS]"])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 0)]
    )
    return made


def files(folder: Path) -> tuple[Path, Path]:
    for name, pro in (("pro", True), ("anti", False)):
        (folder / name).write_text("\n".join(sentences(pro=pro)) + "\n", encoding="utf-8")
    return folder / "pro", folder / "anti"


def reader() -> Any:
    """A head that goes by gender, and one that takes the last mention."""
    made = tokenizer()
    vocabulary = made.get_vocab_size()
    gender, mentions = torch.zeros(vocabulary, vocabulary), torch.zeros(vocabulary, vocabulary)
    for pronoun, roles in ROLES.items():
        ids = [made.token_to_id(role) for role in roles]
        gender[made.token_to_id(pronoun), ids] = SHARP
        mentions[:, ids] = SHARP
    latest = torch.arange(60.0).expand(60, 60) * 0.5
    return text_model([Look(gender), Look(mentions, latest)], tokenizer=made, places=60)


def test_a_head_that_goes_by_gender_is_no_coreference_head(tmp_path: Path) -> None:
    pro, anti = files(tmp_path)
    result = kinds(reader(), coreference=(pro, anti), sequences=2, progress=False)
    assert not result.heads("coreference")
    # In the worse half it is never right.
    assert result.scores["coreference"].of(Head(0, 0)) == 0.0
    assert result.scores["bias"].of(Head(0, 0)) == pytest.approx(1.0)
    assert result.scores["bias"].error_of(Head(0, 0)) < 0.05
    assert result.scores["bias"].of(Head(0, 1)) == pytest.approx(0.0, abs=0.01)
    assert "+1.00" in str(result.table().columns[2]._cells)
    assert [str(head) for head in result.heads("bias-gap")] == ["L0H0"]
    (label,) = [label for label in result.of(Head(0, 0)) if label.kind == "bias-gap"]
    assert "100% of the pronouns in the first part and 0% in the second" in label.evidence
    assert list(result.stages["recalling knowledge"]) == [Address(Head(0, 0))]


def test_one_half_of_counterbalanced_text_gives_scores_and_no_label(tmp_path: Path) -> None:
    pro, _ = files(tmp_path)
    result = kinds(reader(), coreference=pro, sequences=2, progress=False)
    assert result.scores["coreference"].of(Head(0, 0)) == 1.0
    assert not result.heads("coreference")
    assert "give both" in result.missing["coreference"]
    assert "give both" in result.missing["bias-gap"]
    assert "bias" not in result.scores


def test_files_that_are_not_counterbalanced_are_refused(tmp_path: Path) -> None:
    pro, anti = files(tmp_path)
    model = reader()
    for both in ((pro, pro), (pro, written(tmp_path, *sentences(pro=False)[:9]))):
        with refuses(InputError, "different pronouns", "pronouns exchanged"):
            kinds(model, coreference=both)
    with refuses(InputError, "3 files", "pass two"):
        kinds(model, coreference=(pro, anti, pro))


def scored(accuracy: Sequence[float]) -> WordTargetScores:
    right, count = np.array(accuracy), np.full(len(accuracy), 200.0)
    error = np.sqrt(right * (1 - right) / 200)
    half = WordTargetScores(
        task="pronoun to its mention",
        counts=count,
        texts=count,
        accuracy=right,
        weight=right,
        uniform=np.full_like(right, 0.05),
        rivals=np.zeros_like(right),
        baseline=np.full_like(right, 0.5),
        baseline_names=("the first candidate",) * len(right),
        errors=error,
        excess_errors=error,
    )
    return replace(half, groups=(half, half))


def test_a_coreference_label_holds_in_both_halves_with_the_score_of_the_worse() -> None:
    pro, anti = scored([0.95, 0.9, 0.3]), scored([0.85, 0.3, 0.9])
    (result,), _ = correct_for_chance([coreference_scores([pro, anti], threshold_table())])
    assert result.above.tolist() == [True, False, False]
    assert result.scores.tolist() == [0.85, 0.3, 0.3]
    label = result.score(0)
    assert (label.samples, label.unit) == (200, "words")
    assert "95% and 85% in the two halves" in label.evidence


def test_a_bias_gap_is_confirmed_in_the_other_half_and_needs_weight() -> None:
    pro, anti = scored([0.95, 0.55, 0.9, 0.5]), scored([0.55, 0.95, 0.9, 0.45])
    (result,), _ = correct_for_chance([bias_gap_scores(pro, anti, threshold_table())])
    # In favour of either part, but not where both agree or differ by chance.
    assert result.above.tolist() == [True, True, False, False]
    assert result.scores[:2].tolist() == pytest.approx([0.4, 0.4])
    faint = replace(pro, weight=pro.weight / 100), replace(anti, weight=anti.weight / 100)
    (result,), _ = correct_for_chance([bias_gap_scores(*faint, threshold_table())])
    assert not result.above.any()
    one, other = pro.groups
    swapped = replace(other, accuracy=np.array([0.4, 0.9, 0.9, 0.5]))
    mixed = replace(pro, groups=(one, swapped))
    (result,), _ = correct_for_chance([bias_gap_scores(mixed, anti, threshold_table())])
    assert not result.above.any()
