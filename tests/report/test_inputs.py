import pytest

from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.report.inputs import check_model, read_text_input
from tests.report.small import EVIL, START, WORDS, decoder, seq2seq


def test_texts_stay_whole_up_to_a_number_of_tokens_and_keep_their_letters() -> None:
    model = decoder()
    texts = [WORDS, WORDS * 2, WORDS]
    count = len(model.tokenizer.encode(WORDS))
    result = read_text_input(model, "it", texts, measured=2 * count, shown=count + 10)
    assert len(result.ids) == len(result.tokens) == count + 10
    assert "\n\n".join(texts).startswith("".join(result.tokens))
    assert result.measured[0] == texts[0]
    assert texts[1].startswith(result.measured[1])
    assert len(result.measured) == 2


def test_models_of_images_and_models_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InputError, match="reads images"):
        check_model(build("vit-b16", layers=1, width=32, heads=2, seed=0), "it")
    with pytest.raises(InputError, match="has no tokenizer"):
        check_model(build("gpt2", layers=1, width=32, heads=2, vocabulary=9, seed=0), "it")


def test_an_encoder_decoder_reads_pairs() -> None:
    model = seq2seq()
    result = read_text_input(model, "it", [(EVIL, WORDS), (WORDS, EVIL)], measured=99, shown=20)
    assert "".join(result.source_tokens) == EVIL[: len("".join(result.source_tokens))]
    assert "".join(result.tokens[1:]) == WORDS[: len("".join(result.tokens[1:]))]
    assert len(result.source_ids) == 20
    assert result.ids[0] == START
    assert result.shown == [(list(result.source_ids), list(result.ids))]
    assert result.tokens_of("encoder") == result.source_tokens
    with pytest.raises(InputError, match=r"pairs of texts"):
        read_text_input(model, "it", WORDS, measured=99, shown=20)


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(InputError, match="the text is empty"):
        read_text_input(decoder(), "it", " \n", measured=10, shown=10)
