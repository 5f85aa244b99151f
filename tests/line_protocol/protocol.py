"""A protocol of text lines over TCP, on the broker's sessions alone: they depend on no wire format.

    serving = await world.network.serve_bytes(endpoint, LineProtocol(broker.owned).serve)

| a client sends | the broker answers |
|---|---|
| produce ID TOPIC NAME | opened ID NAME CREDIT |
| publish ID SEQUENCE TEXT | receipt ID SEQUENCE LEDGER:ENTRY INDEX, or failed ID SEQUENCE CODE; credit ID BYTES |
| consume ID TOPIC SUBSCRIPTION TYPE | opened ID NAME 0, then message ID LEDGER:ENTRY TIMES TEXT |
| flow ID PERMITS, ack ID LEDGER:ENTRY, redeliver ID | |
| durable ID, seek ID INDEX, last ID, unsubscribe ID, close ID | done ID, last ID INDEX or error ID CODE |

The client chooses ID, a word. `closed ID CODE REASON` ends what ID names. A line that is no request closes the
connection. `python -m tests.line_protocol` is a broker process that serves it as well.
"""

import asyncio
from collections.abc import Awaitable, Sequence

from magnetar.broker.node.topic_manager import TopicManager
from magnetar.broker.session.consumer import ConsumerSession, SubscribeOptions
from magnetar.broker.session.producer import ProducerOptions, ProducerSession
from magnetar.broker.subscription.core.dispatch import Delivery
from magnetar.broker.subscription.core.subscription_types import find_subscription_type
from magnetar.proto import states as subscription_types
from magnetar.proto.entry import decode_batch, encode_entry, parse_header, split_broker_part
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import InvalidRequest, MagnetarError
from magnetar.proto.names import MessageId, Position
from magnetar.proto.states import AckedEntry, InitialPosition
from magnetar.runtime.network import STREAM_QUEUE_BYTES, ByteStream, CallContext
from tests.support.byte_streams import read

LINE_BYTES_MAX = 64 << 10


class LineProtocol:
    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def serve(self, stream: ByteStream) -> None:
        connection = _Connection(self._broker, stream)
        buffer = b""
        try:
            while data := await read(stream):
                *lines, buffer = (buffer + data).split(b"\n")
                for line in lines:
                    connection.take(line.decode(errors="replace"))
                if len(buffer) > LINE_BYTES_MAX:
                    raise InvalidRequest(f"a line is longer than {LINE_BYTES_MAX} bytes")
        except (InvalidRequest, ValueError) as error:
            stream.write_nowait(f"closed - 10 {error}\n".encode())
        finally:
            await connection.end()


class _Connection:
    def __init__(self, broker: TopicManager, stream: ByteStream) -> None:
        self._broker = broker
        self._stream = stream
        self._sessions: dict[str, ProducerSession | ConsumerSession] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}

    def take(self, line: str) -> None:
        verb, id_, *rest = line.split(" ", 4 if line.startswith("consume") else 3)
        session = self._sessions.get(id_)
        if verb == "produce":
            self._start(self._produce(id_, *rest))
        elif verb == "consume":
            self._start(self._consume(id_, *rest))
        elif session is None:
            self.send("closed", id_, InvalidRequest.code, "there is no such id")
        elif isinstance(session, ProducerSession) and verb == "publish":
            metadata = MessageMetadata(producer_name=session.name, sequence_id=int(rest[0]), publish_time=1)
            session.publish(encode_entry(metadata, rest[1].encode()))
        elif verb == "close":
            del self._sessions[id_]
            self._start(self._done(id_, session.close()))
        elif isinstance(session, ConsumerSession):
            self._asked(session, verb, id_, rest)
        else:
            raise InvalidRequest(f"a producer does not {verb}")

    def _asked(self, session: ConsumerSession, verb: str, id_: str, rest: Sequence[str]) -> None:
        if verb == "flow":
            session.flow(int(rest[0]))
        elif verb == "ack":
            for _ in session.ack([AckedEntry(MessageId.parse(rest[0]).position)]):
                pass
        elif verb == "redeliver":
            for _ in session.redeliver([]):
                pass
        elif verb == "durable":
            self._start(self._done(id_, session.wait_durable()))
        elif verb == "seek":
            self._start(self._done(id_, session.seek_index(int(rest[0]))))
        elif verb == "unsubscribe":
            self._start(self._done(id_, session.unsubscribe()))
        elif verb == "last":
            self._start(self._last(id_, session))
        else:
            raise InvalidRequest(f"a consumer does not {verb}")

    # ------------------------------------------------------------------ requests
    async def _produce(self, id_: str, topic: str, name: str) -> None:
        port = _ProducerLines(self, id_)
        try:
            caller = CallContext(self._stream.peer)
            session = await ProducerSession.open(self._broker, ProducerOptions(topic, name), port, caller)
        except MagnetarError as error:
            self.closed(id_, error)
            return
        self._sessions[id_] = session
        self.send("opened", id_, session.name, session.credit)

    async def _consume(self, id_: str, topic: str, subscription: str, type_: str) -> None:
        options = SubscribeOptions(
            topic, subscription, find_subscription_type(subscription_types.NUMBERS[type_.upper()]),
            InitialPosition.EARLIEST
        )
        try:
            port = _ConsumerLines(self, id_)
            session = await ConsumerSession.open(self._broker, options, port, CallContext(self._stream.peer))
        except MagnetarError as error:
            self.closed(id_, error)
            return
        self._sessions[id_] = session
        self.send("opened", id_, session.name, 0)

    async def _done(self, id_: str, work: Awaitable[None]) -> None:
        try:
            await work
            self.send("done", id_)
        except MagnetarError as error:
            self.send("error", id_, error.code)

    async def _last(self, id_: str, session: ConsumerSession) -> None:
        try:
            self.send("last", id_, (await session.find_last_message()).index)
        except MagnetarError as error:
            self.send("error", id_, error.code)

    # ------------------------------------------------------------------ answers
    def send(self, *words: object) -> None:
        self._stream.write_nowait((" ".join(map(str, words)) + "\n").encode())

    def closed(self, id_: str, error: MagnetarError) -> None:
        self._sessions.pop(id_, None)
        self.send("closed", id_, error.code, error.message)

    @property
    def full(self) -> bool:
        return self._stream.queued_bytes > STREAM_QUEUE_BYTES

    async def drained(self) -> None:
        await self._stream.wait_drained()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def end(self) -> None:
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for session in self._sessions.values():
            if isinstance(session, ProducerSession):
                session.leave()
            else:
                await session.leave()


class _ProducerLines:
    """`ProducerPort`."""

    def __init__(self, connection: _Connection, id_: str) -> None:
        self._connection = connection
        self._id = id_

    def send_receipt(self, sequence_id: int, position: Position, index: int) -> None:
        self._connection.send("receipt", self._id, sequence_id, position, index)

    def on_duplicate(self, sequence_id: int) -> None:
        self._connection.send("receipt", self._id, sequence_id, "-1:-1", -1)

    def on_failed(self, sequence_id: int, error: MagnetarError) -> None:
        self._connection.send("failed", self._id, sequence_id, error.code)

    def on_waiting(self, error: MagnetarError) -> None:
        self._connection.send("waits", self._id, error.message)

    def grant_credit(self, size: int) -> None:
        self._connection.send("credit", self._id, size)

    def on_closed(self, error: MagnetarError) -> None:
        self._connection.closed(self._id, error)


class _ConsumerLines:
    """`ConsumerPort`."""

    def __init__(self, connection: _Connection, id_: str) -> None:
        self._connection = connection
        self._id = id_

    def deliver(self, deliveries: Sequence[Delivery]) -> bool:
        for each in deliveries:
            part = split_broker_part(each.entry.payload)[2]  # type: ignore[attr-defined]  # they are StoredEntries
            texts = b",".join(payload for _, payload in decode_batch(parse_header(part), part)).decode()
            self._connection.send("message", self._id, each.entry.position, each.redelivery_count + 1, texts)
        return self._connection.full

    def on_end_of_topic(self) -> None:
        self._connection.send("ended", self._id)

    def on_active_changed(self, active: bool) -> None:
        self._connection.send("active", self._id, int(active))

    def on_topic_moving(self, error: MagnetarError) -> None:
        return None

    def on_closed(self, error: MagnetarError) -> None:
        self._connection.closed(self._id, error)

    async def wait_drained(self) -> None:
        await self._connection.drained()
