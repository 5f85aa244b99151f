"""The SDK's MessageId. It has the methods, the serialized form and the order of the class of that name in Pulsar's
client."""

from __future__ import annotations

from typing import Any, ClassVar

from google.protobuf.message import DecodeError

from ...proto import names
from ...proto import wire_pb2 as wire
from ...proto.entry_pb2 import MessageIdData
from ...proto.errors import MagnetarError
from ...proto.names import EARLIEST, LATEST, Position
from ..common.checks import (
    MESSAGE_ID_CHECKS,
    TEXT_CHECK,
    TEXT_OR_NONE,
    WrongIdText,
    WrongMessageType,
    WrongMessageValue,
    WrongValue,
    check_parameter,
    check_parameters,
    shorten_value,
)

_U64 = 1 << 64
_I63 = 1 << 63
UncheckedInt = int | Any
UncheckedText = str | Any
UncheckedBytes = bytes | Any
"""Types of parameters as the compiled module declares them. `Any` lets a value of a wrong type reach our own checks,
whose errors say what is wrong; otherwise the compiler's check would raise first."""


class MessageId:
    """The id of a message: the position at which it is stored. The id of a chunked message is that of its last chunk,
    and `chunks` returns the positions of all chunks. Ids are hashable, and ordered by ledger, entry, batch index, and
    last by partition.

    `serialize` returns the bytes of Pulsar's MessageIdData; `str()` returns `(ledger,entry,partition,batch)`, as Pulsar
    prints it. The id of a received message also contains its topic and the size of its batch. Raises
    InvalidConfiguration for a number that is no whole number, or out of range."""

    __slots__ = ("_batch_index", "_chunks", "_entry_id", "_ledger_id", "_partition", "_size", "_topic")

    earliest: ClassVar[MessageId]
    latest: ClassVar[MessageId]

    def __init__(
        self, partition: UncheckedInt = -1, ledger_id: UncheckedInt = -1, entry_id: UncheckedInt = -1,
        batch_index: UncheckedInt = -1, _size: int = 0, _topic: str = "", _chunks: tuple[Position, ...] = (),
    ) -> None:  # fmt: skip
        check_parameters(
            MESSAGE_ID_CHECKS,
            {"partition": partition, "ledger_id": ledger_id, "entry_id": entry_id, "batch_index": batch_index},
        )
        self._partition = partition
        self._ledger_id = ledger_id
        self._entry_id = entry_id
        self._batch_index = batch_index
        self._size = _size
        self._topic = _topic
        self._chunks = _chunks

    def ledger_id(self) -> int:
        """Returns the id of the ledger that contains the message; -1 if the id does not name one."""
        return self._ledger_id

    def entry_id(self) -> int:
        """Returns the number of the entry that contains the message, from 0 in each ledger; -1 if the id names none."""
        return self._entry_id

    def batch_index(self) -> int:
        """Returns the number of the message in its entry, from 0; -1: the whole entry is one message."""
        return self._batch_index

    def partition(self) -> int:
        """Returns the number of the message's partition; -1: the topic is not partitioned, or the id does not say."""
        return self._partition

    def position(self) -> Position:
        """Returns the position of the message's entry: the ids of its ledger and entry."""
        return Position(self._ledger_id, self._entry_id)

    def chunks(self) -> tuple[Position, ...]:
        """Returns the positions of all chunks of a chunked message, as far as they are known; an empty tuple if the
        message is one entry."""
        return self._chunks

    def first_chunk_message_id(self) -> MessageId | None:
        """Returns the message id of the first chunk of a chunked message; None if the message is one entry."""
        return UncheckedMessageId(self._partition, *self._chunks[0], _topic=self._topic) if self._chunks else None

    def batch_size(self) -> int:
        """Returns the number of messages in the message's entry; 0 if it is not known."""
        return self._size

    def topic_name(self) -> str:
        """Returns the full name of the topic (or partition) from which the message was received; an empty text if it is
        not known."""
        return self._topic

    def serialize(self) -> bytes:
        """Returns the id as bytes, Pulsar's MessageIdData, without the topic. `deserialize` converts them back. Of the
        chunks the bytes contain only the first and the last."""
        data = MessageIdData(ledgerId=self._ledger_id % _U64, entryId=self._entry_id % _U64)
        if self._partition >= 0:
            data.partition = self._partition
        if self._batch_index >= 0:
            data.batch_index = self._batch_index
        if self._size > 0:
            data.batch_size = self._size
        if self._chunks:
            first = data.first_chunk_message_id
            first.ledgerId, first.entryId = (number % _U64 for number in self._chunks[0])
        return data.SerializeToString()

    @classmethod
    def wrap(cls, msg_id: MessageId | Any) -> MessageId:
        """Returns the message id that was passed, unchanged. Exists because Pulsar's client has two such classes and
        converts between them. Raises InvalidMessage if `msg_id` is not a MessageId."""
        if not isinstance(msg_id, MessageId):
            raise WrongMessageType(f"wrap takes a MessageId, not {shorten_value(msg_id)}")
        return msg_id

    @staticmethod
    def deserialize(message_id_bytes: UncheckedBytes, topic: UncheckedText | None = None) -> MessageId:
        """Returns the id for bytes that `serialize` returned. `topic`: the full name of the topic of the message.
        Raises InvalidMessage if the bytes are not an id, InvalidConfiguration if `topic` is no text."""
        if not isinstance(message_id_bytes, bytes | bytearray | memoryview):
            raise WrongMessageType(f"a message id is made of bytes, not of {shorten_value(message_id_bytes)}")
        check_parameter("topic", TEXT_OR_NONE, topic)
        try:
            data = MessageIdData.FromString(bytes(message_id_bytes))
        except DecodeError as error:
            raise WrongMessageValue(f"{len(message_id_bytes)} bytes are not a message id") from error
        if not data.IsInitialized():
            raise WrongMessageValue("the message id lacks its ledger or entry")
        ledger_id, entry_id = (number - _U64 if number >= _I63 else number for number in (data.ledgerId, data.entryId))
        chunks: tuple[Position, ...] = ()
        if data.HasField("first_chunk_message_id"):
            first = data.first_chunk_message_id
            chunks = (Position(first.ledgerId, first.entryId), Position(ledger_id, entry_id))
        try:
            return MessageId(
                data.partition, ledger_id, entry_id, data.batch_index, data.batch_size, topic or "", chunks
            )
        except WrongValue as error:
            raise WrongMessageValue(f"{len(message_id_bytes)} bytes are not a message id: {error}") from error

    @staticmethod
    def parse(text: UncheckedText) -> MessageId:
        """Makes a message id from the text `ledger:entry[:partition[:batch]]`, `earliest` or `latest`, and returns it.
        Raises InvalidMessage if the text is none of these, InvalidConfiguration if it is no text."""
        check_parameter("text", TEXT_CHECK, text)
        try:
            found = names.MessageId.parse(text.strip("()"))
            return MessageId(found.partition, found.ledger_id, found.entry_id, found.batch_index)
        except (MagnetarError, WrongValue) as error:
            raise WrongIdText(str(error)) from error

    def to_wire(self) -> wire.MessageId:
        """Returns the id as the Protobuf message that is sent to a broker: without its batch size, topic and chunks."""
        return wire.MessageId(
            ledger_id=self._ledger_id, entry_id=self._entry_id, partition=self._partition, batch_index=self._batch_index
        )

    @staticmethod
    def from_wire(message: wire.MessageId) -> MessageId:
        """Returns the id that a Protobuf message of a broker contains."""
        return UncheckedMessageId(message.partition, message.ledger_id, message.entry_id, message.batch_index)

    def order(self) -> tuple[int, int, int, int]:
        """Returns the tuple by which ids are compared: ledger, entry, batch index, partition."""
        return self._ledger_id, self._entry_id, self._batch_index, self._partition

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MessageId) and self.order() == other.order()

    def __hash__(self) -> int:
        return hash(self.order())

    def __lt__(self, other: MessageId) -> bool:
        return self.order() < other.order() if isinstance(other, MessageId) else NotImplemented

    def __le__(self, other: MessageId) -> bool:
        return self.order() <= other.order() if isinstance(other, MessageId) else NotImplemented

    def __gt__(self, other: MessageId) -> bool:
        return self.order() > other.order() if isinstance(other, MessageId) else NotImplemented

    def __ge__(self, other: MessageId) -> bool:
        return self.order() >= other.order() if isinstance(other, MessageId) else NotImplemented

    def __reduce__(self) -> tuple[Any, ...]:
        fields = self._partition, self._ledger_id, self._entry_id, self._batch_index
        return type(self), (*fields, self._size, self._topic, self._chunks)

    def __str__(self) -> str:
        return f"({self._ledger_id},{self._entry_id},{self._partition},{self._batch_index})"

    def __repr__(self) -> str:
        return f"MessageId({self._ledger_id}:{self._entry_id}:{self._partition}:{self._batch_index})"


class UncheckedMessageId(MessageId):
    """A MessageId whose arguments are not checked. The client makes one for each message that is sent or received, from
    numbers that it knows to be valid."""

    __slots__ = ()

    def __init__(
        self, partition: int, ledger_id: int, entry_id: int, batch_index: int = -1,
        _size: int = 0, _topic: str = "", _chunks: tuple[Position, ...] = (),
    ) -> None:  # fmt: skip
        self._partition = partition
        self._ledger_id = ledger_id
        self._entry_id = entry_id
        self._batch_index = batch_index
        self._size = _size
        self._topic = _topic
        self._chunks = _chunks


MessageId.earliest = MessageId(-1, *EARLIEST)
MessageId.latest = MessageId(-1, *LATEST)
