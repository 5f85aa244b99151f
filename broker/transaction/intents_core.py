"""The intents, answers and effects of a coordinator (broker/transaction/coordinator_core.py).

The field `request` of an intent is any object of the caller; the effect AnswerRequest names the same object.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...proto.errors import MagnetarError
from ...proto.states import ForgottenOutcome, TxnState
from .records_core import AnyCoordinatorRecord, HalfMessage, Participant, SinkBatchTag

NAME_CHARACTERS_MAX = 512
"""Most characters of a name that a client chooses: of a holder, a sink, a query, a group."""


class TransactionEndVerb(enum.IntEnum):
    """How a client ends a transaction: COMMIT, ABORT or PREPARE, as in EndItem.Verb of proto/wire.proto."""

    COMMIT = 0
    ABORT = 1
    PREPARE = 2


class AbortReason(enum.Enum):
    """The reasons why a coordinator aborts a transaction. They are shown in the field `reason` of TransactionAborted,
    and as a label of a metric."""

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
class BeginTransactions(msgspec.Struct, frozen=True):
    """Intent: begin `count` transactions. The answer is a BeginAnswer. `name`: the name under which they begin, "" for
    none; `holder`: which holder of the name the client is, 0 to become the next holder; `tag`: the batch of a sink for
    which they begin; `adopt`: True if the query may take the sink over from another query."""

    request: object
    owner: str
    count: int = 1
    timeout_s: float = 0.0  # 0: the default
    name: str = ""
    holder: int = 0  # of the name; 0: a new one, that fences those before
    tag: SinkBatchTag | None = None
    adopt: bool = False
    address: str = ""  # of the client


class JoinTransaction(msgspec.Struct, frozen=True):
    """Intent: make `topic` a participant of the transaction. If `topic` is empty, only start the timeout of the
    transaction. The answer is a TxnState, or a ForgottenOutcome. `owner`: the role that writes in the transaction;
    None: the topic itself asks."""

    request: object
    txn: int
    topic: str
    owner: str | None = None


class EndTransaction(msgspec.Struct, frozen=True):
    """Intent: end a transaction, by commit, abort or prepare. The answer is a TxnState. `participants`: the entries in
    each topic, as the client counted them; () if it did not. `prepared_s`: for how long the transaction may stay
    prepared; `visible`: True if the answer must wait until all participants have stored the outcome."""

    request: object
    txn: int
    verb: TransactionEndVerb
    owner: str
    participants: Sequence[Participant] = ()
    prepared_s: float = 0.0  # 0: the longest
    visible: bool = False


class CommitSinkBatch(msgspec.Struct, frozen=True):
    """Intent: commit the transactions of a batch together. The answer is True if the sink had committed the batch
    before, else False. `txns`: for each transaction its participants, as the client counted them; `sink_id` empty: they
    belong to no sink; `adopt`: True if the query may take the sink over from another query."""

    request: object
    owner: str
    txns: dict[int, Sequence[Participant]]
    sink_id: str = ""
    query_id: str = ""
    batch: int = -1
    adopt: bool = False


class GetTransactionStatus(msgspec.Struct, frozen=True):
    """Intent: return the state of a transaction or a half message. The answer is a TxnState. `owner`: the role that
    asks; None: an operator asks."""

    request: object
    txn: int
    owner: str | None = None


class AbortByAdmin(msgspec.Struct, frozen=True):
    """Intent: abort a transaction on behalf of an administrator. The answer is the state of the transaction
    afterwards."""

    request: object
    txn: int


class AbortIfOpen(msgspec.Struct, frozen=True):
    """Intent: abort an open transaction, because one of its topics is deleted by force. The answer is a TransactionRow.
    A prepared transaction is not aborted, because its client was told that it can commit."""

    request: object
    txn: int


class RemoveParticipant(msgspec.Struct, frozen=True):
    """Intent: remove a topic that cannot store the outcome of the transaction, so that the transaction no longer waits
    for it. The answer is None."""

    request: object
    txn: int
    topic: str


class HalfMessageEndVerb(enum.IntEnum):
    """How a client ends a half message, as in EndHalfRequest.Verb of proto/wire.proto. UNKNOWN and FAILED answer a
    check without a decision: the program does not know yet, or its check failed."""

    COMMIT = 0
    ROLLBACK = 1
    UNKNOWN = 2
    FAILED = 3


class HalfMessageChangeVerb(enum.IntEnum):
    """How an operator changes a half message, as in ChangeHalfRequest.Verb of proto/wire.proto. PARK ends its checks;
    REVIVE begins them again."""

    COMMIT = 0
    ROLLBACK = 1
    PARK = 2
    REVIVE = 3


class PrepareHalf(msgspec.Struct, frozen=True):
    """Intent: store a half message. The answer is PREPARED, or its outcome if the same half message was stored before.
    `check_key`: a text that the program gets with each check; `check_after_s`: seconds until the first check."""

    request: object
    half: int
    owner: str
    group: str
    check_key: str
    messages: list[HalfMessage]
    check_after_s: float = 0.0  # 0: the default


class EndHalf(msgspec.Struct, frozen=True):
    """Intent: end a half message, or answer a check of a half message. The answer is its outcome; PREPARED if it has
    none yet. `why`: the reason of FAILED."""

    request: object
    half: int
    verb: HalfMessageEndVerb
    owner: str
    check: int = 0  # the number of the check that is answered; 0: none
    why: str = ""


class ChangeHalf(msgspec.Struct, frozen=True):
    """Intent: change a half message on behalf of an operator. The answer is None."""

    request: object
    half: int
    verb: HalfMessageChangeVerb


class WatchHalves(msgspec.Struct, frozen=True):
    """Intent: add a process as a member of the group. Checks of half messages are sent to the member until
    `HalfMessageCore.remove_member` is called. The answer is None."""

    request: object
    member: object
    owner: str
    group: str


HalfMessageIntent = PrepareHalf | EndHalf | ChangeHalf | WatchHalves
CoordinatorIntent = (
    BeginTransactions
    | JoinTransaction
    | EndTransaction
    | CommitSinkBatch
    | GetTransactionStatus
    | AbortByAdmin
    | AbortIfOpen
    | RemoveParticipant
    | HalfMessageIntent
)


# ---------------------------------------------------------------------------------- effects
class BeginAnswer(NamedTuple):
    """The answer to BeginTransactions: `ids` consecutive transaction ids, beginning at `first`, which must be used
    within `lease_s` seconds. `holder`: which holder of the name the client is, 0 without a name; `already`: True if the
    batch of the sink is committed already; then no ids were given."""

    first: int
    ids: int
    lease_s: float
    holder: int = 0
    already: bool = False


class TransactionRow(NamedTuple):
    """A description of a transaction for administrators. `age_s`: the seconds since its first use; `left_s`: the
    seconds until its deadline; `waiting`: its participants; after its end, only those that have not stored the outcome;
    `reason`: why it was aborted, "" if it was not; `address`: of the client that began it; `timeout_s`: for how many
    seconds it may stay open, 0 if that is not known."""

    txn: int
    state: TxnState
    owner: str
    name: str
    tag: SinkBatchTag | None
    age_s: float
    left_s: float
    waiting: Sequence[str]
    reason: str = ""
    address: str = ""
    timeout_s: float = 0.0


IntentResult = BeginAnswer | TxnState | ForgottenOutcome | TransactionRow | bool | MagnetarError | None


class AnswerRequest(NamedTuple):
    """Effect: answer the request with a result or an error."""

    request: object
    result: IntentResult


class SendOutcomeToParticipant(NamedTuple):
    """Effect: send the outcome of the transaction to the participant, again and again until it has stored the outcome;
    then call `on_outcome_stored`."""

    txn: int
    committed: bool
    participant: Participant


class AbandonEpoch(NamedTuple):
    """Effect: stop the coordinator at this broker. Its next epoch continues its transactions. `why`: the reason."""

    why: str


class AskAboutHalfMessage(NamedTuple):
    """Effect: ask the member whether the half message must be committed. The member must answer within `answer_s`
    seconds, by an EndHalf with the number `check`. `unknown`: how many checks were answered UNKNOWN before; `age_s`:
    the age of the half message."""

    member: object
    half: int
    check: int
    check_key: str
    unknown: int
    age_s: float
    answer_s: float
    messages: Sequence[HalfMessage]


class PublishHalfMessage(NamedTuple):
    """Effect: publish the messages of the half message in the transaction `txn`; then call
    `HalfMessageCore.on_published` or `HalfMessageCore.on_not_published`."""

    half: int
    txn: int
    messages: Sequence[HalfMessage]


class WarnOfParkedHalfMessage(NamedTuple):
    """Effect: warn that the half message is parked, so that an operator must decide its outcome."""

    half: int
    group: str
    why: str


CoordinatorEffect = (
    AnswerRequest
    | SendOutcomeToParticipant
    | AbandonEpoch
    | AskAboutHalfMessage
    | PublishHalfMessage
    | WarnOfParkedHalfMessage
)


class AppendRecords(NamedTuple):
    """Effect: append the records to the ledger in this order; then call `on_appended(number)`, or `end_epoch` if the
    outcome is unknown."""

    number: int
    records: list[AnyCoordinatorRecord]


class HalfMessageLimits(msgspec.Struct, frozen=True):
    """The limits of the half messages of a coordinator (docs/transactions.md). `check_after_s`: seconds until the first
    check; `answer_s`: seconds for the answer to a check. A half message is parked after `unknown_max` answers of
    UNKNOWN, or `open_s` seconds without a decision. `retention_s`: seconds for which outcomes are kept."""

    group_max: int = 10_000  # open ones of a group
    bytes_max: int = 64 << 20  # of the messages of all that are open; a role has 1 / ROLE_SHARE_DIVISOR of it
    check_after_s: float = 10.0
    pause_s: float = 30.0  # between two checks; it doubles …
    pause_s_max: float = 600.0  # … up to this
    answer_s: float = 30.0
    unknown_max: int = 15
    open_s: float = 86_400.0
    retention_s: float = 3_600.0


class CoordinatorLimits(msgspec.Struct, frozen=True):
    """The limits of a transaction coordinator: of its transactions, names, sinks and half messages. `timeout_s`,
    `timeout_s_max`: after how many seconds an open transaction is aborted, by default and at most. `lease_s`: seconds
    in which a leased id must be used. `retention_s`: seconds for which outcomes are kept after all participants have
    stored them. `prepared_s_max`: for how many seconds a transaction may stay prepared; `name_idle_s`, `sink_idle_s`:
    after how many seconds without use a name or a sink is removed."""

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
    halves: HalfMessageLimits = HalfMessageLimits()


DURATION_BOUNDS_S = (0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 30.0, 60.0, 300.0, 1500.0, 3000.0)
"""Upper bounds of the histogram of how long transactions were open, as in Pulsar."""


class CoordinatorCounters(msgspec.Struct):
    """Counters of a coordinator since its take-over. `durations`: a histogram of the time from the first use of a
    transaction id to the outcome of the transaction. Its bounds are DURATION_BOUNDS_S (seconds); the last count is of
    longer times."""

    begun: int = 0
    committed: int = 0
    aborted: dict[AbortReason, int] = msgspec.field(default_factory=dict)
    settled: int = 0
    records: int = 0  # durable ones
    durations: list[int] = msgspec.field(default_factory=lambda: [0] * (len(DURATION_BOUNDS_S) + 1))
    durations_sum_s: float = 0.0  # of all together

    def count_ended_transaction(self, lasted_s: float) -> None:
        """Counts a transaction that has got its outcome. `lasted_s`: the time in seconds from the first use of its id
        to the outcome."""
        self.durations[bisect_left(DURATION_BOUNDS_S, lasted_s)] += 1
        self.durations_sum_s += lasted_s


class HalfMessagePhase(enum.IntEnum):
    """The phases of a half message, as they are shown to administrators: HalfInfo.State of proto/wire.proto."""

    WAITING = 0
    ASKED = 1
    COMMITTING = 2
    ENDING = 3
    PARKED = 4


class HalfMessageRow(NamedTuple):
    """A description of a half message for administrators. `age_s`: its age in seconds; `unknown`: how many checks were
    answered UNKNOWN; `members`: the number of connected members of its group; `size_bytes`: of its messages; `reason`:
    why it is parked, or its last failure; "" if there is none."""

    half: int
    phase: HalfMessagePhase
    owner: str
    group: str
    check_key: str
    age_s: float
    unknown: int
    members: int
    size_bytes: int
    topics: Sequence[str]
    reason: str
