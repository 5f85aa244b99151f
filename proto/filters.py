"""The filter language: which messages of a topic a subscription wants, by their properties.

    wanted = parse_filter("region = 'eu' AND price BETWEEN 10 AND 20")
    wanted.matches({"region": "eu", "price": "12"}, fields)        True

The grammar is a subset of SQL92 as RocketMQ and JMS have it. Broker, SDK and Spark's source use this one parser.

    or      = and {OR and}        and = not {AND not}        not = [NOT] (pred | "(" or ")")
    pred    = operand [ cmp operand | [NOT] BETWEEN number AND number | [NOT] IN (literal {, literal})
            | [NOT] (LIKE | CONTAINS | STARTSWITH | ENDSWITH) text | IS [NOT] NULL ]
    cmp     = "=" | "<>" | "!=" | "<" | "<=" | ">" | ">="      operand = name | "quoted name" | literal
    literal = [-] number | 'text' | TRUE | FALSE               name = identifier {. identifier}

- **The literal decides the type.** A property is text; beside a number it is read as a number, beside TRUE or FALSE as
  `true|TRUE|True`, `false|FALSE|False`. Two names are compared as numbers if both are, else as texts, by code points.
- **NULL** is a property that is absent, longer than VALUE_CHARACTERS_MAX, or not of the literal's type. Kleene's logic:
  NOT NULL is NULL, and only TRUE wants the message. So `x <> 'a'` does not want a message without `x`.
- **No error at run time**: each expression has an answer for each message. For the same message it never changes,
  because no expression reads a clock.
- Names of the message itself are `message.key`, `.ordering_key`, `.producer`, `.publish_time`, `.event_time` (ms since
  the epoch), `.size`, `.schema_version`. A property of such a name is written in double quotes.
- The only wildcard of LIKE is `%`, at most LIKE_WILDCARDS_MAX times: it searches texts, and is never a regular
  expression. `_` is refused. STARTSWITH, ENDSWITH and CONTAINS have no wildcards.
- Keywords are in any case; `--` and `/* */` are comments; `''` is a quote in a text. A bare name means `= TRUE`.

A filter that is wrong or exceeds a limit is refused when it is parsed: InvalidRequest, with `position` (in characters).
Parsing costs time linear in the text, and matching time linear in the values that the expression names. Guarding tests:
tests/proto/test_filters.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from .errors import InvalidRequest

TEXT_CHARACTERS_MAX = 4096
FILTER_TOKENS_MAX = 200
NESTING_MAX = 20
IN_VALUES_MAX = 100
FILTER_NAMES_MAX = 16
LITERAL_CHARACTERS_MAX = 1024
VALUE_CHARACTERS_MAX = 4096
"""A longer value of a property counts as absent: to search in it would cost more than the message is worth."""
LIKE_WILDCARDS_MAX = 4
NUMBER_CHARACTERS_MAX = 40
"""Longest number, in an expression or in a property. A number is `[-]digits[.digits][e[+-]digits]`, in ASCII."""

SYSTEM_NAMES = frozenset(
    f"message.{each}"
    for each in ("key", "ordering_key", "producer", "publish_time", "event_time", "size", "schema_version")
)

# ------------------------------------------------------------------------------------------------------ the tree

FilterValue: TypeAlias = str | int | float | bool
"""Of a literal; and of a message's field: a text, or an int of the system names."""


class Name(NamedTuple):
    """Expression: the value of a property or of a system field. `is_system`: the name is one of SYSTEM_NAMES, and not
    quoted."""

    name: str
    is_system: bool


class Literal(NamedTuple):
    """Expression: a constant."""

    value: FilterValue


Operand: TypeAlias = Name | Literal


class Compare(NamedTuple):
    """Expression: the comparison of two operands. `operator` is "=", "<" or "<="; the other operators are written as
    these, negated or with the operands exchanged."""

    operator: str
    left: Operand
    right: Operand


class In(NamedTuple):
    """Expression: true if the value of the operand is one of the constants `values`."""

    operand: Operand
    values: tuple[FilterValue, ...]


class Like(NamedTuple):
    """Expression: the text of the operand begins with the first part, ends with the last one, and has the others in
    between, in this order. `is_whole`: there is one part, and the text must equal it."""

    operand: Operand
    parts: tuple[str, ...]
    is_whole: bool


class IsNull(NamedTuple):
    """Expression: true if the message lacks the property or system field `operand`."""

    operand: Operand


class Not(NamedTuple):
    """Expression: the negation of `part`; the negation of unknown is unknown."""

    part: FilterNode


class And(NamedTuple):
    """Expression: the conjunction of its parts; false if one is false, else unknown if one is unknown."""

    parts: tuple[FilterNode, ...]


class Or(NamedTuple):
    """Expression: the disjunction of its parts; true if one is true, else unknown if one is unknown."""

    parts: tuple[FilterNode, ...]


FilterNode: TypeAlias = Compare | In | Like | IsNull | Not | And | Or

# -------------------------------------------------------------------------------------------------------- values

_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?\Z")
BOOLEANS: Mapping[str, bool] = {
    "true": True, "TRUE": True, "True": True, "false": False, "FALSE": False, "False": False,
}  # fmt: skip
"""The texts of a property that are read as TRUE or FALSE."""


def read_number(value: FilterValue) -> int | float | None:
    """Returns a value as a number. Returns None for a text that is not a number in the language's form, that is too
    long, or that a float cannot hold."""
    if not isinstance(value, str):
        return value
    if len(value) > NUMBER_CHARACTERS_MAX or (found := _NUMBER.match(value)) is None:
        return None
    if found.lastindex is None:
        return int(value)
    number = float(value)
    return number if abs(number) != float("inf") else None


def _read_text(value: FilterValue) -> str | None:
    return value if isinstance(value, str) else str(value)


def _read_boolean(value: FilterValue) -> bool | None:
    return BOOLEANS.get(value) if isinstance(value, str) else None


# ------------------------------------------------------------------------------------------------------- closures

Properties: TypeAlias = Mapping[str, str]
SystemFields: TypeAlias = Callable[[str], str | int | None]
"""Returns the value of a name of SYSTEM_NAMES; None if the message has none."""
Truth: TypeAlias = bool | None
_Read: TypeAlias = Callable[[Properties, SystemFields], FilterValue | None]
_Decide: TypeAlias = Callable[[Properties, SystemFields], Truth]


def _make_reader(operand: Operand) -> _Read:
    if isinstance(operand, Literal):
        constant = operand.value
        return lambda properties, fields: constant
    name = operand.name
    if operand.is_system:
        return lambda properties, fields: fields(name)

    def read(properties: Properties, fields: SystemFields) -> FilterValue | None:
        value = properties.get(name)
        return value if value is None or len(value) <= VALUE_CHARACTERS_MAX else None

    return read


def _make_typed_reader(operand: Operand, beside: Operand) -> _Read:
    """Returns a reader of the operand as a value of the type that the literal `beside` has."""
    read = _make_reader(operand)
    if not isinstance(beside, Literal) or isinstance(operand, Literal):
        return read
    if isinstance(beside.value, str) and isinstance(operand, Name) and not operand.is_system:
        return read
    convert = _find_conversion(beside.value)

    def read_typed(properties: Properties, fields: SystemFields) -> FilterValue | None:
        value = read(properties, fields)
        return None if value is None else convert(value)

    return read_typed


def _find_conversion(value: FilterValue) -> Callable[[FilterValue], FilterValue | None]:
    if isinstance(value, bool):
        return _read_boolean
    return _read_text if isinstance(value, str) else read_number


def compare_values(operator: str, left: FilterValue, right: FilterValue) -> Truth:
    """Returns the result of `left operator right` for an operator of `Compare`; None (NULL) if the types of the two
    values differ."""
    if isinstance(left, bool) is not isinstance(right, bool):
        return None
    if isinstance(left, str):
        if not isinstance(right, str):
            return None
        return left == right if operator == "=" else left < right or (operator == "<=" and left == right)
    if isinstance(right, str):
        return None
    return left == right if operator == "=" else left < right or (operator == "<=" and left == right)


def _make_comparison(node: Compare) -> _Decide:
    operator = node.operator
    left, right = _make_typed_reader(node.left, node.right), _make_typed_reader(node.right, node.left)
    if isinstance(node.left, Name) and isinstance(node.right, Name):

        def compare_names(properties: Properties, fields: SystemFields) -> Truth:
            one, other = left(properties, fields), right(properties, fields)
            if one is None or other is None:
                return None
            number, other_number = read_number(one), read_number(other)
            if number is not None and other_number is not None:
                return compare_values(operator, number, other_number)
            return compare_values(operator, str(one), str(other))

        return compare_names
    if isinstance(node.left, Name) and isinstance(node.right, Literal) and operator == "=":
        wanted = node.right.value

        def equals(properties: Properties, fields: SystemFields) -> Truth:
            value = left(properties, fields)
            return None if value is None else value == wanted

        return equals

    def compare(properties: Properties, fields: SystemFields) -> Truth:
        one, other = left(properties, fields), right(properties, fields)
        return None if one is None or other is None else compare_values(operator, one, other)

    return compare


def _make_membership(node: In) -> _Decide:
    if all(isinstance(value, str) for value in node.values) and isinstance(node.operand, Name):
        read, values = _make_typed_reader(node.operand, Literal("")), frozenset(node.values)

        def is_in(properties: Properties, fields: SystemFields) -> Truth:
            value = read(properties, fields)
            return None if value is None else value in values

        return is_in
    return _make_junction(Or(tuple(Compare("=", node.operand, Literal(value)) for value in node.values)))


def matches_parts_in_order(text: str, parts: Sequence[str], *, is_whole: bool) -> bool:
    """Returns whether the text begins with the first part, ends with the last one, and has the others between them in
    this order. `is_whole`: there is one part, which must be the whole text. Each part is searched once, so the time is
    linear for a bounded number of parts."""
    first, last = parts[0], parts[-1]
    if is_whole:
        return text == first
    if len(text) < len(first) + len(last) or not text.startswith(first) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for part in parts[1:-1]:
        found = text.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


def _make_likeness(node: Like) -> _Decide:
    read, parts, is_whole = _make_typed_reader(node.operand, Literal("")), node.parts, node.is_whole

    def is_like(properties: Properties, fields: SystemFields) -> Truth:
        value = read(properties, fields)
        return matches_parts_in_order(value, parts, is_whole=is_whole) if isinstance(value, str) else None

    return is_like


def _make_null_test(node: IsNull) -> _Decide:
    read = _make_reader(node.operand)
    return lambda properties, fields: read(properties, fields) is None


def _make_not(node: Not) -> _Decide:
    decide = _make_decision(node.part)

    def negate(properties: Properties, fields: SystemFields) -> Truth:
        truth = decide(properties, fields)
        return None if truth is None else not truth

    return negate


def _make_junction(node: And | Or) -> _Decide:
    decisions = tuple(map(_make_decision, node.parts))
    deciding = isinstance(node, Or)  # one part that is so decides; else the whole is not so, or unknown if one part is

    def decide_parts(properties: Properties, fields: SystemFields) -> Truth:
        result: Truth = not deciding
        for decide in decisions:
            truth = decide(properties, fields)
            if truth is deciding:
                return deciding
            if truth is None:
                result = None
        return result

    return decide_parts


def _make_decision(node: FilterNode) -> _Decide:
    if isinstance(node, Compare):
        return _make_comparison(node)
    if isinstance(node, In):
        return _make_membership(node)
    if isinstance(node, Like):
        return _make_likeness(node)
    if isinstance(node, IsNull):
        return _make_null_test(node)
    if isinstance(node, Not):
        return _make_not(node)
    return _make_junction(node)


class Filter:
    """A parsed filter; `parse_filter` makes it. `text`: as it was written. `root`: its expression. `names`: the
    properties that it reads. `system_names`: the fields of the message that it reads."""

    __slots__ = ("_decide", "names", "root", "system_names", "text")

    def __init__(self, text: str, root: FilterNode, names: frozenset[Name]) -> None:
        self.text = text
        self.root = root
        self.names = frozenset(each.name for each in names if not each.is_system)
        self.system_names = frozenset(each.name for each in names if each.is_system)
        self._decide = _make_decision(root)

    def __repr__(self) -> str:
        return f"Filter({self.text!r})"

    def matches(self, properties: Properties, fields: SystemFields) -> bool:
        """Returns whether the expression is TRUE for a message with these properties. `fields` returns the value of a
        system name; None if the message has none."""
        return self._decide(properties, fields) is True


# -------------------------------------------------------------------------------------------------------- parser

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\r\n]+|--[^\n]*|/\*(?s:.)*?\*/)
    |(?P<text>'(?:[^']|'')*')
    |(?P<quoted>"(?:[^"]|"")*")
    |(?P<number>[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?![\w.$]))
    |(?P<word>[A-Za-z_$][A-Za-z0-9_$]*(?:\.[A-Za-z_$][A-Za-z0-9_$]*)*)
    |(?P<sign><>|!=|<=|>=|[=<>(),-])""",
    re.VERBOSE,
)
_COMPARISONS = frozenset(("=", "<>", "!=", "<", "<=", ">", ">="))
_TEXT_SEARCHES = frozenset(("LIKE", "CONTAINS", "STARTSWITH", "ENDSWITH"))
_KEYWORDS = frozenset(("OR", "AND", "NOT", "BETWEEN", "IN", "IS", "NULL", "TRUE", "FALSE")) | _TEXT_SEARCHES


class _Token(NamedTuple):
    kind: str  # text, quoted, number, word, sign, keyword, end
    text: str  # keywords in capitals; texts and quoted names without their quotes
    position: int


def _split(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise _make_error(_explain_no_token(text, at), at)
        kind, part = str(found.lastgroup), found.group()
        if kind in ("text", "quoted"):
            part = part[1:-1].replace(part[0] * 2, part[0])
        elif kind == "word" and part.upper() in _KEYWORDS:
            kind, part = "keyword", part.upper()
        if kind != "blank":
            if len(part) > LITERAL_CHARACTERS_MAX:
                raise _make_error(f"a text has {len(part)} characters: at most {LITERAL_CHARACTERS_MAX}", at)
            tokens.append(_Token(kind, part, at))
            if len(tokens) > FILTER_TOKENS_MAX:
                raise _make_error(f"the filter has more than {FILTER_TOKENS_MAX} words and signs", at)
        at = found.end()
    tokens.append(_Token("end", "", len(text)))
    return tokens


def _explain_no_token(text: str, at: int) -> str:
    if text[at] in "'\"":
        return f"the quote {text[at]} is not closed"
    if text.startswith("/*", at):
        return "the comment /* is not closed"
    if text[at].isdigit():
        return "a number is digits, with one point and an exponent at most"
    return f"{text[at]!r} belongs to no word and no sign of the language"


def _make_error(message: str, position: int) -> InvalidRequest:
    return InvalidRequest(f"filter, at character {position + 1}: {message}", position=position)


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = _split(text)
        self._at = 0
        self._depth = 0
        self.names: set[Name] = set()

    def parse(self) -> FilterNode:
        if self._token.kind == "end":
            raise _make_error("the filter is empty", 0)
        root = self._parse_or()
        if self._token.kind != "end":
            raise self._error("AND, OR or the end")
        return root

    # ------------------------------------------------------------------ tokens
    @property
    def _token(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        token = self._tokens[self._at]
        self._at += token.kind != "end"
        return token

    def _accept(self, *texts: str) -> str:
        """Takes the next token and returns its text, if it is a keyword or a sign of these; else returns ""."""
        token = self._token
        if token.kind in ("keyword", "sign") and token.text in texts:
            return self._take().text
        return ""

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise self._error(text)

    def _error(self, wanted: str) -> InvalidRequest:
        token = self._token
        found = "the end" if token.kind == "end" else repr(token.text)
        return _make_error(f"{wanted} is expected, not {found}", token.position)

    # ------------------------------------------------------------------ logic
    def _parse_or(self) -> FilterNode:
        parts = [self._parse_and()]
        while self._accept("OR"):
            parts.append(self._parse_and())
        return parts[0] if len(parts) == 1 else Or(tuple(parts))

    def _parse_and(self) -> FilterNode:
        parts = [self._parse_not()]
        while self._accept("AND"):
            parts.append(self._parse_not())
        return parts[0] if len(parts) == 1 else And(tuple(parts))

    def _parse_not(self) -> FilterNode:
        position = self._token.position
        opening = self._accept("NOT", "(")
        if not opening:
            return self._parse_predicate()
        self._depth += 1
        if self._depth > NESTING_MAX:
            raise _make_error(f"NOT and brackets are nested more than {NESTING_MAX} deep", position)
        if opening == "NOT":
            node: FilterNode = Not(self._parse_not())
        else:
            node = self._parse_or()
            self._expect(")")
        self._depth -= 1
        return node

    # ------------------------------------------------------------------ predicates
    def _parse_predicate(self) -> FilterNode:
        position = self._token.position
        operand = self._parse_operand()
        if self._token.kind == "sign" and self._token.text in _COMPARISONS:
            return self._parse_comparison(operand)
        if self._accept("IS"):
            negated = self._accept("NOT")
            self._expect("NULL")
            return self._negate(IsNull(operand), negated)
        negated = self._accept("NOT")
        if self._accept("BETWEEN"):
            return self._negate(self._parse_between(operand), negated)
        if self._accept("IN"):
            return self._negate(self._parse_in(operand), negated)
        if search := self._accept(*_TEXT_SEARCHES):
            return self._negate(self._parse_search(operand, search), negated)
        if negated:
            raise self._error("BETWEEN, IN, LIKE, CONTAINS, STARTSWITH or ENDSWITH")
        if isinstance(operand, Literal) and not isinstance(operand.value, bool):
            raise _make_error("a number or a text alone is neither true nor false: compare it", position)
        return Compare("=", operand, Literal(True))

    @staticmethod
    def _negate(node: FilterNode, negated: str) -> FilterNode:
        return Not(node) if negated else node

    def _parse_comparison(self, left: Operand) -> FilterNode:
        sign = self._take()
        right = self._parse_operand()
        ordered = sign.text not in ("=", "<>", "!=")
        if ordered and any(isinstance(each, Literal) and isinstance(each.value, bool) for each in (left, right)):
            raise _make_error("TRUE and FALSE have no order: compare them by = or <>", sign.position)
        if isinstance(left, Literal) and isinstance(right, Literal) and _kind(left.value) is not _kind(right.value):
            raise _make_error("two constants of different types are never equal", sign.position)
        if not ordered:
            return self._negate(Compare("=", left, right), sign.text.strip("="))
        return Compare(sign.text, left, right) if "<" in sign.text else Compare("<" + sign.text[1:], right, left)

    def _parse_between(self, operand: Operand) -> FilterNode:
        position = self._token.position
        low = self._parse_number()
        self._expect("AND")
        high = self._parse_number()
        if low > high:
            raise _make_error(f"BETWEEN {low} AND {high} is empty: the smaller number comes first", position)
        return And((Compare("<=", Literal(low), operand), Compare("<=", operand, Literal(high))))

    def _parse_in(self, operand: Operand) -> FilterNode:
        self._expect("(")
        values = [self._parse_literal()]
        while self._accept(","):
            values.append(self._parse_literal())
            if len(values) > IN_VALUES_MAX:
                raise _make_error(f"IN has more than {IN_VALUES_MAX} values", self._token.position)
        self._expect(")")
        return In(operand, tuple(values))

    def _parse_search(self, operand: Operand, search: str) -> FilterNode:
        token = self._take()
        if token.kind != "text":
            self._at -= token.kind != "end"
            raise self._error("a text in single quotes")
        if search != "LIKE":
            before, after = search != "STARTSWITH", search != "ENDSWITH"
            parts = ("",) * before + (token.text,) + ("",) * after
            return Like(operand, parts, is_whole=False)
        if "_" in token.text:
            raise _make_error(
                "LIKE knows no '_': use '%' for any text, or STARTSWITH, ENDSWITH, CONTAINS, which have no wildcards",
                token.position,
            )
        parts = tuple(token.text.split("%"))
        if len(parts) > LIKE_WILDCARDS_MAX + 1:
            raise _make_error(f"LIKE has more than {LIKE_WILDCARDS_MAX} '%'", token.position)
        return Like(operand, parts, is_whole=len(parts) == 1)

    # ------------------------------------------------------------------ operands
    def _parse_operand(self) -> Operand:
        token = self._token
        if token.kind not in ("word", "quoted"):
            return Literal(self._parse_literal())
        self._take()
        if not token.text:
            raise _make_error("a name is empty", token.position)
        if token.kind == "word" and token.text.startswith("message.") and token.text not in SYSTEM_NAMES:
            known = ", ".join(sorted(SYSTEM_NAMES))
            raise _make_error(
                f"{token.text} is none of {known}; a property of that name is written in double quotes", token.position
            )
        name = Name(token.text, token.kind == "word" and token.text in SYSTEM_NAMES)
        self.names.add(name)
        if len(self.names) > FILTER_NAMES_MAX:
            raise _make_error(f"the filter has more than {FILTER_NAMES_MAX} names", token.position)
        return name

    def _parse_literal(self) -> FilterValue:
        token = self._token
        if token.kind == "text":
            return self._take().text
        if token.kind == "number" or (token.kind == "sign" and token.text == "-"):
            return self._parse_number()
        if truth := self._accept("TRUE", "FALSE"):
            return truth == "TRUE"
        if token.kind == "keyword" and token.text == "NULL":
            raise _make_error("nothing equals NULL: use IS NULL or IS NOT NULL", token.position)
        raise self._error("a name or a value")

    def _parse_number(self) -> int | float:
        sign = self._accept("-")
        token = self._take()
        number = read_number(sign + token.text) if token.kind == "number" else None
        if number is None:
            self._at -= token.kind != "end"
            raise self._error(f"a number of at most {NUMBER_CHARACTERS_MAX} characters")
        return number


def _kind(value: FilterValue) -> type:
    return type(value) if isinstance(value, bool | str) else float


@lru_cache(maxsize=1000)
def parse_filter(text: str) -> Filter:
    """Parses the text of a filter and returns it. Results are cached. Raises InvalidRequest if the text is not a filter
    or exceeds a limit; its field `position` is the offset of the error in characters, from 0."""
    if len(text) > TEXT_CHARACTERS_MAX:
        raise _make_error(f"the filter has {len(text)} characters: at most {TEXT_CHARACTERS_MAX}", TEXT_CHARACTERS_MAX)
    parser = _Parser(text)
    root = parser.parse()
    return Filter(text, root, frozenset(parser.names))
