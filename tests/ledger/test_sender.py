"""The adds of a turn travel together; each is answered, refused or asked again for itself."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from magnetar.ledger.bookies import LedgerConfig
from magnetar.ledger.metadata_core import make_ledger_record
from magnetar.ledger.peer_format import (
    ADDS_PER_REQUEST_MAX,
    ENTRY_HEADER_STRUCT,
    BookieAnswerHead,
    BookieOperation,
    BookieRequestHead,
    Status,
    decode_add_statuses,
    decode_answer,
    decode_request,
    encode_add_statuses,
    verify_add,
    verify_adds,
)
from magnetar.ledger.reader_core import PendingAppend
from magnetar.ledger.sender import (
    BUSY_RESEND_DELAY_S,
    REQUEST_BYTES_MAX,
    AddOutcomeFact,
    AddSender,
    PendingAppendWithFuture,
)
from magnetar.ledger.writer_core import (
    AddFailed,
    AddRefused,
    AddsAcked,
    AppendMemoryBudget,
    EntryOutcome,
    PendingAdds,
    Striping,
)
from magnetar.proto.errors import BackPressure, ConnectionLost
from magnetar.runtime.files import Buffer
from magnetar.runtime.network import AnswerListener, PeerReply, notify_asker_of_answer

BOOKIES = [str(uuid.UUID(int=number)) for number in range(1, 5)]


class Sent(NamedTuple):
    bookie: str
    head: BookieRequestHead
    frames: Sequence[Buffer]
    answer: asyncio.Future[PeerReply]

    @property
    def entries(self) -> list[int]:
        return [entry for entry, _, _ in self.opened]

    @property
    def opened(self) -> list[tuple[int, tuple[bytes, ...], int]]:
        if self.head.op is BookieOperation.ADD:
            one = verify_add(self.head.ledger, self.head.entry, self.frames, 8 << 20)
            assert one is not None
            return [one[0]]
        return verify_adds(self.head, self.frames, 8 << 20).entries

    def say(self, *statuses: Status) -> None:
        self.answer.set_result(PeerReply(*encode_add_statuses(self.head.ledger, self.head.entry, bytes(statuses))))


class Rig:
    """A sender, what it asked of bookies, and what it told the core."""

    def __init__(self, shape: tuple[int, int, int] = (1, 1, 1), retry_s: float = 0.0001) -> None:
        striping = Striping(*shape)
        record = make_ledger_record(
            1, striping, BOOKIES[: shape[0]], key=b"k" * 20, token="t", created_ms=0, properties={}
        )  # fmt: skip
        self.adds: PendingAdds[PendingAppend] = PendingAdds(striping, BOOKIES[: shape[0]])
        self.sent: list[Sent] = []
        self.facts: list[AddOutcomeFact] = []
        self.failed: list[str] = []
        self.memory = AppendMemoryBudget(1 << 30)
        config = LedgerConfig(retry_s=retry_s, add_timeout_s=9.5 * retry_s)
        failed: Callable[[str, object], None] = lambda bookie, _: self.failed.append(bookie)
        self.sender = AddSender(record, self, config, self._acked, self._learn, failed)  # type: ignore[arg-type]
        self._happened = asyncio.Event()

    def _acked(self, adds: list[PendingAppend], place: tuple[int, str]) -> None:
        self._learn(AddsAcked([add.entry for add in adds], *place))

    def _learn(self, fact: AddOutcomeFact) -> None:
        self.facts.append(fact)
        self._happened.set()

    @property
    def peers(self) -> dict[str, Any]:
        return {bookie: SimpleNamespace(send_request=partial(self._post, bookie)) for bookie in BOOKIES}

    def _post(
        self, bookie: str, asker: AnswerListener, head: bytes, frames: Sequence[Buffer], *, timeout_s: float
    ) -> None:
        answer: asyncio.Future[PeerReply] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(partial(notify_asker_of_answer, asker))
        self.sent.append(Sent(bookie, decode_request(head), frames, answer))
        self._happened.set()

    def append(self, *payloads: bytes) -> None:
        for payload in payloads:
            future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            add = PendingAppendWithFuture((payload,), len(payload), future)
            self.adds.add(add, add.size)
            self.sender.send(add, self.adds.lac)

    async def wait_sent(self, count: int) -> None:
        await self._wait(lambda: len(self.sent) >= count)

    async def wait_facts(self, count: int) -> None:
        await self._wait(lambda: len(self.facts) >= count)

    async def _wait(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not reached():
                self._happened.clear()
                await self._happened.wait()


@pytest.mark.asyncio
async def test_all_adds_of_a_turn_to_a_bookie_are_one_request_and_replicas_share_its_frames() -> None:
    rig = Rig((3, 3, 2))
    rig.append(b"zero", b"one", b"two")
    assert rig.sent == [], "nothing leaves within the turn"
    await rig.wait_sent(3)
    assert [sent.bookie for sent in rig.sent] == BOOKIES[:3]
    assert all(sent.head.op is BookieOperation.ADD_MANY and sent.entries == [0, 1, 2] for sent in rig.sent)
    assert rig.sent[0].frames is rig.sent[1].frames is rig.sent[2].frames
    rig.append(b"three")
    await rig.wait_sent(6)
    assert [(sent.head.op, sent.entries) for sent in rig.sent[3:]] == [(BookieOperation.ADD, [3])] * 3


@pytest.mark.asyncio
async def test_a_striped_ledger_sends_each_bookie_its_entries() -> None:
    rig = Rig((4, 2, 2))
    rig.append(*[b"%d" % entry for entry in range(9)])
    await rig.wait_sent(4)
    got = {sent.bookie: sent.entries for sent in rig.sent}
    held = ([0, 3, 4, 7, 8], [0, 1, 4, 5, 8], [1, 2, 5, 6], [2, 3, 6, 7])
    assert got == dict(zip(BOOKIES, held, strict=True))
    for sent in rig.sent:
        assert [stored[1] for _, stored, _ in sent.opened] == [b"%d" % entry for entry in sent.entries]


@pytest.mark.asyncio
async def test_requests_are_bounded_in_entries_and_bytes() -> None:
    rig = Rig()
    rig.append(*[b""] * (ADDS_PER_REQUEST_MAX + 1))
    await rig.wait_sent(2)
    assert [len(sent.entries) for sent in rig.sent] == [ADDS_PER_REQUEST_MAX, 1]
    rig.append(*[bytes(400 << 10)] * 7)
    await rig.wait_sent(5)
    assert [len(sent.entries) for sent in rig.sent[2:]] == [3, 3, 1]
    assert all(sum(map(len, sent.frames)) < 2 * REQUEST_BYTES_MAX for sent in rig.sent)


@pytest.mark.asyncio
async def test_the_lac_of_an_entry_is_that_of_its_append() -> None:
    rig = Rig()
    rig.append(b"zero")
    await rig.wait_sent(1)
    rig.adds.record_entry_acks(AddsAcked([0], 0, BOOKIES[0]))
    rig.append(b"one", b"two")
    await rig.wait_sent(2)
    assert [ENTRY_HEADER_STRUCT.unpack(stored[0])[2] for _, stored, _ in rig.sent[1].opened] == [0, 0]


@pytest.mark.asyncio
async def test_each_status_is_told_for_its_entry_and_what_was_stored_comes_first() -> None:
    rig = Rig()
    rig.append(*[b"%d" % entry for entry in range(6)])
    await rig.wait_sent(1)
    rig.sent[0].say(Status.FENCED, Status.OK, Status.BUSY, Status.READ_ONLY, Status.OK, Status.UNAUTHORIZED)
    await rig.wait_sent(2)
    assert rig.facts == [
        AddsAcked([1, 4], 0, BOOKIES[0]), AddRefused(EntryOutcome.FENCED), AddRefused(EntryOutcome.UNAUTHORIZED),
        AddFailed(3, 0, BOOKIES[0]),
    ]  # fmt: skip
    assert rig.sent[1].entries == [2], "only what was busy is asked again"
    rig.sent[1].answer.set_result(PeerReply(BookieAnswerHead(BookieOperation.ADD, Status.OK, 1, 2, -1, 0).encode(), ()))
    await rig.wait_facts(5)
    assert rig.facts[4] == AddsAcked([2], 0, BOOKIES[0])


@pytest.mark.asyncio
async def test_a_lost_connection_is_unknown_for_all_of_them() -> None:
    rig = Rig()
    rig.append(b"zero", b"one")
    await rig.wait_sent(1)
    rig.sent[0].answer.set_exception(ConnectionLost("it broke"))
    await rig.wait_facts(2)
    assert rig.facts == [AddFailed(0, 0, BOOKIES[0]), AddFailed(1, 0, BOOKIES[0])]
    assert rig.failed == [BOOKIES[0]], "the bookie failed once"


@pytest.mark.asyncio
@pytest.mark.parametrize("wrong", ["short", "long", "no frame", "other op", "no head", "no status"])
async def test_an_answer_that_is_none_is_unknown_for_all_of_them(wrong: str) -> None:
    rig = Rig()
    rig.append(b"zero", b"one")
    await rig.wait_sent(1)
    head, frames = encode_add_statuses(rig.sent[0].head.ledger, rig.sent[0].head.entry, b"\0\0")
    other = decode_answer(head)._replace(op=BookieOperation.PING).encode()
    replies = {"short": (head, (b"\0",)), "long": (head, (b"\0\0\0",)), "no frame": (head, ()),
               "other op": (other, frames), "no head": (b"", frames), "no status": (head, (b"\0\x77",))}  # fmt: skip
    rig.sent[0].answer.set_result(PeerReply(*replies[wrong]))
    await rig.wait_facts(2)
    assert rig.facts == [AddFailed(0, 0, BOOKIES[0]), AddFailed(1, 0, BOOKIES[0])]


@pytest.mark.asyncio
async def test_a_busy_bookie_and_a_full_queue_are_asked_again_for_the_add_time_out() -> None:
    rig = Rig()
    rig.append(b"zero", b"one")
    for number in range(1, 11):
        await rig.wait_sent(number)
        if number % 2:
            rig.sent[-1].answer.set_exception(BackPressure("full"))
        else:
            rig.sent[-1].answer.set_result(
                PeerReply(BookieAnswerHead(BookieOperation.ADD_MANY, Status.BUSY, 1, 0, -1, 0).encode(), ())
            )
    await rig.wait_facts(2)
    assert {sent.entries == [0, 1] for sent in rig.sent} == {True}
    assert rig.facts == [AddFailed(0, 0, BOOKIES[0]), AddFailed(1, 0, BOOKIES[0])]
    assert (
        decode_add_statuses(BookieAnswerHead(BookieOperation.ADD_MANY, Status.BUSY, 1, 0, -1, 0), (), 2)
        == [Status.BUSY] * 2
    )


@pytest.mark.asyncio
async def test_a_busy_bookie_is_asked_again_soon_when_it_stores_something_else() -> None:
    rig, busy = Rig(retry_s=2.0), BookieAnswerHead(BookieOperation.ADD_MANY, Status.BUSY, 1, 0, -1, 0).encode()
    rig.append(b"zero", b"one")
    await rig.wait_sent(1)
    begun = asyncio.get_running_loop().time()
    for number in range(20):  # twice as often as it is asked after `retry_s`: these do not count
        rig.sent[-1].answer.set_result(PeerReply(busy, ()))
        rig.append(b"more")
        await rig.wait_sent(2 * number + 2)
        rig.sent[-1].say(Status.OK)
        await rig.wait_sent(2 * number + 3)
        assert rig.sent[-1].entries == [0, 1]
    assert asyncio.get_running_loop().time() - begun >= 20 * BUSY_RESEND_DELAY_S * 0.9, "not at once, again and again"
    rig.sent[-1].say(Status.OK, Status.OK)
    await rig.wait_facts(21)
    assert rig.failed == []
    assert (rig.sender.unanswered_bytes, rig.memory.held) == (0, 0)


@pytest.mark.asyncio
async def test_what_waits_for_a_busy_bookie_fails_when_the_handle_is_finished() -> None:
    rig = Rig(retry_s=0.02)
    rig.append(b"zero", b"one")
    await rig.wait_sent(1)
    rig.sent[0].say(Status.BUSY, Status.OK)
    await rig.wait_facts(1)
    rig.sender.close()
    await rig.wait_facts(2)
    assert rig.facts[1] == AddFailed(0, 0, BOOKIES[0])
    assert (len(rig.sent), rig.sender.unanswered_bytes, rig.memory.held) == (1, 0, 0)


@pytest.mark.asyncio
async def test_nothing_is_asked_again_after_the_handle_is_finished() -> None:
    rig = Rig()
    rig.append(b"zero", b"one")
    await rig.wait_sent(1)
    rig.sender.close()
    rig.sent[0].say(Status.BUSY, Status.OK)
    await rig.wait_facts(2)
    assert rig.facts == [AddsAcked([1], 0, BOOKIES[0]), AddFailed(0, 0, BOOKIES[0])]
    assert len(rig.sent) == 1


@pytest.mark.asyncio
@pytest.mark.parametrize("is_sent", [True, False])
async def test_entries_that_a_replaced_bookie_was_too_busy_for_are_not_asked_again_and_the_handle_hears_of_the_room(
    is_sent: bool,
) -> None:
    rig = Rig((3, 3, 2))
    rig.append(b"zero")
    await rig.wait_sent(3)
    rig.adds.replace_ensemble([BOOKIES[3], *BOOKIES[1:3]])
    before = rig.sender.unanswered_bytes
    if is_sent:
        rig.sent[0].say(Status.BUSY)
    else:
        rig.sent[0].answer.set_exception(BackPressure("full"))
    await rig.wait_facts(1)
    assert rig.facts == [AddsAcked([], 0, BOOKIES[0])], "nothing is stored"
    assert rig.sender.unanswered_bytes < before
    assert len(rig.sent) == 3


@pytest.mark.asyncio
async def test_of_a_request_that_was_refused_only_entries_of_bookies_that_were_not_replaced_are_asked_again() -> None:
    """An entry that is confirmed keeps its bookies when one of them is replaced."""
    rig = Rig((3, 3, 2))
    rig.append(b"zero", b"one")
    await rig.wait_sent(3)
    for slot in (1, 2):
        rig.adds.record_entry_acks(AddsAcked([0], slot, BOOKIES[slot]))
    rig.adds.replace_ensemble([BOOKIES[3], *BOOKIES[1:3]])
    before = rig.sender.unanswered_bytes
    rig.sent[0].say(Status.BUSY, Status.BUSY)
    await rig.wait_sent(4)
    assert (rig.sent[3].bookie, rig.sent[3].entries) == (BOOKIES[0], [0])
    assert rig.facts == [AddsAcked([], 0, BOOKIES[0])], "the handle has room for what is not asked again"
    assert rig.sender.unanswered_bytes < before
