"""A transaction as the client sees it (core): counts what was sent and acknowledged in the transaction, and decides how
it ends.

Intents and facts in, effects out, in order; the driver (client/transactions/transaction.py) does each effect at once.

| state | in | on | to |
|---|---|---|---|
| OPEN | the beginning | `commit`, and every operation has its outcome, none failed | COMMITTING: ask for COMMIT |
| OPEN | | `commit`, and an operation failed; or `abort` | ABORTING: ask for ABORT |
| COMMITTING | | the coordinator says COMMITTED, or ABORTED | COMMITTED; ABORTED, TransactionAborted is raised |
| COMMITTING | | no answer in time, and no status either | ERROR: the outcome is unknown; `commit` asks again |
| OPEN | | `prepare`, and every operation has its outcome, none failed | PREPARING: ask for PREPARE |
| PREPARING | | the coordinator says PREPARED; ABORTED; no answer | PREPARED; ABORTED; ERROR |
| PREPARED | | `commit`; `abort` | COMMITTING; ABORTING: any program may have ended it by its id |
| ABORTING | | an answer, or none in time: no commit was ever sent | ABORTED |

**Operations.** A send or an acknowledgement is an operation of the transaction from `begin_operation` until its
outcome. A send under a `SendAllowance` is one from the moment the producer counts it. `commit` waits for all operations
(`ReportOperationsDone` is the effect of the last outcome), so that the coordinator is told all receipts. If an
operation failed, the transaction aborts: the message may be stored, and a commit would make it visible. **Receipts.**
For each topic the core counts the entries with a receipt, and keeps the last of their positions: an entry after that
position had no receipt, and does not count. When the position of an entry is not known (the broker had stored it
already), -1 is reported as the topic's number of entries: every entry of the transaction counts there, and each has its
receipt. **Nothing to end.** A transaction without an operation has left nothing at any server; it ends without a
request. **Threads.** `begin_operation`, `try_begin_operation`, `allow_sends` and `cancel_operation` may be called from
any thread; `lock` guards the fields that they use. A SendAllowance is guarded by the lock of its producer, which is
taken after `lock`. All else belongs to one thread. Guard: tests/client/core/test_transaction.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, Protocol

from ...proto.errors import MagnetarError
from ...proto.errors import TransactionAborted as WireAborted
from ...proto.errors import TransactionConflict as WireConflict
from ...proto.errors import TransactionFenced as WireFenced
from ...proto.names import Position, TopicName
from ...proto.states import TxnId, TxnState
from ..common.errors import (
    MessageTooBig,
    OutcomeUnknown,
    PulsarException,
    TransactionAborted,
    TransactionConflict,
    TransactionEnded,
    TransactionFenced,
    translate_error,
)

TRANSACTION_MESSAGES_MAX = 1_000_000
"""Most messages of one transaction: readers wait for all of them, and an abort hides each of them singly."""
ALLOWANCE_MESSAGES = 10_000
"""Messages that a SendAllowance allows a producer to send before it must ask the transaction again."""
NO_POSITION = Position(-1, -1)


class TransactionState(Enum):
    """The states of a transaction. PREPARED: the transaction survives its client and its coordinator. ERROR: the
    request to commit or prepare got no answer; a new `commit` asks the coordinator again."""

    OPEN = "OPEN"
    PREPARING = "PREPARING"
    PREPARED = "PREPARED"
    COMMITTING = "COMMITTING"
    ABORTING = "ABORTING"
    COMMITTED = "COMMITTED"
    ABORTED = "ABORTED"
    ERROR = "ERROR"


ENDING_STATES = TransactionState.COMMITTING, TransactionState.PREPARING
"""States in which the end of the transaction waits for its operations' outcomes."""


class TransactionEndKind(Enum):
    """The ways to end a transaction that a client can request from the coordinator."""

    COMMIT = 0
    ABORT = 1
    PREPARE = 2


class TopicReceipts(NamedTuple):
    """The receipts of a transaction's entries at one topic. `entries`: the number of entries with a receipt; 0: the
    transaction only acknowledged messages there; -1: every entry of the transaction counts. `last`: the highest
    position of these entries; NO_POSITION if `entries` is 0 or -1."""

    topic: str
    entries: int
    last: Position


class AskToEndTransaction(NamedTuple):
    """Effect: ask the coordinator to end the transaction as `verb` says; `participants` are the topics with an
    operation of it, none for an abort. The driver must then call `on_answered`, or `on_unanswered` if no answer comes.
    """

    verb: TransactionEndKind
    participants: tuple[TopicReceipts, ...]


class ReportOperationsDone(NamedTuple):
    """Effect: report that every operation of the transaction has an outcome, so that the waiting `commit` or `prepare`
    continues."""


class ReportTransactionEnd(NamedTuple):
    """Effect: report that the transaction has ended. `error`: raised in the caller that ended the transaction; None:
    the transaction ended as that caller asked."""

    error: PulsarException | None


TransactionEffect = AskToEndTransaction | ReportOperationsDone | ReportTransactionEnd


class PartitionClientPort(Protocol):
    """The interface of the producer or consumer of one partition that sends messages or acknowledgements in a
    transaction. PartitionProducer and PartitionConsumer implement it; a transaction calls it."""

    is_producer: bool  # messages; else it acknowledges

    @property
    def topic(self) -> TopicName: ...
    def send_waiting_now(self) -> None:
        """Sends at once what waits to be sent in groups: the open batches of a producer, the acknowledgements of a
        consumer. Called in the event loop when the transaction commits."""
        ...


class SendAllowance:
    """Allows one producer to send up to `allowed` messages in a transaction without asking the transaction for each.
    The producer counts the messages under its own lock. TransactionCore adds this count to its own when the transaction
    ends."""

    __slots__ = ("allowed", "left", "lock", "txn")

    def __init__(self, txn: TransactionPort, lock: AbstractContextManager[Any]) -> None:
        """Makes an allowance that allows no message yet. `lock`: the lock of the producer."""
        self.txn = txn
        self.lock = lock
        self.allowed = 0  # messages
        self.left = 0  # of them; 0: the transaction is asked for more, which it refuses when it is not open

    @property
    def sent_messages(self) -> int:
        """Returns the number of messages that were sent under the allowance."""
        return self.allowed - self.left

    def close(self) -> int:
        """Ends the allowance: no more messages may be sent under it. Returns the number of messages that were sent
        under it."""
        with self.lock:
            self.allowed -= self.left
            self.left = 0
            return self.allowed


class TransactionPort:
    """The interface of a transaction for the producers and consumers that send and acknowledge in it. The asyncio
    `Transaction` implements it."""

    deliveries: dict[str, dict[Position, dict[int, object]]]
    """Subscription → position → batch index → which delivery of that message the transaction acknowledged
    (client/consume/transactional_acks.py)."""

    @property
    def id(self) -> TxnId:
        """Returns the id of the transaction. Raises InvalidTxnStatusError if it has not begun."""
        raise NotImplementedError

    @property
    def is_unfinished(self) -> bool:
        """Returns whether the outcomes of the transaction's operations still matter: the transaction is open, or its
        commit waits for these outcomes."""
        raise NotImplementedError

    def begin_operation(self, where: PartitionClientPort, connections: object) -> None:
        """Begins an operation of the transaction: a message or an acknowledgement will be sent by the producer or
        consumer `where`. May be called from any thread. Raises TransactionEnded if the transaction is not open,
        InvalidTxnStatusError if it has not begun, MessageTooBig if it has too many messages, InvalidConfiguration if
        `connections` are those of another client."""
        raise NotImplementedError

    def allow_sends(
        self, where: PartitionClientPort, connections: object, lock: AbstractContextManager[Any]
    ) -> SendAllowance:
        """Returns the SendAllowance under which the producer `where` may send at least one message. Raises the errors
        of `begin_operation`. `lock`: the lock of the producer, which the caller must not hold."""
        raise NotImplementedError

    def cancel_operation(self, *, message: bool) -> None:
        """Reverts a call of `begin_operation` after which nothing was sent. `message`: whether the operation was a
        message, not an acknowledgement. May be called from any thread."""
        raise NotImplementedError

    def register_cumulative_ack(self, again: Callable[[], None]) -> None:
        """Registers a cumulative acknowledgement. If the transaction aborts, `again()` is called before the end of the
        transaction is reported. It must make the broker deliver the acknowledged messages again."""
        raise NotImplementedError

    def on_stored(self, where: PartitionClientPort, messages: int, position: Position) -> None:
        """Fact: the broker confirmed that an entry with `messages` messages is stored at `position`. Of a message in
        chunks `messages` is 1 for the last chunk and 0 for the others."""
        raise NotImplementedError

    def on_refused(self, messages: int, error: MagnetarError) -> None:
        """Fact: an entry with `messages` messages was not stored, or `error` leaves unknown whether it was stored."""
        raise NotImplementedError

    def on_acknowledged(self, error: MagnetarError | None) -> None:
        """Fact: an acknowledgement has its outcome. `error` None: the acknowledgement is durable."""
        raise NotImplementedError


class TransactionCore:
    """The core of one transaction: counts its operations and decides how it ends. `failure`: the error of the first
    operation that failed; `error`: the error with which the transaction ended; None: there is none. See the head of the
    module."""

    def __init__(self, txn: TxnId, lock: AbstractContextManager[Any], *, named: bool = False) -> None:
        """Makes the core of an open transaction. `named`: whether the coordinator is asked to end the transaction even
        if it had no operation, because the answer tells whether another client has begun a transaction of the same
        name."""
        self.txn = txn
        self.state = TransactionState.OPEN
        self.failure: PulsarException | None = None  # of the first operation that failed
        self.error: PulsarException | None = None  # how it ended; None: as it was asked to
        self._begun = 0  # operations, without those of open shares
        self._over = 0  # operations that have their outcome
        self._allowed = 0  # messages that were sent in it, or that shares may still send
        self._shares: list[SendAllowance] = []  # open ones
        self._lock = lock
        self._named = named
        self._waiting = False  # a commit, for the operations
        self._was_prepared = False  # another program may have committed it
        self._entries: dict[str, int] = {}
        self._last: dict[str, Position] = {}

    # ------------------------------------------------------------------------------ from any thread
    def begin_operation(self, topic: str, *, message: bool) -> None:
        """Begins an operation at `topic`: sending a message if `message`, else an acknowledgement. Raises
        TransactionEnded if the transaction is not open, MessageTooBig if it has too many messages; then nothing may be
        sent."""
        with self._lock:
            if self.state is not TransactionState.OPEN:
                raise TransactionEnded(f"transaction {self.txn} {self._how()}: nothing was sent")
            if message:
                self._allow(1)
            self._begun += 1
            self._touch(topic)

    def allow_sends(self, topic: str, share: SendAllowance) -> None:
        """Allows the producer of `topic` to send up to ALLOWANCE_MESSAGES more messages under the SendAllowance
        `share`, which may be new. If `share` has messages left, allows no more. Raises the errors of `begin_operation`:
        TransactionEnded, MessageTooBig."""
        with self._lock:
            if self.state is not TransactionState.OPEN:
                raise TransactionEnded(f"transaction {self.txn} {self._how()}: nothing was sent")
            if not share.left:
                more = self._allow(ALLOWANCE_MESSAGES)
                with share.lock:
                    share.allowed += more
                    share.left += more
            if share not in self._shares:
                self._shares.append(share)
            self._touch(topic)

    def _allow(self, messages: int) -> int:
        """Reserves up to `messages` more messages; returns how many, at least one. Raises MessageTooBig if there is no
        room."""
        if self._allowed >= TRANSACTION_MESSAGES_MAX:
            for share in self._shares:  # what others do not use
                self._allowed -= share.allowed
                self._allowed += share.close()
        allowed = min(messages, TRANSACTION_MESSAGES_MAX - self._allowed)
        if allowed <= 0:
            raise MessageTooBig(
                f"transaction {self.txn} has {TRANSACTION_MESSAGES_MAX} messages; the limit is "
                f"{TRANSACTION_MESSAGES_MAX}: commit, and begin"
                " another one", limit=TRANSACTION_MESSAGES_MAX,
            )  # fmt: skip
        self._allowed += allowed
        return allowed

    def _touch(self, topic: str) -> None:
        if topic not in self._entries:
            self._entries[topic], self._last[topic] = 0, NO_POSITION

    def _close_shares(self) -> None:
        """Closes all shares and counts their messages as operations: the transaction is no longer open."""
        for share in self._shares:
            self._allowed -= share.allowed
            sent = share.close()
            self._allowed += sent
            self._begun += sent
        self._shares.clear()

    @property
    def pending_operations(self) -> int:
        """Returns the number of the transaction's operations that have no outcome yet."""
        return self._begun - self._over + sum(each.sent_messages for each in self._shares)

    @property
    def message_count(self) -> int:
        """Returns the number of messages that were sent in the transaction, or are about to be."""
        return self._allowed - sum(each.left for each in self._shares)

    def try_begin_operation(self, *, message: bool) -> bool:
        """Begins an operation at a topic at which the transaction has an operation already, and returns True. Returns
        False if no operation may begin; the caller then calls `begin_operation`, which raises the reason. `message`:
        whether the operation is a message, not an acknowledgement."""
        with self._lock:
            if self.state is not TransactionState.OPEN or (message and self._allowed >= TRANSACTION_MESSAGES_MAX):
                return False
            self._allowed += message
            self._begun += 1
            return True

    def cancel_operation(self, *, message: bool) -> list[TransactionEffect]:
        """Reverts a call of `begin_operation`, because the operation was refused before anything was sent. `message`:
        whether the operation was a message, not an acknowledgement. Returns ReportOperationsDone if `commit` or
        `prepare` waited only for this operation, else no effect."""
        with self._lock:
            self._allowed -= message
            self._begun -= 1
            return self._check_idle()

    # ------------------------------------------------------------------------------ outcomes
    def on_stored(self, topic: str, messages: int, position: Position) -> list[TransactionEffect]:
        """Fact: the broker confirmed that an entry with `messages` messages is stored at `position` of `topic`. Of a
        message in chunks `messages` is 1 for the last chunk and 0 for the others. Returns ReportOperationsDone if this
        was the last outcome that a commit waited for."""
        if self._entries[topic] >= 0:
            self._entries[topic] += 1
            if position[1] < 0:
                self._entries[topic], self._last[topic] = -1, NO_POSITION
            elif position > self._last[topic]:
                self._last[topic] = position
        with self._lock:
            self._over += messages
            return self._check_idle()

    def on_refused(self, messages: int, error: MagnetarError) -> list[TransactionEffect]:
        """Fact: an entry with `messages` messages was not stored, or `error` leaves unknown whether it was stored. The
        transaction can only be aborted from now on. Returns ReportOperationsDone if this was the last outcome that a
        commit waited for."""
        self._set_failure(error)
        with self._lock:
            self._over += messages
            return self._check_idle()

    def on_acknowledged(self, error: MagnetarError | None) -> list[TransactionEffect]:
        """Fact: an acknowledgement has its outcome. `error` None: it is durable; else the transaction can only be
        aborted from now on. Returns ReportOperationsDone if this was the last outcome that a commit waited for."""
        if error is not None:
            self._set_failure(error)
        with self._lock:
            self._over += 1
            return self._check_idle()

    def _set_failure(self, error: MagnetarError) -> None:
        if self.failure is None:
            self.failure = translate_error(error)

    def _check_idle(self) -> list[TransactionEffect]:
        if self._waiting and self._begun == self._over:
            self._waiting = False
            return [ReportOperationsDone()]
        return []

    # ------------------------------------------------------------------------------ the end
    def commit(self) -> list[TransactionEffect]:
        """Begins the commit: no further operation may begin. The effect ReportOperationsDone follows when all
        operations have outcomes, perhaps at once; the driver must then call `decide_transaction_end`. The transaction
        must be OPEN, PREPARED, or in the state ERROR."""
        may_be = TransactionState.OPEN, TransactionState.PREPARED, TransactionState.ERROR
        return self._wait(TransactionState.COMMITTING, may_be)

    def prepare(self) -> list[TransactionEffect]:
        """Begins to prepare the transaction, which must be OPEN. As for `commit`, the effect ReportOperationsDone
        follows when all operations have outcomes."""
        return self._wait(TransactionState.PREPARING, (TransactionState.OPEN,))

    def _wait(self, state: TransactionState, may_be: tuple[TransactionState, ...]) -> list[TransactionEffect]:
        with self._lock:
            assert self.state in may_be, "it ends once at a time"
            self.state = state
            self._close_shares()
            self._waiting = True
            return self._check_idle()

    def decide_transaction_end(self) -> list[TransactionEffect]:
        """Decides how the transaction ends: as its caller asked, or by an abort if an operation failed. Returns the
        effects. The driver must call it after ReportOperationsDone."""
        assert self.state in ENDING_STATES, "an end waits for this"
        if self.failure is not None:
            return self._abort(self._reason())
        if self.state is TransactionState.PREPARING:
            return [AskToEndTransaction(TransactionEndKind.PREPARE, self._participants())]
        if not self._entries and not self._named:
            return self._set_ended(TransactionState.COMMITTED, None)
        return [AskToEndTransaction(TransactionEndKind.COMMIT, self._participants())]

    def expire_operations(self, error: MagnetarError) -> list[TransactionEffect]:
        """Ends the wait of `commit` or `prepare` for outcomes, because some operations had none in time: the
        transaction is aborted, with `error` as the cause. Returns the effects."""
        self._waiting = False
        self._set_failure(error)
        return self.decide_transaction_end()

    def abort(self) -> list[TransactionEffect]:
        """Begins to abort the transaction, which must be OPEN or PREPARED. Returns the effects: AskToEndTransaction, or
        ReportTransactionEnd if there is nothing to end."""
        assert self.state in (TransactionState.OPEN, TransactionState.PREPARED), "what is ending has its end"
        self._was_prepared = self.state is TransactionState.PREPARED
        return self._abort(None)

    def _abort(self, error: PulsarException | None) -> list[TransactionEffect]:
        with self._lock:
            self.state, self.error = TransactionState.ABORTING, error
            self._close_shares()
        if not self._entries and not self._named:
            return self._set_ended(TransactionState.ABORTED, error)
        return [AskToEndTransaction(TransactionEndKind.ABORT, ())]

    def on_answered(self, state: TxnState, error: MagnetarError | None) -> list[TransactionEffect]:
        """Fact: the coordinator answered the request to end the transaction, or the request for its status: with
        `state`, or with `error`. Returns ReportTransactionEnd."""
        if error is not None:
            return self._on_refused(error)
        committing = self.state in ENDING_STATES
        if state is TxnState.PREPARED and self.state is TransactionState.PREPARING:
            return self._set_ended(TransactionState.PREPARED, None)
        if state is TxnState.COMMITTED:
            why = None if committing else TransactionEnded(f"transaction {self.txn} is committed")
            return self._set_ended(TransactionState.COMMITTED, why)
        if state is TxnState.ABORTED:
            lost = TransactionAborted(f"transaction {self.txn} was aborted: nothing of it counts; run all of it again")
            return self._set_ended(TransactionState.ABORTED, lost if committing else self.error)
        return self.on_unanswered()

    def _on_refused(self, error: MagnetarError) -> list[TransactionEffect]:
        if self.state is TransactionState.ABORTING and not self._was_prepared:  # it was never committed, and cannot be
            known = (
                self.error if self.error is not None or not isinstance(error, WireFenced) else translate_error(error)
            )
            return self._set_ended(TransactionState.ABORTED, known)
        if isinstance(error, WireAborted | WireConflict | WireFenced):
            found = translate_error(error)
            if isinstance(found, TransactionConflict):
                found = make_aborted_error(self.txn, "conflict", found)
            return self._set_ended(TransactionState.ABORTED, found)
        if error.definite and not error.retryable:
            return self._set_ended(TransactionState.ERROR, translate_error(error))
        return self.on_unanswered()

    def on_unanswered(self) -> list[TransactionEffect]:
        """Fact: the coordinator did not answer the request to end the transaction in time, nor the request for its
        status. Returns ReportTransactionEnd: with OutcomeUnknown, unless the transaction was only to be aborted."""
        if self.state is TransactionState.ABORTING and not self._was_prepared:
            return self._set_ended(TransactionState.ABORTED, self.error)
        unknown = OutcomeUnknown(
            f"transaction {self.txn}: its end got no answer, and its coordinator does not tell what became of it;"
            " ask for it later by transaction_status", txn=self.txn,
        )  # fmt: skip
        return self._set_ended(TransactionState.ERROR, unknown)

    def _set_ended(self, state: TransactionState, error: PulsarException | None) -> list[TransactionEffect]:
        with self._lock:
            self.state, self.error = state, error
        return [ReportTransactionEnd(error)]

    def _participants(self) -> tuple[TopicReceipts, ...]:
        return tuple(TopicReceipts(topic, count, self._last[topic]) for topic, count in self._entries.items())

    def _reason(self) -> PulsarException:
        assert self.failure is not None, "an operation failed"
        if isinstance(self.failure, TransactionAborted | TransactionFenced):
            return self.failure
        conflict = isinstance(self.failure, TransactionConflict)
        return make_aborted_error(self.txn, "conflict" if conflict else "operation failed", self.failure)

    def _how(self) -> str:
        if self.state is TransactionState.ERROR:
            return "has an unknown outcome"
        return f"is {self.state.name.lower()}"

    @property
    def was_aborted_remotely(self) -> bool:
        """Returns whether an operation or the end of the transaction showed that the coordinator aborted the
        transaction without being asked by this client. The coordinator may then have aborted other transactions of this
        client, too."""
        causes = (self.error, self.failure)
        return self.state in (TransactionState.ABORTED, TransactionState.OPEN) and any(
            isinstance(each, TransactionAborted | TransactionEnded) and not isinstance(each.__cause__, PulsarException)
            for each in causes
        )

    @property
    def has_operations(self) -> bool:
        """Returns whether the transaction has begun an operation at any topic. If so, that topic may have messages or
        acknowledgements of the transaction."""
        return bool(self._entries)

    @property
    def has_ended(self) -> bool:
        """Returns whether the transaction is committed or aborted."""
        return self.state in (TransactionState.COMMITTED, TransactionState.ABORTED)

    def check(self) -> None:
        assert self.pending_operations >= 0, "an outcome is told once"
        assert 0 <= self.message_count <= TRANSACTION_MESSAGES_MAX, "no more messages than may be"
        assert not self._waiting or self.state in ENDING_STATES, "an end waits for the operations"
        if self.state is TransactionState.COMMITTED:
            assert self.failure is None, "what failed is not committed"
            assert not self.pending_operations, "a commit waits for every operation"


def make_aborted_error(txn: TxnId, reason: str, cause: BaseException) -> TransactionAborted:
    """Returns the TransactionAborted of a transaction that was aborted because of `cause`. `reason`: a few words for
    its text and its field `reason`."""
    error = TransactionAborted(
        f"transaction {txn} was aborted, {reason}: {getattr(cause, 'message', cause)}; run all of it again",
        reason=reason, txn=txn,
    )  # fmt: skip
    error.__cause__ = cause
    return error
