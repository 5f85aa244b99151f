"""The typed records of the metadata tree, and their bytes.

    record = magic "MR" | format version u8 | kind u8 | crc32c u32 (of the path in UTF-8 and the body) | body
    body   = the record as JSON (msgspec), so that an operator can read the tree with any tool

The path is in the checksum: a record that a damaged file shows at another path is damaged there. Version 1, which an
older Magnetar wrote, has the checksum of the body alone. A record that names its owner (`PLACES`) is read at that
owner's path only, in both versions. Which of the two `encode` writes is the format of the cluster
(`may_write_feature`).

A reader refuses another magic, an unknown version, another kind, another owner, or a checksum that does not match
(DamagedRecord, with the record's path). Unknown JSON fields are ignored, so that a newer writer can add some; missing
ones have their defaults. Example: `encode(CounterRecord(next=7), "/ids/ledger")` is
`b'MR\\x02\\x02' + bytes.fromhex("ff6f6a53") + b'{"next":7}'`.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec

from ..proto.checksum import crc32c
from ..proto.errors import DataLost, NewerFormat
from ..proto.policies import Policies
from ..proto.versions import METADATA_RECORD, PRODUCT, newer_format_text
from . import paths

_HEAD = struct.Struct(">2sBBI")
MAGIC = b"MR"
VERSION = METADATA_RECORD.version
BODY_ALONE = 1
"""The version whose checksum does not cover the path."""

CLUSTER_FORMAT = 2
"""The format of the cluster that this Magnetar can write, besides the one before."""


class Feature(enum.Enum):
    """A feature that only processes of a certain cluster format understand. The value of a member is that format, and a
    description of the feature."""

    RECORD_OF_PATH = (2, "records with the path in their checksum (version 2)")
    SKIPPED_LOSSES = (2, "TopicRecord.lost, which an older broker drops when it writes the record")
    ASSIGNMENTS = (2, "owner records that another broker made for the owner (OwnerRecord.assigned_by)")


class _Written:
    """The format that this process writes, once `set_written_format` was called."""

    format = CLUSTER_FORMAT
    settled = False


def may_write_feature(feature: Feature) -> bool:
    """Returns whether this process may write data that uses the feature, which older processes do not understand. False
    before `magnetar cluster finish-upgrade`."""
    return _Written.format >= feature.value[0]


def written_format() -> int:
    """Returns the cluster format in which this process writes its data."""
    return _Written.format


def set_written_format(found: int) -> None:
    """Sets the format in which this process writes to the format of its cluster. Only the first call in the process has
    an effect, that of its first session. Raises NewerFormat if the cluster's format is later than this Magnetar's.

    If the cluster's format is raised while a process runs, the process continues to write the old format until its next
    start: all other processes read both formats, and a value that the process compares with a value that it wrote is
    never of another version.
    """
    if found > CLUSTER_FORMAT:
        text = f"the cluster has format {found}; Magnetar {PRODUCT} reads up to {CLUSTER_FORMAT}: upgrade this process"
        raise NewerFormat(text, version=found, known=CLUSTER_FORMAT)
    if not _Written.settled:
        _Written.settled, _Written.format = True, found


class DamagedRecord(DataLost, ValueError):
    """Raised when the bytes of a metadata node are not a record of the class that its path requires. (On the wire:
    DataLost.)

    `str` of the error says what is wrong; its message, which callers get, also says what to do.
    """

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: what this record decides is not known; restore the metadata from a copy that has it")
        self._what = what

    def __str__(self) -> str:
        return self._what


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The base class of all records that are stored as values of metadata nodes. `_KINDS` numbers the classes."""

    kind: ClassVar[int] = 0


R = TypeVar("R", bound=Record)


class ClusterRecord(Record, frozen=True, kw_only=True):
    """The metadata record with the identity of the cluster."""

    kind = 1
    instance: str  # random, made with the cluster; bookies' cookies repeat it
    format: int = 1  # what its processes may write (`may_write_feature`); `magnetar cluster finish-upgrade` raises it


class CounterRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a counter: the next free id. All smaller ids are allocated."""

    kind = 2
    next: int


OPEN = "open"
IN_RECOVERY = "in-recovery"
CLOSED = "closed"


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """A fragment of a ledger: the entries from `first_entry` on, up to the next fragment, and the ensemble of bookies
    that store them."""

    first_entry: int
    bookies: tuple[str, ...]  # uuids; slot i is bookies[i]


class LedgerRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a ledger (ledger protocol §1.1). `last_entry` and `length` are valid only if the ledger is
    CLOSED."""

    kind = 3
    ledger_id: int
    state: str
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    key: bytes  # master key, 20 bytes
    token: str  # of the creator, which recognises its own retried create by it
    fragments: tuple[Fragment, ...]
    last_entry: int = -1
    length: int = 0
    created_ms: int = 0
    properties: dict[str, str] = {}  # the ledger's owner: {"topic": …} or {"cursor": …, "topic": …}

    def __repr__(self) -> str:
        """Returns a text without the key, because logs show it."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "key")
        return f"LedgerRecord({', '.join(shown)})"


class DeletedLedgersRecord(Record, frozen=True, kw_only=True):
    """The metadata record of deleted ledgers: those ids of one page of ledger ids whose owners deleted the ledgers
    (ledger/client.py)."""

    kind = 29
    page: int
    ranges: tuple[tuple[int, int], ...] = ()  # first and last id of each, ascending


class CookieRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a bookie's data directory. A directory that is older than this record was rolled back
    (bookie/store/identity.py)."""

    kind = 4
    bookie: str  # uuid
    instance: str
    directories: tuple[str, ...]  # its places, by name
    starts: int = 0  # completed starts
    journal: int = 0  # a position up to which its journal was synced
    offset: int = 0


class BookieRecord(Record, frozen=True, kw_only=True):
    """The metadata record that registers a running bookie."""

    kind = 5
    bookie: str
    endpoint: str  # host:port of its peer service
    read_only: bool = False
    rack: str = "/default"
    total_bytes: int = 0
    free_bytes: int = 0
    limbo: bool = False  # it lost data and answers "unknown" for entries it lacks; new ledgers may use it
    fenced_upto: int = -1  # it refuses clients' adds to ledgers up to this id, for ever
    process: str = ""  # random, of the process: another value means that another process uses the same uuid
    key: str = ""  # public, of its peer service (runtime/peer/keys.py); empty: it speaks in clear
    version: str = ""  # of its Magnetar
    format: int = 1  # the latest format of a cluster that it understands (CLUSTER_FORMAT)


class RacksRecord(Record, frozen=True, kw_only=True):
    """The metadata record of the racks that an operator assigned to bookies."""

    kind = 14
    racks: dict[str, str] = {}  # bookie's uuid → rack; overrides the one it registered with


class BrokerRecord(Record, frozen=True, kw_only=True):
    """The metadata record that registers a running broker."""

    kind = 6
    name: str
    endpoint: str  # host:port of its gRPC services, as clients reach it
    pulsar: dict[str, tuple[str, ...]] = {}  # name of a listener ("": the default) → URLs of Pulsar's protocol
    http: str = ""  # http:// or https:// URL of its REST interface; empty: it serves none
    group: str = ""  # those of one group share what any of them is asked for; empty: it takes that itself
    draining: bool = False  # it gets no bundles, and gives away what it owns
    busy_percent: int = 0  # of one core, by its process, as it reported last
    bundles: int = 0  # that it owned then, coordinators of transactions too
    report: int = 0  # ascends with each report of one registration
    version: str = ""  # of its Magnetar
    format: int = 1  # the latest format of a cluster that it understands (CLUSTER_FORMAT)


class DrainRecord(Record, frozen=True, kw_only=True):
    """The metadata record of an operator's order that a broker gives all its topics to other brokers (drain). The
    record outlives the broker's process."""

    kind = 30
    broker: str
    endpoint: str = ""  # that it had: by this a broker with a random name finds the order after a restart
    since_ms: int = 0


class OwnerRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a bundle's owner: the broker that serves the bundle, or that is assigned to take it
    over."""

    kind = 7
    broker: str
    endpoint: str
    assigned_by: str = ""  # the broker that assigned it, whose session has this record; empty: the owner has taken it


class TenantRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a tenant: its admin roles and other settings."""

    kind = 8
    admin_roles: tuple[str, ...] = ()
    allowed_clusters: tuple[str, ...] = ()


class NamespaceRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a namespace: how its topics are made and distributed among brokers. The policies of the
    namespace are in a PoliciesRecord."""

    kind = 9
    bundles: int = 4
    auto_topic_creation: bool = True
    default_partitions: int = 0
    is_creation_set: bool = False  # the two before were set, as they are or otherwise


class PoliciesRecord(Record, frozen=True, kw_only=True):
    """The metadata record of policies: those that a namespace or a topic sets itself (proto/policies.py), with the
    notes of its users; or those that override the settings of all brokers."""

    kind = 60
    policies: Policies = Policies()
    properties: dict[str, str] = {}  # free text; nothing reads it, but of brokers: texts of `RuntimeSettings`


class GrantsRecord(Record, frozen=True, kw_only=True):
    """The metadata record of the permissions that roles have in a namespace (broker/access/table_core.py)."""

    kind = 61
    roles: dict[str, tuple[str, ...]] = {}  # role → actions
    topics: dict[str, dict[str, tuple[str, ...]]] = {}  # full name of a topic, without a partition → role → actions
    subscriptions: dict[str, tuple[str, ...]] = {}  # name → the only roles that may use it
    prefix_mode: bool = False  # a subscription is named by its role


class SchemaEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a topic's schema, in the list of all versions."""

    version: int
    fingerprint: bytes  # of equal definitions: equal (broker/cluster/schema_core.py)
    created_ms: int
    user: str = ""  # the role that registered it
    deleted: bool = False


class SchemaListRecord(Record, frozen=True, kw_only=True):
    """The metadata record of all versions of a topic's schema, in order. A version number is used only once."""

    kind = 64
    next: int = 0
    schemas: tuple[SchemaEntry, ...] = ()


class SchemaRecord(Record, frozen=True, kw_only=True):
    """The metadata record of the definition of one version of a schema, which never changes."""

    kind = 65
    type: int  # proto/schema.py `SchemaType`
    name: str = ""
    data: bytes = b""
    properties: dict[str, str] = {}


class PartitionedRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a partitioned topic. `created_ms` is the topic's incarnation; 0 if an older version of
    this software made the topic."""

    kind = 10
    partitions: int
    created_ms: int = 0


class TopicLedger(msgspec.Struct, frozen=True, kw_only=True):
    """One ledger in a topic's list of ledgers."""

    ledger_id: int
    first_index: int  # index of its first message
    entries: int = -1  # -1: not closed yet
    size: int = 0
    end_index: int = -1  # one past its last message
    created_ms: int = 0
    closed_ms: int = 0


class DeduplicationStateLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The place where a topic's deduplication state is stored: the last snapshot in the ledger `ledger_id`; without
    that ledger, the state follows from the topic's log after the mark."""

    mark_ledger: int  # position at which the ledger's first snapshot was taken
    mark_entry: int
    ledger_id: int = -1


class TransactionOutcomesLocation(msgspec.Struct, frozen=True, kw_only=True):
    """The place where the outcomes of a topic's transactions are stored: the last snapshot in the ledger `ledger_id`;
    without that ledger, the outcomes follow from the topic's log after the mark."""

    mark_ledger: int  # no entry of a transaction is before it; or the position of the ledger's first snapshot
    mark_entry: int
    ledger_id: int = -1


class Compacted(msgspec.Struct, frozen=True, kw_only=True):
    """The compacted form of a topic, up to and including its horizon: the ledger that contains it, and its counts
    (broker/log/compaction.py)."""

    ledger_id: int
    horizon_ledger: int
    horizon_entry: int
    end_index: int  # one past the last message that the compaction read
    messages: int = 0  # that remain, in so many entries and bytes
    entries: int = 0
    size: int = 0
    compacted_ms: int = 0


class LostRange(msgspec.Struct, frozen=True, kw_only=True):
    """A range of entries of a topic that every replica has lost, and that an operator made readers skip
    (broker/log/managed_ledger.py)."""

    ledger_id: int
    first_entry: int = 0
    last_entry: int = -1  # -1: to an end that is not known
    first_index: int = 0  # of its messages; no other message ever has these
    end_index: int = 0
    skipped_ms: int = 0
    forced: bool = False  # some replica could not be asked


class TopicRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a topic, or of one partition: the list of its ledgers."""

    kind = 11
    ledgers: tuple[TopicLedger, ...] = ()
    terminated: bool = False
    created_ms: int = 0
    dedup: DeduplicationStateLocation | None = None  # None: publishes are not deduplicated
    # None: no entry and no acknowledgement was ever in a transaction
    transactions: TransactionOutcomesLocation | None = None
    epoch: int = 0  # grows with each producer that takes exclusive access; above created_ms from the first on
    compacted: Compacted | None = None
    pending_deletion: tuple[int, ...] = ()  # compacted ledgers that are being written or were replaced: never read
    claim: str = ""  # random, of the owner that changes the record: another value means that the topic was taken over
    subscriptions: tuple[str, ...] | None = None  # durable ones: one without a record is lost. None: not known, or long
    lost: tuple[LostRange, ...] = ()  # what was passed over, in order; its indexes are not used again


class DelayBucket(msgspec.Struct, frozen=True, kw_only=True):
    """A closed ledger that contains the delivery times of delayed entries of a subscription
    (broker/subscription/delays.py)."""

    ledger_id: int
    entries: int
    last_ms: int  # delivery time of its last entry


class CursorRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a subscription's state. The state is the snapshot in this record; if there is none, the
    last snapshot in the ledger `ledger_id`; otherwise the position in this record."""

    kind = 12
    ledger_id: int = -1
    mark_ledger: int = -1  # mark-delete position when it was written: all up to and with it is acknowledged
    mark_entry: int = -1
    properties: dict[str, str] = {}
    created_ms: int = 0
    claim: str = ""  # of the broker that writes the state; another value means that the subscription was taken over
    snapshot: bytes = b""  # the whole state, small, from an owner that closed it in order; used first
    delays: tuple[DelayBucket, ...] = ()  # delayed entries outside these buckets are read from the log


class DamagedEntriesRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a bookie's damage report: entries of a ledger whose copy at this bookie is damaged. Repair
    replaces the copy (bookie/maintenance/scrub.py)."""

    kind = 13
    ledger_id: int
    bookie: str
    ranges: tuple[tuple[int, int], ...]  # first and last entry of each, ascending


class UnderReplicatedRecord(Record, frozen=True, kw_only=True):
    """The repair mark of a ledger: the metadata record that the ledger lacks copies, and the result of the attempts to
    make them (bookie/maintenance/repair_core.py)."""

    kind = 20
    ledger_id: int
    bookies: dict[str, str]  # bookie whose copies are missing → reason, a value of `RepairReason`
    in_recovery: bool = False  # its recovery was begun and has not ended
    since_ms: int = 0
    attempts: int = 0  # since the last change of `bookies`
    stuck: str = ""  # why the last attempt did not repair it: a value of `Stuck`
    last_error: str = ""
    retry_ms: int = 0  # no attempt before this wall-clock time


class RepairSettingsRecord(Record, frozen=True, kw_only=True):
    """The metadata record of the setting whether the cluster repairs ledgers automatically."""

    kind = 21
    enabled: bool = True  # False: auditor and workers pause, and missing copies stay missing


class AuditorRecord(Record, frozen=True, kw_only=True):
    """The metadata record that names the process which is the auditor of the cluster."""

    kind = 22
    name: str
    token: str  # random: by it a process recognises its own election
    since_ms: int = 0


class RepairLockRecord(Record, frozen=True, kw_only=True):
    """The metadata record that locks a ledger for its repair. It names the worker that repairs the ledger."""

    kind = 23
    worker: str
    token: str


class RepairWorkerRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a repair worker's progress: its work since its start, as of `updated_ms`."""

    kind = 24
    name: str
    updated_ms: int = 0
    ledgers: int = 0  # repaired
    entries: int = 0
    bytes: int = 0
    failures: int = 0
    bytes_per_s: int = 0  # of the last seconds
    limit_bytes_per_s: int = 0  # 0: none
    working_on: dict[str, tuple[int, int]] = {}  # ledger → bytes copied, of about how many


class DepartingRecord(Record, frozen=True, kw_only=True):
    """The metadata record of an operator's order to move every copy off a bookie, which is alive (decommission) or dead
    (recover)."""

    kind = 25
    bookie: str
    since_ms: int = 0
    forget: bool = False  # its cookie is deleted once it is empty and stopped


class MemberRecord(Record, frozen=True, kw_only=True):
    """The metadata record of a member of a secured cluster: one of the cluster's processes, or an operator's
    command."""

    kind = 63
    role: str  # "broker", "bookie" or "operator", as in its path
    name: str  # of its certificate; for logs
    key: str  # public, 64 hexadecimal digits


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """A period in which one process of the metadata service has the file of the metadata tree open."""

    number: int  # one more than that of the incarnation before
    token: str  # random
    revision: int  # of the tree when it began
    restored: bool = False  # it began with a backup (`magnetar metadata restore`)


class TransactionsRecord(Record, frozen=True, kw_only=True):
    """The metadata record of the number of transaction coordinators, and of the coordinators that have a record. The
    cluster's first transaction fixes the number, because a transaction id contains the number of its coordinator."""

    kind = 27
    coordinators: int
    begun: tuple[int, ...] = ()  # that have a record: one of them without a record has lost it


class CoordinatorRecord(Record, frozen=True, kw_only=True):
    """The metadata record of one transaction coordinator (broker/transaction/log.py)."""

    kind = 28
    epoch: int = 0  # grows with each claim; it is in the ids, so none is given twice
    ledger_id: int = -1  # begins with the whole state; -1: nothing was written so far
    claim: str = ""  # random, of the owner: another value means that the coordinator was taken over
    idle: bool = False  # it was closed in order, with nothing open or unsettled: it is loaded when a client asks


class IncarnationsRecord(Record, frozen=True, kw_only=True):
    """The record of the incarnations of the metadata file, the latest last. The store makes this record; no client
    writes it."""

    kind = 26
    incarnations: tuple[Incarnation, ...] = ()


_KINDS: dict[int, type[Record]] = {
    cls.kind: cls
    for cls in (
        ClusterRecord, CounterRecord, LedgerRecord, DeletedLedgersRecord, CookieRecord, BookieRecord, BrokerRecord,
        DrainRecord, OwnerRecord, TenantRecord, NamespaceRecord, PartitionedRecord, TopicRecord, CursorRecord,
        DamagedEntriesRecord, RacksRecord, UnderReplicatedRecord, RepairSettingsRecord, AuditorRecord, RepairLockRecord,
        RepairWorkerRecord, DepartingRecord, PoliciesRecord, GrantsRecord, MemberRecord,
        SchemaListRecord, SchemaRecord, TransactionsRecord, CoordinatorRecord,
        IncarnationsRecord,
    )
}  # fmt: skip


PLACES: dict[type[Record], Callable[[Any], str]] = {
    LedgerRecord: lambda record: paths.ledger(record.ledger_id),
    DeletedLedgersRecord: lambda record: paths.deleted_ledgers(record.page),
    CookieRecord: lambda record: paths.cookie(record.bookie),
    DamagedEntriesRecord: lambda record: paths.damaged_copies_of_bookie(record.ledger_id, record.bookie),
    UnderReplicatedRecord: lambda record: paths.under_replicated(record.ledger_id),
    DepartingRecord: lambda record: paths.departing(record.bookie),
    DrainRecord: lambda record: paths.draining(record.broker),
}
"""The only path at which a record of the class is read: that of the ledger, bookie or broker that it names."""


def encode(record: Record, path: str, *, cluster_format: int | None = None) -> bytes:
    """Returns the encoded `record`, the bytes of the node at `path`, in the format `cluster_format`; without it, in the
    format that this process writes."""
    body = msgspec.json.encode(record)
    written = _Written.format if cluster_format is None else cluster_format
    if written < Feature.RECORD_OF_PATH.value[0]:
        return _HEAD.pack(MAGIC, BODY_ALONE, record.kind, crc32c(body)) + body
    return _HEAD.pack(MAGIC, VERSION, record.kind, crc32c(body, crc32c(path.encode()))) + body


def decode(data: bytes, cls: type[R], path: str) -> R:
    """Returns the record of class `cls` in the node at `path`. Raises DamagedRecord, which names the path."""
    if len(data) < _HEAD.size:
        raise DamagedRecord(f"{path}: {len(data)} bytes are too few for a record")
    magic, version, kind, crc = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if magic != MAGIC:
        raise DamagedRecord(f"{path}: not a Magnetar record")
    if not 1 <= version <= VERSION:
        raise DamagedRecord(
            newer_format_text(METADATA_RECORD, version, path) if version else f"{path}: format version 0"
        )
    if kind != cls.kind:
        found = _KINDS.get(kind)
        raise DamagedRecord(f"{path}: a {found.__name__ if found else kind}, not a {cls.__name__}")
    if (crc32c(body) if version == BODY_ALONE else crc32c(body, crc32c(path.encode()))) != crc:
        raise DamagedRecord(f"{path}: checksum does not match")
    try:
        record = msgspec.json.decode(body, type=cls)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedRecord(f"{path}: {error}") from error
    place = PLACES.get(cls)
    if place is not None and place(record) != path:
        raise DamagedRecord(f"{path}: the record of {place(record)}")
    return record


def decode_any(data: bytes, path: str) -> Record:
    """Returns the record in the node at `path`, of any record class. Raises DamagedRecord."""
    cls = _KINDS.get(data[3]) if len(data) >= _HEAD.size else Record
    if cls is None:
        raise DamagedRecord(f"{path}: {data[3]} is no kind of a record")
    return decode(data, cls, path)
