"""`magnetar.process` over a broker in memory: each message counts once, whatever is aborted, lost or cancelled."""

import asyncio
from collections import Counter
from typing import Any

import pytest

import magnetar
from magnetar.client.client import Client
from magnetar.client.consume.consumer import Consumer
from magnetar.client.model.message import Message
from magnetar.client.model.settings import ConsumerDeadLetterPolicy, ConsumerType, InitialPosition
from magnetar.client.transactions.process import Output, ProcessStatistics, process
from magnetar.proto import errors as wire_errors
from magnetar.proto.states import TxnState
from tests.client.fake_broker import FakeBroker
from tests.client.fake_transactions import TransactionalBroker
from tests.client.simulated import simulate

OUT = "persistent://public/default/out"


def run(body: Any, broker: TransactionalBroker | None = None, **options: Any) -> TransactionalBroker:
    serving = broker or TransactionalBroker()
    simulate(body, serving, **options)
    return serving


pytestmark = pytest.mark.run_by.with_args(run)


async def fill(client: Client, count: int) -> None:
    async with await client.create_producer("in", batching_max_messages=7) as source:
        await source.send_many([b"%d" % number for number in range(count)])


async def output(client: Client) -> list[bytes]:
    reader = await client.create_reader("out", magnetar.MessageId.earliest)
    found = []
    while True:
        try:
            found.append((await reader.read_next(2000)).data())
        except magnetar.Timeout:
            return found


async def subscribe(client: Client, kind: ConsumerType = ConsumerType.Exclusive, **options: Any) -> Consumer:
    return await client.subscribe("in", "s", kind, initial_position=InitialPosition.Earliest, **options)


@pytest.mark.parametrize("kind", [ConsumerType.Exclusive, ConsumerType.Shared])
async def test_each_message_counts_once_and_the_order_is_kept(
    client: Client, broker: FakeBroker, /, kind: ConsumerType
) -> None:
    await fill(client, 500)
    consumer = await subscribe(client, kind)
    producer = await client.create_producer("out")
    statistics = await process(
        consumer, producer, lambda message: b"<" + message.data() + b">", messages_max=40, idle_timeout_ms=5000
    )
    assert await output(client) == [b"<%d>" % number for number in range(500)]
    assert (statistics.received, statistics.sent, statistics.acknowledged) == (500, 500, 500)
    assert statistics.committed >= 13
    assert statistics.aborted == 0
    assert len(broker.topics["persistent://public/default/in"].subscriptions["s"].done) == 72


@pytest.mark.parametrize("kind", [ConsumerType.Exclusive, ConsumerType.Shared])
def test_an_aborted_transaction_is_done_again_and_its_messages_count_once(kind: ConsumerType) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        assert isinstance(broker, TransactionalBroker)
        await fill(client, 300)
        consumer = await subscribe(client, kind)
        producer = await client.create_producer("out")
        calls = 0

        def function(message: Message) -> bytes:
            nonlocal calls
            calls += 1
            if calls % 70 == 0:
                for txn, known in broker.known.items():
                    if known.joined and broker.state_of(txn) is TxnState.OPEN:
                        broker.expire(txn)
            if calls == 100:
                broker.publish_errors = [wire_errors.InvalidRequest("on purpose")]
            if calls == 200:
                broker.cut()
            return message.data()

        statistics = await process(consumer, producer, function, messages_max=20, idle_timeout_ms=5000)
        assert statistics.aborted > 1
        found = await output(client)
        assert Counter(found) == Counter(b"%d" % number for number in range(300))
        if kind is ConsumerType.Exclusive:
            assert found == [b"%d" % number for number in range(300)]
        assert (statistics.sent, statistics.acknowledged) == (300, 300)

    run(body)


async def test_a_message_that_waits_twice_counts_once(client: Client, broker: FakeBroker, /) -> None:
    """A batch came again after an abort of some of its messages, while the others of its first delivery waited."""
    await fill(client, 7)
    consumer = await subscribe(client, ConsumerType.Shared)
    producer = await client.create_producer("out")
    await consumer.inbox.wait_message(None)
    consumer.inbox.put_back(list(consumer.inbox.messages)[3:])
    statistics = await process(consumer, producer, lambda message: message.data(), idle_timeout_ms=5000)
    assert sorted(await output(client)) == [b"%d" % number for number in range(7)]
    assert (statistics.received, statistics.acknowledged) == (7, 7)


async def test_a_function_may_wait_and_return_nothing_or_several(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, 6)
    other = await client.create_producer("other")

    async def function(message: Message) -> Any:
        await asyncio.sleep(0.1)
        number = int(message.data())
        return [
            None, [b"a", b"b"], (each for each in (b"c", b"d")), Output(b"e", "key", properties={"p": "q"}),
            Output(b"f", producer=other), (),
        ][number]  # fmt: skip

    consumer, producer = await subscribe(client), await client.create_producer("out")
    statistics = await process(consumer, producer, function, idle_timeout_ms=2000)
    assert statistics.sent == 6
    assert statistics.acknowledged == 6
    assert await output(client) == [b"a", b"b", b"c", b"d", b"e"]
    reader = await client.create_reader("out", magnetar.MessageId.earliest)
    last = [await reader.read_next() for _ in range(5)][-1]
    assert (last.partition_key(), last.properties()) == ("key", {"p": "q"})


async def test_what_the_function_raises_is_raised_and_nothing_of_its_batch_counts(
    client: Client, broker: FakeBroker, /
) -> None:
    await fill(client, 100)
    consumer, producer = await subscribe(client), await client.create_producer("out")
    poison = [True]

    def function(message: Message) -> bytes:
        if message.data() == b"55" and poison[0]:
            raise KeyError("poison")
        return message.data()

    with pytest.raises(KeyError, match="poison"):
        await process(consumer, producer, function, messages_max=10)
    found = await output(client)
    assert found == [b"%d" % number for number in range(len(found))]
    assert len(found) <= 55
    poison.clear()
    poison.append(False)
    await process(consumer, producer, function, messages_max=10, idle_timeout_ms=2000)
    assert await output(client) == [b"%d" % number for number in range(100)]


async def test_a_poison_message_is_given_back_and_becomes_a_dead_letter(client: Client, broker: FakeBroker, /) -> None:
    await fill(client, 50)
    consumer = await subscribe(
        client, ConsumerType.Shared, negative_ack_redelivery_delay_ms=500,
        dead_letter_policy=ConsumerDeadLetterPolicy(2, "dead"),
    )  # fmt: skip
    producer = await client.create_producer("out")

    def function(message: Message) -> bytes:
        if message.data() == b"5":
            raise KeyError("poison")
        return message.data()

    statistics = await process(consumer, producer, function, on_error="nack", idle_timeout_ms=5000)
    assert statistics.failed == 3
    assert sorted(await output(client), key=int) == [b"%d" % number for number in range(50) if number != 5]
    dead = await client.create_reader("dead", magnetar.MessageId.earliest)
    assert (await dead.read_next(5000)).data() == b"5"


async def test_cancelled_it_commits_what_it_began_and_gives_back_the_rest(
    client: Client, broker: FakeBroker, /
) -> None:
    await fill(client, 300)
    consumer, producer = await subscribe(client, ConsumerType.Shared), await client.create_producer("out")
    statistics = ProcessStatistics()

    async def slow(message: Message) -> bytes:
        await asyncio.sleep(0.01)
        return message.data()

    task = asyncio.ensure_future(process(consumer, producer, slow, messages_max=20, statistics=statistics))
    await asyncio.sleep(1.5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 0 < statistics.sent < 300
    assert len(await output(client)) == statistics.sent
    await process(consumer, producer, slow, messages_max=20, idle_timeout_ms=2000)
    assert Counter(await output(client)) == Counter(b"%d" % number for number in range(300))


async def test_it_ends_with_its_consumer_and_with_an_unknown_outcome(
    client: Client, broker: TransactionalBroker, /
) -> None:
    await fill(client, 10)
    consumer, producer = await subscribe(client), await client.create_producer("out")
    broker.begins.clear()

    def function(message: Message) -> bytes:
        broker.drop_ends = 1_000_000
        return message.data()

    broker.moved = 0
    running = asyncio.ensure_future(process(consumer, producer, function))
    await asyncio.sleep(1)
    broker.unavailable = True
    with pytest.raises(magnetar.OutcomeUnknown):
        await running
    broker.unavailable, broker.drop_ends = False, 0
    other = await client.subscribe("in", "other", initial_position=InitialPosition.Latest)
    running = asyncio.ensure_future(process(other, producer, function))
    await asyncio.sleep(1)
    await other.close()
    with pytest.raises(magnetar.AlreadyClosed):
        await running


async def test_wrong_arguments_are_refused(client: Client, broker: FakeBroker, /) -> None:
    consumer, producer = await subscribe(client), await client.create_producer("out")
    for wrong in (
        {"messages_max": 0}, {"messages_max": 1_000_001}, {"linger_ms": -1}, {"transactions_max": 0},
        {"timeout": 0}, {"on_error": "skip"}, {"idle_timeout_ms": "x"}, {"statistics": 5},
    ):  # fmt: skip
        with pytest.raises(magnetar.InvalidConfiguration):
            await process(consumer, producer, print, **wrong)  # type: ignore[arg-type]
    for arguments in ((producer, producer, print), (consumer, consumer, print), (consumer, producer, 5)):
        with pytest.raises(magnetar.InvalidConfiguration):
            await process(*arguments)  # type: ignore[arg-type]
    other = Client("magnetar://broker:7650", world=client._world)
    with pytest.raises(magnetar.InvalidConfiguration, match="one client"):
        await process(consumer, await other.create_producer("out"), print)
    await other.close()
