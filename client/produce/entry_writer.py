"""Publishes entries that are encoded already, such as copies from another cluster, to one partition that has no other
producer (`PreEncodedEntryWriter`). Also makes a producer's message from the parameters that a program passes to `send`
(`make_outgoing_message`).

    writer = PreEncodedEntryWriter(connections, topic, name, done)
    await writer.open()                  exclusive: a second writer, or a program, is refused (Busy)
    await writer.send(entry, stored)     waits for credit; `done` is called when the entry is durable
    await writer.drain()

The entries are stored byte for byte. A writer whose connection is lost ends: its entries without an answer may be
stored or not, and are never sent again. The next writer continues after the entries that the topic has then. Guards:
tests/client/produce/test_entry_writer.py, tests/cli/migrate/test_migrate.py."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from ...proto import wire_pb2 as wire
from ...proto.errors import Busy, ConnectionLost, MagnetarError, ProducerBusy, ProducerFenced, from_wire
from ...proto.expiry import EXPIRES_AT_PROPERTY
from ...proto.names import Position, TopicName
from ...proto.states import ENTRY_COST_BYTES, AccessMode
from ..common.checks import (
    INT64_MAX,
    WrongMessageType,
    WrongMessageValue,
    are_ascii_properties,
    check_message_parameters,
    is_ascii_key,
    shorten_value,
)
from ..common.errors import AlreadyClosed, InvalidMessage
from ..connect.attachment import Attachment
from ..connect.connections import Connections
from ..core.batcher import OutgoingMessage
from ..core.transaction import TransactionPort
from ..model.schema import Schema


class SentEntryDescription(NamedTuple):
    """The description of an entry that was sent. The callback `done` of a PreEncodedEntryWriter gets it when the entry
    is stored. `sequence_id`: that of its first message. `position`: where the entry was read; `messages`: how many it
    has; `size`: its bytes."""

    sequence_id: int
    position: Position  # where it comes from
    messages: int
    size: int  # bytes


OnEntryStored = Callable[[SentEntryDescription], None]


class PreEncodedEntryWriter:
    """Publishes entries that are already encoded to one partition, in order. `name`: the producer's name. Calls `done`
    in the event loop with the SentEntryDescription of each entry when the entry is stored. It is the owner of an
    Attachment (client/connect/attachment.py)."""

    def __init__(self, connections: Connections, topic: TopicName, name: str, done: OnEntryStored) -> None:
        self.topic = topic
        self.waits = False
        self._name = name
        self._instance = connections.world.rng.randbytes(8).hex()
        self._attachment = Attachment(connections, self)
        self._done = done
        self._opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._credit = 0
        self._sent: deque[SentEntryDescription] = deque()  # … when they have their answer
        self._changed = asyncio.Event()
        self._error: MagnetarError | None = None

    async def open(self) -> None:
        """Opens the producer, and returns when it is open. Raises Busy if the topic has another producer, or the error
        of the broker, untranslated; AlreadyClosed if `close` is called meanwhile."""
        self._attachment.open()
        try:
            await self._opened
        except (ProducerBusy, ProducerFenced) as error:
            text = f"{self.topic} has another producer: another copy, or a program that shall wait until the end"
            raise Busy(f"{text} ({error.message})", topic=self.topic.full) from None

    async def send(self, entry: bytes, stored: SentEntryDescription) -> None:
        """Waits until the broker has granted credit, and sends an entry; does not wait until it is stored. `stored`:
        the entry's description, which `done` gets when the entry is stored. Raises the error with which the writer
        ended, if it has."""
        while self._credit <= 0 and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error
        self._credit -= len(entry) + ENTRY_COST_BYTES
        self._sent.append(stored)
        self._attachment.publish(entry)

    def check(self) -> None:
        """Raises the error with which the writer ended; does nothing if it has not ended."""
        if self._error is not None:
            raise self._error

    async def drain(self) -> None:
        """Waits until all entries that were sent are stored. Raises the error with which the writer ended, if it has.
        """
        while self._sent and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    async def _wait(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def close(self) -> None:
        """Closes the producer at its broker, and waits for the answer. Entries without an answer may be stored or not.
        Calls that wait in `open`, `send` or `drain` then raise AlreadyClosed."""
        try:
            await self._attachment.close()
        finally:
            self._fail(AlreadyClosed("the writer is closed"))

    # ------------------------------------------------------------------------------ of the attachment
    def make_opening_frame(self) -> dict[str, Any]:
        return {"open_producer": wire.OpenProducer(
            topic=self.topic.full, producer_name=self._name, instance=self._instance, connection=1, copies=True,
            access_mode=int(AccessMode.EXCLUSIVE),  # type: ignore[arg-type]
        )}  # fmt: skip

    def on_frames(self, frames: Sequence[wire.ServerFrame]) -> None:
        for frame in frames:
            if not self._attachment.is_attached:
                break
            match frame.WhichOneof("kind"):
                case "receipt":
                    self._receipt(frame.receipt.sequence_id)
                case "credit":
                    self._credit += frame.credit
                case "producer_opened":
                    self._credit = frame.producer_opened.credit
                    self._attachment.on_opened()
                case "failed":
                    self._fail(from_wire(frame.failed.error))
                case "done":
                    self._attachment.on_closed()
                case "closed":
                    self._attachment.on_closed_by_broker(from_wire(frame.closed))
                case kind:
                    self._fail(ConnectionLost(f"the broker said {kind} out of turn"))
        self._changed.set()

    def _receipt(self, sequence_id: int) -> None:
        if not self._sent or self._sent[0].sequence_id != sequence_id:
            self._fail(ConnectionLost(f"a receipt for {sequence_id} out of turn"))
            return
        self._done(self._sent.popleft())

    def _fail(self, error: MagnetarError) -> None:
        if self._error is None:
            self._error = error
        self._changed.set()
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # is raised by `open`, if that is called

    def on_opening_done(self, error: MagnetarError | None) -> None:
        if self._opened.done():
            return
        if error is None:
            self._opened.set_result(None)
        else:
            self._opened.set_exception(error)

    def on_lost(self, error: MagnetarError) -> None:
        self._fail(error)

    def on_failure(self, error: Exception) -> None:
        self._fail(ConnectionLost(f"the producer failed: {error}"))


# ------------------------------------------------------------------------------------------------------ messages
# The messages of a program: what it sends is checked, encoded by the producer's schema, and becomes an
# OutgoingMessage.
#
# A wrong value is the caller's error and is raised before anything is sent.
# Guard: tests/client/model/test_wrong_arguments.py.


class MessageDraft:
    """A message that is not sent yet. The program's function `message_router` gets it to choose a partition."""

    def __init__(self, message: OutgoingMessage, schema: Schema) -> None:
        self._message = message
        self._schema = schema

    def value(self) -> Any:
        """Returns the value of the message, as a consumer with the producer's schema would get it; None for a message
        without a value. Raises what the schema raises if it cannot decode the message."""
        message = self._message
        if self._schema.separated and (message.null_key or message.key_is_base64):
            key = None if message.null_key else b64decode(message.partition_key or "")
            return self._schema.decode_separated(key, None if message.null_value else message.payload)
        return None if message.null_value else self._schema.decode(message.payload)

    def data(self) -> bytes:
        """Returns the bytes of the message as they will be stored."""
        return self._message.payload

    def partition_key(self) -> str:
        """Returns the key of the message; an empty text if it has no key."""
        return self._message.partition_key or ""

    def ordering_key(self) -> str:
        """Returns the ordering key of the message; an empty text if it has none."""
        return (self._message.ordering_key or b"").decode("utf-8", "replace")

    def properties(self) -> dict[str, str]:
        """Returns a copy of the message's properties."""
        return dict(self._message.properties)

    def event_timestamp(self) -> int:
        """Returns the event time of the message in ms since the epoch; 0 if it has none."""
        return self._message.event_time


class Extras(NamedTuple):
    """The optional parameters of `Producer.send`, in their order; the content is not one of them. `key_bytes`: a key
    that is not text, in place of `partition_key`. `replication_clusters`: the clusters that get the message; None: all
    of the namespace. `deliver_after`: a delay from now. `txn`: the message counts when this transaction commits."""

    properties: dict[str, str] | None = None
    partition_key: str | None = None
    ordering_key: str | None = None
    sequence_id: int | None = None
    replication_clusters: list[str] | None = None
    disable_replication: bool | None = False
    event_timestamp: int | None = None  # ms since the epoch
    deliver_at: int | None = None  # ms since the epoch
    deliver_after: timedelta | None = None
    key_bytes: bytes | None = None
    null_key: bool = False  # of a pair that has its key apart
    expires_at: datetime | int | None = None  # aware, or ms since the epoch
    expires_in: timedelta | float | None = None  # seconds
    priority: int | None = None  # the level, 0 for the most urgent
    txn: TransactionPort | None = None


NO_EXTRAS = Extras()
LOCAL_CLUSTER_ONLY = "__local__"
"""Stands in the list of clusters for a message that no other cluster gets, as Pulsar's clients write it."""


def has_only_transaction(extras: Extras) -> bool:
    """Returns whether `extras` contains a transaction (`txn`) and no other parameter."""
    return extras.txn is not None and extras[:-1] == NO_EXTRAS[:-1] and isinstance(extras.txn, TransactionPort)


def make_outgoing_message(
    content: Any, extras: Extras, schema: Schema, wall_ms: Callable[[], int]
) -> OutgoingMessage:
    """Checks the parameters that a program passes to `send`, and returns an OutgoingMessage made from them. `content`
    is encoded by `schema`; None: a message without a value. `wall_ms()`: the time in ms since the epoch, for
    `deliver_after` and `expires_in`. Raises InvalidMessage if a parameter is wrong, or `schema` cannot encode the
    content."""
    if extras != NO_EXTRAS:
        _check_extras(extras)
    payload: bytes | None = None
    if content is not None and schema.separated:
        key, payload = _apart(content, schema)
        extras = extras._replace(key_bytes=key, partition_key=None, null_key=key is None)
    elif content is not None:
        payload = _encoded(content, schema)
    deliver_at = extras.deliver_at
    if extras.deliver_after is not None:
        deliver_at = wall_ms() + round(extras.deliver_after.total_seconds() * 1000)
    properties = dict(extras.properties or {})
    if extras.expires_at is not None or extras.expires_in is not None:
        properties[EXPIRES_AT_PROPERTY] = str(_expiry_ms(extras, wall_ms))
    return OutgoingMessage(
        payload=payload or b"",
        properties=properties,
        partition_key=extras.partition_key if extras.key_bytes is None else b64encode(extras.key_bytes).decode(),
        key_is_base64=extras.key_bytes is not None,
        null_key=extras.null_key,
        ordering_key=None if extras.ordering_key is None else extras.ordering_key.encode(),
        event_time=extras.event_timestamp or 0,
        sequence_id=extras.sequence_id,
        deliver_at=deliver_at,
        replicate_to=(LOCAL_CLUSTER_ONLY,) if extras.disable_replication else tuple(extras.replication_clusters or ()),
        null_value=payload is None,
        txn=extras.txn,
    )


def _expiry_ms(extras: Extras, wall_ms: Callable[[], int]) -> int:
    """Returns when the message expires, in ms since the epoch."""
    at, after = extras.expires_at, extras.expires_in
    if after is not None:
        return wall_ms() + round(1000 * (after.total_seconds() if isinstance(after, timedelta) else after))
    return round(at.timestamp() * 1000) if isinstance(at, datetime) else at or 0


def check_transaction_argument(txn: object) -> None:
    """Raises InvalidMessage if `txn` is no transaction of asyncio."""
    if not isinstance(txn, TransactionPort):
        raise WrongMessageType(f"txn is a transaction of this client, or None, not {shorten_value(txn)}")


def _encoded(content: Any, schema: Schema) -> bytes:
    payload = _made(schema.encode, content, schema)
    if type(payload) is not bytes:
        raise WrongMessageType(f"{schema} made {type(payload).__name__} of a value, not bytes")
    return payload


def _apart(content: Any, schema: Schema) -> tuple[bytes | None, bytes | None]:
    found: tuple[bytes | None, bytes | None] = _made(schema.encode_separated, content, schema)
    return found


def _made(encode: Callable[[Any], Any], content: Any, schema: Schema) -> Any:
    try:
        return encode(content)
    except InvalidMessage as error:
        if isinstance(error, TypeError | ValueError):
            raise
        raise WrongMessageType(error.message) from error
    except Exception as error:
        kind = WrongMessageType if isinstance(error, TypeError) else WrongMessageValue
        raise kind(f"{shorten_value(content)} cannot be encoded as {schema}: {error}") from error


def _check_extras(extras: Extras) -> None:
    """Checks the extras: the plain values of most messages directly, the others by the table."""
    properties, key, ordering, sequence_id, clusters, disabled, event, at, after, key_bytes = extras[:10]
    _, ends, lasts, priority, txn = extras[10:]
    if txn is not None:
        check_transaction_argument(txn)
    if key_bytes is not None and (key is not None or type(key_bytes) is not bytes):
        raise WrongMessageType(f"key_bytes is bytes, without a partition_key, not {shorten_value(key_bytes)}")
    if key is not None and not is_ascii_key(key):
        check_message_parameters({"partition_key": key})
    if ordering is not None and not is_ascii_key(ordering):
        check_message_parameters({"ordering_key": ordering})
    if properties is not None and not are_ascii_properties(properties):
        check_message_parameters({"properties": properties})
    if event is not None and not (type(event) is int and 0 <= event <= INT64_MAX):
        check_message_parameters({"event_timestamp": event})
    if sequence_id is not None or at is not None or after is not None:
        check_message_parameters({"sequence_id": sequence_id, "deliver_at": at, "deliver_after": after})
    if ends is not None or lasts is not None:
        if ends is not None and lasts is not None:
            raise WrongMessageValue("a message has expires_at or expires_in, not both")
        check_message_parameters({"expires_at": ends, "expires_in": lasts})
    if priority is not None:
        check_message_parameters({"priority": priority})
    if clusters is not None or (disabled is not None and disabled is not False):
        check_message_parameters({"replication_clusters": clusters, "disable_replication": disabled})
