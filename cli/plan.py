"""`magnetar plan`: what a load needs, by formulas that docs/operations.md explains. Asks no server.

`estimate_requirements` is pure: a load and a number of servers in, the needs of each out. Guarding tests:
tests/cli/test_plan.py.
"""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import click

from .common.output import OUTPUT, CommandOutput, Row
from .common.units import SECONDS

UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30,
         "TI": 1 << 40}  # fmt: skip
DISK_USED = 0.75
"""Share of a disk that is planned for: compaction, a lost bookie's copies and a burst need the rest."""
BROKER_BYTES, TOPIC_BYTES = 64 << 20, 17_000
"""Memory of a broker without topics, and of each loaded topic (docs/operations.md)."""
CACHE_BYTES = (64 + 16) << 20
"""`cache_bytes` and `catch_up_cache_bytes`."""
ROLL_S, ROLL_BYTES = 240 * 60, 2 << 30
"""`roll_minutes` and `roll_bytes`: when a ledger ends."""


class Load(NamedTuple):
    """The load for which servers are planned: the incoming bytes per second, for how long and in how many copies data
    is stored, and how many subscriptions read it."""

    in_bytes_s: float
    retention_s: float
    fanout: int  # subscriptions that read all of it
    copies: int  # write quorum
    topics: int
    subscriptions: int  # of each topic


class ServerRequirements(NamedTuple):
    """The disk, network and memory that each broker and each bookie needs for the planned load."""

    bookies: int
    brokers: int
    bookie_disk_bytes: float
    bookie_write_bytes_s: float  # to its disk: journal and entry log
    bookie_in_bytes_s: float  # from the network
    broker_in_bytes_s: float
    broker_out_bytes_s: float
    broker_memory_bytes: float


def estimate_requirements(load: Load, bookies: int, brokers: int) -> ServerRequirements:
    """Returns the disk, network and memory that each server needs for the load if there are `bookies` bookies and
    `brokers` brokers."""
    stored = load.in_bytes_s * load.copies / bookies
    return ServerRequirements(
        bookies, brokers, stored * load.retention_s / DISK_USED, 2 * stored, stored, load.in_bytes_s / brokers,
        load.in_bytes_s * (load.copies + load.fanout) / brokers,
        BROKER_BYTES + TOPIC_BYTES * load.topics / brokers + CACHE_BYTES,
    )  # fmt: skip


def estimate_ledgers(load: Load) -> int:
    """Returns the approximate number of ledgers for the load: the ledgers of topics, which are closed at a certain age
    or size, and one ledger for each subscription's cursor."""
    by_age = load.topics * math.ceil(load.retention_s / ROLL_S + 1)
    by_size = math.ceil(load.in_bytes_s * load.retention_s / ROLL_BYTES)
    return max(by_age, by_size) + load.topics * load.subscriptions


def estimate_metadata_nodes(load: Load) -> int:
    """Returns the approximate number of nodes (records) in the metadata for the load."""
    return load.topics * (2 + load.subscriptions) + estimate_ledgers(load)


class Bytes(click.FloatRange):
    """The type of an option whose value is a number of bytes, or of bytes per second: 50MB/s, 200MiB, 1G."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([KMGT]?I?)B?(?:/S)?", str(value).strip().upper())
        if found is None or found[2] not in UNITS or not float(found[1]):
            self.fail(f"{str(value)[:40]!r} is not a rate such as 50MB/s or 200MiB/s", param, ctx)
        return float(found[1]) * UNITS[found[2]]


class TimeParameter(click.FloatRange):
    """The type of an option whose value is a duration, in seconds: 7d, 12h."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"([0-9]{1,12})([smhdw])", str(value).strip().lower())
        if found is None:
            self.fail(f"{str(value)[:40]!r} is not a time such as 12h, 7d, 2w", param, ctx)
        return float(found[1]) * SECONDS[found[2]]


@click.command()
@click.option("--in", "in_bytes_s", type=Bytes(min=0), required=True, metavar="RATE", help="Published: 50MB/s.")
@click.option(
    "--retention", type=TimeParameter(min=0), required=True, metavar="TIME", help="For which messages are kept: 7d."
)
@click.option("--fanout", type=click.IntRange(0), default=1, show_default=True, help="Subscriptions that read all.")
@click.option("--copies", type=click.IntRange(1, 100), default=3, show_default=True, help="Of each message: Qw.")
@click.option("--bookies", type=click.IntRange(1), default=None, help="How many (default: one more than copies).")
@click.option("--brokers", type=click.IntRange(1), default=3, show_default=True, help="How many.")
@click.option("--topics", type=click.IntRange(1), default=1000, show_default=True, help="Partitions count each.")
@click.option("--subscriptions", type=click.IntRange(0), default=None, help="Of each topic (default: the fan-out).")
@OUTPUT
def plan(
    in_bytes_s: float, retention: float, fanout: int, copies: int, bookies: int | None, brokers: int, topics: int,
    subscriptions: int | None, output: str,
) -> None:  # fmt: skip
    """Show what a load needs of each broker and each bookie: if all of them run, and if one is missing.

    The calculation is that of docs/operations.md; disks are planned to be three quarters full. A cluster that works
    with one server less survives the loss and the upgrade of a server: buy for the second column.

    \b
    Examples:
      magnetar plan --in 50MB/s --retention 7d --fanout 3 --copies 3
      magnetar plan --in 5MB/s --retention 1d --bookies 3 --topics 200 -o json
    """
    count = bookies or copies + 1
    if count < copies:
        raise click.UsageError(f"{copies} copies need {copies} bookies at least, not {count}")
    load = Load(in_bytes_s, retention, fanout, copies, topics, fanout if subscriptions is None else subscriptions)
    needs = estimate_requirements(load, count, brokers), estimate_requirements(
        load, max(count - 1, 1), max(brokers - 1, 1)
    )
    out = CommandOutput(output)
    ledgers, nodes = estimate_ledgers(load), estimate_metadata_nodes(load)
    warnings = [*_warnings(load, count, brokers)]
    if out.is_structured:
        whole, less = (each._asdict() for each in needs)
        out.print_document({"load": load._asdict(), "all": whole, "oneLess": less, "ledgers": ledgers,
                            "metadataNodes": nodes, "warnings": warnings})  # fmt: skip
        return
    out.print_rows(_rows(*needs), ("need", "all", "one less"))
    click.echo(f"\nMetadata: about {nodes:,} nodes, {ledgers:,} of them ledgers.")
    for each in warnings:
        click.echo(f"! {each}")


def _warnings(load: Load, bookies: int, brokers: int) -> list[str]:
    found = []
    if bookies - 1 < load.copies:
        found.append(f"With one bookie less there are fewer than {load.copies}: new ledgers get fewer copies.")
    if brokers == 1:
        found.append("With one broker nothing is served while it is restarted.")
    return found


def _rows(whole: ServerRequirements, less: ServerRequirements) -> list[Row]:
    texts = (
        ("bookies", "bookies", ""), ("disk of each bookie", "bookie_disk_bytes", "B"),
        ("writes of each bookie to its disk", "bookie_write_bytes_s", "B/s"),
        ("network into each bookie", "bookie_in_bytes_s", "B/s"), ("brokers", "brokers", ""),
        ("network into each broker", "broker_in_bytes_s", "B/s"),
        ("network out of each broker", "broker_out_bytes_s", "B/s"),
        ("memory of each broker", "broker_memory_bytes", "B"),
    )  # fmt: skip
    return [
        {"need": text, "all": format_amount(getattr(whole, name), unit),
         "one less": format_amount(getattr(less, name), unit)}
        for text, name, unit in texts
    ]  # fmt: skip


def format_amount(value: float, unit: str) -> str:
    """Returns a number with its unit as a short text for people, such as 12.1 TB."""
    if not unit:
        return str(int(value))
    for prefix, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:,.1f} {prefix}{unit}"
    return f"{value:,.0f} {unit}"
