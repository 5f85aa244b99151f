"""A connection that sends what carries nothing: it has a millisecond of a turn of the loop, and ends when its patience
is used up. Honest traffic uses none. Whatever comes, the windows are conserved."""

import asyncio
import random
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from magnetar.client.connect.discovery import PING_TIMEOUT_S
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import ConnectionLost, Unauthenticated
from magnetar.runtime.access import Caller, ListenerAccess, Principal, PrincipalKind
from magnetar.runtime.clock import SystemClock
from magnetar.runtime.grpc import server
from magnetar.runtime.network import CallContext, EndOfStream
from magnetar.runtime.tcp import http2 as http2
from magnetar.runtime.tcp import http2_frames as frames
from magnetar.runtime.tcp import http2_frames as limits
from magnetar.runtime.tcp.http2_frames import (
    HEADER_FIELDS_MAX,
    HUFFMAN_BYTES_MAX,
    HeaderDecoder,
    Http2ErrorCode,
    Http2Setting,
    Http2Violation,
    encode_headers,
)
from tests.compiled import replaces_code
from tests.runtime.tcp.test_connection import Pair, ended_with
from tests.support.wire import Wire, give

OPENED = frames.CONNECTION_PREFACE + frames.encode_settings({})
HEAD = [(b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x"), (b"content-type", b"application/grpc")]


def begun(id_: int, method: str = "Connect", flags: int = 0, **more: bytes) -> bytes:
    headers = {b":path": f"/magnetar.wire.Broker/{method}".encode(), **{k.encode(): v for k, v in more.items()}}
    return frames.encode_header_block(id_, encode_headers([*HEAD, *headers.items()]), flags, frames.DEFAULT_FRAME_BYTES)


def data(id_: int, payload: bytes, flags: int = 0) -> bytes:
    return frames.encode_frame_header(len(payload), frames.DATA, flags, id_) + payload


def raw(kind: int, payload: bytes = b"", flags: int = 0, stream: int = 0) -> bytes:
    return frames.encode_frame_header(len(payload), kind, flags, stream) + payload


def message(payload: bytes) -> bytes:
    return struct.pack("!BI", 0, len(payload)) + payload


def folded(size: int, byte: bytes = b"\x18\xc6\x31\x8c\x63") -> bytes:
    """A literal header whose value has so many bytes in Huffman's code: of the letter a, of 5 bits."""
    value = byte * (size // 5)
    return b"\0\x01a" + _length(len(value), 0x80) + value


def _length(size: int, high: int) -> bytes:
    size, digits = size - 127, bytearray((high | 127,))
    while size > 127:
        digits.append(0x80 | size & 0x7F)
        size >>= 7
    return bytes(digits) + bytes((size,))


class Strict:
    """No caller shows credentials that it takes, but those of `right`."""

    async def authenticate(self, caller: Caller) -> Principal:
        if caller.authorization == "right":
            return Principal("right", PrincipalKind.CLIENT)
        raise Unauthenticated("no credentials")

    def authorize(self, principal: Principal, path: str) -> None: ...
    def why_lapsed(self, principal: Principal) -> str:
        return ""


class Served:
    def __init__(self) -> None:
        self.listener = server._Listener([("Broker", self)], ListenerAccess(Strict()), SystemClock())
        self.end, self.wire = server._ServerConnection(self.listener), Wire()
        self.end.connection_made(self.wire)
        self.release = asyncio.Event()

    async def lookup(self, request: Any, context: CallContext) -> Any:
        return wire.LookupReply(owner=request.topic)

    async def connect(self, stream: Any, context: CallContext) -> None:
        await self.release.wait()
        try:
            while True:
                await stream.receive()
        except EndOfStream:
            return

    async def turns(self, count: int = 6) -> None:
        for _ in range(count):
            await asyncio.sleep(0)

    def ended(self) -> list[tuple[int, int, int]]:
        return ended_with(self.wire.written)

    async def close(self) -> None:
        self.release.set()
        self.end.close(ConnectionLost("the test is over"))
        if self.listener.handlers:
            await asyncio.wait(list(self.listener.handlers))


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    found = Served()
    yield found
    await found.close()


PADDED = raw(frames.DATA, b"\xff" + bytes(255), frames.FLAG_PADDED, 1)
FLOODS: dict[str, Callable[[int], bytes]] = {
    "updates-of-the-connection's-window": lambda n: frames.encode_window_update(0, 1),
    "larger-updates-of-the-connection's-window": lambda n: frames.encode_window_update(0, 1000),
    "updates-of-a-stream's-window": lambda n: (begun(1) if not n else b"") + frames.encode_window_update(1, 100),
    "updates-of-the-window-of-a-stream-that-is-over": lambda n: (
        (begun(1) + frames.encode_rst_stream(1,
            Http2ErrorCode.CANCEL) if not n else b"") + frames.encode_window_update(1,
        5)),
    "pings": lambda n: frames.encode_ping(n.to_bytes(8, "big")),
    "answers-to-pings": lambda n: frames.encode_ping(bytes(8), frames.ACK),
    "settings": lambda n: frames.encode_settings({}),
    "settings-that-change-windows": lambda n: frames.encode_settings({Http2Setting.INITIAL_WINDOW_SIZE: n % 1000}),
    "settings-of-thousands": lambda n: frames.encode_frame_header(15_000, frames.SETTINGS, 0, 0) + bytes(15_000),
    "answers-to-settings": lambda n: frames.SETTINGS_ACK,
    "priorities": lambda n: raw(frames.PRIORITY, bytes(5), stream=1),
    "frames-of-a-later-kind": lambda n: raw(77 + n % 100),
    "long-frames-of-a-later-kind": lambda n: raw(77, bytes(16_000)),
    "goings-away": lambda n: frames.encode_goaway(0, Http2ErrorCode.NO_ERROR),
    "resets-of-a-stream-that-is-over": lambda n: (begun(1) if not n else b"") + frames.encode_rst_stream(1,
    Http2ErrorCode.CANCEL),
    "calls-that-are-reset-at-once": lambda n: begun(2 * n + 1, "Lookup") + frames.encode_rst_stream(2 * n + 1,
    Http2ErrorCode.CANCEL),
    "streams-that-are-reset-at-once": lambda n: begun(2 * n + 1) + frames.encode_rst_stream(2 * n + 1,
    Http2ErrorCode.CANCEL),
    "streams-that-make-the-server-reset-them": lambda n: begun(2 * n + 1) + frames.encode_window_update(2 * n + 1, 0),
    "streams-that-end-twice": lambda n: begun(2 * n + 1, flags=frames.END_STREAM) + data(2 * n + 1, b"x"),
    "empty-data": lambda n: (begun(1) if not n else b"") + data(1, b""),
    "empty-data-of-a-stream-that-is-over": lambda n: (
        (begun(1) + frames.encode_rst_stream(1, Http2ErrorCode.CANCEL) if not n else b"") + data(1, b"", n & 1)),
    "data-of-a-stream-that-is-over": lambda n: (
        (begun(1) + frames.encode_rst_stream(1, Http2ErrorCode.CANCEL) if not n else b"") + data(1, bytes(1000))),
    "data-of-one-byte": lambda n: (begun(1) + data(1, b"\0\0\0\xff\xff") if not n else b"") + data(1, b"x"),
    "padding": lambda n: (begun(1) if not n else b"") + PADDED,
    "empty-messages": lambda n: (begun(1) if not n else b"") + data(1, message(b"") * 100),
    "empty-messages-of-a-call": lambda n: (begun(1, "Lookup") if not n else b"") + data(1, message(b"") * 100),
    "compressed-messages": lambda n: begun(2 * n + 1) + data(2 * n + 1, b"\1\0\0\0\1x"),
    "empty-continuations": lambda n: (
        raw(frames.HEADERS, b"", 0, 2 * n + 1) + raw(frames.CONTINUATION, b"", 0, 2 * n + 1) * 15
        + raw(frames.CONTINUATION, b"", frames.FLAG_END_HEADERS, 2 * n + 1)),
    "empty-headers": lambda n: raw(frames.HEADERS, b"", frames.FLAG_END_HEADERS | frames.END_STREAM, 2 * n + 1),
    "calls-of-no-method": lambda n: begun(2 * n + 1, "Nowhere", frames.END_STREAM),
    "calls-without-credentials": lambda n: begun(2 * n + 1, "Lookup", frames.END_STREAM),
    "streams-with-wrong-credentials": lambda n: begun(2 * n + 1, authorization=b"wrong %d" % n),
    "headers-of-streams-that-are-over": lambda n: begun(1),
    "headers-in-Huffman's-code": lambda n: raw(
        frames.HEADERS, folded(8000 + 5 * (n % 100)), frames.FLAG_END_HEADERS | frames.END_STREAM, 2 * n + 1),
    "a-thousand-headers": lambda n: raw(
        frames.HEADERS, b"\0\x01a\x02%02d" % (n % 100) * 250, frames.FLAG_END_HEADERS | frames.END_STREAM, 2 * n + 1),
    "headers-by-their-index": lambda n: raw(
        frames.HEADERS, b"\x82" * (200 + n % 50), frames.FLAG_END_HEADERS | frames.END_STREAM, 2 * n + 1),
}  # fmt: skip


@pytest.mark.parametrize("what", FLOODS)
async def test_a_stranger_that_sends_what_carries_nothing_is_told_to_be_calm_soon(
    served: Served, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    now = served.end.allowance._since
    monkeypatch.setattr(served.end.loop, "time", lambda: now)  # no patience grows, however slow the machine is
    give(served.end, OPENED)
    number = 0
    while not served.end.is_lost and number < 4 * limits.STRANGER_ALLOWANCE:
        give(served.end, FLOODS[what](number))
        number += 1
        if number % 8 == 0:
            await served.turns()
        served.end.check()
    assert served.ended()[-1] == (frames.GOAWAY, 0, Http2ErrorCode.ENHANCE_YOUR_CALM)
    assert number <= limits.STRANGER_ALLOWANCE + 8
    assert served.wire.is_closed
    await served.turns()
    assert not served.end.streams
    assert not served.listener.handlers


async def known(served: Served) -> None:
    give(served.end, OPENED + begun(1, authorization=b"right"))
    await served.turns()
    assert served.end.allowance.is_known


@pytest.mark.parametrize("what", [
    "pings", "settings", "frames-of-a-later-kind", "empty-data-of-a-stream-that-is-over", "calls-of-no-method",
    "updates-of-the-connection's-window", "streams-that-make-the-server-reset-them",
])  # fmt: skip
async def test_one_that_was_admitted_has_more_patience_and_not_for_ever(served: Served, what: str) -> None:
    await known(served)
    before = (
        limits.STRANGER_ALLOWANCE
        if "stream" not in what and "calls" not in what
        else limits.STRANGER_ALLOWANCE / http2.REFUSED_CALL_CHARGE
    )
    number = 0
    while not served.end.is_lost and number < 2 * limits.KNOWN_CALLER_ALLOWANCE:
        give(served.end, b"".join(FLOODS[what](number + each + 10) for each in range(20)))
        number += 20
        if number % 100 == 0:
            await served.turns()
    assert number > 2 * before
    assert served.ended()[-1] == (frames.GOAWAY, 0, Http2ErrorCode.ENHANCE_YOUR_CALM)


@replaces_code
async def test_patience_grows_with_time(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    await known(served)
    monkeypatch.setattr(http2, "CHARGE_PER_TURN_MAX", 1e9)
    now = served.end.loop.time()
    monkeypatch.setattr(served.end.allowance, "_loop", Clock(lambda: now))
    for _ in range(10):
        give(served.end, frames.encode_ping(bytes(8)) * 10_000)
        now += 10_000 / limits.ALLOWANCE_RATE
    assert not served.end.is_lost
    give(served.end, frames.encode_ping(bytes(8)) * 30_001)
    assert served.end.is_lost


async def test_an_idle_client_that_pings_every_few_seconds_uses_no_patience_for_days(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    await known(served)
    now = served.end.loop.time()
    monkeypatch.setattr(served.end.allowance, "_loop", Clock(lambda: now))
    for _ in range(int(2 * limits.KNOWN_CALLER_ALLOWANCE)):
        give(served.end, frames.encode_ping(bytes(8)))
        served.wire.written.clear()
        now += PING_TIMEOUT_S
    assert not served.end.is_lost


class Clock:
    def __init__(self, time: Callable[[], float]) -> None:
        self.time = time

    def call_soon(self, call: Callable[[], None]) -> asyncio.Handle:
        return asyncio.get_running_loop().call_soon(call)


async def test_honest_traffic_uses_no_patience() -> None:
    """Also of a client that gives each byte of its window back at once, and pings now and then."""
    pair, rng = Pair(), random.Random(5)
    await pair.run(rng, 1000)
    for each in range(300):
        call = pair.call(f"t{each}")
        await pair.run(rng, 1 << 20)
        assert call.done.done()
    stream = pair.stream()
    await pair.run(rng, 1 << 20)
    begin = pair.server.allowance._left
    for each in range(300):
        stream.send_nowait(wire.ClientFrame(publish=rng.randbytes(rng.choice((1, 100, 100_000)))))
        sent = pair.server.out.send_left
        await pair.run(rng, 1 << 20)
        assert len(await stream.receive()) == 1
        if (size := sent - pair.server.out.send_left) >= limits.SMALL_WINDOW_UPDATE and each % 2:
            give(pair.server, frames.encode_window_update(0, size) + frames.encode_window_update(stream.id, size))
    for end in (pair.client, pair.server):
        end.check()
    assert begin - pair.server.allowance._left <= 25, "some bytes are given back twice here"
    await pair.close()


async def test_a_token_of_the_longest_size_in_huffmans_code_is_taken(served: Served) -> None:
    decoder: HeaderDecoder[Any] = HeaderDecoder(list, 32 << 10)
    ((_, value),) = decoder.decode(folded(12_000))
    assert len(value) == 19_200


@pytest.mark.parametrize("sent", [
    folded(HUFFMAN_BYTES_MAX + 5, b"\xff\xff\xfe\x3f\xff"), b"\0\x01a\x01b" * (HEADER_FIELDS_MAX + 1), b"\x82" * 30_000,
])  # fmt: skip
def test_headers_that_no_call_has_are_refused_before_they_are_decoded(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder: HeaderDecoder[Any] = HeaderDecoder(list, 32 << 10)
    monkeypatch.setattr("hpack.Decoder.decode", lambda *_, **__: pytest.fail("it is decoded"))
    with pytest.raises(Http2Violation) as raised:
        decoder.decode(sent)
    assert raised.value.code is Http2ErrorCode.ENHANCE_YOUR_CALM


# ---------------------------------------------------------------------------------- slices
class Ticks:
    """A clock on which each look takes 0.1 ms."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 0.0001
        return self.now


@replaces_code
@pytest.mark.parametrize("flood", [
    frames.encode_ping(bytes(8)), frames.encode_window_update(0, 1), raw(77), data(1, b"x"),
    data(1, message(b"\n\0") * 500), raw(frames.DATA, b"\x01" + message(b"\n\0") * 2000 + b"\0", frames.FLAG_PADDED, 1),
], ids=["pings", "updates", "later-kinds", "single-bytes", "short-messages", "padded-messages"])  # fmt: skip
async def test_a_connection_has_a_slice_of_a_turn_and_the_others_have_their_turn_between(
    served: Served, flood: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the buffer has beyond the slice waits, and the socket is not read; it is taken in later turns, in order."""
    await known(served)
    served.end.allowance.set_allowance(1e9, 0)
    monkeypatch.setattr(http2, "perf_counter", clock := Ticks())
    count = http2.READ_BUFFER_BYTES // len(flood) - 1
    slices, others = list[float](), list[int]()
    honest = served.end._read_frames

    def take(view: memoryview) -> int:
        begin, others_ = clock.now, len(others)
        found = honest(view)
        slices.append(clock.now - begin)
        turns.append(others_)
        return found

    turns: list[int] = []
    monkeypatch.setattr(served.end, "_read_frames", take)

    async def other() -> None:
        while True:
            others.append(1)
            await asyncio.sleep(0)

    running = asyncio.create_task(other())
    sent = memoryview(flood * count)
    served.end.get_buffer(-1)[: len(sent)] = sent
    served.end.buffer_updated(len(sent))
    assert not served.wire.is_read
    async with asyncio.timeout(30):
        while not served.wire.is_read:
            served.end.check()
            await asyncio.sleep(0)
    running.cancel()
    assert len(slices) > 3
    assert max(slices) <= 0.0012
    assert turns == sorted(set(turns)), "another task ran between any two slices"
    served.end.check()
    assert not served.end.is_lost
    if flood[3] == frames.PING:
        assert bytes(served.wire.written).count(frames.encode_ping(bytes(8), frames.ACK)) == count


AT_ONCE = {
    "headers-in-Huffman's-code": 1100, "a-thousand-headers": 300, "headers-by-their-index": 300,
    "settings-of-thousands": 650, "data-of-a-stream-that-is-over": 500, "empty-messages": 500,
    "empty-messages-of-a-call": 500 * http2.REFUSED_CALL_CHARGE,
}  # fmt: skip
"""What is charged at most between two looks, of one frame or of SLICE_BYTES; of the others less than 200."""


@replaces_code
@pytest.mark.parametrize("is_known", [False, True], ids=["stranger", "known"])
@pytest.mark.parametrize("what", FLOODS)
async def test_a_flood_is_handled_a_hundred_frames_at_a_time_and_rests_between(
    served: Served, what: str, is_known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in what is charged, on a clock that stands still: however fast the machine is."""
    await known(served) if is_known else give(served.end, OPENED)
    served.end.allowance.set_allowance(1e9, 0)
    served.end.allowance.is_known = is_known
    monkeypatch.setattr(http2, "perf_counter", lambda: 0.0)
    charged = [0]
    honest = limits.FrameAllowance.charge_frames

    def charge(patience: limits.FrameAllowance, frames_: int = 1) -> None:
        charged[-1] += frames_
        honest(patience, frames_)

    def rest() -> asyncio.Handle:
        charged.append(0)
        return asyncio.get_running_loop().call_soon(served.end._go_on)

    monkeypatch.setattr(limits.FrameAllowance, "charge_frames", charge)
    monkeypatch.setattr(served.end, "_rest_later", rest)
    sent = b"".join(FLOODS[what](2 * is_known + each) for each in range(3000))[: http2.READ_BUFFER_BYTES]
    served.end.get_buffer(-1)[: len(sent)] = sent
    served.end.buffer_updated(len(sent))
    async with asyncio.timeout(30):
        while not served.wire.is_read and not served.end.is_lost:  # noqa: ASYNC110 - turns are counted
            await asyncio.sleep(0)
    assert len(charged) > sum(charged) / (http2.CHARGE_PER_TURN_MAX + AT_ONCE.get(what, 200))
    assert max(charged) <= http2.CHARGE_PER_TURN_MAX + AT_ONCE.get(what, 200)


async def test_honest_traffic_does_not_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a client whose hundreds of calls wait for the admission of the first."""
    pair, rng = Pair(), random.Random(5)
    rests = list[bool]()
    monkeypatch.setattr(pair.client, "_rest_later", lambda: pytest.fail("a client rests"))
    honest = pair.server._rest_later
    monkeypatch.setattr(pair.server, "_rest_later", lambda: (rests.append(pair.server.allowance.is_known), honest())[1])
    calls = [pair.call(f"t{each}") for each in range(60)]
    async with asyncio.timeout(30):
        while not all(call.done.done() for call in calls):
            await pair.run(rng, 1 << 20)
    stream = pair.stream()
    for _ in range(200):
        stream.send_nowait(wire.ClientFrame(publish=rng.randbytes(rng.choice((1, 100, 100_000)))))
        await pair.run(rng, 1 << 20)
        await stream.receive()
    assert not any(rests), "once it is known"
    await pair.close()


async def test_reads_of_one_turn_have_one_slice(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system hands over one full buffer after the other."""
    await known(served)
    served.end.allowance.set_allowance(1e9, 0)
    monkeypatch.setattr(http2, "perf_counter", Ticks())
    long = frames.encode_frame_header(16_000, 77, 0, 0) + bytes(16_000)
    stream = memoryview(long * (40 * http2.READ_BUFFER_BYTES // len(long)))
    reads = 0
    while served.wire.is_read:
        room = served.end.get_buffer(-1)
        room[:], stream = stream[: len(room)], stream[len(room) :]
        served.end.buffer_updated(len(room))
        reads += 1
    assert reads <= 10
    await served.turns(40)
    assert served.wire.is_read


async def test_a_connection_that_is_lost_while_its_bytes_wait_takes_none_of_them(served: Served) -> None:
    await known(served)
    served.end.allowance.set_allowance(1e9, 0)
    sent = frames.encode_ping(bytes(8)) * 14_000
    served.end.get_buffer(-1)[: len(sent)] = sent
    served.end.buffer_updated(len(sent))
    written = len(served.wire.written)
    assert served.end._later is not None
    served.end.connection_lost(None)
    await served.turns()
    assert len(served.wire.written) == written


# ---------------------------------------------------------------------------------- windows
async def test_bytes_of_streams_that_are_reset_before_they_are_read_are_credited(served: Served) -> None:
    """Forty times 500 kB, of a window of 16 MiB."""
    await known(served)
    for id_ in range(3, 83, 2):
        give(served.end, begun(id_, authorization=b"right"))
        await served.turns()
        give(served.end, data(id_, struct.pack("!BI", 0, 500_000) + bytes(499_995)))
        served.end.check()
        give(served.end, frames.encode_rst_stream(id_, Http2ErrorCode.CANCEL))
        served.end.check()
        await served.turns()
    assert not served.end.is_lost
    assert served.end.window.left > http2.CONNECTION_WINDOW_BYTES // 2


@pytest.mark.parametrize("seed", range(10))
async def test_windows_are_conserved_whatever_comes(served: Served, seed: int) -> None:
    rng = random.Random(seed)
    served.end.allowance.set_allowance(1e9, 0)
    give(served.end, OPENED)
    last, open_ = -1, list[int]()
    for _ in range(400):
        match rng.randrange(8):
            case 0 | 1:
                last += 2
                method = rng.choice(("Connect", "Lookup", "Nowhere"))
                sent = begun(last, method, authorization=rng.choice((b"right", b"right", b"wrong")))
                open_.append(last)
            case 2 if open_:
                sent = frames.encode_rst_stream(open_.pop(rng.randrange(len(open_))), Http2ErrorCode.CANCEL)
            case 3 if open_:
                padding = rng.randrange(256)
                payload = bytes((padding,)) + message(rng.randbytes(rng.randrange(100))) + bytes(padding)
                sent = raw(frames.DATA, payload, frames.FLAG_PADDED, rng.choice(open_))
            case 4 if open_:
                sent = data(rng.choice(open_), b"\1\0\0\0\1x" if rng.random() < 0.2 else b"", rng.randrange(2))
            case _ if open_:
                id_ = rng.choice(open_)
                stream = served.end.streams.get(id_)
                left = stream.receive_left if stream is not None else 1000
                size = rng.choice((rng.randrange(100), min(left + rng.randrange(2), 100_000)))
                sent = data(id_, (message(bytes(max(size - 5, 0))) * 2)[:size])
            case _:
                sent = frames.encode_ping(bytes(8))
        if served.end.window.left < len(sent):
            continue
        cut = rng.randrange(len(sent))
        for part in (sent[:cut], sent[cut:]):
            give(served.end, part)
            served.end.check()
        if rng.random() < 0.1:
            served.release.set()
        await served.turns(rng.randrange(3))
        served.end.check()
    assert not served.end.is_lost or served.ended()[-1][2] == Http2ErrorCode.COMPRESSION_ERROR
