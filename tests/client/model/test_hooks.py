"""Hooks over a broker in memory: each is called for each message, at its time, and breaks nothing."""

import asyncio
import threading
from collections import Counter
from datetime import timedelta
from typing import Any

import pytest

import magnetar
from magnetar.client.client import Client
from magnetar.client.common.errors import MessageTooBig, Result
from magnetar.client.model.hooks import Hook, Sending, SendVetoed, Settlement
from magnetar.client.model.message import Message
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.client.transactions.process import process
from magnetar.proto.errors import ProducerFenced
from tests.client.fake_broker import FakeBroker
from tests.client.fake_transactions import TransactionalBroker
from tests.client.simulated import simulate

EARLIEST = InitialPosition.Earliest
TOPIC = "persistent://public/default/t"


class Recorder(Hook):
    """Keeps what it is told."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.calls: list[tuple[str, Any]] = []
        self.sendings: list[Sending] = []
        self.settlements: list[Settlement] = []

    def before_send(self, sending: Sending) -> None:
        self.calls.append(("before_send", sending.content))
        sending.properties[f"seen{self.name}"] = "yes"
        sending.notes[self] = len(self.calls)

    def sent(self, sending: Sending) -> None:
        assert sending.notes[self]
        self.sendings.append(sending)
        self.calls.append(("sent", sending.result))

    def before_deliver(self, message: Message) -> None:
        self.calls.append(("before_deliver", message.data()))

    def settled(self, settlement: Settlement) -> None:
        self.settlements.append(settlement)
        self.calls.append(("settled", settlement.how))

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def run(body: Any, hooks: list[Any], broker: FakeBroker | None = None) -> None:
    simulate(body, broker or TransactionalBroker(), hooks=hooks)


def test_each_message_passes_all_four_of_the_client_and_then_of_the_producer_and_consumer() -> None:
    all_of, mine, other = Recorder("-client"), Recorder("-own"), Recorder()

    async def body(client: Client, broker: FakeBroker) -> None:
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST, hooks=[other])
        producer = await client.create_producer("t", hooks=[mine])
        id_ = await producer.send(b"x", {"a": "b"})
        message = await consumer.receive()
        assert message.properties() == {"a": "b", "seen-client": "yes", "seen-own": "yes"}
        await consumer.acknowledge(message)
        assert all_of.names() == ["before_send", "sent", "before_deliver", "settled"]
        assert mine.calls == [("before_send", b"x"), ("sent", Result.Ok)]
        assert other.calls == [("before_deliver", b"x"), ("settled", "acknowledge")]
        (sending,), (settlement,) = mine.sendings, other.settlements
        assert (sending.topic, sending.message_id, sending.error) == (TOPIC, id_, None)
        assert settlement.covers(message)
        await consumer.close()
        assert other.calls[-1] == ("settled", "closed")

    run(body, [all_of])


def test_a_hook_may_change_the_content_and_the_properties_of_a_copy_alone() -> None:
    class Changes(Hook):
        def before_send(self, sending: Sending) -> None:
            sending.content = sending.content.upper()
            sending.properties.pop("secret", None)

    async def body(client: Client, broker: FakeBroker) -> None:
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        producer = await client.create_producer("t")
        properties = {"secret": "1"}
        await producer.send(b"x", properties)
        done = asyncio.Event()
        producer.send_nowait(b"y", lambda _result, _id: done.set(), properties)
        await done.wait()
        await producer.send_many([b"z"], properties=properties)
        for content in (b"X", b"Y", b"Z"):
            message = await consumer.receive()
            assert (message.data(), message.properties()) == (content, {})
        assert properties == {"secret": "1"}, "the program's own is as it was"

    run(body, [Changes()])


def test_a_veto_refuses_a_message_and_nothing_else_does() -> None:
    class Refuses(Hook):
        def before_send(self, sending: Sending) -> None:
            if sending.content == b"secret":
                raise SendVetoed("no secrets")
            raise ValueError("a fault of the hook")

    before = Recorder()

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t")
        for send in (producer.send, producer.send_many):
            with pytest.raises(SendVetoed, match="no secrets"):
                await send(b"secret" if send == producer.send else [b"secret"])  # type: ignore[operator]
        with pytest.raises(magnetar.NotAllowedError):
            producer.send_nowait(b"secret")
        await producer.send(b"fine")
        assert producer.statistics()["hook_failures"] == 1
        assert broker.topic(TOPIC).messages == 1
        assert [type(each.error) for each in before.sendings] == [SendVetoed] * 3 + [type(None)]

    run(body, [before, Refuses()])


def test_sent_is_called_for_the_hooks_whose_before_send_was_called_and_no_other() -> None:
    class Sometimes(Recorder):
        def is_interested(self) -> bool:
            if interest == "broken":
                raise ValueError(interest)
            return interest == "yes"

    class Refuses(Recorder):
        def before_send(self, sending: Sending) -> None:
            super().before_send(sending)
            if sending.content == b"secret":
                raise SendVetoed("no secrets")

    interest = "no"
    sometimes, refuses, last = Sometimes("-sometimes"), Refuses("-refuses"), Recorder("-last")

    async def body(client: Client, broker: FakeBroker) -> None:
        nonlocal interest
        producer = await client.create_producer("t")
        await producer.send(b"a")
        with pytest.raises(SendVetoed):
            await producer.send(b"secret")
        interest = "yes"
        await producer.send(b"b")
        interest = "broken"
        await producer.send(b"c")
        assert sometimes.calls == [("before_send", b"b"), ("sent", Result.Ok)]
        assert refuses.names() == ["before_send", "sent"] * 4, "also the one that refuses"
        assert [content for name, content in last.calls if name == "before_send"] == [b"a", b"b", b"c"]
        assert [each.error for each in last.sendings] == [None] * 3
        assert producer.statistics()["hook_failures"] == 2, "is_interested, before and in the chain"

    run(body, [sometimes, refuses, last])


@pytest.mark.parametrize("raised", [ValueError("x"), asyncio.CancelledError(), SystemExit(1)], ids=repr)
def test_whatever_hooks_raise_messages_are_sent_delivered_and_settled(
    raised: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Hook):
        def before_send(self, sending: Sending) -> None:
            raise raised

        sent = before_deliver = settled = before_send  # type: ignore[assignment]

    async def body(client: Client, broker: FakeBroker) -> None:
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
        producer = await client.create_producer("t")
        for number in range(20):
            await producer.send(b"%d" % number)
        for number in range(20):
            message = await consumer.receive()
            assert message.data() == b"%d" % number
            await consumer.acknowledge(message)
        assert (producer.statistics()["hook_failures"], consumer.statistics()["hook_failures"]) == (40, 40)
        await asyncio.sleep(1)
        assert len(broker.topic(TOPIC).subscriptions["s"].done) == 20

    run(body, [Broken()])
    logged = [each for each in caplog.records if "Broken" in each.getMessage()]
    assert len(logged) == 4, "the 1st and the 10th, of the producer and the consumer"


def test_what_is_refused_or_fails_is_told_with_its_outcome() -> None:
    recorder = Recorder()

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t")
        with pytest.raises(MessageTooBig):
            await producer.send(b"x" * (6 << 20))
        with pytest.raises(magnetar.InvalidMessage):
            await producer.send(b"x", partition_key=5)  # type: ignore[arg-type]
        broker.publish_errors.append(ProducerFenced("another took the topic"))
        with pytest.raises(magnetar.ProducerFenced):
            await producer.send(b"x")
        refused, wrong, failed = recorder.sendings
        assert isinstance(refused.error, MessageTooBig)
        assert isinstance(wrong.error, magnetar.InvalidMessage)
        assert (failed.error, failed.result, failed.message_id) == (None, Result.ProducerFenced, None)

    run(body, [recorder])


def test_each_way_to_settle_is_told_and_covers_its_messages() -> None:
    recorder = Recorder()

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", batching_max_messages=3, batching_max_publish_delay_ms=50)
        await producer.send_many([b"%d" % number for number in range(6)])
        options: dict[str, Any] = {"initial_position": EARLIEST, "negative_ack_redelivery_delay_ms": 1000}
        consumer = await client.subscribe("t", "s", hooks=[recorder], **options)
        got = [await consumer.receive() for _ in range(6)]

        def covered() -> list[bytes]:
            (settlement,) = recorder.settlements
            recorder.settlements.clear()
            return [each.data() for each in got if settlement.covers(each)]

        await consumer.acknowledge(got[1])
        assert covered() == [b"1"]
        await consumer.acknowledge_cumulative(got[4])
        assert covered() == [b"0", b"1", b"2", b"3", b"4"]
        await consumer.negative_acknowledge(got[5])
        assert covered() == [b"5"]
        again = await consumer.receive()
        assert (again.data(), covered()) == (b"5", [b"3", b"4", b"5"]), "its entry was asked for again"
        await consumer.acknowledge(again.message_id())
        assert covered() == [b"5"]
        await consumer.seek(magnetar.MessageId.earliest)
        assert covered() == [each.data() for each in got]
        consumer.redeliver_unacknowledged_messages()
        assert recorder.settlements[-1].how == "redelivered"

    run(body, [])


def test_process_listeners_and_transactions_pass_them_too() -> None:
    recorder = Recorder()

    async def body(client: Client, broker: FakeBroker) -> None:
        source = await client.create_producer("in")
        await source.send_many([b"%d" % number for number in range(4)])
        consumer = await client.subscribe("in", "s", initial_position=EARLIEST)
        producer = await client.create_producer("t")
        recorder.calls.clear()
        await process(consumer, producer, lambda message: message.data(), idle_timeout_ms=1000)
        assert Counter(recorder.names()) == dict.fromkeys(("before_send", "sent", "before_deliver", "settled"), 4)
        await consumer.close()
        listener = await client.subscribe("t", "s", ConsumerType.Shared, initial_position=EARLIEST)
        recorder.calls.clear()
        listening = listener.listen(lambda _: None)
        while listening.statistics().handled < 4:  # noqa: ASYNC110 - it is virtual time
            await asyncio.sleep(0.1)
        assert Counter(recorder.names()) == dict.fromkeys(("before_deliver", "settled"), 4)

    run(body, [recorder])


def test_copies_pass_before_send_with_their_original_and_cannot_be_refused() -> None:
    class Refuses(Recorder):
        def before_send(self, sending: Sending) -> None:
            super().before_send(sending)
            if sending.original is not None:
                raise SendVetoed("no")

    refuses = Refuses()

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t")
        await producer.send(b"x")
        consumer = await client.subscribe(
            "t", "s", ConsumerType.Shared, initial_position=EARLIEST, enable_retry=True, hooks=[refuses]
        )
        message = await consumer.receive()
        await consumer.reconsume_later(message, timedelta(0))
        again = await consumer.receive()
        assert (again.data(), again.properties()["seen"]) == (b"x", "yes")
        (sending,) = refuses.sendings
        assert (sending.original, sending.result) == (message, Result.Ok)
        assert consumer.statistics()["hook_failures"] == 1

    run(body, [])


@pytest.mark.parametrize(
    "hooks", [Recorder(), [object()], "hooks", [Recorder]], ids=["a hook alone", "an object", "text", "a class"]
)
def test_what_is_no_list_of_hooks_is_refused(hooks: Any) -> None:
    with pytest.raises(magnetar.InvalidConfiguration, match="hooks is a list of"):
        magnetar.Client("magnetar://localhost:1", hooks=hooks)


def test_blocking_programs_call_them_in_their_own_thread_before_and_in_the_clients_after(
    fake: tuple[str, FakeBroker],
) -> None:
    url, _ = fake
    threads: dict[str, set[int]] = {"before_send": set(), "sent": set(), "before_deliver": set()}

    class Where(Hook):
        def before_send(self, sending: Sending) -> None:
            threads["before_send"].add(threading.get_ident())

        def sent(self, sending: Sending) -> None:
            threads["sent"].add(threading.get_ident())

        def before_deliver(self, message: Message) -> None:
            threads["before_deliver"].add(threading.get_ident())

    with magnetar.Client(url, hooks=[Where()]) as client:
        consumer = client.subscribe("t", "s", initial_position=EARLIEST)
        producer = client.create_producer("t")
        producer.send(b"x")
        producer.send_async(b"y", None)
        producer.flush()
        for _ in range(2):
            consumer.acknowledge(consumer.receive(5000))
    me = threading.get_ident()
    assert (threads["before_send"], threads["before_deliver"]) == ({me}, {me})
    assert me not in threads["sent"]
    assert len(threads["sent"]) == 1
