"""A connection of a Pulsar client: its handshake, its commands in their order, and its end. The connection has the
handlers of its producers and consumers (`PulsarHandlerTable`), and its topic watches.

The first command is CONNECT; nothing else is parsed before the caller is authenticated. Then each command is handled in
the order of the stream. A command that waits for something (opening, look-ups, seeks) runs in a task; acknowledgements
are handled in steps, so that they hold the event loop for a slice at a time. The answers of one turn are sent together.

Bounds: the largest message and 64 KiB per frame; a frame of more than LONG_FRAME_BYTES waits for memory among those
that arrive on all connections (runtime/budget.py). The connection is not read while more than HELD_FRAMES_BYTES_MAX of
entries wait for credit of their producers, more than UNSENT_BYTES_MAX are unsent, or RUNNING_REQUESTS_MAX requests (and
one for each producer and consumer) are in progress: this delays the client and refuses nothing. `connection_ids`
producers and consumers. While more than STREAM_QUEUE_BYTES are unsent, its consumers get nothing, and the others of
their subscriptions do. What it holds counts in the memory for all callers (runtime/budget.py `CallerMemory`). A
connection whose client reads nothing is closed.

A silent client gets a PING after KEEP_ALIVE_S, and its connection is closed if it stays silent as long again.
CREDENTIALS_RENEW_AHEAD_S before credentials expire (or after half of their life, if that is shorter) the client is
asked for new ones (AUTH_CHALLENGE), and again if those expire soon. Without new ones of the same role the connection is
closed when they expire. A frame or a command that is no request ends the connection, as in Pulsar's broker. Guarding
tests: tests/broker/pulsar/.

Also in this file, below its heading: the credentials of CONNECT and AUTH_RESPONSE as values of an Authorization header
(credentials).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from ...proto import pulsar_pb2 as pulsar
from ...proto.errors import ConnectionLost, InvalidRequest, MagnetarError, NotOwner, Unauthenticated
from ...proto.versions import PRODUCT
from ...runtime.access import AUTHORIZATION_MAX, CREDENTIAL_SCHEMES, Caller
from ...runtime.alarm import EventLoopSlices
from ...runtime.budget import ROOM_POLL_S
from ...runtime.files import Buffer
from ...runtime.grpc.limits import CallerAuthenticator
from ...runtime.network import STREAM_QUEUE_BYTES, ByteStream, CallContext
from ...runtime.tasks import Tasks
from ..node.topic_manager import TopicManager
from . import lookup
from .consumer import PulsarConsumerHandler
from .frames import (
    FRAME_EXTRA_BYTES,
    NO_REQUEST_ID,
    PulsarFrameSplitter,
    SharedReceiveBuffer,
    encode_frame,
    parse_frame,
)
from .producer import PulsarProducerHandler, compute_payload_bytes_max
from .translate import find_pulsar_error_number

if TYPE_CHECKING:
    from .protocol import OpenPulsarProducers

# --------------------------------------------------------------------------------------------------- credentials
# The credentials of CONNECT and AUTH_RESPONSE as values of an Authorization header (security/authenticator.py).
#
# | auth_method_name | auth_data | as |
# |---|---|---|
# | `token` (also OAuth2) | the token; a token file of Pulsar's C++ client ends with its newline | `Bearer TOKEN` |
# | `basic` | `user:password` | `Basic BASE64` |
# | `tls`, `none`, empty | – | the client certificate, or nothing |
#
# Another method counts as no credentials: the caller has the anonymous role if there is one, else it is refused.


def parse_caller_credentials(caller: Caller, method: str, data: bytes) -> Caller:
    """Returns a copy of `caller` with the credentials `data` that the client sent, of which the first AUTHORIZATION_MAX
    bytes count. `method`: the client's authentication method. If it is not one of `CREDENTIAL_SCHEMES`, returns
    `caller` unchanged."""
    scheme = next((each for each in CREDENTIAL_SCHEMES if each.method == method), None)
    return caller if scheme is None else replace(caller, authorization=scheme.make_header(data[:AUTHORIZATION_MAX]))


# ---------------------------------------------------------------------------------------------------- connection


KEEP_ALIVE_S = 30.0
PINGS_PER_CHECK_MAX = 1_000
"""Most pings and pongs between two checks of the clock: a client sends one in 30 s. Handling one costs 10 µs."""
CREDENTIALS_RENEW_AHEAD_S = 30.0
LONG_FRAME_BYTES = 192 << 10
"""Size above which a frame must wait for memory: more than a batch of Pulsar's clients (128 KiB)."""
HELD_FRAMES_BYTES_MAX = 8 << 20
UNSENT_BYTES_MAX = 64 << 20
RUNNING_REQUESTS_MAX = 1000
FIRST_FRAME_BYTES = 64 << 10
CROWDED_QUEUE_BYTES = 64 << 10
"""Most bytes of unsent deliveries while the memory of the process is tight."""
CONNECT_OPERATION_PATH = "/pulsar/Connect"
"""The name of the connection in the audit log."""
PROTOCOL_VERSION = 21

_LOG = logging.getLogger("magnetar.broker.pulsar")
PulsarCommand = pulsar.BaseCommand
T = TypeVar("T")


class PulsarConnection:
    """One TCP connection of a client that speaks Pulsar's protocol: reads its commands, and sends answers and
    deliveries. `names`: the open producers of all connections of the listener; `callers`: authenticates the client;
    `spare`: the receive buffer that all connections share."""

    def __init__(
        self,
        broker: TopicManager,
        stream: ByteStream,
        names: OpenPulsarProducers,
        callers: CallerAuthenticator,
        spare: SharedReceiveBuffer,
    ) -> None:
        self.broker = broker
        self.names = names
        self.caller = CallContext(stream.peer)
        self.client = ""  # the client's name and version, as it sends them
        self.listener: str | None = None  # that the client's look-ups on this connection name; None: it made none
        self.version = 0  # the version of the protocol; 0: not connected
        self._callers = callers
        self._admitted = ExitStack()  # open while the credentials are valid
        self._flags = pulsar.FeatureFlags()
        self._stream = stream
        self._clock = broker.world.clock
        self._frames = PulsarFrameSplitter(FIRST_FRAME_BYTES, spare)
        self.handlers = PulsarHandlerTable(self)
        self._tasks = Tasks()  # cancelled when the connection ends
        self._leaving = Tasks()  # not cancelled: they end handlers
        self._out: list[Buffer] = []
        self._out_bytes = 0
        self._held_bytes = 0
        self._memory = broker.memory
        self._place: asyncio.Future[None] | None = None  # done when there is memory for the long frame that arrives
        self._has_place = False
        self._counted_in = self._counted_out = 0  # bytes of this connection that are counted in `_memory`
        self._written = self._left = 0  # bytes written, and how many of them were sent at the last check …
        self._left_at = self._clock.monotonic()  # … that found more sent than the one before
        self._room: asyncio.Event = asyncio.Event()
        self._last_heard = self._clock.monotonic()
        self._pinged = self._challenged = False
        self._pings = 0  # pings and pongs since the last check of the clock
        self._renew_s = CREDENTIALS_RENEW_AHEAD_S  # how long before the credentials expire new ones are asked for
        self._ended: MagnetarError | None = None  # why the connection ends; nothing is handled or delivered any more
        self._waits: asyncio.Task[Any] | None = None  # the task to be cancelled when the connection ends
        self._alarm: asyncio.TimerHandle | None = None  # the next check of the clock; None: check it now
        self._takes: dict[int, CommandHandler] = {
            **self.handlers.command_handlers,
            PulsarCommand.PING: self._ping,
            PulsarCommand.PONG: self._pong,
        }

    # ------------------------------------------------------------------ the stream
    async def serve(self) -> None:
        """Reads and carries out the commands of the client until it closes the connection. Raises the error with which
        the broker ends the connection; ConnectionLost if the client does not authenticate within `first_frame_s`
        seconds. The caller must then call `close`."""
        allowed_s = self.broker.config.first_frame_s
        try:
            async with asyncio.timeout(allowed_s):
                while self.version == 0:
                    if not await self._read():
                        raise ConnectionLost(f"{self.caller.peer} closed the connection before its first command")
                    await self._handle_frames()
        except TimeoutError as error:
            raise ConnectionLost(f"{self.caller.peer} did not authenticate within {allowed_s:g} s") from error
        try:
            while await self._unless_ended(self._read):
                await self._handle_frames()
                self._release_place()
                if self._crowded:
                    await self._unless_ended(self._wait_room)
                if self._lacks_place:
                    await self._unless_ended(self._wait_for_place)
        finally:
            if self._alarm is not None:
                self._alarm.cancel()

    def _read(self) -> Awaitable[int]:
        return self._stream.read_into(self._frames.get_free_buffer, self._came)

    def _came(self, size: int) -> bool:
        self._last_heard, self._pinged = self._clock.monotonic(), False
        return self._frames.on_bytes_received(size) or self._lacks_place

    @property
    def _lacks_place(self) -> bool:
        """Whether a long frame begins to arrive for which no memory is reserved: the rest must not be read before
        `_wait_for_place`."""
        return not self._has_place and self._frames.incomplete_frame_bytes > LONG_FRAME_BYTES

    async def _wait_for_place(self) -> None:
        """Waits until there is memory for the long frame. Raises ConnectionLost."""
        self._has_place = True
        if not self._memory.arrivals.admit(self, self._frames.incomplete_frame_bytes):
            self._place = asyncio.get_running_loop().create_future()
            try:
                await self._place
            finally:
                self._place = None
            self._last_heard = self._clock.monotonic()  # what it sent meanwhile was not read

    def on_memory_reserved(self) -> None:
        """Called by the memory budget when memory is reserved for the long frame that is arriving: the frame is read
        on."""
        if self._place is not None and not self._place.done():
            self._place.set_result(None)

    def on_arrival_too_slow(self) -> None:
        """Called by the memory budget when the long frame, for which memory is reserved, arrives too slowly while
        others wait for memory. Ends the connection with ConnectionLost."""
        self._end_with(ConnectionLost(f"{self.caller.peer}: memory is short, and a long frame came too slowly"))

    def _release_place(self) -> None:
        """Called when all complete frames were handled: releases the memory that was reserved for a long frame."""
        if self._has_place:
            self._has_place = False
            self._memory.arrivals.discard(self)

    async def _handle_frames(self) -> None:
        turns = EventLoopSlices(self._clock)
        for each in self._frames.take_complete_frames():
            if self._ended is not None:
                raise self._ended
            if self._busy:
                await self._unless_ended(self._wait_turn)
            command, rest = parse_frame(each)
            if self.version == 0:
                await self._connect(command)
            elif command.type == PulsarCommand.AUTH_RESPONSE:
                await self._renew(command.auth_response.response)
            else:
                for _ in self._handle_command(command, rest) or ():
                    if turns.is_slice_used_up:
                        await turns.begin_slice()
            if turns.is_slice_used_up:
                await turns.begin_slice()

    def _handle_command(self, command: PulsarCommand, rest: memoryview) -> Iterator[None] | None:
        take = self._takes.get(command.type)
        if take is not None:
            return take(command, rest)
        if command.type == PulsarCommand.CONNECT:
            raise InvalidRequest("a second CONNECT")
        self.start_request(lookup.answer_command(self, command))
        return None

    async def _unless_ended(self, wait: Callable[[], Awaitable[T]]) -> T:
        """Awaits `wait()` and returns its result. If the connection ends, cancels the wait and raises its error."""
        if self._alarm is None:
            self._check_clock()
        if self._ended is not None:
            raise self._ended
        self._waits = task = asyncio.current_task()
        assert task is not None, "a connection is served by a task"
        try:
            return await wait()
        except asyncio.CancelledError:
            if self._ended is None:
                raise
            task.uncancel()
            raise self._ended from None
        finally:
            self._waits = None

    def _check_clock(self) -> None:
        """Checks time limits now, and sets the timer for the next check: one timer, not one for each read."""
        try:
            self._alarm = asyncio.get_running_loop().call_later(self._check_deadlines(), self._check_clock)
        except MagnetarError as error:
            self._end_with(error)

    def _end_with(self, error: MagnetarError) -> None:
        self._ended = error
        if self._waits is not None:
            self._waits.cancel()

    def _check_deadlines(self) -> float:
        """Sends a PING or AUTH_CHALLENGE if one is due; returns the seconds until the next check. Raises ConnectionLost
        if for too long the client sent nothing, or read nothing."""
        self._pings = 0
        silent_s = self._clock.monotonic() - self._last_heard
        if silent_s >= 2 * KEEP_ALIVE_S:
            raise ConnectionLost(f"{self.caller.peer} sent nothing for {silent_s:.0f} s")
        if silent_s >= KEEP_ALIVE_S and not self._pinged:
            self._pinged = True
            self.send(encode_frame(ping=pulsar.CommandPing()))
        pauses = [2 * KEEP_ALIVE_S - silent_s if self._pinged else KEEP_ALIVE_S - silent_s]
        self._check_reading()
        if self.caller.principal.expires_ms and not self._challenged:
            left_s = (self.caller.principal.expires_ms - self._clock.wall_ms()) / 1000
            if left_s <= self._renew_s and self._flags.supports_auth_refresh:
                self._challenge()
            elif left_s > self._renew_s:
                pauses.append(left_s - self._renew_s)
        return max(0.001, min(pauses))

    def _check_reading(self) -> None:
        """Raises ConnectionLost if the client has read nothing of the unsent bytes for too long."""
        queued, now = self._stream.queued_bytes, self._clock.monotonic()
        left = self._written - queued
        if not queued or left != self._left:
            self._left, self._left_at = left, now
        elif now - self._left_at > self.broker.config.unread_s:
            raise ConnectionLost(f"{self.caller.peer} took nothing for {now - self._left_at:.0f} s")

    @property
    def _crowded(self) -> bool:
        """Whether a bound is exceeded, so that the connection must not be read before `_wait_room` returns."""
        self._count()
        requests = self._memory.requests
        return (
            self._held_bytes > HELD_FRAMES_BYTES_MAX
            or requests.held > requests.limit
            or self._counted_out > UNSENT_BYTES_MAX
        )

    async def _wait_room(self) -> None:
        """Waits until the connection may be read again. Raises ConnectionLost."""
        while self._held_bytes > HELD_FRAMES_BYTES_MAX:
            self._room.clear()
            await self._room.wait()
        await self._memory.requests.wait_room()
        while self._stream.queued_bytes + self._out_bytes > UNSENT_BYTES_MAX:
            await self.wait_drained()
        self._last_heard = self._clock.monotonic()  # what it sent meanwhile was not read

    def _count(self) -> None:
        """Updates the memory counters of all connections by the bytes that this connection buffers."""
        into, out = self._held_bytes, self._stream.queued_bytes + self._out_bytes
        self._memory.requests.held += into - self._counted_in
        self._memory.answers.held += out - self._counted_out
        self._counted_in, self._counted_out = into, out

    def count_waiting_bytes(self, size: int) -> None:
        """Adds `size` to the number of bytes of entries that wait because their producers have no credit. `size` is
        negative for entries that wait no longer. While more than HELD_FRAMES_BYTES_MAX wait, the connection is not
        read."""
        self._held_bytes += size
        self._count()
        if self._held_bytes <= HELD_FRAMES_BYTES_MAX:
            self._room.set()

    # ------------------------------------------------------------------ who calls
    async def _connect(self, command: PulsarCommand) -> None:
        if command.type != PulsarCommand.CONNECT:
            raise InvalidRequest("the first command is CONNECT")
        asked = command.connect
        if asked.proxy_to_broker_url or asked.original_principal:
            self._refuse(Unauthenticated("there is no proxy here: a caller speaks for itself"))
        self.client, self._flags = asked.client_version[:100], asked.feature_flags
        try:
            await self._authenticate(asked.auth_method_name, asked.auth_data)
        except MagnetarError as error:
            self._refuse(error)
        self._stream.on_caller_authenticated()
        self.version = max(1, min(PROTOCOL_VERSION, asked.protocol_version))
        _LOG.debug("%s is %s, with Pulsar's protocol: %s", self.caller.peer, self.caller.principal, self.client)
        self._frames.bytes_max = self.broker.config.max_message_bytes + FRAME_EXTRA_BYTES
        flags = pulsar.FeatureFlags(supports_get_partitioned_metadata_without_auto_creation=True)
        flags.supports_topic_watchers = lookup.supports_topic_patterns()
        self.send(encode_frame(connected=pulsar.CommandConnected(
            server_version=f"Magnetar {PRODUCT}", protocol_version=self.version, feature_flags=flags,
            max_message_size=compute_payload_bytes_max(self.broker.config),
            magnetar_address=me.endpoint if (me := self.broker.own_broker_record) is not None else "",
        )))  # fmt: skip

    async def _authenticate(self, method: str, data: bytes) -> None:
        """Authenticates the client with its first or its renewed credentials. Raises Unauthenticated, also if the role
        changes."""
        principal = await self._callers.admit(
            parse_caller_credentials(self._stream.caller, method, data), CONNECT_OPERATION_PATH
        )
        if self.version and principal.name != self.caller.principal.name:
            raise Unauthenticated("the role of a connection may not change")
        self._admitted.close()
        self._admitted.enter_context(self._callers.end_when_credentials_expire(principal, self.abort))
        self.caller, self._challenged = CallContext(self.caller.peer, principal, self.client), False
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._renew_s = min(CREDENTIALS_RENEW_AHEAD_S, max(0, principal.expires_ms - self._clock.wall_ms()) / 2000)
        for handler in self.handlers.list_handlers():
            handler.on_credentials_renewed(principal)

    def _refuse(self, error: MagnetarError) -> NoReturn:
        self.send(encode_frame(error=pulsar.CommandError(
            request_id=NO_REQUEST_ID, error=find_pulsar_error_number(error), message=error.message
        )))  # fmt: skip
        self._flush()
        raise error

    def _challenge(self) -> None:
        self._challenged = True
        challenge = pulsar.AuthData(auth_method_name=self.caller.principal.method, auth_data=b"PulsarAuthRefresh")
        self.send(encode_frame(auth_challenge=pulsar.CommandAuthChallenge(
            server_version=f"Magnetar {PRODUCT}", challenge=challenge, protocol_version=self.version
        )))  # fmt: skip

    async def _renew(self, response: pulsar.AuthData) -> None:
        try:
            await self._authenticate(response.auth_method_name, response.auth_data)
        except MagnetarError as error:
            self._refuse(error)

    # ------------------------------------------------------------------ answers
    def send(self, data: bytes) -> None:
        """Queues an encoded frame; it is sent at the end of this turn of the event loop."""
        self.send_parts((data,), len(data))

    def send_parts(self, parts: tuple[Buffer, ...], size: int) -> None:
        """Queues the parts of an encoded frame, of `size` bytes together; they are sent at the end of this turn of the
        event loop."""
        if not self._out:
            asyncio.get_running_loop().call_soon(self._flush)
        self._out += parts
        self._out_bytes += size
        self._written += size

    def _flush(self) -> None:
        if self._out:
            out, self._out, self._out_bytes = self._out, [], 0
            self._stream.write_nowait(b"".join(out))
            self._count()

    @property
    def is_full(self) -> bool:
        """Whether the consumers of this connection must get no more deliveries until `wait_drained` returns. True also
        when the connection has ended."""
        self._count()
        if self._ended is not None:
            return True
        answers = self._memory.answers
        limit = STREAM_QUEUE_BYTES if answers.held <= answers.tight else CROWDED_QUEUE_BYTES
        return self._counted_out > limit or answers.held > answers.limit

    async def wait_drained(self) -> None:
        """Waits until the client has read so much that more deliveries may be sent. Raises ConnectionLost if the
        connection is lost, and the error with which the broker has ended it."""
        self._flush()
        await self._stream.wait_drained()
        if self._ended is not None:
            raise self._ended
        while self.is_full:  # memory is tight  # noqa: ASYNC110
            await asyncio.sleep(ROOM_POLL_S)

    def send_error(self, request_id: int, error: MagnetarError, number: pulsar.ServerError | None = None) -> None:
        """Sends an ERROR command that answers the request `request_id`. `number`: the error number to send; None: the
        number that `find_pulsar_error_number` (translate.py) returns for `error`."""
        number = find_pulsar_error_number(error) if number is None else number
        self.send(encode_frame(error=pulsar.CommandError(request_id=request_id, error=number, message=error.message)))

    def send_success(self, request_id: int) -> None:
        """Sends Pulsar's CommandSuccess for the request."""
        self.send(encode_frame(success=pulsar.CommandSuccess(request_id=request_id)))

    # ------------------------------------------------------------------ tasks
    @property
    def _busy(self) -> bool:
        """Whether as many requests are in progress as are allowed. The limit grows by one for each producer and
        consumer, because an opening may wait for exclusive access until the client closes another producer, and the
        command that does so must be read."""
        return len(self._tasks) >= RUNNING_REQUESTS_MAX + len(self.handlers.producers) + len(self.handlers.consumers)

    async def _wait_turn(self) -> None:
        """Waits until the next command may be handled."""
        while self._busy:
            await asyncio.sleep(ROOM_POLL_S)
            self._last_heard = self._clock.monotonic()  # what it sent meanwhile was not read

    def start_request(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts `work`, which answers one request of the client, in a task, and returns the task. The task is
        cancelled when the connection ends."""
        return self._tasks.spawn(work, "pulsar-request")

    def abort(self, error: MagnetarError) -> None:
        """Ends the connection because of `error`. No further command is handled, and no further message is
        delivered."""
        _LOG.debug("%s: %s", self.caller.peer, error)
        self._end_with(error)
        self.start_request(self._stream.close())

    def start_uncancelled_cleanup(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` in a task that is not cancelled when the connection ends; `close` waits for it."""
        self._leaving.spawn(work, "pulsar-leaves")

    def _ping(self, command: PulsarCommand, rest: memoryview) -> None:
        self._pong(command, rest)
        self.send(encode_frame(pong=pulsar.CommandPong()))

    def _pong(self, command: PulsarCommand, rest: memoryview) -> None:
        """Counts a PONG or a PING. Raises InvalidRequest if there are more than PINGS_PER_CHECK_MAX of them between two
        checks of the clock."""
        self._pings += 1
        if self._pings > PINGS_PER_CHECK_MAX:
            raise InvalidRequest(f"more than {PINGS_PER_CHECK_MAX} pings and answers to pings in {KEEP_ALIVE_S:g} s")

    def make_next_owner_fields(self, error: MagnetarError) -> dict[str, str]:
        """Returns the fields of a CLOSE command that name the broker to which the topic moves, as URLs. Returns {} if
        `error` does not name that broker, or if it is not known which listener the client uses; the client then looks
        the topic up."""
        heir = self.broker.heirs.get(error.fields.get("owner", "")) if isinstance(error, NotOwner) else None
        if heir is None or (self.listener is None and len(set(heir.pulsar.values())) > 1):
            return {}
        urls = heir.pulsar.get(self.listener or "", ())
        names = {"pulsar://": "assignedBrokerServiceUrl", "pulsar+ssl://": "assignedBrokerServiceUrlTls"}
        return {field: url for scheme, field in names.items() for url in urls if url.startswith(scheme)}

    # ------------------------------------------------------------------ the end
    async def close(self) -> None:
        """Releases what the connection has, after `serve`. Cancels its requests, makes its producers leave their topics
        and its consumers their subscriptions, and waits until they have left. Their errors are logged."""
        left = await asyncio.gather(self._tasks.close(), *self.handlers.remove_all_handlers(), return_exceptions=True)
        for failure in left:
            if isinstance(failure, BaseException):
                _LOG.error("a producer or consumer did not leave in order", exc_info=failure)
        await self._leaving.drain()
        self._admitted.close()
        self._memory.arrivals.discard(self)
        self._memory.requests.held -= self._counted_in
        self._memory.answers.held -= self._counted_out


CommandHandler = Callable[[PulsarCommand, memoryview], Iterator[None] | None]


class PulsarHandlerTable:
    """The handlers of all producers and consumers of one connection, by the ids that the client has chosen.
    `command_handlers`: by the type of a command, the function that carries it out. Such a function returns None, or an
    iterator of steps that the caller must iterate."""

    def __init__(self, connection: PulsarConnection) -> None:
        self._connection = connection
        self.producers: dict[int, PulsarProducerHandler] = {}
        self.consumers: dict[int, PulsarConsumerHandler] = {}
        self._lists = lookup.TopicListWatches(connection)
        self.command_handlers: dict[int, CommandHandler] = {
            PulsarCommand.SEND: self._send, PulsarCommand.FLOW: self._flow, PulsarCommand.ACK: self._ack,
            PulsarCommand.REDELIVER_UNACKNOWLEDGED_MESSAGES: self._redeliver,
            PulsarCommand.PRODUCER: self._open_producer,
            PulsarCommand.SUBSCRIBE: self._subscribe, PulsarCommand.CLOSE_PRODUCER: self._close_producer,
            PulsarCommand.CLOSE_CONSUMER: self._close_consumer, PulsarCommand.UNSUBSCRIBE: self._of_consumer,
            PulsarCommand.SEEK: self._of_consumer, PulsarCommand.GET_LAST_MESSAGE_ID: self._of_consumer,
            PulsarCommand.CONSUMER_STATS: self._of_consumer,
            PulsarCommand.WATCH_TOPIC_LIST: lambda command,
            rest: self._lists.start_topic_watch(command.watch_topic_list),
            PulsarCommand.WATCH_TOPIC_LIST_CLOSE: lambda command,
            rest: self._lists.stop_topic_watch(command.watch_topic_list_close),
        }  # fmt: skip

    def list_handlers(self) -> list[PulsarProducerHandler | PulsarConsumerHandler]:
        """Returns the handlers of all producers and consumers of the connection that are open or being opened."""
        return [*self.producers.values(), *self.consumers.values()]

    def remove_all_handlers(self) -> list[Awaitable[object]]:
        """Removes all handlers from the table. Returns awaitables that end the handlers and the topic watches; the
        caller must await all of them."""
        every = self.list_handlers()
        self.producers.clear()
        self.consumers.clear()
        return [self._lists.close(), *[handler.leave() for handler in every]]

    # ------------------------------------------------------------------ producers
    def _open_producer(self, command: PulsarCommand, rest: memoryview) -> None:
        asked = command.producer
        known = self.producers.get(asked.producer_id)
        if known is not None and (not known.is_open or known.epoch >= asked.epoch):
            known.answer_repeated_open(asked.request_id)
            return
        if known is not None:
            known.remove_and_leave()
        if self._has_ids(asked.request_id):
            handler = self.producers[asked.producer_id] = PulsarProducerHandler(self._connection, asked)
            handler.start_opening()

    def _has_ids(self, request_id: int) -> bool:
        limit = self._connection.broker.config.connection_ids
        if len(self.producers) + len(self.consumers) < limit:
            return True
        text = f"a connection carries {limit} producers and consumers, and no more"
        self._connection.send_error(request_id, InvalidRequest(text))
        return False

    def _send(self, command: PulsarCommand, rest: memoryview) -> None:
        handler = self.producers.get(command.send.producer_id)
        if handler is not None:
            handler.publish(command.send, rest)
        # else it was closed while this was on its way: the client sends it again to the next one

    def _close_producer(self, command: PulsarCommand, rest: memoryview) -> None:
        asked = command.close_producer
        handler = self.producers.pop(asked.producer_id, None)
        if handler is None:
            self._connection.send_success(asked.request_id)
        else:
            self._connection.start_uncancelled_cleanup(handler.close(asked.request_id))

    def remove_producer(self, handler: PulsarProducerHandler) -> None:
        """Removes the handler of a producer that was closed, if it is the one in the table."""
        if self.producers.get(handler.id) is handler:
            del self.producers[handler.id]

    # ------------------------------------------------------------------ consumers
    def _subscribe(self, command: PulsarCommand, rest: memoryview) -> None:
        asked = command.subscribe
        known = self.consumers.get(asked.consumer_id)
        if known is not None and not known.must_resubscribe:
            known.answer_repeated_open(asked.request_id)
        elif known is not None or self._has_ids(asked.request_id):
            handler = self.consumers[asked.consumer_id] = PulsarConsumerHandler(self._connection, asked, known)
            handler.start_opening()

    def _flow(self, command: PulsarCommand, rest: memoryview) -> None:
        handler = self.consumers.get(command.flow.consumer_id)
        if handler is not None:
            handler.add_permits(command.flow.messagePermits)

    def _ack(self, command: PulsarCommand, rest: memoryview) -> Iterator[None] | None:
        handler = self.consumers.get(command.ack.consumer_id)
        return handler.ack(command.ack) if handler is not None else None

    def _redeliver(self, command: PulsarCommand, rest: memoryview) -> Iterator[None] | None:
        asked = command.redeliver_unacknowledged_messages
        handler = self.consumers.get(asked.consumer_id)
        return handler.redeliver(asked) if handler is not None else None

    def _close_consumer(self, command: PulsarCommand, rest: memoryview) -> None:
        asked = command.close_consumer
        handler = self.consumers.pop(asked.consumer_id, None)
        if handler is None:
            self._connection.send_success(asked.request_id)
        else:
            self._connection.start_uncancelled_cleanup(handler.close(asked.request_id))

    def _of_consumer(self, command: PulsarCommand, rest: memoryview) -> None:
        asked = getattr(command, PulsarCommand.Type.Name(command.type).lower())
        handler = self.consumers.get(asked.consumer_id)
        self._connection.start_request(lookup.answer_consumer_request(self._connection, command.type, asked, handler))

    def remove_consumer(self, handler: PulsarConsumerHandler) -> None:
        """Removes the handler of a consumer that was closed, if it is the one in the table."""
        if self.consumers.get(handler.id) is handler:
            del self.consumers[handler.id]
