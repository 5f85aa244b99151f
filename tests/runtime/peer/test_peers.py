"""ZeroMQ peers, over loopback, on both event loops: what `runtime/network.py` promises of a Peer."""

import asyncio
import select
import sys
from asyncio import Future
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import zmq

from magnetar.cli.common.processes import find_free_port
from magnetar.proto.errors import BackPressure, Busy, ConnectionLost, TimedOut, WrongIdentity, WrongProtocol
from magnetar.runtime.access import OPEN_ACCESS
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.files import Buffer
from magnetar.runtime.grpc import server as grpc_server
from magnetar.runtime.network import (
    MESSAGE_BYTES_MAX,
    Endpoint,
    Peer,
    PeerReply,
    PeerRequest,
    PeerService,
    RunningPeerServer,
)
from magnetar.runtime.peer import client as peers
from magnetar.runtime.peer import inside as outbox
from magnetar.runtime.peer import sockets
from magnetar.runtime.peer.client import ZmqPeer
from magnetar.runtime.peer.envelope import Envelope, EnvelopeKind, encode_envelope
from magnetar.runtime.peer.server import ZmqPeerServer, is_local, serve
from magnetar.runtime.peer.sockets import ZmqContext
from tests.support.steps import stopwatch

LOCAL = Endpoint("127.0.0.1", 0)
IDENTITY = b"bookie-number-01"
OTHER = b"bookie-number-02"
SOON_S = 30.0  # a bound for the test, not a time it measures


def echo(requests: Sequence[PeerRequest]) -> None:
    for request in requests:
        request.reply(request.head, request.frames)


class Ends:
    """All ends made in a test, closed after it."""

    def __init__(self) -> None:
        self.ends: list[Peer | RunningPeerServer] = []

    async def close(self) -> None:
        for end in self.ends:
            await end.close()


class Bench(Ends):
    """With a context."""

    def __init__(self) -> None:
        super().__init__()
        self.context = ZmqContext()

    async def serve(self, service: PeerService, endpoint: Endpoint = LOCAL) -> ZmqPeerServer:
        server = await serve(self.context, endpoint, IDENTITY, service)
        self.ends.append(server)
        return server

    def peer(self, endpoint: Endpoint, identity: bytes = IDENTITY) -> ZmqPeer:
        peer = ZmqPeer(self.context, SystemClock(), endpoint, identity)
        self.ends.append(peer)
        return peer


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()
    assert bench.context._context is None, "the context ends with its last socket"


async def outcome(future: Future[PeerReply]) -> PeerReply | BaseException:
    async with asyncio.timeout(SOON_S):
        [result] = await asyncio.gather(future, return_exceptions=True)
        return result


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop turn until the sockets have brought it about."""
    async with asyncio.timeout(SOON_S):
        while not condition():  # noqa: ASYNC110 (the sockets have no event for it)
            await asyncio.sleep(0.001)


async def test_a_request_comes_back_with_its_head_and_frames(bench: Bench) -> None:
    server = await bench.serve(echo)
    reply = await bench.peer(server.endpoint).request(b"head", [b"", b"abc", bytes(200_000)], timeout_s=SOON_S)
    assert reply.head == b"head"
    assert [bytes(frame) for frame in reply.frames] == [b"", b"abc", bytes(200_000)]


async def test_requests_of_one_turn_leave_and_return_as_one_multipart(bench: Bench) -> None:
    batches: list[int] = []

    def count(requests: Sequence[PeerRequest]) -> None:
        batches.append(len(requests))
        echo(requests)

    server = await bench.serve(count)
    peer = bench.peer(server.endpoint)
    replies = await asyncio.gather(*(peer.request(b"%d" % n, timeout_s=SOON_S) for n in range(100)))
    assert [reply.head for reply in replies] == [b"%d" % n for n in range(100)]
    assert batches == [100]
    assert peer.statistics()["multiparts_sent"] == 1
    assert server.statistics()["multiparts_sent"] == 1


async def test_a_multipart_is_closed_at_the_coalescing_limit(bench: Bench) -> None:
    server = await bench.serve(echo)
    peer = bench.peer(server.endpoint)
    await asyncio.gather(*(peer.request(b"", [bytes(300_000)], timeout_s=SOON_S) for _ in range(10)))
    assert peer.statistics()["multiparts_sent"] == 4  # three of 300,000 bytes in each MiB


async def test_pipelined_requests_may_be_answered_in_any_order_and_futures_end_in_order_of_arrival(
    bench: Bench,
) -> None:
    held: list[PeerRequest] = []
    server = await bench.serve(held.extend)
    peer = bench.peer(server.endpoint)
    ended: list[int] = []
    futures = [peer.request(b"%d" % n, timeout_s=SOON_S) for n in range(4)]
    for n, future in enumerate(futures):
        future.add_done_callback(lambda _, n=n: ended.append(n))
    await until(lambda: len(held) == 4)
    for n in (2, 0, 3, 1):
        held[n].reply(held[n].head)
    assert [reply.head for reply in await asyncio.gather(*futures)] == [b"0", b"1", b"2", b"3"]
    assert ended == [2, 0, 3, 1]


async def test_many_large_frames_arrive_whole_and_unmixed(bench: Bench) -> None:
    server = await bench.serve(echo)
    peer = bench.peer(server.endpoint)
    sent = [bytes([n]) * (5 << 20) for n in range(6)]
    replies = await asyncio.gather(*(peer.request(b"", [b"h", data], timeout_s=SOON_S) for data in sent))
    for data, reply in zip(sent, replies, strict=True):
        assert reply.frames[1] == data
    assert "zmq.utils.garbage" not in sys.modules, "a thread and sockets of pyzmq's own, opened when data comes"


async def test_thousands_of_requests_in_many_turns_all_come_back(bench: Bench) -> None:
    """The descriptor is edge-triggered: a signal that is missed once would stall this."""
    server = await bench.serve(echo)
    peer = bench.peer(server.endpoint)

    async def ask(n: int) -> None:
        for round in range(40):
            head = b"%d-%d" % (n, round)
            assert (await peer.request(head, [head * 1000], timeout_s=SOON_S)).head == head

    await asyncio.gather(*(ask(n) for n in range(100)))
    assert peer.statistics()["in_flight"] == 0


async def test_a_process_with_another_identity_refuses(bench: Bench) -> None:
    came: list[PeerRequest] = []
    server = await bench.serve(came.extend)
    error = await outcome(bench.peer(server.endpoint, OTHER).request(b"", timeout_s=SOON_S))
    assert isinstance(error, WrongIdentity)
    assert error.fields["found"] == IDENTITY.hex()
    assert error.fields["wanted"] == OTHER.hex()
    assert came == []


async def test_another_version_of_the_protocol_is_told_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    server = await bench.serve(echo)

    def newer(kind: EnvelopeKind, identity: bytes, items: Sequence[tuple[int, bytes, Sequence[bytes]]]) -> list[bytes]:
        header, *parts = encode_envelope(kind, identity, items)
        return [b"MGTP\x02" + bytes(header)[5:], *map(bytes, parts)]

    with monkeypatch.context() as patch:
        patch.setattr(peers, "encode_envelope", newer)
        error = await outcome(bench.peer(server.endpoint).request(b"", timeout_s=SOON_S))
    assert isinstance(error, WrongProtocol)
    assert (await bench.peer(server.endpoint).request(b"x", timeout_s=SOON_S)).head == b"x"


async def test_no_answer_in_time_is_timed_out_and_a_late_one_is_dropped(bench: Bench) -> None:
    held: list[PeerRequest] = []
    server = await bench.serve(held.extend)
    peer = bench.peer(server.endpoint)
    short = peer.request(b"short", timeout_s=4.0)
    long = peer.request(b"long", timeout_s=SOON_S)
    shortest = peer.request(b"shortest", timeout_s=0.01)
    assert isinstance(await outcome(shortest), TimedOut)
    assert not short.done()
    assert isinstance(await outcome(short), TimedOut)
    await until(lambda: len(held) == 3)
    for request in held:
        request.reply(request.head)
    assert (await long).head == b"long"
    await until(lambda: peer.statistics()["late_replies"] == 2)


async def test_a_refused_connection_fails_at_once_and_the_peer_works_when_somebody_listens(bench: Bench) -> None:
    endpoint = Endpoint("127.0.0.1", find_free_port("127.0.0.1"))
    peer = bench.peer(endpoint)
    assert isinstance(await outcome(peer.request(b"", timeout_s=SOON_S * 10)), ConnectionLost)
    await bench.serve(echo, endpoint)
    async with asyncio.timeout(SOON_S):
        while not isinstance(await outcome(peer.request(b"x", timeout_s=SOON_S)), PeerReply):
            pass


async def test_each_request_to_a_port_where_nobody_listens_fails_at_once(bench: Bench) -> None:
    peer = bench.peer(Endpoint("127.0.0.1", find_free_port("127.0.0.1")))
    with stopwatch() as seconds:
        for _ in range(12):
            assert isinstance(await outcome(peer.request(b"", timeout_s=SOON_S)), ConnectionLost)
    assert seconds() < 2, "ZeroMQ's own attempts come ever more slowly: twelve would take eight seconds"


async def test_a_server_that_goes_fails_all_in_flight_and_its_successor_serves(bench: Bench) -> None:
    held: list[PeerRequest] = []
    first = await bench.serve(held.extend)
    peer = bench.peer(first.endpoint)
    futures = [peer.request(b"", timeout_s=SOON_S * 10) for _ in range(5)]
    await until(lambda: len(held) == 5)
    await first.close()
    assert {type(await outcome(future)) for future in futures} == {ConnectionLost}
    await bench.serve(echo, first.endpoint)
    async with asyncio.timeout(SOON_S):
        while not isinstance(await outcome(peer.request(b"x", timeout_s=SOON_S)), PeerReply):
            pass
    held[0].reply(b"to nobody")


async def test_a_taken_port_is_busy_and_named(bench: Bench) -> None:
    server = await bench.serve(echo)
    with pytest.raises(Busy, match=str(server.endpoint)):
        await bench.serve(echo, server.endpoint)


async def test_garbage_on_the_port_harms_nobody(bench: Bench) -> None:
    server = await bench.serve(echo)
    peer = bench.peer(server.endpoint)
    await peer.request(b"", timeout_s=SOON_S)
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f"  # ZeroMQ's, with nonsense behind it
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 100, bytes(1000), greeting + b"\x09" * 500):
        _, writer = await asyncio.open_connection(*server.endpoint)
        writer.write(garbage)
        await writer.drain()
        writer.close()
        assert (await peer.request(b"x", timeout_s=SOON_S)).head == b"x"


async def test_malformed_multiparts_are_dropped_and_counted(bench: Bench) -> None:
    came: list[PeerRequest] = []
    server = await bench.serve(came.extend)
    header = bytes(encode_envelope(EnvelopeKind.REQUESTS, IDENTITY, [(1, b"head", [bytes(5000)])])[0])
    bad = [
        [header],  # the part is missing
        [header, bytes(4999)],  # shorter than announced
        [header, bytes(5001)],
        [header, bytes(5000), b"more"],
        [header[:-1], bytes(5000)],
        [header + b"x", bytes(5000)],
        [encode_envelope(EnvelopeKind.REPLIES, IDENTITY, [(1, b"", ())])[0]],  # a server is not answered
        [b""],
    ]
    socket = bench.context.open(zmq.DEALER)
    socket.connect(f"tcp://{server.endpoint}")
    socket.setsockopt(zmq.SNDTIMEO, 5000)
    for parts in bad:
        socket.send_multipart(parts)
    await until(lambda: server.statistics()["dropped"] == len(bad))
    socket.send_multipart([header, bytes(5000)])
    await until(lambda: len(came) == 1)
    bench.context.close(socket)


async def test_very_many_malformed_messages_are_dropped_in_slices(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop has its turn after each few, and the messages after them come."""
    monkeypatch.setattr(sockets, "MALFORMED_AT_ONCE", 10)
    server, counts = await bench.serve(echo), list[int]()
    receive = sockets.WatchedZmqSocket.receive

    def counting(wire: sockets.WatchedZmqSocket) -> Any:
        before = wire.dropped
        found = receive(wire)
        counts.append(wire.dropped - before)
        return found

    monkeypatch.setattr(sockets.WatchedZmqSocket, "receive", counting)
    socket = bench.context.open(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 1000)
    socket.connect(f"tcp://{server.endpoint}")
    socket.setsockopt(zmq.SNDTIMEO, 5000)
    for _ in range(500):
        socket.send(b"no envelope"[:3])
    socket.send_multipart([bytes(encode_envelope(EnvelopeKind.REQUESTS, IDENTITY, [(1, b"head", ())])[0])])
    await until(lambda: server.statistics()["requests"] == 1)
    assert server.statistics()["dropped"] == 500
    assert max(counts) <= 10
    bench.context.close(socket)


async def test_a_message_of_very_many_parts_is_dropped_in_slices(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are answered meanwhile, and the connection is good for its next message."""
    monkeypatch.setattr(sockets, "SKIPPED_AT_ONCE", 10)
    server = await bench.serve(echo)
    slices: list[bool] = []
    skip = sockets.WatchedZmqSocket._skip

    def counting(wire: sockets.WatchedZmqSocket) -> bool:
        slices.append(skip(wire))
        return slices[-1]

    monkeypatch.setattr(sockets.WatchedZmqSocket, "_skip", counting)
    header = bytes(encode_envelope(EnvelopeKind.REQUESTS, IDENTITY, [(1, b"head", ())])[0])
    socket = bench.context.open(zmq.DEALER)
    socket.connect(f"tcp://{server.endpoint}")
    socket.setsockopt(zmq.SNDTIMEO, 5000)
    socket.send_multipart([header] + [b""] * 1000)
    socket.send_multipart([b"no envelope"] + [b""] * 500)
    socket.send_multipart([header])
    assert (await bench.peer(server.endpoint).request(b"other", timeout_s=SOON_S)).head == b"other"
    await until(lambda: server.statistics()["requests"] == 2)
    assert server.statistics()["dropped"] == 2
    assert (slices.count(False), slices.count(True)) == (150, 2)
    bench.context.close(socket)


async def test_a_server_that_answers_nonsense_is_a_wrong_protocol(bench: Bench) -> None:
    router = bench.context.open(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    peer = bench.peer(Endpoint("127.0.0.1", port))
    future = peer.request(b"", timeout_s=SOON_S)
    await until(lambda: bool(router.poll(0)))
    route, *_ = router.recv_multipart()
    router.send_multipart([route, b"hello", b"world"])
    assert isinstance(await outcome(future), WrongProtocol)
    bench.context.close(router)


async def test_a_port_that_does_not_speak_zeromq_fails_the_request(bench: Bench) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" * 10)
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    peer = bench.peer(Endpoint("127.0.0.1", other.sockets[0].getsockname()[1]))
    error = await outcome(peer.request(b"", timeout_s=SOON_S))
    assert isinstance(error, WrongProtocol)
    await peer.close()
    other.close()


async def test_the_port_of_a_grpc_server_is_a_wrong_protocol(bench: Bench) -> None:
    other = await grpc_server.serve(LOCAL, [], OPEN_ACCESS, SystemClock())
    error = await outcome(bench.peer(other.endpoint).request(b"", timeout_s=SOON_S))
    assert isinstance(error, WrongProtocol)
    await other.close()


async def test_a_peer_recovers_from_a_port_that_spoke_another_protocol_before(bench: Bench) -> None:
    """ZeroMQ itself never connects again after an error of protocol."""
    other = await grpc_server.serve(LOCAL, [], OPEN_ACCESS, SystemClock())
    peer = bench.peer(other.endpoint)
    assert isinstance(await outcome(peer.request(b"", timeout_s=SOON_S)), WrongProtocol)
    await other.close()
    await bench.serve(echo, other.endpoint)
    assert isinstance(await outcome(peer.request(b"x", timeout_s=SOON_S)), PeerReply)


async def test_connections_made_and_broken_in_a_hurry_never_block_the_loop(bench: Bench) -> None:
    """An event for a monitor that was closed too early once blocked ZeroMQ's thread, and the loop behind it."""
    endpoint = Endpoint("127.0.0.1", find_free_port("127.0.0.1"))
    for round in range(40):
        server = await serve(bench.context, endpoint, IDENTITY, echo)
        ends = [bench.peer(endpoint) for _ in range(5)]
        futures = [peer.request(b"", timeout_s=SOON_S) for peer in ends]
        if round % 2:
            await asyncio.sleep(0)
            await server.close()
        for peer in ends[:3]:
            await peer.close()
        for future in futures:
            assert isinstance(await outcome(future), PeerReply | ConnectionLost)
        await server.close()


async def test_what_cannot_leave_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "QUEUE_BYTES_MAX", 1 << 20)
    server = await bench.serve(echo)
    peer = bench.peer(server.endpoint)
    futures = [peer.request(b"", [bytes(300_000)], timeout_s=SOON_S) for _ in range(5)]
    outcomes = [await outcome(future) for future in futures]
    assert [isinstance(each, BackPressure) for each in outcomes] == [False, False, False, True, True]
    assert BackPressure.definite


async def test_closing_a_peer_fails_what_is_in_flight_and_what_comes_after(bench: Bench) -> None:
    held: list[PeerRequest] = []
    server = await bench.serve(held.extend)
    peer = bench.peer(server.endpoint)
    future = peer.request(b"", timeout_s=SOON_S)
    await until(lambda: len(held) == 1)
    await peer.close()
    assert isinstance(await outcome(future), ConnectionLost)
    assert isinstance(await outcome(peer.request(b"", timeout_s=SOON_S)), ConnectionLost)


async def test_a_cancelled_future_leaves_the_others_alone(bench: Bench) -> None:
    server = await bench.serve(echo)
    peer = bench.peer(server.endpoint)
    futures = [peer.request(b"%d" % n, timeout_s=SOON_S) for n in range(3)]
    futures[1].cancel()
    assert [(await futures[n]).head for n in (0, 2)] == [b"0", b"2"]


async def test_a_server_may_listen_on_a_name_and_a_name_that_is_none_is_refused(bench: Bench) -> None:
    server = await bench.serve(echo, Endpoint("localhost", 0))
    assert server.endpoint.host == "localhost"
    assert (await bench.peer(server.endpoint).request(b"x", timeout_s=SOON_S)).head == b"x"
    with pytest.raises(Busy, match=r"no-such-host\.invalid"):
        await bench.serve(echo, Endpoint("no-such-host.invalid", 0))


async def test_a_send_that_takes_the_signal_of_an_arrival_away_does_not_lose_it(bench: Bench) -> None:
    """The descriptor says once that something came; the send in between uses that up, and nothing else will come."""
    held: list[PeerRequest] = []
    server = await bench.serve(held.extend)
    peer = bench.peer(server.endpoint)
    first = peer.request(b"first", timeout_s=SOON_S)
    await until(lambda: len(held) == 1)
    held[0].reply(b"first")
    server._flush()
    assert peer._link is not None
    select.select([peer._link.wire._fd], [], [], SOON_S)  # the loop stands still until the reply is there
    second = peer.request(b"second", timeout_s=SOON_S)
    peer.flush()
    async with asyncio.timeout(SOON_S / 2):
        assert (await first).head == b"first"
    assert not second.done()


async def test_a_server_that_is_slowed_down_takes_in_little(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others come through in their turn, what it does not take waits with its sender, and nothing is lost.

    Of what is on its way the kernel holds little here (it may hold 36 MB of a connection), and its sender's socket
    eight multiparts. The pauses are long when it matters: a busy machine keeps the threads of ZeroMQ waiting.
    """
    monkeypatch.setattr(sockets, "MULTIPARTS_QUEUED_MAX", 8)
    open_ = sockets.ZmqContext.open

    def small(context: sockets.ZmqContext, kind: int) -> Any:
        made = open_(context, kind)
        for option in (zmq.RCVBUF, zmq.SNDBUF):
            made.setsockopt(option, 256 << 10)
        return made

    monkeypatch.setattr(sockets.ZmqContext, "open", small)
    taken: list[int] = []

    def service(requests: Sequence[PeerRequest]) -> None:
        taken.extend(len(request.frames) for request in requests)
        echo(requests)

    server = await bench.serve(service)
    sender, other = bench.peer(server.endpoint), bench.peer(server.endpoint)
    for peer in (sender, other):  # connecting is no part of a turn
        assert (await peer.request(b"hello", timeout_s=SOON_S)).head == b"hello"
    rests: list[float] = []
    rest = sockets.WatchedZmqSocket.pause

    def resting(wire: sockets.WatchedZmqSocket, seconds: float) -> None:
        rests.append(seconds)
        rest(wire, seconds if len(taken) < 6 else 0.5)

    monkeypatch.setattr(sockets.WatchedZmqSocket, "pause", resting)
    server.receive_slowly(True)
    futures = [sender.request(b"%d" % number, [bytes(600_000)], timeout_s=6 * SOON_S) for number in range(100)]
    await until(lambda: len(taken) >= 6)
    before = len(taken)
    assert (await other.request(b"a fence", timeout_s=SOON_S)).head == b"a fence"
    assert len(taken) - before <= 8, "who has little to say waits for a turn, not for what others wait with"
    left = (103 - len(taken)) * 600_000  # two greetings and the fence are among the taken
    assert sender.statistics()["queued_bytes"] > left - 34_000_000, "the rest waits with its sender, and in buffers"
    assert 4 <= len(rests) >= len(taken) - 4, "a rest behind each multipart, of one or two of them"
    server.receive_slowly(False)
    assert [(await future).head for future in futures] == [b"%d" % number for number in range(100)]


async def test_a_part_beyond_the_limit_breaks_its_connection_alone(bench: Bench) -> None:
    server = await bench.serve(echo)
    greedy, other = bench.peer(server.endpoint), bench.peer(server.endpoint)
    assert (await other.request(b"before", timeout_s=SOON_S)).head == b"before"
    too_large = greedy.request(b"", [bytes(MESSAGE_BYTES_MAX + 1)], timeout_s=SOON_S)
    assert isinstance(await outcome(too_large), ConnectionLost)
    assert (await other.request(b"after", timeout_s=SOON_S)).head == b"after"
    assert (await greedy.request(b"again", timeout_s=SOON_S)).head == b"again"


async def test_a_server_hands_over_a_few_mebibytes_at_a_time(bench: Bench) -> None:
    """So that a service that has enough is asked before more is taken in."""
    turns: list[int] = []

    def service(requests: Sequence[PeerRequest]) -> None:
        turns.append(sum(len(request.frames[0]) for request in requests))
        echo(requests)

    server = await bench.serve(service)
    peer = bench.peer(server.endpoint)
    await asyncio.gather(*[peer.request(b"", [bytes(1 << 20)], timeout_s=SOON_S) for _ in range(40)])
    assert sum(turns) == 40 << 20
    assert max(turns) <= sockets.BYTES_PER_TURN + (1 << 20)


async def test_a_publish_waits_for_one_answer_of_those_who_catch_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight connections get 8 MiB each of what they read, and one gets receipts: these are sent first, in each turn of
    the loop, and what comes in a turn waits for one answer of the others, however many there are."""
    held: list[PeerRequest] = []
    server = await bench.serve(held.extend)
    readers, publisher = [bench.peer(server.endpoint) for _ in range(8)], bench.peer(server.endpoint)
    reads = [reader.request(b"read", timeout_s=SOON_S) for reader in readers for _ in range(2)]
    adds = [publisher.request(b"add", timeout_s=SOON_S) for _ in range(3)]
    await until(lambda: len(held) == 19)
    turns: list[list[int]] = []  # what is sent in each: bytes of an answer, 0 for a receipt
    flush, send = server._flush, server._send
    receipts = [each for each in held if each.head == b"add"]

    def turn() -> None:
        turns.append([])
        if len(turns) in (3, 5):  # while the entries are being sent
            receipts.pop().reply(b"stored")
        flush()

    def count(route: bytes, parts: Sequence[Buffer]) -> bool:
        turns[-1].append(sum(map(len, parts[1:])))
        return send(route, parts)

    monkeypatch.setattr(server, "_flush", turn)
    monkeypatch.setattr(server, "_send", count)
    for each in held:
        if each.head == b"read":
            each.reply(b"", [bytes(128 << 10)] * 32)
    receipts.pop().reply(b"stored")
    assert [reply.head for reply in await asyncio.gather(*adds)] == [b"stored"] * 3
    assert [len(reply.frames) for reply in await asyncio.gather(*reads)] == [32] * 16
    sent = [each for each in turns if each]
    assert sent[0] == [0, 4 << 20], "a receipt passes the entries that were answered before it"
    assert max(sum(each) for each in sent) == 4 << 20, "a turn sends one answer"
    assert [number for number, each in enumerate(sent) if each[0] == 0] == [0, 2, 4], "and the receipts that came"


async def test_connections_that_read_much_take_turns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[PeerRequest] = []
    server = await bench.serve(held.extend)
    one, other = bench.peer(server.endpoint), bench.peer(server.endpoint)
    asked = [peer.request(b"read", timeout_s=SOON_S) for peer in (one, one, one, other)]
    await until(lambda: len(held) == 4)
    routes: list[bytes] = []
    send = server._send

    def count(route: bytes, parts: Sequence[Buffer]) -> bool:
        routes.append(route)
        return send(route, parts)

    monkeypatch.setattr(server, "_send", count)
    many = next(each.connection for each in held if [other.connection for other in held].count(each.connection) == 3)
    held.sort(key=lambda each: each.connection != many)
    for each in held:
        each.reply(b"", [bytes(1 << 20)])
    await asyncio.gather(*asked)
    assert [route == many for route in routes] == [True, False, True, True]


async def test_a_server_that_closes_sends_what_is_queued_at_once(bench: Bench) -> None:
    held: list[PeerRequest] = []
    server = await bench.serve(held.extend)
    peer = bench.peer(server.endpoint)
    asked = [peer.request(b"read", timeout_s=SOON_S) for _ in range(8)]
    await until(lambda: len(held) == 8)
    for each in held:
        each.reply(b"", [bytes(1 << 20)])
    await server.close(grace_s=0.0)
    assert server.statistics()["multiparts_sent"] == 8
    for each in asked:
        each.cancel()


async def test_a_client_takes_a_few_mebibytes_of_answers_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what a broker reads for those who catch up delays no answer of another bookie."""
    server = await bench.serve(echo)
    peer = bench.peer(server.endpoint)
    assert (await peer.request(b"hello", timeout_s=SOON_S)).head == b"hello"
    assert peer._link is not None
    taken: list[Envelope] = []

    def receive() -> tuple[bytes, Envelope]:
        taken.append(Envelope(EnvelopeKind.REPLIES, IDENTITY, [], size=1 << 20))
        return b"", taken[-1]

    monkeypatch.setattr(peer._link.wire, "receive", receive)
    assert peer._link._drain(), "there is more"
    assert sum(each.size for each in taken) == sockets.BYTES_PER_TURN


async def test_a_request_knows_whether_it_comes_from_this_machine_and_over_which_connection(bench: Bench) -> None:
    """Also one whose sender chose its own routing id: what counts is the address at the other end."""
    came: list[PeerRequest] = []

    def service(requests: Sequence[PeerRequest]) -> None:
        came.extend(requests)
        echo(requests)

    server = await bench.serve(service)
    for peer in (bench.peer(server.endpoint), bench.peer(server.endpoint)):
        await asyncio.gather(*[peer.request(b"a", timeout_s=SOON_S) for _ in range(3)])
    chosen = zmq.Context.instance().socket(zmq.DEALER)
    chosen.setsockopt(zmq.LINGER, 0)
    chosen.setsockopt(zmq.ROUTING_ID, b"10.1.2.3")
    chosen.connect(f"tcp://{server.endpoint}")
    chosen.send_multipart(encode_envelope(EnvelopeKind.REQUESTS, IDENTITY, [(1, b"a", ())]))
    async with asyncio.timeout(SOON_S):
        while len(came) < 7:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    chosen.close()
    assert all(request.is_local for request in came)
    assert len({request.connection for request in came}) == 3


@pytest.mark.parametrize(
    ("address", "local"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::ffff:127.0.0.1", True),
        ("198.51.100.7", False), ("2001:db8::1", False), ("", False), ("0.0.0.0", False), ("::", False),
        ("None", False), ("no address", False),
    ],
)  # fmt: skip
def test_only_an_address_of_this_machine_is_local(address: str, local: bool) -> None:
    assert is_local(address) is local
