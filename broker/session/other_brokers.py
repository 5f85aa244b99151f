"""An operation of another broker: the same question as a client's, with the rights of this broker.

Who asks has looked at the rights of its own caller before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from ...proto.names import MessageId
from ...proto.operation import Operation
from ...proto.operations import answer_of
from ...proto.translation import request_of, value_of
from ...runtime.network import Endpoint, rpc
from ...runtime.world import World

T = TypeVar("T")
FORWARD_TIMEOUT_S = 30.0
"""Seconds that a request may take which this broker passes on to the owner of a topic."""


def request_for(operation: Operation[Any], arguments: Mapping[str, object]) -> Message:
    """InvalidRequest: a value does not fit its field."""
    kind: type[Message] = rpc(operation.service, operation.name).request
    return request_of(kind, arguments, operation.name)


def answered(operation: Operation[T], reply: object) -> T:
    """The answer, of what a handler or another broker answers. Of messages that are shown: the entries."""
    if isinstance(reply, Message):
        kind = answer_of(operation.name, MessageId=MessageId, StoredMessage=Any)
        reply = value_of(kind, reply, operation.of_reply, {MessageId: MessageId.from_wire})
    return cast(T, reply)


async def ask(
    world: World, endpoint: str, operation: Operation[T], *, timeout_s: float = FORWARD_TIMEOUT_S, **arguments: object
) -> T:
    """Asks the Admin service of another broker the same question, with the rights of this one."""
    channel = world.network.connect(Endpoint.parse(endpoint))
    try:
        target = rpc(operation.service, operation.name)
        reply = await channel.call(target, request_for(operation, arguments), timeout_s=timeout_s)
        return answered(operation, reply)
    finally:
        await channel.close()
