"""The connections between simulated processes, with delay, loss, cuts and partitions.

A connection is two `ConnectionEnd`s. The messages of one end arrive at the other in order (as with TCP), after a random
delay; between two connections there is no order. Faults, all drawn from the simulation's seed:

- *delay*: `latency_s` exponential, and with `slow_rate` up to `slow_s` more;
- *loss* of one message of the peer transport (`droppable`): it is never answered, and the requester's deadline passes;
- *cut*: the connection breaks; both ends notice, one later than the other; messages in transit may or may not arrive;
- *half-open*: a connection loses all messages, in both directions; its ends notice only after a while;
- *slow*: messages between two nodes take much longer (`delay_messages`);
- *partition* between two nodes, one-way or both: messages wait (as TCP retransmits) and arrive after `heal_partition`;
- a process that is killed: the messages that it had sent arrive, then the others notice; after a power loss they notice
  only when a keep-alive fails (`silence_s`).

Addresses: every listener has a port of its own in the whole simulation; the port identifies it, the host is only shown.

Also in this file: TCP over simulated connections (`SimByteStream`). Bytes arrive in order, in other pieces than they
were written, or the connection breaks. Its messages are ("bytes", data) and ("credit", n), which says that n bytes were
read; a sender stops when UNREAD_BYTES_MAX are unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from ...proto import errors
from ...proto.errors import ConnectionLost, MagnetarError
from ..access import Caller, Guard
from ..network import STREAM_QUEUE_BYTES, ByteService, Endpoint, MustWakeReader, ProvideBuffer
from ..tasks import Tasks
from .loop import SimTrace, VirtualLoop

if TYPE_CHECKING:
    from .world import SimProcess

DIAL_TIMEOUT_S = 20.0
"""Seconds after which a connection attempt into a partition ends (as runtime/grpc/client.py)."""

PING_DELAY_S = 0.0005
"""Seconds of a ping, each way."""

FIRST_PORT = 20000
_WILDCARDS = ("", "0.0.0.0", "::")


@dataclass(slots=True)
class NetworkFaults:
    """The faults of a simulated network: how often each kind occurs, and how long the delays are. Rates are
    probabilities per message, times are in virtual seconds. The defaults describe a healthy network.

    `latency_s`: the mean delay of a message; `slow_rate` of the messages are up to `slow_s` seconds later. `drop_rate`:
    for a message that was sent as `droppable`, that it is lost. `cut_rate`: that a message breaks its connection.
    `silence_s`: the longest time until the other ends of its connections notice that a machine lost power."""

    latency_s: float = 0.0003
    slow_rate: float = 0.0
    slow_s: float = 0.2
    drop_rate: float = 0.0
    cut_rate: float = 0.0
    silence_s: float = 10.0


class ConnectionListener(Protocol):
    """A simulated listener, which accepts connections at a port."""

    owner: SimProcess

    def accept(self, end: ConnectionEnd) -> None:
        """Called for a new connection, with the listener's end of it. Must set the functions `receive` and `lost` of
        this end."""
        ...


class ConnectionEnd:
    """One end of a simulated connection. Its user sets the functions `receive(message)` and `lost()`, which are called
    in the context of the process that owns this end. `other`: the end at the other process. `is_ended`: whether the
    connection was lost because the other end closed it, and every message arrived."""

    def __init__(self, wires: SimConnections, owner: SimProcess, number: int) -> None:
        self.owner = owner
        self.number = number
        self.open = True
        self.is_ended = False
        self.other: ConnectionEnd = self
        self.receive: Callable[[Any], None] = _unset
        self.lost: Callable[[], None] = _nothing
        self._wires = wires
        self._arrives_at = 0.0
        self._coming: deque[Any] = deque()  # messages in transit to this end, in the order of their arrival
        self._held = 0  # how many of those are due and wait for the end of a partition

    @property
    def peer(self) -> str:
        return f"{self.other.owner.node}#{self.number}"

    def send(self, message: Any, what: str, *, droppable: bool = False) -> None:
        """Sends a message to the other end. Never fails: on a broken connection the message is lost. `what`: its text
        in the trace. `droppable`: the message may be lost by `NetworkFaults.drop_rate`."""
        if self.open:
            self._wires._send(self, message, what, droppable)

    def close(self) -> None:
        """Closes the connection normally: the other end receives everything that was sent before, and then its function
        `lost` is called. That of this end is not called. A second call does nothing."""
        if self.open:
            self.open = False
            self._wires._remove_end(self)
            self._wires._schedule_lost(self.other, by_close=True)


class SimConnections:
    """All connections and listeners of one simulation, and the faults of its network. `messages`, `dropped` and `cuts`
    count the messages, those that were lost, and the broken connections."""

    def __init__(self, loop: VirtualLoop, trace: SimTrace, rng: random.Random) -> None:
        self.faults = NetworkFaults()
        self.observe: Callable[[ConnectionEnd, Any], None] | None = None
        """Gets every message when it is sent, lost or not; it must not change anything."""
        self._loop = loop
        self._trace = trace
        self._rng = rng
        self._listeners: dict[int, ConnectionListener] = {}
        self._ends: dict[tuple[int, int], ConnectionEnd] = {}
        self._blocked: dict[tuple[str, str], bool] = {}
        self._clogged: dict[tuple[str, str], float] = {}
        self._numbers = 0
        self._next_port = FIRST_PORT
        self.dropped = self.cuts = self.messages = 0

    # ------------------------------------------------------------------ listeners
    def listen(self, endpoint: Endpoint, listener: ConnectionListener) -> Endpoint:
        """Starts to listen at `endpoint`, and returns the endpoint with its port. For port 0 a port is chosen that was
        never used. Raises Busy if a living process has the port. The endpoint returned has the host 127.0.0.1 if
        `endpoint` has a wildcard."""
        port = endpoint.port
        if port == 0:
            self._next_port += 1
            port = self._next_port
        taken = self._listeners.get(port)
        if taken is not None and taken.owner.alive:
            raise errors.Busy(f"{endpoint} is in use by {taken.owner.node}; choose another port")
        self._listeners[port] = listener
        host = "127.0.0.1" if endpoint.host in _WILDCARDS else endpoint.host
        self._trace.add_line(self._loop.elapsed_s, f"{listener.owner.node} listens on {port}")
        return Endpoint(host, port)

    def stop_listening(self, port: int, listener: ConnectionListener) -> None:
        """Stops listening at the port, if `listener` still has it."""
        if self._listeners.get(port) is listener:
            del self._listeners[port]

    def open_connection(self, owner: SimProcess, endpoint: Endpoint) -> asyncio.Future[ConnectionEnd]:
        """Connects to `endpoint`, and returns a future of the caller's end of the connection. The future fails with
        errors.Unavailable at once if no process listens there, or after DIAL_TIMEOUT_S if there is no answer."""
        future: asyncio.Future[ConnectionEnd] = self._loop.create_future()
        self._loop.call_later(self._delay(), self._knock, owner, endpoint, future, context=owner.context)
        self._loop.call_later(DIAL_TIMEOUT_S, self._dial_timed_out, endpoint, future, context=owner.context)
        return future

    def _knock(self, owner: SimProcess, endpoint: Endpoint, future: asyncio.Future[ConnectionEnd]) -> None:
        if future.done():
            return
        listener = self._listeners.get(endpoint.port)
        if listener is None or not listener.owner.alive:
            self._trace.add_detail(self._loop.elapsed_s, f"{owner.node} is refused at {endpoint.port}")
            future.set_exception(errors.Unavailable(f"no process listens on {endpoint}", listens="no"))
            return
        if self.is_blocked(owner.node, listener.owner.node) or self.is_blocked(listener.owner.node, owner.node):
            self._loop.call_later(1.0 + self._delay(), self._knock, owner, endpoint, future, context=owner.context)
            return
        near, far = self._join(owner, listener.owner)
        self._trace.add_detail(
            self._loop.elapsed_s, f"{owner.node} connects to {listener.owner.node} as #{near.number}"
        )
        self._loop.call_soon(listener.accept, far, context=far.owner.context)
        self._loop.call_later(self._delay(), _resolve, future, near, context=owner.context)

    def _dial_timed_out(self, endpoint: Endpoint, future: asyncio.Future[ConnectionEnd]) -> None:
        if not future.done():
            future.set_exception(errors.Unavailable(f"no answer from {endpoint} in {DIAL_TIMEOUT_S} s"))

    def _join(self, near_owner: SimProcess, far_owner: SimProcess) -> tuple[ConnectionEnd, ConnectionEnd]:
        self._numbers += 1
        near, far = ConnectionEnd(self, near_owner, self._numbers), ConnectionEnd(self, far_owner, self._numbers)
        near.other, far.other = far, near
        self._ends[self._numbers, 0], self._ends[self._numbers, 1] = near, far
        return near, far

    # ------------------------------------------------------------------ faults
    def partition_nodes(self, source: str, target: str, *, both: bool = True) -> None:
        """Blocks all messages from the node `source` to the node `target` until `heal_partition` is called. With
        `both`, also blocks the other direction."""
        self._trace.add_line(self._loop.elapsed_s, f"fault: {source} -{'/' if not both else 'X'}- {target}")
        self._blocked[source, target] = True
        if both:
            self._blocked[target, source] = True

    def heal_partition(self, source: str | None = None, target: str | None = None) -> None:
        """Ends the partition between two nodes; without arguments, ends all partitions and delays. The blocked messages
        are delivered, in order."""
        self._trace.add_line(self._loop.elapsed_s, f"heal: {source or 'all'} {target or ''}")
        if source is None:
            self._clogged.clear()
        pairs = [pair for pair in self._blocked if source is None or {source, target} == set(pair)]
        for pair in pairs:
            del self._blocked[pair]
        for end in list(self._ends.values()):
            if not self.is_blocked(end.other.owner.node, end.owner.node):
                held, end._held = end._held, 0
                for _ in range(held):
                    self._time_arrival(end)

    def is_blocked(self, source: str, target: str) -> bool:
        """Returns whether a partition blocks messages from the node `source` to the node `target`."""
        return (source, target) in self._blocked

    def cut_connections(self, source: str, target: str) -> int:
        """Breaks all connections between two nodes. Returns their number."""
        ends = [
            end
            for (_, side), end in list(self._ends.items())
            if side == 0 and {end.owner.node, end.other.owner.node} == {source, target}
        ]
        for end in ends:
            self._cut(end)
        return len(ends)

    def make_half_open(self, source: str, target: str, noticed_s: float) -> int:
        """Makes all connections between two nodes half-open: their messages are lost, and each end notices the loss of
        its connection at most `noticed_s` virtual seconds later. Returns the number of connections."""
        ends = [end for end in self._ends.values() if {end.owner.node, end.other.owner.node} == {source, target}]
        self._trace.add_line(self._loop.elapsed_s, f"fault: {len(ends) // 2} silent connections {source}-{target}")
        for end in ends:
            end.receive = _ignore
            self._schedule_lost(end, after_s=self._rng.uniform(0.0, noticed_s))
        return len(ends) // 2

    def delay_messages(self, source: str, target: str, seconds: float) -> None:
        """Delays each message between `source` and `target`, in both directions, by up to `seconds` more than usual. 0
        ends the delay."""
        self._trace.add_line(self._loop.elapsed_s, f"fault: {source}-{target} up to {seconds:.3f} s slow")
        for pair in ((source, target), (target, source)):
            if seconds:
                self._clogged[pair] = seconds
            else:
                self._clogged.pop(pair, None)

    def on_process_died(self, owner: SimProcess, *, silent: bool) -> None:
        """Called when a process has died. Breaks its connections. `silent`: its machine lost power, so the other ends
        notice it only when a keep-alive fails, after `silence_s` at most."""
        for end in [end for end in self._ends.values() if end.owner is owner]:
            end.open = False
            self._remove_end(end)
            after_s = self._rng.uniform(0.1, self.faults.silence_s) if silent else 0.0
            self._schedule_lost(end.other, after_s, by_close=not silent)  # the system closes what a process had open

    # ------------------------------------------------------------------ pings
    def ping_peer(self, end: ConnectionEnd, answer: asyncio.Future[None]) -> None:
        """Sets the result of the future `answer` after one round trip of the connection; never, if the connection is
        broken. Services do not see the ping, and no random number is drawn."""
        self._loop.call_later(PING_DELAY_S, self._pinged, end, end.other, answer, context=end.other.owner.context)

    def _pinged(self, end: ConnectionEnd, at: ConnectionEnd, answer: asyncio.Future[None]) -> None:
        if not at.open or not at.owner.alive or at.receive is _ignore or answer.done():
            return
        if self.is_blocked(at.other.owner.node, at.owner.node):
            self._loop.call_later(1.0, self._pinged, end, at, answer, context=at.owner.context)
        elif at is end:
            answer.set_result(None)
        else:
            self._loop.call_later(PING_DELAY_S, self._pinged, end, end, answer, context=end.owner.context)

    # ------------------------------------------------------------------ messages
    def _send(self, end: ConnectionEnd, message: Any, what: str, droppable: bool) -> None:
        self.messages += 1
        if self.observe is not None:
            self.observe(end, message)
        faults, rng = self.faults, self._rng
        target = end.other
        where = f"{end.owner.node}>{target.owner.node}#{end.number}"
        if droppable and faults.drop_rate and rng.random() < faults.drop_rate:
            self.dropped += 1
            self._trace.add_detail(self._loop.elapsed_s, f"{where} {what} dropped")
            return
        self._trace.add_detail(self._loop.elapsed_s, f"{where} {what}")
        self._schedule(target, message)
        if faults.cut_rate and rng.random() < faults.cut_rate:
            self._cut(end)

    def _schedule(self, target: ConnectionEnd, message: Any) -> None:
        target._coming.append(message)
        self._time_arrival(target)

    def _time_arrival(self, target: ConnectionEnd) -> None:
        """Schedules the arrival of the first message that has no arrival time: messages arrive in the order of sending.
        """
        delay = self._delay()
        if self._clogged:
            delay += self._rng.random() * self._clogged.get((target.other.owner.node, target.owner.node), 0.0)
        target._arrives_at = max(target._arrives_at + 1e-6, self._loop.time() + delay)
        self._loop.call_at(target._arrives_at, self._arrive, target, context=target.owner.context)

    def _arrive(self, target: ConnectionEnd) -> None:
        if not target.open:
            return
        if self.is_blocked(target.other.owner.node, target.owner.node):
            target._held += 1
            return
        target.receive(target._coming.popleft())

    def _cut(self, end: ConnectionEnd) -> None:
        """Breaks the connection: each end notices after a delay of its own; half the time messages in transit are lost.
        """
        if not end.open or not end.other.open:
            return
        self.cuts += 1
        self._trace.add_line(self._loop.elapsed_s, f"fault: cut {end.owner.node}-{end.other.owner.node}#{end.number}")
        lose = self._rng.random() < 0.5
        for side in (end, end.other):
            self._remove_end(side)
            if lose:
                side.receive = _ignore
            self._schedule_lost(side, after_s=self._delay() if self._rng.random() < 0.7 else self._rng.random())

    def _schedule_lost(self, end: ConnectionEnd, after_s: float = 0.0, *, by_close: bool = False) -> None:
        end._arrives_at = max(end._arrives_at + 1e-6, self._loop.time() + after_s + self._delay())
        self._loop.call_at(end._arrives_at, self._lose, end, by_close, context=end.owner.context)

    def _lose(self, end: ConnectionEnd, by_close: bool) -> None:
        if end.open:
            end.open = False
            end.is_ended = by_close and not end._coming and end.receive is not _ignore
            self._remove_end(end)
            self._trace.add_detail(self._loop.elapsed_s, f"{end.owner.node} lost #{end.number}")
            end.lost()

    def _remove_end(self, end: ConnectionEnd) -> None:
        for side in (0, 1):
            if self._ends.get((end.number, side)) is end:
                del self._ends[end.number, side]

    def _delay(self) -> float:
        faults, rng = self.faults, self._rng
        delay = 0.00002 + min(rng.expovariate(1.0 / faults.latency_s), 20 * faults.latency_s)
        if faults.slow_rate and rng.random() < faults.slow_rate:
            delay += rng.random() * faults.slow_s
        return delay


def _resolve(future: asyncio.Future[ConnectionEnd], end: ConnectionEnd) -> None:
    if not future.done():
        future.set_result(end)
    else:
        end.close()


def _unset(message: Any) -> None:
    raise AssertionError("a message came before the end was given a receiver")


def _ignore(message: Any) -> None:
    return


def _nothing() -> None:
    return


UNREAD_BYTES_MAX = 1 << 20
"""Bytes in transit or unread in one direction."""
CLOSE_TIMEOUT_S = 1.0
"""Seconds that a close may take, as in runtime/tcp/listening.py."""
DELIVERED_PIECE_BYTES = 1000
"""Bytes of one arrival: about a packet, so that a protocol meets torn frames."""

_LOG = logging.getLogger("magnetar.bytes")


class SimByteStream:
    """One end of a simulated TCP connection; implements `runtime.network.ByteStream`."""

    def __init__(self, end: ConnectionEnd, guard: Guard | None = None) -> None:
        self._end = end
        self.guard = guard
        self._out = bytearray()
        self._on_the_way = 0
        self._in = bytearray()
        self._lost = False
        self._closed = False
        self._waiting: list[asyncio.Future[None]] = []
        self._queue_max = STREAM_QUEUE_BYTES
        end.receive, end.lost = self._receive, self._is_lost

    @property
    def peer(self) -> str:
        return self._end.peer

    @property
    def caller(self) -> Caller:
        return Caller(self.peer)

    def on_caller_authenticated(self) -> None:
        """Does nothing, because the number of simulated connections is not limited."""

    @property
    def queued_bytes(self) -> int:
        return len(self._out)

    def limit_queue(self, bytes_max: int) -> None:
        self._queue_max = bytes_max

    async def read_into(self, room: ProvideBuffer, enough: MustWakeReader | None = None) -> int:
        while True:
            while not self._in:
                if self._lost and self._end.is_ended:
                    return 0
                if self._lost:
                    raise ConnectionLost(f"{self.peer}: the connection is lost")
                if self._closed:
                    raise ConnectionLost(f"{self.peer}: the connection was closed")
                await self._wait_change()
            into = room()
            size = min(len(into), len(self._in))
            into[:size] = self._in[:size]
            del self._in[:size]
            self._end.send(("credit", size), f"credit {size}")
            if enough is None or enough(size):
                return size

    def write_nowait(self, data: bytes) -> None:
        if not (self._closed or self._lost):
            self._out += data
            self._flush()

    async def wait_drained(self) -> None:
        while len(self._out) > self._queue_max and not self._lost:
            await self._wait_change()
        if self._lost:
            raise ConnectionLost(f"{self.peer}: the connection is lost")

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._out and not self._lost:
                    await self._wait_change()
        self._closed = True
        self._end.close()
        self._wake_waiting()

    # ------------------------------------------------------------------ the cable
    def _flush(self) -> None:
        while self._out and self._on_the_way < UNREAD_BYTES_MAX:
            piece = bytes(self._out[:DELIVERED_PIECE_BYTES])
            del self._out[:DELIVERED_PIECE_BYTES]
            self._on_the_way += len(piece)
            self._end.send(("bytes", piece), f"bytes {len(piece)} B")

    def _receive(self, message: tuple[Any, ...]) -> None:
        if message[0] == "bytes":
            self._in += message[1]
        else:
            self._on_the_way -= message[1]
            self._flush()
        self._wake_waiting()

    def _is_lost(self) -> None:
        self._lost = True
        self._out.clear()
        self._wake_waiting()

    async def _wait_change(self) -> None:
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(change)
        await change

    def _wake_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for change in waiting:
            if not change.done():
                change.set_result(None)


class RunningSimByteServer:
    """A simulated TCP listener; implements `runtime.network.RunningByteServer`. `owner` is the process that serves."""

    is_encrypted = False

    def __init__(
        self, wires: SimConnections, owner: SimProcess, endpoint: Endpoint, service: ByteService,
        guard: Guard | None = None
    ) -> None:
        self.owner = owner
        self._guard = guard
        self._wires = wires
        self._service = service
        self._handlers = Tasks()
        self.endpoint = wires.listen(endpoint, self)

    def accept(self, end: ConnectionEnd) -> None:
        """Called for a new connection, with the listener's end of it."""
        if self._handlers.closed:
            end.close()
        else:
            self._handlers.spawn(self._handle(SimByteStream(end, self._guard)), "bytes-connection")

    async def _handle(self, stream: SimByteStream) -> None:
        try:
            await self._service(stream)
        except MagnetarError as error:
            _LOG.debug("%s: %s", stream.peer, error)
        except Exception:
            _LOG.exception("the service of a connection failed")
        finally:
            await stream.close()

    async def close(self, grace_s: float = 0.0) -> None:
        self._wires.stop_listening(self.endpoint.port, self)
        await self._handlers.close(grace_s)
