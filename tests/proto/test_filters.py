"""The filter language: tables of truth, a naive walk of the tree as the judge, and texts that want to cost time."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto.errors import InvalidRequest
from magnetar.proto.filters import (
    FILTER_NAMES_MAX,
    FILTER_TOKENS_MAX,
    IN_VALUES_MAX,
    LITERAL_CHARACTERS_MAX,
    NESTING_MAX,
    SYSTEM_NAMES,
    TEXT_CHARACTERS_MAX,
    VALUE_CHARACTERS_MAX,
    And,
    Compare,
    FilterNode,
    FilterValue,
    In,
    IsNull,
    Like,
    Literal,
    Name,
    Not,
    Operand,
    Or,
    compare_values,
    parse_filter,
    read_number,
)
from tests.support.steps import slowness

FIELDS: Mapping[str, str | int | None] = {
    "message.key": "k7", "message.ordering_key": None, "message.producer": "p",
    "message.publish_time": 1_700_000_000_000, "message.event_time": None, "message.size": 12,
    "message.schema_version": None,
}  # fmt: skip


def _matches(text: str, properties: Mapping[str, str]) -> bool:
    return parse_filter(text).matches(properties, FIELDS.get)


@pytest.mark.parametrize(
    ("text", "wanted", "unwanted"),
    [
        ("a = 'x'", [{"a": "x"}], [{}, {"a": "X"}, {"a": ""}]),
        ("a <> 'x'", [{"a": "y"}, {"a": ""}], [{}, {"a": "x"}]),
        ("NOT a = 'x'", [{"a": "y"}], [{}, {"a": "x"}]),
        ("a != 1", [{"a": "2"}, {"a": "1.5"}], [{}, {"a": "1"}, {"a": "1.0"}, {"a": "one"}]),
        ("1 < a", [{"a": "2"}, {"a": "1e3"}], [{"a": "1"}, {"a": "0x2"}, {"a": "inf"}, {"a": "nan"}, {"a": "1_0"}]),
        ("a >= -1", [{"a": "-1"}, {"a": "0"}], [{"a": "-2"}, {"a": " 1"}, {"a": "+1"}, {"a": "\u0663"}]),
        ("a > 0", [{"a": "1e99"}], [{"a": "1e999"}]),
        ("a < 'b'", [{"a": "a"}, {"a": "B"}], [{"a": "b"}, {}]),
        ("a BETWEEN 2 AND 3", [{"a": "2"}, {"a": "2.5"}, {"a": "3"}], [{"a": "1"}, {"a": "4"}, {}]),
        ("a NOT BETWEEN 2 AND 3", [{"a": "1"}, {"a": "4"}], [{"a": "2"}, {}, {"a": "x"}]),
        ("a IN ('x', 'it''s')", [{"a": "x"}, {"a": "it's"}], [{"a": "y"}, {}]),
        ("a NOT IN ('x', 1)", [{"a": "2"}], [{"a": "x"}, {"a": "1"}, {}, {"a": "y"}]),
        ("a IN (1, TRUE)", [{"a": "1"}, {"a": "true"}], [{"a": "0"}, {"a": "False"}]),
        ("a LIKE 'x%'", [{"a": "x"}, {"a": "xy"}], [{"a": "yx"}, {}]),
        ("a LIKE '%x%y%'", [{"a": "axby"}, {"a": "xy"}], [{"a": "yx"}]),
        ("a LIKE 'ab%ba'", [{"a": "abba"}], [{"a": "aba"}]),
        ("a LIKE 'x'", [{"a": "x"}], [{"a": "xx"}]),
        ("a NOT LIKE '%x'", [{"a": "xy"}], [{"a": "x"}, {}]),
        ("a STARTSWITH 'x_'", [{"a": "x_1"}], [{"a": "x1"}]),
        ("a ENDSWITH '%'", [{"a": "5%"}], [{"a": "5"}]),
        ("a CONTAINS '.*'", [{"a": "x.*y"}], [{"a": "xy"}]),
        ("a IS NULL", [{}, {"a": "x" * (VALUE_CHARACTERS_MAX + 1)}], [{"a": ""}]),
        ("a IS NOT NULL", [{"a": ""}], [{}]),
        ("a", [{"a": "true"}, {"a": "TRUE"}, {"a": "True"}], [{"a": "1"}, {"a": "tRUE"}, {}]),
        ("NOT a", [{"a": "false"}], [{"a": "true"}, {"a": "0"}, {}]),
        ("a = b", [{"a": "1", "b": "1.0"}, {"a": "x", "b": "x"}], [{"a": "1"}, {"a": "1", "b": "x"}]),
        ("a < b", [{"a": "9", "b": "10"}, {"a": "10x", "b": "9"}], [{"a": "10", "b": "9"}, {"a": "9"}]),
        ("a = 'x' OR b = 'y'", [{"a": "x"}, {"b": "y"}], [{"a": "y"}, {}]),
        ("a = 'x' AND b IS NULL OR c", [{"a": "x"}, {"c": "true"}], [{"a": "x", "b": ""}]),
        ("a = 'x' AND (b IS NULL OR c)", [{"a": "x"}], [{"c": "true"}]),
        ("TRUE", [{}], []),
        ("FALSE OR 1 = 2", [], [{}]),
        ("message.key = 'k7' AND message.size > 11", [{}], []),
        ("message.size = '12'", [{}], []),
        ("message.event_time IS NULL AND message.publish_time > 1e12", [{}], []),
        ('"message.key" = \'mine\' AND "a b" = \'c\'', [{"message.key": "mine", "a b": "c"}], [{}]),
        ("a.b$c_1 = 'x' -- says why\n/* and 'more' */ and TrUe", [{"a.b$c_1": "x"}], [{}]),
    ],
)
def test_what_a_filter_wants(text: str, wanted: list[dict[str, str]], unwanted: list[dict[str, str]]) -> None:
    assert [_matches(text, each) for each in wanted] == [True] * len(wanted)
    assert [_matches(text, each) for each in unwanted] == [False] * len(unwanted)


@pytest.mark.parametrize(
    ("text", "sentence", "position"),
    [
        ("", "empty", 0), ("  -- nothing", "empty", 0), ("a =", "a name or a value is expected, not the end", 3),
        ("a = 'x", "not closed", 4), ("a = NULL", "IS NULL", 4), ("a = 'x' b", "AND, OR or the end", 8),
        ("(a", ") is expected", 2), ("a LIKE 'x_'", "STARTSWITH", 7), ("a LIKE b", "single quotes", 7),
        ("a LIKE '%%%%%'", "more than 4", 7), ("1", "compare it", 0), ("a < TRUE", "no order", 2),
        ("a BETWEEN 3 AND 2", "smaller number", 10), ("a BETWEEN 'x' AND 'y'", "a number", 10),
        ("a IN ()", "a value", 6),
        ("1 = 'x'", "never equal", 2), ("a = 1x", "a number is digits", 4), ("a = \u0663", "a number", 4),
        ("\u00e4 = 1", "belongs to no word", 0), ("message.foo = 1", "double quotes", 0), ('"" = 1', "empty", 0),
        ("a NOT 1", "BETWEEN", 6), ("a = 1e999", "a number", 4), ("/* x", "comment", 0), ("a; b", "';'", 1),
        ("NOT " * (NESTING_MAX + 1) + "a", "nested", 4 * NESTING_MAX),
        ("(" * 30 + "a" + ")" * 30, "nested", NESTING_MAX),
        (" OR ".join(f"n{each} = 1" for each in range(FILTER_NAMES_MAX + 1)), "names", None),
        (f"a IN ({', '.join(['1'] * (IN_VALUES_MAX + 1))})", "words and signs", None),
        ("a = 1 AND " * FILTER_TOKENS_MAX + "a", "words and signs", None),
        (f"a = '{'x' * (LITERAL_CHARACTERS_MAX + 1)}'", "characters", 4),
        ("a" * (TEXT_CHARACTERS_MAX + 1), "characters", TEXT_CHARACTERS_MAX),
    ],
    ids=lambda each: str(each)[:20],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_place(text: str, sentence: str, position: int | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_filter(text)
    assert sentence in str(refused.value)
    if position is not None:
        assert refused.value.fields["position"] == str(position)


@pytest.mark.parametrize(
    "text",
    [
        "'" * 4000, '"' * 4001, "/*" * 2000, "(" * 4000, "NOT " * 1000, "-" * 4000, "a=" * 2000, "a.a." * 1000,
        "a LIKE '" + "x%" * 2000, "1" * 4000, "1." * 2000, "a IN (" + "1," * 2000, "\x00" * 4000, "\ud800" * 100,
    ],
    ids=lambda text: repr(text[:12]),
)  # fmt: skip
def test_a_hostile_text_costs_no_more_than_its_length(text: str) -> None:
    began = time.thread_time()
    with pytest.raises(InvalidRequest):
        parse_filter(text)
    assert time.thread_time() - began < 0.1 * slowness()  # linear: some ms here, and minutes if it were exponential


def test_a_hostile_value_costs_no_more_than_its_length() -> None:
    """RabbitMQ's LIKE was a regular expression, and went back for 100 ms a message (CVE-2026-67240)."""
    wanted = parse_filter("a LIKE '%aaaaaaaaab%aaaaaaaaab%aaaaaaaaab%'")
    began = time.thread_time()
    assert not any(wanted.matches({"a": "a" * VALUE_CHARACTERS_MAX}, FIELDS.get) for _ in range(100))
    assert time.thread_time() - began < 0.5 * slowness()


# ---------------------------------------------------------------------------------------------------- the judge


def _value(operand: Operand, properties: Mapping[str, str]) -> FilterValue | None:
    if isinstance(operand, Literal):
        return operand.value
    if operand.is_system:
        return FIELDS[operand.name]
    value = properties.get(operand.name)
    return None if value is None or len(value) > VALUE_CHARACTERS_MAX else value


def _as_kind(value: FilterValue | None, kind: FilterValue) -> FilterValue | None:
    if value is None or type(value) is type(kind):
        return value
    if isinstance(kind, bool):
        return {"true": True, "false": False}.get(value.lower()) if value in (
            "true", "TRUE", "True", "false", "FALSE", "False",
        ) else None  # fmt: skip
    return str(value) if isinstance(kind, str) else read_number(value)


def _walk(node: FilterNode, properties: Mapping[str, str]) -> bool | None:
    """The truth of the expression by the rules' words, without a thought for speed."""
    match node:
        case Not(part):
            truth = _walk(part, properties)
            return None if truth is None else not truth
        case And(parts):
            found = [_walk(part, properties) for part in parts]
            return False if False in found else None if None in found else True
        case Or(parts):
            found = [_walk(part, properties) for part in parts]
            return True if True in found else None if None in found else False
        case IsNull(operand):
            return _value(operand, properties) is None
        case In(operand, values):
            return _walk(Or(tuple(Compare("=", operand, Literal(each)) for each in values)), properties)
        case Like(operand, parts, _):
            text = _as_kind(_value(operand, properties), "")
            return None if text is None else _is_like(text, parts)
        case Compare(operator, left, right):
            one, other = _value(left, properties), _value(right, properties)
            if isinstance(right, Literal):
                one = _as_kind(one, right.value)
            if isinstance(left, Literal):
                other = _as_kind(other, left.value)
            if one is None or other is None:
                return None
            if isinstance(left, Name) and isinstance(right, Name):
                numbers = read_number(one), read_number(other)
                one, other = (str(one), str(other)) if None in numbers else numbers
            return compare_values(operator, one, other)
    raise AssertionError(node)


def _is_like(text: str, parts: tuple[str, ...]) -> bool:
    """All ways to place the parts are tried."""
    if len(parts) == 1:
        return text == parts[0]
    return text.startswith(parts[0]) and _is_rest(text[len(parts[0]) :], parts[1:])


def _is_rest(text: str, parts: tuple[str, ...]) -> bool:
    if len(parts) == 1:
        return text.endswith(parts[0])
    return any(
        text.startswith(parts[0], at) and _is_rest(text[at + len(parts[0]) :], parts[1:]) for at in range(len(text) + 1)
    )


NAMES = st.sampled_from(["a", "b", "a.b", "message.key", "message.size", "message.event_time", '"message.key"'])
TEXTS = st.sampled_from(["", "a", "ab", "ba", "aba", "k7", "12", "1.0", "true", "it''s"])
NUMBERS = st.sampled_from(["0", "1", "12", "-3", "1.0", "1e1", "2.5"])
LITERALS = st.one_of(TEXTS.map("'{}'".format), NUMBERS, st.sampled_from(["TRUE", "false"]))


def _predicates() -> st.SearchStrategy[str]:
    operators = st.sampled_from(["=", "<>", "<", "<=", ">", ">="])
    negated = st.sampled_from(["", "NOT "])
    return st.one_of(
        st.tuples(NAMES, operators, st.one_of(NAMES, TEXTS.map("'{}'".format), NUMBERS)).map(" ".join),
        st.tuples(NAMES, st.sampled_from(["=", "!="]), LITERALS).map(" ".join),
        st.tuples(NUMBERS, operators, NAMES).map(" ".join),
        st.tuples(NAMES, negated, st.lists(LITERALS, min_size=1, max_size=4)).map(
            lambda each: f"{each[0]} {each[1]}IN ({', '.join(each[2])})"
        ),
        st.tuples(NAMES, negated, st.sampled_from(["LIKE", "CONTAINS", "STARTSWITH", "ENDSWITH"]), st.sampled_from(
            ["", "a%", "%a", "%a%b", "a%a", "%", "ab", "%b%a%"])
        ).map(lambda each: f"{each[0]} {each[1]}{each[2]} '{each[3]}'"),
        st.tuples(NAMES, negated).map(lambda each: f"{each[0]} {each[1]}BETWEEN -1 AND 12"),
        st.tuples(NAMES, st.sampled_from(["IS NULL", "IS NOT NULL"])).map(" ".join),
        NAMES,
    )  # fmt: skip


EXPRESSIONS = st.recursive(
    _predicates(),
    lambda inner: st.one_of(
        inner.map("NOT ({})".format),
        st.lists(inner, min_size=2, max_size=3).map(lambda each: " AND ".join(map("({})".format, each))),
        st.lists(inner, min_size=2, max_size=3).map(lambda each: " or ".join(map("({})".format, each))),
    ),
    max_leaves=8,
)
VALUES = st.sampled_from(["", "a", "ab", "ba", "abba", "k7", "it's", "12", "12.0", "1e1", "-3", "true", "False", "nan"])
MESSAGES = st.dictionaries(st.sampled_from(["a", "b", "a.b", "message.key"]), VALUES)


@given(EXPRESSIONS, MESSAGES)
def test_the_closures_say_what_a_naive_walk_of_the_tree_says(text: str, properties: dict[str, str]) -> None:
    wanted = parse_filter(text)
    assert wanted.matches(properties, FIELDS.get) is (_walk(wanted.root, properties) is True)
    assert wanted.system_names <= SYSTEM_NAMES
    assert wanted.names <= {"a", "b", "a.b", "message.key"}


@given(st.text(max_size=200))
def test_any_text_is_a_filter_or_refused_with_a_place_in_it(text: str) -> None:
    try:
        wanted = parse_filter(text)
    except InvalidRequest as refused:
        position = int(refused.fields["position"])
    else:
        position = len(text)
        wanted.matches({}, FIELDS.get)
    assert 0 <= position <= len(text)
