"""The part of the Admin service that looks into a topic and clears it: translates and calls; decides nothing."""

from __future__ import annotations

from ....proto import wire_pb2 as wire
from ....proto.names import MessageId, Position, TopicName
from ....proto.statistics import BacklogAnalysis, OrphanLedger, Orphans, SkippedLost
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

    async def find_orphans(self, request: wire.FindOrphansRequest, context: CallContext) -> Orphans:
        """Finds orphans; any broker answers."""
        found, deleted = await self._broker.find_orphans(remove=request.remove, unexplained=request.unexplained)
        gone = {each.ledger_id for each in deleted}
        orphans = (
            OrphanLedger(
                each.ledger_id, each.topic, each.subscription, each.created_ms, each.ledger_id in gone,
                each.unexplained,
            )
            for each in found.orphans
        )  # fmt: skip
        missing = (OrphanLedger(each.ledger_id, each.topic, "", 0, False) for each in found.missing)
        return Orphans(tuple(orphans), tuple(missing))

    async def truncate_topic(self, request: wire.Name, context: CallContext) -> None:
        await (await self._topic(request.name)).truncate()

    async def skip_lost(self, request: wire.SkipLostRequest, context: CallContext) -> SkippedLost:
        ledger_id = request.ledger_id if request.HasField("ledger_id") else -1
        return await self._administration.skip_lost(TopicName.parse(request.topic), ledger_id, force=request.force)

    async def expire_messages(self, request: wire.ExpireMessagesRequest, context: CallContext) -> int:
        up_to = _position(request.message_id) if request.HasField("message_id") else None
        backlogs = await self._backlogs(request.topic)
        return await backlogs.expire(request.name, request.older_than_s, up_to)

    async def examine_messages(
        self, request: wire.ExamineMessagesRequest, context: CallContext
    ) -> list[wire.Delivery]:
        backlogs = await self._backlogs(request.topic)
        return [delivery(await backlogs.nth(request.number or 1, from_latest=request.from_latest))]

    async def get_message(self, request: wire.GetMessageRequest, context: CallContext) -> list[wire.Delivery]:
        shown = await (await self._backlogs(request.topic)).message(Position(request.ledger_id, request.entry_id))
        return [delivery(shown)]

    async def analyze_backlog(
        self, request: wire.DeleteSubscriptionRequest, context: CallContext
    ) -> BacklogAnalysis:
        return BacklogAnalysis(*await (await self._backlogs(request.topic)).analyze(request.name))

    async def message_id_by_time(self, request: wire.MessageIdByTimeRequest, context: CallContext) -> MessageId:
        return await (await self._backlogs(request.topic)).at_time(request.publish_time_ms)

    async def backlog_size(self, request: wire.BacklogSizeRequest, context: CallContext) -> int:
        return (await self._backlogs(request.topic)).size_after(_position(request.position))

    async def last_message_id(self, request: wire.Name, context: CallContext) -> MessageId:
        return await (await self._backlogs(request.name)).last()


def _position(given: wire.Position | wire.MessageId) -> Position:
    return Position(given.ledger_id, given.entry_id)


def delivery(shown: Shown) -> wire.Delivery:
    ledger_id, entry_id = shown.entry.position
    return wire.Delivery(
        ledger_id=ledger_id, entry_id=entry_id, entry=shown.entry.payload, acked_batch_indexes=shown.hidden
    )
