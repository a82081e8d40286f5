"""A word after a text is found among the tokens and traced."""

import pytest

from manyheads.errors import InputError
from manyheads.lens.attribution.attribute import Attribution, Contribution, attribute, find_token
from tests.messages import refuses
from tests.studio import models


def test_a_word_is_sought_with_a_space_where_the_text_ends_without_one() -> None:
    tokenizer = models.tokenizer()
    spaced, bare = (tokenizer.encode(each).ids for each in (" the", "t"))
    assert find_token(tokenizer, "the", "on") == spaced[0]
    assert find_token(tokenizer, "t", "on ") == bare[0]


def test_a_word_of_many_tokens_is_refused_with_its_pieces() -> None:
    with pytest.raises(InputError, match="tokens of this model"):
        find_token(models.tokenizer(), "hippopotamus")


def test_an_empty_word_is_refused() -> None:
    for words in (("",), ("mat", "")):
        with refuses(InputError, "empty", "one token"):
            attribute(models.decoder(layers=1), "The cat", *words)


def rolled(values: list[float]) -> Attribution:
    contributions = tuple(Contribution(f"t{place}", value) for place, value in enumerate(values))
    return Attribution(
        method="rollout",
        target=None,
        against=None,
        value=1.0,
        completeness=0.0,
        contributions=contributions,
    )


def test_the_largest_tokens_and_the_last_are_shown_in_their_order() -> None:
    result = rolled([0.0, 0.0, -5.0, 0.0, 7.0, 1.0, 0.0, 0.0])
    assert result.indices(4) == [2, 4, 5, 7]
    assert result.indices(2) == [2, 4]
    assert result.indices() == list(range(8))
    assert len(rolled([0.1] * 100).indices(40)) == 40
    assert [share.part for share in result.ranked()] == [f"t{place}" for place in range(8)]
    assert "t4" in str(rolled([0.0] * 4 + [7.0] + [0.0] * 40))


def test_the_number_of_steps_is_used_and_their_error_reported() -> None:
    model, text = models.decoder(layers=1), "The cat sat on the"
    few, many = (
        attribute(model, text, "mat", method="integrated", steps=steps, progress=False)
        for steps in (1, 96)
    )
    assert (few.path_steps, many.path_steps) == (1, 96)
    assert few.completeness > 10 * many.completeness
    missed = abs(sum(each.value for each in few.contributions) - few.value)
    assert few.completeness == pytest.approx(missed, rel=1e-3)
    assert f"in 1 steps; it did not converge, and the parts are off by {missed:.1e}" in few.summary
    assert not few.converged
    assert many.converged
    assert "converge" not in many.summary
    with refuses(InputError, "direct", "steps=3", "leave it out"):
        attribute(model, text, steps=3)


def test_a_difference_of_two_words_is_the_difference_of_their_traces() -> None:
    model, text = models.decoder(layers=1), "The cat sat on the"
    one, other = (attribute(model, text, word) for word in ("mat", "log"))
    both = attribute(model, text, "mat", "log")
    for part in ("L0H2", "feedforward 0", "embedding"):
        assert both.of(part) == pytest.approx(one.of(part) - other.of(part), abs=1e-4)


def test_an_image_has_no_next_word() -> None:
    with pytest.raises(InputError, match="does not read texts"):
        attribute(models.vision(), "The cat")
