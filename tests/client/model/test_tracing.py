"""Spans of a client: what is traced, what a message carries, and what ends a span. OpenTelemetry's SDK keeps them."""

import asyncio
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

import magnetar
from magnetar.client.client import Client
from magnetar.client.model.tracing import Tracing
from magnetar.client.transactions.process import process
from tests.client.fake_broker import FakeBroker
from tests.client.fake_transactions import TransactionalBroker
from tests.client.model.keys import Keys
from tests.client.simulated import simulate

trace = pytest.importorskip("opentelemetry.trace")
export = pytest.importorskip("opentelemetry.sdk.trace.export")
memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
sampling = pytest.importorskip("opentelemetry.sdk.trace.sampling")

TOPIC = "persistent://public/default/t"
EARLIEST = magnetar.InitialPosition.Earliest
SETTLED = "messaging.pulsar.acknowledgment.type"
REMOTE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Recorded:
    """A tracer provider, and the spans that it has ended."""

    def __init__(self, sampler: Any = None) -> None:
        self.exporter = memory.InMemorySpanExporter()
        self.provider = sdk.TracerProvider(sampler=sampler)
        self.provider.add_span_processor(export.SimpleSpanProcessor(self.exporter))
        self.tracer = self.provider.get_tracer("program")

    def all(self, start: str = "") -> list[Any]:
        return [span for span in self.exporter.get_finished_spans() if span.name.startswith(start)]

    def one(self, start: str) -> Any:
        [found] = self.all(start)
        return found


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


def parent(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


async def pair(client: Client, topic: str = "t", **options: Any) -> tuple[Any, Any]:
    consumer = await client.subscribe(topic, "s", initial_position=EARLIEST, **options)
    return consumer, await client.create_producer(topic)


# ---------------------------------------------------------------------------------------------------- what is traced
def test_a_send_is_a_child_of_the_current_span_and_the_process_span_links_to_it(recorded: Recorded) -> None:
    tracing = Tracing(recorded.provider)

    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client)
        with recorded.tracer.start_as_current_span("order") as order:
            id_ = await producer.send(b"x", properties={"a": "b"})
        message = await consumer.receive()
        send = recorded.one("send")
        assert message.properties() == {"a": "b", "traceparent": parent(send)}
        assert (send.name, send.kind, send.parent.span_id) == (
            f"send {TOPIC}", trace.SpanKind.PRODUCER, order.get_span_context().span_id
        )  # fmt: skip
        assert dict(send.attributes) == {
            "messaging.system": "pulsar", "messaging.operation.name": "send", "messaging.operation.type": "send",
            "messaging.destination.name": TOPIC, "messaging.message.id": str(id_),
        }  # fmt: skip
        with tracing.processing(message) as span, recorded.tracer.start_as_current_span("work"):
            assert span.is_recording()
            await producer.send(b"follows")
        assert not recorded.all("process"), "until it is acknowledged"
        await consumer.acknowledge(message)
        done = recorded.one("process")
        assert (done.name, done.kind, done.parent) == (f"process {TOPIC}", trace.SpanKind.CONSUMER, None)
        assert [link.context.span_id for link in done.links] == [send.get_span_context().span_id]
        assert dict(done.attributes) == {
            "messaging.system": "pulsar", "messaging.operation.name": "process",
            "messaging.operation.type": "process", "messaging.destination.name": TOPIC,
            "messaging.destination.subscription.name": "s", "messaging.message.id": str(message.message_id()),
            SETTLED: "acknowledge",
        }  # fmt: skip
        assert recorded.one("work").parent.span_id == done.get_span_context().span_id
        assert recorded.all("send")[1].parent.span_id == recorded.one("work").get_span_context().span_id

    simulate(body, tracing=tracing)
    assert tracing.statistics() == {"open_spans": 0, "not_traced": 0}


@pytest.mark.parametrize("every", [False, True])
def test_without_a_current_span_nothing_is_traced_unless_every_message_is(recorded: Recorded, every: bool) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client)
        await producer.send(b"x")
        producer.send_nowait(b"y", partition_key="k")
        await producer.flush()
        messages = [await consumer.receive() for _ in range(2)]
        assert [bool(each.properties()) for each in messages] == [every] * 2
        await consumer.acknowledge(messages)

    simulate(body, tracing=Tracing(recorded.provider, every_message=every))
    expected = ["send", "send", "process", "process"] if every else []
    assert [span.name.split()[0] for span in recorded.all()] == expected


def test_a_client_that_does_not_trace_adds_nothing(recorded: Recorded) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client)
        with recorded.tracer.start_as_current_span("order"):
            await producer.send(b"x", properties={"a": "b"})
            message = await consumer.receive()
            await consumer.acknowledge(message)
        assert message.properties() == {"a": "b"}

    simulate(body)
    assert [span.name for span in recorded.all()] == ["order"]


def test_what_the_sampler_drops_carries_no_context() -> None:
    dropped = Recorded(sampling.ALWAYS_OFF)

    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client)
        with dropped.tracer.start_as_current_span("order"):
            await producer.send(b"x")
        message = await consumer.receive()
        assert message.properties() == {}
        await consumer.acknowledge(message)

    tracing = Tracing(dropped.provider, every_message=True)
    simulate(body, tracing=tracing)
    assert (dropped.all(), tracing.statistics()["open_spans"]) == ([], 0)


def test_a_context_that_is_there_stays_and_is_linked(recorded: Recorded) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client)
        given = {"traceparent": REMOTE, "tracestate": "shop=7"}
        with recorded.tracer.start_as_current_span("relay"):
            await producer.send(b"x", properties=given)
        message = await consumer.receive()
        assert message.properties() == given
        await consumer.acknowledge(message)
        for span in (recorded.one("send"), recorded.one("process")):
            [link] = span.links
            assert f"{link.context.trace_id:032x}-{link.context.span_id:016x}" == REMOTE[3:-3]
            assert (link.context.is_remote, link.context.trace_state.get("shop")) == (True, "7")
        assert recorded.one("send").kind is trace.SpanKind.CLIENT

    simulate(body, tracing=Tracing(recorded.provider))


@pytest.mark.parametrize(
    ("properties", "traced"),
    [
        ({"messaging.trace_parent": REMOTE}, True),  # of DotPulsar
        ({"traceparent": REMOTE[:-1] + "0"}, False),  # not sampled
        ({"traceparent": "00-wrong"}, False),
        ({"tracestate": "shop=7"}, False),
    ],
)  # fmt: skip
def test_a_received_message_is_traced_if_its_context_is_sampled(
    recorded: Recorded, properties: dict[str, str], traced: bool
) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client)
        await producer.send(b"x", properties=properties)
        message = await consumer.receive()
        assert message.properties() == properties
        await consumer.acknowledge(message)

    simulate(body, tracing=Tracing(recorded.provider))
    assert [len(span.links) for span in recorded.all("process")] == ([1] if traced else [])


def test_each_message_of_a_batch_has_its_own_context(recorded: Recorded) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client)
        with recorded.tracer.start_as_current_span("order"):
            await producer.send_many([b"%d" % number for number in range(5)], properties={"a": "b"})
        messages: list[Any] = []
        while len(messages) < 5:
            messages += await consumer.batch_receive()
        assert len({each.entry.position for each in messages}) == 1, "they are one entry"
        assert {each.properties()["traceparent"] for each in messages} == {parent(s) for s in recorded.all("send")}
        await consumer.acknowledge(messages[0].message_id())
        assert len(recorded.all("process")) == 1
        whole = messages[0].message_id()
        await consumer.acknowledge(magnetar.MessageId(-1, whole.ledger_id(), whole.entry_id(), -1))
        assert len(recorded.all("process")) == 5

    simulate(body, tracing=Tracing(recorded.provider))


def test_of_too_many_open_spans_the_rest_is_counted_and_carries_the_current_context(recorded: Recorded) -> None:
    tracing = Tracing(recorded.provider, open_spans_max=2)

    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client)
        with recorded.tracer.start_as_current_span("order") as order:
            await producer.send_many([b"%d" % number for number in range(5)])
        messages = [await consumer.receive() for _ in range(5)]
        assert len(recorded.all("send")) == 2
        assert [each.properties()["traceparent"] for each in messages[2:]] == [parent(order)] * 3
        assert tracing.statistics() == {"open_spans": 2, "not_traced": 6}
        await consumer.acknowledge(messages)
        assert tracing.statistics() == {"open_spans": 0, "not_traced": 6}
        with recorded.tracer.start_as_current_span("order"):
            await producer.send(b"again")
        assert len(recorded.all("send")) == 3

    simulate(body, tracing=tracing)


def test_readers_and_table_views_trace_nothing_as_they_settle_nothing(recorded: Recorded) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t")
        await producer.send(b"x", partition_key="k")
        reader = await client.create_reader("t", magnetar.MessageId.earliest)
        assert "traceparent" in (await reader.read_next()).properties()
        async with await client.create_table_view("t") as view:
            assert view.get("k") == b"x"

    simulate(body, tracing=Tracing(recorded.provider, every_message=True))
    assert [span.name for span in recorded.all()] == [f"send {TOPIC}"]


# -------------------------------------------------------------------------------------------------- what ends a span
def test_a_cumulative_acknowledgement_ends_all_up_to_it(recorded: Recorded) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client)
        await producer.send_many([b"%d" % number for number in range(4)])
        await producer.send_many([b"%d" % number for number in range(4)])
        messages = [await consumer.receive() for _ in range(8)]
        await consumer.acknowledge_cumulative(messages[5])
        ended = [span.attributes["messaging.message.id"] for span in recorded.all("process")]
        assert ended == [str(each.message_id()) for each in messages[:6]]
        assert {span.attributes[SETTLED] for span in recorded.all("process")} == {"cumulative_acknowledge"}
        await consumer.acknowledge_cumulative(messages[7].message_id())
        assert len(recorded.all("process")) == 8

    simulate(body, tracing=Tracing(recorded.provider, every_message=True))


def test_a_negative_acknowledgement_is_no_error_and_the_next_delivery_has_its_own_span(recorded: Recorded) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client, negative_ack_redelivery_delay_ms=100)
        await producer.send(b"x")
        await consumer.negative_acknowledge(await consumer.receive())
        await consumer.acknowledge(await consumer.receive())

    simulate(body, tracing=Tracing(recorded.provider, every_message=True))
    spans = recorded.all("process")
    assert [span.attributes[SETTLED] for span in spans] == ["negative_acknowledge", "acknowledge"]
    assert [span.status.status_code for span in spans] == [trace.StatusCode.UNSET] * 2
    assert len({span.get_span_context().span_id for span in spans}) == 2
    assert len({span.links[0].context.span_id for span in spans}) == 1


def test_what_is_not_acknowledged_in_time_ends_its_span(recorded: Recorded) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client, unacked_messages_timeout_ms=10_000)
        await producer.send(b"x")
        first = await consumer.receive()
        again = await consumer.receive()
        assert again.message_id() == first.message_id()
        await consumer.acknowledge(again)

    simulate(body, tracing=Tracing(recorded.provider, every_message=True))
    assert [span.attributes[SETTLED] for span in recorded.all("process")] == ["ack_timeout", "acknowledge"]


@pytest.mark.parametrize("how", ["close", "shutdown", "redeliver", "seek", "consumer"])
def test_no_span_stays_open_of_what_cannot_be_settled_any_more(recorded: Recorded, how: str) -> None:
    tracing = Tracing(recorded.provider, every_message=True)

    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client)
        await producer.send_many([b"%d" % number for number in range(3)])
        for _ in range(3):
            await consumer.receive()
        assert tracing.statistics()["open_spans"] == 3
        if how == "redeliver":
            consumer.redeliver_unacknowledged_messages()
        elif how == "seek":
            await consumer.seek(magnetar.MessageId.earliest)
        elif how == "consumer":
            await consumer.close()
        elif how == "shutdown":
            client.shutdown()
        else:
            await client.close()
        assert tracing.statistics()["open_spans"] == 0

    simulate(body, tracing=tracing)
    assert [SETTLED in span.attributes for span in recorded.all("process")] == [False] * 3


@pytest.mark.parametrize("receipt", [False, True])
def test_a_durable_or_transactional_acknowledgement_ends_the_span_too(recorded: Recorded, receipt: bool) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client, ack_receipt_enabled=receipt)
        await producer.send(b"x")
        message = await consumer.receive()
        if receipt:
            await consumer.acknowledge(message)
        else:
            async with client.transaction() as txn:
                await consumer.acknowledge(message, txn=txn)
                await producer.send(b"y", txn=txn)

    simulate(body, TransactionalBroker(), tracing=Tracing(recorded.provider, every_message=True))
    assert recorded.one("process").attributes[SETTLED] == "acknowledge"
    assert len(recorded.all("send")) == (1 if receipt else 2)


def test_a_refused_or_failed_send_is_an_error(recorded: Recorded) -> None:
    tracing = Tracing(recorded.provider, every_message=True)

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", max_pending_messages=1)
        with pytest.raises(magnetar.MessageTooBig):
            await producer.send(b"x" * (16 << 20))
        producer.send_nowait(b"waits")
        producer.abort()
        with pytest.raises(magnetar.AlreadyClosed):
            await producer.send(b"late")

    simulate(body, tracing=tracing)
    errors = [span.attributes["error.type"] for span in recorded.all()]
    assert errors == ["MessageTooBig", "AlreadyClosed", "AlreadyClosed"]
    assert {span.status.status_code for span in recorded.all()} == {trace.StatusCode.ERROR}
    assert tracing.statistics()["open_spans"] == 0


def test_a_send_that_waits_for_room_has_one_span(recorded: Recorded) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", max_pending_messages=2, block_if_queue_full=True)
        await asyncio.gather(*(producer.send(b"%d" % number) for number in range(20)))

    simulate(body, tracing=Tracing(recorded.provider, every_message=True))
    assert len(recorded.all("send")) == 20
    assert not [span for span in recorded.all() if "error.type" in span.attributes]


def test_an_error_in_the_block_is_that_of_the_span(recorded: Recorded) -> None:
    tracing = Tracing(recorded.provider, every_message=True)

    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await pair(client)
        await producer.send(b"x")
        message = await consumer.receive()
        with pytest.raises(ZeroDivisionError), tracing.processing(message):
            1 / 0  # noqa: B018
        await consumer.negative_acknowledge(message)
        with tracing.processing(message) as nothing:
            assert not nothing.is_recording(), "it is settled"

    simulate(body, tracing=tracing)
    done = recorded.one("process")
    assert (done.attributes["error.type"], done.attributes[SETTLED]) == ("ZeroDivisionError", "negative_acknowledge")
    assert done.status.status_code is trace.StatusCode.ERROR
    assert [event.name for event in done.events] == ["exception"]


# --------------------------------------------------------------------------------------------------------- the others
def test_process_calls_the_function_in_the_span_and_its_outputs_are_children(recorded: Recorded) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        consumer, producer = await client.subscribe("in", "s", initial_position=EARLIEST), None
        async with await client.create_producer("in") as source:
            await source.send_many([b"1", b"2"], properties={"traceparent": REMOTE})
        producer = await client.create_producer("out")

        def double(message: Any) -> bytes:
            with recorded.tracer.start_as_current_span("double"):
                return bytes(message.data() * 2)

        statistics = await process(consumer, producer, double, idle_timeout_ms=1000)
        assert (statistics.received, statistics.sent) == (2, 2)

    simulate(body, TransactionalBroker(), tracing=Tracing(recorded.provider))
    spans = {span.get_span_context().span_id for span in recorded.all("process")}
    assert len(spans) == 2
    assert {span.parent.span_id for span in recorded.all("double")} == spans
    assert {span.parent.span_id for span in recorded.all("send")} == spans


def test_inject_gives_the_current_context_to_what_is_sent_later(recorded: Recorded) -> None:
    tracing = Tracing(recorded.provider)
    assert tracing.inject() is None
    with recorded.tracer.start_as_current_span("order") as order:
        assert tracing.inject({"a": "b"}) == {"a": "b", "traceparent": parent(order)}
        assert tracing.inject({"traceparent": REMOTE}) == {"traceparent": REMOTE}


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(magnetar.InvalidConfiguration):
        magnetar.Tracing(5)  # type: ignore[arg-type]
    with pytest.raises(magnetar.InvalidConfiguration):
        magnetar.Tracing(open_spans_max=0)
    with pytest.raises(magnetar.InvalidConfiguration):
        magnetar.Client("magnetar://localhost", tracing="all")  # type: ignore[arg-type]


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry", None)
    with pytest.raises(magnetar.OperationNotSupported, match=r"magnetar\[otel\]"):
        magnetar.Tracing()


# ---------------------------------------------------------------------------------------------------- a real broker
@pytest.fixture
def traced(url: str, recorded: Recorded) -> Iterator[magnetar.Client]:
    with magnetar.Client(url, tracing=magnetar.Tracing(recorded.provider)) as client:
        yield client


def test_blocking_sends_and_listeners_are_traced_in_the_programs_threads(
    traced: magnetar.Client, recorded: Recorded
) -> None:
    seen, done = list[Any](), threading.Event()

    def listen(consumer: Any, message: Any) -> None:
        seen.append(trace.get_current_span().get_span_context().span_id)
        consumer.acknowledge(message)
        if len(seen) == 3:
            done.set()

    listening = traced.subscribe("threads", "s", message_listener=listen)
    producer = traced.create_producer("threads", batching_enabled=True)
    with recorded.tracer.start_as_current_span("order"):
        producer.send(b"1")
        producer.send_async(b"2", None)
        producer.send_many([b"3"])
    assert done.wait(20)
    listening.close()
    assert [span.get_span_context().span_id for span in recorded.all("process")] == seen
    assert {span.parent.span_id for span in recorded.all("send")} == {recorded.one("order").get_span_context().span_id}


def test_blocking_receive_and_batch_receive(traced: magnetar.Client, recorded: Recorded) -> None:
    consumer = traced.subscribe("receives", "s")
    with recorded.tracer.start_as_current_span("order"):
        traced.create_producer("receives").send_many([b"%d" % number for number in range(3)])
    consumer.acknowledge(consumer.receive(5000))
    left: list[Any] = []
    while len(left) < 2:
        left += consumer.batch_receive()
    consumer.acknowledge_cumulative(left[-1])
    settled = [span.attributes[SETTLED] for span in recorded.all("process")]
    assert settled == ["acknowledge", "cumulative_acknowledge", "cumulative_acknowledge"]


def test_partitions_are_named_and_the_topic_is_that_of_all(traced: magnetar.Client, recorded: Recorded) -> None:
    with magnetar.admin.Admin(traced.get_service_info().service_url) as admin:
        admin.create_topic("parted", partitions=2)
    consumer = traced.subscribe("parted", "s")
    producer = traced.create_producer("parted")
    with recorded.tracer.start_as_current_span("order"):
        for _ in range(2):
            producer.send(b"x")
    for _ in range(2):
        consumer.acknowledge(consumer.receive(5000))
    for start in ("send", "process"):
        spans = recorded.all(start)
        assert {span.attributes["messaging.destination.partition.id"] for span in spans} == {"0", "1"}
        assert {span.attributes["messaging.destination.name"] for span in spans} == {
            "persistent://public/default/parted"
        }


def test_a_retry_has_a_context_of_its_own_below_the_span_that_asked_for_it(
    traced: magnetar.Client, recorded: Recorded
) -> None:
    shared = magnetar.ConsumerType.Shared
    consumer = traced.subscribe("work", "s", shared, enable_retry=True)
    with recorded.tracer.start_as_current_span("order"):
        traced.create_producer("work").send(b"x", properties={"a": "b"})
    first = consumer.receive(5000)
    consumer.reconsume_later(first, timedelta(milliseconds=50))
    again = consumer.receive(5000)
    consumer.acknowledge(again)
    send, copy = recorded.all("send")
    process_first, process_again = recorded.all("process")
    assert copy.name == "send persistent://public/default/work-s-RETRY"
    assert copy.parent.span_id == process_first.get_span_context().span_id
    assert (first.properties()["traceparent"], again.properties()["traceparent"]) == (parent(send), parent(copy))
    assert process_again.links[0].context.span_id == copy.get_span_context().span_id
    assert again.properties()["a"] == "b"


def test_a_dead_letter_links_to_the_message_that_it_was(traced: magnetar.Client, recorded: Recorded) -> None:
    shared = magnetar.ConsumerType.Shared
    policy = magnetar.ConsumerDeadLetterPolicy(1, initial_subscription_name="i")
    consumer = traced.subscribe("bad", "s", shared, negative_ack_redelivery_delay_ms=50, dead_letter_policy=policy)
    with recorded.tracer.start_as_current_span("order"):
        traced.create_producer("bad").send(b"x")
    for _ in range(2):
        consumer.negative_acknowledge(consumer.receive(5000))
    with pytest.raises(magnetar.Timeout):
        consumer.receive(1000)
    letter = traced.subscribe("bad-s-DLQ", "i", shared, initial_position=EARLIEST).receive(5000)
    send, copy = recorded.all("send")
    assert (copy.parent, copy.links[0].context.span_id) == (None, send.get_span_context().span_id)
    assert letter.properties()["traceparent"] == parent(copy)


def test_messages_in_chunks_and_encrypted_ones_carry_their_context(url: str, recorded: Recorded) -> None:
    keys: Any = Keys("a")
    with magnetar.Client(url, tracing=magnetar.Tracing(recorded.provider)) as client:
        consumer = client.subscribe("large", "s", crypto_key_reader=keys)
        secret = {"encryption_key": "a", "crypto_key_reader": keys}
        with recorded.tracer.start_as_current_span("order"):
            client.create_producer("large", chunking_enabled=True, **secret).send(b"x" * (6 << 20))
            client.create_producer("large", batching_enabled=True, **secret).send(b"small")
        for size in (6 << 20, 5):
            message = consumer.receive(20_000)
            assert len(message.data()) == size
            consumer.acknowledge(message)
    assert [span.attributes[SETTLED] for span in recorded.all("process")] == ["acknowledge"] * 2
    linked = [span.links[0].context.span_id for span in recorded.all("process")]
    assert linked == [span.get_span_context().span_id for span in recorded.all("send")]
