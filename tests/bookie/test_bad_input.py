"""Whatever comes at the bookie's port gets a clear answer, and the store stays whole."""

import random
from collections.abc import Awaitable, Callable

import pytest

from magnetar.bookie.format.ledger_index import LedgerState
from magnetar.bookie.server import Bookie
from magnetar.bookie.store.index_files import LedgerDescriptor
from magnetar.ledger.metadata_core import make_ledger_record
from magnetar.ledger.peer_format import (
    PEER_PROTOCOL_VERSION,
    BookieAnswerHead,
    BookieOperation,
    BookieRequestFlags,
    BookieRequestHead,
    Status,
    decode_answer,
    encode_add_many_request,
    encode_add_request,
    encode_adds,
    encode_admin_request,
)
from magnetar.ledger.writer_core import Striping
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY, OTHER_KEY, PeerCaller, payload_of, rows, stored_entry
from tests.bookie.stores import NODE

LAST = (1 << 63) - 1
FIRST = -(1 << 63)
COUNT = (1 << 32) - 1


def with_whole_store(test: Callable[[Cluster, Bookie, PeerCaller], Awaitable[None]]) -> None:
    """Runs the test between an add and a read of it, then checks the store, flushes, restarts and reads again."""

    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start(entry_bytes_max=4096)
        caller = cluster.caller(bookie)
        assert (await caller.add(1, 0, b"before")).status is Status.OK
        await test(cluster, bookie, caller)
        assert (await caller.add(1, 1, b"after", lac=0)).status is Status.OK
        bookie.store.check()
        await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
        for caller in (cluster.caller(bookie), cluster.caller(await cluster.restart())):
            for entry, payload in enumerate((b"before", b"after")):
                head, entries = await caller.read(1, entry)
                assert (head.status, payload_of(entries[0])) == (Status.OK, payload)

    with_cluster(main)


pytestmark = pytest.mark.run_by.with_args(with_whole_store)


async def raw(caller: PeerCaller, head: bytes, *frames: bytes) -> BookieAnswerHead:
    return decode_answer((await caller.peer.request(head, frames, timeout_s=10)).head)


@pytest.mark.parametrize(
    "op",
    [
        BookieOperation.ADD,
        BookieOperation.ADD_MANY,
        BookieOperation.READ,
        BookieOperation.READ_LAC,
        BookieOperation.WRITE_LAC,
        BookieOperation.ADMIN,
    ],
)
@pytest.mark.parametrize("ledger", [-1, FIRST])
async def test_negative_ledgers_are_bad_requests(
    cluster: Cluster, bookie: Bookie, caller: PeerCaller, /, op: BookieOperation, ledger: int
) -> None:
    frames = (stored_entry(ledger, 0, b"x"),) if op is BookieOperation.ADD else ()
    for flags in (BookieRequestFlags.NONE, BookieRequestFlags.FENCE, BookieRequestFlags.RECOVERY):
        assert (await caller.send(op, ledger, 0, flags=flags, frames=frames))[0].status is Status.BAD_REQUEST
    assert len(bookie.store.descriptors) == 1


async def test_negative_and_absurd_entries_counts_and_lacs(
    cluster: Cluster, bookie: Bookie, caller: PeerCaller, /
) -> None:
    for entry in (-1, -2, FIRST):
        assert (await caller.read(1, entry))[0].status is Status.BAD_REQUEST
        assert (await caller.add(1, entry, b"x")).status is Status.BAD_REQUEST
    for lac in (5, 6, LAST, -2, FIRST):
        assert (await caller.add(1, 5, b"x", lac=lac)).status is Status.BAD_REQUEST
    assert (await caller.send(BookieOperation.WRITE_LAC, 1, -2))[0].status is Status.BAD_REQUEST
    assert (await caller.read(1, 0, count=0))[0].status is Status.BAD_REQUEST
    head, entries = await caller.read(1, 0, count=COUNT, bytes_max=0)
    assert (head.status, len(entries)) == (Status.OK, 1), "one entry at least, whatever the bound"
    head, entries = await caller.read(1, 0, count=COUNT, bytes_max=COUNT)
    assert (head.status, len(entries)) == (Status.OK, 1)
    assert (await caller.read(1, LAST, count=COUNT, bytes_max=COUNT))[0].status is Status.NO_SUCH_ENTRY


async def test_the_largest_ledger_and_entry_are_stored_flushed_fenced_and_read(
    cluster: Cluster, bookie: Bookie, caller: PeerCaller, /
) -> None:
    assert (await caller.add(LAST, LAST, b"last", lac=LAST - 1)).status is Status.OK
    assert (await caller.add(LAST, 0, b"first")).status is Status.OK
    assert await caller.add_many(LAST, {LAST - 1: b"one before", 7: b"seven"}) == [Status.OK] * 2
    await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
    for entry, payload in ((0, b"first"), (7, b"seven"), (LAST - 1, b"one before"), (LAST, b"last")):
        head, entries = await caller.read(LAST, entry, count=COUNT)
        assert (head.status, payload_of(entries[0])) == (Status.OK, payload)
    assert (await caller.read(LAST, 8, fence=True))[0].status is Status.NO_SUCH_ENTRY
    assert (await caller.add(LAST, 9, b"late")).status is Status.FENCED
    assert (await caller.send(BookieOperation.READ_LAC, LAST))[0] == BookieAnswerHead(
        BookieOperation.READ_LAC, Status.OK, LAST, LAST, LAST - 1, 0
    )


async def test_unknown_ledgers_and_entries_are_said_to_be_so(
    cluster: Cluster, bookie: Bookie, caller: PeerCaller, /
) -> None:
    for ledger in (2, LAST):
        assert (await caller.read(ledger, 0))[0].status is Status.NO_SUCH_LEDGER
        assert (await caller.send(BookieOperation.READ_LAC, ledger))[0].status is Status.NO_SUCH_LEDGER
    assert (await caller.read(1, 7))[0].status is Status.NO_SUCH_ENTRY
    assert len(bookie.store.descriptors) == 1, "who asks creates nothing"


async def test_entries_beyond_the_limit_are_bad_requests_alone_and_among_others(
    cluster: Cluster, bookie: Bookie, caller: PeerCaller, /
) -> None:
    assert (await caller.add(1, 5, bytes(4096 - 36))).status is Status.OK
    assert (await caller.add(1, 6, bytes(4096 - 35))).status is Status.BAD_REQUEST
    many = {7: b"small", 8: bytes(4096 - 35), 9: bytes(4096 - 36), 10: bytes(1 << 20)}
    assert await caller.add_many(1, many) == [Status.OK, Status.BAD_REQUEST, Status.OK, Status.BAD_REQUEST]
    assert (await caller.read(1, 8))[0].status is Status.NO_SUCH_ENTRY


async def test_heads_that_are_cut_or_of_another_version_or_unknown(
    cluster: Cluster, bookie: Bookie, caller: PeerCaller, /
) -> None:
    stored = stored_entry(1, 5, b"x")
    good = encode_add_request(1, 5, KEY)
    bad = [good[:cut] for cut in range(len(good))] + [good + b"\0", good * 2]
    bad += [bytes([version]) + good[1:] for version in (0, PEER_PROTOCOL_VERSION + 1, 255)]
    bad += [good[:1] + bytes([op]) + good[2:] for op in (0, max(BookieOperation) + 1, 255)]
    bad += [good[:2] + (1 << bit).to_bytes(2, "big") + good[4:] for bit in range(3, 16)]
    for head in bad:
        assert (await raw(caller, head, stored)).status is Status.BAD_REQUEST, head
    assert (
        await raw(caller, encode_add_request(1, 5, KEY, BookieRequestFlags.FENCE), stored)
    ).status is Status.BAD_REQUEST
    assert (await caller.read(1, 5))[0].status is Status.NO_SUCH_ENTRY


async def test_requests_of_many_adds_that_lie_are_bad_requests_and_nothing_of_them_is_stored(
    cluster: Cluster, bookie: Bookie, caller: PeerCaller, /
) -> None:
    stored = [stored_entry(1, 5, b"five"), stored_entry(1, 6, b"six")]
    table, run = (bytes(frame) for frame in encode_adds(rows(stored)))
    for count in (0, 1, 3, COUNT):
        head = encode_add_many_request(1, 5, count, KEY)
        assert (await raw(caller, head, table, run)).status is Status.BAD_REQUEST
    head = encode_add_many_request(1, 5, 2, KEY)
    for frames in ((), (table,), (run,), (table, run, run), (table, run[:-1]), (table[:-1], run), (run, table)):
        assert (await raw(caller, head, *frames)).status is Status.BAD_REQUEST
    for entry in (5, 6):
        assert (await caller.read(1, entry))[0].status is Status.NO_SUCH_ENTRY


async def test_random_bytes_are_answered(cluster: Cluster, bookie: Bookie, caller: PeerCaller, /) -> None:
    rng = random.Random(3)
    for _ in range(300):
        head = bytearray(encode_add_many_request(rng.choice((2, LAST)), 0, rng.choice((1, 2, COUNT)), KEY))
        head[1] = rng.choice((1, 2, 3, 4, 5, 6, 7, rng.randrange(256)))
        head[rng.randrange(len(head))] = rng.randrange(256)
        frames = [rng.randbytes(rng.choice((0, 36, 40, 80, 5000))) for _ in range(rng.randrange(4))]
        answer = await raw(caller, bytes(head), *frames)
        assert answer.status is not Status.OK or answer.op in (
            BookieOperation.PING,
            BookieOperation.WRITE_LAC,
            BookieOperation.READ_LAC,
        )


def test_keys_are_compared_whole_in_constant_time_and_shown_to_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return a == b

    async def test(cluster: Cluster, bookie: Bookie, caller: PeerCaller) -> None:
        caplog.set_level("DEBUG")
        monkeypatch.setattr("magnetar.bookie.store.index_files.hmac.compare_digest", compare)
        for wrong in (OTHER_KEY, KEY[:-1] + b"x", b"x" + KEY[1:], bytes(20)):
            compared.clear()
            assert (await caller.add(1, 5, b"x", key=wrong)).status is Status.UNAUTHORIZED
            assert await caller.add_many(1, {5: b"x", 6: b"y"}, key=wrong) == [Status.UNAUTHORIZED] * 2
            assert (await caller.read(1, 0, fence=True, key=wrong))[0].status is Status.UNAUTHORIZED
            assert (await caller.send(BookieOperation.WRITE_LAC, 1, 0, key=wrong))[0].status is Status.UNAUTHORIZED
            assert compared == [(KEY, wrong)] * 4, "by compare_digest, and nothing else"
        await raw(caller, encode_add_request(1, 5, KEY)[:-1])
        await raw(caller, encode_admin_request(), b"no json")
        monkeypatch.undo()

    with_whole_store(test)
    record = make_ledger_record(1, Striping(1, 1, 1), ["b"], key=KEY, token="t", created_ms=0, properties={})
    shown = [
        repr(BookieRequestHead(BookieOperation.ADD, BookieRequestFlags.NONE, 1, 2, 0, 0, KEY)),
        repr(LedgerState(1, False, KEY, -1, -1)),
    ]
    shown += [repr(record), str(record), repr(LedgerDescriptor(1, KEY)), caplog.text]
    for text in shown:
        for key in (KEY, OTHER_KEY):
            assert key.decode() not in text
            assert key.hex() not in text
