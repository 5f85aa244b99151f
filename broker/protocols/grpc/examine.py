"""The part of the Admin service that looks into a topic and clears it: translates and calls; decides nothing."""

from __future__ import annotations

from ....proto import wire_pb2 as wire
from ....proto.names import Position, TopicName
from ....runtime.network import CallContext
from ...log.cache import StoredEntry
from ...node.topic_manager import TopicManager
from ...topic import examine
from ...topic.core.upkeep import backlog_bytes
from ...topic.topic import Topic
from .border import check_age


class ExamineService:
    _broker: TopicManager

    async def _topic(self, name: str) -> Topic:
        """A topic that exists, loaded here."""
        topic = TopicName.parse(name)
        await self._broker.catalog.existing_partitions(topic)
        return await self._broker.topic(topic)

    async def find_orphans(self, request: wire.FindOrphansRequest, context: CallContext) -> wire.OrphansReply:
        """Any broker answers."""
        found, deleted = await self._broker.find_orphans(remove=request.remove)
        gone = {each.ledger_id for each in deleted}
        return wire.OrphansReply(
            orphans=[
                wire.OrphanLedger(
                    ledger_id=each.ledger_id, topic=each.topic, subscription=each.subscription,
                    created_ms=each.created_ms, deleted=each.ledger_id in gone,
                )
                for each in found.orphans
            ],
            missing=[wire.OrphanLedger(ledger_id=each.ledger_id, topic=each.topic) for each in found.missing],
        )  # fmt: skip

    async def truncate_topic(self, request: wire.Name, context: CallContext) -> wire.Empty:
        await (await self._topic(request.name)).truncate()
        return wire.Empty()

    async def expire_messages(
        self, request: wire.ExpireMessagesRequest, context: CallContext
    ) -> wire.ExpireMessagesReply:
        """Of one subscription, or of all when none is named: what is older, or everything up to a message."""
        check_age(request)
        topic = await self._topic(request.topic)
        names = [request.name] if request.name else [each.name for each in topic.subscriptions.values() if each.durable]
        entries = 0
        for subscription in [topic.subscription(name) for name in names]:
            if request.HasField("message_id"):
                position = Position(request.message_id.ledger_id, request.message_id.entry_id)
                entries += topic.life.give_up(subscription, topic.log.shape.clamp(position))
            else:
                entries += await topic.life.expire_older(subscription, request.older_than_s)
            await subscription.durable_now()
        return wire.ExpireMessagesReply(entries=entries)

    async def examine_messages(
        self, request: wire.ExamineMessagesRequest, context: CallContext
    ) -> wire.PeekMessagesReply:
        """The n-th message from one end; the others of its batch count as acknowledged, so that nobody shows them."""
        topic = await self._topic(request.topic)
        entry, at = await examine.nth(topic.log, request.number or 1, from_latest=request.from_latest)
        return wire.PeekMessagesReply(entries=[_delivery(entry, [i for i in range(entry.count) if i != at])])

    async def get_message(self, request: wire.GetMessageRequest, context: CallContext) -> wire.PeekMessagesReply:
        topic = await self._topic(request.topic)
        entry = await examine.message(topic.log, Position(request.ledger_id, request.entry_id))
        return wire.PeekMessagesReply(entries=[_delivery(entry, [])])

    async def analyze_backlog(
        self, request: wire.DeleteSubscriptionRequest, context: CallContext
    ) -> wire.AnalyzeBacklogReply:
        topic = await self._topic(request.topic)
        found = await examine.analyze(topic.log, topic.subscription(request.name))
        return wire.AnalyzeBacklogReply(
            entries=found.entries, messages=found.messages, acknowledged=found.acknowledged, bytes=found.bytes,
            complete=found.complete,
        )  # fmt: skip

    async def message_id_by_time(self, request: wire.MessageIdByTimeRequest, context: CallContext) -> wire.MessageId:
        """Of the first message that arrived then or later; where the next will be, when there is none."""
        topic = await self._topic(request.topic)
        position = (await topic.log.reader.locate_time(request.publish_time_ms)).position
        return wire.MessageId(
            ledger_id=position[0], entry_id=position[1], partition=topic.name.partition, batch_index=-1
        )

    async def backlog_size(self, request: wire.BacklogSizeRequest, context: CallContext) -> wire.BacklogSizeReply:
        topic = await self._topic(request.topic)
        position = topic.log.shape.clamp(Position(request.position.ledger_id, request.position.entry_id))
        return wire.BacklogSizeReply(bytes=backlog_bytes(topic.log.shape, position))

    async def last_message_id(self, request: wire.Name, context: CallContext) -> wire.MessageId:
        topic = await self._topic(request.name)
        last, batch_index = topic.log.shape.last, -1
        if last.entry_id >= 0:
            count = (await topic.log.reader.entry(last)).count
            batch_index = count - 1 if count > 1 else -1
        return wire.MessageId(
            ledger_id=last[0], entry_id=last[1], partition=topic.name.partition, batch_index=batch_index
        )


def _delivery(entry: StoredEntry, hidden: list[int]) -> wire.Delivery:
    return wire.Delivery(
        ledger_id=entry.position[0], entry_id=entry.position[1], entry=entry.payload, acked_batch_indexes=hidden
    )
