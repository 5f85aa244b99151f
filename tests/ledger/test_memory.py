"""What all ledgers of a client keep for bookies that do not answer has one bound, and nothing waits for good."""

import asyncio
import random
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from magnetar.ledger import LedgerConfig, LedgerWriter
from magnetar.ledger.metadata_core import make_ledger_record
from magnetar.ledger.peer_format import BookieOperation, Status, decode_request
from magnetar.ledger.writer_core import EXPECTED_APPEND_BYTES, AppendMemoryBudget, Striping
from magnetar.proto.errors import BackPressure
from magnetar.runtime.network import AnswerListener, PeerReply, notify_asker_of_answer
from tests.ledger.conftest import Cluster, until
from tests.ledger.test_sender import BOOKIES, Rig, Sent

LIMIT = 20_000


async def fill(writers: list[LedgerWriter], size: int) -> None:
    """Appends to all in turn as long as they have room."""
    while any(writer.has_room for writer in writers):
        await asyncio.gather(*(writer.append(bytes(size)) for writer in writers if writer.has_room))


async def test_a_bookie_that_does_not_answer_stops_all_ledgers_at_one_bound_and_none_for_good(cluster: Cluster) -> None:
    client = cluster.client(LedgerConfig(add_timeout_s=5.0, retry_s=0.02, memory_bytes_max=LIMIT))
    writers = [await client.create() for _ in range(8)]
    hanging = cluster.bookies[0]
    hanging.silent.add(BookieOperation.ADD)
    await fill(writers, 500)
    held = client.bookies.memory.held
    assert LIMIT <= held < LIMIT + 8 * 700, "one entry of each ledger exceeds it at most"
    assert not any(writer.pending_entries for writer in writers), "the other two have confirmed all"
    async with asyncio.timeout(60):
        await asyncio.gather(*(writer.wait_room() for writer in writers))
    assert client.bookies.memory.held < LIMIT, "the bookie failed, and nothing is kept for it"
    hanging.silent.clear()


async def test_what_cannot_wait_is_taken_past_the_bound(cluster: Cluster) -> None:
    client = cluster.client(LedgerConfig(memory_bytes_max=1000))
    topic, cursor = await client.create(), await client.create()
    cluster.bookies[0].status[BookieOperation.ADD] = Status.BUSY
    await fill([topic], 600)
    assert not cursor.has_room
    assert await cursor.append(b"acknowledged") == 0
    cluster.bookies[0].status.clear()
    await cursor.wait_room()


@pytest.mark.asyncio
async def test_an_entry_counts_once_until_the_last_copy_is_answered() -> None:
    rig = Rig((3, 3, 2))
    rig.append(bytes(1000), bytes(500))
    assert rig.memory.held == 1500, "before it is sent"
    await rig.wait_sent(3)
    sent = rig.memory.held
    assert 1500 < sent < 1800
    for each in rig.sent[:2]:
        each.say(Status.OK, Status.OK)
    await rig.wait_facts(2)
    assert rig.memory.held == sent
    rig.sent[2].say(Status.OK, Status.BUSY)
    await rig.wait_sent(4)
    assert 0 < rig.memory.held < sent, "what is asked again is one entry"
    rig.sent[3].say(Status.OK)
    await rig.wait_facts(4)
    assert rig.memory.held == 0


@pytest.mark.asyncio
async def test_a_request_that_fails_or_is_cancelled_is_kept_no_more() -> None:
    rig = Rig((3, 3, 2))
    rig.append(bytes(1000))
    await rig.wait_sent(3)
    rig.sent[0].answer.cancel()
    rig.sent[1].answer.set_exception(ConnectionResetError())
    rig.sent[2].say(Status.OK)
    await rig.wait_facts(3)
    assert rig.memory.held == 0


def test_as_many_that_wait_are_told_as_there_is_room_for_and_all_when_nothing_is_held() -> None:
    memory = AppendMemoryBudget(10 * EXPECTED_APPEND_BYTES)
    told: list[int] = []
    memory.held = 12 * EXPECTED_APPEND_BYTES
    looks = [lambda number=number: told.append(number) for number in range(20)]
    for look in looks:
        memory.add_waiter(look)
    memory.remove_waiter(looks[1])
    memory.release(4 * EXPECTED_APPEND_BYTES)
    assert told == [0, 2], "in the order of waiting"
    memory.release(4 * EXPECTED_APPEND_BYTES)
    assert told == [0, *range(2, 9)]
    memory.release(4 * EXPECTED_APPEND_BYTES)
    assert told == [0, *range(2, 20)], "no later answer would tell them"


# ------------------------------------------------------------------------------ writers that wait for room
class Waiter(NamedTuple):
    writer: LedgerWriter
    task: asyncio.Task[None]


class Writers:
    """Writers of one client with small bounds. Their bookies answer when the test says so."""

    def __init__(self, memory: int, **bounds: int) -> None:
        self.memory = AppendMemoryBudget(memory)
        self.config = LedgerConfig(retry_s=0.0001, add_timeout_s=60.0, quorum_timeout_s=600.0, **bounds)  # type: ignore[arg-type]
        self.sent: list[Sent] = []
        self.answers_at_once = False
        self.waiters: list[Waiter] = []
        self.appended: list[asyncio.Future[int]] = []
        self.made = 0

    def writer(self) -> LedgerWriter:
        self.made += 1
        record = make_ledger_record(
            self.made, Striping(2, 2, 1), BOOKIES[:2], key=b"k" * 20, token="t", created_ms=0, properties={}
        )
        return LedgerWriter(record, self, None, self.config)  # type: ignore[arg-type]

    @property
    def peers(self) -> dict[str, Any]:
        return {bookie: SimpleNamespace(send_request=partial(self._post, bookie)) for bookie in BOOKIES}

    def _post(self, bookie: str, asker: AnswerListener, head: bytes, frames: Any, *, timeout_s: float) -> None:
        answer: asyncio.Future[PeerReply] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(partial(notify_asker_of_answer, asker))
        self.sent.append(Sent(bookie, decode_request(head), frames, answer))
        if self.answers_at_once:
            self.answer(self.sent[-1], Status.OK)

    def answer(self, sent: Sent, status: Status) -> None:
        """Answers a request with the status for each of its entries."""
        self.sent.remove(sent)
        sent.say(*[status] * len(sent.entries))

    def append(self, writer: LedgerWriter, size: int) -> None:
        future = writer.append(bytes(size))
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.appended.append(future)

    def wait(self, writer: LedgerWriter) -> Waiter:
        self.waiters.append(Waiter(writer, asyncio.create_task(writer.wait_room())))
        return self.waiters[-1]

    async def settle(self) -> None:
        """Lets what is due in the event loop run."""
        for _ in range(10):
            await asyncio.sleep(0)

    def check(self) -> None:
        """The waiters of a writer sleep only while it has no room, or while it has a place in the queue for the memory
        and a later answer notifies it."""
        for writer, _ in self.waiters:
            if writer._room is not None:
                assert writer.is_writable, "the next append fails at once"
                assert not writer.has_room or (writer._wake_if_room in self.memory.waiting and self.memory.held), (
                    f"ledger {writer.ledger_id} has room, and no later answer wakes its waiters"
                )

    async def end(self) -> None:
        """The bookies answer all that they have and get: then each waiter returns."""
        self.answers_at_once = True
        while self.sent:
            self.answer(self.sent[0], Status.OK)
        async with asyncio.timeout(30):
            await asyncio.gather(*(task for _, task in self.waiters), return_exceptions=True)
            await asyncio.gather(*self.appended, return_exceptions=True)
        await until(lambda: self.memory.held == 0)
        assert not self.memory.waiting, "a writer without a waiter has no place in the queue"


@pytest.mark.asyncio
async def test_a_writer_that_waited_for_its_own_bound_is_told_of_memory_that_others_held_meanwhile() -> None:
    rig = Writers(10_000, pending_bytes_max=1000)
    own, other = rig.writer(), rig.writer()
    rig.append(own, 1000)
    await rig.settle()
    waiter = rig.wait(own)
    await rig.settle()
    assert own.pending_bytes == 1000, "it waits for its own bound: the memory has room"
    assert rig.memory.has_room
    (first, copy), held = rig.sent, rig.memory.limit
    rig.memory.held += held
    for sent in (first, copy):
        rig.answer(sent, Status.OK)
    await rig.settle()
    assert not waiter.task.done(), "its own bound has room, the memory has none"
    rig.memory.release(held)
    await rig.settle()
    assert waiter.task.done(), "nothing is held, and no other answer will come"
    assert other.has_room
    await rig.end()


@pytest.mark.asyncio
async def test_a_writer_that_is_told_of_memory_while_its_own_bound_is_full_is_told_again() -> None:
    rig = Writers(10_000, pending_bytes_max=1000)
    own = rig.writer()
    rig.append(own, 1000)
    await rig.settle()
    held = rig.memory.limit
    rig.memory.held += held
    waiter = rig.wait(own)
    await rig.settle()
    rig.memory.release(held)
    await rig.settle()
    assert not waiter.task.done(), "its own bound is full"
    rig.memory.held += held
    for sent in list(rig.sent):
        rig.answer(sent, Status.OK)
    await rig.settle()
    rig.memory.release(held)
    await rig.settle()
    assert waiter.task.done()
    await rig.end()


@pytest.mark.asyncio
async def test_a_waiter_that_is_cancelled_takes_no_other_waiter_of_its_writer_out_of_the_queue() -> None:
    rig = Writers(10_000)
    own = rig.writer()
    rig.memory.held += rig.memory.limit
    first, second = rig.wait(own), rig.wait(own)
    await rig.settle()
    first.task.cancel()
    await rig.settle()
    assert first.task.cancelled()
    rig.memory.release(rig.memory.limit)
    await rig.settle()
    assert second.task.done()
    await rig.end()


@pytest.mark.asyncio
async def test_entries_that_a_closed_ledger_did_not_send_make_room_for_the_others() -> None:
    rig = Writers(1000)
    closed, other = rig.writer(), rig.writer()
    rig.memory.held += 1000
    waiter = rig.wait(other)
    await rig.settle()
    rig.append(closed, 1000)
    rig.memory.release(1000)
    closed._abandon()
    assert not rig.memory.has_room
    await rig.settle()
    assert (rig.sent, rig.memory.held) == ([], 0)
    assert waiter.task.done()
    await rig.end()


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(40))
async def test_no_waiter_sleeps_while_its_writer_has_room_whatever_the_order_of_answers(seed: int) -> None:
    rng = random.Random(seed)
    rig = Writers(
        rng.choice((3000, 3 * EXPECTED_APPEND_BYTES)),
        pending_bytes_max=2000,
        unanswered_bytes_max=3500,
        pending_entries_max=4,
    )
    largest = rig.memory.limit // 3
    writers = [rig.writer() for _ in range(4)]
    for _ in range(300):
        step, at = rng.random(), rng.randrange(len(writers))
        writer = writers[at]
        if step < 0.35:
            for _ in range(rng.randint(1, 3)):
                if writer.has_room or rng.random() < 0.1:  # a cursor exceeds the memory bound
                    rig.append(writer, rng.randint(0, largest))
        elif step < 0.5:
            rig.wait(writer)
        elif step < 0.55 and (waiting := [task for _, task in rig.waiters if not task.done()]):
            rng.choice(waiting).cancel()
        elif step < 0.58:
            writer._abandon()
            writers[at] = rig.writer()
        elif rig.sent:
            sent = rng.choice(rig.sent)
            if rng.random() < 0.1:
                rig.sent.remove(sent)
                sent.answer.set_exception(BackPressure("full"))
            else:
                rig.answer(sent, Status.BUSY if rng.random() < 0.2 else Status.OK)
        if rng.random() < 0.7:
            await rig.settle()
            rig.check()
    await rig.end()
    for writer in writers:
        assert writer._sender.unanswered_bytes == writer.pending_bytes == 0
        writer._abandon()
