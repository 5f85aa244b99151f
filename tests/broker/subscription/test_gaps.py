"""A topic whose list of ledgers has gaps: one message that is not due, or not acknowledged, keeps its own alone.

Twelve messages of two each to a ledger; all but the first and the ninth are acknowledged, so the ledgers of those stay
and the others go. Nothing that is not acknowledged goes with them, whatever dies in between.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.log.managed_ledger import ManagedLedger, ManagedLedgerRecord
from magnetar.broker.topic import statistics as backlog
from magnetar.broker.topic import statistics as examine
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import NotOwner
from magnetar.proto.names import Position
from magnetar.proto.states import TopicState
from tests.broker.subscription.test_delays import until
from tests.broker.topic.test_maintenance import TOPIC, Deployment, deployment

SHARED = wire.Subscribe.SHARED
MINUTE = 60_000
LEFT = [b"0", b"1", b"8", b"9"]
"""What the log still has: two whole ledgers."""


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[Deployment]:
    async with deployment(tmp_path, roll_entries=2, ensemble_size=1) as at:
        yield at


async def filled(at: Deployment) -> Any:
    """A consumer that has acknowledged all but 0, which is delayed, and 8; nothing is trimmed yet."""
    consumer, producer, now_ms = await at.consumer(type=SHARED), await at.producer(), at.clock.wall_ms()
    await producer.send(b"0", deliver_at_ms=now_ms + 10 * MINUTE)
    for number in range(1, 12):
        await producer.send(b"%d" % number)
    found = [await consumer.receive() for _ in range(11)]
    await consumer.ack(*found[:7], *found[8:])
    await until(lambda: at.topic.log.state is TopicState.SERVING)  # it goes on in the next ledger
    return consumer


def ledgers(at: Deployment) -> list[int]:
    return [span.ledger_id for span in at.topic.log.shape.spans if span.last_entry >= 0]


async def crashed(at: Deployment) -> None:
    """The broker loses what is in its memory, and loads the topic again."""
    topic = at.topic
    topic.abandon(NotOwner("crashed"))
    await topic.close()
    await at.consumer("other", type=SHARED)
    await at.topic.registry.unsubscribe("other", force=True)


async def all_comes(at: Deployment) -> None:
    """What was not acknowledged is delivered, what was is not, and then everything goes."""
    assert await at.backlog("s") == 2
    assert (await examine.analyze_backlog(at.topic.log, at.topic.find_subscription("s")))[:2] == (2, 2)
    consumer = await at.consumer(type=SHARED)
    assert await consumer.receive_payloads(1) == [b"8"]
    assert await consumer.quiet()
    at.clock.ahead_s += 601
    at.topic.find_subscription("s").pump.wake()
    assert await consumer.receive_payloads(1) == [b"0"]


async def test_a_message_that_is_not_due_keeps_its_own_ledger_and_none_of_those_behind_it(at: Deployment) -> None:
    consumer = await filled(at)
    before = ledgers(at)
    await at.later(1)
    assert ledgers(at) == [before[0], before[4]]
    at.topic.log.shape.check()
    cursor = at.topic.find_subscription("s").cursor
    cursor.check()
    assert cursor.hole_entry_count == 2, "what is trimmed costs no memory"
    await consumer.close()
    await all_comes(at)


async def test_a_trimmed_ledger_is_none_that_another_subscription_needs(at: Deployment) -> None:
    late = await at.consumer("late", type=SHARED, permits=0)
    await filled(at)
    before = ledgers(at)
    await at.later(1)
    assert ledgers(at) == before
    late.permits(12)
    assert await late.receive_payloads(11) == [b"%d" % number for number in range(1, 12)]


async def test_acknowledged_but_not_stored_is_no_reason_to_trim(at: Deployment,
    monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash would take it back."""
    await filled(at)
    before = ledgers(at)
    cursor = at.topic.find_subscription("s").cursor
    monkeypatch.setattr(cursor, "persisted", cursor.version - 1)
    await at.topic.trim_ledgers()
    assert ledgers(at) == before
    monkeypatch.undo()
    await at.topic.trim_ledgers()
    assert ledgers(at) == [before[0], before[4]]


@pytest.mark.parametrize("dies", ["before the list", "after the list", "between two deletions", "after all"])
async def test_a_crash_while_ledgers_between_others_go_loses_nothing_that_is_not_acknowledged(
    at: Deployment, monkeypatch: pytest.MonkeyPatch, dies: str
) -> None:
    consumer = await filled(at)
    before = ledgers(at)
    change, delete = ManagedLedgerRecord.change_record, ManagedLedger.delete_ledgers

    async def changed(self: ManagedLedgerRecord, *given: Any, **fields: Any) -> None:
        if dies == "after the list":
            await change(self, *given, **fields)
        raise NotOwner("crashed")

    async def deleted(self: ManagedLedger, ledger_ids: list[int]) -> None:
        await delete(self, ledger_ids[:1])
        raise NotOwner("crashed")

    if dies in ("before the list", "after the list"):
        monkeypatch.setattr(ManagedLedgerRecord, "change_record", changed)
    elif dies == "between two deletions":
        monkeypatch.setattr(ManagedLedger, "delete_ledgers", deleted)
    await at.topic.find_subscription("s").wait_durable()
    if dies == "after all":
        await at.topic.trim_ledgers()
    else:
        with pytest.raises(NotOwner, match="crashed"):
            await at.topic.trim_ledgers()
    monkeypatch.undo()
    await consumer.close()
    await crashed(at)
    assert ledgers(at) == (before if dies == "before the list" else [before[0], before[4]])
    await all_comes(at)


async def trimmed(at: Deployment) -> None:
    await (await filled(at)).close()
    await at.later(1)
    assert len(ledgers(at)) == 2


async def test_readers_leap_over_what_is_gone(at: Deployment) -> None:
    await trimmed(at)
    reader = await at.consumer("reader", durable=False)
    assert await reader.receive_payloads(4) == LEFT
    new = await at.consumer("new", type=SHARED)
    assert await new.receive_payloads(3) == LEFT[1:], "0 is not due"
    assert await at.backlog("new") == 4


async def test_seeks_into_a_gap_stand_behind_it(at: Deployment) -> None:
    consumer = await filled(at)
    gone = ledgers(at)[2]
    await at.later(1)
    await consumer.close()
    consumer = await at.consumer(permits=0)
    for where in ({"index": 5}, {"message_id": wire.MessageId(ledger_id=gone, entry_id=1, batch_index=-1)}):
        consumer.requests += 1
        await consumer.ask(seek=wire.Seek(request_id=consumer.requests, **where))  # type: ignore[arg-type]
        assert await at.backlog("s") == 2
        consumer.permits(2)
        assert await consumer.receive_payloads(2) == [b"8", b"9"]


async def test_numbers_count_what_is_kept(at: Deployment) -> None:
    await trimmed(at)
    topic, log = at.topic, at.topic.log
    found = [(await examine.find_nth_message(log, number, from_latest=False))[0].index for number in (1, 2, 3, 4)]
    assert found == [0, 1, 8, 9]
    assert (await examine.find_nth_message(log, 2, from_latest=True))[0].index == 8
    assert (
        (await log.reader.find_position_by_index(2)).first_index
        == (await log.reader.find_position_by_index(7)).first_index
        == 8
    )
    subscription = topic.find_subscription("s")
    assert [entry.index for entry in await backlog.read_first_backlog_entries(topic.log, subscription, 5)] == [0, 8]
    await backlog.skip_messages(topic.log, subscription, 3)
    assert subscription.cursor.mark == (log.shape.spans[1].ledger_id, 1), "8, and 9 behind it"
    assert await at.backlog("s") == 0


async def test_ranges_of_indexes_end_at_a_gap_and_do_not_turn_in_circles(at: Deployment) -> None:
    await trimmed(at)
    stream = await at.consumer("opens", durable=False)
    await stream.close()
    reads = wire_reads(at)
    for first, end, expected, next_index in ((0, 12, [0, 1, 8, 9], 12), (1, 5, [1], 5), (3, 6, [], 6), (4, 9, [8], 9)):
        assert await reads(first, end) == (expected, next_index)


def wire_reads(at: Deployment) -> Any:
    from tests.support.cluster import Wire

    async def read(first: int, end: int) -> tuple[list[int], int]:
        stream = Wire(at.running.world, at.broker, "Read")
        stream.stream.send_nowait(wire.ReadRequest(request_id=1, topic=TOPIC, first_index=first, end_index=end))
        found: list[int] = []
        async with asyncio.timeout(10):
            while True:
                for reply in await stream.stream.receive():
                    if reply.WhichOneof("kind") == "done":
                        await stream.close()
                        return found, reply.done.next_index
                    position = Position(reply.entry.ledger_id, reply.entry.entry_id)
                    found.append((await at.topic.log.reader.read_entry(position)).index)

    return read
