"""Rules over texts and the output of a classifier: `score >= 3 and language == "en"`.

A rule compares with ==, !=, <, <=, >, >=, in and not in, and joins comparisons by and, or, not and
parentheses. Its names are `score`, `label`, `probability` (that of the label),
`probability["toxic"]` (that of a class), `tokens`, `truncated`, and the columns of a row;
`column["score"]` is a column that has the name of something else. Python parses a rule in which
names and constants are replaced by `v0`, `v1`, ..., and nothing of it is run.
"""

import ast
import operator
import re
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, Literal, NamedTuple, NoReturn

from manyheads.errors import InputError, short_repr
from manyheads.formatting import kind_of

# The values that a classifier computes, and their types.
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
COMPARISONS: dict[type[ast.cmpop], tuple[str, Callable[[Any, Any], bool]]] = {
    ast.Eq: ("==", operator.eq),
    ast.NotEq: ("!=", operator.ne),
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.In: ("in", lambda value, members: value in members),
    ast.NotIn: ("not in", lambda value, members: value not in members),
}
# Signs of other languages, and what is meant.
FOREIGN = {"=": "==", "&&": "and", "&": "and", "||": "or", "|": "or", "!": "not", "<>": "!="}
FOREIGN |= {"=>": ">=", "=<": "<="}
MAX_CHARACTERS, MAX_DEPTH = 10_000, 100
OPERAND, OPERAND_KINDS = "a name, a number or a string", ("number", "string", "entry", "word")
TOO_DEEP = "the rule is nested too deeply", "remove parentheses"

STRING = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
WORD = r"[^\W\d]\w*(?:\.[^\W\d]\w*)*"
TOKENS = re.compile(
    rf"""\s*(?:
      (?P<number>-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w))
    | (?P<string>{STRING})
    | (?P<entry>(?:probability|column)\s*\[\s*(?:{STRING}|{WORD})\s*\])
    | (?P<sign>(?:and|or|not|in)\b(?!\.[^\W\d])|==|!=|<=|>=|<>|=>|=<|&&|\|\||[<>()\[\],=&|!])
    | (?P<word>{WORD})
    | (?P<wrong>\S)
    )""",
    re.VERBOSE | re.DOTALL,
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

    @property
    def type(self) -> type | None:
        return _type_of(self.value)

    def __str__(self) -> str:
        return f"{self.value:g}" if isinstance(self.value, float) else repr(self.value)


@dataclass(frozen=True, slots=True)
class RuleName:
    """A value that differs from text to text."""

    kind: Literal["score", "label", "probability", "tokens", "truncated", "class", "column"]
    name: str
    position: int

    @property
    def type(self) -> type | None:
        """The type of its values; None for a column, which may have any."""
        return float if self.kind == "class" else KNOWN_NAMES.get(self.kind)

    def __str__(self) -> str:
        forms = {"class": f'probability["{self.name}"]', "column": self.name}
        return forms.get(self.kind, self.kind)


RuleOperand = RuleConstant | RuleName
START = RuleToken("start", "", 0)


class RuleTypeError(ValueError):
    """Values of one text that cannot be compared."""


# A value that is not known yet.
UNKNOWN = object()
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
    argument: str
    tree: ast.expr = field(compare=False, repr=False)
    operands: dict[str, RuleOperand] = field(compare=False, repr=False)

    @classmethod
    def parse(cls, text: str, argument: str = "keep") -> "TextRule":
        parser = _Parser(text, argument)
        return cls(text, argument, parser.tree, parser.operands)

    @property
    def names(self) -> list[RuleName]:
        """The names that the rule mentions."""
        return [operand for operand in self.operands.values() if isinstance(operand, RuleName)]

    @property
    def columns(self) -> list[str]:
        """The columns that the rule mentions, each once."""
        return list(dict.fromkeys(name.name for name in self.names if name.kind == "column"))

    def check_classes(self, classes: Sequence[str]) -> None:
        """Refuse what a classifier with these classes, or a regression model without, lacks."""
        mentioned: list[tuple[RuleName, Any]] = []
        for name in self.names:
            if name.kind in ("label", "probability", "class") and not classes:
                problem = f"{name} needs classes, and the model has one output"
                raise self._error(name, problem, "use score")
            if name.kind == "class":
                mentioned.append((name, name.name))
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Compare):
                operands = [self._operand(part) for part in (node.left, *node.comparators)]
                names = [operand for operand in operands if isinstance(operand, RuleName)]
                if [name.kind for name in names] == ["label"]:
                    for operand in operands:
                        value = operand.value if isinstance(operand, RuleConstant) else ()
                        members = value if isinstance(value, tuple) else (value,)
                        mentioned += [(names[0], member) for member in members]
        for name, value in mentioned:
            if isinstance(value, str) and value not in classes:
                remedy = f"use {', '.join(classes)}"
                raise self._error(name, f"there is no class {value!r}", remedy)

    def refuse_columns(self, reason: str) -> None:
        """Refuse the columns of rows, where there are no rows."""
        for name in self.names:
            if name.kind == "column":
                near = get_close_matches(name.name, KNOWN_NAMES, n=1)
                names = f'use {", ".join(KNOWN_NAMES)} or probability["CLASS"]'
                remedy = f"did you mean {near[0]}" if near else names
                raise self._error(name, f"{name.name} is not known, because {reason}", remedy)

    def decide(self, lookup: Lookup) -> bool | None:
        """Whether the rule holds; None where that depends on values that are UNKNOWN."""
        return self._decide(self.tree, lookup)

    def _decide(self, node: ast.expr, lookup: Lookup) -> bool | None:
        if isinstance(node, ast.Compare):
            return self._compare(node, lookup)
        if isinstance(node, ast.UnaryOp):
            inner = self._decide(node.operand, lookup)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            decisive = isinstance(node.op, ast.Or)
            decisions = []
            for part in node.values:
                decision = self._decide(part, lookup)
                if decision is decisive:
                    return decisive
                decisions.append(decision)
            return None if None in decisions else not decisive
        operand = self._operand(node)
        value = lookup(operand) if isinstance(operand, RuleName) else operand.value
        if value is UNKNOWN or value is None:
            return None if value is UNKNOWN else False
        if not isinstance(value, bool):
            raise RuleTypeError(f"{operand} is {_type_words(value)}, not true or false")
        return value

    def _compare(self, node: ast.Compare, lookup: Lookup) -> bool | None:
        operands = [self._operand(part) for part in (node.left, *node.comparators)]
        values = [
            lookup(operand) if isinstance(operand, RuleName) else operand.value
            for operand in operands
        ]
        all_known = True
        for index, comparison in enumerate(node.ops):
            sign, holds = COMPARISONS[type(comparison)]
            left, right = values[index : index + 2]
            if left is UNKNOWN or right is UNKNOWN:
                all_known = False
                continue
            if "in" not in sign:
                if left is None or right is None:
                    # Nothing is larger or smaller than null.
                    if sign not in ("==", "!="):
                        return False
                elif _type_of(left) is not _type_of(right) or (
                    sign[0] in "<>" and isinstance(left, bool)
                ):
                    raise RuleTypeError(
                        f"{operands[index]} is {_type_words(left)}, which cannot be compared by "
                        f"{sign} with {operands[index + 1]}, {_type_words(right)}"
                    )
            if not holds(left, right):
                return False
        return True if all_known else None

    def _operand(self, node: ast.expr) -> RuleOperand:
        assert isinstance(node, ast.Name)
        return self.operands[node.id]

    def _error(self, name: RuleName, problem: str, remedy: str) -> InputError:
        return _rule_error(self.text, self.argument, name, problem, remedy)


def _type_of(value: Any) -> type:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float if number else type(value)


def _type_words(value: Any) -> str:
    return TYPE_WORDS.get(_type_of(value), kind_of(value))


class _Parser:
    """Reads the tokens of a rule, has Python parse them, and refuses what is no rule."""

    def __init__(self, text: str, argument: str) -> None:
        self.text, self.argument = text, argument
        if len(text) > MAX_CHARACTERS:
            raise InputError(
                f"{argument} must have at most {MAX_CHARACTERS:,} characters, got {len(text):,}"
            )
        self.tokens = [
            RuleToken(kind, match[kind], match.start(kind) + 1)
            for match in TOKENS.finditer(text)
            if (kind := match.lastgroup)
        ]
        if not self.tokens:
            raise InputError(f"{argument} is empty", "write a rule such as 'score >= 3'")
        self.operands: dict[str, RuleOperand] = {}
        self.open_brackets = 0
        words = [self._word(index) for index in range(len(self.tokens))]
        # Where each token ends in the text that Python parses.
        self.ends = list(accumulate(len(word) + 1 for word in words))
        self.tokens.append(RuleToken("end", "", len(text) + 1))
        try:
            self.tree = ast.parse(" ".join(words), mode="eval").body
        except SyntaxError as error:
            index = self._index(error.offset - 1) if error.offset else len(words)
            # Python names the bracket that is never closed.
            unclosed = {"(": ")", "[": "]"}.get(self.tokens[index].text)
            self._unexpected(len(words) if unclosed else index, unclosed)
        except (MemoryError, RecursionError):
            self._fail(self.tokens[0], *TOO_DEEP)
        self._check_part(self.tree, 0)

    def _word(self, index: int) -> str:
        """The token as Python, if it can follow the one before."""
        token, before = self.tokens[index], self.tokens[index - 1] if index else START
        operand = token.kind in OPERAND_KINDS
        starts = operand or token.text in ("(", "[")
        if token.kind == "wrong" or token.text in FOREIGN or (starts and _ends_operand(before)):
            self._unexpected(index)
        self.open_brackets += (token.text in ("(", "[")) - (token.text in (")", "]"))
        if self.open_brackets > MAX_DEPTH:
            self._fail(token, *TOO_DEEP)
        if not operand:
            return token.text
        self.operands[f"v{index}"] = _operand(token)
        return f"v{index}"

    def _check_part(self, node: ast.expr, depth: int) -> None:
        """Refuse what is neither true nor false."""
        if depth > MAX_DEPTH:
            self._fail(self.tokens[self._index(node.col_offset)], *TOO_DEEP)
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self._check_part(part, depth + 1)
        elif isinstance(node, ast.UnaryOp):
            self._check_part(node.operand, depth + 1)
        elif isinstance(node, ast.Compare):
            self._check_comparison(node)
        else:
            operand = self._operand(node)
            constant = isinstance(operand, RuleConstant)
            if operand.type is bool or (operand.type is None and not constant):
                return
            sample = '== "..."' if operand.type is str and not constant else ">= 0.5"
            remedy = f"compare it, as in {operand} {sample}"
            self._fail(operand, f"{operand} is neither true nor false", remedy)

    def _check_comparison(self, node: ast.Compare) -> None:
        left = self._operand(node.left)
        for index, comparison in enumerate(node.ops):
            right: RuleOperand
            if isinstance(comparison, ast.In | ast.NotIn):
                right = self._list(node.comparators[index])
                node.comparators[index] = ast.Name(f"list{len(self.operands)}", ast.Load())
                self.operands[f"list{len(self.operands)}"] = right
                for value in right.value:
                    self._check_types(left, RuleConstant(value, right.position))
            else:
                right = self._operand(node.comparators[index])
                if type(None) not in (left.type, right.type):
                    self._check_types(left, right)
            left = right

    def _operand(self, node: ast.expr) -> RuleOperand:
        if isinstance(node, ast.Tuple) and node.elts:
            self._unexpected(self._index(node.elts[0].end_col_offset or 0))
        if not isinstance(node, ast.Name):
            self._unexpected(self._index(node.col_offset))
        return self.operands[node.id]

    def _list(self, node: ast.expr) -> RuleConstant:
        """The list behind `in`, where ("a") is one too."""
        index = self._index(node.col_offset)
        if not isinstance(node, ast.List | ast.Tuple) and self.tokens[index - 1].text != "(":
            self._unexpected(index)
        values = []
        for part in node.elts if isinstance(node, ast.List | ast.Tuple) else [node]:
            operand = self._operand(part)
            if isinstance(operand, RuleName):
                problem = f"the list holds the name {operand}"
                self._fail(self.tokens[index], problem, "put strings in quotes")
            values.append(operand.value)
        return RuleConstant(tuple(values), self.tokens[index].position)

    def _check_types(self, left: RuleOperand, right: RuleOperand) -> None:
        kinds = left.type, right.type
        if None in kinds or kinds[0] is kinds[1]:
            return
        sides = [
            f"{side} is {TYPE_WORDS.get(side.type or tuple, 'a list')}" for side in (left, right)
        ]
        remedy = "compare numbers with numbers and strings with strings"
        if set(kinds) == {str, float}:
            remedy = "put strings in quotes, and numbers not"
        self._fail(left, " and ".join(sides), remedy)

    def _index(self, offset: int) -> int:
        """The index of the token at an offset in the text that Python parses."""
        return bisect(self.ends, offset)

    def _unexpected(self, index: int, expected: str | None = None) -> NoReturn:
        """Refuse a token, and name what could be in its place."""
        token, before = self.tokens[index], self.tokens[index - 1] if index else START
        where, place = f"{self.argument}={short_repr(self.text)}", f"character {token.position}"
        if token.kind == "end":
            end = f"{where} ends at character {len(self.text)}"
            raise InputError(end, f"it needs {expected or OPERAND}")
        if token.text in FOREIGN:
            problem = f"{where}: {token.text!r} at {place} is not an operator"
            raise InputError(problem, f"use {FOREIGN[token.text]}")
        if token.text in ('"', "'"):
            raise InputError(f"{where}: the string at {place} has no end", "close the quotes")
        expected = OPERAND
        if token.text == "[" and before.text in ("probability", "column"):
            expected = "a name in quotes"
        elif _ends_operand(before):
            expected = "and, or, or the end"
        elif before.text == "in":
            expected = "a list such as [1, 2]"
        raise InputError(
            f"{where}: unexpected {token.text!r} at {place}", f"there must be {expected}"
        )

    def _fail(self, part: RuleToken | RuleOperand, problem: str, remedy: str) -> NoReturn:
        raise _rule_error(self.text, self.argument, part, problem, remedy)


def _rule_error(
    text: str, argument: str, part: RuleToken | RuleOperand, problem: str, remedy: str
) -> InputError:
    where = f"{argument}={short_repr(text)}, character {part.position}"
    return InputError(f"{where}: {problem}", remedy)


def _ends_operand(token: RuleToken) -> bool:
    return token.kind in OPERAND_KINDS or token.text in (")", "]")


def _operand(token: RuleToken) -> RuleOperand:
    if token.kind == "number":
        return RuleConstant(float(token.text), token.position)
    if token.kind == "string":
        return RuleConstant(_unquoted(token.text), token.position)
    if token.text in CONSTANTS:
        return RuleConstant(CONSTANTS[token.text], token.position)
    first, _, rest = token.text.partition("[" if token.kind == "entry" else ".")
    if rest and first.strip() in ("probability", "column"):
        name = _unquoted(rest[:-1].strip()) if token.kind == "entry" else rest
        return RuleName("column" if "column" in first else "class", name, token.position)
    known: Any = token.text if token.text in KNOWN_NAMES else "column"
    return RuleName(known, token.text, token.position)


def _unquoted(text: str) -> str:
    if text[0] not in "'\"":
        return text
    return re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)
