"""A summary of an entry never hides a message that a filter wants, whatever its hashes are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.proto import summary as under_test
from magnetar.proto.filters import (
    VALUE_CHARACTERS_MAX,
    And,
    Compare,
    Filter,
    FilterNode,
    In,
    IsNull,
    Like,
    Literal,
    Name,
    Not,
    Or,
    parse_filter,
)
from magnetar.proto.summary import SUMMARY_BYTES_MAX, SummaryBuilder, may_match, parse_summary

NAMES = ("a", "b", "é")
TEXTS = ("", "1", "01", "1.0", "true", "TRUE", "x", "y", "é", "\0", "x" * (VALUE_CHARACTERS_MAX + 1))
FIELDS = {"message.key": "k", "message.size": 3, "message.event_time": None}

_names = st.sampled_from([*(Name(each, False) for each in (*NAMES, "c")), *(Name(each, True) for each in FIELDS)])
_values = st.sampled_from(["", "1", "x", "y", "true", "k", 1, 1.0, 3, -2, True, False])
_operands = st.one_of(_names, _names, _values.map(Literal))
_leaves: st.SearchStrategy[FilterNode] = st.one_of(
    st.builds(Compare, st.sampled_from(["=", "=", "<", "<="]), _operands, _operands),
    st.builds(In, _names, st.lists(_values, min_size=1, max_size=3).map(tuple)),
    st.builds(lambda name, text: Like(name, (text,), is_whole=True), _names, st.sampled_from(["x", "1", ""])),
    st.builds(lambda name, text: Like(name, (text, ""), is_whole=False), _names, st.sampled_from(["x", "1", ""])),
    st.builds(IsNull, _names),
)
expressions: st.SearchStrategy[FilterNode] = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        inner.map(Not),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: And(tuple(parts))),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: Or(tuple(parts))),
    ),
    max_leaves=8,
)
messages = st.lists(
    st.dictionaries(st.sampled_from([*NAMES, "c"]), st.sampled_from(TEXTS), max_size=4), min_size=1, max_size=4
)


def summarize(batch: list[dict[str, str]], names: tuple[str, ...]) -> bytes:
    builder = SummaryBuilder(names)
    for properties in batch:
        builder.add_message(properties)
    return builder.encode()


@pytest.fixture(params=[0xFFFFFFFF, 3, 0])
def _weak_hashes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Hashes that are right, or nearly always or always equal."""
    strong, mask = under_test.hash_property, request.param
    monkeypatch.setattr(under_test, "hash_property", lambda name, value: strong(name, value) & mask)
    under_test._KNOWN_HASHES.clear()
    yield
    under_test._KNOWN_HASHES.clear()


@pytest.mark.usefixtures("_weak_hashes")
@pytest.mark.parametrize("listed", [under_test.EXACT_HASHES_MAX, 0], ids=["listed", "bloom"])
def test_what_a_filter_wants_may_match_whatever_the_hashes_are(listed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "EXACT_HASHES_MAX", listed)

    @given(expressions, messages, st.sampled_from([NAMES, ("a",), ("a", "b")]))
    def check(expression: FilterNode, batch: list[dict[str, str]], names: tuple[str, ...]) -> None:
        wanted = Filter("", expression, frozenset())
        if any(wanted.matches(properties, FIELDS.get) for properties in batch):
            assert may_match(expression, parse_summary(summarize(batch, names)))

    check()


@pytest.mark.parametrize(("where", "matches"), [
    ("a = 'x'", True), ("a = 'z'", False), ("a IN ('z', 'y')", True), ("a IN ('p', 'q')", False),
    ("a LIKE 'z'", False), ("a LIKE 'z%'", True), ("NOT a = 'x'", True), ("a <> 'z'", True), ("b = 'x'", False),
    ("b IS NULL", True), ("b IS NOT NULL", False), ("NOT b IS NULL", False), ("a IS NULL", False),
    ("NOT (a IS NOT NULL)", False), ("b > 3", False), ("b <> 'x'", False), ("NOT b LIKE 'x%'", False),
    ("a = 'z' OR b = 'x'", False), ("a = 'x' AND b = 'x'", False), ("NOT (a <> 'x' OR b IS NULL)", False),
    ("c = 'x'", True), ("message.key = 'k'", True), ("a = 'z' AND message.key = 'k'", False), ("a = 5", True),
    ("b", False), ("NOT b", False), ("a = b", False), ("1 = 2", True),
])  # fmt: skip
def test_what_a_summary_proves(where: str, matches: bool) -> None:
    summary = parse_summary(summarize([{"a": "x"}, {"a": "y", "c": "x"}], ("a", "b")))
    assert may_match(parse_filter(where).root, summary) is matches


def test_a_summary_lists_few_values_filters_many_and_leaves_out_too_many() -> None:
    few = summarize([{"tag": str(each)} for each in range(32)], ("tag",))
    many = summarize([{"tag": str(each)} for each in range(150)], ("tag",))
    assert (len(few), few[2 + 2 + 3]) == (2 + 2 + 3 + 1 + 4 * 32, under_test.HASHES_FORM)
    assert (len(many), many[2 + 2 + 3]) == (8 + (150 * 10 + 7) // 8, under_test.BLOOM_FORM)
    for summary, count in ((few, 32), (many, 150)):
        read = parse_summary(summary)
        found = [may_match(parse_filter(f"tag = '{each}'").root, read) for each in range(1000)]
        assert all(found[:count])
        assert sum(found[count:]) < 40
    assert summarize([{"tag": str(each)} for each in range(300)], ("tag",)) == b""
    assert summarize([{}], tuple("n" * 100 + str(each) for each in range(3))) == b""
    assert may_match(parse_filter("tag = 'x'").root, parse_summary(b""))


@given(st.binary(max_size=SUMMARY_BYTES_MAX + 10))
def test_any_bytes_are_a_summary_or_say_nothing(noise: bytes) -> None:
    for text in (noise, summarize([{"a": "x"}], ("a", "b"))[: len(noise)], bytes((1, 1, 1, 1, 97)) + noise):
        assert may_match(parse_filter("a = 'x' OR a IS NULL").root, parse_summary(text)) in (True, False)


def test_a_summary_of_another_version_says_nothing() -> None:
    summary: Any = bytearray(summarize([{"a": "x"}], ("a",)))
    assert not may_match(parse_filter("a = 'y'").root, parse_summary(bytes(summary)))
    summary[0] = under_test.SUMMARY_VERSION + 1
    assert may_match(parse_filter("a = 'y'").root, parse_summary(bytes(summary)))
