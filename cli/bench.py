"""`magnetar bench …`: what a server does for this client: how much it confirms and delivers, and how long that takes.

It is a load from one Python process, over as many connections as `--clients`: a figure is that of the server, or of
this process where that is the slower one. Latencies count from when a message was due (with --rate), so a
pause of the server is in them, and not left out. A topic that it made is deleted at the end, one that is named stays.

What a confirmation means is asked of the server: how many copies are synced to disk before it.

Also in this file, below its heading: what a load needs, by formulas (plan).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import struct
import sys
import uuid
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..runtime.clock import SystemClock
from .common.exits import CommandFailure
from .common.lazy import LazyCommand, LazyGroup
from .common.output import OUTPUT_OPTION, CommandOutput, OutputRow
from .common.session import NAME_COMPLETIONS, CommandSession, with_session
from .common.units import SECONDS_PER_UNIT, FiniteNumber

if TYPE_CHECKING:
    from ..client.client import Client
    from ..client.common.errors import Result
    from ..client.consume.consumer import Consumer
    from ..client.produce.producer import Producer

bench = LazyGroup(
    "bench",
    {
        "produce": LazyCommand(".bench", "produce", "Messages confirmed a second, and how long each took."),
        "consume": LazyCommand(".bench", "consume", "Messages received a second."),
        "latency": LazyCommand(".bench", "latency", "From sent to confirmed and to received, at a rate."),
    },
    help="Measure a server from here.\n\nExample: magnetar bench produce --size 1024 --duration 10",
)
now = SystemClock().monotonic
UNCONFIRMED_MAX = 10_000
"""Messages of a connection that wait for their confirmation: more than a server on this machine confirms in 50 ms."""
MESSAGES_PER_BURST = 100
"""Messages that are sent before confirmations are looked at."""
DUE_TIME_STAMP = struct.Struct("<d")
"""The time at which a message was due, at the beginning of its payload."""
LAST_MESSAGES_WAIT_S = 5.0
"""Seconds to wait for what was confirmed and not received yet, when the time is over."""
ADMIN_TIMEOUT_S = 5.0
"""Seconds for each question beside the load."""
PERCENTILES = {"p50Ms": 0.5, "p90Ms": 0.9, "p99Ms": 0.99, "p999Ms": 0.999}


@dataclass
class BenchLoad:
    """The load of one benchmark, as the options of the command describe it. `kind`: the name of the benchmark; `size`:
    bytes of each message; `rate`: messages per second of all clients together, None for as many as the server confirms.
    `synced`: what the server says about the copies that are on disk before a confirmation."""

    session: CommandSession
    kind: str
    topic: str
    size: int
    rate: float | None
    duration_s: float
    clients: int
    synced: str = "unknown"


@dataclass
class EventCounts:
    """Counts events of one kind, such as confirmed messages, and collects their latencies. Sets the event `enough` when
    `wanted` messages were counted. `errors`: the number of failures by the name of the error."""

    messages: int = 0
    wanted: int | None = None
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    errors: dict[str, int] = field(default_factory=dict)
    latencies_s: array[float] = field(default_factory=lambda: array("d"))

    def count(self, begun: float, ended: float) -> None:
        """Counts one event, which took from `begun` to `ended` (both in seconds of one clock)."""
        self.messages += 1
        self.latencies_s.append(ended - begun)
        if self.messages == self.wanted:
            self.enough.set()

    async def wait_event_count(self, wanted: int | None, timeout_s: float) -> None:
        """Waits until `wanted` events were counted in all, or until `timeout_s` seconds have passed. If `wanted` is
        None, waits for `timeout_s` seconds."""
        self.wanted = wanted
        if wanted is None or self.messages < wanted:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.enough.wait()


def compute_latency_percentiles(samples_s: array[float]) -> dict[str, float]:
    """Returns the percentiles of PERCENTILES and the maximum of the latencies `samples_s` (seconds), in milliseconds by
    name; empty if there are no samples."""
    ordered = sorted(samples_s)
    if not ordered:
        return {}
    found = {name: ordered[min(len(ordered) - 1, int(len(ordered) * share))] for name, share in PERCENTILES.items()}
    return {name: round(value * 1000, 3) for name, value in (found | {"maxMs": ordered[-1]}).items()}


# ------------------------------------------------------------------------------------------------------------- topic
@asynccontextmanager
async def _topic_of(
    session: CommandSession, kind: str, topic: str | None, given: dict[str, Any]
) -> AsyncIterator[BenchLoad]:
    """Yields the load on `topic`; on a new one if that is None, which is deleted at the end."""
    from ..proto.errors import MagnetarError

    admin = session.with_timeout(min(session.timeout_s, ADMIN_TIMEOUT_S)).make_asyncio_admin()
    try:
        name = topic or f"bench-{uuid.uuid4().hex[:8]}"
        if topic is None:
            await admin.create_topic(name)
        try:
            part = (await admin.parts(name))[0]
            load = BenchLoad(session, kind, name, **given)
            yield load
            load.synced = await _synced(admin, part)
        finally:
            if topic is None:
                try:
                    await admin.delete_topic(name, force=True)
                except MagnetarError as error:  # what was measured is told nevertheless
                    print(f"magnetar: topic {name} stays: {error.message}", file=sys.stderr)
    finally:
        await admin.close()


async def _synced(admin: Any, part: str) -> str:
    """Returns what the server says of a confirmation: how many of the copies are on disk before it."""
    from ..proto.errors import MagnetarError

    if part.startswith("non-persistent:"):
        return "nothing: the topic is not persistent"
    try:
        found = (await admin.topic_internal_stats(part)).replication
    except MagnetarError as error:
        return f"unknown: {type(error).__name__}"
    parts = str(found).split("/")
    return f"fsync on {parts[2]} of {parts[1]} copies" if len(parts) == 3 else "unknown"


@asynccontextmanager
async def _clients(load: BenchLoad, count: int) -> AsyncIterator[list[Client]]:
    async with AsyncExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(load.session.asyncio_client())
            stack.push_async_callback(found[-1].close)
        yield found


# ----------------------------------------------------------------------------------------------------------- sending
class BenchSender:
    """Sends messages of `size` bytes on one connection, and counts each confirmed message. Sends `rate` messages per
    second; without a rate, as many as the server confirms, with at most UNCONFIRMED_MAX of them unconfirmed."""

    def __init__(self, producer: Producer, size: int, rate: float | None, tally: EventCounts) -> None:
        from ..client.common.errors import Result

        self._producer, self._rate, self._tally, self._ok = producer, rate, tally, Result.Ok
        self._rest = b"x" * max(0, size - DUE_TIME_STAMP.size)
        self._size = size
        self._free = asyncio.Event()
        self.sent = self.pending = 0

    async def run(self, until: float, most: int | None = None) -> None:
        """Sends until the time `until` (of the clock `now`), or until `most` messages are sent. Then waits until the
        messages on their way are confirmed or have failed. Failures are counted, not raised."""
        from ..proto.errors import MagnetarError

        begun = now()
        while self.sent != most and (at := now()) < until:
            due = int((at - begun) * self._rate) + 1 if self._rate else self.sent + MESSAGES_PER_BURST
            room = min(
                due - self.sent,
                UNCONFIRMED_MAX - self.pending,
                MESSAGES_PER_BURST,
                *([] if most is None else [most - self.sent]),
            )
            for _ in range(room):
                self._send(begun + self.sent / self._rate if self._rate else now())
            if self.pending >= UNCONFIRMED_MAX:
                self._free.clear()
                await self._free.wait()
            elif self._rate and room <= 0:
                await asyncio.sleep(max(0.0, begun + self.sent / self._rate - now()))
            else:
                await asyncio.sleep(0)
        with contextlib.suppress(MagnetarError):  # counted by what was called back; the send time-out bounds it
            await self._producer.flush()

    def _send(self, due: float) -> None:
        def confirmed(result: Result, _: object) -> None:
            self.pending -= 1
            if result == self._ok:
                self._tally.count(due, now())
            else:
                self._tally.errors[result.name] = self._tally.errors.get(result.name, 0) + 1
            self._free.set()

        self._producer.send_nowait((DUE_TIME_STAMP.pack(due) + self._rest)[: self._size], confirmed)
        self.sent += 1
        self.pending += 1


async def _senders(load: BenchLoad, clients: list[Client], tally: EventCounts, **settings: Any) -> list[BenchSender]:
    rate = load.rate / len(clients) if load.rate else None
    found = []
    for client in clients:
        producer = await client.create_producer(
            load.topic, max_pending_messages=UNCONFIRMED_MAX + MESSAGES_PER_BURST, **settings
        )
        found.append(BenchSender(producer, load.size, rate, tally))
    return found


async def _receive(consumer: Consumer, tally: EventCounts, stopped: asyncio.Event, stamped: bool) -> None:
    from ..client.common.errors import Timeout

    while not stopped.is_set():
        try:
            message = await consumer.receive(100)
        except Timeout:
            continue
        at = now()
        payload = message.data()
        tally.count(
            DUE_TIME_STAMP.unpack_from(payload)[0] if stamped and len(payload) >= DUE_TIME_STAMP.size else at, at
        )
        consumer.acknowledge_soon(message)


# ------------------------------------------------------------------------------------------------------------ telling
async def _told(load: BenchLoad, tally: EventCounts, work: Coroutine[Any, Any, None]) -> float:
    """Runs the work, and prints the counts of each second. Returns the seconds that the work took."""
    out, begun = load.session.out, now()
    task = asyncio.ensure_future(work)
    seen, at = 0, 0
    try:
        while not task.done():
            await asyncio.wait([task], timeout=begun + at + 1 - now())
            if task.done():
                break
            at += 1
            record = {
                "second": at, "messages": tally.messages - seen,
                "mebibytes": round((tally.messages - seen) * load.size / (1 << 20), 3),
                **compute_latency_percentiles(tally.latencies_s[seen:]),
            }  # fmt: skip
            seen = tally.messages
            if out.kind == "jsonl":
                out.print_streamed_value(record)
            elif not out.is_structured:
                print(_line(record), file=sys.stderr)
        await task
    finally:
        task.cancel()
    return now() - begun


def _line(record: dict[str, Any]) -> str:
    text = f"{record['second']:4} s  {record['messages']:>9,} messages  {record['mebibytes']:8,.1f} MiB"
    return text + (f"  p50 {record['p50Ms']:,.1f} ms  p99 {record['p99Ms']:,.1f} ms" if "p50Ms" in record else "")


def _summary(load: BenchLoad, took_s: float, tally: EventCounts, **more: Any) -> dict[str, Any]:
    return {
        "bench": load.kind, "url": load.session.url, "topic": load.topic, "clients": load.clients, "size": load.size,
        "seconds": round(took_s, 3), "messages": tally.messages, "perSecond": round(tally.messages / took_s, 1),
        "mebibytesPerSecond": round(tally.messages * load.size / took_s / (1 << 20), 3), **more,
        "errors": sum(tally.errors.values()),
    }  # fmt: skip


def _run(
    session: CommandSession, kind: str, topic: str | None, given: dict[str, Any],
    measure: Callable[[BenchLoad], Coroutine[Any, Any, tuple[dict[str, Any], EventCounts]]],
) -> None:  # fmt: skip
    """Measures, and prints the summary. Raises CommandFailure if anything was refused."""
    from ..runtime.process import loop_factory

    if given.pop("as_json"):
        session.out = CommandOutput("json")

    async def run() -> tuple[dict[str, Any], EventCounts, BenchLoad]:
        async with _topic_of(session, kind, topic, given) as load:
            record, tally = await measure(load)
        return record, tally, load

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        record, tally, load = runner.run(run())
    session.out.print_record({**record, "confirmedMeans": load.synced})
    if tally.errors:
        raise CommandFailure("; ".join(f"{count} messages failed: {name}" for name, count in tally.errors.items()))


# -------------------------------------------------------------------------------------------------------------- verbs
def _options(rate: float | None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        said = "as many as it takes" if rate is None else f"{rate:.0f}"
        for option in reversed(
            (
                click.argument("topic", required=False, shell_complete=NAME_COMPLETIONS["topic"]),
                click.option("--size", type=click.IntRange(1, 5 << 20), default=1024, show_default=True, help="Bytes."),
                click.option(
                    "--rate", type=FiniteNumber(0.1), default=rate, help=f"Messages a second.  [default: {said}]"
                ),
                click.option(
                    "--duration", "duration_s", type=FiniteNumber(0.1), default=10.0, show_default=True, help="Seconds."
                ),
                click.option(
                    "--clients", type=click.IntRange(1, 1000), default=1, show_default=True, help="Connections."
                ),
                click.option("--json", "as_json", is_flag=True, help="As -o json."),
            )
        ):
            function = option(function)
        return function

    return decorate


@click.command()
@_options(None)
@with_session
def produce(session: CommandSession, topic: str | None, **given: Any) -> None:
    """Send messages, and count what is confirmed. Without TOPIC it makes one, and deletes it at the end.

    The answer also says what a confirmation means: on how many copies there was an fsync before it. Without --rate each
    connection has 10,000 unconfirmed messages, so their latency is that of a full queue. Messages wait up to 10 ms for
    others of their batch, as in programs that set nothing else. -o jsonl prints a line each second.

    \b
    Examples:
      magnetar bench produce
      magnetar bench produce orders-test --size 100 --clients 4 --rate 20000 --duration 30 --json
    """

    async def measure(load: BenchLoad) -> tuple[dict[str, Any], EventCounts]:
        tally = EventCounts()
        async with _clients(load, load.clients) as clients:
            senders = await _senders(load, clients, tally)
            until = now() + load.duration_s
            took_s = await _told(load, tally, _all(each.run(until) for each in senders))
        return _summary(load, took_s, tally, **compute_latency_percentiles(tally.latencies_s)), tally

    _run(session, "produce", topic, given, measure)


@click.command()
@_options(None)
@click.option(
    "-n", "--messages", type=click.IntRange(1), default=100_000, show_default=True, help="To read, of a topic it makes."
)
@with_session
def consume(session: CommandSession, topic: str | None, messages: int, **given: Any) -> None:
    """Measure receiving: receive and acknowledge messages of a topic, the oldest first. Without TOPIC, a topic with
    --messages messages is created first.

    The messages are read through a new Shared subscription, which is deleted at the end. --rate is the rate at which
    the topic is filled.

    \b
    Examples:
      magnetar bench consume
      magnetar bench consume orders --clients 2 --duration 30 --json
    """

    async def measure(load: BenchLoad) -> tuple[dict[str, Any], EventCounts]:
        from ..client.model.settings import ConsumerType, InitialPosition

        name, tally, stopped = f"bench-{uuid.uuid4().hex[:8]}", EventCounts(), asyncio.Event()
        options: dict[str, Any] = {"consumer_type": ConsumerType.Shared, "initial_position": InitialPosition.Earliest}
        async with _clients(load, load.clients) as clients:
            if topic is None:
                async with _clients(load, 1) as (filling,):
                    await filling.subscribe(load.topic, name, receiver_queue_size=1, **options)  # it keeps all of them
                    (sender,) = await _senders(load, [filling], EventCounts())
                    await sender.run(now() + 3600, messages)
            consumers = [await each.subscribe(load.topic, name, **options) for each in clients]

            async def end() -> None:
                await tally.wait_event_count(messages if topic is None else None, load.duration_s)
                stopped.set()

            work = _all([end(), *(_receive(each, tally, stopped, False) for each in consumers)])
            took_s = await _told(load, tally, work)
            for each in consumers[1:]:
                await each.close()
            await consumers[0].unsubscribe()
        return _summary(load, took_s, tally), tally

    _run(session, "consume", topic, given, measure)


@click.command()
@_options(1000.0)
@with_session
def latency(session: CommandSession, topic: str | None, **given: Any) -> None:
    """Send messages at a fixed rate, and measure how long each takes until it is confirmed, and until it is received.

    Sender and receiver are in this process, so one clock measures both. Messages are not collected into batches for
    longer than a millisecond.

    \b
    Examples:
      magnetar bench latency
      magnetar bench latency --rate 200 --size 100 --duration 60 -o jsonl
    """

    async def measure(load: BenchLoad) -> tuple[dict[str, Any], EventCounts]:
        from ..client.model.settings import InitialPosition

        load.size = max(load.size, DUE_TIME_STAMP.size)
        tally, received, stopped = EventCounts(), EventCounts(), asyncio.Event()
        async with _clients(load, load.clients) as clients, _clients(load, 1) as (reading,):
            name = f"bench-{uuid.uuid4().hex[:8]}"
            consumer = await reading.subscribe(load.topic, name, initial_position=InitialPosition.Latest)
            senders = await _senders(load, clients, tally, batching_max_publish_delay_ms=1)
            until = now() + load.duration_s

            async def send() -> None:
                await _all(each.run(until) for each in senders)
                await received.wait_event_count(tally.messages, LAST_MESSAGES_WAIT_S)
                stopped.set()

            took_s = await _told(load, tally, _all([send(), _receive(consumer, received, stopped, True)]))
            await consumer.unsubscribe()
        both = {"confirmed": tally, "received": received}
        times = {
            f"{what}{key[0].upper()}{key[1:]}": each
            for what, counted in both.items() for key, each in compute_latency_percentiles(counted.latencies_s).items()
        }  # fmt: skip
        return _summary(load, took_s, tally, received=received.messages, **times), tally

    _run(session, "latency", topic, given, measure)


async def _all(works: Any) -> None:
    async with asyncio.TaskGroup() as group:
        for each in works:
            group.create_task(each)


# ----------------------------------------------------------------------------------------------------------------- plan
# `magnetar plan`: what a load needs, by formulas that docs/operations.md explains. Asks no server.
#
# `estimate_requirements` is pure: a load and a number of servers in, the needs of each out. Guarding tests:
# tests/cli/test_plan.py.

SIZE_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30,
         "TI": 1 << 40}  # fmt: skip
PLANNED_DISK_SHARE = 0.75
"""Share of a disk that is planned for: compaction, a lost bookie's copies and a burst need the rest."""
BROKER_MEMORY_BYTES, TOPIC_MEMORY_BYTES = 64 << 20, 17_000
"""Memory of a broker without topics, and of each loaded topic (docs/operations.md)."""
BROKER_CACHE_BYTES = (64 + 16) << 20
"""`cache_bytes` and `catch_up_cache_bytes`."""
LEDGER_ROLL_S, LEDGER_ROLL_BYTES = 240 * 60, 2 << 30
"""`roll_minutes` and `roll_bytes`: when a ledger ends."""


class PlannedLoad(NamedTuple):
    """The load for which servers are planned: the incoming bytes per second, for how long and in how many copies data
    is stored, and how many subscriptions read it."""

    in_bytes_s: float
    retention_s: float
    fanout: int  # subscriptions that read all of it
    copies: int  # write quorum
    topics: int
    subscriptions: int  # of each topic


class ServerRequirements(NamedTuple):
    """The disk, network and memory that each broker and each bookie needs for the planned load, if there are `bookies`
    bookies and `brokers` brokers."""

    bookies: int
    brokers: int
    bookie_disk_bytes: float
    bookie_write_bytes_s: float  # to its disk: journal and entry log
    bookie_in_bytes_s: float  # from the network
    broker_in_bytes_s: float
    broker_out_bytes_s: float
    broker_memory_bytes: float


def estimate_requirements(load: PlannedLoad, bookies: int, brokers: int) -> ServerRequirements:
    """Returns the disk, network and memory that each server needs for the load if there are `bookies` bookies and
    `brokers` brokers (at least 1 each). docs/operations.md explains the formulas."""
    stored = load.in_bytes_s * load.copies / bookies
    return ServerRequirements(
        bookies, brokers, stored * load.retention_s / PLANNED_DISK_SHARE, 2 * stored, stored, load.in_bytes_s / brokers,
        load.in_bytes_s * (load.copies + load.fanout) / brokers,
        BROKER_MEMORY_BYTES + TOPIC_MEMORY_BYTES * load.topics / brokers + BROKER_CACHE_BYTES,
    )  # fmt: skip


def estimate_ledgers(load: PlannedLoad) -> int:
    """Returns the approximate number of ledgers for the load: the ledgers of topics, each of which ends after
    LEDGER_ROLL_S seconds or LEDGER_ROLL_BYTES bytes, and one ledger for each subscription's cursor."""
    by_age = load.topics * math.ceil(load.retention_s / LEDGER_ROLL_S + 1)
    by_size = math.ceil(load.in_bytes_s * load.retention_s / LEDGER_ROLL_BYTES)
    return max(by_age, by_size) + load.topics * load.subscriptions


def estimate_metadata_nodes(load: PlannedLoad) -> int:
    """Returns the approximate number of nodes (records) in the metadata for the load."""
    return load.topics * (2 + load.subscriptions) + estimate_ledgers(load)


class ByteCount(click.FloatRange):
    """The type of an option whose value is a number of bytes, or of bytes per second: 50MB/s (millions), 200MiB (of
    1,048,576), 1G."""

    name = "bytes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        found = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*([KMGT]?I?)B?(?:/S)?", str(value).strip().upper())
        if found is None or found[2] not in SIZE_UNITS or not float(found[1]):
            self.fail(f"{str(value)[:40]!r} is not a rate such as 50MB/s or 200MiB/s", param, ctx)
        return float(found[1]) * SIZE_UNITS[found[2]]


class TimeParameter(click.FloatRange):
    """The type of an option whose value is a duration with its unit, converted to seconds: 30s, 10m, 12h, 7d, 2w."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = re.fullmatch(r"([0-9]{1,12})([smhdw])", str(value).strip().lower())
        if found is None:
            self.fail(f"{str(value)[:40]!r} is not a time such as 12h, 7d, 2w", param, ctx)
        return float(found[1]) * SECONDS_PER_UNIT[found[2]]


@click.command()
@click.option("--in", "in_bytes_s", type=ByteCount(min=0), required=True, metavar="RATE", help="Published: 50MB/s.")
@click.option(
    "--retention", type=TimeParameter(min=0), required=True, metavar="TIME", help="For which messages are kept: 7d."
)
@click.option("--fanout", type=click.IntRange(0), default=1, show_default=True, help="Subscriptions that read all.")
@click.option("--copies", type=click.IntRange(1, 100), default=3, show_default=True, help="Of each message: Qw.")
@click.option("--bookies", type=click.IntRange(1), default=None, help="How many (default: one more than copies).")
@click.option("--brokers", type=click.IntRange(1), default=3, show_default=True, help="How many.")
@click.option("--topics", type=click.IntRange(1), default=1000, show_default=True, help="Partitions count each.")
@click.option("--subscriptions", type=click.IntRange(0), default=None, help="Of each topic (default: the fan-out).")
@OUTPUT_OPTION
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
    load = PlannedLoad(
        in_bytes_s, retention, fanout, copies, topics, fanout if subscriptions is None else subscriptions
    )
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


def _warnings(load: PlannedLoad, bookies: int, brokers: int) -> list[str]:
    found = []
    if bookies - 1 < load.copies:
        found.append(f"With one bookie less there are fewer than {load.copies}: new ledgers get fewer copies.")
    if brokers == 1:
        found.append("With one broker nothing is served while it is restarted.")
    return found


def _rows(whole: ServerRequirements, less: ServerRequirements) -> list[OutputRow]:
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
    """Returns a number with its unit as a short text for people, such as 12.1 TB (prefixes of 1000). An empty `unit`
    means a count, which is shown whole."""
    if not unit:
        return str(int(value))
    for prefix, size in (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if value >= size:
            return f"{value / size:,.1f} {prefix}{unit}"
    return f"{value:,.0f} {unit}"
