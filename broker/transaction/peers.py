"""Requests about transactions to other brokers (`TransactionPeerClient`): joins to the owner of a coordinator,
settlements to the owner of a topic.

All items for one broker that are queued in one turn of the event loop are sent in one request. There is one channel per
broker, open until `close`. Each request has a deadline; without an answer the outcome is unknown, and the caller asks
again. Guards: tests/broker/grpc/test_transactions.py.

`CoordinatorRequestBatch` waits for the answers to all requests that arrived in one RPC, without a task for each.

    requests = CoordinatorRequestBatch()
    running.end_transaction_nowait(requests.add_request(), txn, TransactionEndVerb.COMMIT, …)    for each request
    results = await requests.wait_answers(timeout_s)           in the order in which the requests were added

A CoordinatorRequest is the `request` of an intent. Its first answer counts. A request without an answer in time gets
TimedOut: its outcome is unknown. Guard: tests/broker/transaction/test_together.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from google.protobuf.message import Message

from ...proto import wire_pb2 as wire
from ...proto.errors import BackPressure, ConnectionLost, MagnetarError, TimedOut, from_wire
from ...proto.names import Position, TopicName
from ...proto.states import ForgottenOutcome, TxnId, TxnState
from ...runtime.network import Channel, Endpoint, Rpc, World, find_rpc
from ...runtime.tasks import Tasks
from ..common.retry import LogThrottle
from ..common.transactions import JoinAnswer, ReportedTransaction, Settlement

if TYPE_CHECKING:
    from .intents_core import IntentResult

REQUEST_TIMEOUT_S = 15.0
ITEMS_PER_REQUEST_MAX = 1_000
"""Most items of one request: about 150 KB."""
WAITING_ITEMS_MAX = 100_000
"""Most items that wait for one broker. If there are more, a join is refused (BackPressure), and a settlement is sent
later."""


class _Queue(NamedTuple):
    """The queue for one broker and one rpc."""

    items: list[tuple[Message, asyncio.Future[Any]]]


class TransactionPeerClient:
    """Sends requests about transactions to other brokers: joins, aborts, and settlements."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._channels: dict[str, Channel] = {}
        self._queues: dict[tuple[str, str, int], _Queue] = {}
        self._tasks = Tasks()

    async def join_transaction(
        self, endpoint: str, txn: TxnId, topic: TopicName, owner: str | None = None
    ) -> JoinAnswer:
        """Sends a join to the broker at `endpoint`, which owns the coordinator, and returns the answer. `owner`: the
        role that writes in the transaction; None: one that may write in every transaction. Raises the error that this
        broker answers, such as NotOwner or TransactionForgotten; BackPressure if WAITING_ITEMS_MAX items wait for it.
        After ConnectionLost and TimedOut the outcome is unknown."""
        item = wire.JoinItem(txn=wire.TransactionId(most=txn.most, least=txn.least), topic=topic.full, owner=owner)
        reply = await self._ask(endpoint, "Join", item, txn.most)
        return read_join_answer(txn, reply)

    async def abort_if_open(self, endpoint: str, txn: TxnId, *, only_tell: bool) -> ReportedTransaction:
        """Asks the broker at `endpoint`, which owns the coordinator, to abort a transaction if it is open. Returns the
        state of the transaction afterwards. `only_tell`: aborts nothing, only asks for the state. Raises the same
        errors as `join_transaction`."""
        item = wire.AbortOpenItem(txn=wire.TransactionId(most=txn.most, least=txn.least), only_tell=only_tell)
        reply = await self._ask(endpoint, "AbortOpen", item, txn.most)
        if reply.HasField("error"):
            raise from_wire(reply.error)
        found = reply.found
        return ReportedTransaction(
            txn, TxnState(found.state), found.owner, found.name, found.address, found.sink.sink_id,
            found.age_ms / 1000, found.remaining_ms / 1000,
        )  # fmt: skip

    async def settle(
        self, endpoint: str, topic: TopicName, settlements: Sequence[Settlement]
    ) -> list[MagnetarError | None]:
        """Sends settlements to the broker at `endpoint`, which owns the topic. Returns one value for each: None if the
        topic has stored the outcome, else its error. Raises BackPressure if WAITING_ITEMS_MAX items wait for that
        broker; ConnectionLost or TimedOut if it does not answer."""
        items = [encode_settlement(each, topic) for each in settlements]
        replies = await asyncio.gather(*[self._ask(endpoint, "Settle", item) for item in items])
        return [from_wire(each.error) if each.HasField("error") else None for each in replies]

    def _ask(self, endpoint: str, method: str, item: Message, group: int = -1) -> asyncio.Future[Any]:
        """Queues the item, and returns a future of its reply. The items that are queued for one `group` in one turn of
        the event loop are sent in one request. Raises BackPressure if too many items wait for that broker."""
        key = endpoint, method, group
        queue = self._queues.get(key)
        if queue is None:
            queue = self._queues[key] = _Queue([])
            self._tasks.spawn(self._work(key), f"transactions {method} at {endpoint}")
        if len(queue.items) >= WAITING_ITEMS_MAX:
            raise BackPressure(f"broker {endpoint} answers too slowly: {len(queue.items)} wait for it")
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        queue.items.append((item, answered))
        return answered

    async def _work(self, key: tuple[str, str, int]) -> None:
        """Sends the queued items of one turn together. Several requests may be in flight."""
        await asyncio.sleep(0)
        items = self._queues.pop(key).items
        for start in range(0, len(items), ITEMS_PER_REQUEST_MAX):
            await self._send(key[0], key[1], items[start : start + ITEMS_PER_REQUEST_MAX])

    async def _send(self, endpoint: str, method: str, items: list[tuple[Message, asyncio.Future[Any]]]) -> None:
        asked: Rpc[Any, Any] = find_rpc("Transactions", method)
        try:
            found = await self._channel(endpoint).call(
                asked, asked.request(items=[item for item, _ in items]), timeout_s=REQUEST_TIMEOUT_S
            )
            replies = _by_item(found, len(items)) if method == "Settle" else list(found.items)
            if len(replies) != len(items):
                raise ConnectionLost(f"broker {endpoint} answered {len(replies)} of {len(items)} items")
        except MagnetarError as error:
            for _, answered in items:
                if not answered.done():
                    answered.set_exception(error)
            return
        for (_, answered), reply in zip(items, replies, strict=True):
            if not answered.done():
                answered.set_result(reply)

    def _channel(self, endpoint: str) -> Channel:
        channel = self._channels.get(endpoint)
        if channel is None:
            channel = self._channels[endpoint] = self._world.network.connect(Endpoint.parse(endpoint))
        return channel

    async def close(self) -> None:
        """Cancels the requests that wait or are in flight, and closes the channels."""
        await self._tasks.close()
        for queue in self._queues.values():
            for _, answered in queue.items:
                answered.cancel()
        self._queues.clear()
        for channel in self._channels.values():
            await channel.close()
        self._channels.clear()


def read_join_answer(txn: TxnId, reply: wire.TransactionReply) -> JoinAnswer:
    """Returns the answer to a join that the reply contains. Raises the error that the reply contains."""
    if reply.HasField("error"):
        raise from_wire(reply.error)
    if reply.HasField("settlement"):
        told = reply.settlement
        return Settlement(txn, told.committed, told.entries, Position(told.last.ledger_id, told.last.entry_id))
    if reply.forgotten:
        known = int(reply.forgotten) == ForgottenOutcome.DISCARDED
        return ForgottenOutcome.DISCARDED if known else ForgottenOutcome.UNKNOWN
    return TxnState(reply.state)


def encode_settlement(settlement: Settlement, topic: TopicName) -> wire.Settlement:
    """Returns the settlement of the topic as a message of the protocol."""
    txn, last = settlement.txn, settlement.last
    return wire.Settlement(
        txn=wire.TransactionId(most=txn.most, least=txn.least), topic=topic.full, committed=settlement.committed,
        entries=settlement.entries, last=wire.Position(ledger_id=last.ledger_id, entry_id=last.entry_id),
    )  # fmt: skip


def _by_item(reply: wire.SettleReply, count: int) -> list[wire.Done]:
    """Returns the answers in the order of the items. An item that the reply does not answer gets the error
    ConnectionLost."""
    lost = wire.Done(error=wire.Error(code=ConnectionLost.code, message="the broker did not answer this settlement"))
    found = {done.request_id: done for done in reply.items}
    return [found.get(number, lost) for number in range(count)]


# ------------------------------------------------------------------------------------------------------ settling
# Tells topics how their transactions ended, until each has stored it.
#
#     sender.add_settlement(topic, settlement)      from then on, for as long as this part runs
#     await sender.close()
#
# One worker per topic sends all settlements that wait for that topic together, and repeats those that failed after a
# pause that grows to RETRY_PAUSE_S_MAX. New ones do not wait for that pause: a transaction that a topic cannot store
# delays no other. A topic that is certainly gone counts as settled (`SettlementTransport.settle`). Bound: an outcome is
# in the coordinator's table until it is settled, so there are never more here than there; REQUESTS_AT_ONCE workers send
# at a time. Guards: tests/broker/transaction/test_settling.py.


_LOG = logging.getLogger("magnetar.broker.transactions")

RETRY_PAUSE_S_MIN, RETRY_PAUSE_S_MAX = 0.05, 10.0
TIMER_PAUSE_S_MIN = 0.001
"""Shortest pause worth a timer, in seconds: a shorter one may vanish when it is added to the time of the loop."""
REQUESTS_AT_ONCE = 256
"""Topics to which settlements are sent at a time."""
SETTLEMENTS_PER_REQUEST_MAX = 1_000
"""Most settlements of one topic in one request."""


class SettlementTransport(Protocol):
    """Delivers settlements (outcomes of transactions) to topics, whichever broker owns a topic.
    broker/node/internal_producer.py implements it; SettlementSender calls it."""

    async def settle(self, topic: TopicName, settlements: Sequence[Settlement]) -> list[MagnetarError | None]:
        """Sends settlements to the topic. Returns one value for each settlement: None if the topic has stored the
        outcome or is certainly deleted; else the error. If this call raises an error, all of the settlements failed."""


class _Waiting(NamedTuple):
    """The settlements for one topic that are not sent yet."""

    new: list[Settlement]
    failed: list[Settlement]
    wake: asyncio.Event


class SettlementSender:
    """Sends outcomes of transactions to topics, again and again until each topic has stored them. Then calls the
    function `settled(settlement, topic)`, once for each settlement. `failures`: how many requests failed."""

    def __init__(self, world: World, topics: SettlementTransport, settled: Callable[[Settlement, str], None]) -> None:
        self._world = world
        self._topics = topics
        self._settled = settled
        self._waiting: dict[str, _Waiting] = {}  # by topic
        self._sending = asyncio.Semaphore(REQUESTS_AT_ONCE)
        self._tasks = Tasks()
        self._throttle = LogThrottle(world.clock)
        self.failures = 0

    def add_settlement(self, topic: str, settlement: Settlement) -> None:
        """Sends the settlement to the topic from now on, in a task."""
        waiting = self._waiting.get(topic)
        if waiting is None:
            self._waiting[topic] = _Waiting([settlement], [], asyncio.Event())
            self._tasks.spawn(self._work(topic), f"settle {topic}")
        else:
            waiting.new.append(settlement)
            waiting.wake.set()

    async def _work(self, topic: str) -> None:
        """Sends the waiting settlements of the topic until there are none. While this runs, `_waiting` has an item for
        the topic."""
        waiting, pause_s, name = self._waiting[topic], RETRY_PAUSE_S_MIN, TopicName.parse(topic)
        clock, again_at = self._world.clock, 0.0
        while waiting.new or waiting.failed:
            if not waiting.new and (rest_s := again_at - clock.monotonic()) > TIMER_PAUSE_S_MIN:
                waiting.wake.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rest_s):
                        await waiting.wake.wait()
                continue
            is_new = bool(waiting.new)
            source = waiting.new if is_new else waiting.failed
            batch = source[:SETTLEMENTS_PER_REQUEST_MAX]
            del source[:SETTLEMENTS_PER_REQUEST_MAX]
            failed = await self._send(name, batch)
            self.failures += bool(failed)
            if failed and (not is_new or not waiting.failed):
                again_at = clock.monotonic() + pause_s * (0.5 + self._world.rng.random())
                pause_s = min(RETRY_PAUSE_S_MAX, 2 * pause_s)
            elif not failed and not waiting.failed:
                pause_s = RETRY_PAUSE_S_MIN
            waiting.failed.extend(failed)
        del self._waiting[topic]

    async def _send(self, topic: TopicName, batch: list[Settlement]) -> list[Settlement]:
        """Sends settlements to a topic, and returns those that failed."""
        try:
            async with self._sending:
                errors = await self._topics.settle(topic, batch)
        except MagnetarError as error:
            errors = [error] * len(batch)
        except Exception as error:  # a fault of one topic must not leave its transactions unsettled for ever
            _LOG.exception("%s: transactions are not settled", topic)
            errors = [MagnetarError(str(error))] * len(batch)
        failed = []
        for settlement, each in zip(batch, errors, strict=True):
            if each is None:
                self._settled(settlement, topic.full)
            else:
                failed.append(settlement)
                if self._throttle.should_log(each):
                    _LOG.warning("%s has not settled %s, it is told again: %s", topic, settlement.txn, each)
        return failed

    @property
    def waiting_topic_count(self) -> int:
        """Returns the number of topics that still have to store a settlement."""
        return len(self._waiting)

    async def close(self) -> None:
        """Stops sending. Settlements that are not stored yet are dropped; the next epoch sends them again."""
        await self._tasks.close()


# ------------------------------------------------------------------------------------ requests of one RPC
class CoordinatorRequest:
    """One request to a coordinator, and its answer. `is_answered`: True if `result` is the answer."""

    __slots__ = ("_together", "is_answered", "result")

    def __init__(self, together: CoordinatorRequestBatch) -> None:
        self._together = together
        self.is_answered = False
        self.result: IntentResult = None

    def answer(self, result: IntentResult) -> None:
        """Stores the answer to the request. Later calls have no effect."""
        if not self.is_answered:
            self.is_answered, self.result = True, result
            self._together.on_answered()


class CoordinatorRequestBatch:
    """The requests to coordinators that arrived in one RPC, so that their answers can be awaited together."""

    def __init__(self) -> None:
        self._questions: list[CoordinatorRequest] = []
        self._left = 0
        self._all: asyncio.Future[None] | None = None

    def add_request(self) -> CoordinatorRequest:
        """Adds a request to the batch and returns it, to be passed to a coordinator as the `request` of an intent."""
        question = CoordinatorRequest(self)
        self._questions.append(question)
        self._left += 1
        return question

    def on_answered(self) -> None:
        """Called once for each request, when it is answered."""
        self._left -= 1
        if not self._left and self._all is not None and not self._all.done():
            self._all.set_result(None)

    async def wait_answers(self, timeout_s: float) -> list[IntentResult]:
        """Waits for the answers to all requests, and returns them in the order of the requests. An error is returned,
        not raised. A request without an answer after `timeout_s` seconds gets TimedOut."""
        if self._left:
            self._all = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._all
        late: MagnetarError = TimedOut(f"the coordinator has no answer within {timeout_s:g} s: ask again")
        return [each.result if each.is_answered else late for each in self._questions]
