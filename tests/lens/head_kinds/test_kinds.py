"""Heads that were set by hand are found for what they are, and nothing else is."""

import inspect
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from manyheads import lens
from manyheads.attention import AttentionConfig
from manyheads.data.sources.texts import InMemoryTexts
from manyheads.data.tokenizer_training import train_tokenizer
from manyheads.errors import InputError
from manyheads.lens.head_kinds import head_tests, image_attention
from manyheads.lens.head_kinds.criteria import (
    KindScores,
    Label,
    label_heads,
    threshold_table,
    with_draws,
)
from manyheads.lens.head_kinds.kinds import Kinds, kinds
from manyheads.lens.head_kinds.partners import find_partners
from manyheads.lens.inputs.synthetic import (
    FALLBACK_WORDS,
    SpecialTokens,
    inputs_from_ids,
    numbered_lists,
    repeated_tokens,
)
from manyheads.lens.results.addresses import Address
from manyheads.lens.weights.composition import composition_scores
from manyheads.models.build import build
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import NoReadout
from manyheads.models.stack import StackConfig
from manyheads.models.vision import Patches, Vision, VisionConfig
from manyheads.parts.masks import Window
from manyheads.parts.norms import NoNorm
from manyheads.parts.positions import Rotary
from manyheads.taps import Head, Sublayer
from tests.lens.planted import (
    BARE,
    DEAD,
    MIXED,
    PLACES,
    SHARP,
    WORDS,
    Look,
    Stream,
    attention_of,
    offset_look,
    planted_model,
    text_model,
)
from tests.messages import refuses
from tests.models.zoo import DECODERS, MODELS, decoder, small, writes


def found_in(model: Any, texts: Any = None, **more: Any) -> Kinds:
    return kinds(model, texts, progress=False, **more)


def names(labels: tuple[Label, ...]) -> list[str]:
    return [label.name for label in labels]


@pytest.fixture(scope="module")
def planted() -> Kinds:
    return found_in(planted_model()[0])


def test_planted_heads_are_labeled_exactly_so_and_nothing_else_is(planted: Kinds) -> None:
    for head, kind in planted_model()[1].items():
        expected = [] if kind in (DEAD, MIXED) else [kind]
        # These do not look at the tokens.
        blind = ["context-blind"] if kind in ("previous-token", "sink") else []
        assert names(planted.of(head)) == expected + blind, head
    assert planted.heads("induction") == (Address(Head(1, 0)),)
    assert planted.heads("mixed") == tuple(
        Address(Head(*each)) for each in ((0, 3), (1, 2), (1, 3))
    )
    assert planted.metadata["silent"] == ["L1H2"]


def test_planted_heads_are_labeled_on_any_draw_and_few_sequences() -> None:
    model, expected = planted_model()
    result = found_in(model, sequences=6, seed=11)
    message = {head: result.best(head) for head in expected}
    assert message == {head: MIXED if kind == DEAD else kind for head, kind in expected.items()}


def test_an_induction_head_names_the_head_without_which_it_fails(planted: Kinds) -> None:
    (label,) = planted.of(Head(1, 0))
    score = composition_scores(planted_model()[0], "key").of(Head(0, 0), Head(1, 0))
    partner = planted.metadata["partners"]["L1H0"]
    assert partner == {
        "head": "L0H0",
        "composition": pytest.approx(score),
        "by": "ablation",
        "score": pytest.approx(1.0),
        "without": pytest.approx(0.0, abs=0.05),
    }
    assert label.evidence.endswith(
        f"builds on L0H0: its score falls from 1.00 to {partner['without']:.2f} without it "
        f"(composition {score:.2f})"
    )


def test_a_partner_that_ablation_denies_is_named_by_weights_alone() -> None:
    """A head that the keys read most, but which changes nothing, is not the partner."""
    model, _ = planted_model()
    attention, stream = attention_of(model.stack, 0), Stream(WORDS, PLACES)
    with torch.no_grad():
        output, value = attention.output.weight, attention.projections()["value"]
        # L0H3 writes, where the keys of L1H0 read, the same at every token; L0H0 elsewhere too.
        output[:, 3 * stream.size :] = output[:, : stream.size]
        value[3 * stream.size :] = 1e-3
        output[stream.match_slice, :WORDS] = 5 * torch.eye(WORDS)
    previous = dict.fromkeys((Address(Head(0, head)) for head in range(4)), 0.0)
    previous[Address(Head(0, 0))] = 0.9
    scores = composition_scores(model, "key")
    assert scores.of(Head(0, 3), Head(1, 0)) > scores.of(Head(0, 0), Head(1, 0))
    inputs = inputs_from_ids(model, SpecialTokens(), repeated_tokens(model, 4))
    (partner,) = find_partners(model, [Address(Head(1, 0))], previous, inputs).values()
    assert (str(partner.address), partner.confirmed) == ("L0H0", True)
    # Without a run, and without an effect of any ablation, only the weights speak.
    for texts, heads in ((None, Head(1, 0)), (inputs, Head(1, 3))):
        (alone,) = find_partners(model, [Address(heads)], previous, texts).values()
        assert not alone.confirmed
        assert "by weights alone" in str(alone)


def test_texts_decide_the_positional_kinds() -> None:
    model, _ = planted_model()
    result = found_in(model, [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]] * 3, sequences=5)
    assert names(result.of(Head(0, 0))) == ["previous-token", "context-blind"]
    assert result.of(Head(0, 0))[0].evidence == (
        "puts 100% of its weight on the previous token over 3 given texts"
    )
    assert result.metadata["texts"] == 3
    assert result.of(Head(1, 0))[0].evidence.startswith(
        "puts 100% of its weight on the token after an earlier copy over 5 random sequences"
    )


def test_heads_that_attend_ahead_or_at_an_offset_are_labeled() -> None:
    offsets = {1: "next-token", 0: "self", -1: "previous-token", -3: "positional -3"}
    model = text_model([offset_look(offset) for offset in (*offsets, 5)], causal=False)
    result = found_in(model, sequences=8)
    message = [result.best(Head(0, head)) for head in range(5)]
    assert message == [*offsets.values(), "positional +5"]
    assert "the token 5 after" in result.of(Head(0, 4))[0].evidence
    assert result.heads("positional") == result.heads("positional -3") + result.heads(
        "positional +5"
    )


def test_even_heads_are_broad_and_a_narrow_window_makes_no_previous_token_head() -> None:
    even = found_in(text_model([Look(), Look()]), sequences=8)
    assert [names(even.of(Head(0, head))) for head in (0, 1)] == [["broad", "context-blind"]] * 2
    # Each of two keys gets half of the weight of every head.
    narrow = found_in(small(decoder(*[writes(position=Rotary(), mask=Window(1))])), sequences=8)
    assert not narrow.heads("previous-token")
    assert not narrow.heads("self")


MARKS = [*"()[]{}", '"', ",", ".", ";", "!", "?"]
DIGITS = list("123456789")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    known = ["[CLS]", "[SEP]", *MARKS, *DIGITS, *FALLBACK_WORDS]
    split = Tokenizer(models.WordLevel({word: place for place, word in enumerate(known)}, "[CLS]"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    split.add_special_tokens(["[CLS]", "[SEP]"])
    split.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return split


def test_heads_for_marks_and_numbers_are_labeled_on_texts_of_the_models_own_words(
    tokenizer: Any,
) -> None:
    vocabulary, places = tokenizer.get_vocab_size(), 160
    ids = {word: tokenizer.token_to_id(word) for word in (*MARKS, *DIGITS)}
    quotes, numbers, stops = (torch.zeros(vocabulary, vocabulary) for _ in range(3))
    quotes[ids['"'], ids['"']] = SHARP
    stops[:, [ids[stop] for stop in MARKS]] = SHARP
    for one in DIGITS:
        numbers[ids[one], [ids[digit] for digit in DIGITS]] = SHARP
    # The latest of what fits, but not oneself.
    place = torch.arange(places).float()
    latest = place.expand(places, places) * 0.5 - 2 * SHARP * torch.eye(places)
    looks = [Look(quotes, latest), Look(numbers, latest), Look(stops)]
    # A taste for quotes, hardly more for the latest; and small ones beside a sink.
    faint, small = place.expand(places, places) * 0.01, latest.clone()
    small[:, 0] = SHARP + 0.5 * place + 1
    looks += [Look(quotes, faint - 2 * SHARP * torch.eye(places)), Look(quotes, small)]
    looks += [Look(numbers, small)]
    result = found_in(text_model(looks, tokenizer=tokenizer, places=places), sequences=4)
    wanted = ["bracket quotes", "numbering numbers", "punctuation"]
    for head, name in enumerate(wanted):
        assert name in names(result.of(Head(0, head)))
        assert len(result.heads(name)) == 1
    # Whitespace leaves no token of a line's end.
    assert not any(name.startswith("numbering line ends") for name in result.scores.names)
    assert "punctuation, which is" in result.of(Head(0, 2))[0].evidence
    assert "of its weight, all its rivals " in result.of(Head(0, 0))[0].evidence
    for head, name in ((3, "bracket quotes"), (4, "bracket quotes"), (5, "numbering numbers")):
        assert result.scores[name].of(Head(0, head)) > 0.8


def test_a_tokenizer_that_pads_and_cuts_changes_nothing(tokenizer: Any) -> None:
    vocabulary = tokenizer.get_vocab_size()
    tastes = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(1))
    model = text_model([Look(3 * tastes)], tokenizer=tokenizer, places=160)
    plain = found_in(model, sequences=2)
    model.tokenizer = Tokenizer.from_str(tokenizer.to_str())
    model.tokenizer.enable_padding(length=128)
    model.tokenizer.enable_truncation(9)
    again = found_in(model, sequences=2)
    assert plain.labels == again.labels
    for name in plain.scores.names:
        np.testing.assert_array_equal(plain.scores.means[name], again.scores.means[name])


def test_special_tokens_are_sinks_wherever_they_stand(tokenizer: Any) -> None:
    vocabulary = tokenizer.get_vocab_size()
    ends = torch.zeros(vocabulary, vocabulary)
    ends[:, tokenizer.token_to_id("[SEP]")] = SHARP
    model = text_model([Look(ends), Look()], tokenizer=tokenizer, places=160, causal=False)
    result = found_in(model, sequences=4)
    assert names(result.of(Head(0, 0))) == ["sink", "context-blind"]
    assert "special tokens" in result.of(Head(0, 0))[0].evidence


def vision_model() -> Vision:
    """Heads for the patch itself, those around, the row, the column and the class token."""
    side, width = 6, 37
    attention = AttentionConfig(width=width, heads=6, head_size=width, scale=1.0)
    layer = LayerConfig(attention=Branch(attention, BARE), feedforward=None)
    stack = StackConfig(width=width, layers=(layer,), final_norm=NoNorm())
    patches = Patches(width=width, image=side * 2, size=2)
    model = build(VisionConfig(patches=patches, stack=stack, readout=NoReadout()), seed=0)
    place = torch.arange(side * side)
    down = (place[:, None] // side - place[None] // side).abs()
    right = (place[:, None] % side - place[None] % side).abs()
    other = down + right > 0
    wanted = torch.zeros(6, width, width)
    wanted[0, 1:, 1:] = (~other).float()
    wanted[1, 1:, 1:] = ((down <= 1) & (right <= 1) & other).float()
    wanted[2, 1:, 1:] = ((down == 0) & other).float()
    wanted[3, 1:, 1:] = ((right == 0) & other).float()
    wanted[4, :, 0] = 1.0
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
        every = torch.eye(width)
        model.embedding.positions.class_token.copy_(every[0])
        model.embedding.positions.patches.copy_(every[1:].reshape(side, side, width))
        parts = attention_of(model.stack, 0).projections()
        parts["query"].copy_(SHARP * wanted.transpose(1, 2).reshape(-1, width))
        parts["key"].copy_(every.repeat(6, 1))
        parts["value"].copy_(every.repeat(6, 1))
        attention_of(model.stack, 0).output.weight.copy_(every.repeat(1, 6))
    return model


def test_heads_of_images_are_labeled_by_where_they_attend_on_the_grid() -> None:
    model = vision_model()
    result = found_in(model)
    message = [names(result.of(Head(0, head))) for head in range(6)]
    assert message == [["self"], ["local"], ["row"], ["column"], ["class-token"], ["broad"]]
    assert result.of(Head(0, 2))[0].evidence == (
        "puts 100% of its weight on other patches of its row over 16 images"
    )
    inputs = found_in(model, [torch.randn(3, 12, 12), torch.randn(3, 12, 12)])
    assert inputs.metadata["images"] == 2
    assert inputs.best(Head(0, 1)) == "local"
    with refuses(InputError, "images have no syntax", "omit syntax"):
        kinds(model, syntax="somewhere")


def test_images_are_looked_at_in_pieces_with_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(MODELS["vision vit"])
    whole = found_in(model)
    monkeypatch.setattr(image_attention, "CHUNK_WEIGHTS", 1)
    pieces = found_in(model)
    for name in whole.scores.names:
        np.testing.assert_allclose(pieces.scores.means[name], whole.scores.means[name], atol=1e-6)


def test_the_ends_of_lines_are_tested_where_the_tokenizer_keeps_them() -> None:
    words = " ".join(FALLBACK_WORDS) + "\n".join((*MARKS, *DIGITS))
    made = train_tokenizer(InMemoryTexts((words,) * 3), 400, progress=False)
    model: Any = build(
        "gpt2", layers=1, width=32, heads=2, vocabulary=made.get_vocab_size(), seed=0
    )
    model.tokenizer = made
    result = found_in(model, sequences=2)
    assert {"numbering line ends", "numbering numbers", "bracket quotes"} <= set(
        result.scores.names
    )
    assert result.missing.keys() == {"syntactic", "coreference", "bias-gap", "recall"}


def test_no_line_has_its_number_where_an_induction_head_looks() -> None:
    request = 0
    for written in numbered_lists(FALLBACK_WORDS, texts=4):
        words = [written.text[start:stop] for start, stop in written.words]
        for pair in written.pairs:
            copies = [at for at in range(pair.source) if words[at] == words[pair.source]]
            assert not {at + 1 for at in copies} & set(pair.targets)
            request += len(copies)
    assert request > 16


KINDS_OF_MODELS = (
    "encoder bert",
    "encoder modernbert",
    "encoder t5",
    "encoder classes",
    "decoder window",
    "decoder alibi",
    "decoder gates",
    "decoder sinks",
    "decoder uneven",
    "seq2seq t5",
    "seq2seq window",
    "seq2seq one layer looks back",
    "vision mean",
)


@pytest.mark.parametrize("name", KINDS_OF_MODELS)
def test_every_model_has_an_answer_for_each_of_its_heads(name: str, tmp_path: Path) -> None:
    result = found_in(small(MODELS[name]), sequences=3)
    assert set(result.labels) == set(result.scores.addresses)
    assert result.complete
    known = set(threshold_table())
    for labels in result.labels.values():
        assert all(label.score > label.threshold and label.kind in known for label in labels)
        order = [list(threshold_table()).index(label.kind) for label in labels]
        assert order == sorted(order)
    # No head of a model that has learned nothing has a kind, unless its parts force it.
    assert {label.kind for labels in result.labels.values() for label in labels} <= {
        "broad",
        "context-blind",
    }
    result.save(tmp_path / "kinds.json")
    again = lens.load(tmp_path / "kinds.json")
    assert again.labels.keys() == result.labels.keys()
    for head, labels in result.labels.items():
        assert str(again.of(head)) == str(labels)


@pytest.mark.parametrize("scale", [1.0, 5.0, 20.0])
def test_random_weights_of_any_size_get_no_kind_but_those_that_parts_force(scale: float) -> None:
    forced = {"broad", "self", "previous-token", "next-token", "positional", "context-blind"}
    for seed, name in enumerate(("gpt2", "bert-base", "modernbert-base")):
        model = build(name, layers=1, width=32, heads=4, vocabulary=80, seed=seed)
        with torch.no_grad():
            for weights in model.parameters():
                weights.mul_(scale)
        result = found_in(model, sequences=5, seed=seed)
        assert {label.kind for own in result.labels.values() for label in own} <= forced


def test_copying_is_measured_where_words_enter_and_leave() -> None:
    result = found_in(small(MODELS["seq2seq t5"]), sequences=3)
    known = {address for address, score in result.scores["copying"].items() if not np.isnan(score)}
    assert {(each.stack, each.sublayer) for each in known} == {
        ("decoder", Sublayer.ATTENTION),
        ("decoder", Sublayer.CROSS),
    }
    own = found_in(small(MODELS["seq2seq window"]), sequences=3)
    known = {address for address, score in own.scores["copying"].items() if not np.isnan(score)}
    assert {each.sublayer for each in known} == {Sublayer.CROSS}
    assert found_in(small(MODELS["encoder classes"]), sequences=2).missing["copying"] == (
        "the model has no language head"
    )


def test_results_read_well_and_come_back_as_they_were_saved(planted: Kinds, tmp_path: Path) -> None:
    text = str(planted)
    assert text.splitlines()[0] == (
        "kinds of 8 heads: 2 context-blind, 1 previous-token, 1 sink, 1 duplicate-token, "
        "1 induction, 1 copying, 3 mixed"
    )
    assert "  L1H0  induction 1.00 ± 0.00 (5 of 5 draws)" in text
    assert "not measured: punctuation, retrieval, recall, bracket, numbering, capitals, " in text
    assert "tense (the model has no tokenizer)" in text
    assert planted.table().row_count == 8
    assert len(planted.rows()) == 10
    rows = [row for row in planted.rows() if row["kind"] != "context-blind"]
    assert rows[6]["kind"] == MIXED
    assert rows[6]["evidence"] == "writes almost nothing to the residual stream"
    assert rows[3]["nearest"] == "broad"
    assert rows[3]["evidence"].endswith("it needs 0.85")
    assert (rows[4]["samples"], rows[4]["unit"], rows[4]["draws"]) == (64, "sequences", 5)
    assert rows[4]["low"] <= rows[4]["score"] <= rows[4]["high"]
    assert next(iter(planted.frame()["score"])) == pytest.approx(1.0)
    for ending in ("json", "safetensors"):
        planted.save(tmp_path / f"kinds.{ending}")
        again = lens.load(tmp_path / f"kinds.{ending}")
        assert again.labels == planted.labels
        assert again.nearest == planted.nearest
        assert again.metadata == planted.metadata
        assert str(again) == text
        for name in planted.scores.names:
            np.testing.assert_array_equal(again.scores.means[name], planted.scores.means[name])


def test_a_mixed_head_shows_in_one_line_what_it_lacks(planted: Kinds) -> None:
    assert planted.describe("L0H3").endswith(": it needs 0.85")
    near = replace(planted.nearest[Address(Head(0, 3))], score=0.84, error=0.01)
    close = replace(planted, nearest={Address(Head(0, 3)): near})
    assert close.describe("L0H3") == (
        "mixed, nearest broad 0.84: it needs 0.85, within two standard errors"
    )
    assert not replace(near, error=0.001).near_threshold
    assert not replace(near, error=math.nan).near_threshold
    assert near.record()["near_threshold"]


def test_every_command_draws_as_many_sequences() -> None:
    for function in (kinds, lens.inspect):
        assert inspect.signature(function).parameters["sequences"].default == 64


def test_an_unknown_head_or_kind_is_refused(planted: Kinds) -> None:
    with refuses(InputError, "there is no head L2H0: use L0H0 to L1H3."):
        planted.of(Head(2, 0))
    with refuses(InputError, "'clever'", "previous-token"):
        planted.heads("clever")
    assert planted.heads("coreference") == ()


def test_thresholds_are_one_table_with_sources_and_can_be_changed(planted: Kinds) -> None:
    table = threshold_table()
    assert all(each.source and 0 < each.above < 1 for each in table.values())
    model, _ = planted_model()
    strict = found_in(model, thresholds={"broad": 0.4}, sequences=4)
    assert "broad" in names(strict.of(Head(0, 3)))
    assert not planted.of(Head(0, 3))
    with refuses(InputError, "'bored'", "previous-token"):
        kinds(model, thresholds={"bored": 0.4})
    with refuses(InputError, "threshold of broad is 2", "0 to 1"):
        kinds(model, thresholds={"broad": 2})
    with refuses(InputError, "sequences", "got 0", "use 1 or more"):
        kinds(model, sequences=0)


def raises_interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


def test_breaking_off_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = planted_model()
    monkeypatch.setattr(head_tests, "score_copying", raises_interrupt)
    result = found_in(model, sequences=4)
    assert not result.complete
    assert result.best(Head(1, 0)) == "induction"
    assert "copying" not in result.scores
    assert "interrupted" in str(result)
    monkeypatch.setattr(head_tests, "measure_by_plan", raises_interrupt)
    with pytest.raises(KeyboardInterrupt):
        found_in(model, sequences=4)


def test_positions_and_words_that_are_few_are_respected() -> None:
    short = build("gpt2", layers=1, width=16, heads=2, vocabulary=9, positions=12, seed=0)
    assert found_in(short, sequences=3).complete
    with refuses(InputError, "4 positions", "use a larger model"):
        kinds(build("gpt2", layers=1, width=16, heads=2, vocabulary=50, positions=4, seed=0))


def test_looking_leaves_the_model_as_it_was() -> None:
    model: Any = build(DECODERS["gpt2"], seed=0).train()
    found_in(model, sequences=2)
    assert model.training


def test_specific_kinds_come_first_and_those_of_many_heads_last() -> None:
    """An induction head with a strong sink is an induction head."""
    kinds_in_order = list(threshold_table())
    assert kinds_in_order[0] == "induction"
    assert kinds_in_order[-6:] == [
        "punctuation",
        "class-token",
        "sink",
        "broad",
        "context-blind",
        "silent",
    ]
    model, _ = planted_model()
    result = found_in(model, thresholds={"broad": 0.01, "sink": 0.001}, sequences=5)
    assert names(result.of(Head(1, 1)))[0] == "copying"
    assert "broad" in names(result.of(Head(1, 1)))
    assert result.best(Head(0, 2)) == "duplicate-token"


def draw(score: float, *, threshold: float = 0.4, heads: int = 1) -> KindScores:
    values = np.full(heads, score)
    return KindScores(
        kind="duplicate-token",
        scores=values,
        thresholds=np.full(heads, threshold),
        evidence=lambda _: "evidence",
        errors=np.full(heads, 0.05),
        samples=np.full(heads, 64.0),
        unit="sequences",
    )


@pytest.mark.parametrize(
    ("scores", "inputs"),
    [
        (
            (0.46, 0.44, 0.47, 0.5, 0.43),
            "5 of 5 draws",
        ),
        (
            (0.46, 0.44, 0.47, 0.3, 0.3),
            "3 of 5 draws",
        ),
        ((0.9, 0.9, 0.3, 0.3, 0.3), None),
    ],
)
def test_a_label_counts_the_draws_in_which_it_holds_and_needs_most(
    scores: tuple[float, ...], inputs: str | None
) -> None:
    whole = with_draws(draw(0.46), [draw(each) for each in scores])
    head = Address(Head(0, 0))
    labels, nearest = label_heads([whole], [head], np.array([False]))
    message = f"duplicate-token 0.46 ± 0.05 ({inputs}, near the threshold 0.40)"
    assert [str(label) for label in labels[head]] == ([] if inputs is None else [message])
    if inputs is None:
        assert "it holds in 2 of 5 draws" in nearest[head].evidence
        assert nearest[head].lacks == "it holds in 2 of 5 draws"


def test_a_short_text_makes_no_sinks_of_even_heads() -> None:
    """Each of three tokens gets a third of the weight, which is not the head's doing."""
    result = found_in(text_model([Look(), Look()]), [[5, 6, 7]] * 3, sequences=5)
    assert [names(result.of(Head(0, head))) for head in (0, 1)] == [["broad", "context-blind"]] * 2
