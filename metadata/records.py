"""The typed records of the metadata tree, and their bytes.

    record = magic "MR" | format version u8 | kind u8 | crc32c u32 (of the body) | body
    body   = the record as JSON (msgspec), so that an operator can read the tree with any tool

A reader refuses another magic, an unknown version, another kind, or a checksum that does not match (DamagedRecord, with
the path where it stood). Unknown JSON fields are ignored, so that a newer writer can add some; missing ones have their
defaults. Example: `encode(CounterRecord(next=7))` is `b'MR\\x01\\x02' + bytes.fromhex("2a9661f6") + b'{"next":7}'`.
"""

from __future__ import annotations

import struct
from typing import ClassVar, TypeVar

import google_crc32c
import msgspec

from ..proto.policies import Policies
from ..proto.versions import METADATA_RECORD, sentence

_HEAD = struct.Struct(">2sBBI")
MAGIC = b"MR"
VERSION = METADATA_RECORD.version


class DamagedRecord(ValueError):
    """The bytes of a metadata node are not the record that should stand there."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    kind: ClassVar[int] = 0


R = TypeVar("R", bound=Record)


class ClusterRecord(Record, frozen=True, kw_only=True):
    kind = 1
    instance: str  # random, made with the cluster; bookies' cookies repeat it


class CounterRecord(Record, frozen=True, kw_only=True):
    kind = 2
    next: int


OPEN = "open"
IN_RECOVERY = "in-recovery"
CLOSED = "closed"


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """A ledger's stretch with one ensemble."""

    first_entry: int
    bookies: tuple[str, ...]  # uuids; slot i is bookies[i]


class LedgerRecord(Record, frozen=True, kw_only=True):
    """Ledger metadata (ledger protocol §1.1). `last_entry` and `length` mean something only when CLOSED."""

    kind = 3
    ledger_id: int
    state: str
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    key: bytes  # master key, 20 bytes
    token: str  # of the creator: recognises one's own retried create
    fragments: tuple[Fragment, ...]
    last_entry: int = -1
    length: int = 0
    created_ms: int = 0
    properties: dict[str, str] = {}  # whose ledger it is: {"topic": …} or {"cursor": …, "topic": …}

    def __repr__(self) -> str:
        """Without the key: what is printed ends in logs."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "key")
        return f"LedgerRecord({', '.join(shown)})"


class CookieRecord(Record, frozen=True, kw_only=True):
    """What the cluster knows of a bookie's directory; one that is older was rolled back
    (bookie/node/identity.py)."""

    kind = 4
    bookie: str  # uuid
    instance: str
    directories: tuple[str, ...]  # its places, by name
    starts: int = 0  # completed starts
    journal: int = 0  # a position up to which its journal was synced
    offset: int = 0


class BookieRecord(Record, frozen=True, kw_only=True):
    kind = 5
    bookie: str
    endpoint: str  # host:port of its peer service
    read_only: bool = False
    rack: str = "/default"
    total_bytes: int = 0
    free_bytes: int = 0
    limbo: bool = False  # it lost data and answers "unknown" where it misses some; new ledgers may use it (limbo.py)
    fenced_upto: int = -1  # it refuses clients' adds to ledgers up to this id, for ever
    process: str = ""  # random, of the process: another one has the uuid, too, when this is another one


class RacksRecord(Record, frozen=True, kw_only=True):
    kind = 14
    racks: dict[str, str] = {}  # bookie's uuid → rack, above the one it registered with


class BrokerRecord(Record, frozen=True, kw_only=True):
    kind = 6
    name: str
    endpoint: str  # host:port of its gRPC services, as clients reach it


class OwnerRecord(Record, frozen=True, kw_only=True):
    kind = 7
    broker: str
    endpoint: str


class TenantRecord(Record, frozen=True, kw_only=True):
    kind = 8
    admin_roles: tuple[str, ...] = ()
    allowed_clusters: tuple[str, ...] = ()


class NamespaceRecord(Record, frozen=True, kw_only=True):
    """How topics of a namespace are made and spread; its policies are a record of their own."""

    kind = 9
    bundles: int = 4
    auto_topic_creation: bool = True
    default_partitions: int = 0


class PoliciesRecord(Record, frozen=True, kw_only=True):
    """What a namespace or a topic does not inherit (proto/policies.py)."""

    kind = 60
    policies: Policies = Policies()


class PartitionedRecord(Record, frozen=True, kw_only=True):
    kind = 10
    partitions: int


class TopicLedger(msgspec.Struct, frozen=True, kw_only=True):
    ledger_id: int
    first_index: int  # index of its first message
    entries: int = -1  # -1: not closed yet
    size: int = 0
    end_index: int = -1  # one past its last message
    created_ms: int = 0
    closed_ms: int = 0


class DedupPlace(msgspec.Struct, frozen=True, kw_only=True):
    """Where a topic's deduplication stands: the last snapshot in `ledger_id`; none there: the log after the mark."""

    mark_ledger: int  # position at which the ledger's first snapshot was taken
    mark_entry: int
    ledger_id: int = -1


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """The compacted form of a topic, up to and with its horizon (broker/log/compaction.py)."""

    ledger_id: int
    horizon_ledger: int
    horizon_entry: int
    end_index: int  # one past the last message that was looked at
    messages: int = 0  # that survived, in so many entries and bytes
    entries: int = 0
    size: int = 0
    compacted_ms: int = 0


class TopicRecord(Record, frozen=True, kw_only=True):
    kind = 11
    ledgers: tuple[TopicLedger, ...] = ()
    terminated: bool = False
    created_ms: int = 0
    dedup: DedupPlace | None = None  # None: publishes are not deduplicated
    epoch: int = 0  # grows with each producer that takes the topic for itself
    compacted: Compacted | None = None
    pending_deletion: tuple[int, ...] = ()  # compacted ledgers that are written, or were replaced: no reader opens them
    claim: str = ""  # random, of the owner that changes the record: another one in its place: it was taken over


class DelayBucket(msgspec.Struct, frozen=True, kw_only=True):
    """A closed ledger with delivery times of delayed entries (broker/subscription/format/delays.py)."""

    ledger_id: int
    entries: int
    last_ms: int  # when the last of them is due


class CursorRecord(Record, frozen=True, kw_only=True):
    """Where a subscription's state is: the snapshot, else the last one in `ledger_id`, else the position given here."""

    kind = 12
    ledger_id: int = -1
    mark_ledger: int = -1  # mark-delete position at the time of writing: everything up to and with it is acknowledged
    mark_entry: int = -1
    properties: dict[str, str] = {}
    created_ms: int = 0
    claim: str = ""  # of the broker that writes the state; another one in its place means that it was taken over
    snapshot: bytes = b""  # the whole state, where the last owner closed it in order and it is small; counts first
    delays: tuple[DelayBucket, ...] = ()  # what is not named here is read from the log


class DamagedEntriesRecord(Record, frozen=True, kw_only=True):
    """Entries of a ledger whose copy at a bookie is damaged: they want another copy (bookie/maintenance/scrub.py)."""

    kind = 13
    ledger_id: int
    bookie: str
    ranges: tuple[tuple[int, int], ...]  # first and last entry of each, ascending


class UnderReplicatedRecord(Record, frozen=True, kw_only=True):
    """A ledger that misses copies, and what became of the tries to make them (bookie/repair/core/marks.py)."""

    kind = 20
    ledger_id: int
    bookies: dict[str, str]  # whose copies are missing, and why: values of `RepairReason`
    in_recovery: bool = False  # a recovery of it was begun and did not end
    since_ms: int = 0
    attempts: int = 0  # since the last change of `bookies`
    stuck: str = ""  # why the last try did not make it whole: a value of `Stuck`
    last_error: str = ""
    retry_ms: int = 0  # no try before this time of day


class RepairSettingsRecord(Record, frozen=True, kw_only=True):
    kind = 21
    enabled: bool = True  # auditor and workers; off, missing copies stay missing


class AuditorRecord(Record, frozen=True, kw_only=True):
    kind = 22
    name: str
    token: str  # random: recognises one's own election
    since_ms: int = 0


class RepairLockRecord(Record, frozen=True, kw_only=True):
    kind = 23
    worker: str
    token: str


class RepairWorkerRecord(Record, frozen=True, kw_only=True):
    """What a worker did since its start, as of `updated_ms`."""

    kind = 24
    name: str
    updated_ms: int = 0
    ledgers: int = 0  # made whole
    entries: int = 0
    bytes: int = 0
    failures: int = 0
    bytes_per_s: int = 0  # of the last seconds
    limit_bytes_per_s: int = 0  # 0: none
    working_on: dict[str, tuple[int, int]] = {}  # ledger → bytes copied, of about how many


class DepartingRecord(Record, frozen=True, kw_only=True):
    """An operator wants no copy of anything on the bookie: alive (decommission) or dead (recover)."""

    kind = 25
    bookie: str
    since_ms: int = 0
    forget: bool = False  # once nothing is left there and it is stopped, its cookie goes


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """A time for which the tree's file was open in one process."""

    number: int  # one more than the one before
    token: str  # random
    revision: int  # of the tree when it began
    restored: bool = False  # a backup was put in its place on purpose (`magnetar metadata restore`)


class IncarnationsRecord(Record, frozen=True, kw_only=True):
    """What the tree's own file went through, the youngest last: nobody writes it, the store answers with it."""

    kind = 26
    incarnations: tuple[Incarnation, ...] = ()


_KINDS: dict[int, type[Record]] = {
    cls.kind: cls
    for cls in (
        ClusterRecord, CounterRecord, LedgerRecord, CookieRecord, BookieRecord, BrokerRecord, OwnerRecord,
        TenantRecord, NamespaceRecord, PartitionedRecord, TopicRecord, CursorRecord,
        DamagedEntriesRecord, RacksRecord, UnderReplicatedRecord, RepairSettingsRecord, AuditorRecord, RepairLockRecord,
        RepairWorkerRecord, DepartingRecord, PoliciesRecord,
        IncarnationsRecord,
    )
}  # fmt: skip


def encode(record: Record) -> bytes:
    body = msgspec.json.encode(record)
    return _HEAD.pack(MAGIC, VERSION, record.kind, google_crc32c.value(body)) + body


def decode(data: bytes, cls: type[R], where: str = "?") -> R:
    """The record of class `cls` in `data`; `where` (the path) goes into DamagedRecord."""
    if len(data) < _HEAD.size:
        raise DamagedRecord(f"{where}: {len(data)} bytes are too few for a record")
    magic, version, kind, crc = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if magic != MAGIC:
        raise DamagedRecord(f"{where}: not a Magnetar record")
    if not 1 <= version <= VERSION:
        raise DamagedRecord(sentence(METADATA_RECORD, version, where) if version else f"{where}: format version 0")
    if kind != cls.kind:
        found = _KINDS.get(kind)
        raise DamagedRecord(f"{where}: a {found.__name__ if found else kind}, not a {cls.__name__}")
    if google_crc32c.value(bytes(body)) != crc:
        raise DamagedRecord(f"{where}: checksum does not match")
    try:
        return msgspec.json.decode(body, type=cls)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedRecord(f"{where}: {error}") from error
