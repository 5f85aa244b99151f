"""The values, effects and settings of the relay's core.

A *destination* is what one broker producer publishes to: a topic without partitions, or one partition, by its full
name. Positions are sequence ids; -1: none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ...proto.errors import MagnetarError

NONE = -1


class ClaimedRow(NamedTuple):
    """A row that has a sequence id and a destination, which it keeps until its outcome is recorded."""

    id: int
    seq: int
    destination: str
    size: int  # bytes of key, value and properties
    key: str | None
    value: bytes | None
    properties: str | None  # a JSON object
    event_time: int | None  # ms since the epoch, as the next one
    deliver_at: int | None
    attempts: int  # how often it was refused
    unit: int | None = None  # of the application's transaction; None: it is one of its own
    value_schema: str | None = None  # with which the value was encoded (rows.py); None: bytes
    key_form: int | None = None  # KeyForm; None: the key is text, or there is none


@dataclass(frozen=True, slots=True)
class ClaimedShard:
    """The state of a shard that a relay has just claimed. `stored`: by destination, the highest sequence id that is
    known to be stored. `claimed`: rows without a known outcome, in the order of their sequence ids. `absent_s`:
    seconds since a relay last had the shard; None: none ever had it. `was_atomic`: whether an atomic relay ever had
    it."""

    epoch: int
    next_seq: int
    stored: dict[str, int]
    claimed: list[ClaimedRow]
    absent_s: float | None = None
    was_atomic: bool = False


class RowsOutcome(Enum):
    """The outcome of sending a group of rows, or the units of a cluster transaction."""

    STORED = "all of it is in the topic"
    ROW_REFUSED = "nothing of it is stored, because of what a row holds"
    PUT_OFF = "the destination takes nothing now; what was stored is learned when it is opened again"
    UNKNOWN = "of a flight: its commit got no answer"


class RefusedRow(NamedTuple):
    """A refused row: it gives its sequence id back, and is retried after `retry_after_s`, or is parked."""

    row: ClaimedRow
    error: str
    parked: bool
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A request to claim rows, at most `rows_max` rows and `bytes_max` bytes. `topics`: of each topic the number of
    partitions (0: not partitioned), and the partitions that have room. `units`: only whole units are claimed; the
    first may exceed the bounds."""

    rows_max: int
    bytes_max: int
    topics: dict[str, tuple[int, tuple[int, ...]]]
    units: bool = False


@dataclass(frozen=True, slots=True)
class DatabaseTurn:
    """The content of one transaction in the database, in this order: check that this relay still has the shard; record
    outcomes; claim rows. It can be repeated if it is unknown whether it committed: `next_seq` shows whether its claim
    did."""

    epoch: int
    next_seq: int
    delete: list[int] = field(default_factory=list)  # ids of stored rows
    stored: dict[str, int] = field(default_factory=dict)
    failures: list[RefusedRow] = field(default_factory=list)
    release: list[ClaimedRow] = field(default_factory=list)  # not sent; they wait again
    claim: ClaimRequest | None = None


@dataclass(frozen=True, slots=True)
class ResolveTopic:
    """Effect: ask the cluster for the topic's number of partitions, and whether its deduplication is on."""

    topic: str


@dataclass(frozen=True, slots=True)
class OpenDestination:
    """Effect: open the producer of a destination, after closing the previous one."""

    destination: str


@dataclass(frozen=True, slots=True)
class SendRows:
    """Effect: publish these rows as one entry, under their sequence ids."""

    destination: str
    rows: tuple[ClaimedRow, ...]


@dataclass(frozen=True, slots=True)
class SendInTransaction:
    """Effect: publish the entries of each destination, in order, in one cluster transaction, and commit it."""

    parts: dict[str, tuple[tuple[ClaimedRow, ...], ...]]


@dataclass(frozen=True, slots=True)
class RunTurn:
    """Effect: run this turn, which records outcomes and claims rows, as one database transaction."""

    turn: DatabaseTurn


@dataclass(frozen=True, slots=True)
class FindTopics:
    """Effect: search the outbox for topics with waiting rows."""


@dataclass(frozen=True, slots=True)
class StopRelay:
    """Effect: end the relay with this error at once, without waiting for what is in flight."""

    error: MagnetarError


Effect = ResolveTopic | OpenDestination | SendRows | SendInTransaction | RunTurn | FindTopics | StopRelay


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """Settings of a relay."""

    rows_per_claim: int = 1000  # of one transaction; more: fewer transactions, more memory and a longer one
    bytes_per_claim: int = 8 << 20  # of one transaction; one row may be larger
    rows_per_entry: int = 1000  # of one entry in a topic, which is stored or refused as a whole
    bytes_per_entry: int = 1 << 20  # of one entry; a larger row is alone in its own
    poll_s: float = 0.05  # between two looks at an outbox that had nothing; `wake` ends the wait
    find_s: float = 0.25  # between two looks for topics that were not known
    refresh_s: float = 60.0  # between two questions for partitions that were added, and for the policy
    attempts_max: int = 10  # refusals of a row before it is parked
    retry_first_s: float = 1.0  # before a refused row is sent again; each wait is twice as long
    retry_last_s: float = 300.0  # the longest of them
    back_off_last_s: float = 30.0  # the longest wait before a destination or the database is tried again
    remembered_s: float = 5 * 3600.0  # a relay was absent for less: topics know its ids (dedup_inactive_minutes)
    seen_s: float = 2.0  # an idle relay notes so often that it is there
    stop_s: float = 10.0  # how long `stop` waits for what is in flight
