"""What is checked of a request before any work is done for it.

Rule: no request costs the broker more than linear work in its bytes, none holds the event loop for longer than 5 ms,
and none leaves anything half made. So values that the wire can carry and the broker has no use for (an enum's unknown
number, a negative count, an index that no entry can have) are refused here, as InvalidRequest, before a topic is
loaded or a subscription is made. Guarding test: tests/broker/test_extreme_requests.py, for each request of
proto/wire.proto.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...proto import wire_pb2 as wire
from ...proto.errors import InvalidRequest

if TYPE_CHECKING:
    from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper


def check_subscribe(asked: wire.Subscribe) -> None:
    _check_enum(wire.Subscribe.Type, asked.type, "subscription type")
    _check_enum(wire.Subscribe.InitialPosition, asked.initial_position, "initial position")
    _check_enum(wire.KeySharedPolicy.Mode, asked.key_shared.mode, "mode of Key_Shared")


def check_open(asked: wire.OpenProducer) -> None:
    _check_enum(wire.OpenProducer.AccessMode, asked.access_mode, "access mode")


def check_ack(ack: wire.Ack) -> None:
    _check_enum(wire.Ack.Kind, ack.kind, "kind of acknowledgement")


def _check_enum(enum: EnumTypeWrapper, value: int, what: str) -> None:
    if value not in enum.values():
        raise InvalidRequest(f"there is no {what} {value}; there are {', '.join(enum.keys())}")
