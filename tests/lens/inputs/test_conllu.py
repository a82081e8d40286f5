"""Treebanks are read strictly, words are found among tokens, and heads for relations are told."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from manyheads.errors import InputError
from manyheads.lens.attention_maps.patterns import Pattern, patterns
from manyheads.lens.head_kinds.criteria import (
    confirmed_word_scores,
    correct_for_chance,
    threshold_table,
)
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.head_kinds.significance import benjamini_hochberg
from manyheads.lens.head_kinds.word_targets import (
    BASELINES,
    WordTargetScores,
    measure_word_targets,
)
from manyheads.lens.inputs.annotated import (
    AlignedText,
    AnnotatedText,
    WordPair,
    align_texts,
    align_words,
)
from manyheads.lens.inputs.conllu import ParsedWord, read_conllu, syntax_texts
from manyheads.models.build import build
from manyheads.taps import Head
from tests.lens.planted import SHARP, Look, text_model
from tests.messages import refuses
from tests.models.zoo import DECODERS, ENCODERS, SEQ2SEQS, small


def row(number: int | str, form: str, head: int | str, relation: str, misc: str = "_") -> str:
    return "\t".join([str(number), form, *"_" * 4, str(head), relation, "_", misc])


def written(folder: Path, *rows: str) -> Path:
    path = folder / "bank.conllu"
    path.write_text("\n".join(rows) + "\n\n", encoding="utf-8")
    return path


def test_sentences_are_read_with_the_letters_of_each_word(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "# text = They don't go.",
        row(1, "They", 4, "nsubj"),
        row("2-3", "don't", "_", "_"),
        row(2, "do", 4, "aux"),
        row(3, "n't", 4, "advmod"),
        row("3.1", "really", "_", "_"),
        row(4, "go", 0, "root", "SpaceAfter=No"),
        row(5, ".", 4, "punct"),
        "",
        "",
        row("1-2", "du", "_", "_"),
        row(1, "de", 3, "case"),
        row(2, "le", 3, "det"),
        row(3, "pain", 0, "root"),
    )
    first, second = read_conllu(path)
    assert first.text == "They don't go."
    assert [first.text[slice(*span)] for span in first.spans] == ["They", "do", "n't", "go", "."]
    assert first.words[1] == ParsedWord("do", 4, "aux")
    assert second.text == "du pain"
    # Two words in letters that spell neither: the first has them.
    assert [second.text[slice(*span)] for span in second.spans] == ["du", "", "pain"]


def test_each_relation_is_measured_in_both_directions_and_punctuation_in_none(
    tmp_path: Path,
) -> None:
    path = written(
        tmp_path,
        row(1, "Big", 3, "amod"),
        row(2, "old", 3, "amod"),
        row(3, "dogs", 4, "nsubj"),
        row(4, "bark", 0, "root"),
        row(5, ".", 4, "punct"),
    )
    (text,) = syntax_texts(list(read_conllu(path)))
    assert set(text.pairs) == {
        WordPair(task="amod, dependent to head", source=0, targets=(2,)),
        WordPair(task="amod, dependent to head", source=1, targets=(2,)),
        WordPair(task="amod, head to dependent", source=2, targets=(0, 1)),
        WordPair(task="nsubj, dependent to head", source=2, targets=(3,)),
        WordPair(task="nsubj, head to dependent", source=3, targets=(2,)),
    }


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["1 a 0"], ":1 has 1 columns: write 10"),
        ([row(1, "", 0, "root")], ":1 has an empty column: write _"),
        ([row("x", "a", 0, "root")], ":1 has id 'x': use 1, 2, ..., 3-4 or 5.1."),
        ([row("1-", "a", 0, "root")], ":1 has id '1-': use 1, 2, ..., 3-4 or 5.1."),
        (
            [row(1, "a", 0, "root"), row(3, "b", 1, "dep")],
            ":2 has id 3, expected 2",
        ),
        (
            [row(1, "a", 0, "root"), row(2, "b", 3, "dep")],
            ":2 has head '3': use 0 to 2",
        ),
        ([row(1, "a", "_", "root")], ":1 has head '_': use 0 to 1"),
        ([row(1, "a", 1, "root")], ":1 is its own head: use another word, or 0 for the root."),
        ([row(1, "a", 0, "_")], ":1 has no relation: write one"),
        (
            [row("1-3", "ab", "_", "_"), row(1, "a", 0, "root"), row(2, "b", 1, "dep")],
            ":1 joins words 1 to 3: join words 1 to 2",
        ),
        (["# text = nothing"], ":1 begins a sentence without words: remove it"),
    ],
)
def test_a_line_that_cannot_be_is_refused_by_its_number(
    rows: list[str], message: str, tmp_path: Path
) -> None:
    path = written(tmp_path, *rows)
    with refuses(InputError, f"{path}{message}"):
        list(read_conllu(path))


def test_a_file_that_is_no_treebank_is_refused(tmp_path: Path) -> None:
    with refuses(InputError, str(tmp_path / "none"), "pass a CoNLL-U file"):
        list(read_conllu(tmp_path / "none"))
    empty = tmp_path / "empty"
    empty.write_text("\n\n")
    with refuses(InputError, str(empty), "ten columns per word"):
        list(read_conllu(empty))
    (tmp_path / "latin").write_bytes(row(1, "café", 0, "root").encode("latin-1"))
    with pytest.raises(InputError, match="is not UTF-8"):
        list(read_conllu(tmp_path / "latin"))
    bank = written(tmp_path, row(1, "a", 0, "root"))
    with refuses(InputError, str(bank), "set model.tokenizer"):
        kinds(small(DECODERS["gpt2"]), syntax=bank)


def in_pieces(pieces: Sequence[str], *, framed: bool) -> Any:
    """WordPiece over few pieces, with or without special tokens around."""
    known = {piece: place for place, piece in enumerate(("[CLS]", "[SEP]", "[UNK]", *pieces))}
    made = Tokenizer(models.WordPiece(known, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(["[CLS]", "[SEP]", "[UNK]"])
    if framed:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
        )
    return made


def test_tokens_belong_to_the_word_their_first_letter_lies_in() -> None:
    made = in_pieces(["don", "'", "t", "un", "##kind", "go"], framed=True)
    text = "don't unkind go"
    spans = [(0, 2), (2, 5), (6, 12), (13, 15)]
    assert align_words(made.encode(text), text, spans) == ((1,), (2, 3), (4, 5), (6,))
    with refuses(InputError, "word 0 spans characters 3 to 99 of 15", "within the text"):
        align_words(made.encode(text), text, [(3, 99)])


def test_words_without_a_token_are_left_out() -> None:
    made = in_pieces(["a", "b", "c"], framed=False)
    pair = WordPair(task="x", source=1, targets=(2,))
    text = AnnotatedText.from_words(["a", "b", "c"], [pair])
    (marked,) = align_texts(made, [text])
    # The first token of a text without a frame takes what heads have left over.
    assert marked == AlignedText((3, 4, 5), ((), (1,), (2,)), (pair,))
    assert align_texts(made, [text], bos=(0,))[0].words == ((1,), (2,), (3,))
    assert align_texts(made, [text], max_length=2) == []
    assert align_texts(made, [AnnotatedText.from_words(["a", "b", "what"], [pair])]) == []


def by_definition(result: Pattern, text: AlignedText, pair: WordPair) -> bool | None:
    """Whether the right word gets most, from the pattern; None if no such choice can be seen."""
    best: dict[bool, float] = {}
    for word, places in enumerate(text.words):
        pairs = [(t, s) for t in text.words[pair.source] for s in places]
        if word == pair.source or not any(result.visible[t, s] for t, s in pairs):
            continue
        weight = sum(float(result.weights[t, s]) for t, s in pairs) / len(text.words[pair.source])
        right = word in pair.targets
        best[right] = max(best.get(right, -1.0), weight)
    return None if len(best) < 2 else best[True] > best[False]


@pytest.mark.parametrize("name", ["encoder bert", "decoder window", "decoder sinks"])
def test_shares_are_those_of_the_definition_on_the_pattern(name: str) -> None:
    kind, _, which = name.partition(" ")
    model: Any = small({"encoder": ENCODERS, "decoder": DECODERS}[kind][which])
    generator = torch.Generator().manual_seed(3)
    texts = []
    for _ in range(6):
        ids = torch.randint(29, (13,), generator=generator).tolist()
        words = ((1,), (2, 3), (4,), (5, 6, 7), (8,), (9, 10), (11,))
        drawn = torch.randperm(7, generator=generator).tolist()
        pairs = tuple(
            WordPair(task="some", source=drawn[at], targets=tuple(drawn[at + 1 : at + 2 + at % 2]))
            for at in range(5)
        )
        texts.append(AlignedText(tuple(ids), words, pairs))
    result, complete = measure_word_targets(model, texts, progress=False)
    assert complete
    seen = patterns(model, [list(text.ids) for text in texts])
    for place, head in enumerate(Head(layer, head) for layer in (0, 1) for head in range(4)):
        message = [
            by_definition(seen.of(head, number), text, pair)
            for number, text in enumerate(texts)
            for pair in text.pairs
        ]
        known = [each for each in message if each is not None]
        assert result["some"].counts[place] == len(known) > 3
        assert result["some"].accuracy[place] == pytest.approx(sum(known) / len(known))


def test_the_weight_on_rivals_is_measured_for_words_that_see_some() -> None:
    model = small(DECODERS["gpt2"])
    words = tuple((place,) for place in range(1, 7))
    request = {"source": 5, "targets": (1,), "task": "some"}
    late = WordPair(**request, rivals=(0, 3))
    early = WordPair(task="some", source=2, targets=(1,), rivals=(4,))
    texts = [AlignedText((1, 2, 3, 4, 5, 6, 7), words, (late, early))]
    result = measure_word_targets(model, texts, progress=False)[0]["some"]
    seen = patterns(model, [list(texts[0].ids)])
    for place, head in enumerate(Head(layer, head) for layer in (0, 1) for head in range(4)):
        row = seen.of(head, 0).weights[6]
        assert result.counts[place] == 1
        assert result.weight[place] == pytest.approx(float(row[2]), abs=1e-6)
        assert result.rivals[place] == pytest.approx(float(row[1] + row[4]), abs=1e-6)
    plain = measure_word_targets(
        model, [AlignedText(texts[0].ids, words, (WordPair(**request),))], progress=False
    )[0]
    assert plain["some"].rivals.tolist() == [0.0] * 8


def test_both_stacks_of_an_encoder_decoder_are_measured_without_cross_attention() -> None:
    model = small(SEQ2SEQS["t5"])
    words = tuple((place,) for place in range(1, 7))
    pairs = (
        WordPair(task="some", source=4, targets=(1,)),
        WordPair(task="some", source=2, targets=(0,)),
    )
    result, _ = measure_word_targets(
        model, [AlignedText((1, 2, 3, 4, 5, 6, 7, 8), words, pairs)], progress=False
    )
    counts = result["some"].counts.reshape(6, 4)
    assert (counts > 0).all(axis=1).tolist() == [True, True, True, False, True, False]


NOUNS = ("dog", "cat", "cow")
TREEBANK = [
    rows
    for noun in NOUNS
    for verb in ("runs", "sleeps")
    for rows in (
        [
            row(1, "look", 4, "discourse"),
            row(2, "the", 3, "det"),
            row(3, noun, 4, "nsubj"),
            row(4, verb, 0, "root"),
            "",
        ],
        [
            row(1, "look", 5, "discourse"),
            row(2, "the", 4, "det"),
            row(3, "big", 4, "amod"),
            row(4, noun, 5, "nsubj"),
            row(5, verb, 0, "root"),
            "",
        ],
    )
]


@pytest.fixture(scope="module")
def reader() -> Any:
    """One head looks from an article to its noun, one does as it likes."""
    made = in_pieces(["look", "the", "big", *NOUNS, "runs", "sleeps"], framed=True)
    vocabulary = made.get_vocab_size()
    finds = torch.zeros(vocabulary, vocabulary)
    finds[made.token_to_id("the"), [made.token_to_id(noun) for noun in NOUNS]] = SHARP
    other = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0))
    return text_model([Look(finds), Look(other)], tokenizer=made, places=160, causal=False)


def test_a_head_has_a_relation_only_where_no_offset_does_as_well(
    reader: Any, tmp_path: Path
) -> None:
    bank = written(tmp_path, *(line for rows in TREEBANK * 8 for line in rows))
    result = kinds(reader, syntax=bank, sequences=2, progress=False)
    message = [label for label in result.of(Head(0, 0)) if label.kind == "syntactic"]
    assert [label.detail for label in message] == ["det, dependent to head"]
    (label,) = message
    # Scored on the half that did not choose it.
    assert (label.samples, label.unit, label.score) == (48, "words", 1.0)
    assert label.sample == "48 words"
    assert 0.9 < label.interval[0] < label.interval[1] == 1.0
    assert label.evidence.startswith(
        "picks the matching word 100% of the time over 48 words (det, dependent to head), "
    )
    assert label.evidence.endswith("by a fixed offset of +1, and gives it 100% of its weight")
    assert result.metadata["syntactic_texts"] == 96
    assert result.metadata["tests"] == 2 * len(
        [name for name in result.scores.names if name.startswith("syntactic")]
    )
    assert result.heads("syntactic") == result.heads("syntactic det, dependent to head")
    # Subjects stand before their verbs, always: an offset finds them as well.
    assert result.scores["syntactic nsubj, dependent to head"].of(Head(0, 0)) < 0.5


def test_rare_relations_are_left_out_and_named(reader: Any, tmp_path: Path) -> None:
    bank = written(tmp_path, *(line for rows in TREEBANK for line in rows))
    result = kinds(reader, syntax=bank, sequences=2, progress=False)
    assert not result.heads("syntactic")
    assert "det, dependent to head" in result.metadata["rare_relations"]


def scored(accuracy: Sequence[float], *, baseline: float = 0.3, words: int = 60) -> Any:
    """The scores of some heads on `words` independent words."""
    right, count = np.array(accuracy), np.full(len(accuracy), float(words))
    error = np.sqrt(right * (1 - right) / words)
    return WordTargetScores(
        task="det",
        counts=count,
        texts=count,
        accuracy=right,
        weight=right,
        uniform=np.full_like(right, 0.05),
        rivals=np.zeros_like(right),
        baseline=np.full_like(right, baseline),
        baseline_names=("a fixed offset of +1",) * len(right),
        errors=error,
        excess_errors=np.hypot(error, np.sqrt(baseline * (1 - baseline) / words)),
    )


def test_a_relation_is_chosen_on_one_half_and_confirmed_on_the_other() -> None:
    # Both halves, the first alone, the second alone, and both by too little.
    one, other = scored([0.8, 0.8, 0.3, 0.5]), scored([0.7, 0.45, 0.8, 0.5])
    both = replace(one, groups=(one, other))
    result = confirmed_word_scores("syntactic", both, threshold_table(), "det")
    (corrected,), tests = correct_for_chance([result])
    assert tests == 4
    assert corrected.above.tolist() == [True, False, False, False]
    assert result.scores.tolist() == [0.7, 0.45, 0.8, 0.5]
    assert "the other half" in corrected.refusal(2)
    assert "chance explains it, after correction for 4 tests" in corrected.refusal(3)


def test_many_tests_need_more_than_one_and_the_baseline_has_an_error_too() -> None:
    half = scored([0.62])
    result = confirmed_word_scores(
        "syntactic", replace(half, groups=(half, half)), threshold_table(), "det"
    )
    assert correct_for_chance([result])[0][0].above.tolist() == [True]
    nothing = scored([0.1] * 400)
    others = confirmed_word_scores(
        "syntactic", replace(nothing, groups=(nothing, nothing)), threshold_table(), "case"
    )
    assert result.p_values is not None
    assert others.p_values is not None
    tested = np.concatenate((result.p_values, others.p_values))
    assert not benjamini_hochberg(tested)[0]
    sure = replace(half, excess_errors=half.errors)
    alone = confirmed_word_scores(
        "syntactic", replace(sure, groups=(sure, sure)), threshold_table(), "det"
    )
    assert alone.p_values is not None
    assert alone.p_values[0] < result.p_values[0]


def test_words_of_one_text_count_as_dependent() -> None:
    """The same words in ten texts or in one: the errors over texts differ."""
    model = small(DECODERS["gpt2"])
    words = tuple((place,) for place in range(1, 12))
    generator = torch.Generator().manual_seed(0)
    texts = [
        AlignedText(
            tuple(torch.randint(29, (12,), generator=generator).tolist()),
            words,
            tuple(
                WordPair(task="some", source=source, targets=(source - 2,))
                for source in range(3, 11)
            ),
            group=number % 2,
        )
        for number in range(10)
    ]
    whole = measure_word_targets(model, texts, progress=False)[0]["some"]
    one, two = whole.groups
    np.testing.assert_allclose(whole.counts, one.counts + two.counts)
    np.testing.assert_allclose(whole.accuracy, (one.accuracy + two.accuracy) / 2)
    assert whole.texts.tolist() == [10.0] * 8
    # By hand: residuals summed by text, for the accuracy and for its excess over the baseline.
    alone = [measure_word_targets(model, [text], progress=False)[0]["some"] for text in texts]
    assert whole.baseline_names[0] in BASELINES
    for head in range(8):
        hits = np.array([each.accuracy[head] * each.counts[head] for each in alone])
        residuals = hits - whole.accuracy[head] * 8
        expected = np.sqrt(np.square(residuals).sum() * 10 / 9) / 80
        assert whole.errors[head] == pytest.approx(max(expected, 0.5 / 80))


def test_a_causal_model_is_measured_on_the_words_that_it_sees(tmp_path: Path) -> None:
    made = in_pieces(["look", "the", "big", *NOUNS, "runs", "sleeps"], framed=True)
    model: Any = build(
        "gpt2", layers=1, width=32, heads=2, vocabulary=made.get_vocab_size(), positions=64, seed=0
    )
    model.tokenizer = made
    bank = written(tmp_path, *(line for rows in TREEBANK * 8 for line in rows))
    result = kinds(model, syntax=bank, sequences=2, progress=False)
    assert "syntactic det, head to dependent" in result.scores
    assert "syntactic det, dependent to head" not in result.scores
