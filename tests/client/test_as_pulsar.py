"""Where a program that was written for Pulsar's client would find another state: what each of these leaves behind."""

import asyncio
import contextlib
import enum
import gc
import signal
import threading
import time
from collections.abc import Callable

import pytest

import magnetar
from magnetar.client.client import Client
from magnetar.client.common.errors import AlreadyClosed, InvalidConfiguration, Result
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.schema import JsonSchema
from magnetar.client.model.schemas import Record, String
from magnetar.proto.errors import NotAllowed
from magnetar.proto.policies import Policies
from tests.client.consume.test_table_view import until
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

NO_POSITION = (-1, -1)


def place(message_id: MessageId) -> tuple[int, int]:
    return message_id.ledger_id(), message_id.entry_id()


# ---------------------------------------------------------------------------------- asyncio
async def test_a_delay_that_is_asked_for_gathers_asyncio_sends_until_the_flush(
    client: Client, broker: FakeBroker, /
) -> None:
    """As pulsar.asyncio: both wait for company, flush sends them as one entry, and when it returns both are done."""
    producer = await client.create_producer("t", batching_max_messages=3, batching_max_publish_delay_ms=60_000)
    tasks = [asyncio.ensure_future(producer.send(payload)) for payload in (b"0", b"1")]
    done, pending = await asyncio.wait(tasks, timeout=1, return_when=asyncio.FIRST_COMPLETED)
    assert (len(done), len(pending)) == (0, 2)
    await producer.flush()
    assert all(task.done() for task in tasks)
    first, second = (task.result() for task in tasks)
    assert place(first) == place(second)
    assert (first.batch_index(), second.batch_index()) == (0, 1)


async def test_a_producer_is_closed_once_and_says_so(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t")
    await producer.close()
    assert not producer.is_connected()
    with pytest.raises(AlreadyClosed):
        await producer.close()
    with pytest.raises(AlreadyClosed):
        await producer.send(b"x")
    async with await client.create_producer("t") as inside:
        await inside.close()  # leaving the block is no second close


# ---------------------------------------------------------------------------------- producers
class Place(Record):
    name = String()


def test_a_router_is_shown_the_value_too() -> None:
    shown: list[object] = []

    def route(message: magnetar.Message, partitions: int) -> int:
        shown.append(message.value())
        return 2

    async def body(client: Client, broker: FakeBroker) -> None:
        mode = magnetar.PartitionsRoutingMode.CustomPartition
        schema = JsonSchema(Place)
        producer = await client.create_producer(
            "parts", schema=schema, message_routing_mode=mode, message_router=route
        )
        await producer.send(Place(name="Oslo"))
        await producer.send(None)
        assert shown == [Place(name="Oslo"), None]

    simulate(body, FakeBroker({"parts": 3}))


def test_who_wants_a_topic_for_itself_and_finds_producers_is_fenced_and_who_shares_finds_it_busy(url: str) -> None:
    with magnetar.Client(url) as client:
        mode = magnetar.ProducerAccessMode
        with client.create_producer("alone", "first", access_mode=mode.Exclusive):
            with pytest.raises(magnetar.ProducerFenced, match="has producers"):
                client.create_producer("alone", access_mode=mode.Exclusive)
            with pytest.raises(magnetar.ProducerBusy):
                client.create_producer("alone")
            with pytest.raises(magnetar.ProducerFenced):  # Pulsar's broker asks for the mode before the name
                client.create_producer("alone", "first", access_mode=mode.Exclusive)
        with client.create_producer("shared"), pytest.raises(magnetar.ProducerFenced):
            client.create_producer("shared", access_mode=mode.Exclusive)


def test_who_wants_a_topic_for_itself_is_fenced_also_where_no_other_producer_may_be(url: str) -> None:
    """Pulsar's broker asks for the mode before it counts."""
    mode = magnetar.ProducerAccessMode
    with magnetar.admin.Admin(url) as admin:
        admin.create_topic("one-producer")
        admin.set_topic_policies("one-producer", Policies(max_producers=1))
    with magnetar.Client(url) as client:
        with client.create_producer("one-producer", "first", access_mode=mode.Exclusive):
            for name in ("first", "second"):
                with pytest.raises(magnetar.ProducerFenced):
                    client.create_producer("one-producer", name, access_mode=mode.Exclusive)
        with client.create_producer("one-producer"):
            with pytest.raises(magnetar.ProducerFenced):
                client.create_producer("one-producer", access_mode=mode.Exclusive)
            with pytest.raises(magnetar.ProducerBusy, match="as many as it may have"):
                client.create_producer("one-producer")
        client.create_producer("one-producer", access_mode=mode.Exclusive).close()


def test_an_exclusive_producer_that_is_dropped_has_its_topic_until_its_client_is_closed(url: str) -> None:
    """As with Pulsar's client: what a program took for itself is not given up because a variable went."""
    mode = magnetar.ProducerAccessMode
    with magnetar.Client(url) as client:
        for name in ("p1", None):
            client.create_producer("dropped-exclusive" + (name or ""), name, access_mode=mode.Exclusive)
        gc.collect()
        for name in ("p1", None):
            for other in ("p1", "p2", None):
                with pytest.raises(magnetar.ProducerFenced):
                    client.create_producer("dropped-exclusive" + (name or ""), other, access_mode=mode.Exclusive)
    with magnetar.Client(url) as client:
        client.create_producer("dropped-exclusive", "p2", access_mode=mode.Exclusive).close()
        client.create_producer("dropped-exclusive", "p2", access_mode=mode.Exclusive).close()


@pytest.mark.parametrize("end", ["close", "unsubscribe", "close a reader"])
def test_what_waits_in_a_consumer_that_is_closed_is_not_received(end: str, fake: tuple[str, FakeBroker]) -> None:
    with magnetar.Client(fake[0]) as client:
        earliest = magnetar.InitialPosition.Earliest
        with client.create_producer("closed") as producer:
            for number in range(3):
                producer.send(b"%d" % number)
        if end == "close a reader":
            reader = client.create_reader("closed", magnetar.MessageId.earliest)
            take, leave = reader.read_next, reader.close
        else:
            consumer = client.subscribe("closed", "s", initial_position=earliest)
            take, leave = consumer.receive, getattr(consumer, end)
        assert take(5000).data() == b"0"
        leave()
        for timeout_millis in (100, 0, None):
            with pytest.raises(magnetar.AlreadyClosed):
                take(timeout_millis)


@pytest.mark.parametrize("call", ["receive", "read_next", "send", "flush"])
def test_ctrl_c_in_a_blocking_call_is_pulsars_interrupted_and_a_keyboard_interrupt(
    call: str, fake: tuple[str, FakeBroker]
) -> None:
    url, broker = fake
    client = magnetar.Client(url)
    try:
        if call == "receive":
            waits: Callable[[], object] = client.subscribe("ctrl-c", "s").receive
        elif call == "read_next":
            waits = client.create_reader("ctrl-c", magnetar.MessageId.latest).read_next
        else:
            producer = client.create_producer("ctrl-c")
            broker.silent = True
            producer.send_async(b"x", lambda *_: None)
            waits = producer.flush if call == "flush" else lambda: producer.send(b"y")
        began = time.monotonic()
        threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(magnetar.Interrupted) as caught:
                waits()
        finally:
            signal.signal(signal.SIGINT, before)
            broker.silent = False
        assert isinstance(caught.value, KeyboardInterrupt)
        assert caught.value.error() == Result.Interrupted
        assert time.monotonic() - began < 30
    finally:
        with contextlib.suppress(magnetar.Timeout):  # what was sent has no receipt
            client.close(timeout=1)


def test_a_lower_sequence_id_is_dropped_with_success_and_no_position_where_publishes_are_deduplicated(
    url: str,
) -> None:
    with magnetar.admin.Admin(url) as admin:
        admin.create_topic("deduplicated")
        admin.set_topic_policies("deduplicated", Policies(deduplication=True))
    with magnetar.Client(url) as client:
        consumer = client.subscribe("deduplicated", "s")
        producer = client.create_producer("deduplicated", "p")
        assert place(producer.send(b"five", sequence_id=5)) != NO_POSITION
        assert place(producer.send(b"three", sequence_id=3)) == NO_POSITION
        assert place(producer.send(b"five again", sequence_id=5)) == NO_POSITION
        assert producer.last_sequence_id() == 5
        assert place(producer.send(b"next")) != NO_POSITION
        assert producer.last_sequence_id() == 6
        got = [consumer.receive(5000) for _ in range(2)]
        assert [(each.data(), each.sequence_id()) for each in got] == [(b"five", 5), (b"next", 6)]
        with pytest.raises(magnetar.Timeout):
            consumer.receive(200)


async def test_a_lower_sequence_id_is_stored_in_its_order_where_nothing_is_deduplicated(
    client: Client, broker: FakeBroker, /
) -> None:
    outcomes: list[Result] = []
    producer = await client.create_producer("t", batching_max_publish_delay_ms=50)
    for content, sequence_id in [(b"a", 5), (b"b", None), (b"c", 3), (b"d", 3), (b"e", None)]:
        producer.send_nowait(content, lambda result, _: outcomes.append(result), sequence_id=sequence_id)
        producer.check()
    await producer.flush()
    assert outcomes == [Result.Ok] * 5
    assert broker.received == [(5, 2), (3, 1), (3, 1), (7, 1)]


async def test_a_refusal_of_one_of_two_messages_with_one_id_is_not_that_of_the_other(
    client: Client, broker: FakeBroker, /
) -> None:
    outcomes: list[tuple[str, Result]] = []
    producer = await client.create_producer("t", batching_enabled=False)
    await producer.send(b"x", sequence_id=9)
    broker.publish_errors.append(NotAllowed("once"))
    producer.send_nowait(b"1", lambda result, _: outcomes.append(("first", result)), sequence_id=4)
    producer.send_nowait(b"2", lambda result, _: outcomes.append(("second", result)), sequence_id=4)
    await producer.flush()
    assert outcomes == [("first", Result.NotAllowedError), ("second", Result.Ok)]


# ---------------------------------------------------------------------------------- readers and tables
@pytest.mark.parametrize("to", ["latest", "time", "last"])
@pytest.mark.parametrize("batched", [True, False])
def test_after_a_seek_to_the_end_no_message_is_available_until_one_comes(url: str, to: str, batched: bool) -> None:
    topic = f"seek-{to}-{batched}"
    with magnetar.Client(url) as client:
        producer = client.create_producer(topic, batching_enabled=batched)
        client.subscribe(topic, "keep").close()
        reader = client.create_reader(topic, MessageId.earliest)
        last: list[MessageId] = []
        for _ in range(3):
            producer.send_async(b"old", lambda _result, id_: last.append(id_))
        producer.flush()
        assert reader.has_message_available()
        reader.read_next(5000)
        ends = {"latest": MessageId.latest, "time": int(time.time() * 1000) + 3_600_000, "last": last[-1]}
        reader.seek(ends[to])
        assert not reader.has_message_available()
        producer.send(b"new")
        if to != "time":  # of a time to come nothing is read before it
            assert reader.has_message_available()
            assert reader.read_next(5000).data() == b"new"
            assert not reader.has_message_available()


async def test_a_table_gives_each_value_with_and_without_an_await(url: str) -> None:
    async with Client(url) as client:
        producer = await client.create_producer("table")
        await producer.send(b"1", partition_key="a")
        view = await client.create_table_view("table")
        seen: list[tuple[str, bytes]] = []
        view.for_each(lambda key, value: seen.append((key, value)))
        assert seen == [("a", b"1")], "as Pulsar's: it was called, and has returned"

        async def slow(key: str, value: bytes) -> None:
            await asyncio.sleep(0)
            seen.append((key, value))

        await view.for_each(slow)
        assert seen == [("a", b"1")] * 2
        view.for_each_and_listen(lambda key, value: seen.append((key, value)))
        assert seen == [("a", b"1")] * 3
        await producer.send(b"2", partition_key="a")
        await until(lambda: len(seen) == 4)
        assert seen[3] == ("a", b"2")


def test_wrong_arguments_are_value_errors_and_type_errors(fake: tuple[str, FakeBroker]) -> None:
    with magnetar.Client(fake[0]) as client:
        for error in (ValueError, TypeError):
            with pytest.raises(error):
                client.create_producer("t", send_timeout_millis="soon")  # type: ignore[arg-type]
            with pytest.raises(error):
                client.subscribe("t", "s", receiver_queue_size=None)  # type: ignore[arg-type]
        view = client.create_table_view("t")
        for each in (view.for_each, view.for_each_and_listen):
            with pytest.raises(InvalidConfiguration, match="callback"):
                each(5)  # type: ignore[arg-type]
        with pytest.raises(InvalidConfiguration), client.create_reader("t", MessageId.latest) as reader:
            reader.read_next("soon")  # type: ignore[arg-type]
        with pytest.raises(TimeoutError), client.create_reader("t", MessageId.latest) as reader:
            reader.read_next(1)


async def test_a_future_is_ended_from_a_thread_as_by_pulsars_bridge() -> None:
    from magnetar.asyncio import _set_future

    loop = asyncio.get_running_loop()
    given, failed, cancelled = loop.create_future(), loop.create_future(), loop.create_future()
    cancelled.cancel()

    def callbacks() -> None:
        _set_future(given, magnetar.Result.Ok, 7)
        _set_future(given, magnetar.Result.Ok, 8)
        _set_future(failed, magnetar.Result.Timeout, None)
        _set_future(cancelled, magnetar.Result.Ok, 9)

    await asyncio.to_thread(callbacks)
    assert await given == 7
    with pytest.raises(magnetar.Timeout):
        await failed
    assert cancelled.cancelled()


class Names(str, enum.Enum):  # noqa: UP042 - that one prints its text
    """Members that are text, and print as something else."""

    TOPIC = "flights-of-an-enum"
    SUBSCRIPTION = "gates"
    PRODUCER = "tower"
    CONSUMER = "gate-1"
    KEY = "LH"
    VALUE = "123"


def test_text_of_a_subclass_is_its_text_and_not_what_it_prints(url: str) -> None:
    with magnetar.Client(url) as client:
        topic = f"persistent://public/default/{Names.TOPIC.value}"
        properties = {Names.KEY: Names.VALUE}
        producer = client.create_producer(Names.TOPIC, producer_name=Names.PRODUCER, properties=properties)
        consumer = client.subscribe(
            Names.TOPIC, Names.SUBSCRIPTION, magnetar.ConsumerType.Shared, consumer_name=Names.CONSUMER,
            properties=properties,
            dead_letter_policy=magnetar.ConsumerDeadLetterPolicy(1), negative_ack_redelivery_delay_ms=1,
        )  # fmt: skip
        told = [producer.topic(), producer.producer_name(), consumer.topic(), consumer.subscription_name(),
                consumer.consumer_name()]  # fmt: skip
        assert told == [topic, "tower", topic, "gates", "gate-1"]
        assert {type(each) for each in told} == {str}
        producer.send(b"1", properties=properties, partition_key=Names.KEY, ordering_key=Names.KEY)
        with client.subscribe(f"{topic}-gates-DLQ", "dead") as dead:
            for _ in range(2):
                found = consumer.receive(5000)
                consumer.negative_acknowledge(found)
            assert (found.partition_key(), found.ordering_key(), found.properties()) == ("LH", "LH", {"LH": "123"})
            assert dead.receive(5000).data() == b"1"
        with client.create_reader(Names.TOPIC, MessageId.earliest, subscription_role_prefix=Names.CONSUMER) as reader:
            assert reader.topic() == topic
            assert reader.read_next(5000).data() == b"1"
        assert client.get_topic_partitions(Names.TOPIC) == [topic]
        assert client.create_producer(Names.TOPIC.value).topic() == topic, "the name is not remembered as another"
