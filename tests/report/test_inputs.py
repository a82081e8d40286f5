import re
from pathlib import Path

import pytest

from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.report.inputs import check_model, read_file, read_text_input
from tests.report.small import WORDS, decoder


def test_a_letter_cut_in_two_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("я" * 100, encoding="utf-8")
    assert read_file(file, 3) == "я" * 26
    file.write_bytes(b"x" + "я".encode() * 100)
    assert read_file(file, 3) == "x" + "я" * 25


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(b"ab\xff\xfecd")
    with pytest.raises(InputError, match="is not UTF-8"):
        read_file(file, 100)


def test_pieces_are_even_and_letters_are_those_of_the_text() -> None:
    text = WORDS * 8
    result = read_text_input(decoder(), "it", text, measured=128, shown=20)
    assert len(result.ids) == len(result.tokens) == 20
    assert text.startswith("".join(result.tokens))
    assert len(result.measured) == 4
    assert text.startswith("".join(result.measured))


@pytest.mark.parametrize(
    ("size", "said"), [("vit-b16", "reads images"), ("transformer-base", "encoder and a decoder")]
)
def test_other_models_are_refused_in_plain_words(size: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        check_model(build(size, layers=1, width=32, heads=2, seed=0), "it")


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(InputError, match="the text is empty"):
        read_text_input(decoder(), "it", " \n", measured=10, shown=10)
