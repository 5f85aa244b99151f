"""The interface between a topic and the coordinators of transactions, independent of who implements it.

    Coordinators        the topic's side of a coordinator, wherever it runs (broker/transaction/)

Rules
- A topic joins a transaction **before** the first entry or acknowledgement of it is appended. A send or ack whose join
  is refused leaves no trace.
- After a join only the coordinator ends the transaction there, by a settlement. Nothing is settled by silence.
- A settlement is answered when its effect is durable at the topic. A topic that has nothing of the transaction answers
  after it made sure that no other broker owns it by now: an earlier owner must not answer for a later one.
- A settlement that comes while the join is in flight ends the transaction there; the join is refused then.
- A role writes in the transactions that it began. Who knows the id of another's is answered, by its coordinator, as of
  an id that was never given; a topic asks once for each transaction and role.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ...proto.errors import NotAllowed
from ...proto.names import Position, TopicName
from ...proto.states import TxnId, TxnState
from ...runtime.access import Principal, PrincipalKind


def writer_of(principal: Principal) -> str | None:
    """The role whose transactions the caller writes in; None: of each role, as a listener without security may, and a
    broker, which publishes half messages of a role. A broker that calls with a token is a super user, as which it also
    joins and settles the transactions of each."""
    free = principal.kind is PrincipalKind.LOCAL or (
        principal.kind is PrincipalKind.MEMBER and principal.name.startswith("broker/")
    )
    return None if free or principal.is_super else principal.name


class Settlement(NamedTuple):
    """The end of a transaction, for one of its topics."""

    txn: TxnId
    committed: bool
    entries: int = -1
    """Entries with a receipt, as the client said; -1: it said nothing, and every entry counts."""
    last: Position = Position(-1, -1)
    """Position of the last receipt. An entry after it had no receipt: it does not count."""


Joined = TxnState | Settlement
"""The answer to a join: a state; or, of a committed transaction that the topic has not settled, its settlement."""


def state_of(joined: Joined) -> TxnState:
    if isinstance(joined, Settlement):
        return TxnState.COMMITTED if joined.committed else TxnState.ABORTED
    return joined


class TransactionFacts(NamedTuple):
    """The facts that its coordinator tells of a transaction."""

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


class Coordinators(Protocol):
    """The coordinators of the cluster."""

    async def join(self, txn: TxnId, topic: TopicName, owner: str | None = None) -> Joined:
        """Makes the topic a participant. OPEN, PREPARED: it is one now, or was before. COMMITTED, ABORTED, a
        settlement: the outcome, and nothing may be added. `owner`: the role that writes in the transaction there;
        InvalidRequest: it is another's. None: who may write in each (`writer_of`), and a topic that was loaded with
        entries of the transaction.

        Never TransactionForgotten: what ended long ago is ABORTED for a topic that does not know its outcome, because a
        commit is forgotten after every participant has stored it. Each other error says nothing of the outcome: ask
        again. Joins that are asked in one turn travel together.
        """

    def join_now(self, txn: TxnId, topic: str, owner: str | None = None) -> bool:
        """Whether the topic of that full name is a participant: its coordinator is in this process, and the transaction
        is the role's, and not decided. False: `join` it, which waits, or says why not."""
        ...

    async def get_facts(self, txn: TxnId) -> TransactionFacts:
        """Returns the state. Errors as of `join`. One that is being decided may be told as OPEN."""

    async def abort_open(self, txn: TxnId) -> TransactionFacts:
        """Aborts it if it is open, because a topic of it is deleted by force. Its state after that: COMMITTED or
        ABORTED for ever; or PREPARED, which is left. Errors as of `join`; repeating it is no harm.
        """


class NoCoordinators:
    """The coordinators of a broker, or a topic, that has no transactions."""

    async def join(self, txn: TxnId, topic: TopicName, owner: str | None = None) -> Joined:
        raise NotAllowed(f"topic {topic} takes no transactions")

    def join_now(self, txn: TxnId, topic: str, owner: str | None = None) -> bool:
        return False

    async def get_facts(self, txn: TxnId) -> TransactionFacts:
        raise NotAllowed("there are no transactions here")

    async def abort_open(self, txn: TxnId) -> TransactionFacts:
        raise NotAllowed("there are no transactions here")
