"""Half messages, as rpcs of Transactions and Admin: translates and calls (broker/transaction/halves_core.py decides).

A half message is stored only if the caller may publish to all of its topics: this is checked by `prepare_half`, because
a broker publishes it later. A member gets its checks over its stream until that ends.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing

from ...proto import wire_pb2 as wire
from ...proto.entry import parse_header
from ...proto.errors import CorruptEntry, InvalidRequest, MagnetarError, MessageTooLarge, NotAllowed
from ...proto.names import TopicName
from ...proto.operations import Permission
from ...proto.states import HALF_MESSAGES_MAX, TxnId, coordinator_of
from ...runtime.network import CallContext, EndOfStream, Stream
from ..node.topic_manager import TopicManager
from ..transaction.intents_core import AskAboutHalfMessage, HalfMessageChangeVerb, HalfMessageEndVerb, HalfMessageRow
from ..transaction.records_core import HalfMessage

Watching = Stream[wire.HalfCheck, wire.WatchHalvesItem]
LIST_DEFAULT, LIST_MAX = 1_000, 5_000


def parse_half_message_id(asked: wire.TransactionId) -> TxnId:
    """Returns the id of a half message, which a request contains as two numbers. Raises InvalidRequest if the numbers
    are not a valid id."""
    return TxnId.from_numbers(asked.most, asked.least)


class HalfMessageService:
    """Implements the rpcs of the gRPC service Transactions about half messages (messages that are stored at a
    coordinator, and published to their topics at the commit)."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def prepare_half(self, request: wire.HalfRequest, context: CallContext) -> wire.HalfReply:
        half, messages = parse_half_message_id(request.half), await self._messages(request, context)
        coordinators = self._broker.transactions
        if half.coordinator != coordinator_of(request.group, await coordinators.ensure_coordinator_count()):
            raise InvalidRequest(f"half {half} is not of the coordinator of group {request.group[:100]!r}")
        state = await (await coordinators.load_owned_coordinator(half.coordinator)).prepare_half(
            half, context.principal.name, request.group, request.check_key, messages, request.check_after_ms / 1000
        )
        return wire.HalfReply(state=state.name)

    async def _messages(self, request: wire.HalfRequest, context: CallContext) -> list[HalfMessage]:
        if len(request.messages) > HALF_MESSAGES_MAX:
            raise InvalidRequest(f"a half of {len(request.messages)} messages has more than {HALF_MESSAGES_MAX}")
        allowed: set[str] = set()
        messages = []
        for each in request.messages:
            topic = TopicName.parse(each.topic)
            if topic.full not in allowed:
                await self._broker.access.check_permission(
                    context.principal, Permission.PRODUCE, topic=topic, peer=context.peer
                )
                if not topic.persistent:
                    raise NotAllowed(f"topic {topic} takes no transactions")
                allowed.add(topic.full)
            try:
                header = parse_header(each.entry)
            except CorruptEntry as error:
                raise InvalidRequest(f"a message of the half is no entry: {error}") from error
            if header.batched or header.metadata.num_chunks_from_msg > 1:
                raise InvalidRequest("a message of a half is neither in a batch nor in chunks")
            if header.uncompressed_size > (limit := self._broker.config.max_message_bytes):
                raise MessageTooLarge(f"a message of a half declares {header.uncompressed_size} uncompressed bytes, "
                    f"the limit is"
                                      f" {limit}", size=header.uncompressed_size, limit=limit)  # fmt: skip
            messages.append(HalfMessage(topic.full, each.entry))
        return messages

    async def end_half(self, request: wire.EndHalfRequest, context: CallContext) -> wire.HalfReply:
        half = parse_half_message_id(request.half)
        try:
            verb = HalfMessageEndVerb(request.verb)
        except ValueError:
            raise InvalidRequest(f"{request.verb} is no way to end a half") from None
        state = await (await self._broker.transactions.load_owned_coordinator(half.coordinator)).end_half(
            half, verb, context.principal.name, request.check, request.why
        )
        return wire.HalfReply(state=state.name)

    async def watch_halves(self, stream: Watching, context: CallContext) -> None:
        group = (await stream.receive())[0].group
        if not group:
            raise InvalidRequest("the first item of a WatchHalves stream names a group")
        tasks = (asyncio.create_task(self._ask(stream, group, context)), asyncio.create_task(_gone(stream)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0].done():
                await tasks[0]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, stream: Watching, group: str, context: CallContext) -> None:
        coordinators = self._broker.transactions
        coordinator = await coordinators.load_owned_coordinator(
            coordinator_of(group, await coordinators.ensure_coordinator_count())
        )
        async with aclosing(coordinator.watch_halves(context.principal.name, group)) as asked:
            async for each in asked:
                await stream.send(_check(coordinator.number, each))


async def _gone(stream: Watching) -> None:
    try:
        while True:
            await stream.receive()
    except (EndOfStream, MagnetarError):
        return


def _check(coordinator: int, asked: AskAboutHalfMessage) -> wire.HalfCheck:
    return wire.HalfCheck(
        half=wire.TransactionId(most=coordinator, least=asked.half), check=asked.check, check_key=asked.check_key,
        unknown=asked.unknown, age_ms=int(asked.age_s * 1000), answer_ms=int(asked.answer_s * 1000),
        messages=[wire.HalfMessage(topic=each.topic, entry=each.entry) for each in asked.messages],
    )  # fmt: skip


class HalfMessageAdminService:
    """Implements the rpcs of the gRPC service Admin about half messages."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def list_halves(self, request: wire.ListHalvesRequest, context: CallContext) -> wire.ListHalvesReply:
        half = parse_half_message_id(request.half) if request.HasField("half") else None
        number = request.coordinator if half is None else half.coordinator
        if not await self._broker.transactions.has_been_loaded(number):
            return wire.ListHalvesReply()  # and it is not loaded for the question
        coordinator = await self._broker.transactions.load_owned_coordinator(number)
        found = coordinator.half_message_counts()
        rows = coordinator.list_halves(half, request.group, min(request.limit or LIST_DEFAULT, LIST_MAX))
        return wire.ListHalvesReply(
            items=[_row(number, row) for row in rows], open=found["open"], parked=found["parked"], bytes=found["bytes"]
        )

    async def change_half(self, request: wire.ChangeHalfRequest, context: CallContext) -> None:
        half = parse_half_message_id(request.half)
        try:
            verb = HalfMessageChangeVerb(request.verb)
        except ValueError:
            raise InvalidRequest(f"{request.verb} is no change of a half") from None
        await (await self._broker.transactions.load_owned_coordinator(half.coordinator)).change_half(half, verb)


def _row(number: int, row: HalfMessageRow) -> wire.HalfInfo:
    return wire.HalfInfo(
        half=wire.TransactionId(most=number, least=row.half), state=row.phase.name, owner=row.owner, group=row.group,
        check_key=row.check_key, age_ms=int(row.age_s * 1000), unknown=row.unknown, members=row.members,
        bytes=row.size_bytes, topics=row.topics, reason=row.reason,
    )  # fmt: skip
