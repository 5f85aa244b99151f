"""The intents, answers and effects of a coordinator (broker/transaction/coordinator_core.py).

`request` is any value of the caller; the answer names it again.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...proto.errors import MagnetarError
from ...proto.states import TxnState
from .records_core import AnyRecord, HalfMessage, Participant, Tag

NAME_MAX = 512
"""Characters of a name that a client chooses: of an owner, a sink, a query, a group."""


class Verb(enum.IntEnum):
    """The verb of an end, as EndItem.Verb of proto/wire.proto."""

    COMMIT = 0
    ABORT = 1
    PREPARE = 2


class Reason(enum.Enum):
    """The reason why a transaction is aborted: the field `reason` of TransactionAborted, and the label of the metric.
    """

    CLIENT = "client"
    TIMEOUT = "timeout"
    LEASE = "its id was not used in time"
    FENCED = "fenced"
    ADMIN = "admin"
    FAILED = "operation failed"
    SUPERSEDED = "another attempt wrote the batch"
    LOST = "coordinator lost"
    DELETED = "a topic of it was deleted by force"


# ---------------------------------------------------------------------------------- intents
class Begin(msgspec.Struct, frozen=True):
    """Begins transactions."""

    request: object
    owner: str
    count: int = 1
    timeout_s: float = 0.0  # 0: the default
    name: str = ""
    holder: int = 0  # of the name; 0: a new one, that fences those before
    tag: Tag | None = None
    adopt: bool = False
    address: str = ""  # of the client


class Join(msgspec.Struct, frozen=True):
    """Joins a topic. `topic` empty: none joins, and its time begins. `owner`: who writes there; None: the topic itself
    asks."""

    request: object
    txn: int
    topic: str
    owner: str | None = None


class End(msgspec.Struct, frozen=True):
    """Ends a transaction: commit, abort or prepare."""

    request: object
    txn: int
    verb: Verb
    owner: str
    participants: Sequence[Participant] = ()
    prepared_s: float = 0.0  # 0: the longest
    visible: bool = False


class CommitBatch(msgspec.Struct, frozen=True):
    """Commits the transactions of a batch. `sink_id` empty: of no sink."""

    request: object
    owner: str
    txns: dict[int, Sequence[Participant]]
    sink_id: str = ""
    query_id: str = ""
    batch: int = -1
    adopt: bool = False


class Status(msgspec.Struct, frozen=True):
    """Asks for the state of a transaction. `owner`: who asks; None: an operator."""

    request: object
    txn: int
    owner: str | None = None


class AbortByAdmin(msgspec.Struct, frozen=True):
    """Aborts a transaction for an administrator."""

    request: object
    txn: int


class AbortOpen(msgspec.Struct, frozen=True):
    """Aborts a transaction for a topic of it that is deleted by force. Answered by its Row; only one that is open is
    aborted: who prepared a transaction was told that it can commit."""

    request: object
    txn: int


class Detach(msgspec.Struct, frozen=True):
    """Gives up a participant that cannot settle a transaction."""

    request: object
    txn: int
    topic: str


class HalfVerb(enum.IntEnum):
    """The verb of a half's end, as EndHalfRequest.Verb of proto/wire.proto."""

    COMMIT = 0
    ROLLBACK = 1
    UNKNOWN = 2
    FAILED = 3


class HalfChange(enum.IntEnum):
    """The verb of an operator's change of a half, as ChangeHalfRequest.Verb of proto/wire.proto."""

    COMMIT = 0
    ROLLBACK = 1
    PARK = 2
    REVIVE = 3


class PrepareHalf(msgspec.Struct, frozen=True):
    """Stores a half message."""

    request: object
    half: int
    owner: str
    group: str
    check_key: str
    messages: list[HalfMessage]
    check_after_s: float = 0.0  # 0: the default


class EndHalf(msgspec.Struct, frozen=True):
    """Ends a half message, or answers a question about it."""

    request: object
    half: int
    verb: HalfVerb
    owner: str
    check: int = 0  # the question that is answered; 0: none
    why: str = ""


class ChangeHalf(msgspec.Struct, frozen=True):
    """Changes a half for an operator."""

    request: object
    half: int
    verb: HalfChange


class WatchHalves(msgspec.Struct, frozen=True):
    """Lets a process of the group be asked from now on, until `Halves.remove_member`."""

    request: object
    member: object
    owner: str
    group: str


HalfIntent = PrepareHalf | EndHalf | ChangeHalf | WatchHalves
Intent = Begin | Join | End | CommitBatch | Status | AbortByAdmin | AbortOpen | Detach | HalfIntent


# ---------------------------------------------------------------------------------- effects
class Begun(NamedTuple):
    """The answer to Begin: ids in a row. `already`: the sink has that batch, and there are no ids."""

    first: int
    ids: int
    lease_s: float
    holder: int = 0
    already: bool = False


class Row(NamedTuple):
    """A transaction as an administrator sees it. `waiting`: participants; of an ended one those that have not
    answered."""

    txn: int
    state: TxnState
    owner: str
    name: str
    tag: Tag | None
    age_s: float
    left_s: float
    waiting: Sequence[str]
    reason: str = ""
    address: str = ""
    timeout_s: float = 0.0


Result = Begun | TxnState | Row | bool | MagnetarError | None


class Answer(NamedTuple):
    """The answer to a request."""

    request: object
    result: Result


class Settle(NamedTuple):
    """Tells the topic how the transaction ended, until it answers; then `on_settled`."""

    txn: int
    committed: bool
    participant: Participant


class GiveUp(NamedTuple):
    """Ends the coordinator here; the next epoch goes on."""

    why: str


class AskHalf(NamedTuple):
    """Asks the member about a half, for `answer_s`: an EndHalf with the number `check`."""

    member: object
    half: int
    check: int
    check_key: str
    unknown: int
    age_s: float
    answer_s: float
    messages: Sequence[HalfMessage]


class PublishHalf(NamedTuple):
    """Publishes the messages in the transaction; then `published` or `not_published` of Halves."""

    half: int
    txn: int
    messages: Sequence[HalfMessage]


class HalfIsParked(NamedTuple):
    """The half waits for an operator now: an alarm."""

    half: int
    group: str
    why: str


Effect = Answer | Settle | GiveUp | AskHalf | PublishHalf | HalfIsParked


class Append(NamedTuple):
    """Writes the records, in this order; then `appended(number)`, or `given_up` when that is not certain."""

    number: int
    records: list[AnyRecord]


class HalfLimits(msgspec.Struct, frozen=True):
    """The limits of half messages (docs/transactions.md)."""

    group_max: int = 10_000  # open ones of a group
    bytes_max: int = 64 << 20  # of the messages of all that are open; a role has ROLE_SHARE of it
    check_after_s: float = 10.0
    pause_s: float = 30.0  # between two checks; it doubles …
    pause_s_max: float = 600.0  # … up to this
    answer_s: float = 30.0
    unknown_max: int = 15
    open_s: float = 86_400.0
    retention_s: float = 3_600.0


class Limits(msgspec.Struct, frozen=True):
    """The limits of a coordinator."""

    open_max: int = 100_000
    open_per_role_max: int = 50_000  # 0: any number; only of callers that have a role
    participants_max: int = 10_000
    names_max: int = 100_000
    names_per_role_max: int = 10_000
    sinks_max: int = 100_000
    sinks_per_role_max: int = 10_000
    timeout_s: float = 60.0
    timeout_s_max: float = 900.0
    prepared_s_max: float = 86_400.0
    lease_s: float = 600.0
    retention_s: float = 3_600.0
    name_idle_s: float = 7 * 86_400.0
    sink_idle_s: float = 90 * 86_400.0
    halves: HalfLimits = HalfLimits()


LASTED_S = (0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 300.0, 1500.0, 3000.0)
"""Bounds of how long transactions were open: Pulsar's."""


class Counters(msgspec.Struct):
    """Counts since the owner's take-over. `lasted`: from an id's first use to its outcome, by LASTED_S, and above."""

    begun: int = 0
    committed: int = 0
    aborted: dict[Reason, int] = msgspec.field(default_factory=dict)
    settled: int = 0
    records: int = 0  # durable ones
    lasted: list[int] = msgspec.field(default_factory=lambda: [0] * (len(LASTED_S) + 1))
    lasted_s: float = 0.0  # of all together

    def count_ended(self, lasted_s: float) -> None:
        """Counts a transaction that has its outcome."""
        self.lasted[bisect_left(LASTED_S, lasted_s)] += 1
        self.lasted_s += lasted_s


class HalfPhase(enum.IntEnum):
    """The phase of a half, as an administrator sees it: HalfInfo.State of proto/wire.proto."""

    WAITING = 0
    ASKED = 1
    COMMITTING = 2
    ENDING = 3
    PARKED = 4


class HalfRow(NamedTuple):
    """The state of a half message, for administrators."""

    half: int
    phase: HalfPhase
    owner: str
    group: str
    check_key: str
    age_s: float
    unknown: int
    members: int
    size_bytes: int
    topics: Sequence[str]
    reason: str
