"""What is checked of a request before any work is done for it.

Rule: no request costs the broker more than linear work in its bytes, none holds the event loop for longer than 5 ms,
and none leaves anything half made. So values that the wire can carry and the broker has no use for (an enum's unknown
number, a negative count, an index that no entry can have) are refused here, as InvalidRequest, before a topic is loaded
or a subscription is made. Guarding test: tests/broker/protocols/grpc/test_extreme_requests.py, for each request of
proto/wire.proto.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....proto import wire_pb2 as wire
from ....proto.errors import InvalidName, InvalidRequest
from ....proto.names import NAME_BYTES_MAX
from ...common.refusals import AckRefusal
from ...subscription.acks import marked
from ...subscription.core.cursor import BATCH_INDEXES_MAX

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper


TIMES_MAX = 1000
"""Looked up in one Offsets request: each costs some reads."""
RANGES_MAX = 1000
"""Of a sticky consumer: each is compared with those of the others."""
PERMITS_MAX = (1 << 31) - 1
"""That a consumer may have at a time, as Pulsar's int has it."""
PEEK_MESSAGES_MAX = 1000
AGE_S_MAX = 10_000_000_000
"""300 years."""


def check_subscribe(asked: wire.Subscribe) -> None:
    _check_size("consumer", asked.consumer_name)
    _check_size("instance", asked.instance)
    if len(asked.key_shared.ranges) > RANGES_MAX:
        raise InvalidRequest(f"{len(asked.key_shared.ranges)} ranges of slots are more than {RANGES_MAX}")
    _check_enum(wire.Subscribe.Type, asked.type, "subscription type")
    _check_enum(wire.Subscribe.InitialPosition, asked.initial_position, "initial position")
    _check_enum(wire.KeySharedPolicy.Mode, asked.key_shared.mode, "mode of Key_Shared")


def check_open(asked: wire.OpenProducer) -> None:
    _check_size("instance", asked.instance)
    _check_enum(wire.OpenProducer.AccessMode, asked.access_mode, "access mode")


def check_ack(ack: wire.Ack) -> None:
    if ack.kind not in wire.Ack.Kind.values():
        raise AckRefusal.UNKNOWN_KIND.error(f"there is no kind of acknowledgement {ack.kind}")
    if marked(ack.entries) > BATCH_INDEXES_MAX:
        raise AckRefusal.TOO_MANY_INDEXES.error(
            f"the batch indexes of one acknowledgement reach over {BATCH_INDEXES_MAX} messages at most, in all entries"
        )


def check_permits(permits: int, given: int) -> None:
    if permits + given > PERMITS_MAX:
        raise InvalidRequest(f"{given} permits beside the {permits} that are left are more than {PERMITS_MAX}")


def check_offsets(request: wire.OffsetsRequest) -> None:
    if len(request.publish_times_ms) > TIMES_MAX:
        raise InvalidRequest(f"{len(request.publish_times_ms)} times in one request are more than {TIMES_MAX}")


def check_skip(messages: int) -> None:
    if messages < -1:
        raise InvalidRequest(f"{messages} messages cannot be skipped; -1 are all of them")


def check_peek(messages: int) -> None:
    if messages > PEEK_MESSAGES_MAX:
        raise InvalidRequest(f"{messages} messages at once are more than {PEEK_MESSAGES_MAX}")


def check_age(request: wire.ExpireMessagesRequest) -> None:
    if not request.HasField("message_id") and not 0 < request.older_than_s <= AGE_S_MAX:
        raise InvalidRequest(
            f"messages expire when they are older than some seconds (0 to {AGE_S_MAX}), or up to a message id"
        )


def _check_size(kind: str, name: str) -> None:
    if len(name.encode()) > NAME_BYTES_MAX:
        raise InvalidName(f"{kind} name of {len(name)} characters is too long", size=len(name), limit=NAME_BYTES_MAX)


def _check_enum(enum: EnumTypeWrapper, value: int, what: str) -> None:
    if value not in enum.values():
        raise InvalidRequest(f"there is no {what} {value}; there are {', '.join(enum.keys())}")
