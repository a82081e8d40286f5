"""The walk's own arithmetic is the model's, stage by stage."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads.errors import ConfigError, InputError
from manyheads.explain.layer_walk import MAX_TOKENS, Stage, Walk, split_words, walk
from manyheads.models.build import build
from manyheads.models.encoder import Encoder

SENTENCE = "Всем привет! Я увлекаюсь искусственным интеллектом"

SHAPES = {
    Stage.EMBEDDINGS: "n c",
    Stage.POSITIONS: "n c",
    Stage.INPUT: "n c",
    Stage.QUERY: "n h d",
    Stage.KEY: "n h d",
    Stage.VALUE: "n h d",
    Stage.SCORES: "h n n",
    Stage.WEIGHTS: "h n n",
    Stage.HEAD_OUTPUTS: "n h d",
    Stage.CONCATENATED: "n c",
    Stage.ATTENTION_OUTPUT: "n c",
    Stage.ATTENTION_SUM: "n c",
    Stage.ATTENTION_NORMED: "n c",
    Stage.NEURONS: "n f",
    Stage.FEEDFORWARD_OUTPUT: "n c",
    Stage.FEEDFORWARD_SUM: "n c",
    Stage.FEEDFORWARD_NORMED: "n c",
    Stage.RESULT: "n c",
}


@pytest.fixture(scope="module")
def model() -> Encoder:
    """Untrained, but with biases and norms that are not zeros and ones, so that both count."""
    model: Encoder = build("tiny-encoder", seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.fixture(scope="module")
def walked(model: Encoder) -> Walk:
    return walk(model, [SENTENCE], head=3, position=2)


@pytest.mark.parametrize("stage", Stage)
def test_hand_and_model_agree(walked: Walk, stage: Stage) -> None:
    torch.testing.assert_close(
        walked[stage].model.double(), walked[stage].hand, atol=1e-5, rtol=0.0
    )
    assert walked[stage].difference < 1e-5


@pytest.mark.parametrize("stage", Stage)
def test_every_stage_has_its_documented_shape(walked: Walk, stage: Stage) -> None:
    sizes = {"n": 7, "c": 128, "h": 8, "d": 16, "f": 512}
    expected = tuple(sizes[letter] for letter in SHAPES[stage].split())
    assert walked[stage].model.shape == walked[stage].hand.shape == expected


def test_rows_of_weights_sum_to_one(walked: Walk) -> None:
    for weights in (walked[Stage.WEIGHTS].model.double(), walked[Stage.WEIGHTS].hand):
        torch.testing.assert_close(weights.sum(-1), torch.ones(8, 7).double(), atol=1e-6, rtol=0.0)


def test_a_difference_is_seen(walked: Walk) -> None:
    spoiled = walked[Stage.SCORES].model.clone()
    spoiled[2, 1, 1] += 0.5
    broken = dict(walked.steps)
    broken[Stage.SCORES] = type(walked[Stage.SCORES])(spoiled, walked[Stage.SCORES].hand)
    assert broken[Stage.SCORES].difference == pytest.approx(0.5, abs=1e-4)
    assert walked.agrees
    assert not Walk(
        sentences=walked.sentences,
        ids=walked.ids,
        sentence=0,
        head=0,
        position=0,
        steps=broken,
        kernel=walked.kernel,
        kernels_explained=walked.kernels_explained,
    ).agrees


def test_a_cell_written_out_is_its_score(walked: Walk) -> None:
    for key in range(7):
        cell = walked.cell(key)
        assert len(cell.products) == 16
        assert cell.root == 4.0
        assert cell.score == pytest.approx(float(walked[Stage.SCORES].hand[3, 2, key]), abs=1e-12)


def test_the_softmax_written_out_is_its_weight(walked: Walk) -> None:
    powers = walked.powers()
    share = powers[walked.strongest_key] / sum(powers)
    assert share == pytest.approx(float(walked[Stage.WEIGHTS].hand[3, 2].max()), abs=1e-12)


def test_the_first_channel_written_out_is_the_head_output(walked: Walk) -> None:
    total = sum(weight * value for weight, value in walked.first_channel())
    assert total == pytest.approx(float(walked[Stage.HEAD_OUTPUTS].hand[2, 3, 0]), abs=1e-12)


def test_entropy_lies_between_none_and_uniform(walked: Walk) -> None:
    entropies = walked.entropies()
    assert entropies.shape == (8,)
    assert 0 < float(entropies.min()) <= float(entropies.max()) < math.log2(7)


def test_one_token_has_one_weight_and_no_entropy(model: Encoder) -> None:
    alone = walk(model, ["Привет"])
    assert alone[Stage.WEIGHTS].model.tolist() == [[[1.0]]] * 8
    assert alone.entropies().tolist() == [0.0] * 8
    assert alone.agrees


def test_a_sentence_of_a_batch_is_walked_as_if_alone(model: Encoder) -> None:
    batch = walk(model, ["Один день", SENTENCE, "!"], sentence=1)
    assert batch.tokens == split_words([SENTENCE])[0]
    assert batch.agrees
    assert batch[Stage.RESULT].model.shape == (7, 128)


def test_the_longest_sentence_still_agrees(model: Encoder) -> None:
    words = " ".join(f"word{index % 300}" for index in range(MAX_TOKENS))
    assert walk(model, [words], position=MAX_TOKENS - 1).agrees


@given(texts=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=3))
def test_any_text_is_walked_or_refused_with_a_reason(model: Encoder, texts: list[str]) -> None:
    try:
        result = walk(model, texts)
    except InputError:
        return
    assert result.agrees
    assert "".join("".join(result.tokens).split()) == "".join(texts[0].split())


def test_ids_follow_the_order_of_first_appearance(model: Encoder) -> None:
    result = walk(model, ["to be or not to be", "be or not"])
    assert result.ids == ((0, 1, 2, 3, 0, 1), (1, 2, 3))


def test_punctuation_is_a_token_of_its_own() -> None:
    assert split_words(["Привет, мир!"]) == (("Привет", ",", "мир", "!"),)


def test_the_kernel_is_the_one_the_library_would_use(walked: Walk) -> None:
    assert walked.kernel in walked.kernels_explained
    assert walked.kernel != "reference"


def test_other_widths_can_be_walked() -> None:
    result = walk(build("tiny-encoder", seed=3, width=48, heads=6, hidden=32), ["a b c"], head=5)
    assert result.agrees
    assert result[Stage.QUERY].model.shape == (3, 6, 8)


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"head": 8}, "head=8 is outside a layer of 8 heads: use 0 to 7."),
        ({"head": -1}, "head=-1 is outside a layer of 8 heads: use 0 to 7."),
        ({"position": 7}, "position=7 is outside a sentence of 7 tokens: use 0 to 6."),
        ({"sentence": 1}, "sentence=1 is outside a batch of 1 sentences: use 0."),
    ],
)
def test_a_choice_out_of_range_names_the_range(
    model: Encoder, choice: dict[str, int], said: str
) -> None:
    with pytest.raises(InputError) as caught:
        walk(model, [SENTENCE], **choice)
    assert str(caught.value) == said


@pytest.mark.parametrize("text", ["", "   ", "\n\t"])
def test_a_text_without_a_word_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="text 1 has no word in it"):
        split_words(["fine", text])


def test_no_text_at_all_is_refused() -> None:
    with pytest.raises(InputError, match="texts is empty"):
        split_words([])


def test_bytes_that_are_no_text_are_refused() -> None:
    with pytest.raises(InputError, match="not UTF-8"):
        split_words(["\udcff"])


def test_a_text_too_long_to_follow_is_refused() -> None:
    with pytest.raises(InputError, match=f"use {MAX_TOKENS} or fewer"):
        split_words(["word " * (MAX_TOKENS + 1)])


def test_more_words_than_the_vocabulary_holds_are_refused() -> None:
    small = build("tiny-encoder", seed=0, vocabulary=3)
    with pytest.raises(InputError, match="4 different tokens do not fit into a vocabulary of 3"):
        walk(small, ["a b c d"])


def test_a_model_of_other_parts_is_refused() -> None:
    other = build("bert-base", width=32, heads=2, hidden=64, layers=1, vocabulary=50)
    with pytest.raises(ConfigError, match="tiny-encoder"):
        walk(other, ["a b"])
    with pytest.raises(ConfigError, match="tiny-encoder"):
        walk(build("tiny-encoder", layers=2), ["a b"])


def test_a_model_too_coarse_to_compare_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch.bfloat16 on cpu: use model.float\(\).cpu\(\)"):
        walk(build("tiny-encoder", dtype=torch.bfloat16), ["a b"])
