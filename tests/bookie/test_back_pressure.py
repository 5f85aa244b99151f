"""Adds that a slow disk does not take wait with who wants them: memory is bounded, and who must pass passes."""

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from magnetar.bookie.adds import AddRequestHandler
from magnetar.bookie.server import Bookie
from magnetar.bookie.service import WAITING_FENCES_DIVISOR, WAITING_LACS_DIVISOR, BookieService
from magnetar.bookie.store.store import Store, StoreCallbacks, StoreConfig
from magnetar.ledger.peer_format import (
    BookieOperation,
    BookieRequestFlags,
    BookieRequestHead,
    Status,
    decode_add_statuses,
    decode_answer,
    encode_add_many_request,
    encode_adds,
)
from magnetar.proto.errors import BackPressure
from magnetar.runtime.network import Endpoint, Peer
from magnetar.runtime.process import make_system_world
from magnetar.runtime.tasks import Worker
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY, PeerCaller, rows, stored_entry
from tests.bookie.stores import NODE
from tests.compiled import replaces_code

pytestmark = pytest.mark.run_by.with_args(with_cluster)

HELD = 40_000


def watched(bookie: Bookie, most: dict[str, int]) -> None:
    """Notes the most that was ever kept, at every change of it."""
    adds, store = bookie.first.service.adds, bookie.store

    def note(name: str, value: int) -> None:
        most[name] = max(most.get(name, 0), value)

    press = adds._press

    def noting() -> None:
        press()
        note("held", adds.held_adds_and_bytes[1])
        note("memtable", store.memtable.size_bytes)
        note("queued", store._journal.queued_bytes)

    adds._press = noting  # type: ignore[method-assign]


@replaces_code
def test_what_is_kept_for_a_slow_disk_is_bounded_and_the_socket_is_slowed_down() -> None:
    most: dict[str, int] = {}

    async def main(cluster: Cluster) -> None:
        bookie = await cluster.start(held_bytes_max=HELD)
        watched(bookie, most)
        cluster.simulation.node(NODE).disk_delays.mean_s = 0.03
        callers = [cluster.caller(bookie) for _ in range(4)]
        many = []
        for number in range(100):
            entries = {10 * number + at: bytes(400) for at in range(10)}
            many.append(asyncio.ensure_future(callers[number % 4].add_many(1, entries)))
            await asyncio.sleep(0.002)
        answers = await asyncio.gather(*many)
        assert {status for answer in answers for status in answer} <= {Status.OK, Status.BUSY}
        assert answers.count([Status.OK] * 10) > 20, "the bookie went on"
        assert bookie.statistics()["slowed_down"] > 0
        assert bookie.statistics()["held_bytes"] == 0
        assert (await callers[0].add(1, 1000, b"and goes on")).status is Status.OK

    with_cluster(main)
    request = 10 * 436
    assert HELD // 2 < most["held"] <= HELD + request
    assert most["memtable"] <= 3 * (24 << 10) + 2 * (request + 10 * 200)


@replaces_code
async def test_fences_reads_and_recovery_adds_overtake_what_clients_add(cluster: Cluster, /) -> None:
    """The store has no room for a while: a recovery goes first when there is some, a fence and reads need none."""
    admitted: list[int] = []
    bookie = await cluster.start(held_bytes_max=2 * HELD)
    writer, recoverer = cluster.caller(bookie), cluster.caller(bookie)
    assert (await writer.add(1, 0, b"zero")).status is Status.OK
    cluster.simulation.node(NODE).disk_delays.mean_s = 0.05
    add_many = bookie.store.add_entries

    def noting(ledger: int, *rest: Any) -> Status:
        status = add_many(ledger, *rest)
        if status is Status.OK:
            admitted.append(ledger)
        return status

    bookie.store.add_entries = noting  # type: ignore[method-assign]
    adds = []
    for number in range(14):
        entries = {10 * number + at: bytes(400) for at in range(1, 11)}
        adds.append(asyncio.ensure_future(writer.add_many(1 if number < 10 else 3, entries)))
    await _held(bookie)
    before = len(admitted)
    recovered = asyncio.ensure_future(recoverer.add_many(2, {0: b"kept"}, recovery=True))
    head, _ = await recoverer.read(1, 0, fence=True)
    assert head.status is Status.OK
    assert await recovered == [Status.OK]
    statuses = {status for answer in await asyncio.gather(*adds) for status in answer}
    assert Status.FENCED in statuses, "adds that were held are behind the fence"
    assert admitted[before:] == [2, 3, 3, 3, 3], "the recovery goes first, and held adds of a fenced ledger never"


async def test_a_full_disk_refuses_what_it_would_hold_for_ever(cluster: Cluster, /) -> None:
    bookie = await cluster.start(held_bytes_max=HELD, free_bytes_min=0)
    caller = cluster.caller(bookie)
    disk = cluster.simulation.node(NODE).disk
    capacity, disk.capacity_bytes = disk.capacity_bytes, disk.used_bytes() + 10_000
    answers: list[Status] = []
    entry = 0
    while Status.READ_ONLY not in answers:
        answers = await caller.add_many(1, {entry + at: bytes(400) for at in range(10)})
        entry += 10
    assert bookie.statistics()["held_adds"] == 0
    disk.capacity_bytes = capacity
    await asyncio.sleep(30)
    assert (await caller.add_many(1, {entry: b"again"})) == [Status.OK]


async def _held(bookie: Bookie) -> None:
    """Returns when an add is held."""
    held, hold = asyncio.Event(), bookie.first.service.adds._enqueue

    def noting(batch: Any) -> None:
        held.set()
        hold(batch)

    bookie.first.service.adds._enqueue = noting  # type: ignore[method-assign]
    await held.wait()


# ---------------------------------------------------------------------------------------- real sockets
class Gate:
    """Workers of the system, of which those named in `closed` do nothing until it is opened."""

    def __init__(self, start: Callable[[str], Worker], closed: tuple[str, ...]) -> None:
        self._start = start
        self._closed = closed
        self.opened = asyncio.Event()
        self.opened.set()

    def start(self, name: str) -> Worker:
        return _Gated(self._start(name), self.opened if name in self._closed else None)


class _Gated:
    def __init__(self, worker: Worker, gate: asyncio.Event | None) -> None:
        self._worker = worker
        self._gate = gate

    def run(self, function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        return (
            self._worker.run(function, *args)
            if self._gate is None
            else asyncio.ensure_future(self._late(function, *args))
        )

    async def _late(self, function: Callable[..., Any], *args: Any) -> Any:
        assert self._gate is not None
        await self._gate.wait()
        return await self._worker.run(function, *args)

    async def close(self) -> None:
        await self._worker.close()


@pytest.mark.asyncio
async def test_over_real_sockets_memory_is_bounded_while_the_disk_does_nothing_and_a_fence_passes(
    tmp_path: Path,
) -> None:
    world = make_system_world(seed=1)
    gate = Gate(world.workers.start, ("bookie-flush",))
    identity, held = UUID(int=7).bytes, 4 << 20
    memtable, queue = 2 << 20, 4 << 20
    config = StoreConfig(memtable_bytes=memtable, journal_queue_bytes_max=queue, journal_segment_bytes=4 << 20)
    ports, opened = StoreCallbacks(on_room=lambda: service.on_store_has_room()), replace(world, workers=gate)  # type: ignore[arg-type]
    store = await Store.open(opened, str(tmp_path), os.urandom(16), config, ports=ports)
    service = BookieService(store, world.clock, entry_bytes_max=1 << 20, held_bytes_max=held, reads_max=8)
    serving = await world.network.serve_peers(Endpoint("127.0.0.1", 0), identity, service.serve)
    service.adds.pressure = serving.receive_slowly
    writer, recoverer = (world.network.connect_peer(serving.endpoint, identity) for _ in range(2))
    try:
        gate.opened.clear()
        answers = asyncio.gather(*[_add(writer, number) for number in range(600)])
        most = await _most_kept(service.adds, store, until=lambda: service.adds.refused[Status.BUSY] > 0)
        head, _ = await PeerCaller(recoverer).send(BookieOperation.READ_LAC, 1, flags=BookieRequestFlags.FENCE)
        assert head.status is Status.OK, "the fence passes while nothing is flushed"
        request = 4 * (64 << 10) + 4 * 236
        assert most <= 3 * memtable + queue + held + 3 * request
        gate.opened.set()
        outcomes = await answers
        assert outcomes.count([Status.OK] * 4) > 5
        assert {status for outcome in outcomes for status in outcome} <= {Status.OK, Status.BUSY, Status.FENCED, None}
        assert service.adds.held_adds_and_bytes == (0, 0)
    finally:
        gate.opened.set()
        await writer.close()
        await recoverer.close()
        await serving.close()
        await service.close()
        await store.close()


class Asked:
    """A request without a network."""

    frames: tuple[bytes, ...] = ()
    is_local = False

    def __init__(self, connection: str, head: BookieRequestHead) -> None:
        self.connection = connection
        self.head = head.encode()
        self.answer: Status | None = None

    def reply(self, head: bytes, frames: Sequence[Any] = ()) -> None:
        self.answer = decode_answer(head).status


def asked(
    connection: str,
    op: BookieOperation,
    ledgers: Iterable[int],
    flags: BookieRequestFlags = BookieRequestFlags.NONE,
    entry: int = 0,
) -> list[Asked]:
    return [Asked(connection, BookieRequestHead(op, flags, ledger, entry, 0, 0, KEY)) for ledger in ledgers]


async def test_fences_and_lacs_are_bounded_while_the_disk_does_nothing_and_leave_room_for_another_connection(
    tmp_path: Path,
) -> None:
    world = make_system_world(seed=1)
    gate = Gate(world.workers.start, ("bookie-journal-0", "bookie-journal-1"))
    config = StoreConfig(journal_queue_bytes_max=256 << 10, journal_segment_bytes=4 << 20)
    ports, opened = StoreCallbacks(on_room=lambda: service.on_store_has_room()), replace(world, workers=gate)  # type: ignore[arg-type]
    store = await Store.open(opened, str(tmp_path), os.urandom(16), config, ports=ports)
    service = BookieService(store, world.clock, entry_bytes_max=1 << 20, held_bytes_max=32 << 20, reads_max=8)
    fences_max, lacs_max = (32 << 20) // WAITING_FENCES_DIVISOR, (32 << 20) // WAITING_LACS_DIVISOR
    gate.opened.clear()
    try:
        floods = []
        for turn in range(50):
            lacs = asked("stranger", BookieOperation.WRITE_LAC, range(1000 * turn, 1000 * turn + 1000))
            fences = asked(
                "stranger", BookieOperation.READ_LAC, range(1000 * turn, 1000 * turn + 1000), BookieRequestFlags.FENCE
            )
            floods += [lacs, fences]
            service.serve([*lacs, *fences])
        statistics = service.statistics()
        assert statistics["lacs_waiting_bytes"] <= lacs_max // 2
        assert statistics["fences_waiting_bytes"] <= fences_max // 2
        assert store._journal.queued_bytes <= (256 << 10) + 300 * fences_max // (2 << 10)
        refused = [each.answer for flood in floods for each in flood if each.answer is not None]
        assert set(refused) == {Status.BUSY}
        assert len(refused) > 80_000
        (fence,) = asked("recovery", BookieOperation.READ_LAC, [1_000_000], BookieRequestFlags.FENCE)
        service.serve([fence])
        assert fence.answer is None, "it waits for the disk, as it must"
        gate.opened.set()
        await store.seal_group_and_wait()
        assert fence.answer is Status.OK
        assert {each.answer for flood in floods for each in flood} == {Status.OK, Status.BUSY}
        assert service.statistics()["lacs_waiting_bytes"] == service.statistics()["fences_waiting_bytes"] == 0
    finally:
        gate.opened.set()
        await service.close()
        await store.close()


async def test_repeated_fences_and_lacs_of_a_ledger_are_one_record_and_each_is_answered_after_the_sync(
    tmp_path: Path,
) -> None:
    world = make_system_world(seed=1)
    gate = Gate(world.workers.start, ("bookie-journal-0", "bookie-journal-1"))
    ports, opened = StoreCallbacks(on_room=lambda: service.on_store_has_room()), replace(world, workers=gate)  # type: ignore[arg-type]
    store = await Store.open(opened, str(tmp_path), os.urandom(16), StoreConfig(), ports=ports)
    service = BookieService(store, world.clock, entry_bytes_max=1 << 20, held_bytes_max=32 << 20, reads_max=8)
    gate.opened.clear()
    try:
        service.serve(asked("a", BookieOperation.READ_LAC, [1], BookieRequestFlags.FENCE))
        await asyncio.sleep(0)  # the first is on its way to the disk
        before = store._journal.counters["records"] + store._journal.queued_records
        requests = [*asked("a", BookieOperation.READ_LAC, [1] * 500, BookieRequestFlags.FENCE)]
        for lac in range(500):
            requests += asked("a", BookieOperation.WRITE_LAC, [2], entry=lac)
        service.serve(requests)
        assert store._journal.queued_records - before <= 4, "a key for each ledger, and one LAC"
        assert {each.answer for each in requests} == {None}
        gate.opened.set()
        await store.seal_group_and_wait()
        assert {each.answer for each in requests} == {Status.OK}
        assert store.read_lac(2).lac == 499
        assert store.counters["fences"] == 1
    finally:
        gate.opened.set()
        await service.close()
        await store.close()


async def test_many_small_adds_that_wait_count_with_what_python_keeps_of_them(tmp_path: Path) -> None:
    """Of one connection at most three quarters are held; each counts a KiB more than it carries."""
    world = make_system_world(seed=1)
    gate = Gate(world.workers.start, ("bookie-journal-0", "bookie-journal-1"))
    config = StoreConfig(journal_queue_bytes_max=64 << 10, journal_segment_bytes=4 << 20)
    ports, opened = StoreCallbacks(on_room=lambda: service.on_store_has_room()), replace(world, workers=gate)  # type: ignore[arg-type]
    store = await Store.open(opened, str(tmp_path), os.urandom(16), config, ports=ports)
    service = BookieService(store, world.clock, entry_bytes_max=1 << 20, held_bytes_max=1 << 20, reads_max=8)
    gate.opened.clear()

    def adds(connection: str, first: int, count: int) -> list[Asked]:
        made = asked(connection, BookieOperation.ADD, [1] * count)
        for entry, each in enumerate(made, first):
            each.head = BookieRequestHead(BookieOperation.ADD, BookieRequestFlags.NONE, 1, entry, 0, 0, KEY).encode()
            each.frames = (stored_entry(1, entry, b"x"),)
        return made

    try:
        for turn in range(10):
            service.serve(adds("stranger", 1000 * turn, 1000))
        count, size = service.adds.held_adds_and_bytes
        assert size <= 0.75 * (1 << 20)
        assert count <= 768
        other = adds("another", 100_000, 1)
        service.serve(other)
        assert other[0].answer is None, "there is room for another connection"
        gate.opened.set()
        while other[0].answer is None:
            await store.seal_group_and_wait()
        assert other[0].answer is Status.OK
    finally:
        gate.opened.set()
        await service.close()
        await store.close()


async def _add(peer: Peer, number: int) -> list[Status | None]:
    """None: our own queue to the bookie was full."""
    stored = [stored_entry(1, 4 * number + at, bytes(64 << 10)) for at in range(4)]
    head = encode_add_many_request(1, 4 * number, 4, KEY)
    try:
        reply = await peer.request(head, encode_adds(rows(stored)), timeout_s=60)
    except BackPressure:
        return [None]
    return [*decode_add_statuses(decode_answer(reply.head), reply.frames, 4)]


async def _most_kept(adds: AddRequestHandler, store: Store, until: Callable[[], bool]) -> int:
    """The most bytes of adds that the bookie kept at any turn, until then."""
    most = 0
    async with asyncio.timeout(30):
        while not until():
            most = max(most, adds.held_adds_and_bytes[1] + store.memtable.size_bytes + store._journal.queued_bytes)
            await asyncio.sleep(0)
    return most
