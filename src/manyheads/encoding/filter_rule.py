"""Rules over texts and what a classifier says of them: `score >= 3 and language == "en"`.

A rule compares with ==, !=, <, <=, >, >=, in and not in, and joins comparisons by and, or, not and
parentheses. It knows `score`, `label`, `probability` (that of the label), `probability["toxic"]`
(that of a class), `tokens`, `truncated`, and the columns of a row by name; `column["score"]` is a
column that has the name of something else. Nothing in it is run as Python.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, NoReturn

from manyheads.errors import InputError, short_repr

# What the classifier says, and the types of these values.
KNOWN_NAMES: dict[str, type] = {
    "score": float,
    "label": str,
    "probability": float,
    "tokens": float,
    "truncated": bool,
}
TYPE_WORDS = {float: "a number", str: "a string", bool: "true or false", type(None): "null"}
CONSTANTS: dict[str, Any] = {"true": True, "false": False, "null": None}
CONSTANTS |= {"True": True, "False": False, "None": None}
COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": lambda one, other: one == other,
    "!=": lambda one, other: one != other,
    "<": lambda one, other: one < other,
    "<=": lambda one, other: one <= other,
    ">": lambda one, other: one > other,
    ">=": lambda one, other: one >= other,
    "in": lambda one, other: one in other,
    "not in": lambda one, other: one not in other,
}
# Signs of other languages, and what is meant.
FOREIGN = {"=": "==", "&&": "and", "&": "and", "||": "or", "|": "or", "!": "not", "<>": "!="}
FOREIGN |= {"=>": ">=", "=<": "<="}
LONGEST_RULE, DEEPEST_RULE = 10_000, 100

TOKENS = re.compile(
    r"""\s*(?:
      (?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w))
    | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<word>[^\W\d]\w*(?:\.[^\W\d]\w*)*)
    | (?P<sign>==|!=|<=|>=|<>|=>|=<|&&|\|\||[<>()\[\],=&|!])
    | (?P<wrong>\S)
    )""",
    re.VERBOSE,
)


class RuleToken(NamedTuple):
    """A word of a rule, and where it begins, counted from 1."""

    kind: str
    text: str
    position: int


@dataclass(frozen=True, slots=True)
class RuleConstant:
    """A number, a string, a list of these, true, false or null."""

    value: Any
    position: int


@dataclass(frozen=True, slots=True)
class RuleName:
    """A value that differs from text to text."""

    kind: Literal["score", "label", "probability", "tokens", "truncated", "class", "column"]
    name: str
    position: int

    @property
    def shown(self) -> str:
        forms = {"class": f'probability["{self.name}"]', "column": self.name}
        return forms.get(self.kind, self.kind)

    @property
    def type(self) -> type | None:
        """The type of its values; None for a column, which may have any."""
        return float if self.kind == "class" else KNOWN_NAMES.get(self.kind)


RuleOperand = RuleConstant | RuleName


@dataclass(frozen=True, slots=True)
class RuleComparison:
    """Operands with a comparison between each two, as in `1 <= score < 3`."""

    operands: tuple[RuleOperand, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RuleNegation:
    """What holds where the part does not."""

    part: "RulePart"


@dataclass(frozen=True, slots=True)
class RuleJunction:
    """Parts that all must hold, or any of them."""

    word: Literal["and", "or"]
    parts: tuple["RulePart", ...]


RulePart = RuleConstant | RuleName | RuleComparison | RuleNegation | RuleJunction


class RuleTypeError(ValueError):
    """Values of one text that cannot be compared."""


class _Unknown:
    """A value that is not known yet."""


UNKNOWN = _Unknown()
# The value of a name, or UNKNOWN.
Lookup = Callable[[RuleName], Any]


@dataclass(frozen=True, slots=True)
class TextRule:
    """A parsed rule. `argument` is the name that errors give it.

    >>> rule = TextRule.parse('score >= 3 and not label in ["spam", "ads"]')
    >>> values = {"score": 3.5, "label": "news"}
    >>> rule.decide(lambda name: values[name.kind])
    True
    >>> TextRule.parse("score => 3")
    Traceback (most recent call last):
    manyheads.errors.InputError: keep='score => 3': '=>' at character 7 is not an operator: use >=.
    """

    text: str
    part: RulePart
    argument: str = "keep"

    @classmethod
    def parse(cls, text: str, argument: str = "keep") -> "TextRule":
        return cls(text, _Parser(text, argument).parse(), argument)

    @property
    def names(self) -> list[RuleName]:
        """The names that the rule mentions."""
        return list(_names(self.part))

    @property
    def columns(self) -> list[str]:
        """The columns that the rule mentions, each once."""
        return list(dict.fromkeys(each.name for each in self.names if each.kind == "column"))

    def check_classes(self, classes: Sequence[str]) -> None:
        """Refuse what a classifier with these classes, or a regression model without, lacks."""
        for each in self.names:
            if each.kind in ("label", "probability", "class") and not classes:
                self._fail(
                    each, f"{each.shown} needs classes, and the model has one output", "use score"
                )
            if each.kind == "class" and each.name not in classes:
                self._fail(each, f"there is no class {each.name!r}", f"use {', '.join(classes)}")
        for name, constant in self._label_constants(self.part):
            if isinstance(constant.value, str) and constant.value not in classes:
                self._fail(
                    name, f"there is no class {constant.value!r}", f"use {', '.join(classes)}"
                )

    def refuse_columns(self, reason: str) -> None:
        """Refuse the columns of rows, where there are no rows."""
        for each in self.names:
            if each.kind == "column":
                known = ", ".join(KNOWN_NAMES)
                near = get_close_matches(each.name, KNOWN_NAMES, n=1)
                remedy = (
                    f"did you mean {near[0]}" if near else f'use {known} or probability["CLASS"]'
                )
                self._fail(each, f"{each.name} is not known, because {reason}", remedy)

    def decide(self, lookup: Lookup) -> bool | None:
        """Whether the rule holds; None where that depends on values that are UNKNOWN."""
        return _decide(self.part, lookup)

    def _label_constants(self, part: RulePart) -> Iterator[tuple[RuleName, RuleConstant]]:
        """The strings that the label is compared with."""
        if isinstance(part, RuleJunction):
            for each in part.parts:
                yield from self._label_constants(each)
        elif isinstance(part, RuleNegation):
            yield from self._label_constants(part.part)
        elif isinstance(part, RuleComparison):
            names = [each for each in part.operands if isinstance(each, RuleName)]
            for constant in part.operands:
                if isinstance(constant, RuleConstant) and [each.kind for each in names] == [
                    "label"
                ]:
                    values = (
                        constant.value if isinstance(constant.value, tuple) else (constant.value,)
                    )
                    for value in values:
                        yield names[0], RuleConstant(value, constant.position)

    def _fail(self, name: RuleName, problem: str, remedy: str) -> NoReturn:
        where = f"{self.argument}={short_repr(self.text)}, character {name.position}"
        raise InputError(f"{where}: {problem}", remedy)


def _names(part: RulePart) -> Iterator[RuleName]:
    match part:
        case RuleName():
            yield part
        case RuleComparison():
            yield from (each for each in part.operands if isinstance(each, RuleName))
        case RuleNegation():
            yield from _names(part.part)
        case RuleJunction():
            for each in part.parts:
                yield from _names(each)


def _decide(part: RulePart, lookup: Lookup) -> bool | None:
    match part:
        case RuleConstant():
            return bool(part.value)
        case RuleName():
            return _truth(part, lookup(part))
        case RuleNegation():
            inner = _decide(part.part, lookup)
            return None if inner is None else not inner
        case RuleComparison():
            return _compare(part, lookup)
        case RuleJunction():
            decisive = part.word == "or"
            decisions = []
            for each in part.parts:
                decision = _decide(each, lookup)
                if decision is decisive:
                    return decisive
                decisions.append(decision)
            return None if None in decisions else not decisive


def _truth(name: RuleName, value: Any) -> bool | None:
    if value is UNKNOWN or value is None:
        return None if value is UNKNOWN else False
    if not isinstance(value, bool):
        raise RuleTypeError(f"{name.shown} is {_type_words(value)}, not true or false")
    return value


def _compare(part: RuleComparison, lookup: Lookup) -> bool | None:
    values = [lookup(each) if isinstance(each, RuleName) else each.value for each in part.operands]
    known = True
    for index, sign in enumerate(part.signs):
        one, other = values[index], values[index + 1]
        if one is UNKNOWN or other is UNKNOWN:
            known = False
        elif not _holds(part, index, sign, one, other):
            return False
    return True if known else None


def _holds(part: RuleComparison, index: int, sign: str, one: Any, other: Any) -> bool:
    if "in" in sign:
        return COMPARISONS[sign](one, other)
    if one is None or other is None:
        # Nothing is larger or smaller than null.
        return sign in ("==", "!=") and COMPARISONS[sign](one, other)
    if _type_of(one) is not _type_of(other) or (sign[0] in "<>" and isinstance(one, bool)):
        left, right = (_shown(part.operands[place]) for place in (index, index + 1))
        raise RuleTypeError(
            f"{left} is {_type_words(one)}, which cannot be compared by {sign} with {right}, "
            f"{_type_words(other)}"
        )
    return COMPARISONS[sign](one, other)


def _type_of(value: Any) -> type:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float
    return type(value)


def _type_words(value: Any) -> str:
    return TYPE_WORDS.get(_type_of(value), f"a {type(value).__name__}")


def _shown(operand: RuleOperand) -> str:
    if isinstance(operand, RuleName):
        return operand.shown
    return f"{operand.value:g}" if isinstance(operand.value, float) else repr(operand.value)


class _Parser:
    """A parser by recursive descent: or, and, not, comparison, operand."""

    def __init__(self, text: str, argument: str) -> None:
        self.text, self.argument = text, argument
        self.depth = 0
        if len(text) > LONGEST_RULE:
            raise InputError(
                f"{argument} must have at most {LONGEST_RULE:,} characters, got {len(text):,}"
            )
        self.tokens = [
            RuleToken(
                str(found.lastgroup),
                found[found.lastgroup or 0],
                found.start(found.lastgroup or 0) + 1,
            )
            for found in TOKENS.finditer(text)
        ]
        self.tokens.append(RuleToken("end", "", len(text) + 1))
        self.index = 0

    def parse(self) -> RulePart:
        if len(self.tokens) == 1:
            raise InputError(f"{self.argument} is empty", "write a rule such as 'score >= 3'")
        part = self._junction("or")
        if self.next.kind != "end":
            self._unexpected("and, or, or the end")
        return part

    @property
    def next(self) -> RuleToken:
        return self.tokens[self.index]

    def _take(self, *texts: str) -> RuleToken | None:
        """The next token, if it is one of these words or signs."""
        token = self.next
        if token.kind in ("word", "sign") and token.text in texts:
            self.index += 1
            return token
        return None

    def _junction(self, word: Literal["and", "or"]) -> RulePart:
        self.depth += 1
        if self.depth > DEEPEST_RULE:
            self._fail(self.next, "the rule is nested too deeply", "remove parentheses")
        parts = [self._junction("and") if word == "or" else self._negation()]
        while self._take(word):
            parts.append(self._junction("and") if word == "or" else self._negation())
        self.depth -= 1
        return parts[0] if len(parts) == 1 else RuleJunction(word, tuple(parts))

    def _negation(self) -> RulePart:
        count = 0
        while self._take("not"):
            count += 1
        part = self._comparison()
        return RuleNegation(part) if count % 2 else part

    def _comparison(self) -> RulePart:
        if self._take("("):
            part = self._junction("or")
            if not self._take(")"):
                self._unexpected(")")
            return part
        operands, signs = [self._operand()], []
        while sign := self._sign():
            signs.append(sign)
            operands.append(self._members() if "in" in sign.text else self._operand())
        if not signs:
            return self._alone(operands[0])
        for index, sign in enumerate(signs):
            self._check_types(operands[index], sign, operands[index + 1])
        return RuleComparison(tuple(operands), tuple(each.text for each in signs))

    def _sign(self) -> RuleToken | None:
        token = self.next
        if self._take("not"):
            if not self._take("in"):
                self._unexpected("in")
            return token._replace(text="not in")
        return self._take(*COMPARISONS)

    def _operand(self) -> RuleOperand:
        token = self.next
        self.index += 1
        if token.kind == "number":
            return RuleConstant(float(token.text), token.position)
        if token.kind == "string":
            return RuleConstant(_unquoted(token.text), token.position)
        if token.kind != "word" or token.text in ("and", "or", "not", "in"):
            self.index -= 1
            self._unexpected("a name, a number or a string")
        if token.text in CONSTANTS:
            return RuleConstant(CONSTANTS[token.text], token.position)
        return self._name(token)

    def _name(self, token: RuleToken) -> RuleName:
        first, _, rest = token.text.partition(".")
        if first in ("probability", "column") and (rest or self._take("[")):
            name = rest or self._inside_brackets()
            return RuleName("class" if first == "probability" else "column", name, token.position)
        if token.text in KNOWN_NAMES:
            kind: Any = token.text
            return RuleName(kind, token.text, token.position)
        return RuleName("column", token.text, token.position)

    def _inside_brackets(self) -> str:
        token = self.next
        if token.kind not in ("string", "word"):
            self._unexpected("a name in quotes")
        self.index += 1
        if not self._take("]"):
            self._unexpected("]")
        return _unquoted(token.text) if token.kind == "string" else token.text

    def _members(self) -> RuleConstant:
        """The list behind `in`."""
        start = self.next
        if not self._take("[", "("):
            self._unexpected("a list such as [1, 2]")
        values = []
        while not self._take("]", ")"):
            operand = self._operand()
            if not isinstance(operand, RuleConstant):
                self._fail(
                    start, f"the list holds the name {operand.shown}", "put strings in quotes"
                )
            values.append(operand.value)
            if not self._take(",") and self.next.text not in ("]", ")"):
                self._unexpected(", or ]")
        return RuleConstant(tuple(values), start.position)

    def _alone(self, operand: RuleOperand) -> RulePart:  # noqa: RET503
        if isinstance(operand, RuleConstant) and isinstance(operand.value, bool):
            return operand
        if isinstance(operand, RuleName) and operand.type in (bool, None):
            return operand
        if self.next.text in FOREIGN:
            self._unexpected("a comparison")
        sample = '== "..."' if isinstance(operand, RuleName) and operand.type is str else ">= 0.5"
        self._fail(
            operand,
            f"{_shown(operand)} is neither true nor false",
            f"compare it, as in {_shown(operand)} {sample}",
        )

    def _check_types(self, one: RuleOperand, sign: RuleToken, other: RuleOperand) -> None:
        kinds = [
            each.type if isinstance(each, RuleName) else _type_of(each.value)
            for each in (one, other)
        ]
        if "in" in sign.text:
            assert isinstance(other, RuleConstant)
            wrong = [each for each in other.value if kinds[0] not in (None, _type_of(each))]
            if wrong:
                self._mismatch(
                    one, kinds[0], RuleConstant(wrong[0], other.position), _type_of(wrong[0])
                )
        elif None not in kinds and type(None) not in kinds and kinds[0] is not kinds[1]:
            self._mismatch(one, kinds[0], other, kinds[1])

    def _mismatch(
        self, one: RuleOperand, first: type | None, other: RuleOperand, second: type | None
    ) -> NoReturn:
        assert first is not None
        assert second is not None
        words = [
            f"{_shown(each)} is {TYPE_WORDS[kind]}"
            for each, kind in ((one, first), (other, second))
        ]
        remedy = "compare numbers with numbers and strings with strings"
        if str in (first, second) and float in (first, second):
            remedy = "put strings in quotes, and numbers not"
        self._fail(one, " and ".join(words), remedy)

    def _unexpected(self, expected: str) -> NoReturn:
        token = self.next
        where = f"{self.argument}={short_repr(self.text)}"
        if token.kind == "end":
            raise InputError(
                f"{where} ends at character {token.position - 1}", f"it needs {expected}"
            )
        if token.text in FOREIGN:
            raise InputError(
                f"{where}: {token.text!r} at character {token.position} is not an operator",
                f"use {FOREIGN[token.text]}",
            )
        if token.text in ('"', "'"):
            raise InputError(
                f"{where}: the string at character {token.position} has no end", "close the quotes"
            )
        raise InputError(
            f"{where}: unexpected {token.text!r} at character {token.position}",
            f"there must be {expected}",
        )

    def _fail(self, part: RuleToken | RuleOperand, problem: str, remedy: str) -> NoReturn:
        where = f"{self.argument}={short_repr(self.text)}, character {part.position}"
        raise InputError(f"{where}: {problem}", remedy)


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)
