"""Methods of AdminClient: subscriptions of one partition, or of a topic without partitions."""

from __future__ import annotations

from collections.abc import Mapping

from ...proto import operations as op
from ...proto.names import check_subscription_name
from ..model.message_id import MessageId
from .stored_messages import StoredMessage
from .transport import Caller, full_topic, of_subscription


async def create_subscription(
    self: Caller, topic: str, name: str, position: MessageId | None = None, properties: Mapping[str, str] | None = None
) -> None:
    """Creates a subscription at `position` (default: latest), whose message is delivered first."""
    await self._call(
        op.CREATE_SUBSCRIPTION, **of_subscription(topic, name), position=position or MessageId.latest,
        properties=dict(properties or {}),
    )  # fmt: skip


async def set_subscription_properties(self: Caller, topic: str, name: str, properties: Mapping[str, str]) -> None:
    """Replaces all properties."""
    await self._call(op.SET_SUBSCRIPTION_PROPERTIES, **of_subscription(topic, name), properties=dict(properties))


async def reset_subscription(
    self: Caller, topic: str, name: str, to: MessageId | int, *, exclusive: bool = False
) -> None:
    """Resets a subscription to a message id, or to a publish time in ms since the epoch. `exclusive`: the message
    itself is left out."""
    place = {"message_id": to, "exclude": exclusive} if isinstance(to, MessageId) else {"publish_time_ms": to}
    await self._call(op.RESET_SUBSCRIPTION, **of_subscription(topic, name), **place)


async def advance_subscription(self: Caller, topic: str, name: str, index: int, *, incarnation: int = 0) -> None:
    """Acknowledges every message of the partition before `index`, durably. `incarnation`: of `offsets`."""
    await self._call(
        op.ADVANCE_SUBSCRIPTION, **of_subscription(topic, name), index=index, incarnation=incarnation
    )


async def expire_messages(self: Caller, topic: str, name: str, older_than: float | MessageId) -> int:
    """Acknowledges what is older than so many seconds, or everything up to a message, for all subscriptions when
    `name` is empty; how many entries."""
    limit = {"message_id" if isinstance(older_than, MessageId) else "older_than_s": older_than}
    return await self._call(op.EXPIRE_MESSAGES, topic=full_topic(topic), subscription=name, **limit)


async def skip_messages(self: Caller, topic: str, name: str, messages: int = -1) -> None:
    """Acknowledges the next ones unseen. -1: all; an empty name: of every subscription."""
    await self._call(
        op.SKIP_MESSAGES, topic=full_topic(topic), subscription=name and check_subscription_name(name),
        messages=messages,
    )  # fmt: skip


async def peek_messages(self: Caller, topic: str, name: str, messages: int = 1) -> list[StoredMessage]:
    """Returns at most `messages` next messages of a subscription, without moving it."""
    found = await self._all(op.PEEK_MESSAGES, **of_subscription(topic, name), messages=messages)
    return found[:messages]
