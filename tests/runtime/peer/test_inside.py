"""Peers of one process: what `runtime/network.py` promises of a Peer, without a socket between them."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from magnetar.proto.errors import BackPressure, ConnectionLost, TimedOut, Unauthorized, WrongIdentity
from magnetar.runtime.access import Principal
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.files import Buffer
from magnetar.runtime.network import (
    COALESCE_BYTES,
    NO_PEER_KEYS,
    Endpoint,
    Peer,
    PeerClientKeys,
    PeerReply,
    PeerRequest,
    PeerServerKeys,
    PeerService,
    RunningPeerServer,
)
from magnetar.runtime.peer import inside
from magnetar.runtime.peer.inside import InProcessNetwork
from magnetar.runtime.peer.sockets import BYTES_PER_TURN
from magnetar.runtime.process import SystemNetwork

from .test_peers import IDENTITY, LOCAL, OTHER, SOON_S, Ends, echo, outcome


class Bench(Ends):
    """With a network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = InProcessNetwork(SystemNetwork(SystemClock()), SystemClock())

    async def serve(
        self, service: PeerService, endpoint: Endpoint = LOCAL, access: PeerServerKeys | None = None
    ) -> RunningPeerServer:
        server = await self.network.serve_peers(endpoint, IDENTITY, service, access)
        self.ends.append(server)
        return server

    def connect_peer(
        self, endpoint: Endpoint, identity: bytes = IDENTITY, access: PeerClientKeys = NO_PEER_KEYS
    ) -> Peer:
        peer = self.network.connect_peer(endpoint, identity, access)
        self.ends.append(peer)
        return peer


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    yield bench
    await bench.close()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_is_asked_and_answered_is_handed_over_as_it_is(bench: Bench) -> None:
    server = await bench.serve(echo)
    frames = (b"", b"abc", bytes(200_000))
    reply = await bench.connect_peer(server.endpoint).request(b"head", frames, timeout_s=SOON_S)
    assert reply.head == b"head"
    assert reply.frames is frames


async def test_requests_of_one_turn_reach_the_service_together_and_in_a_later_turn(bench: Bench) -> None:
    batches: list[list[bytes]] = []

    def service(requests: Sequence[PeerRequest]) -> None:
        batches.append([request.head for request in requests])
        echo(requests)

    server = await bench.serve(service)
    one, two = bench.connect_peer(server.endpoint), bench.connect_peer(server.endpoint)
    futures = [peer.request(b"%d" % n, timeout_s=SOON_S) for n in range(50) for peer in (one, two)]
    assert batches == [], "the service is not called within the request"
    replies = await asyncio.gather(*futures)
    assert [reply.head for reply in replies] == [b"%d" % (n // 2) for n in range(100)]
    assert [sorted(batch) for batch in batches] == [sorted(reply.head for reply in replies)]


async def test_requests_may_be_answered_in_any_order_and_once(bench: Bench) -> None:
    held: list[PeerRequest] = []
    server = await bench.serve(held.extend)
    peer = bench.connect_peer(server.endpoint)
    ended: list[int] = []
    futures = [peer.request(b"%d" % n, timeout_s=SOON_S) for n in range(4)]
    for n, future in enumerate(futures):
        future.add_done_callback(lambda _, n=n: ended.append(n))
    await turns()
    for n in (2, 0, 3, 1):
        held[n].reply(held[n].head)
    assert ended == [], "no callback runs within the reply"
    assert [reply.head for reply in await asyncio.gather(*futures)] == [b"0", b"1", b"2", b"3"]
    assert ended == [2, 0, 3, 1]
    with pytest.raises(AssertionError):
        held[0].reply(b"again")


async def test_a_request_is_local_and_says_over_which_connection_it_came(bench: Bench) -> None:
    came: list[PeerRequest] = []
    server = await bench.serve(came.extend)
    for peer in (bench.connect_peer(server.endpoint), bench.connect_peer(server.endpoint)):
        for _ in range(3):
            peer.request(b"", timeout_s=SOON_S)
    await turns()
    assert all(request.is_local and request.principal is not None for request in came)
    assert [len({request.connection for request in some}) for some in (came[:3], came[3:], came)] == [1, 1, 2]


async def test_a_server_with_another_identity_refuses_and_its_service_is_not_called(bench: Bench) -> None:
    came: list[PeerRequest] = []
    server = await bench.serve(came.extend)
    assert isinstance(
        await outcome(bench.connect_peer(server.endpoint, OTHER).request(b"", timeout_s=SOON_S)), WrongIdentity
    )
    assert came == []


async def test_an_endpoint_of_another_process_is_asked_through_a_socket(bench: Bench) -> None:
    elsewhere = Bench()
    server = await elsewhere.serve(echo)
    peer = bench.connect_peer(server.endpoint)
    assert (await peer.request(b"x", timeout_s=SOON_S)).head == b"x"
    assert peer.statistics()["multiparts_sent"] == 1
    await elsewhere.close()


async def test_another_process_reaches_the_server_through_its_socket(bench: Bench) -> None:
    server = await bench.serve(echo)
    elsewhere = Bench()
    assert (await elsewhere.connect_peer(server.endpoint).request(b"x", timeout_s=SOON_S)).head == b"x"
    await elsewhere.close()


class Gate:
    """Of a server with keys: takes one key."""

    def __init__(self, key: str) -> None:
        self.key = key

    async def admit(self, key: str) -> bool:
        return key == self.key

    def find_principal(self, key: str) -> Principal | None:
        return None


async def test_keys_are_proved_through_the_socket(bench: Bench) -> None:
    own, foreign = bench.network.generate_keys(), bench.network.generate_keys()
    server = await bench.serve(echo, access=PeerServerKeys(own, Gate(own.public)))
    clear = bench.connect_peer(server.endpoint)
    stranger = bench.connect_peer(server.endpoint, access=PeerClientKeys(server.key, foreign))
    for peer in (clear, stranger):
        assert isinstance(await outcome(peer.request(b"", timeout_s=SOON_S)), Unauthorized)


async def test_no_answer_in_time_is_timed_out_and_a_late_one_is_dropped(bench: Bench) -> None:
    held: list[PeerRequest] = []
    server = await bench.serve(held.extend)
    peer = bench.connect_peer(server.endpoint)
    short = peer.request(b"short", timeout_s=0.05)
    long = peer.request(b"long", timeout_s=SOON_S)
    assert isinstance(await outcome(short), TimedOut)
    for request in held:
        request.reply(request.head)
    assert (await long).head == b"long"
    statistics = peer.statistics()
    assert (statistics["late_replies"], statistics["in_flight"], statistics["requests"]) == (1, 0, 2)


async def test_a_server_that_closes_fails_what_has_no_answer_and_its_successor_serves(bench: Bench) -> None:
    held: list[PeerRequest] = []
    first = await bench.serve(held.extend)
    peer = bench.connect_peer(first.endpoint)
    futures = [peer.request(b"", timeout_s=SOON_S * 10) for _ in range(3)]
    await turns()
    assert len(held) == 3
    futures.append(peer.request(b"in the queue", timeout_s=SOON_S * 10))
    await first.close()
    assert {type(await outcome(future)) for future in futures} == {ConnectionLost}
    held[0].reply(b"to nobody")
    assert isinstance(await outcome(peer.request(b"", timeout_s=SOON_S)), ConnectionLost)
    await bench.serve(echo, first.endpoint)
    assert (await peer.request(b"x", timeout_s=SOON_S)).head == b"x"
    assert len(held) == 3


async def test_closing_a_peer_fails_what_is_in_flight_and_what_comes_after(bench: Bench) -> None:
    held: list[PeerRequest] = []
    server = await bench.serve(held.extend)
    peer, other = bench.connect_peer(server.endpoint), bench.connect_peer(server.endpoint)
    future = peer.request(b"taken", timeout_s=SOON_S)
    await turns()
    queued, others = peer.request(b"queued", timeout_s=SOON_S), other.request(b"other", timeout_s=SOON_S)
    await peer.close()
    for each in (future, queued, peer.request(b"", timeout_s=SOON_S)):
        assert isinstance(await outcome(each), ConnectionLost)
    await turns()
    assert [request.head for request in held] == [b"taken", b"other"]
    held[1].reply(b"")
    await others


async def test_what_a_server_has_not_taken_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "QUEUE_BYTES_MAX", 1 << 20)
    server = await bench.serve(echo)
    peer = bench.connect_peer(server.endpoint)
    futures = [peer.request(b"", [bytes(300_000)], timeout_s=SOON_S) for _ in range(5)]
    outcomes = [await outcome(future) for future in futures]
    assert [isinstance(each, BackPressure) for each in outcomes] == [False, False, False, True, True]
    assert isinstance(await outcome(peer.request(b"", [bytes(300_000)], timeout_s=SOON_S)), PeerReply)


async def test_a_server_takes_a_few_mebibytes_at_a_time(bench: Bench) -> None:
    sizes: list[int] = []

    def service(requests: Sequence[PeerRequest]) -> None:
        sizes.append(sum(len(request.frames[0]) for request in requests))
        echo(requests)

    server = await bench.serve(service)
    peer = bench.connect_peer(server.endpoint)
    await asyncio.gather(*[peer.request(b"", [bytes(1 << 20)], timeout_s=SOON_S) for _ in range(40)])
    assert sum(sizes) == 40 << 20
    assert max(sizes) <= BYTES_PER_TURN + COALESCE_BYTES


async def test_a_server_that_is_slowed_down_takes_a_batch_of_one_peer_in_turn(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inside, "SLOWED_RECEIVE_S", 0.001)
    taken: list[list[bytes]] = []

    def service(requests: Sequence[PeerRequest]) -> None:
        taken.append([request.head for request in requests])
        echo(requests)

    server = await bench.serve(service)
    sender, other = bench.connect_peer(server.endpoint), bench.connect_peer(server.endpoint)
    server.receive_slowly(True)
    futures = [sender.request(b"%d" % number, [bytes(600_000)], timeout_s=SOON_S) for number in range(20)]
    fence = other.request(b"a fence", timeout_s=SOON_S)
    assert (await fence).head == b"a fence"
    assert taken[:2] == [[b"0"], [b"a fence"]], "the other one waits for a turn, not for what others wait with"
    monkeypatch.setattr(inside, "SLOWED_RECEIVE_S", SOON_S)
    taken.clear()
    while not taken:  # the turn that was armed before  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    server.receive_slowly(False)  # the next one would be too late for their deadlines
    assert [(await future).head for future in futures] == [b"%d" % number for number in range(20)]


async def test_a_cancelled_future_leaves_the_others_alone(bench: Bench) -> None:
    server = await bench.serve(echo)
    peer = bench.connect_peer(server.endpoint)
    futures = [peer.request(b"%d" % n, timeout_s=SOON_S) for n in range(3)]
    futures[1].cancel()
    assert [(await futures[n]).head for n in (0, 2)] == [b"0", b"2"]


class Told:
    """An `AnswerListener` that fails with its first answer."""

    def __init__(self) -> None:
        self.heads: list[bytes] = []
        self.errors: list[BaseException] = []

    def on_answered(self, head: bytes, frames: Sequence[Buffer]) -> None:
        self.heads.append(head)
        if len(self.heads) == 1:
            raise ZeroDivisionError("a fault of ours")

    def on_failed(self, error: BaseException) -> None:
        self.errors.append(error)


async def test_an_asker_that_fails_with_its_answer_keeps_no_other_one_from_theirs(bench: Bench) -> None:
    server = await bench.serve(echo)
    peer, told, faults = bench.connect_peer(server.endpoint), Told(), list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context["exception"]))
    for number in range(3):
        assert peer.send_request(told, b"%d" % number, (), timeout_s=SOON_S) is None
    assert told.heads == [], "not within `post`"
    await turns()
    assert told.heads == [b"0", b"1", b"2"]
    assert [type(each) for each in faults] == [ZeroDivisionError], "and it is reported"
    assert not told.errors


async def test_what_is_posted_gets_an_outcome_or_is_refused_at_once(bench: Bench) -> None:
    held: list[PeerRequest] = []
    server = await bench.serve(held.extend)
    peer, told = bench.connect_peer(server.endpoint), Told()
    told.heads.append(b"")
    assert peer.send_request(told, b"answered", (), timeout_s=SOON_S) is None
    assert peer.send_request(told, b"forgotten", (), timeout_s=SOON_S) is None
    await turns()
    held[0].reply(b"here")
    assert told.heads[1:] == [b"here"], "in the call of the reply"
    await peer.close()
    assert [type(each) for each in told.errors] == [ConnectionLost]
    assert isinstance(peer.send_request(told, b"", (), timeout_s=SOON_S), ConnectionLost)
