
import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import (
    AlreadyClosed,
    InvalidConfiguration,
    InvalidMessage,
    MessageTooBig,
    ProducerBusy,
    ProducerFenced,
    PulsarException,
    Result,
    Timeout,
    TopicNotFound,
)
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import ProducerAccessMode
from magnetar.proto import errors as wire_errors
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import decode_batch
from tests.client.fake_broker import FakeBroker, Topic
from tests.client.simulated import simulate
from tests.compiled import replaces_code

pytestmark = pytest.mark.run_by.with_args(simulate)

FULL = "persistent://public/default/t"


def stored(topic: Topic) -> list[bytes]:
    return [
        payload
        for header, entry in zip(topic.headers, topic.entries, strict=True)
        for _, payload in decode_batch(header, entry[len(entry) - len(_client_part(entry)) :])
    ]


def _client_part(entry: bytes) -> bytes:
    from magnetar.proto.entry import split_broker_part

    return bytes(split_broker_part(entry)[2])


async def test_a_message_gets_the_id_under_which_it_is_stored(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t", batching_enabled=False)
    assert await producer.send(b"one") == MessageId(-1, 7, 0, -1)
    assert producer.last_sequence_id() == 0
    assert producer.producer_name() == "named-by-broker"
    assert producer.topic() == FULL
    assert stored(broker.topics[FULL]) == [b"one"]


async def test_an_awaited_send_does_not_wait_for_the_batching_delay(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t")  # a program that asks for a longer delay gets it
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await producer.send(b"now")
    assert loop.time() - begin < producer.settings.batching_max_publish_delay_ms / 1000


async def test_a_message_that_nobody_waits_for_leaves_after_the_delay(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t", batching_max_publish_delay_ms=50)
    producer.send_nowait(b"later")
    await asyncio.sleep(0.03)
    assert broker.received == []
    await asyncio.sleep(0.2)
    assert broker.received == [(0, 1)]


@pytest.mark.parametrize("seed", range(8))
def test_after_a_broken_stream_entries_go_again_in_order_under_the_same_ids(seed: int) -> None:
    broker = FakeBroker()
    broker.drop_after = [3, 5, 1, 2]

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", batching_max_messages=10, max_pending_messages=1000)
        outcomes: list[tuple[Any, MessageId]] = []
        for i in range(200):
            producer.send_nowait(b"%d" % i, lambda *outcome: outcomes.append(outcome))
            if i % 20 == 0:
                await asyncio.sleep(0.01)
                producer.check()
        await producer.flush()
        assert [result for result, _ in outcomes] == [Result.Ok] * 200
        assert not broker.drop_after
        assert [id_ for _, id_ in outcomes] == sorted(id_ for _, id_ in outcomes)
        first_seen = list(dict.fromkeys(broker.received))
        assert [sequence_id for sequence_id, _ in first_seen] == sorted(s for s, _ in first_seen)
        assert sum(count for _, count in first_seen) == 200
        assert len(broker.received) > len(first_seen)
        payloads = list(dict.fromkeys(stored(broker.topics[FULL])))
        assert payloads == [b"%d" % i for i in range(200)]
        assert producer.last_sequence_id() == 199

    simulate(body, broker, seed=seed)


def test_without_a_receipt_the_outcome_is_timeout_and_unknown() -> None:
    broker = FakeBroker()
    broker.silent = True

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", send_timeout_millis=2000)
        outcomes: list[Any] = []
        producer.send_nowait(b"a", lambda result, _: outcomes.append(result))
        with pytest.raises(Timeout) as caught:
            await producer.send(b"b")
        assert outcomes == [Result.Timeout]
        assert not caught.value.definite
        broker.silent = False
        assert (await producer.send(b"c")).ledger_id() == 7
        assert producer.statistics()["pending_messages"] == 0

    simulate(body, broker)


def test_a_timeout_says_why_the_broker_did_not_store(caplog: pytest.LogCaptureFixture) -> None:
    broker = FakeBroker()
    broker.publish_errors = [wire_errors.NotEnoughBookies("2 of 3 are needed") for _ in range(200)]
    reason = "no acknowledgement within 2 s; the broker said: NotEnoughBookies: 2 of 3 are needed"

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", send_timeout_millis=2000)
        with caplog.at_level("WARNING", logger="magnetar.client"):
            with pytest.raises(Timeout, match=reason):
                await producer.send(b"a")
            with pytest.raises(Timeout, match=reason):
                await producer.send_many([b"b", b"c"])
        assert len(broker.publish_errors) < 195, "it was tried again and again"
        warnings = [record.getMessage() for record in caplog.records]
        assert len(warnings) == 1, "said once, not at each attempt"
        assert "NotEnoughBookies: 2 of 3 are needed" in warnings[0]
        broker.publish_errors.clear()
        await producer.send(b"d")
        broker.silent = True
        with pytest.raises(Timeout) as caught:
            await producer.send(b"e")
        assert "the broker said" not in str(caught.value), "what was wrong before says nothing about this message"
        broker.silent = False

    simulate(body, broker)


def test_closing_with_messages_under_way_says_why() -> None:
    broker = FakeBroker()

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", send_timeout_millis=0)
        broker.publish_errors = [wire_errors.NotEnoughBookies("none") for _ in range(500)]
        producer.send_nowait(b"a")
        with pytest.raises(Timeout, match="under way; the broker said: NotEnoughBookies: none"):
            await producer.close()

    simulate(body, broker, operation_timeout_seconds=3)


async def test_a_message_above_the_limit_is_refused_and_the_next_one_goes(
    client: Client, broker: FakeBroker, /
) -> None:
    producer = await client.create_producer("t")
    with pytest.raises(MessageTooBig):
        await producer.send(bytes((5 << 20) + 1))
    with pytest.raises(MessageTooBig):
        await producer.send(bytes(5 << 20))  # fits as a payload, not with its head
    await producer.send(b"small")
    assert stored(broker.topics[FULL]) == [b"small"]


async def test_a_delayed_message_stands_alone_between_its_neighbours(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t")
    producer.send_nowait(b"a")
    producer.send_nowait(b"b", None, deliver_at=123456)
    producer.send_nowait(b"c")
    await producer.flush()
    headers = broker.topics[FULL].headers
    assert [header.metadata.deliver_at_time for header in headers] == [0, 123456, 0]
    assert [header.batched for header in headers] == [True, False, True]


async def test_initial_sequence_id_is_where_numbers_go_on(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t", initial_sequence_id=41)
    assert producer.last_sequence_id() == 41
    await producer.send(b"x")
    assert broker.received == [(42, 1)]


async def test_a_closed_producer_says_so_when_it_is_flushed(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t")
    await producer.close()
    with pytest.raises(AlreadyClosed):
        await producer.flush()


async def test_zero_pending_messages_are_no_bound(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer(
        "t", max_pending_messages=0, max_pending_messages_across_partitions=0, batching_enabled=True
    )
    for _ in range(3000):
        producer.send_nowait(b"x")
    await producer.flush()
    assert producer.last_sequence_id() == 2999


async def test_refusals_reach_the_caller_as_exceptions(client: Client, broker: FakeBroker, /) -> None:
    broker.refuse = [wire_errors.ProducerBusy("taken")]
    with pytest.raises(ProducerBusy, match="taken"):
        await client.create_producer("t")
    with pytest.raises(TopicNotFound):
        await client.create_producer("missing")
    with pytest.raises(InvalidConfiguration):
        await client.create_producer("t", max_pending_messages=-1)


async def test_a_broker_that_is_not_the_owner_is_asked_again_later(client: Client, broker: FakeBroker, /) -> None:
    broker.refuse = [wire_errors.NotOwner("moved"), wire_errors.Unavailable("loading")]
    producer = await client.create_producer("t")
    assert broker.lookups == 3
    await producer.send(b"x")


async def test_a_fenced_producer_is_finished(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t")
    broker.publish_errors = [wire_errors.ProducerFenced("a later one took over")]
    with pytest.raises(ProducerFenced):
        await producer.send(b"x")
    with pytest.raises(ProducerFenced):
        await producer.send(b"y")


async def test_an_entry_that_is_refused_for_good_fails_alone(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t", batching_enabled=False)
    broker.publish_errors = [wire_errors.MessageTooLarge("of this topic", size=11, limit=10)]
    with pytest.raises(MessageTooBig) as refused:
        await producer.send(b"x")
    assert refused.value.fields == {"size": "11", "limit": "10"}
    await producer.send(b"y")
    assert stored(broker.topics[FULL]) == [b"y"]


async def test_an_entry_with_an_unknown_outcome_goes_again(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t", batching_enabled=False)
    broker.publish_errors = [wire_errors.OutcomeUnknown("the ledger was fenced")]
    await asyncio.gather(producer.send(b"x"), producer.send(b"y"))
    assert broker.received[0] == (0, 1)
    assert broker.received.count((0, 1)) == 2
    assert broker.received.index((1, 1)) > 0


@pytest.mark.parametrize("closed", [False, True], ids=["failed only", "and closed"])
async def test_several_refusals_of_one_turn_open_the_producer_again_once(
    client: Client, broker: FakeBroker, /, closed: bool
) -> None:
    producer = await client.create_producer("t", batching_enabled=False)
    broker.publish_errors = [wire_errors.OutcomeUnknown("the ledger was fenced")] * 4
    sends = [asyncio.ensure_future(producer.send(b"%d" % number)) for number in range(4)]
    while not broker.received:  # noqa: ASYNC110
        await asyncio.sleep(0.0001)
    if closed:
        broker.opened[-1](wire_errors.Unavailable("the topic moves"))
    await asyncio.gather(*sends)
    await asyncio.sleep(5)
    assert len(broker.opened) == 2
    assert stored(broker.topics[FULL]) == [b"0", b"1", b"2", b"3"]


async def test_a_closed_producer_refuses_and_what_was_sent_before_is_stored(
    client: Client, broker: FakeBroker, /
) -> None:
    outcomes: list[Any] = []
    async with await client.create_producer("t") as producer:
        for _ in range(7):
            producer.send_nowait(b"x", lambda result, _: outcomes.append(result))
    assert outcomes == [Result.Ok] * 7
    with pytest.raises(AlreadyClosed):
        producer.send_nowait(b"y")
    with pytest.raises(AlreadyClosed):
        await producer.send(b"y")


def test_closing_with_messages_under_way_ends_them_with_a_result() -> None:
    broker = FakeBroker()
    broker.silent = True

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", send_timeout_millis=0)
        outcomes: list[Any] = []
        producer.send_nowait(b"x", lambda result, _: outcomes.append(result))
        with pytest.raises(Timeout):
            await producer.close()
        assert outcomes == [Result.AlreadyClosed]

    simulate(body, broker, operation_timeout_seconds=5)


async def test_a_failing_callback_harms_nobody_else(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t")
    outcomes: list[Any] = []

    def broken(result: Any, id_: Any) -> None:
        raise RuntimeError("on purpose")

    producer.send_nowait(b"x", broken)
    producer.send_nowait(b"y", lambda result, _: outcomes.append(result))
    await producer.flush()
    assert outcomes == [Result.Ok]


async def test_when_the_topic_moves_the_owner_is_looked_up_again_and_nothing_is_lost(
    client: Client, broker: FakeBroker, /
) -> None:
    producer = await client.create_producer("t", batching_enabled=False)
    consumer = await client.subscribe("t", "s")
    lookups = broker.lookups
    sends = [asyncio.ensure_future(producer.send(b"%d" % i)) for i in range(5)]
    broker.give_up(wire_errors.NotOwner("the topic moved"))
    await asyncio.gather(*sends)
    assert broker.lookups > lookups
    received: list[bytes] = []
    while len(set(received)) < 5:
        received.append((await consumer.receive(10_000)).data())
    assert list(dict.fromkeys(received)) == [b"%d" % i for i in range(5)]


async def test_a_topic_that_its_broker_does_not_know_ends_its_producer_and_consumer(
    client: Client, broker: FakeBroker, /
) -> None:
    producer = await client.create_producer("t")
    consumer = await client.subscribe("t", "s")
    broker.give_up(wire_errors.TopicNotFound("deleted"))
    with pytest.raises(TopicNotFound):
        await consumer.receive(10_000)
    with pytest.raises(TopicNotFound):
        await producer.send(b"x")


async def test_a_flush_waits_for_what_was_sent_before_it_and_for_nothing_else(
    client: Client, broker: FakeBroker, /
) -> None:
    producer = await client.create_producer("t", batching_max_publish_delay_ms=5000)
    outcomes: list[Any] = []

    def told(result: Any, id_: MessageId) -> None:
        outcomes.append(result)
        broker.silent = True
        producer.send_nowait(b"later")  # as another thread may at any time

    producer.send_nowait(b"before", told)
    async with asyncio.timeout(1):
        await producer.flush()
    assert outcomes == [Result.Ok]
    assert producer.partitions[0].core.pending == 1
    late = asyncio.ensure_future(producer.flush())
    await asyncio.sleep(20)
    assert not late.done(), "the later one has no outcome"
    await asyncio.sleep(40)
    assert late.done(), "it timed out"
    producer.check()


def test_a_flush_of_a_partition_that_opens_with_its_first_message_waits_for_that_message_alone() -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("parts", lazy_start_partitioned_producers=True)
        producer = next(each for each in producer.partitions if each.core.is_opening_delayed)
        outcomes: list[Any] = []
        producer.add(b"before", lambda *outcome: outcomes.append(outcome[0]))
        waiting = asyncio.ensure_future(producer.flush())
        await asyncio.sleep(0)
        producer.add(b"later", lambda *outcome: outcomes.append(outcome[0]))
        async with asyncio.timeout(2):
            await waiting
        assert outcomes[0] is Result.Ok
        assert broker.received[0] == (0, 1), "what was flushed left alone"
        await producer.close()
        assert outcomes == [Result.Ok] * 2

    simulate(body, FakeBroker({"parts": 3}))


async def test_who_sends_while_the_producer_closes_is_refused_and_what_was_sent_is_stored(
    client: Client, broker: FakeBroker, /
) -> None:
    producer = await client.create_producer("t", batching_max_publish_delay_ms=5000)
    outcomes: list[Any] = []
    for _ in range(10):
        producer.send_nowait(b"before", lambda *outcome: outcomes.append(outcome[0]))
    closing = asyncio.ensure_future(producer.close())
    for _ in range(4):
        await asyncio.sleep(0)
    assert not closing.done()
    with pytest.raises(AlreadyClosed):
        producer.send_nowait(b"late")
    await closing
    assert outcomes == [Result.Ok] * 10


async def test_closing_does_not_wait_for_an_opening_when_every_message_has_its_outcome(
    client: Client, broker: FakeBroker, /
) -> None:
    producer = await client.create_producer("t")
    await producer.send(b"x")
    broker.ignores.add("open_producer")
    broker.opened[-1](wire_errors.Unavailable("the topic moves"))
    await asyncio.sleep(1)
    begun = asyncio.get_running_loop().time()
    await producer.close()
    assert asyncio.get_running_loop().time() - begun < 1


def test_a_broker_that_does_not_answer_to_the_close_fails_no_message(caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t")
        await producer.send(b"x")
        broker.ignores.add("close")
        await producer.close()
        assert "did not answer to the producer's close" in caplog.text

    with caplog.at_level("INFO", logger="magnetar.client"):
        simulate(body)


@replaces_code
def test_a_message_that_cannot_be_encoded_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the border lets through by mistake, and no codec takes."""
    from magnetar.client.core import chunking as core

    encode = core.encode_batch_entry

    def picky(batch: Any, *rest: Any) -> bytes:
        if batch.items[1] == b"bad":
            raise ValueError("on purpose")
        return encode(batch, *rest)

    monkeypatch.setattr(core, "encode_batch_entry", picky)

    async def body(client: Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", batching_enabled=False)
        outcomes: list[Any] = []
        for content in (b"one", b"bad", b"two"):
            producer.send_nowait(content, lambda *outcome: outcomes.append(outcome[0]))
        async with asyncio.timeout(1):
            await producer.flush()
        assert sorted(outcomes) == [Result.Ok, Result.Ok, Result.InvalidMessage]
        with pytest.raises(InvalidMessage, match="on purpose"):
            async with asyncio.timeout(1):
                await producer.send(b"bad")
        assert stored(broker.topics[FULL]) == [b"one", b"two"]

    simulate(body)


class Queueing(FakeBroker):
    """Lets openings wait until `free` is called. `refusing`: what each gets, meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[Callable[[], None]] = []
        self.refusing: wire_errors.MagnetarError | None = None

    def _open(self, stream: Any, frame: Any, owners: Any) -> None:
        if self.refusing is not None:
            stream.send_nowait(wire.ServerFrame(id=frame.id, closed=wire_errors.to_wire(self.refusing)))
        else:
            opening = super()._open
            self.waiting.append(lambda: opening(stream, frame, owners))

    def free(self) -> None:
        self.waiting.pop()()


@pytest.mark.parametrize("cuts", [0, 3])
def test_a_producer_that_waits_for_exclusive_access_waits_without_a_limit(cuts: int) -> None:
    """Also over connections that break, for longer than an operation may take."""
    async def body(client: Client, broker: FakeBroker) -> None:
        assert isinstance(broker, Queueing)
        opening = asyncio.ensure_future(client.create_producer("t", access_mode=ProducerAccessMode.WaitForExclusive))
        for _ in range(cuts):
            await asyncio.sleep(50)
            broker.cut()
        await asyncio.sleep(3600)
        assert not opening.done()
        assert len(broker.waiting) == cuts + 1
        broker.free()
        producer = await opening
        sending = asyncio.ensure_future(producer.send(b"x"))
        await sending

    simulate(body, Queueing())


@pytest.mark.parametrize("error", [wire_errors.Unavailable("not now"), wire_errors.ProducerFenced("never")])
def test_what_does_not_let_it_wait_is_told_by_the_operations_deadline(error: wire_errors.MagnetarError) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        assert isinstance(broker, Queueing)
        broker.refusing = error
        begun = asyncio.get_running_loop().time()
        with pytest.raises(PulsarException):
            await client.create_producer("t", access_mode=ProducerAccessMode.WaitForExclusive)
        assert asyncio.get_running_loop().time() - begun < 31
        broker.refusing = None

    simulate(body, Queueing())
