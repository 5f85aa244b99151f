"""What a stranger may do at a bookie's port, over real sockets: it is told no, memory is bounded, others are served."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
import zmq

from magnetar.bookie.maintenance.repair_worker import RepairConfig
from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.ledger.peer_format import (
    BookieOperation,
    BookieRequestFlags,
    BookieRequestHead,
    Status,
    encode_add_request,
)
from magnetar.metadata import paths
from magnetar.metadata.records import CounterRecord, encode_record
from magnetar.metadata.sqlite import IN_MEMORY_PATH, SqliteStore
from magnetar.runtime.network import MESSAGE_BYTES_MAX
from magnetar.runtime.peer import envelope
from magnetar.runtime.process import make_system_world
from tests.bookie.entries import KEY, PeerCaller, a_record, stored_entry


@pytest.fixture
async def deployment(tmp_path: Path) -> AsyncIterator[tuple[Bookie, PeerCaller]]:
    """A bookie, and the writer of ledger 1, which is served before, between and after."""
    world = make_system_world(1)
    tree = await SqliteStore.open(world, IN_MEMORY_PATH)
    config = BookieConfig(data=str(tmp_path / "bookie"), free_bytes_min=0, repair=RepairConfig(enabled=False))
    bookie = await Bookie.start(world, config, tree.new_session())
    session = tree.new_session()
    await session.put(paths.LEDGER_IDS, encode_record(CounterRecord(next=10), paths.LEDGER_IDS))
    await session.put(paths.ledger(1), a_record(1, bookie.id))
    caller = PeerCaller(world.network.connect_peer(bookie.endpoint, UUID(bookie.id).bytes))
    assert (await caller.add(1, 0, b"before")).status is Status.OK
    yield bookie, caller
    assert (await caller.add(1, 1, b"after")).status is Status.OK
    assert len(bookie.store.descriptors) == 1, "nothing of a stranger is left"
    bookie.store.check()
    await caller.peer.close()
    await bookie.close()
    await tree.close()


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_garbage_half_open_connections_and_wrong_protocols_cost_nobody_anything(
    deployment: tuple[Bookie, PeerCaller],
) -> None:
    bookie, caller = deployment
    before = memory_bytes()
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
    sockets = []
    for number in range(500):
        connection = socket.create_connection(bookie.endpoint, 5.0)
        connection.setblocking(False)
        match number % 4:
            case 0:
                connection.sendall(os.urandom(4096))
            case 1:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
            case 2:  # ZeroMQ's greeting, and then a frame of 2^62 bytes
                connection.sendall(greeting + b"\x02" + (1 << 62).to_bytes(8, "big"))
        sockets.append(connection)
    for _ in range(50):
        assert (await caller.read(1, 0))[0].status is Status.OK
    assert memory_bytes() - before < 64 << 20
    for connection in sockets:
        connection.close()


async def test_envelopes_that_lie_are_dropped_and_other_versions_are_told_so(deployment: tuple[Bookie,
    PeerCaller]) -> None:
    bookie, caller = deployment
    identity = UUID(bookie.id).bytes
    head = BookieRequestHead(BookieOperation.READ, BookieRequestFlags.NONE, 1, 0, 1, 100, KEY).encode()
    good = envelope.encode_envelope(envelope.EnvelopeKind.REQUESTS, identity, [(1, head, ())])
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(f"tcp://{bookie.endpoint}")
    header = bytes(good[0])
    lies = [
        [b""], [b"x"], [header[:30]], [header + b"more"], [header, b"a part that nobody announced"],
        [header[:22] + b"\xff\xff\xff\xff" + header[26:]],  # four thousand million requests
        [bytes(1 << 20)], [os.urandom(1000)],
    ]  # fmt: skip
    for lie in lies * 20:
        stranger.send_multipart(lie)
    other = bytearray(header)
    other[4] = 9
    stranger.send_multipart([bytes(other)])
    stranger.setsockopt(zmq.RCVTIMEO, 10_000)
    kinds = set()
    async with asyncio.timeout(20):
        while envelope.EnvelopeKind.WRONG_PROTOCOL not in kinds:
            kinds.add(envelope.decode_envelope((await asyncio.to_thread(stranger.recv_multipart))[0]).kind)
    assert (await caller.read(1, 0))[0].status is Status.OK
    stranger.close()
    context.term()


async def test_a_frame_past_the_limit_ends_its_connection_and_no_other(deployment: tuple[Bookie, PeerCaller]) -> None:
    bookie, caller = deployment
    before = memory_bytes()
    context = zmq.Context()
    for _ in range(5):
        stranger = context.socket(zmq.DEALER)
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://{bookie.endpoint}")
        stranger.send(bytes(MESSAGE_BYTES_MAX + 1))
        assert (await caller.read(1, 0))[0].status is Status.OK
        stranger.close()
    assert memory_bytes() - before < 128 << 20
    context.term()


async def test_floods_of_every_operation_on_ids_of_nobody_leave_nothing_behind(
    deployment: tuple[Bookie, PeerCaller],
) -> None:
    bookie, caller = deployment
    world = make_system_world(2)
    strangers = [world.network.connect_peer(bookie.endpoint, UUID(bookie.id).bytes) for _ in range(20)]
    before = memory_bytes()
    asked = []
    for number in range(20_000):
        ledger = 1000 + number
        stranger = strangers[number % 20]
        match number % 5:
            case 0:
                frames = (stored_entry(ledger, 0, b"x" * 100),)
                asked.append(stranger.request(encode_add_request(ledger, 0, KEY), frames, timeout_s=60))
                continue
            case 1:
                head = BookieRequestHead(BookieOperation.WRITE_LAC, BookieRequestFlags.NONE, ledger, 5, 0, 0, KEY)
            case 2:
                head = BookieRequestHead(BookieOperation.READ_LAC, BookieRequestFlags.FENCE, ledger, -1, 0, 0, KEY)
            case 3:
                head = BookieRequestHead(BookieOperation.READ_LAC, BookieRequestFlags.NONE, ledger, 0, 50, 0, KEY)
            case _:
                head = BookieRequestHead(BookieOperation.READ, BookieRequestFlags.NONE, ledger, 0, 1, 100, KEY)
        asked.append(stranger.request(head.encode(), timeout_s=60))
    assert (await caller.read(1, 0))[0].status is Status.OK
    await asyncio.gather(*asked)
    assert bookie.statistics()["newcomers_waiting_bytes"] == 0
    assert memory_bytes() - before < 128 << 20
    for each in strangers:
        await each.close()
