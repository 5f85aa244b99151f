"""The interface between a topic and the transaction coordinators of the cluster (`TransactionCoordinatorsPort`). The
topic calls it; the package broker/transaction/ implements it, for coordinators in this process and in others.

Rules
- A topic joins a transaction **before** the first entry or acknowledgement of it is appended. A send or an
  acknowledgement whose join is refused changes nothing.
- After a join only the coordinator ends the transaction at the topic, by a settlement. A topic that hears nothing from
  the coordinator settles nothing.
- A settlement is answered when its effect is durable at the topic. A topic that has nothing of the transaction answers
  after it has made sure that no other broker owns the topic by now: an earlier owner must not answer for a later one.
- A settlement that arrives while the join is in flight ends the transaction at the topic; the join is refused then.
- A role may write only in the transactions that it began. For the id of another role's transaction, the coordinator
  gives the same answer as for an id that was never given. A topic asks once for each transaction and role.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ...proto.errors import NotAllowed
from ...proto.names import Position, TopicName
from ...proto.states import ForgottenOutcome, TxnId, TxnState
from ...runtime.access import Principal, PrincipalKind


def get_required_transaction_role(principal: Principal) -> str | None:
    """Returns the role to which a transaction must belong so that the caller may write in it; None if the caller may
    write in the transactions of every role.

    None is returned for a caller without security (LOCAL), for a broker, because brokers publish half messages of any
    role, and for a super user. A broker that authenticates with a token is a super user; so it may also join and settle
    transactions of every role.
    """
    free = principal.kind is PrincipalKind.LOCAL or (
        principal.kind is PrincipalKind.MEMBER and principal.name.startswith("broker/")
    )
    return None if free or principal.is_super else principal.name


class Settlement(NamedTuple):
    """The outcome of a transaction, as its coordinator sends it to one participating topic. `committed`: True after a
    commit, False after an abort."""

    txn: TxnId
    committed: bool
    entries: int = -1
    """Entries with a receipt, as the client said; -1: it said nothing, and every entry counts."""
    last: Position = Position(-1, -1)
    """Position of the last receipt. An entry after it had no receipt: it does not count."""


JoinAnswer = TxnState | Settlement | ForgottenOutcome
"""The answer to a join: a state; or, of a committed transaction that the topic has not settled, its settlement; or why
the coordinator does not know the outcome any more."""


def convert_join_answer_to_state(joined: JoinAnswer) -> TxnState:
    """Returns the state of the transaction that the coordinator's answer to a join implies for a topic that lost
    nothing: a transaction with a forgotten outcome is ABORTED for it."""
    if isinstance(joined, ForgottenOutcome):
        return TxnState.ABORTED
    if isinstance(joined, Settlement):
        return TxnState.COMMITTED if joined.committed else TxnState.ABORTED
    return joined


class ReportedTransaction(NamedTuple):
    """The state of a transaction, as its coordinator reports it to a topic. `name`: the name under which its client
    began it, "" if it has none; `age_s`: seconds since it began."""

    txn: TxnId
    state: TxnState
    owner: str = ""
    """The role that began it; empty: callers have none."""
    name: str = ""
    address: str = ""
    """Address of the client that began it."""
    sink: str = ""
    """Sink whose batch it writes; empty: none."""
    age_s: float = 0.0
    left_s: float = 0.0
    """Seconds to its deadline."""


class TransactionCoordinatorsPort(Protocol):
    """The interface through which a topic calls the transaction coordinators of the cluster. Implemented by the
    broker's client of coordinators (broker/transaction/), and by `NoCoordinators` where there are no transactions."""

    async def join_transaction(self, txn: TxnId, topic: TopicName, owner: str | None = None) -> JoinAnswer:
        """Makes `topic` a participant of the transaction. Returns OPEN or PREPARED if the topic is a participant now,
        or was before. Returns COMMITTED, ABORTED or a settlement if the transaction has ended; then the topic must add
        nothing to it.

        `owner`: the role that writes in the transaction at that topic; InvalidRequest is raised if the transaction
        belongs to another role. `owner` is None for a caller that may write in every transaction
        (`get_required_transaction_role`), and for a topic that was loaded with entries of the transaction.

        Never raises TransactionForgotten. Returns a ForgottenOutcome if the coordinator does not know the outcome any
        more. After DISCARDED a topic that lost no outcomes counts the transaction as aborted, because a coordinator
        discards a commit only after every participant has stored it; a topic that lost outcomes decides nothing. Any
        error says nothing about the outcome, and the caller should ask again. Joins that are requested in one turn of
        the loop are sent together.
        """

    def join_transaction_nowait(self, txn: TxnId, topic: str, owner: str | None = None) -> bool:
        """Makes the topic with the full name `topic` a participant of the transaction without waiting, and returns
        True. Returns False if that is not possible: the coordinator is in another process, the transaction belongs to
        another role, or it is ending. `owner`: as in `join_transaction`. The caller should then await
        `join_transaction`, which waits or raises the reason."""
        ...

    async def ask_transaction_state(self, txn: TxnId) -> ReportedTransaction:
        """Returns the state of the transaction as its coordinator reports it. A transaction whose end is being decided
        may be reported as OPEN. An error says nothing about the outcome, as in `join_transaction`."""

    async def abort_if_open(self, txn: TxnId) -> ReportedTransaction:
        """Aborts the transaction if it is open, because one of its topics is deleted by force. Returns the state of the
        transaction afterwards: COMMITTED or ABORTED, which are final, or PREPARED, because a prepared transaction is
        not aborted. Idempotent. An error says nothing about the outcome, as in `join_transaction`."""


class NoCoordinators:
    """The TransactionCoordinatorsPort of a broker or a topic without transactions. Every join and every question raises
    NotAllowed; `join_transaction_nowait` returns False."""

    async def join_transaction(self, txn: TxnId, topic: TopicName, owner: str | None = None) -> JoinAnswer:
        raise NotAllowed(f"topic {topic} takes no transactions")

    def join_transaction_nowait(self, txn: TxnId, topic: str, owner: str | None = None) -> bool:
        return False

    async def ask_transaction_state(self, txn: TxnId) -> ReportedTransaction:
        raise NotAllowed("there are no transactions here")

    async def abort_if_open(self, txn: TxnId) -> ReportedTransaction:
        raise NotAllowed("there are no transactions here")
