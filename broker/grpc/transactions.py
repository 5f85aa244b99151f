"""The gRPC service Transactions of proto/wire.proto, and the rpcs of the service Admin about transactions. Each method
translates its request, calls the coordinator, and translates the answer; nothing is decided here.

Also in this file, below its heading: the rpcs about half messages (halves).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from ...proto import wire_pb2 as wire
from ...proto.entry import parse_header
from ...proto.errors import CorruptEntry, InvalidRequest, MagnetarError, MessageTooLarge, NotAllowed, to_wire
from ...proto.names import Position, TopicName
from ...proto.operations import Permission
from ...proto.states import HALF_MESSAGES_MAX, ForgottenOutcome, TxnId, TxnState, coordinator_of
from ...proto.statistics import TransactionHere
from ...runtime.alarm import EventLoopSlices
from ...runtime.network import CallContext, Stream
from ..common.refusals import PublishRefusal
from ..common.transactions import Settlement, convert_join_answer_to_state
from ..node.topic_manager import TopicManager
from ..session import summaries
from ..session.topics import find_listener_endpoint
from ..transaction.intents_core import (
    AskAboutHalfMessage,
    HalfMessageChangeVerb,
    HalfMessageEndVerb,
    HalfMessageRow,
    TransactionEndVerb,
    TransactionRow,
)
from ..transaction.peers import CoordinatorRequest, CoordinatorRequestBatch, encode_settlement
from ..transaction.records_core import HalfMessage, Participant, SinkBatchTag
from .handlers import run_until_stream_ends

if TYPE_CHECKING:
    from ..transaction.coordinator import RunningCoordinator

# --------------------------------------------------------------------------------------------------------------- halves
# Half messages, as rpcs of Transactions and Admin: translates and calls (broker/transaction/halves_core.py decides).
#
# A half message is stored only if the caller may publish to all of its topics: this is checked by `prepare_half`,
# because a broker publishes it later. A member gets its checks over its stream until that ends.

HalfWatchStream = Stream[wire.HalfCheck, wire.WatchHalvesItem]
LISTED_HALVES_MAX = 5_000


def parse_half_message_id(asked: wire.TransactionId) -> TxnId:
    """Returns the id of a half message, which a request contains as two numbers. Raises InvalidRequest if the numbers
    are not a valid id."""
    return TxnId.from_numbers(asked.most, asked.least)


class HalfMessageService:
    """Implements the rpcs of the gRPC service Transactions about half messages. A half message is stored at a
    coordinator, and published to its topics only when it is committed. A method raises the errors of the coordinator
    that it asks; the server answers them to the client."""

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
                if (await self._broker.policies.get_applied_policies(topic)).durability == "memory":
                    raise PublishRefusal.MEMORY.error(f"topic {topic}: {PublishRefusal.MEMORY.value}")
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

    async def watch_halves(self, stream: HalfWatchStream, context: CallContext) -> None:
        """Sends the checks of half messages to one process of the group that the first item of the stream names. A
        check asks how the half message ends. Returns when the client or the coordinator ends the stream. Raises
        InvalidRequest if the first item names no group."""
        group = (await stream.receive())[0].group
        if not group:
            raise InvalidRequest("the first item of a WatchHalves stream names a group")
        await run_until_stream_ends(stream, self._ask(stream, group, context))

    async def _ask(self, stream: HalfWatchStream, group: str, context: CallContext) -> None:
        coordinators = self._broker.transactions
        coordinator = await coordinators.load_owned_coordinator(
            coordinator_of(group, await coordinators.ensure_coordinator_count())
        )
        async with aclosing(coordinator.watch_halves(context.principal.name, group)) as asked:
            async for each in asked:
                await stream.send(_check(coordinator.number, each))


def _check(coordinator: int, asked: AskAboutHalfMessage) -> wire.HalfCheck:
    return wire.HalfCheck(
        half=wire.TransactionId(most=coordinator, least=asked.half), check=asked.check, check_key=asked.check_key,
        unknown=asked.unknown, age_ms=int(asked.age_s * 1000), answer_ms=int(asked.answer_s * 1000),
        messages=[wire.HalfMessage(topic=each.topic, entry=each.entry) for each in asked.messages],
    )  # fmt: skip


class HalfMessageAdminService:
    """Implements the rpcs of the gRPC service Admin about half messages. A method raises the errors of the coordinator
    that it asks; the server answers them to the client."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def list_halves(self, request: wire.ListHalvesRequest, context: CallContext) -> wire.ListHalvesReply:
        half = parse_half_message_id(request.half) if request.HasField("half") else None
        number = request.coordinator if half is None else half.coordinator
        if not await self._broker.transactions.has_been_loaded(number):
            return wire.ListHalvesReply()  # and it is not loaded for the question
        coordinator = await self._broker.transactions.load_owned_coordinator(number)
        found = coordinator.half_message_counts()
        rows = coordinator.list_halves(
            half, request.group, min(request.limit or LISTED_ROWS_DEFAULT, LISTED_HALVES_MAX)
        )
        return wire.ListHalvesReply(
            items=[_half(number, row) for row in rows], open=found["open"], parked=found["parked"], bytes=found["bytes"]
        )

    async def change_half(self, request: wire.ChangeHalfRequest, context: CallContext) -> None:
        half = parse_half_message_id(request.half)
        try:
            verb = HalfMessageChangeVerb(request.verb)
        except ValueError:
            raise InvalidRequest(f"{request.verb} is no change of a half") from None
        await (await self._broker.transactions.load_owned_coordinator(half.coordinator)).change_half(half, verb)


def _half(number: int, row: HalfMessageRow) -> wire.HalfInfo:
    return wire.HalfInfo(
        half=wire.TransactionId(most=number, least=row.half), state=row.phase.name, owner=row.owner, group=row.group,
        check_key=row.check_key, age_ms=int(row.age_s * 1000), unknown=row.unknown, members=row.members,
        bytes=row.size_bytes, topics=row.topics, reason=row.reason,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- transactions

REQUEST_ITEMS_MAX = 5_000
LISTED_ROWS_DEFAULT = 1_000


class TransactionService:
    """Implements the rpcs of the gRPC service Transactions, except those about half messages. A method raises the
    errors of the coordinator that it asks; the server answers them to the client."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def _here(self, txn: TxnId) -> RunningCoordinator:
        return await self._broker.transactions.load_owned_coordinator(txn.coordinator)

    async def find(self, request: wire.FindCoordinator, context: CallContext) -> wire.CoordinatorReply:
        coordinators = self._broker.transactions
        owner = await coordinators.find_owner(request.coordinator)
        return wire.CoordinatorReply(
            owner=find_listener_endpoint(owner, request.listener), here=owner.name == self._broker.name,
            coordinators=await coordinators.ensure_coordinator_count(),
        )  # fmt: skip

    async def begin(self, request: wire.BeginRequest, context: CallContext) -> wire.BeginReply:
        coordinator = await self._broker.transactions.load_owned_coordinator(request.coordinator)
        tag = _tag(request.sink) if request.HasField("sink") else None
        begun = await coordinator.begin_transactions(
            context.principal.name, request.count, request.timeout_ms / 1000, name=request.name, holder=request.holder,
            tag=tag, adopt=request.sink.adopt, address=context.peer,
        )  # fmt: skip
        return wire.BeginReply(
            first=wire.TransactionId(most=coordinator.number, least=begun.first) if begun.ids else None,
            count=begun.ids, lease_ms=int(begun.lease_s * 1000), already=begun.already, holder=begun.holder,
        )  # fmt: skip

    async def end(self, request: wire.EndRequest, context: CallContext) -> wire.EndReply:
        from ..transaction.coordinator import ANSWER_TIMEOUT_S  # with the coordinators, which a start does not load

        _bounded(request.items)
        running = await self._running({item.txn.most for item in request.items})
        together, owner, turns = CoordinatorRequestBatch(), context.principal.name, EventLoopSlices(
            self._broker.world.clock
        )
        for item in request.items:
            _ask_end(running[item.txn.most], together.add_request(), item, owner)
            if turns.is_slice_used_up:
                await turns.begin_slice()
        results, reply = await together.wait_answers(ANSWER_TIMEOUT_S), wire.EndReply()
        for item, result in zip(request.items, results, strict=True):
            reply.items.append(_reply(item.txn, result))
            if turns.is_slice_used_up:
                await turns.begin_slice()
        return reply

    async def _running(self, numbers: Iterable[int]) -> dict[int, RunningCoordinator | MagnetarError]:
        """Returns for each number the coordinator that runs at this broker, after loading it if necessary, or the error
        with which that failed."""
        here = self._broker.transactions.find_loaded_coordinator
        found: dict[int, RunningCoordinator | MagnetarError] = {}
        missing = []
        for number in numbers:
            if (running := here(number)) is not None:
                found[number] = running
            else:
                missing.append(number)
        if missing:
            found.update(zip(missing, await asyncio.gather(*map(self._loaded, missing)), strict=True))
        return found

    async def _loaded(self, number: int) -> RunningCoordinator | MagnetarError:
        try:
            return await self._broker.transactions.load_owned_coordinator(TxnId.from_numbers(number, 0).coordinator)
        except MagnetarError as error:
            return error

    async def status(self, request: wire.StatusRequest, context: CallContext) -> wire.StatusReply:
        _bounded(request.txns)
        owner = context.principal.name
        asked = [_answered(each, partial(self._status, each, owner)) for each in request.txns]
        return wire.StatusReply(items=await asyncio.gather(*asked))

    async def _status(self, asked: wire.TransactionId, owner: str) -> TxnState:
        txn = parse_txn_id(asked)
        return await (await self._here(txn)).get_status(txn, owner)

    async def commit_batch(self, request: wire.CommitBatchRequest, context: CallContext) -> wire.CommitBatchReply:
        _bounded(request.items)
        txns = {parse_txn_id(item.txn): _participants(item) for item in request.items}
        numbers = {txn.coordinator for txn in txns} or {request.coordinator}
        if len(numbers) != 1:
            raise InvalidRequest("a batch is of one coordinator")
        coordinator = await self._broker.transactions.load_owned_coordinator(numbers.pop())
        tag = _tag(request.sink) if request.sink.sink_id else None
        return wire.CommitBatchReply(
            already=await coordinator.commit_batch(context.principal.name, txns, tag, adopt=request.sink.adopt)
        )

    async def sink_status(self, request: wire.SinkRequest, context: CallContext) -> wire.SinkReply:
        running = await self._broker.transactions.load_owned_coordinator(request.coordinator)
        found = running.core.table.find_sink_batch(request.sink_id, context.principal.name)
        if found is None:
            return wire.SinkReply(batch=-1)
        return wire.SinkReply(known=True, query_id=found.query_id, batch=found.batch)

    async def join(self, request: wire.JoinRequest, context: CallContext) -> wire.JoinReply:
        _bounded(request.items)
        return wire.JoinReply(items=await asyncio.gather(*map(self._join, request.items)))

    async def _join(self, item: wire.JoinItem) -> wire.TransactionReply:
        try:
            txn, topic = parse_txn_id(item.txn), TopicName.parse(item.topic)
            owner = item.owner if item.HasField("owner") else None
            joined = await (await self._here(txn)).join_transaction(txn, topic.full, owner)
        except MagnetarError as error:
            return wire.TransactionReply(txn=item.txn, error=to_wire(error))
        told = encode_settlement(joined, topic) if isinstance(joined, Settlement) else None
        return wire.TransactionReply(
            txn=item.txn, state=_state(convert_join_answer_to_state(joined)), settlement=told,
            forgotten=joined.name if isinstance(joined, ForgottenOutcome) else None,
        )  # fmt: skip

    async def abort_open(self, request: wire.AbortOpenRequest, context: CallContext) -> wire.AbortOpenReply:
        _bounded(request.items)
        return wire.AbortOpenReply(items=await asyncio.gather(*map(self._abort_open, request.items)))

    async def _abort_open(self, item: wire.AbortOpenItem) -> wire.AbortOpenDone:
        try:
            txn = parse_txn_id(item.txn)
            found = await (await self._here(txn)).abort_if_open(txn, only_tell=item.only_tell)
        except MagnetarError as error:
            return wire.AbortOpenDone(error=to_wire(error))
        return wire.AbortOpenDone(found=_row(txn.coordinator, found))

    async def settle(self, request: wire.SettleRequest, context: CallContext) -> wire.SettleReply:
        _bounded(request.items)
        by_topic: dict[str, list[tuple[int, wire.Settlement]]] = defaultdict(list)
        for number, item in enumerate(request.items):
            by_topic[item.topic].append((number, item))
        settled = await asyncio.gather(*[self._settle(topic, items) for topic, items in by_topic.items()])
        return wire.SettleReply(items=[done for each in settled for done in each])

    async def _settle(self, topic: str, items: Sequence[tuple[int, wire.Settlement]]) -> list[wire.Done]:
        errors: Sequence[MagnetarError | None]
        try:
            settlements = [
                Settlement(
                    parse_txn_id(it.txn), it.committed, it.entries, Position(it.last.ledger_id, it.last.entry_id)
                )
                for _, it in items
            ]  # fmt: skip
            errors = await self._broker.topic_transaction_settler.settle_at_own_topic(
                TopicName.parse(topic), settlements
            )
        except MagnetarError as error:
            errors = [error] * len(items)
        return [
            wire.Done(request_id=number, error=to_wire(error) if error is not None else None)
            for (number, _), error in zip(items, errors, strict=True)
        ]


SERVICE_CLASSES = (TransactionService, HalfMessageService)
"""The Transactions service: each of its rpcs is a method of one of them."""


class TransactionAdminService:
    """Implements the rpcs of the gRPC service Admin about transactions. A method raises the errors of the coordinator
    that it asks; the server answers them to the client."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker

    async def list_transactions(
        self, request: wire.ListTransactionsRequest, context: CallContext
    ) -> wire.ListTransactionsReply:
        txn = parse_txn_id(request.txn) if request.HasField("txn") else None
        number = request.coordinator if txn is None else txn.coordinator
        if not await self._broker.transactions.has_been_loaded(number):
            return wire.ListTransactionsReply(ledger_id=-1)  # and it is not loaded for the question
        coordinator = await self._broker.transactions.load_owned_coordinator(number)
        found, ledger = coordinator.statistics(), coordinator.log.current_ledger_usage
        rows = coordinator.list_transactions(txn, min(request.limit or LISTED_ROWS_DEFAULT, REQUEST_ITEMS_MAX))
        return wire.ListTransactionsReply(
            items=[_row(number, row) for row in rows], open=found["open"], prepared=found["prepared"],
            unsettled=found["unsettled"], epoch=coordinator.epoch, committed=found["committed"],
            aborted=found["aborted"], next_least=coordinator.core.table.next_id,
            done_below=coordinator.core.table.lowest_unsettled_id,
            loading_ms=coordinator.loading_ms, loaded_ms=coordinator.loaded_ms, ledger_id=ledger[0],
            ledger_entries=ledger[1], ledger_bytes=ledger[2],
        )  # fmt: skip

    async def abort_transaction(self, request: wire.TransactionId, context: CallContext) -> wire.TransactionReply:
        txn = parse_txn_id(request)
        state = await (await self._broker.transactions.load_owned_coordinator(txn.coordinator)).abort_by_admin(txn)
        return wire.TransactionReply(txn=request, state=_state(state))

    async def detach_transaction(self, request: wire.DetachTransactionRequest, context: CallContext) -> None:
        txn = parse_txn_id(request.txn)
        coordinator = await self._broker.transactions.load_owned_coordinator(txn.coordinator)
        await coordinator.remove_participant(txn, TopicName.parse(request.topic).full)

    async def topic_transaction(self, request: wire.TopicTransactionRequest, context: CallContext) -> TransactionHere:
        topic = await self._broker.load_topic(TopicName.parse(request.topic), create=False)
        return summaries.collect_transaction_stats(topic, parse_txn_id(request.txn))


def parse_txn_id(asked: wire.TransactionId) -> TxnId:
    """Returns the id of a transaction, which a request contains as two numbers. Raises InvalidRequest if the numbers
    are not a valid id."""
    return TxnId.from_numbers(asked.most, asked.least)


def _ask_end(
    running: RunningCoordinator | MagnetarError, question: CoordinatorRequest, item: wire.EndItem, owner: str
) -> None:
    if isinstance(running, MagnetarError):
        question.answer(running)
        return
    try:
        running.end_transaction_nowait(
            question, parse_txn_id(item.txn), _verb(item.verb), owner, _participants(item),
            prepared_s=item.prepared_ms / 1000, visible=item.visible,
        )  # fmt: skip
    except MagnetarError as error:
        question.answer(error)


def _reply(txn: wire.TransactionId, result: object) -> wire.TransactionReply:
    if isinstance(result, MagnetarError):
        return wire.TransactionReply(txn=txn, error=to_wire(result))
    assert isinstance(result, TxnState), "the question is about a state"
    return wire.TransactionReply(txn=txn, state=_state(result))


async def _answered(txn: wire.TransactionId, work: Callable[[], Awaitable[TxnState]]) -> wire.TransactionReply:
    """Returns the reply to one item of a request: the state that `work` returns, or its error. `work` is called only
    here: if this task is cancelled before it starts, no coroutine is left unawaited."""
    try:
        return wire.TransactionReply(txn=txn, state=_state(await work()))
    except MagnetarError as error:
        return wire.TransactionReply(txn=txn, error=to_wire(error))


def _verb(number: int) -> TransactionEndVerb:
    try:
        return TransactionEndVerb(number)
    except ValueError:
        raise InvalidRequest(f"{number} is no way to end a transaction") from None


def _state(state: TxnState) -> str:
    return state.name


def _bounded(items: Sequence[object]) -> None:
    if len(items) > REQUEST_ITEMS_MAX:
        raise InvalidRequest(f"{len(items)} items in one request are more than {REQUEST_ITEMS_MAX}")


def _participants(item: wire.EndItem) -> list[Participant]:
    return [Participant(_full(each.topic), each.entries, *_position(each)) for each in item.participants]


@lru_cache(1_000)
def _full(topic: str) -> str:
    """Returns the full name of a topic. Raises InvalidName. The results are cached, as most requests name the same
    topics."""
    return TopicName.parse(topic).full


def _position(participant: wire.Participant) -> Position:
    if not participant.HasField("last"):
        return Position(-1, -1)
    return Position(participant.last.ledger_id, participant.last.entry_id)


def _tag(sink: wire.SinkTag) -> SinkBatchTag:
    if not sink.sink_id:
        raise InvalidRequest("a sink has an id")
    return SinkBatchTag(sink.sink_id, sink.query_id, sink.batch, sink.run)


def _row(number: int, row: TransactionRow) -> wire.TransactionInfo:
    tag = row.tag
    return wire.TransactionInfo(
        txn=wire.TransactionId(most=number, least=row.txn), state=_state(row.state),
        owner=row.owner, name=row.name, age_ms=int(row.age_s * 1000), remaining_ms=int(row.left_s * 1000),
        sink=wire.SinkTag(sink_id=tag.sink_id, query_id=tag.query_id, batch=tag.batch, run=tag.run) if tag else None,
        topics=row.waiting, reason=row.reason, address=row.address, timeout_ms=int(row.timeout_s * 1000),
    )  # fmt: skip
