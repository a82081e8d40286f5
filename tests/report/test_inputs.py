import re

import pytest

from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.report.inputs import check_model, read_text_input
from tests.report.small import WORDS, decoder


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


@pytest.mark.parametrize(
    ("size", "said"), [("vit-b16", "reads images"), ("transformer-base", "encoder and a decoder")]
)
def test_other_models_are_refused_in_plain_words(size: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        check_model(build(size, layers=1, width=32, heads=2, seed=0), "it")


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(InputError, match="the text is empty"):
        read_text_input(decoder(), "it", " \n", measured=10, shown=10)
