"""The first copy of an entry: who is told of it, in which order, and that nothing else changes by it."""

import asyncio

from magnetar.ledger import LedgerEnd
from magnetar.ledger.handle import LedgerWriter
from magnetar.ledger.peer_format import BookieOperation
from magnetar.ledger.writer_core import WriterState
from tests.ledger.conftest import Cluster, until
from tests.ledger.test_listener import listening, payload
from tests.ledger.test_pending import acked, pending


# ------------------------------------------------------------------------------------------------- the core
def test_an_entry_has_a_first_copy_when_all_before_it_have_one() -> None:
    adds = pending("x", "y", "z")
    assert adds.find_first_copies(-1) == -1
    acked(adds, 1, 0)
    assert adds.find_first_copies(-1) == -1, "the entry before it has none"
    acked(adds, 0, 2)
    assert adds.find_first_copies(-1) == 1
    assert (adds.lac, adds.find_first_copies(1)) == (-1, 1), "and none of them is confirmed"


def test_what_is_confirmed_counts_and_the_result_never_falls() -> None:
    adds = pending("x", "y")
    acked(adds, 0, 0)
    acked(adds, 0, 1)
    assert (adds.lac, adds.find_first_copies(-1)) == (0, 0)
    acked(adds, 1, 0)
    last = adds.find_first_copies(0)
    adds.mark_slot_failed(0, "a")
    adds.replace_ensemble(("d", "b", "c"))
    assert (last, adds.find_first_copies(last), adds.find_first_copies(0)) == (1, 1, 0), "its copy is dropped, then"


# ------------------------------------------------------------------------------------------------- the writer
async def silenced(cluster: Cluster, writer: LedgerWriter, *slots: int) -> None:
    for slot in slots:
        cluster.bookie(writer.record.fragments[-1].bookies[slot]).silent.add(BookieOperation.ADD)


async def test_the_first_copies_are_told_in_order_and_confirm_nothing(cluster: Cluster) -> None:
    writer, listener = await listening(cluster)
    told: list[int] = []
    writer.tell_first_copies = told.append
    await silenced(cluster, writer, 1, 2)
    for number in range(3):
        writer.append_for_listener(payload(b"%d" % number))
    await until(lambda: told[-1:] == [2])
    assert told == sorted(set(told))
    assert (listener.told, writer.last_confirmed, writer.state) == ([], -1, WriterState.OPEN)
    await writer.abandon()
    assert listener.failures, "the quorum never had them"


async def test_what_the_quorum_has_already_is_not_told(cluster: Cluster) -> None:
    writer, listener = await listening(cluster)
    told: list[int] = []
    writer.tell_first_copies = lambda last: told.append(last - writer.last_confirmed)
    for number in range(20):
        writer.append_for_listener(payload(b"%d" % number))
        await asyncio.sleep(0)
    await listener.until(19)
    assert all(each > 0 for each in told)
    assert await writer.close() == LedgerEnd(19, writer.adds.length_confirmed)
