"""Our own texts fit every kind of model."""

from manyheads.lens.inputs.synthetic import UNFINISHED_PASSAGE, default_texts, passages
from tests.studio import models


def test_articles_have_words_and_are_no_two_alike() -> None:
    texts = passages()
    assert len(set(texts)) == len(texts)
    assert min(map(len, texts)) > 200


def test_a_name_of_the_begun_text_has_gone_on_before() -> None:
    last = UNFINISHED_PASSAGE.split()[-1]
    assert UNFINISHED_PASSAGE.count(last) == 2


def test_images_are_made_for_a_model_of_images() -> None:
    assert default_texts(models.vision())[0].shape == (3, 32, 32)
