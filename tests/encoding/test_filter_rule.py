"""Rules over texts: they mean what they mean in Python, and errors name the place."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyheads.encoding.filter_rule import UNKNOWN, RuleName, RuleTypeError, TextRule
from manyheads.errors import InputError
from tests.messages import refuses

VALUES: dict[str, Any] = {"score": 2.5, "tokens": 7, "year": 1999, "truncated": True, "good": False}


def lookup(name: RuleName) -> Any:
    return VALUES[name.name]


NUMBERS = st.sampled_from(["score", "tokens", "year", "2.5", "7", "-1", "1e3"])
COMPARISONS = st.builds(
    lambda left, sign, right, more: f"{left} {sign} {right}{more}",
    NUMBERS,
    st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
    NUMBERS,
    st.sampled_from(["", " < 8", " != tokens"]),
)
MEMBERS = st.builds(
    lambda left, sign: f"{left} {sign} [7, 2.5]", NUMBERS, st.sampled_from(["in", "not in"])
)
RULES = st.recursive(
    COMPARISONS | MEMBERS | st.sampled_from(["truncated", "good", "True"]),
    lambda inner: st.one_of(
        st.builds("{} and {}".format, inner, inner),
        st.builds("{} or {}".format, inner, inner),
        st.builds("not {}".format, inner),
        st.builds("({})".format, inner),
    ),
    max_leaves=8,
)


@given(RULES)
def test_a_rule_means_what_it_means_in_python(text: str) -> None:
    assert TextRule.parse(text).decide(lookup) is bool(eval(text, {}, VALUES))


@given(RULES, st.sets(st.sampled_from(sorted(VALUES))))
def test_an_early_decision_is_the_final_one(text: str, known: set[str]) -> None:
    rule = TextRule.parse(text)
    early = rule.decide(lambda name: VALUES[name.name] if name.name in known else UNKNOWN)
    assert early in (None, rule.decide(lookup))


def test_names_columns_and_classes() -> None:
    rule = TextRule.parse(
        'probability["not spam"] > .5 and meta.lang == "en" and column["score"] > 1'
    )
    assert [(each.kind, each.name) for each in rule.names] == [
        ("class", "not spam"),
        ("column", "meta.lang"),
        ("column", "score"),
    ]
    rule.check_classes(("spam", "not spam"))
    with refuses(InputError, "character 1", "'not spam'", "use spam, ham"):
        rule.check_classes(("spam", "ham"))
    with refuses(InputError, "label", "use score"):
        TextRule.parse('label == "a"').check_classes(())


def test_words_of_python_are_columns_and_its_escapes_are_not_read() -> None:
    rule = TextRule.parse('class == "a\\n\\"b" and\nlambda.if in ("x") and not is < 007')
    assert rule.columns == ["class", "lambda.if", "is"]
    values = {"class": 'an"b', "lambda.if": "x", "is": 8}
    assert rule.decide(lambda name: values[name.name]) is True


@pytest.mark.parametrize(
    ("text", "position", "remedy"),
    [
        ("score = 3", "character 7", "use =="),
        ("score >= 3 && tokens > 1", "character 12", "use and"),
        ("score >= 3 tokens", "character 12", "and, or, or the end"),
        ("(score >= 3", "character 11", "it needs )"),
        ('label == "spam', "character 10", "close the quotes"),
        ("label == 3", "character 1", "put strings in quotes"),
        ("score", "character 1", "score >= 0.5"),
        ("__import__('os')", "character 11", "and, or, or the end"),
        ("(" * 200 + "true" + ")" * 200, "character", "remove parentheses"),
    ],
)
def test_an_error_names_the_character_and_the_remedy(text: str, position: str, remedy: str) -> None:
    with refuses(InputError, position, remedy):
        TextRule.parse(text)


def test_null_and_values_that_cannot_be_compared() -> None:
    def of(value: Any) -> Any:
        return lambda _: value

    assert TextRule.parse("year < 3").decide(of(None)) is False
    assert TextRule.parse("year == null").decide(of(None)) is True
    with pytest.raises(RuleTypeError, match="year is a string"):
        TextRule.parse("year < 3").decide(of("x"))
