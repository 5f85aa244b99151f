"""`MessageBatch`: takes the payload of a batch apart, which a program got by other ways than a consumer."""

from __future__ import annotations

from ...proto.entry import EntryHeader, decode_columns
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import CorruptEntry
from ...proto.names import Position, TopicName
from ..common.checks import WrongMessageType, WrongMessageValue, check_one, instance, shown, whole
from .message import Message, Origin, ReceivedEntry
from .message_id import MessageId
from .schema import BytesSchema, Schema

MESSAGES_MAX = 1 << 20
_NOWHERE = TopicName.parse("persistent://public/default/batch")


class MessageBatch:
    """The messages of a batch: `MessageBatch().with_message_id(id).parse_from(payload, count)`.

    The payload is neither compressed nor encrypted. InvalidMessage: it is no batch of so many messages."""

    def __init__(self) -> None:
        self._id = MessageId()

    def with_message_id(self, msg_id: MessageId) -> MessageBatch:
        """Sets where the batch is stored: ledger, entry and partition of its messages' ids."""
        check_one("msg_id", instance(MessageId, optional=False), msg_id)
        self._id = msg_id
        return self

    def parse_from(self, data: bytes, size: int) -> list[Message]:
        """Returns the `size` messages of a batch."""
        check_one("size", whole(1, MESSAGES_MAX), size)
        if not isinstance(data, bytes | bytearray | memoryview):
            raise WrongMessageType(f"a batch is bytes, not {shown(data)}")
        header = EntryHeader(MessageMetadata(num_messages_in_batch=size), 0)
        try:
            fields, payloads = decode_columns(header, bytes(data))
        except CorruptEntry as error:
            raise WrongMessageValue(f"the bytes are no batch of {size} messages: {error.message}") from error
        position = Position(self._id.ledger_id(), self._id.entry_id())
        entry = ReceivedEntry(_Unconnected(self._id.partition()), header, position, -1, 0)
        return [
            Message(entry, each, payload, index)
            for index, (each, payload) in enumerate(zip(fields, payloads, strict=True))
        ]


class _Unconnected(Origin):
    """The origin of messages that no consumer received: there is nothing to acknowledge or to grant."""

    def __init__(self, partition: int) -> None:
        self._topic = _NOWHERE if partition < 0 else _NOWHERE.with_partition(partition)
        self._schema = BytesSchema()

    @property
    def topic(self) -> TopicName:
        return self._topic

    @property
    def schema(self) -> Schema:
        return self._schema

    @property
    def writers(self) -> None:
        return None

    @property
    def holds_order(self) -> bool:
        return False

    def taken(self, message: Message) -> None: ...
    def interrupted(self) -> None: ...
    def acknowledge(self, which: Message) -> None: ...
    def encrypt_like(self, message: Message) -> None: ...
