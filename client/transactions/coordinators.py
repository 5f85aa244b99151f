"""The requests of a client to transaction coordinators (`CoordinatorClient`): to find a coordinator, to get ids for new
transactions, to end transactions and to ask for their status. Also the batches of a sink (`Batch` and the functions
that begin and commit the transactions of a batch).

    await coordinators.begin_transaction(timeout_ms)    returns an id, mostly one that was leased in advance
    await coordinators.begin_named_transaction(name, timeout_ms)
    await coordinators.end_transaction(item)            returns the coordinator's answer
    await coordinators.get_status(txn)

**Where.** Any broker knows which broker runs a coordinator; the client caches the address until that broker refuses a
request or the connection to it breaks. **Which.** A client asks a random coordinator for its first block of leased
ids, and the next coordinator for each further block. So transactions that end at the same time mostly have the same
coordinator, and clients are spread over all coordinators. A transaction name always has the same coordinator.
**Ends.** All transactions that end in one turn of the event loop are sent to their coordinator in one request, with at
most END_REQUEST_ITEMS_MAX items. At most END_REQUESTS_IN_FLIGHT requests are in flight to one coordinator; later ends
wait, and are then sent together. Ends that wait until all consumers can see the transaction have requests of their own.
An end is sent again until it is answered or its time is over: a repeated end gets the same answer. Each answer, and
each failed request, makes room for the next request. Guards: tests/client/transactions/test_transactions.py.

Also in this file, under the heading "leased_ids": the blocks of transaction ids that coordinators gave in advance
(`LeasedTransactionIds`)."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from itertools import chain, repeat
from threading import Lock
from typing import Any, NamedTuple

from google.protobuf.message import Message

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, MagnetarError, TimedOut, Unavailable, from_wire
from ...proto.states import TxnId, TxnState, coordinator_of
from ...runtime.network import Channel, Endpoint, find_rpc
from ...runtime.tasks import Tasks
from ..common.checks import (
    BOOLEAN_CHECK,
    TEXT_CHECK,
    CheckTable,
    WrongValue,
    check_parameters,
    make_instance_check,
    make_whole_number_check,
)
from ..common.closing import Deadlines
from ..common.errors import InvalidTxnStatusError, OutcomeUnknown, translate_error
from ..common.loggers import run_logging_errors
from ..connect.connections import Connections

# ---------------------------------------------------------------------------------------------------- leased_ids
# Ids of transactions that a coordinator gave ahead, in blocks: a transaction begins without a request.
#
#     ids = LeasedTransactionIds()
#     ids.take_leased_id(now)        an id, or None: ask for `ids.wanted` more, of the next coordinator
#     ids.add_lease(first, count, lease_s, asked_at)
#     ids.is_running_low      more should be asked for, while there still are some
#
# A block is asked for when few are left. It is twice as large as the one before when that one was used in time, and
# half as large when it became void: an idle client holds few. An id is taken in the first half of its lease only: it is
# void when it is not used by the end of it. A coordinator that is lost voids all that it leased; it may be there, and
# hold them open to the end of the lease, so the next block is small. Any thread may call all of it. Guard:
# tests/client/transactions/test_leased_ids.py.


LEASED_IDS_MIN, LEASED_IDS_MAX = 8, 1024
"""Number of ids in the first leased block, and in the largest: one client begins at most that many transactions in 0.2
s."""


class LeasedTransactionIds:
    """The transaction ids that coordinators gave to one client in advance, all for transactions with the same time-out.
    `wanted`: how many ids the next request should ask for. Times are seconds of one monotonic clock. All methods may be
    called from any thread."""

    def __init__(self) -> None:
        self.wanted = LEASED_IDS_MIN
        self._lock = Lock()
        self._blocks: deque[tuple[TxnId, int, float]] = deque()  # next one, how many, when they are void

    def take_leased_id(self, now: float) -> TxnId | None:
        """Removes and returns an id; None if there is no id in the first half of its lease."""
        with self._lock:
            while self._blocks:
                first, count, void_at = self._blocks.popleft()
                if now >= void_at:
                    self.wanted = max(LEASED_IDS_MIN, self.wanted // 2)
                    continue
                if count > 1:
                    self._blocks.appendleft((TxnId(first.most, first.least + 1), count - 1, void_at))
                return first
            return None

    def add_lease(self, first: TxnId, count: int, lease_s: float, asked_at: float) -> None:
        """Adds `count` leased transaction ids with consecutive numbers, of which `first` is the first. The lease lasts
        `lease_s` seconds from the time `asked_at`, when it was requested."""
        assert count > 0, "a lease has ids"
        with self._lock:
            self._blocks.append((first, count, asked_at + lease_s / 2))
            if count >= self.wanted:
                self.wanted = min(LEASED_IDS_MAX, 2 * self.wanted)

    def discard(self, coordinator: int) -> None:
        """Drops the ids of the coordinator `coordinator`. Called when it moved to another broker, or aborted a
        transaction with one of the ids: if it lost its state, its ids are void."""
        with self._lock:
            kept = deque(block for block in self._blocks if block[0].most != coordinator)
            if len(kept) < len(self._blocks):
                self._blocks, self.wanted = kept, LEASED_IDS_MIN

    @property
    def is_running_low(self) -> bool:
        """Returns whether fewer than a quarter of `wanted` ids are left, so that the client should ask for more."""
        with self._lock:
            return sum(count for _, count, _ in self._blocks) < self.wanted // 4

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert LEASED_IDS_MIN <= self.wanted <= LEASED_IDS_MAX, "blocks have their bounds"
        assert all(count > 0 for _, count, _ in self._blocks), "a block has ids"


# -------------------------------------------------------------------------------------------------- coordinators


END_REQUEST_ITEMS_MAX = 1000
END_REQUEST_BYTES_MAX = 128 << 10
"""Most bytes of one request: a quarter of the broker's limit (runtime/network.py `REQUEST_BYTES_MAX`)."""
END_REQUESTS_IN_FLIGHT = 4
LEASED_TIMEOUTS_MAX = 64
"""Most different time-outs for which ids are leased in advance; a transaction with a further time-out asks for its own
id."""


class TransactionEndAnswer(NamedTuple):
    """The coordinator's answer to a request to end a transaction, or to a request for its status. `state`: the state of
    the transaction after the request. `error`: why the coordinator refused, or did not answer; `state` then means
    nothing. None: no error."""

    state: TxnState
    error: MagnetarError | None


class CoordinatorClient:
    """Sends one client's requests to transaction coordinators, and finds the brokers that run them, as the head of the
    module describes. Runs in the client's event loop. Its methods raise the errors of proto/errors.py, untranslated.
    `timeout_ms`: after how many ms the coordinator aborts a transaction that has not ended."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._now = connections.world.clock.monotonic
        self._count = 0  # not known yet
        self._next = 0
        self._owners: dict[int, Channel] = {}
        self._leases: dict[int, LeasedTransactionIds] = {}
        self._refills: dict[int, asyncio.Task[MagnetarError | None]] = {}
        self._holders: dict[str, int] = {}
        self._queues: dict[tuple[int, bool], TransactionEndQueue] = {}
        self._tasks = Tasks()
        self.deadlines = Deadlines(self._now)

    # ------------------------------------------------------------------------------ ids
    async def begin_transaction(self, timeout_ms: int) -> TxnId:
        """Begins a transaction and returns its id. Takes a leased id; if none is left, waits for the answer of a
        coordinator. Raises the error of that request, at the latest when the operation's deadline has passed;
        RuntimeError after `close`."""
        ids = self._leases.get(timeout_ms)
        if ids is None:
            if len(self._leases) >= LEASED_TIMEOUTS_MAX:
                return (await self._begin(wire.BeginRequest(count=1, timeout_ms=timeout_ms)))[0]
            ids = self._leases[timeout_ms] = LeasedTransactionIds()
        while (found := ids.take_leased_id(self._now())) is None:
            failed = await asyncio.shield(self._refill(timeout_ms, ids))
            if failed is not None:
                raise failed
        if ids.is_running_low:
            self._refill(timeout_ms, ids)
        return found

    def begin_with_leased_id(self, timeout_ms: int, soon: Callable[[Callable[[], None]], None]) -> TxnId | None:
        """Begins a transaction with a transaction id that was leased in advance, and returns this id; None if no leased
        id is left. May be called from any thread. `soon(work)` runs `work` in the event loop."""
        ids = self._leases.get(timeout_ms)
        found = ids.take_leased_id(self._now()) if ids is not None else None
        if ids is not None and found is not None and ids.is_running_low:
            soon(lambda: self._refill_quietly(timeout_ms, ids))
        return found

    def _refill_quietly(self, timeout_ms: int, ids: LeasedTransactionIds) -> None:
        if not self._tasks.closed:
            self._refill(timeout_ms, ids)

    def _refill(self, timeout_ms: int, ids: LeasedTransactionIds) -> asyncio.Task[MagnetarError | None]:
        running = self._refills.get(timeout_ms)
        if running is None or running.done():
            running = self._refills[timeout_ms] = self._tasks.spawn(self._lease(timeout_ms, ids), "lease of ids")
        return running

    async def _lease(self, timeout_ms: int, ids: LeasedTransactionIds) -> MagnetarError | None:
        """Leases ids. Returns an error instead of raising it, for the callers that wait. A lease in advance ignores
        the error: the next one tries again."""
        asked_at = self._now()
        try:
            first, reply = await self._begin(wire.BeginRequest(count=ids.wanted, timeout_ms=timeout_ms))
        except MagnetarError as error:
            return error
        ids.add_lease(first, max(1, reply.count), reply.lease_ms / 1000, asked_at)
        return None

    async def _begin(self, request: wire.BeginRequest) -> tuple[TxnId, wire.BeginReply]:
        """Begins transactions at the next coordinator, or at the one after it if that one does not answer or has no
        room."""
        count = await self.count_coordinators()
        longest = self._connections.settings.connection_timeout_s

        async def once() -> wire.BeginReply:
            request.coordinator = self._next % count
            self._next += 1
            reply: wire.BeginReply = await self._ask_once(request.coordinator, "Begin", request, longest)
            return reply

        reply = await self._connections.retry(once)
        return TxnId(reply.first.most, reply.first.least), reply

    async def begin_named_transaction(self, name: str, timeout_ms: int) -> TxnId:
        """Asks the name's coordinator to begin a transaction, and returns its id. The first call of this client takes
        the name over from its present holder, whose transactions are fenced. Later calls raise TransactionFenced if
        another program has taken the name over. Raises the errors of `ask`."""
        request = wire.BeginRequest(
            coordinator=coordinator_of(name, await self.count_coordinators()), count=1, timeout_ms=timeout_ms,
            name=name, holder=self._holders.get(name, 0),
        )  # fmt: skip
        reply: wire.BeginReply = await self.ask(request.coordinator, "Begin", request)
        self._holders[name] = reply.holder
        return TxnId(reply.first.most, reply.first.least)

    def discard_holder_number(self, name: str) -> None:
        """Drops the number by which the coordinator recognizes this client as the holder of the transaction name. The
        next transaction of this client with that name fences the present holder, even if that is this client."""
        self._holders.pop(name, None)

    # ------------------------------------------------------------------------------ ends
    async def end_transaction(self, item: wire.EndItem) -> TransactionEndAnswer:
        """Asks the coordinator to end a transaction, again until it answers, and returns the answer. An error that is
        not retryable is in the answer, not raised. Raises TimedOut, or the last error, when `operation_timeout_seconds`
        have passed or the client is closed."""
        lane = item.txn.most, item.visible
        queue = self._queues.get(lane)
        if queue is None:
            queue = self._queues[lane] = TransactionEndQueue(self, item.txn.most, self._tasks)
        limit_s = self._connections.settings.operation_timeout_s
        deadline = self._now() + limit_s
        backoff = self._connections.backoff()
        while True:
            try:
                answer = await self.deadlines.wait(queue.add(item), deadline)
            except TimeoutError as error:
                if isinstance(error, MagnetarError):
                    raise
                raise TimedOut(f"no answer within {limit_s:g} s to the end of a transaction") from error
            if answer.error is None or not answer.error.retryable:
                return answer
            pause = backoff.next_delay_s()
            if self._tasks.closed or self._now() + pause > deadline:
                raise answer.error
            await asyncio.sleep(pause)

    async def send_end_requests(self, coordinator: int, request: wire.EndRequest) -> wire.EndReply:
        """Sends one request that ends several transactions to their coordinator, and returns the reply. Raises the
        error of the request: there is no retry."""
        longest = self._connections.settings.connection_timeout_s
        if request.items[0].visible:
            longest = self._connections.settings.operation_timeout_s
        reply: wire.EndReply = await self._ask_once(coordinator, "End", request, longest)
        return reply

    async def get_status(self, txn: TxnId) -> TransactionEndAnswer:
        """Asks the coordinator for the state of a transaction, again until it answers, and returns the answer. An error
        such as TransactionForgotten is in the answer, not raised. Raises the last error when the operation's deadline
        has passed."""
        request = wire.StatusRequest(txns=[wire.TransactionId(most=txn.most, least=txn.least)])
        longest = self._connections.settings.connection_timeout_s

        async def once() -> TransactionEndAnswer:
            reply: wire.StatusReply = await self._ask_once(txn.most, "Status", request, longest)
            answer = decode_transaction_reply(reply.items[0]) if reply.items else TransactionEndAnswer(
                TxnState.OPEN, Unavailable("no answer")
            )
            if answer.error is not None and answer.error.retryable:
                self.discard(txn.most)  # it moved, or is moving
                raise answer.error
            return answer

        return await self._connections.retry(once)

    # ------------------------------------------------------------------------------ where they are
    async def count_coordinators(self) -> int:
        """Returns the number of coordinators of the cluster. The first call asks brokers until one answers; when the
        operation's deadline has passed, it raises TimedOut or the last error."""
        if not self._count:
            await self._connections.retry(lambda: self._find(0))
            self._next = self._connections.world.rng.randrange(self._count)
        return self._count

    async def _find(self, coordinator: int) -> Channel:
        asked = await self._connections.next_broker_channel()
        settings = self._connections.settings
        request = wire.FindCoordinator(coordinator=coordinator, listener=settings.listener_name)
        reply: wire.CoordinatorReply = await asked.call(
            find_rpc("Transactions", "Find"), request, timeout_s=settings.connection_timeout_s
        )
        self._count = max(1, reply.coordinators)
        if reply.here:
            found = asked
        elif not reply.owner:
            raise Unavailable(f"no broker has coordinator {coordinator}")
        else:
            try:
                found = self._connections.channel(Endpoint.parse(reply.owner))
            except ValueError as error:
                raise ConnectionLost(f"{reply.owner!r} was named as having coordinator {coordinator}") from error
        self._owners[coordinator] = found
        return found

    async def find_coordinator_channel(self, coordinator: int) -> Channel:
        """Returns a channel to the broker that runs the coordinator, from the cache or by asking a broker. Raises
        Unavailable if no broker runs the coordinator, or the error of the request."""
        return self._owners.get(coordinator) or await self._find(coordinator)

    async def ask(self, coordinator: int, method: str, request: Message) -> Any:
        """Calls the RPC `method` of the service Transactions at the coordinator's broker, and repeats it after
        retryable errors, also at another broker. Returns the reply. Raises the errors of `Connections.retry`: the
        coordinator's error if it is permanent; the last error if the client is closed or no time is left; TimedOut if
        the deadline comes during an attempt."""
        longest = self._connections.settings.connection_timeout_s
        return await self._connections.retry(lambda: self._ask_once(coordinator, method, request, longest))

    async def _ask_once(self, coordinator: int, method: str, request: Message, timeout_s: float) -> Any:
        channel = await self.find_coordinator_channel(coordinator)
        try:
            return await channel.call(find_rpc("Transactions", method), request, timeout_s=timeout_s)
        except MagnetarError:
            self.discard(coordinator)
            raise

    def discard(self, coordinator: int) -> None:
        """Discards the cached address and the leased ids of a coordinator that moved or lost transactions. The next use
        looks the coordinator up again."""
        self._owners.pop(coordinator, None)
        for each in self._leases.values():
            each.discard(coordinator)

    @property
    def is_closed(self) -> bool:
        """Returns whether `close` was called: no coordinator is asked any more."""
        return self._tasks.closed

    async def close(self) -> None:
        """Cancels the requests in flight, whose ends get ConnectionLost, and waits until their tasks have ended."""
        await self._tasks.close()
        self.deadlines.stop()


class TransactionEndQueue:
    """The queue of requests to end transactions at one coordinator: those that wait, and those in flight. It sends all
    ends of one turn of the event loop in one request."""

    def __init__(self, coordinators: CoordinatorClient, coordinator: int, tasks: Tasks) -> None:
        self._coordinators = coordinators
        self._coordinator = coordinator
        self._tasks = tasks
        self._waiting: deque[tuple[wire.EndItem, asyncio.Future[TransactionEndAnswer]]] = deque()
        self._under_way = 0
        self._turn_comes = False

    def add(self, item: wire.EndItem) -> asyncio.Future[TransactionEndAnswer]:
        """Adds the end of a transaction, which is sent later. Returns a future of the answer; a failed request is the
        `error` of the answer. An item whose future is cancelled is not sent."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[TransactionEndAnswer] = loop.create_future()
        self._waiting.append((item, answer))
        if not self._turn_comes:
            self._turn_comes = True
            loop.call_soon(run_logging_errors, self._turn, self._broke)
        return answer

    def _turn(self) -> None:
        self._turn_comes = False
        if self._tasks.closed:
            waiting, self._waiting = self._waiting, deque()
            _resolve(waiting, ())
        while self._waiting and self._under_way < END_REQUESTS_IN_FLIGHT:
            batch: list[tuple[wire.EndItem, asyncio.Future[TransactionEndAnswer]]] = []
            size = 0
            while self._waiting and len(batch) < END_REQUEST_ITEMS_MAX and size < END_REQUEST_BYTES_MAX:
                item, answer = self._waiting.popleft()
                if not answer.done():  # else its caller has left
                    batch.append((item, answer))
                    size += item.ByteSize()
            if batch:
                self._under_way += 1
                sending = self._tasks.spawn(self._send(batch), "ends of transactions")
                sending.add_done_callback(partial(self._on_sent, batch))  # also if it is cancelled before it begins

    async def _send(
        self, batch: list[tuple[wire.EndItem, asyncio.Future[TransactionEndAnswer]]]
    ) -> list[TransactionEndAnswer]:
        """Sends one request that ends the transactions of the batch. Returns the answers in the order of the batch;
        each has the error of the request if that failed."""
        answers: list[TransactionEndAnswer] = []
        try:
            request = wire.EndRequest(items=[item for item, _ in batch])
            reply = await self._coordinators.send_end_requests(self._coordinator, request)
            answers = [decode_transaction_reply(each) for each in reply.items]
            if any(each.error is not None and each.error.retryable for each in answers):
                self._coordinators.discard(self._coordinator)
            missing: MagnetarError = ConnectionLost("the coordinator did not answer to all")
        except MagnetarError as error:
            missing = error
        return answers + [TransactionEndAnswer(TxnState.OPEN, missing)] * (len(batch) - len(answers))

    def _on_sent(
        self, batch: list[tuple[wire.EndItem, asyncio.Future[TransactionEndAnswer]]],
        sent: asyncio.Task[list[TransactionEndAnswer]],
    ) -> None:  # fmt: skip
        self._under_way -= 1
        _resolve(batch, () if sent.cancelled() or sent.exception() is not None else sent.result())
        self._turn()

    def _broke(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, deque()
        for _, answer in waiting:
            if not answer.done():
                answer.set_exception(ConnectionLost(f"the queue of a coordinator failed: {error!r}"))


def _resolve(
    ends: Iterable[tuple[wire.EndItem, asyncio.Future[TransactionEndAnswer]]], answers: Iterable[TransactionEndAnswer]
) -> None:
    """Gives each end its answer; those that have none get ConnectionLost, because the client was closed."""
    lost = TransactionEndAnswer(TxnState.OPEN, ConnectionLost("the client was closed before the coordinator answered"))
    for (_, told), answer in zip(ends, chain(answers, repeat(lost)), strict=False):
        if not told.done():
            told.set_result(answer)


def decode_transaction_reply(reply: wire.TransactionReply) -> TransactionEndAnswer:
    """Converts a coordinator's reply about one transaction to a TransactionEndAnswer."""
    error = from_wire(reply.error) if reply.HasField("error") else None
    return TransactionEndAnswer(TxnState(reply.state), error)


# ------------------------------------------------------------------------------------------------------- batches
# Transactions that commit together, and once: what a sink such as Spark's needs, which writes batches by many tasks.
#
#     batch = Batch("orders", query_id, 17, run)
#     txn = await client.batch_transaction(batch)       None: the sink has batch 17 already; there is nothing to write
#     await producer.send(b"…", txn=txn)
#     await txn.prepare(until=86400)                    from here on it needs neither this client nor its coordinator
#     await client.commit_batch(batch, [txn.id, …])     from any process: all of them, in one record; or ALREADY
#
# **Once.** A sink has a number, of the last batch that was committed, at the coordinator of its id. `commit_batch`
# commits the transactions and that number in one record, and it is ALREADY where the number is as large. What was begun
# for the batch and is not in the record is aborted then. So the rows of a batch count once, however often some were
# written.
# **No sink.** With `sink_id` empty the transactions commit together, and nothing is kept of the batch; all of one `run`
# have one coordinator.
# Guards: tests/client/transactions/test_batches.py.


NUMBER_MAX = (1 << 63) - 1


class Batch(NamedTuple):
    """One attempt of a query to write one of its numbered batches to a sink.

    `sink_id`: the name of the sink; empty: there is no sink, and only the transactions of one `run` commit together.
    `query_id`: the query that writes to the sink. `number`: the number of the batch, from 0. `run`: a random text that
    identifies the attempt. `adopt`: whether this query may take the sink over from another query; its batch numbers
    then start anew. Without `adopt`, writing to a sink of another query raises SinkFenced."""

    sink_id: str
    query_id: str
    number: int
    run: str = ""  # random, of the try
    adopt: bool = False

    def check(self) -> None:
        """Raises InvalidConfiguration if a value is wrong, or if both `sink_id` and `run` are empty."""
        check_parameters(_TABLE, self._asdict())
        if not (self.sink_id or self.run):
            raise WrongValue("a batch has a sink_id, or a run")


_TABLE: CheckTable = {
    "sink_id": TEXT_CHECK, "query_id": TEXT_CHECK, "number": make_whole_number_check(0, NUMBER_MAX), "run": TEXT_CHECK,
    "adopt": BOOLEAN_CHECK,
}
BATCH_CHECK = make_instance_check(Batch, optional=False)


class BatchOutcome(Enum):
    """The possible outcomes of `commit_batch`. COMMITTED: this attempt was committed. ALREADY: an earlier attempt was
    committed; the rows of that attempt count."""

    COMMITTED = "COMMITTED"
    ALREADY = "ALREADY"


class SinkStatus(NamedTuple):
    """The status of a sink: the number of the last committed batch (`batch`), and the id of the query that wrote it
    (`query_id`)."""

    query_id: str
    batch: int  # the last one that was committed


async def begin_sink_batch(coordinators: CoordinatorClient, batch: Batch, timeout_ms: int) -> TxnId | None:
    """Asks the sink's coordinator to begin a transaction that writes a part of the batch. Returns its id; None if the
    sink has committed the batch already. Raises SinkFenced if another query writes to the sink. `timeout_ms`: after how
    many ms the coordinator aborts a transaction that has not ended. Raises the errors of `CoordinatorClient.ask`."""
    request = wire.BeginRequest(coordinator=await _home(coordinators, batch), count=1, timeout_ms=timeout_ms)
    if batch.sink_id:
        request.sink.CopyFrom(_tag(batch))
    reply: wire.BeginReply = await coordinators.ask(request.coordinator, "Begin", request)
    return None if reply.already else TxnId(reply.first.most, reply.first.least)


async def commit_batch(coordinators: CoordinatorClient, batch: Batch, txns: Sequence[TxnId]) -> BatchOutcome:
    """Commits the prepared transactions `txns` of a batch together; waits until the commit is durable. Returns ALREADY
    if the sink has committed the batch before, by these or other transactions. Raises TransactionAborted if one of them
    is aborted: then none is committed. Raises SinkFenced if another query writes to the sink, OutcomeUnknown if the
    commit got no answer in time, and the errors of `count_coordinators`. Without a sink and without `txns` it commits
    nothing and returns COMMITTED."""
    number = await _home(coordinators, batch)
    if not txns and not batch.sink_id:
        return BatchOutcome.COMMITTED
    request = wire.CommitBatchRequest(coordinator=number)
    if batch.sink_id:
        request.sink.CopyFrom(_tag(batch._replace(run="")))
    for txn in dict.fromkeys(txns):
        request.items.add(verb=wire.EndItem.COMMIT).txn.CopyFrom(wire.TransactionId(most=txn.most, least=txn.least))
    try:
        reply: wire.CommitBatchReply = await coordinators.ask(number, "CommitBatch", request)
    except MagnetarError as error:
        if error.definite and not error.retryable:
            raise
        raise OutcomeUnknown(
            f"batch {batch.number} of sink {batch.sink_id!r}: its commit got no answer ({error.message}); ask"
            " sink_status, or commit it again"
        ) from error
    return BatchOutcome.ALREADY if reply.already else BatchOutcome.COMMITTED


async def get_sink_status(coordinators: CoordinatorClient, sink_id: str) -> SinkStatus | None:
    """Returns the last batch that was committed to a sink, and the query that wrote it; None if no batch was committed.
    Raises the errors of `CoordinatorClient.ask`."""
    number = coordinator_of(sink_id, await coordinators.count_coordinators())
    request = wire.SinkRequest(coordinator=number, sink_id=sink_id)
    reply: wire.SinkReply = await coordinators.ask(number, "SinkStatus", request)
    return SinkStatus(reply.query_id, reply.batch) if reply.known else None


async def end_prepared_transaction(coordinators: CoordinatorClient, txn: TxnId, *, is_commit: bool) -> None:
    """Commits (`is_commit`) or aborts a transaction that another program may have prepared. Does nothing if it has
    ended in that way. Raises the coordinator's error as an exception of the SDK; InvalidTxnStatusError if it has ended
    in the other way, or if an open transaction should be committed: only its own client knows which of its messages are
    stored. Raises TimedOut or the last error, untranslated, if no coordinator answers in time."""
    state, error = await coordinators.get_status(txn)
    if error is not None:
        raise translate_error(error) from error
    if is_commit and state is TxnState.OPEN:
        raise InvalidTxnStatusError(f"transaction {txn} is open: its own client commits it, or prepares it")
    item = wire.EndItem(verb=wire.EndItem.COMMIT if is_commit else wire.EndItem.ABORT)
    item.txn.most, item.txn.least = txn
    state, error = await coordinators.end_transaction(item)
    if error is not None:
        raise translate_error(error) from error
    if state is not (TxnState.COMMITTED if is_commit else TxnState.ABORTED):
        raise InvalidTxnStatusError(f"transaction {txn} is {state.name.lower()}")


async def _home(coordinators: CoordinatorClient, batch: Batch) -> int:
    return coordinator_of(batch.sink_id or batch.run, await coordinators.count_coordinators())


def _tag(batch: Batch) -> wire.SinkTag:
    return wire.SinkTag(
        sink_id=batch.sink_id, query_id=batch.query_id, batch=batch.number, run=batch.run, adopt=batch.adopt
    )
