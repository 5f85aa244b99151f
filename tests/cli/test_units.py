"""What people type for times, sizes, places and properties."""

import click
import pytest

from magnetar.cli.admin.policies import _bytes
from magnetar.cli.common import units
from magnetar.cli.main import root
from tests.support.processes import run_here


@pytest.mark.parametrize(
    ("text", "unit_s", "expected"),
    [
        ("10m", 60, 10),
        ("2h", 60, 120),
        ("90s", 60, 2),
        ("3d", 60, 4320),
        ("-1", 60, -1),
        ("30", 1, 30),
        (None, 1, None),
    ],
)
def test_durations_are_rounded_up_to_whole_units(text: str | None, unit_s: int, expected: int | None) -> None:
    assert units.parse_duration(text, unit_s) == expected


@pytest.mark.parametrize(("text", "expected"), [("100M", 100), ("10G", 10240), ("1TiB", 1 << 20), ("-1", -1), ("7", 7)])
def test_sizes_are_in_mebibytes(text: str, expected: int) -> None:
    assert units.parse_mebibytes(text) == expected


def test_what_is_no_time_or_size_is_refused_with_an_example() -> None:
    with pytest.raises(click.BadParameter, match="10m"):
        units.parse_duration("soon", 60)
    with pytest.raises(click.BadParameter, match="10G"):
        units.parse_mebibytes("large")


def test_places_in_a_topic() -> None:
    assert units.parse_message_id("earliest").ledger_id() == -1
    assert units.parse_message_id("latest").entry_id() == (1 << 63) - 1
    found = units.parse_message_id("97:9:2:5")
    assert (found.ledger_id(), found.entry_id(), found.partition(), found.batch_index()) == (97, 9, 2, 5)
    assert units.parse_message_id("97:9").batch_index() == -1
    with pytest.raises(click.UsageError, match="LEDGER:ENTRY"):
        units.parse_message_id("97")


def test_moments_are_so_long_ago_or_a_date() -> None:
    assert units.parse_moment_ms("10m", 1_000_000_000) == 1_000_000_000 - 600_000
    assert units.parse_moment_ms("1970-01-01T00:00:01+00:00", 0) == 1000
    assert units.parse_moment_ms("1234", 0) == 1234
    with pytest.raises(click.UsageError, match="is not a time"):
        units.parse_moment_ms("yesterday", 0)


def test_properties_take_pairs_with_commas_and_more_than_once() -> None:
    assert units.parse_properties(["a=1,b=2", "c=x=y"]) == {"a": "1", "b": "2", "c": "x=y"}
    assert units.parse_properties(["a=1,2,3,b=2", "c=4"]) == {"a": "1,2,3", "b": "2", "c": "4"}
    with pytest.raises(click.BadParameter, match="KEY=VALUE"):
        units.parse_properties(["a"])


@pytest.mark.parametrize("text", ["²", "1²", "9" * 5000, "9" * 5000 + "s", "9" * 5000 + "m", "١", "١h", "१g"])
def test_what_is_no_number_of_ascii_digits_is_a_usage_error(text: str) -> None:
    for read in (
        lambda: units.parse_duration(text, 1),
        lambda: units.parse_mebibytes(text),
        lambda: units.parse_moment_ms(text, 0),
    ):
        with pytest.raises(click.UsageError):
            read()
    with pytest.raises(click.UsageError):
        _bytes(text)


def test_no_option_takes_what_is_no_number() -> None:
    """Every command of the tree."""
    found = 0

    def walk(command: click.Command, parent: click.Context | None) -> None:
        nonlocal found
        context = click.Context(command, parent=parent)
        for each in command.params:
            assert type(each.type) not in (click.FloatRange, type(click.FLOAT)), (command.name, each.name)
            if isinstance(each.type, units.FiniteNumber):
                found += 1
                for text in ("nan", "inf", "-inf", "1e999"):
                    with pytest.raises(click.BadParameter):
                        each.type.convert(text, each, context)
        if isinstance(command, click.Group):
            for name in command.list_commands(context):
                walk(command.get_command(context, name) or command, context)

    walk(root, None)
    assert found > 20


@pytest.mark.parametrize(("arguments", "word"), [
    (("produce", "t", "-m", "x", "--deliver-after", "-1"), "from now on"),
    (("produce", "t", "-m", "x", "-n", "9" * 30), "range"),
    (("produce", "t", "-m", "x", "-r", "nan"), "no number"),
    (("produce", "t", "-f", "a\0b"), "NUL"),
    (("produce", "t", "-f", "\ud800"), "no text"),
    (("topics", "stats", "\udcff"), ""),
    (("topics", "set-subscription-types-enabled", "t", "-t", "\udcff"), ""),
    (("topics", "set-dead-letter-policy", "t", "-t", "\udcff"), ""),
    (("schemas", "extract", "t", "-c", "../../etc/passwd"), "passwd"),
    (("bookies", "list", "--security", "a\0b"), "NUL"),
    (("topics", "expire-messages", "t", "-s", "s", "-t", "\u00b2"), "\u00b2"),
])  # fmt: skip
def test_bad_input_ends_with_the_code_of_usage_and_one_line(arguments: tuple[str, ...], word: str) -> None:
    done = run_here(*arguments, MAGNETAR_URL="magnetar://127.0.0.1:1")
    assert (done.code, "report it" in done.err) == (2, False), done.err
    assert word in done.err
