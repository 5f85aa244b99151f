"""Wrong arguments of every public parameter: refused at the border, typed, and nothing was sent or made."""

from __future__ import annotations

import asyncio
import inspect
import math
import re
import threading
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pytest

import magnetar
from magnetar.client import aio
from magnetar.client.blocking import client as blocking
from magnetar.client.client import Client
from magnetar.client.common.errors import PulsarException
from magnetar.client.model import options
from magnetar.client.model.schema import BytesSchema, Schema
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

HIGH = "\ud800"  # half a character: no codec takes it
MessageId = magnetar.MessageId
ID = MessageId(-1, 7, 0, 0)


class WrongSchema(Schema):
    def __init__(self, makes: Any) -> None:
        super().__init__(object, "wrong")
        self.makes = makes

    def encode(self, value: Any) -> Any:
        if isinstance(self.makes, Exception):
            raise self.makes
        return self.makes


PRODUCER: list[dict[str, Any]] = [
    {"topic": 5}, {"topic": None}, {"topic": b"t"}, {"topic": ""}, {"topic": "a/b"}, {"topic": HIGH}, {"topic": ["t"]},
    {"producer_name": 5}, {"producer_name": HIGH}, {"schema": BytesSchema}, {"schema": "bytes"},
    {"initial_sequence_id": "1"}, {"initial_sequence_id": 2**63}, {"initial_sequence_id": -2},
    {"send_timeout_millis": None}, {"send_timeout_millis": -1}, {"send_timeout_millis": 1.5},
    {"send_timeout_millis": 10**30}, {"compression_type": 9}, {"compression_type": "LZ4"}, {"compression_type": None},
    {"max_pending_messages": -1}, {"max_pending_messages": "10"}, {"max_pending_messages": True},
    {"max_pending_messages_across_partitions": -1}, {"block_if_queue_full": "yes"}, {"batching_enabled": 1},
    {"batching_max_messages": 0}, {"batching_max_allowed_size_in_bytes": 1 << 40},
    {"batching_max_publish_delay_ms": -5}, {"batching_max_publish_delay_ms": math.nan}, {"chunking_enabled": None},
    {"chunking_enabled": True, "batching_enabled": True}, {"message_routing_mode": 1},
    {"message_routing_mode": magnetar.PartitionsRoutingMode.CustomPartition},
    {"lazy_start_partitioned_producers": "x"}, {"properties": {"a": 1}}, {"properties": {HIGH: "b"}},
    {"properties": [("a", "b")]}, {"batching_type": 0}, {"access_mode": "x"}, {"access_mode": 1},
    {"message_router": 5}, {"initial_subscription_name": 5},
]  # fmt: skip
SUBSCRIBE: list[dict[str, Any]] = [
    {"topic": 5}, {"topic": None}, {"topic": []}, {"topic": ["t", 5]}, {"topic": b"t"}, {"topic": {"t": 1}},
    {"topic": re.compile(b"t")}, {"topic": "(", "is_pattern_topic": True}, {"topic": re.compile("a b/c/d")},
    {"subscription_name": None}, {"subscription_name": 5}, {"subscription_name": ""}, {"subscription_name": HIGH},
    {"consumer_type": "shared"}, {"consumer_type": 1}, {"schema": 5}, {"receiver_queue_size": -1},
    {"receiver_queue_size": 2**31}, {"receiver_queue_size": "10"}, {"receiver_queue_size": None},
    {"max_total_receiver_queue_size_across_partitions": -1}, {"consumer_name": 5}, {"consumer_name": HIGH},
    {"unacked_messages_timeout_ms": 100}, {"unacked_messages_timeout_ms": 10000.5},
    {"unacked_messages_timeout_ms": 2**70}, {"negative_ack_redelivery_delay_ms": -1},
    {"negative_ack_redelivery_delay_ms": 2**70}, {"is_read_compacted": "x"}, {"properties": {"a": 1}},
    {"properties": "x"}, {"initial_position": "earliest"}, {"initial_position": 1}, {"max_pending_chunked_message": -1},
    {"auto_ack_oldest_chunked_message_on_queue_full": 1}, {"start_message_id_inclusive": None},
    {"batch_receive_policy": 5}, {"key_shared_policy": 5}, {"dead_letter_policy": 5}, {"is_pattern_topic": 1},
    {"regex_subscription_mode": 0}, {"crypto_failure_action": 0}, {"negative_ack_redelivery_backoff": 1000},
    {"ack_timeout_redelivery_backoff": magnetar.MultiplierRedeliveryBackoff}, {"ack_receipt_enabled": 2},
    {"enable_retry": "x"}, {"priority_level": -1}, {"priority_level": "1"}, {"consumer_event_listener": print},
    {"consumer_type": magnetar.ConsumerType.Exclusive, "enable_retry": True},
    {"consumer_type": magnetar.ConsumerType.Shared, "is_read_compacted": True},
]  # fmt: skip
READER: list[dict[str, Any]] = [
    {"topic": 5}, {"topic": "a/b"}, {"start_message_id": "earliest"}, {"start_message_id": None},
    {"start_message_id": 5}, {"schema": 5}, {"receiver_queue_size": -1}, {"reader_name": 5},
    {"subscription_role_prefix": 5}, {"subscription_role_prefix": HIGH}, {"is_read_compacted": 1},
    {"start_message_id_inclusive": "x"},
]  # fmt: skip
TABLE_VIEW: list[dict[str, Any]] = [{"topic": 5}, {"subscription_name": 5}, {"subscription_name": ""}, {"schema": 5}]
SEND: list[dict[str, Any]] = [
    {"content": "text"}, {"content": 5}, {"properties": {"a": 1}}, {"properties": {1: "a"}},
    {"properties": {"a": HIGH}}, {"properties": [("a", "b")]}, {"properties": 0}, {"partition_key": 5},
    {"partition_key": b"k"}, {"partition_key": HIGH}, {"partition_key": 0}, {"ordering_key": b"k"},
    {"ordering_key": HIGH}, {"sequence_id": 2**64}, {"sequence_id": 1.5}, {"sequence_id": -1}, {"sequence_id": "1"},
    {"sequence_id": True},
    {"replication_clusters": "all"}, {"replication_clusters": [5]}, {"disable_replication": "x"},
    {"event_timestamp": 1.5}, {"event_timestamp": -1}, {"event_timestamp": 2**64}, {"event_timestamp": "now"},
    {"event_timestamp": 0.0}, {"deliver_at": 1.5}, {"deliver_at": -1}, {"deliver_at": 2**63}, {"deliver_at": "now"},
    {"deliver_after": 5}, {"deliver_after": timedelta(-1)}, {"deliver_after": timedelta.max},
]  # fmt: skip
CLIENT: list[dict[str, Any]] = [
    {"service_url": 5}, {"service_url": ""}, {"service_url": "ftp://x"}, {"authentication": "token"},
    {"operation_timeout_seconds": 0}, {"operation_timeout_seconds": "30"}, {"operation_timeout_seconds": math.inf},
    {"operation_timeout_seconds": math.nan}, {"io_threads": 0}, {"io_threads": "1"}, {"message_listener_threads": 0},
    {"concurrent_lookup_requests": -1}, {"stats_interval_in_seconds": -1}, {"use_tls": "no"},
    {"connection_timeout_ms": 0}, {"connection_timeout_ms": "10"}, {"listener_name": 5}, {"log_conf_file_path": 5},
]  # fmt: skip
ACKNOWLEDGED: list[Any] = [
    None, 5, "x", b"x", {}, [ID, None], [5], (ID, "x"), MessageId.earliest, MessageId.latest, MessageId(-1, 7, 2**32),
    MessageId(-1, 7, 0, 2**31 - 1), MessageId(-1, -1, 5),
]  # fmt: skip
SEEK: list[Any] = [None, "earliest", 1.5, -1, True, 2**63, MessageId(-1, 7, 2**63 - 1), b"x", timedelta(1)]
MADE: list[Callable[[], object]] = [
    lambda: MessageId("1"), lambda: MessageId(-2), lambda: MessageId(0, 2**63), lambda: MessageId(0, 1.5),
    lambda: MessageId(0, 0, 0, 2**31), lambda: MessageId(True), lambda: MessageId(ledger_id=None),
    lambda: MessageId.deserialize("x"), lambda: MessageId.deserialize(None), lambda: MessageId.deserialize(b"\xff"),
    lambda: MessageId.deserialize(b""), lambda: MessageId.deserialize(ID.serialize(), 5), lambda: MessageId.parse(5),
    lambda: MessageId.parse("x"), lambda: MessageId.parse("1:2:3:99999999999"),
    lambda: MessageId.parse("1:2:-5"), lambda: MessageId.parse("1:2:0:-7"),
    lambda: magnetar.ConsumerBatchReceivePolicy("1"), lambda: magnetar.ConsumerBatchReceivePolicy(timeout_ms=None),
    lambda: magnetar.ConsumerBatchReceivePolicy(0, 0, 0), lambda: magnetar.ConsumerDeadLetterPolicy(0),
    lambda: magnetar.ConsumerDeadLetterPolicy("3"), lambda: magnetar.ConsumerDeadLetterPolicy(3, 5),
    lambda: magnetar.ConsumerDeadLetterPolicy(3, None, 5), lambda: magnetar.ConsumerKeySharedPolicy("Sticky"),
    lambda: magnetar.ConsumerKeySharedPolicy(magnetar.KeySharedMode.Sticky),
    lambda: magnetar.ConsumerKeySharedPolicy(magnetar.KeySharedMode.Sticky, False, [1, 2]),
    lambda: magnetar.ConsumerKeySharedPolicy(magnetar.KeySharedMode.Sticky, False, [("a", "b")]),
    lambda: magnetar.ConsumerKeySharedPolicy(magnetar.KeySharedMode.Sticky, "x", [(0, 1)]),
    lambda: magnetar.MultiplierRedeliveryBackoff("1"), lambda: magnetar.MultiplierRedeliveryBackoff(multiplier=0.5),
    lambda: magnetar.MultiplierRedeliveryBackoff(1000, 10), lambda: magnetar.MultiplierRedeliveryBackoff(True),
    lambda: magnetar.MultiplierRedeliveryBackoff(1.0), lambda: magnetar.MultiplierRedeliveryBackoff(multiplier=True),
    lambda: magnetar.MultiplierRedeliveryBackoff(multiplier=Decimal(2)),
]  # fmt: skip
TIMEOUTS: list[Any] = ["1", 1.5, -1, True, 2**70]


def refused(error: BaseException) -> bool:
    return isinstance(error, ValueError | TypeError) and isinstance(error, PulsarException) and bool(str(error))


def test_every_parameter_has_a_row_or_says_why_not() -> None:
    """So a parameter that is added is checked."""
    elsewhere = {"self", "topic", "authentication", "service_url", "logger", "batch_receive_policy", "world"}
    elsewhere |= {"tracing", "hooks"}
    tables = {"__init__": options.checks.CLIENT_CHECKS, "create_producer": options.PRODUCER_CHECKS,
    "subscribe": options.CONSUMER_CHECKS,
              "create_reader": options.READER_CHECKS, "create_table_view": options.READER_CHECKS}  # fmt: skip
    for face in (aio.Client, blocking.Client):
        for method, table in tables.items():
            names = set(inspect.signature(getattr(face, method)).parameters)
            assert names - elsewhere <= set(table), method
    said = set(inspect.signature(blocking.Producer.send_async).parameters)
    assert said - {"self", "content", "txn"} <= set(options.checks.MESSAGE_CHECKS)


@pytest.mark.parametrize("wrong", CLIENT, ids=str)
@pytest.mark.parametrize("face", [aio.Client, blocking.Client])
def test_a_client_is_not_made(face: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(PulsarException) as caught:
        face(**{"service_url": "magnetar://localhost", **wrong})
    assert refused(caught.value) or caught.type in (magnetar.InvalidUrl, magnetar.InvalidConfiguration)


@pytest.mark.parametrize("make", MADE)
def test_an_id_or_a_policy_is_not_made(make: Callable[[], object]) -> None:
    with pytest.raises(PulsarException) as caught:
        make()
    assert refused(caught.value)


def test_an_id_is_before_no_number() -> None:
    with pytest.raises(TypeError):
        assert ID < 5


def test_an_application_derives_its_own_back_off() -> None:
    class Patient(magnetar.MultiplierRedeliveryBackoff):
        def next(self, redelivery_count: int) -> int:
            return 10 * super().next(redelivery_count)

    assert Patient(1, 100).next(2) == 40


def calls(client: Any, consumer: Any, reader: Any, producer: Any, message: Any) -> list[tuple[str, Callable[[], Any]]]:
    """Of both faces: what each wrong argument is given to."""
    found: list[tuple[str, Callable[[], Any]]] = []

    def add(what: str, call: Callable[..., Any], *given: Any, **named: Any) -> None:
        found.append((f"{what}({given}, {named})"[:200], lambda: call(*given, **named)))

    for wrong in PRODUCER:
        add("create_producer", client.create_producer, **{"topic": "new", **wrong})
    for wrong in SUBSCRIBE:
        if isinstance(client, blocking.Client) and "is_pattern_topic" in wrong:
            continue
        add("subscribe", client.subscribe, **{"topic": "new", "subscription_name": "s", **wrong})
    for wrong in READER:
        add("create_reader", client.create_reader, **{"topic": "new", "start_message_id": MessageId.earliest, **wrong})
    for wrong in TABLE_VIEW:
        add("create_table_view", client.create_table_view, **{"topic": "new", **wrong})
    add("get_topic_partitions", client.get_topic_partitions, 5)
    for wrong in SEND:
        add("send", producer.send, **{"content": b"x", **wrong})
    for which in ACKNOWLEDGED:
        add("acknowledge", consumer.acknowledge, which)
        if not isinstance(which, list | tuple):
            add("acknowledge_cumulative", consumer.acknowledge_cumulative, which)
            add("negative_acknowledge", consumer.negative_acknowledge, which)
    for to in SEEK:
        add("consumer.seek", consumer.seek, to)
        add("reader.seek", reader.seek, to)
    for timeout in TIMEOUTS[:-1]:  # a message waits for the reader
        add("receive", consumer.receive, timeout)
        add("read_next", reader.read_next, timeout)
    add("reconsume_later", consumer.reconsume_later, ID, timedelta(1))
    add("reconsume_later", consumer.reconsume_later, message, 5)
    add("reconsume_later", consumer.reconsume_later, message, timedelta(1), {"a": 1})
    return found


def unmade(broker: FakeBroker) -> bool:
    return all(name.endswith("/t") for name in broker.topics)


def test_the_asyncio_face_refuses_each_at_once_and_sends_nothing() -> None:
    wrong: list[str] = []

    async def body(client: Client, broker: FakeBroker) -> None:
        consumer = await client.subscribe("t", "s")
        reader = await client.create_reader("t", MessageId.latest)
        producer = await client.create_producer("t")
        await producer.send(b"one")
        message = await consumer.receive(1000)
        stored = len(broker.received)
        every = calls(client, consumer, reader, producer, message)
        every += [(f"send_nowait {each}", lambda each=each: producer.send_nowait(**{"content": b"x", **each}))
                  for each in [*SEND, {"callback": 5}]]  # fmt: skip
        assert len(every) > 200
        for what, call in every:
            try:
                async with asyncio.timeout(5):
                    outcome = call()
                    if inspect.isawaitable(outcome):
                        await outcome
                wrong.append(f"{what} passed")
            except TimeoutError:
                wrong.append(f"{what} hung")
            except Exception as error:
                if not refused(error):
                    wrong.append(f"{what} raised {error!r}")
        async with asyncio.timeout(5):
            await producer.flush()
            await producer.send(b"after")
            await consumer.acknowledge(message)
        assert len(broker.received) == stored + 1
        assert unmade(broker)

    simulate(body)
    assert not wrong, "\n".join(wrong)


def test_the_blocking_face_refuses_each_at_once_and_sends_nothing(fake: tuple[str, FakeBroker]) -> None:
    url, broker = fake
    wrong: list[str] = []

    def all_of_them() -> None:
        for what, call in every:
            at.append(what)
            try:
                call()
                wrong.append(f"{what} passed")
            except Exception as error:
                if not refused(error):
                    wrong.append(f"{what} raised {error!r}")
        producer.flush()
        producer.send(b"after")
        at.append("")

    at: list[str] = []
    with magnetar.Client(url) as client:
        consumer = client.subscribe("t", "s")
        reader = client.create_reader("t", MessageId.latest)
        producer = client.create_producer("t")
        producer.send(b"one")
        message = consumer.receive(5000)
        stored = len(broker.received)
        every = calls(client, consumer, reader, producer, message)
        for each in [*SEND, {"callback": 5}]:
            given = {"content": b"x", "callback": None, **each}
            every.append((f"send_async {each}", lambda given=given: producer.send_async(**given)))
        every += [
            ("listener", lambda: client.subscribe("new", "s", message_listener=5)),
            ("period", lambda: client.subscribe("new", "s", pattern_auto_discovery_period=-1)),
            ("reader listener", lambda: client.create_reader("new", MessageId.earliest, reader_listener=5)),
        ]
        threads = threading.active_count()
        working = threading.Thread(target=all_of_them, daemon=True)
        working.start()
        working.join(60)
        assert not working.is_alive(), f"{at[-1]} hangs"
        assert len(broker.received) == stored + 1
        assert unmade(broker)
        assert threading.active_count() == threads
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("makes", ["text", None, ValueError("on purpose"), KeyError("on purpose")], ids=repr)
@pytest.mark.run_by.with_args(simulate)
async def test_a_schema_that_fails_or_gives_no_bytes_is_the_callers_error(
    client: Client, broker: FakeBroker, /, makes: Any
) -> None:
    producer = await client.create_producer("t", schema=WrongSchema(makes))
    with pytest.raises(magnetar.InvalidMessage) as caught:
        await asyncio.wait_for(producer.send(object()), 5)
    assert refused(caught.value)
    with pytest.raises(magnetar.InvalidMessage) as caught:
        producer.send_nowait(object())
    assert refused(caught.value)
    async with asyncio.timeout(5):
        await producer.close()


@pytest.mark.parametrize("gives", [1.5, -5, None, "x", 2**80, ZeroDivisionError()], ids=repr)
def test_a_back_off_of_the_application_that_fails_costs_nobody_a_message(gives: Any) -> None:
    class BackOff:
        def next(self, redelivery_count: int) -> Any:
            if isinstance(gives, Exception):
                raise gives
            return gives

    async def body(client: Client, broker: FakeBroker) -> None:
        consumer = await client.subscribe(
            "t", "s", negative_ack_redelivery_backoff=BackOff(), negative_ack_redelivery_delay_ms=1000
        )
        producer = await client.create_producer("t")
        await producer.send(b"one")
        message = await consumer.receive(1000)
        await consumer.negative_acknowledge(message)
        if gives != 2**80:
            again = await consumer.receive(60_000)
            assert again.redelivery_count() == 1
        await producer.send(b"two")
        assert (await consumer.receive(1000)).data() == b"two"

    simulate(body)
