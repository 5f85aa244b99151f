"""`magnetar migrate` between two real servers, of which the source is asked by Pulsar's protocol alone."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import magnetar
from magnetar.admin import Admin
from magnetar.cli.common.processes import Process, Processes
from magnetar.cli.migrate.copying import MIGRATION_NAME
from magnetar.cli.migrate.source import decode_origin
from magnetar.proto.entry import parse_header, split_broker_part
from magnetar.proto.errors import NotFound
from magnetar.proto.policies import Policies
from tests.support.processes import Result, heed_sigint, run_here

pytestmark = pytest.mark.processes
DEADLINE_S = 30.0
RESUMES = "the same command continues where this one ended"


class Both:
    """The source and the destination, with a client and an administration of each."""

    def __init__(self, processes: Processes) -> None:
        started = [processes.start(name, "standalone", "--port", "0", "--data", name) for name in ("source", "here")]
        self.processes = processes
        self.urls = [each.wait_ready() for each in started]
        [line] = [each for each in started[0].lines if each.startswith("ready ")]
        self.pulsar = re.findall(r"pulsar=(\S+)", line)[0]
        self.http = re.findall(r"http=(\S+)", line)[0]
        self.source, self.here = (magnetar.Client(url) for url in self.urls)
        self.source_admin, self.admin = (Admin(url) for url in self.urls)

    def arguments(self, *arguments: str) -> tuple[str, ...]:
        return ("migrate", "--from", self.pulsar, "--url", self.urls[1], *arguments)

    def migrate(self, *arguments: str, code: int = 0) -> Result:
        done = run_here(*self.arguments(*arguments))
        assert done.code == code, done
        assert "Traceback" not in done.err
        return done

    def start(self, *arguments: str) -> Process:
        name = f"migrate-{len(self.processes.started)}"
        return self.processes.start(name, *self.arguments(*arguments))

    def fill(self, topic: str, first: int, end: int, **options: Any) -> None:
        with self.source.create_producer(topic, block_if_queue_full=True, **options) as producer:
            for number in range(first, end):
                producer.send_async(b"%d" % number, None, partition_key=f"k{number % 3}")
            producer.flush()

    def close(self) -> None:
        for each in (self.source, self.here, self.source_admin, self.admin):
            each.close()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    with Processes(tmp_path_factory.mktemp("migrate")) as processes:
        made = Both(processes)
        yield made
        made.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "the deadline is over"
        time.sleep(0.01)


def entries(url: str, topic: str) -> list[bytes]:
    """Of all partitions, as they are stored, without the broker's part."""

    async def read() -> list[bytes]:
        found: list[bytes] = []
        async with magnetar.asyncio.Client(url) as client:
            for part in await client.get_topic_partitions(topic):
                async for read in client.read_range(part, 0, 1 << 40):
                    found += [bytes(split_broker_part(entry.data)[2]) for entry in read]
        return found

    return asyncio.run(read())


def told(entry: bytes) -> tuple[Any, bytes]:
    """What its metadata and its payload say, without the origin."""
    header = parse_header(entry)
    metadata = type(header.metadata)()
    metadata.CopyFrom(header.metadata)
    metadata.DiscardUnknownFields()
    return metadata, entry[header.payload_offset :]


def assert_copied(both: Both, topic: str) -> list[bytes]:
    """Every entry once, in order, with all that it says."""
    theirs, ours = entries(both.urls[0], topic), entries(both.urls[1], topic)
    assert [told(each) for each in ours] == [told(each) for each in theirs]
    assert all(decode_origin(each) for each in ours)
    return ours


# ------------------------------------------------------------------ what is copied
def test_entries_are_copied_as_they_are(both: Both) -> None:
    kinds = magnetar.CompressionType
    both.fill("as-is", 0, 50)
    both.fill("as-is", 50, 200, batching_enabled=True, compression_type=kinds.ZSTD, producer_name="packed")
    with both.source.create_producer("as-is", chunking_enabled=True) as producer:
        producer.send(bytes(range(256)) * 45_000)
    with both.source.create_producer("as-is") as producer:
        producer.send(b"late", deliver_at=int(time.time() * 1000) + 3_600_000, ordering_key="o")
        producer.send(b"all", properties={"a": "b"}, event_timestamp=5, partition_key="k")
        producer.send(None, partition_key="gone")
    both.migrate("--topics", "as-is")
    assert len(assert_copied(both, "as-is")) > 54
    reader = both.here.create_reader("as-is", magnetar.MessageId.earliest)
    assert [reader.read_next(30_000).data() for _ in range(200)] == [b"%d" % number for number in range(200)]
    assert reader.read_next(30_000).data() == bytes(range(256)) * 45_000


def test_partitions_stay_apart_and_patterns_find_topics(both: Both) -> None:
    both.source_admin.create_tenant("shop")
    both.source_admin.create_namespace("shop/web")
    both.source_admin.create_topic("shop/web/orders", partitions=3)
    both.source_admin.create_topic("shop/web/empty")
    both.source_admin.create_topic("shop/web/other")
    both.fill("shop/web/orders", 0, 60)
    asked = ("--topics", "shop/web/o[r]*", "--topics", "shop/web/emp?y")
    planned = json.loads(both.migrate(*asked, "--dry-run", "-o", "json").out)
    assert [each["topic"].rpartition("/")[2] for each in planned] == [
        "empty", "orders-partition-0", "orders-partition-1", "orders-partition-2"
    ]  # fmt: skip
    assert {each["destination"] for each in planned} == {"is made"}
    assert sum(each["messages"] for each in planned) == 60
    assert both.admin.tenants() == ["public"], "a dry run makes nothing"
    both.migrate(*asked)
    assert both.admin.topics("shop/web") == ["persistent://shop/web/empty", "persistent://shop/web/orders"]
    assert both.admin.partitions("shop/web/orders") == 3
    for number in range(3):
        assert_copied(both, f"shop/web/orders-partition-{number}")


def test_schemas_are_registered_and_named_by_their_versions_here(both: Both) -> None:
    integer = magnetar.schema.Integer
    first_of = type("Order", (magnetar.schema.Record,), {"a": integer()})
    second_of = type("Order", (magnetar.schema.Record,), {"a": integer(), "b": integer(required_default=True)})
    one, two = magnetar.schema.AvroSchema(first_of), magnetar.schema.AvroSchema(second_of)
    for schema, value in ((one, first_of(a=1)), (two, second_of(a=2, b=3))):
        with both.source.create_producer("typed", schema=schema) as producer:
            producer.send(value)
    both.admin.create_topic("typed")
    both.admin.put_schema("typed", two.info())  # its versions are in another order here
    both.migrate("--topics", "typed")
    reader = both.here.create_reader("typed", magnetar.MessageId.earliest, schema=two)
    first, second = reader.read_next(30_000), reader.read_next(30_000)
    assert (first.value().a, second.value().a, second.value().b) == (1, 2, 3)
    assert (first.int_schema_version(), second.int_schema_version()) == (1, 0)


def test_a_schema_that_is_refused_here_is_an_error_before_anything_is_copied(both: Both) -> None:
    both.source.create_producer("refused", schema=magnetar.schema.StringSchema()).close()
    both.admin.create_topic("refused")
    both.admin.put_schema("refused", magnetar.schema.AvroSchema(_record()).info())
    done = both.migrate("--topics", "refused", "-o", "json", code=1)
    assert json.loads(done.err)["error"] == "IncompatibleSchema"
    assert not entries(both.urls[1], "refused")
    both.migrate("--topics", "refused", "--no-schemas")


def _record() -> type[magnetar.schema.Record]:
    class Order(magnetar.schema.Record):
        a = magnetar.schema.Integer()

    return Order


def test_subscriptions_begin_after_what_was_acknowledged_in_order(both: Both) -> None:
    both.fill("positions", 0, 30)
    both.fill("positions", 30, 60, batching_enabled=True, batching_max_messages=10)
    for name, count in (("some", 45), ("none", 0), ("all", 60)):
        consumer = both.source.subscribe("positions", name, initial_position=magnetar.InitialPosition.Earliest)
        for _ in range(count):
            last = consumer.receive(30_000)
        if count:
            consumer.acknowledge_cumulative(last)
        consumer.close()
    both.migrate("--topics", "positions", "--subscriptions", "--admin-url", both.http)
    found = {each.name: each.backlog for each in both.admin.topic_stats("positions").subscriptions}
    assert found == {"some": 20, "none": 60, "all": 0, MIGRATION_NAME: 60}, "a batch comes again whole"


# ------------------------------------------------------------------ interrupted
def test_a_copy_that_is_killed_continues_and_nothing_is_lost_or_doubled(both: Both) -> None:
    both.fill("killed", 0, 4000)
    for at in (100, 700, 1500):
        process = both.start("--topics", "killed")
        until(lambda at=at: _copied(both, "killed") > at)  # type: ignore[misc]
        process.kill()
    both.fill("killed", 4000, 4100)
    both.migrate("--topics", "killed")
    assert len(assert_copied(both, "killed")) == 4100
    assert json.loads(both.migrate("--topics", "killed", "-o", "json").out)["messages"] == 0


def _copied(both: Both, topic: str) -> int:
    try:
        return both.admin.offsets(topic).end_index
    except NotFound:
        return 0


def test_a_copy_that_follows_ends_by_ctrl_c_and_says_what_is_left(both: Both) -> None:
    heed_sigint()
    both.fill("followed", 0, 10)
    process = both.start("--topics", "followed", "--follow")
    until(lambda: _copied(both, "followed") == 10)
    both.fill("followed", 10, 20)
    until(lambda: _copied(both, "followed") == 20)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0, process.output()
    assert "10 messages copied" in process.output() or "20 messages copied" in process.output()
    assert_copied(both, "followed")


def test_ctrl_c_ends_a_copy_with_130_and_how_to_go_on(both: Both) -> None:
    heed_sigint()
    both.fill("stopped", 0, 20)
    held = both.here.create_producer("stopped", access_mode=magnetar.ProducerAccessMode.Exclusive)
    process = both.start("--topics", "stopped")
    until(lambda: MIGRATION_NAME in _subscriptions(both, "stopped"))
    process.send_signal(signal.SIGINT)
    assert process.wait() == 130
    assert RESUMES in process.output()
    held.close()
    both.migrate("--topics", "stopped")
    assert_copied(both, "stopped")


def _subscriptions(both: Both, topic: str) -> list[str]:
    return list(both.admin.subscriptions(topic))


# ------------------------------------------------------------------ what is refused
def test_messages_of_others_are_not_mixed_with_copies_unless_it_is_wanted(both: Both) -> None:
    both.fill("mixed", 0, 3)
    with both.here.create_producer("mixed") as producer:
        producer.send(b"mine")
    assert "--append" in both.migrate("--topics", "mixed", code=1).err
    both.migrate("--topics", "mixed", "--append")
    with both.here.create_producer("mixed") as producer:
        producer.send(b"mine too")
    both.fill("mixed", 3, 5)
    assert "--append" in both.migrate("--topics", "mixed", code=1).err
    both.migrate("--topics", "mixed", "--append")
    reader = both.here.create_reader("mixed", magnetar.MessageId.earliest)
    found = [reader.read_next(30_000).data() for _ in range(7)]
    assert found == [b"mine", b"0", b"1", b"2", b"mine too", b"3", b"4"]


def test_a_program_that_writes_to_the_topic_is_told(both: Both) -> None:
    both.fill("taken", 0, 3)
    both.admin.create_topic("taken")
    with both.here.create_producer("taken"):
        done = both.migrate("--topics", "taken", "--timeout", "1", code=5)
    assert "another producer" in done.err
    both.migrate("--topics", "taken")


def test_another_source_is_refused_until_it_is_said_to_be_the_same(both: Both) -> None:
    both.fill("moved", 0, 3)
    both.migrate("--topics", "moved")
    port = both.pulsar.rpartition(":")[2]
    both.pulsar, kept = f"pulsar://127.0.0.2:{port},127.0.0.1:{port}", both.pulsar
    try:
        assert "--same-source" in both.migrate("--topics", "moved", code=1).err
        both.migrate("--topics", "moved", "--same-source")
    finally:
        both.pulsar = kept
    assert len(assert_copied(both, "moved")) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--topics", "ghost"), 4, "there is no topic"),
        (("--topics", "public/default/ghost*"), 4, "no topic matches"),
        (("--topics", "non-persistent://public/default/x"), 2, "not stored"),
        (("--topics", "x-partition-1"), 2, "name persistent://public/default/x"),
        (("--topics", "x", "--from", "pulsar://127.0.0.1:1"), 1, "--from names another"),
        (("--topics", "x", "--from", "magnetar://127.0.0.1:1"), 2, "pulsar://"),
        (("--topics", "x", "--from", "nonsense"), 2, "nonsense"),
        (("--topics", "x", "--subscriptions"), 2, "--admin-url"),
        (("--topics", "x", "--admin-url", "ftp://x"), 2, "http://"),
        (("--topics", "x", "--from-token", "env:NO_SUCH_TOKEN"), 2, "NO_SUCH_TOKEN"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_an_error_with_its_code(both: Both, arguments: tuple[str, ...], code: int, text: str) -> None:
    done = both.migrate(*arguments, code=code)
    assert text in done.err
    assert "ghost" not in "".join(both.source_admin.topics()), "nothing is made at the source"


def test_what_speaks_another_protocol_is_told(both: Both) -> None:
    address = both.http.partition("://")[2]
    done = both.migrate("--topics", "x", "--from", f"pulsar://{address}", "--timeout", "3", code=1)
    assert "Pulsar's protocol" in done.err or "closed the connection" in done.err or "does not answer" in done.err


def test_deduplication_at_the_destination_is_refused(both: Both) -> None:
    both.fill("dedup", 0, 2)
    both.admin.create_topic("dedup")
    both.admin.set_topic_policies("dedup", Policies(deduplication=True))
    assert "deduplication" in both.migrate("--topics", "dedup", code=1).err
