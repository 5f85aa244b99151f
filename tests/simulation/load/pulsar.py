"""A client of Pulsar's binary protocol in a simulation, with the faces of the SDK that the load uses.

    client = PulsarClient(world, endpoints, authentication)
    producer = await client.create_producer(TOPIC, …)          send_nowait, flush, close
    consumer = await client.subscribe(TOPIC, "s", …)           receive, acknowledge, negative_acknowledge
    txn = await client.transaction(10.0)                        acknowledge(…, txn=txn), commit, abort

It behaves as Pulsar's clients do. A producer keeps its name, counts its openings (`epoch`), and sends what has no
answer again, in its order, with the same ids; a receipt for a later message than the oldest is a violation. A consumer
takes a batch apart, grants permits by halves of its queue, acknowledges by batch index, and asks for what was given
back after a while: on a Shared subscription for the entry, else for all. There it follows Java's client (by epochs: its
queue is emptied, and what was sent before is dropped) or the C++ one (the queue stays). The owner is looked up anew
after CLOSE_PRODUCER, CLOSE_CONSUMER or a lost connection; a silent connection is pinged and given up. What it asks for
in a transaction it asks for once: an acknowledgement without an answer has failed, an end is not known.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import deque
from typing import Any

from magnetar.broker.pulsar.frames import PulsarFrameSplitter, encode_frame, parse_frame
from magnetar.broker.pulsar.translate import encode_ack_set, to_signed_long, to_unsigned_long
from magnetar.broker.transaction.coordinators import ASSIGN_TOPIC
from magnetar.client.common.errors import AlreadyClosed, ProducerQueueIsFull, Result, Timeout
from magnetar.client.core.batcher import Batcher, OutgoingBatch, OutgoingMessage, SendCallback, encode_batch_entry
from magnetar.client.core.transaction import TransactionState
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import ConsumerType
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.entry import decode_batch, parse_header
from magnetar.proto.entry_pb2 import MessageIdData
from magnetar.proto.errors import ConnectionLost, MagnetarError, Unavailable
from magnetar.proto.states import TxnId
from magnetar.runtime.network import ByteStream, Endpoint, World

REQUEST_S = 8.0
PING_S = 5.0
"""A connection that is silent for so long after a ping is given up."""
AGAIN_S = (0.1, 2.0)
"""First and last pause before the owner is asked for again."""
REDIRECTS_MAX = 20
UNASKED = 1 << 30
"""The id of a request whose answer is not waited for."""
LINE = 50
"""Messages of a batch."""
COORDINATORS = 2
"""As cluster.py configures it."""


class PulsarClient:
    def __init__(self, world: World, endpoints: list[Endpoint], authentication: Any, rng: random.Random) -> None:
        self.world = world
        self.rng = rng
        self._endpoints = endpoints
        self._authentication = authentication
        self.violations: list[str] = []
        self._connections: dict[str, Connection] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._numbers = itertools.count(1)
        self._handles: list[_Handle] = []

    async def close(self) -> None:
        """Its producers and consumers; the connections stay."""
        for each in self._handles:
            each.end()
        self._handles.clear()

    async def transaction(self, timeout_s: float) -> PulsarTransaction:
        number = self.rng.randrange(COORDINATORS)
        connection = await self.owner(f"{ASSIGN_TOPIC.full}-partition-{number}")
        asked = pulsar.CommandNewTxn(txn_ttl_millis=int(1000 * timeout_s), tc_id=number)
        answer = _unrefused(await connection.ask("new_txn_response", new_txn=asked))
        return PulsarTransaction(connection, TxnId(answer.txnid_most_bits, answer.txnid_least_bits))

    async def create_producer(self, topic: str, **options: Any) -> PulsarProducer:
        producer = PulsarProducer(self, topic, next(self._numbers), **options)
        await producer.opened()
        return producer

    async def subscribe(self, topic: str, subscription: str, **options: Any) -> PulsarConsumer:
        consumer = PulsarConsumer(self, topic, subscription, next(self._numbers), **options)
        self._handles.append(consumer)
        await consumer.opened()
        return consumer

    def token(self) -> bytes:
        """Of now; empty: callers are not asked who they are."""
        if self._authentication is None:
            return b""
        text: str = self._authentication.authorization()
        return text.removeprefix("Bearer ").encode()

    async def owner(self, topic: str) -> Connection:
        """A connection to the broker that serves the topic. MagnetarError."""
        connection = await self._connected(self.rng.choice(self._endpoints))
        authoritative = False
        for number in itertools.count(1):
            asked = pulsar.CommandLookupTopic(topic=topic, request_id=number, authoritative=authoritative)
            answer = await connection.ask("lookup_response", number, lookup=asked)
            if answer.response == pulsar.CommandLookupTopicResponse.Failed:
                raise Unavailable(f"the look-up failed: {answer.message}")
            connection = await self._connected(Endpoint.parse(answer.brokerServiceUrl.partition("://")[2]))
            if answer.response == pulsar.CommandLookupTopicResponse.Connect or number >= REDIRECTS_MAX:
                return connection
            authoritative = answer.authoritative
        raise AssertionError("it was asked without end")

    async def _connected(self, endpoint: Endpoint) -> Connection:
        name = str(endpoint)
        async with self._opening.setdefault(name, asyncio.Lock()):
            known = self._connections.get(name)
            if known is not None and not known.lost.done():
                return known
            async with asyncio.timeout(REQUEST_S):
                connection = Connection(await self.world.network.connect_bytes(endpoint), self)
                await connection.begin()
            self._connections[name] = connection
            return connection


class Connection:
    """`ask` a request, `say` what is not answered. `lost` is done when it has ended."""

    def __init__(self, stream: ByteStream, client: PulsarClient) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.producers: dict[int, PulsarProducer] = {}
        self.consumers: dict[int, PulsarConsumer] = {}
        self._stream = stream
        self._client = client
        self._frames = PulsarFrameSplitter(64 << 20)
        self._waiting: dict[tuple[str, int], asyncio.Future[Any]] = {}
        self._numbers = itertools.count(1)
        self._heard = True

    async def begin(self) -> None:
        asyncio.get_running_loop().create_task(self._read(), name="pulsar-connection")
        asyncio.get_running_loop().create_task(self._ping(), name="pulsar-pings")
        token = self._client.token()
        connect = pulsar.CommandConnect(client_version="simulated", protocol_version=21)
        connect.feature_flags.supports_auth_refresh = True
        if token:
            connect.auth_method_name, connect.auth_data = "token", token
        await self.ask("connected", 0, connect=connect)

    async def ask(self, answer: str, number: int | None = None, **command: Any) -> Any:
        """The answer of that name; `error` is one to every request. MagnetarError: none came, or an error."""
        number = next(self._numbers) if number is None else number
        future = self._waiting[answer, number] = asyncio.get_running_loop().create_future()
        for each in command.values():
            if "request_id" in each.DESCRIPTOR.fields_by_name:
                each.request_id = number
        self.say(**command)
        try:
            async with asyncio.timeout(REQUEST_S):
                return await future
        except TimeoutError as error:
            await self.end()
            raise ConnectionLost(f"no {answer} came") from error
        finally:
            self._waiting.pop((answer, number), None)

    def say(self, entry: bytes = b"", **command: Any) -> None:
        data = encode_frame(**command)
        if entry:
            data = (len(data) - 4 + len(entry)).to_bytes(4, "big") + data[4:] + entry
        self._stream.write_nowait(data)

    async def _ping(self) -> None:
        while not self.lost.done():
            if not self._heard:
                await self.end()
                return
            self._heard = False
            self.say(ping=pulsar.CommandPing())
            await asyncio.sleep(PING_S)

    async def _read(self) -> None:
        try:
            while size := await self._stream.read_into(lambda: self._frames.get_free_buffer()):
                self._heard = True
                for each in self._frames.receive_frames(size):
                    command, rest = parse_frame(each)
                    self._take(pulsar.BaseCommand.Type.Name(command.type).lower(), command, bytes(rest))
        except MagnetarError:
            pass
        finally:
            await self.end()

    def _take(self, kind: str, command: pulsar.BaseCommand, rest: bytes) -> None:
        asked: Any = getattr(command, kind)
        if kind == "ping":
            self.say(pong=pulsar.CommandPong())
        elif kind == "auth_challenge":
            response = pulsar.AuthData(auth_method_name="token", auth_data=self._client.token())
            self.say(auth_response=pulsar.CommandAuthResponse(client_version="simulated", response=response))
        elif kind in ("send_receipt", "send_error", "close_producer"):
            producer = self.producers.get(asked.producer_id)
            if producer is not None:
                producer.told(self, kind, asked)
        elif kind in ("message", "close_consumer"):
            consumer = self.consumers.get(asked.consumer_id)
            if consumer is not None:
                consumer.told(self, kind, asked, rest)
        elif kind == "error":
            refused = Unavailable(f"{pulsar.ServerError.Name(asked.error)}: {asked.message}")
            self._answer([key for key in self._waiting if key[1] == asked.request_id and key[0] != "lookup_response"],
                         refused)  # fmt: skip
        else:
            number = 0 if kind == "connected" else getattr(asked, "request_id", -1)
            self._answer([(kind, number)], asked)

    def _answer(self, keys: list[tuple[str, int]], with_: Any) -> None:
        for key in keys:
            future = self._waiting.get(key)
            if future is not None and not future.done():
                if isinstance(with_, Exception):
                    future.set_exception(with_)
                else:
                    future.set_result(with_)

    async def end(self) -> None:
        if not self.lost.done():
            self.lost.set_result(None)
            self._answer(list(self._waiting), ConnectionLost("the connection is lost"))
            await self._stream.close()


class PulsarTransaction:
    def __init__(self, connection: Connection, id_: TxnId) -> None:
        self._connection = connection
        self.id = id_
        self.state = TransactionState.OPEN

    @property
    def numbers(self) -> dict[str, int]:
        """Fields of commands."""
        return {"txnid_most_bits": self.id.most, "txnid_least_bits": self.id.least}

    async def commit(self) -> None:
        await self._end(pulsar.COMMIT, TransactionState.COMMITTED)

    async def abort(self, wait: str = "durable") -> None:
        await self._end(pulsar.ABORT, TransactionState.ABORTED)

    async def _end(self, action: pulsar.TxnAction, state: TransactionState) -> None:
        self.state = TransactionState.ERROR
        asked = pulsar.CommandEndTxn(txn_action=action, **self.numbers)
        _unrefused(await self._connection.ask("end_txn_response", end_txn=asked))
        self.state = state


def _unrefused(answer: Any) -> Any:
    """Unavailable: it says why not."""
    if answer.HasField("error"):
        raise Unavailable(f"{pulsar.ServerError.Name(answer.error)}: {answer.message}")
    return answer


class _Handle:
    """Opens at the owner of its topic, again and again until it is closed."""

    def __init__(self, client: PulsarClient, topic: str, number: int) -> None:
        self._client = client
        self._topic = topic
        self.number = number
        self.connection: Connection | None = None  # where it is open …
        self._at: Connection | None = None  # … or has asked to be
        self.over = False
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._gone = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="pulsar-handle")

    async def opened(self) -> None:
        """Timeout: it is given up."""
        try:
            async with asyncio.timeout(2 * REQUEST_S):
                await asyncio.shield(self._first)
        except BaseException as error:
            self.end()
            if isinstance(error, TimeoutError):
                raise Timeout("it did not open") from error
            raise

    async def _run(self) -> None:
        pause_s = AGAIN_S[0]
        while not self.over:
            try:
                async with asyncio.timeout(3 * REQUEST_S):
                    connection = await self._client.owner(self._topic)
                    self._gone.clear()
                    self._at = connection
                    await self._open(connection)
            except (MagnetarError, TimeoutError):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, AGAIN_S[1])
                continue
            pause_s = AGAIN_S[0]
            if not self._first.done():
                self._first.set_result(None)
            gone = asyncio.get_running_loop().create_task(self._gone.wait(), name="pulsar-gone")
            await asyncio.wait((gone, connection.lost), return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            self.connection = None
            await asyncio.sleep(AGAIN_S[0])

    async def _open(self, connection: Connection) -> None:
        raise NotImplementedError

    def _leave(self, connection: Connection) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """At once; the broker is told, where it may be open."""
        self.over = True
        self._task.cancel()
        self.connection = None
        if self._at is not None and not self._at.lost.done():
            self._leave(self._at)


class PulsarProducer(_Handle):
    def __init__(
        self, client: PulsarClient, topic: str, number: int, *, batching_enabled: bool, send_timeout_millis: int,
        max_pending_messages: int,
    ) -> None:  # fmt: skip
        self._batcher = Batcher(0, messages_max=LINE, batching=batching_enabled)
        self._pending: deque[OutgoingBatch] = deque()
        self._sent = 0  # of them on this connection
        self._timeout_s = send_timeout_millis / 1000
        self._pending_max = max_pending_messages
        self._name = ""
        self._epoch = -1
        self._empty = asyncio.Event()
        self._empty.set()
        super().__init__(client, topic, number)
        self._timer = asyncio.get_running_loop().create_task(self._time_out(), name="pulsar-timeouts")

    async def _open(self, connection: Connection) -> None:
        self._epoch += 1
        asked = pulsar.CommandProducer(
            topic=self._topic, producer_id=self.number, epoch=self._epoch, user_provided_producer_name=False
        )
        if self._name:
            asked.producer_name = self._name
        connection.producers[self.number] = self
        answer = await connection.ask("producer_success", producer=asked)
        self._name = answer.producer_name
        self.connection, self._sent = connection, 0
        self._send()

    def send_nowait(
        self, content: bytes, callback: SendCallback, *, deliver_at: int | None = None,
        properties: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        if self.over:
            raise AlreadyClosed("the producer is closed")
        if sum(each.message_count for each in self._pending) + self._batcher.open_message_count >= self._pending_max:
            raise ProducerQueueIsFull("too many messages wait")
        self._batcher.add_message(OutgoingMessage(content, properties or {}, deliver_at=deliver_at), callback)
        self._empty.clear()
        asyncio.get_running_loop().call_later(0.005, self._send)

    def _send(self) -> None:
        self._batcher.close_batches()
        clock = self._client.world.clock
        while self._batcher.ready:
            batch = self._batcher.ready.popleft()
            batch.born = clock.monotonic()
            self._pending.append(batch)
        if self.connection is None or not self._name:
            return
        for batch in itertools.islice(self._pending, self._sent, None):
            batch.entry = batch.entry or encode_batch_entry(batch, self._name, clock.wall_ms())
            send = pulsar.CommandSend(producer_id=self.number, sequence_id=batch.sequence_id)
            if batch.message is None:
                send.num_messages, send.highest_sequence_id = batch.message_count, batch.highest
            self.connection.say(batch.entry, send=send)
        self._sent = len(self._pending)

    def told(self, connection: Connection, kind: str, asked: Any) -> None:
        if connection is not self.connection:
            return
        if kind == "close_producer":
            self._gone.set()
            return
        head = self._pending[0] if self._sent else None
        if kind == "send_error":  # all that has no answer is sent again, on a new connection
            asyncio.get_running_loop().create_task(connection.end(), name="pulsar-end")
        elif head is not None and asked.sequence_id == head.sequence_id:
            self._pending.popleft()
            self._sent -= 1
            place = to_signed_long(asked.message_id.ledgerId), to_signed_long(asked.message_id.entryId)
            self._done(head, Result.Ok, place)
        elif head is not None and asked.sequence_id > head.sequence_id:
            self._client.violations.append(f"receipt: of {asked.sequence_id}, and {head.sequence_id} has none yet")

    def _done(self, batch: OutgoingBatch, result: Result, place: tuple[int, int]) -> None:
        for index, callback in enumerate(batch.callbacks):
            inside = index if batch.message is None and place[0] >= 0 else -1
            if callback is not None:
                callback(result, MessageId(-1, *place, inside))
        if not self._pending and not self._batcher.open_message_count:
            self._empty.set()

    async def _time_out(self) -> None:
        while not self.over:
            await asyncio.sleep(0.5)
            now = self._client.world.clock.monotonic()
            if self._pending and now - self._pending[0].born > self._timeout_s:
                given_up, self._pending, self._sent = self._pending, deque(), 0
                for batch in given_up:
                    self._done(batch, Result.Timeout, (-1, -1))

    async def flush(self) -> None:
        self._send()
        await self._empty.wait()

    async def close(self) -> None:
        if self.over:
            raise AlreadyClosed("the producer is closed")
        await self.flush()
        connection = self.connection
        if connection is not None:
            with contextlib.suppress(MagnetarError):
                closing = pulsar.CommandCloseProducer(producer_id=self.number)
                await connection.ask("success", close_producer=closing)
        self.end()

    def _leave(self, connection: Connection) -> None:
        self._timer.cancel()
        connection.producers.pop(self.number, None)
        connection.say(close_producer=pulsar.CommandCloseProducer(producer_id=self.number, request_id=UNASKED))


class PulsarMessage:
    def __init__(self, entry: _Entry, index: int, content: bytes, redeliveries: int) -> None:
        self.entry, self.index = entry, index
        self._content, self._redeliveries = content, redeliveries

    def data(self) -> bytes:
        return self._content

    def message_id(self) -> MessageId:
        return MessageId(-1, *self.entry.place, self.index)

    def redelivery_count(self) -> int:
        return self._redeliveries


class _Entry:
    """A delivery: which of its messages are not acknowledged."""

    def __init__(self, place: tuple[int, int], count: int, acked: set[int]) -> None:
        self.place, self.count, self.acked = place, count, acked


class PulsarConsumer(_Handle):
    def __init__(
        self, client: PulsarClient, topic: str, subscription: str, number: int, *, consumer_type: ConsumerType,
        initial_position: Any, receiver_queue_size: int, negative_ack_redelivery_delay_ms: int,
    ) -> None:  # fmt: skip
        self._subscription = subscription
        self._exclusive = consumer_type is ConsumerType.Exclusive
        self._size = receiver_queue_size
        self._nack_s = negative_ack_redelivery_delay_ms / 1000
        self._epoch: int | None = 0 if self._exclusive and number % 2 else None  # as Java's client; None: as C++'s
        self._queue: deque[PulsarMessage] = deque()
        self._arrived = asyncio.Event()
        self._credit = 0  # permits to be granted
        super().__init__(client, topic, number)

    async def _open(self, connection: Connection) -> None:
        kinds = pulsar.CommandSubscribe
        asked = pulsar.CommandSubscribe(
            topic=self._topic, subscription=self._subscription, consumer_id=self.number, initialPosition=1,
            subType=kinds.Exclusive if self._exclusive else kinds.Shared,
        )  # fmt: skip
        if self._epoch is not None:
            asked.consumer_epoch = self._epoch
        connection.consumers[self.number] = self
        await connection.ask("success", subscribe=asked)
        self._queue.clear()
        self._credit = 0
        self.connection = connection
        connection.say(flow=pulsar.CommandFlow(consumer_id=self.number, messagePermits=self._size))

    def _leave(self, connection: Connection) -> None:
        connection.consumers.pop(self.number, None)
        connection.say(close_consumer=pulsar.CommandCloseConsumer(consumer_id=self.number, request_id=UNASKED))

    def told(self, connection: Connection, kind: str, asked: Any, rest: bytes) -> None:
        if connection is not self.connection:
            return
        if kind == "close_consumer":
            self._gone.set()
            return
        header = parse_header(rest)
        contents = [content for _, content in decode_batch(header, rest)]
        if self._epoch is not None and asked.consumer_epoch < self._epoch:
            self._grant(len(contents))
            return
        left = {index for index in range(len(contents)) if _is_set(asked.ack_set, index)}
        acked = set(range(len(contents))) - left if asked.ack_set else set[int]()
        entry = _Entry(
            (to_signed_long(asked.message_id.ledgerId), to_signed_long(asked.message_id.entryId)), len(contents), acked
        )
        batched = header.metadata.HasField("num_messages_in_batch")
        for index, content in enumerate(contents):
            if index not in acked:
                self._queue.append(PulsarMessage(entry, index if batched else -1, content, asked.redelivery_count))
        self._arrived.set()

    def _grant(self, count: int) -> None:
        self._credit += count
        if self._credit >= self._size // 2 and self.connection is not None:
            self.connection.say(flow=pulsar.CommandFlow(consumer_id=self.number, messagePermits=self._credit))
            self._credit = 0

    async def receive(self, timeout_millis: int | None = None) -> PulsarMessage:
        """Timeout."""
        try:
            async with asyncio.timeout(None if timeout_millis is None else timeout_millis / 1000):
                while not self._queue:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError as error:
            raise Timeout("nothing came") from error
        message = self._queue.popleft()
        self._grant(1)
        return message

    async def acknowledge(self, message: PulsarMessage, *, txn: PulsarTransaction | None = None) -> None:
        if txn is not None:
            await self._acknowledge_in(txn, message)
            return
        entry = message.entry
        entry.acked.add(max(0, message.index))
        if self.connection is None:
            return  # it comes again
        place = MessageIdData(ledgerId=to_unsigned_long(entry.place[0]), entryId=to_unsigned_long(entry.place[1]))
        if len(entry.acked) < entry.count:
            place.ack_set.extend(encode_ack_set(sorted(entry.acked), entry.count))
        self.connection.say(ack=pulsar.CommandAck(
            consumer_id=self.number, ack_type=pulsar.CommandAck.Individual, message_id=[place]
        ))  # fmt: skip

    async def _acknowledge_in(self, txn: PulsarTransaction, message: PulsarMessage) -> None:
        if self.connection is None:
            raise ConnectionLost("the consumer is not connected")
        entry = message.entry
        place = MessageIdData(ledgerId=to_unsigned_long(entry.place[0]), entryId=to_unsigned_long(entry.place[1]))
        if message.index >= 0:
            place.batch_size = entry.count
            place.ack_set.extend(encode_ack_set([message.index], entry.count))
        _unrefused(await self.connection.ask("ack_response", ack=pulsar.CommandAck(
            consumer_id=self.number, ack_type=pulsar.CommandAck.Individual, message_id=[place], **txn.numbers
        )))  # fmt: skip

    async def negative_acknowledge(self, message: PulsarMessage) -> None:
        asyncio.get_running_loop().call_later(self._nack_s, self._give_back, message, self.connection)

    def _give_back(self, message: PulsarMessage, connection: Connection | None) -> None:
        if connection is None or connection is not self.connection:
            return  # all of it came again
        asked = pulsar.CommandRedeliverUnacknowledgedMessages(consumer_id=self.number)
        if not self._exclusive:
            place = message.entry.place
            asked.message_ids.append(
                MessageIdData(ledgerId=to_unsigned_long(place[0]), entryId=to_unsigned_long(place[1]))
            )
        elif self._epoch is not None:
            self._epoch += 1
            asked.consumer_epoch = self._epoch
            self._grant(len(self._queue))
            self._queue.clear()
        connection.say(redeliver_unacknowledged_messages=asked)


def _is_set(words: Any, index: int) -> bool:
    return index // 64 < len(words) and bool(words[index // 64] >> (index % 64) & 1)

