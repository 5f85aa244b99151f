"""The acknowledgements that one partition's consumer sends in transactions. The broker answers each request.

    acks.acknowledge(txn, which, cumulative=False, waiter=None)      in the event loop
    acks.on_connected(), acks.fail_all(error)                        the consumer is connected again, or finished

The acknowledgements of one transaction in one turn of the event loop are sent in one request, which contains nothing
else. The broker answers when the acknowledgements are durable as pending ones; from then on they survive any crash
until their transaction ends. A request is sent again if the connection breaks before the answer, or if the broker
cannot process it now: an acknowledgement that is pending in the same transaction already is no conflict. The requests
of a transaction end with the transaction.
**Delivered twice.** A message that is redelivered while the program still has its first delivery (the connection broke,
or an abort freed another message of its batch) is processed twice. A transaction that acknowledges both deliveries gets
a TransactionConflict and can only be aborted: without that, the broker could not distinguish the second acknowledgement
from a repeated request. The same `Message` object may be acknowledged again. Message ids and cumulative
acknowledgements do not say which delivery they mean; so a program that acknowledges cumulatively does not get messages
again that it has already (client/core/redelivery.py `DuplicateFilter`).
**Cumulative acknowledgements.** After an abort the broker delivers the acknowledged messages again, but messages that
it had delivered after them may wait in the receiver queue already. These are dropped before the abort is reported:
otherwise the next cumulative acknowledgement would cover messages that the program has not received again, and these
would be lost.
Guards: tests/client/transactions/test_transactions.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from math import inf

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, MagnetarError, TransactionConflict
from ..common.errors import OperationNotSupported, translate_error
from ..common.loggers import run_logging_errors
from ..connect.connections import Connections
from ..core.consumer import ConsumerCore
from ..core.effects import PartitionClientState
from ..core.redelivery import PLACE_BEFORE_ALL, AckTracker, MessagePlace
from ..core.transaction import PartitionClientPort, TransactionPort
from ..model.message import Message, ReceivedEntry
from .acknowledgements import AckCollector, MessageOrId, get_ack_coordinates
from .deliveries import make_ack_requests
from .receiver_queue import ConsumerRequests

ACK_RETRY_S = 0.1
"""Seconds before a request that the broker could not process is sent again: a coordinator mostly moves within this
time."""


class _Group:
    """The acknowledgements of one transaction that one turn of the loop sends together."""

    __slots__ = ("error", "left", "operations", "tracker", "txn", "up_to", "waiters")

    def __init__(self, txn: TransactionPort) -> None:
        self.txn = txn
        self.tracker = AckTracker()
        self.operations = 0
        self.up_to: MessagePlace | None = None  # of its cumulative acknowledgements
        self.waiters: list[asyncio.Future[None]] = []
        self.left = 0  # requests without an answer
        self.error: MagnetarError | None = None


class ClientTransactionalAcks:
    """Sends the acknowledgements of one partition's consumer in transactions. See the head of the module."""

    def __init__(
        self, where: PartitionClientPort, subscription: str, connections: Connections, core: ConsumerCore,
        acks: AckCollector,
        requests: ConsumerRequests, send: Callable[..., None], broke: Callable[[Exception], object],
        again: Callable[[], None],
    ) -> None:  # fmt: skip
        """Makes the object for the consumer `where`. `send(ack=…)` sends a frame; `broke` gets an unforeseen exception.
        `again()` has all unacknowledged messages delivered again, and drops those that wait."""
        self._where = where
        self._taken_from = f"{where.topic} {subscription}"
        self._deliver_again = again
        self._connections = connections
        self._core = core
        self._acks = acks
        self._requests = requests
        self._send = send
        self._broke = broke
        self._groups: dict[TransactionPort, _Group] = {}  # of this turn, and what waits for a connection
        self._again: list[tuple[_Group, wire.Ack]] = []
        self._turn_comes = False

    def acknowledge(
        self, txn: TransactionPort, which: Iterable[MessageOrId], *, cumulative: bool,
        waiter: asyncio.Future[None] | None = None,
    ) -> None:  # fmt: skip
        """Acknowledges the messages `which` in the transaction `txn`; they are sent at the end of the loop's turn. The
        future `waiter` gets the outcome. Must be called in the event loop.

        Raises, before anything is sent: the errors of `TransactionPort.begin_operation`; OperationNotSupported if a
        cumulative acknowledgement would cover a part of a chunked message; TransactionConflict if the transaction
        acknowledges two deliveries of one message, or a cumulative acknowledgement may cover such; AlreadyClosed, or
        the error with which the consumer failed, if the consumer has ended."""
        self._requests.raise_if_closed()
        every = [each for one in which for each in self._acks.expand_to_all_chunks(one)]
        for each in every if cumulative else ():
            place = get_ack_coordinates(each)[0]
            if not self._core.cover_by_cumulative_ack(place):
                raise OperationNotSupported(
                    f"a message in chunks begins before {place} and is not acknowledged yet: acknowledge that first"
                )
        txn.begin_operation(self._where, self._connections)
        if not cumulative and (twice := self._delivered_twice(txn, every)) is not None:
            error = TransactionConflict(f"{twice} was delivered twice, and this transaction acknowledges both")
            txn.on_acknowledged(error)
            raise translate_error(error)
        repeats = self._core.repeats
        if cumulative:
            txn.register_cumulative_ack(self._deliver_again)
            if repeats is not None:
                repeats.in_use = True
                if repeats.is_unsure:
                    error = TransactionConflict(
                        f"the messages of {self._taken_from} may have been delivered twice: its connection was lost, or"
                        " another consumer was the active one"
                    )
                    txn.on_acknowledged(error)
                    raise translate_error(error)
        group = self._groups.get(txn)
        if group is None:
            group = self._groups[txn] = _Group(txn)
        group.operations += 1
        if waiter is not None:
            group.waiters.append(waiter)
        self._acks.notify_hooks(every, cumulative=cumulative)
        self._acks.add_to_tracker(group.tracker, every, cumulative=cumulative)
        for each in every if cumulative else ():
            (ledger_id, entry_id), index, size = get_ack_coordinates(each)
            last = inf if index < 0 or index + 1 == size else index
            group.up_to = max(group.up_to or PLACE_BEFORE_ALL, (ledger_id, entry_id, last))
        if not self._turn_comes:
            self._turn_comes = True
            asyncio.get_running_loop().call_soon(run_logging_errors, self._turn, self._broke)

    def _delivered_twice(self, txn: TransactionPort, every: Sequence[MessageOrId]) -> Message | None:
        entries = txn.deliveries.setdefault(self._taken_from, {})
        entry: ReceivedEntry | None = None
        taken: dict[int, object] = {}
        for each in every:
            if isinstance(each, Message):
                if each.entry is not entry:  # most follow another one of the same batch
                    entry = each.entry
                    entry.delivery = entry.delivery or object()
                    taken = entries.setdefault(entry.position, {})
                if taken.setdefault(each.batch_index, entry.delivery) is not entry.delivery:
                    return each
        return None

    def _turn(self) -> None:
        self._turn_comes = False
        if self._core.state is not PartitionClientState.CONNECTED:
            return
        again, self._again = self._again, []
        for group, ack in again:
            self._request(group, ack)
        groups, self._groups = self._groups, {}
        for group in groups.values():
            acks = make_ack_requests(group.tracker.take_ack_group())
            group.left = len(acks)
            if not acks:
                self._finish_group(group)
            for ack in acks:
                ack.txn.most, ack.txn.least = group.txn.id
                self._request(group, ack)

    def _request(self, group: _Group, ack: wire.Ack) -> None:
        ack.request_id = self._core.register_request()
        self._requests.register_request_callback(ack.request_id, lambda error: self._answered(group, ack, error))
        self._send(ack=ack)

    def _answered(self, group: _Group, ack: wire.Ack, error: MagnetarError | None) -> None:
        if error is not None and self._may_pass(error) and group.txn.is_unfinished:
            self._again.append((group, ack))
            if not isinstance(error, ConnectionLost) and not self._turn_comes:
                self._turn_comes = True
                asyncio.get_running_loop().call_later(ACK_RETRY_S, run_logging_errors, self._turn, self._broke)
            return
        group.error = group.error or error
        group.left -= 1
        if not group.left:
            self._finish_group(group)

    def _may_pass(self, error: MagnetarError) -> bool:
        return self._core.state is not PartitionClientState.CLOSED and (
            error.retryable or isinstance(error, ConnectionLost)
        )

    def _finish_group(self, group: _Group) -> None:
        if group.error is None and group.up_to is not None and self._core.repeats is not None:
            self._core.repeats.on_confirmed(group.up_to)
        for waiter in group.waiters:
            if not waiter.done():
                if group.error is None:
                    waiter.set_result(None)
                else:
                    waiter.set_exception(translate_error(group.error))
        for _ in range(group.operations):
            group.txn.on_acknowledged(group.error)

    # ------------------------------------------------------------------------------ the connection
    def on_connected(self) -> None:
        """Fact: the consumer is connected again. Sends the acknowledgements that wait for a connection."""
        if self._groups or self._again:
            self._turn()

    def fail_all(self, error: MagnetarError) -> None:
        """Ends all acknowledgements that are not sent, because the consumer is finished: their waiters and transactions
        get `error`."""
        groups, self._groups = list(self._groups.values()), {}
        again, self._again = self._again, []
        for group in groups:
            group.error = error
            self._finish_group(group)
        for group, ack in again:
            self._answered(group, ack, error)
