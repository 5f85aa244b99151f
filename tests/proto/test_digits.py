"""What is a number, and that nothing else decides it."""

import ast
from pathlib import Path

import pytest

from magnetar.broker.cluster.orphans import _numbers
from magnetar.broker.subscription.core.redelivery_backoff import (
    MAX_COUNT_PROPERTY,
    check_properties,
    merge_dead_letter_policy,
)
from magnetar.metadata.records import CursorRecord
from magnetar.proto.applied import AppliedPolicies
from magnetar.proto.errors import InvalidName, InvalidRequest
from magnetar.proto.names import TopicName, parse_number

ROOT = Path(__file__).parents[2]
NO_NUMBERS = ["²", "1²", "١", "९" * 3, "9" * 20, "9" * 5000, "", "-1", "+1", "1_000", " 1", "1\n", "1.0", "0x1", "nan",
              "\ud800"]  # fmt: skip
BY_OTHERS = {
    "client/connect/discovery.py": "bytes, whose digits are ASCII",
    "metadata/paths.py": "twenty of them, in ASCII",
    "broker/rest/application.py": "of a length that the parser of HTTP took, and of any number of digits",
    "proto/filters.py": "what a word that is no word begins with, for the sentence that refuses it",
    "runtime/grpc/client.py": "bytes, and nine of them",
    "spark_connector/options.py": "names of partitions, and in ASCII below 2^63",
}  # fmt: skip


@pytest.mark.parametrize("text", NO_NUMBERS, ids=lambda text: ascii(text)[:12])
def test_text_that_is_no_number_is_none_and_raises_nothing(text: str) -> None:
    assert parse_number(text) is None


def test_digits_are_a_number() -> None:
    assert [parse_number(text) for text in ("0", "007", "9223372036854775807")] == [0, 7, (1 << 63) - 1]


@pytest.mark.parametrize("text", NO_NUMBERS, ids=lambda text: ascii(text)[:12])
def test_a_subscriptions_property_that_is_no_number_is_refused_and_a_stored_one_counts_as_unset(text: str) -> None:
    properties = {MAX_COUNT_PROPERTY: text}
    with pytest.raises(InvalidRequest):
        check_properties(properties)
    assert merge_dead_letter_policy(
        AppliedPolicies(dead_letter_max_redeliver_count=3), properties
    ).max_redeliver_count == 3


@pytest.mark.parametrize("text", NO_NUMBERS, ids=lambda text: ascii(text)[:12])
def test_a_subscriptions_property_that_is_no_number_stops_no_search_for_orphans(text: str) -> None:
    assert set(_numbers(CursorRecord(properties={"a": text, text: "77"}, created_ms=5))) >= {5, 77}


@pytest.mark.parametrize("digits", ["1\u0661", "\u0661", "\u00b2", "1\u00b2"])
def test_a_partition_has_one_spelling(digits: str) -> None:
    with pytest.raises(InvalidName, match="not written plainly"):
        TopicName.parse(f"t-partition-{digits}")


def test_no_other_code_asks_whether_text_is_a_number() -> None:
    asking = set()
    for path in ROOT.glob("*/**/*.py"):
        where = path.relative_to(ROOT).as_posix()
        if where.startswith(("tests/", ".venv/", "benchmarks/", "build/")) or where == "proto/names.py":
            continue
        source = path.read_text()
        if any(f".{name}(" in source for name in ("isdigit", "isdecimal", "isnumeric")):
            calls = (each.func for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Call))
            names = {each.attr for each in calls if isinstance(each, ast.Attribute)}
            if names & {"isdigit", "isdecimal", "isnumeric"}:
                asking.add(where)
    assert asking == set(BY_OTHERS), "proto/names.py `whole`"
