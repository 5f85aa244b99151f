"""The part of the Admin service that looks into a topic and clears it: translates and calls; decides nothing."""

from __future__ import annotations

from ....proto import wire_pb2 as wire
from ....proto.names import Position, TopicName
from ....runtime.network import CallContext
from ...node.topic_manager import TopicManager
from ...session.administration import Administration
from ...session.backlogs import Backlogs, Shown
from ...topic.topic import Topic


class ExamineService:
    """The rpcs of Admin that look into a topic and clear it."""

    _broker: TopicManager
    _administration: Administration

    async def _topic(self, name: str) -> Topic:
        return await self._administration.topic(TopicName.parse(name))

    async def _backlogs(self, topic: str) -> Backlogs:
        return Backlogs(await self._topic(topic))

    async def find_orphans(self, request: wire.FindOrphansRequest, context: CallContext) -> wire.OrphansReply:
        """Finds orphans; any broker answers."""
        found, deleted = await self._broker.find_orphans(remove=request.remove, unexplained=request.unexplained)
        gone = {each.ledger_id for each in deleted}
        return wire.OrphansReply(
            orphans=[
                wire.OrphanLedger(
                    ledger_id=each.ledger_id, topic=each.topic, subscription=each.subscription,
                    created_ms=each.created_ms, deleted=each.ledger_id in gone, unexplained=each.unexplained,
                )
                for each in found.orphans
            ],
            missing=[wire.OrphanLedger(ledger_id=each.ledger_id, topic=each.topic) for each in found.missing],
        )  # fmt: skip

    async def truncate_topic(self, request: wire.Name, context: CallContext) -> wire.Empty:
        await (await self._topic(request.name)).truncate()
        return wire.Empty()

    async def skip_lost(self, request: wire.SkipLostRequest, context: CallContext) -> wire.SkipLostReply:
        ledger_id = request.ledger_id if request.HasField("ledger_id") else -1
        found = await self._administration.skip_lost(TopicName.parse(request.topic), ledger_id, force=request.force)
        return wire.SkipLostReply(
            ranges=[
                wire.LostRange(
                    ledger_id=each.ledger_id, first_entry=each.first_entry, last_entry=each.last_entry,
                    first_index=each.first_index, end_index=each.end_index, forced=each.forced,
                )
                for each in found.ranges
            ],
            subscriptions=[
                wire.LostOfSubscription(name=name, messages=lost) for name, lost in found.subscriptions.items()
            ],
        )  # fmt: skip

    async def expire_messages(
        self, request: wire.ExpireMessagesRequest, context: CallContext
    ) -> wire.ExpireMessagesReply:
        up_to = _position(request.message_id) if request.HasField("message_id") else None
        backlogs = await self._backlogs(request.topic)
        return wire.ExpireMessagesReply(entries=await backlogs.expire(request.name, request.older_than_s, up_to))

    async def examine_messages(
        self, request: wire.ExamineMessagesRequest, context: CallContext
    ) -> wire.PeekMessagesReply:
        backlogs = await self._backlogs(request.topic)
        shown = await backlogs.nth(request.number or 1, from_latest=request.from_latest)
        return wire.PeekMessagesReply(entries=[delivery(shown)])

    async def get_message(self, request: wire.GetMessageRequest, context: CallContext) -> wire.PeekMessagesReply:
        shown = await (await self._backlogs(request.topic)).message(Position(request.ledger_id, request.entry_id))
        return wire.PeekMessagesReply(entries=[delivery(shown)])

    async def analyze_backlog(
        self, request: wire.DeleteSubscriptionRequest, context: CallContext
    ) -> wire.AnalyzeBacklogReply:
        found = await (await self._backlogs(request.topic)).analyze(request.name)
        return wire.AnalyzeBacklogReply(
            entries=found.entries, messages=found.messages, acknowledged=found.acknowledged, bytes=found.bytes,
            complete=found.complete,
        )  # fmt: skip

    async def message_id_by_time(self, request: wire.MessageIdByTimeRequest, context: CallContext) -> wire.MessageId:
        return (await (await self._backlogs(request.topic)).at_time(request.publish_time_ms)).to_wire()

    async def backlog_size(self, request: wire.BacklogSizeRequest, context: CallContext) -> wire.BacklogSizeReply:
        backlogs = await self._backlogs(request.topic)
        return wire.BacklogSizeReply(bytes=backlogs.size_after(_position(request.position)))

    async def last_message_id(self, request: wire.Name, context: CallContext) -> wire.MessageId:
        return (await (await self._backlogs(request.name)).last()).to_wire()


def _position(given: wire.Position | wire.MessageId) -> Position:
    return Position(given.ledger_id, given.entry_id)


def delivery(shown: Shown) -> wire.Delivery:
    ledger_id, entry_id = shown.entry.position
    return wire.Delivery(
        ledger_id=ledger_id, entry_id=entry_id, entry=shown.entry.payload, acked_batch_indexes=shown.hidden
    )
