"""The typed records of the metadata tree, and their bytes.

    record = magic "MR" | format version u8 | kind u8 | crc32c u32 (of the path in UTF-8 and the body) | body
    body   = the record as JSON (msgspec), so that an operator can read the tree with any tool

The path is in the checksum: a record that a damaged file shows at another path is damaged there. Version 1, which an
older Magnetar wrote, has the checksum of the body alone. A record that names its owner (`PATH_OF_RECORD`) is read at
that owner's path only, in both versions. Which of the two `encode_record` writes is the format of the cluster
(`may_write_feature`).

A reader refuses another magic, an unknown version, another kind, another owner, or a checksum that does not match
(DamagedRecord, with the record's path). Unknown JSON fields are ignored, so that a newer writer can add some; missing
ones have their defaults. Example: `encode_record(CounterRecord(next=7), "/ids/ledger")` is
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
from ..proto.versions import METADATA_RECORD, PRODUCT, describe_newer_format
from . import paths

_HEAD = struct.Struct(">2sBBI")
RECORD_MAGIC = b"MR"
RECORD_VERSION = METADATA_RECORD.version
VERSION_WITHOUT_PATH_CHECKSUM = 1
"""The version of a record whose checksum does not cover the record's path."""

CLUSTER_FORMAT = 2
"""The latest cluster format that this Magnetar can read and write. It also knows the format before."""


class Feature(enum.Enum):
    """Something that can be written to the metadata only if all processes of the cluster understand it. The value of a
    member is a pair: the first cluster format that includes the feature, and a description."""

    RECORD_OF_PATH = (2, "records with the path in their checksum (version 2)")
    SKIPPED_LOSSES = (2, "TopicRecord.lost, which an older broker drops when it writes the record")
    ASSIGNMENTS = (2, "owner records that another broker made for the owner (OwnerRecord.assigned_by)")
    COMMIT_NOTES = (2, "the note of a commit in a cursor, which an older broker does not open")
    STARTED_BROKERS = (2, "StartedBrokerRecord, which an older broker of that name does not delete when it closes")
    BALANCER = (2, "BalancerRecord: moves need brokers that take assigned bundles")
    ISOLATION = (2, "policies of isolation, which an older broker does not obey and an older process drops")
    UNSYNCED_ADDS = (2, "adds that are answered before their sync, which an older bookie refuses")
    SPLIT_BUNDLES = (2, "NamespaceRecord.splits: an older broker takes bundles without a look at their number")


class _Written:
    """The cluster format in which this process writes; `settled`: whether `set_written_format` was called."""

    format = CLUSTER_FORMAT
    settled = False


def may_write_feature(feature: Feature) -> bool:
    """Returns whether this process may use the feature in what it writes: whether the format in which it writes
    includes the feature. If not, older processes of the cluster may not understand it. `magnetar cluster
    finish-upgrade` raises the format of the cluster; `set_written_format` says from when on a process uses it."""
    return _Written.format >= feature.value[0]


def get_written_format() -> int:
    """Returns the cluster format in which this process writes its data: CLUSTER_FORMAT before `set_written_format` is
    called."""
    return _Written.format


def set_written_format(found: int) -> None:
    """Sets the format in which this process writes to `found`, the format of its cluster. Only the first call in a
    process has an effect. Raises NewerFormat if the cluster has a later format than this Magnetar knows.

    If the cluster's format is raised while a process runs, the process writes the old format until its next start. All
    other processes read both formats, and the process never meets two versions of a value that it compares with its
    own."""
    check_cluster_format(found)
    if not _Written.settled:
        _Written.settled, _Written.format = True, found


def check_cluster_format(found: int) -> None:
    """Raises NewerFormat if a cluster of the format `found` has data that this Magnetar cannot read."""
    if found > CLUSTER_FORMAT:
        text = f"the cluster has format {found}; Magnetar {PRODUCT} reads up to {CLUSTER_FORMAT}: upgrade this process"
        raise NewerFormat(text, version=found, known=CLUSTER_FORMAT)


class DamagedRecord(DataLost, ValueError):
    """Raised when the bytes of a metadata node are not a record of the class that belongs to its path. On the wire this
    error is a DataLost.

    `str` of the error says what is wrong. Its `message`, which callers get, also says what to do."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}: what this record decides is not known; restore the metadata from a copy that has it")
        self._what = what

    def __str__(self) -> str:
        return self._what


class MetadataRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The base class of all metadata records: the values of metadata nodes. `kind` is the number of the class in the
    stored bytes. A field `created_ms`, `updated_ms`, `closed_ms` or `since_ms` is a wall-clock time in ms since the
    epoch; 0: not known."""

    kind: ClassVar[int] = 0


R = TypeVar("R", bound=MetadataRecord)


class ClusterRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record with the identity of the cluster."""

    kind = 1
    instance: str  # random, made with the cluster; bookies' cookies repeat it
    format: int = 1  # what its processes may write (`may_write_feature`); `magnetar cluster finish-upgrade` raises it


class CounterRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a counter of ids: `next` is the next free id. All smaller ids are allocated."""

    kind = 2
    next: int


OPEN = "open"
IN_RECOVERY = "in-recovery"
CLOSED = "closed"


class Fragment(msgspec.Struct, frozen=True, array_like=True):
    """A fragment of a ledger: the entries from `first_entry` on, up to the next fragment, are stored on these bookies
    (the ensemble)."""

    first_entry: int
    bookies: tuple[str, ...]  # uuids; slot i is bookies[i]


class LedgerRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a ledger (ledger protocol §1.1). `state` is OPEN, IN_RECOVERY or CLOSED. `fragments` are
    in ascending order of entries. `last_entry` and `length` (bytes of all payloads) are valid only if the ledger is
    CLOSED. `created_ms`: in ms since the epoch; 0: not known."""

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
    # the ledger's owner: {"topic": …, "index": of the first message} or {"cursor": …, "topic": …}
    properties: dict[str, str] = {}

    def __repr__(self) -> str:
        """Returns a text without the key, because a repr may be logged."""
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "key")
        return f"LedgerRecord({', '.join(shown)})"


class LedgerLabel(msgspec.Struct, frozen=True, kw_only=True):
    """What a bookie stores beside a ledger's data of the ledger's record (bookie/maintenance/labels.py), so that
    `magnetar metadata rebuild` can make the record again if all metadata is lost. It is as the record was when the
    bookie read it: `fragments` may be older than the record, and has at most the newest LABELLED_FRAGMENTS_MAX.
    `deleted`: the metadata recorded the deletion of the ledger."""

    ledger_id: int
    ensemble_size: int
    write_quorum: int
    ack_quorum: int
    created_ms: int
    fragments: tuple[Fragment, ...]
    properties: dict[str, str]
    deleted: bool = False


LABELLED_FRAGMENTS_MAX = 8
"""The largest number of fragments in a label. A longer list says little more: what bookies hold shows the others."""


def make_ledger_label(record: LedgerRecord) -> LedgerLabel:
    """Returns the label of the ledger with this record."""
    return LedgerLabel(
        ledger_id=record.ledger_id, ensemble_size=record.ensemble_size, write_quorum=record.write_quorum,
        ack_quorum=record.ack_quorum, created_ms=record.created_ms,
        fragments=record.fragments[-LABELLED_FRAGMENTS_MAX:], properties=record.properties,
    )  # fmt: skip


class DeletedLedgersRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the ledgers that were deleted among the ids of one page: the ids that, divided by
    LEDGER_IDS_PER_PAGE and rounded down, are `page` (ledger/client.py). It outlives the records of these ledgers."""

    kind = 29
    page: int
    ranges: tuple[tuple[int, int], ...] = ()  # first and last id of each, ascending


LedgerGenerations = tuple[tuple[int, int], ...]
"""How a bookie maps ledgers to its ledgers directories: (first ledger id, number of directories) in ascending order of
both. A row holds for the ledgers from its first id on, up to the next row's. The rows are never changed."""
_IDS = (1 << 64) - 1


def find_ledgers_directory(generations: LedgerGenerations, ledger: int) -> int:
    """Returns the number (from 0) of the ledgers directory that has this ledger. Pure, and the same for ever: the row
    of `generations` of the ledger has the number of directories; the remainder of the mixed id (the last steps of
    SplitMix64) chooses.

    The remainder of the id itself would not do: a broker makes a topic's ledger and its cursor's in turns."""
    count = 1
    for first, directories in generations:
        if ledger >= first:
            count = directories
    if count == 1:
        return 0
    mixed = (ledger ^ ledger >> 30) * 0xBF58476D1CE4E5B9 & _IDS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _IDS
    return (mixed ^ mixed >> 31) % count


class CookieRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a bookie and its data directory. At each start the bookie compares the directory with this
    record, and so detects that the directory was rolled back to an older state (bookie/store/identity.py). `instance`:
    the instance id of the cluster. `journal` and `offset`: the number of a journal file and a byte offset in it."""

    kind = 4
    bookie: str  # uuid
    instance: str
    directories: tuple[str, ...]  # its places, by name
    starts: int = 0  # completed starts
    journal: int = 0  # a position up to which its journal was synced
    offset: int = 0
    rebuilt: bool = False  # the tree was made from the bookies' directories: the next start accepts it, and ends this
    ledgers: LedgerGenerations = ()  # how its ledgers are mapped to several directories; empty: it has one
    more: tuple[tuple[int, int], ...] = ()  # the same position (journal, offset) of the directories 1, 2, …
    own_journal: bool = False  # its journal is in a directory of its own
    replaced: tuple[str, ...] = ()  # names of directories that an operator gave up: its next start takes empty ones


class BookieRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a running bookie: its registration, by which clients find it. `bookie`: its uuid.
    `total_bytes` and `free_bytes`: of its disk, as it reported last."""

    kind = 5
    bookie: str
    endpoint: str  # host:port of its peer service
    read_only: bool = False
    rack: str = "/default"
    group: str = ""  # by which namespaces choose bookies (ledger/placement_core.py); "": of none
    total_bytes: int = 0
    free_bytes: int = 0
    limbo: bool = False  # it lost data and answers "unknown" for entries it lacks; new ledgers may use it
    fenced_upto: int = -1  # it refuses clients' adds to ledgers up to this id, for ever
    process: str = ""  # random, of the process: another value means that another process uses the same uuid
    key: str = ""  # public, of its peer service (runtime/network.py); empty: it speaks in clear
    version: str = ""  # of its Magnetar
    format: int = 1  # the latest format of a cluster that it understands (CLUSTER_FORMAT)
    ledgers: LedgerGenerations = ()  # how its ledgers are mapped to several directories; empty: it has one
    unwritable: tuple[int, ...] = ()  # numbers of directories that take no adds of clients: full, or failed
    failed: tuple[int, ...] = ()  # numbers of directories that failed: their copies do not count

    def takes_adds_of(self, ledger: int) -> bool:
        """Returns whether the bookie takes clients' adds to this ledger, as it reported last."""
        return not self.read_only and not (
            self.unwritable and find_ledgers_directory(self.ledgers, ledger) in self.unwritable
        )

    def has_lost(self, ledger: int) -> bool:
        """Returns whether the ledger is in a directory of the bookie that failed."""
        return bool(self.failed) and find_ledgers_directory(self.ledgers, ledger) in self.failed


class RacksRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the racks that an operator has assigned to bookies."""

    kind = 14
    racks: dict[str, str] = {}  # bookie's uuid → rack; overrides the one it registered with


class BrokerRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a running broker: its registration, by which clients and other brokers find it. Brokers
    with the same `group` share the topics that clients look up at any of them."""

    kind = 6
    name: str
    endpoint: str  # host:port of its gRPC services, as clients reach it
    pulsar: dict[str, tuple[str, ...]] = {}  # name of a listener ("": the default) → URLs of Pulsar's protocol
    http: str = ""  # http:// or https:// URL of its REST interface; empty: it serves none
    group: str = ""  # those of one group share what any of them is asked for; empty: it takes that itself
    labels: tuple[str, ...] = ()  # NAME=VALUE, sorted: which namespaces it may serve (broker/cluster/isolation_core.py)
    draining: bool = False  # it gets no bundles, and gives away what it owns
    busy_percent: int = 0  # of one core, by its process, as it reported last
    bundles: int = 0  # that it owned then, coordinators of transactions too
    report: int = 0  # ascends with each report of one registration
    version: str = ""  # of its Magnetar
    format: int = 1  # the latest format of a cluster that it understands (CLUSTER_FORMAT)


class DrainRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of an operator's order to drain a broker: the broker must give all its topics to other
    brokers. The order stays in force when the broker restarts. `since_ms`: when the order was given, in ms since the
    epoch."""

    kind = 30
    broker: str
    endpoint: str = ""  # that it had: by this a broker with a random name finds the order after a restart
    since_ms: int = 0


class StartedBrokerRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a broker that has registered and has not closed in order. It outlives the session of its
    broker: a broker that has this record and no registration has died (broker/cluster/ownership.py)."""

    kind = 31
    broker: str
    endpoint: str = ""  # by this a broker with a random name is known again after a restart
    seen_ms: int = 0  # since the epoch: when it wrote its registration last, or a broker last saw it registered


class BalancerRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the broker that was elected to balance the load of all brokers
    (broker/session/balancing.py)."""

    kind = 32
    broker: str
    endpoint: str = ""
    token: str  # random: by it a process recognises its own election


class OwnerRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a bundle's owner: the broker that serves the bundle, or to which another broker has
    assigned the bundle. `endpoint`: HOST:PORT of the broker."""

    kind = 7
    broker: str
    endpoint: str
    assigned_by: str = ""  # the broker that assigned it, whose session has this record; empty: the owner has taken it


class TenantRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a tenant: its admin roles, and the clusters in which it may be used."""

    kind = 8
    admin_roles: tuple[str, ...] = ()
    allowed_clusters: tuple[str, ...] = ()


class NamespaceRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a namespace: how its topics are created, and into how many bundles they are divided. The
    policies of the namespace are in a PoliciesRecord.

    `default_partitions`: of a topic that is created at its first use; 0: not partitioned. `is_creation_set`: an
    operator has set `auto_topic_creation` and `default_partitions`, perhaps to their defaults. `splits`: how often
    `bundles` was doubled since the namespace was created; bundles of each earlier number may still have owners
    (broker/cluster/ownership.py)."""

    kind = 9
    bundles: int = 4
    splits: int = 0
    auto_topic_creation: bool = True
    default_partitions: int = 0
    is_creation_set: bool = False  # the two before were set, as they are or otherwise


class PoliciesRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the policies and properties that were set for a namespace or a topic itself
    (proto/policies.py). The record at BROKER_POLICIES has the settings that an operator changed for all brokers."""

    kind = 60
    policies: Policies = Policies()
    properties: dict[str, str] = {}  # free text; nothing reads it, but of brokers: texts of `RuntimeSettings`


class GrantsRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the permissions of roles in a namespace, on its topics and on its subscriptions
    (broker/access/table_core.py)."""

    kind = 61
    roles: dict[str, tuple[str, ...]] = {}  # role → actions
    topics: dict[str, dict[str, tuple[str, ...]]] = {}  # full name of a topic, without a partition → role → actions
    subscriptions: dict[str, tuple[str, ...]] = {}  # name → the only roles that may use it
    prefix_mode: bool = False  # a subscription is named by its role


class SchemaEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a topic's schema, as an item of a SchemaListRecord. The definition of this version is in its
    SchemaRecord. `created_ms`: when it was registered, in ms since the epoch."""

    version: int
    fingerprint: bytes  # of equal definitions: equal (broker/cluster/schema_core.py)
    created_ms: int
    user: str = ""  # the role that registered it
    deleted: bool = False


class SchemaListRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the list of all versions of a topic's schema, the oldest first. `next` is the number of
    the next version; no number is used twice."""

    kind = 64
    next: int = 0
    schemas: tuple[SchemaEntry, ...] = ()


class SchemaRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of one version of a topic's schema, with its definition (`data`). The record never
    changes."""

    kind = 65
    type: int  # proto/schema.py `SchemaType`
    name: str = ""
    data: bytes = b""
    properties: dict[str, str] = {}


class PartitionedRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a partitioned topic. `created_ms` differs from that of an earlier topic with the same
    name; 0: an older Magnetar created the topic."""

    kind = 10
    partitions: int
    created_ms: int = 0


class TopicLedger(msgspec.Struct, frozen=True, kw_only=True):
    """A ledger in the list of a topic's ledgers, with the indexes of its messages. `entries`, `size` (bytes) and
    `end_index` are valid only once the ledger is closed. `created_ms` and `closed_ms` are in ms since the epoch; 0: not
    known, or not closed."""

    ledger_id: int
    first_index: int  # index of its first message
    entries: int = -1  # -1: not closed yet
    size: int = 0
    end_index: int = -1  # one past its last message
    created_ms: int = 0
    closed_ms: int = 0


class DeduplicationStateLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where a topic's deduplication state is stored: in the last snapshot in the ledger `ledger_id`. If that is -1, the
    state is computed again from the topic's log after the mark, the entry `mark_entry` of the ledger `mark_ledger`."""

    mark_ledger: int  # position at which the ledger's first snapshot was taken
    mark_entry: int
    ledger_id: int = -1


class TransactionOutcomesLocation(msgspec.Struct, frozen=True, kw_only=True):
    """Where the outcomes of a topic's transactions are stored: in the last snapshot in the ledger `ledger_id`. If that
    is -1, they are read from the topic's log after the mark, the entry `mark_entry` of the ledger `mark_ledger`."""

    mark_ledger: int  # no entry of a transaction is before it; or the position of the ledger's first snapshot
    mark_entry: int
    ledger_id: int = -1


class CompactedLedgerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The compacted form of a topic's messages up to and including the horizon (broker/log/compaction.py): the ledger
    that contains it, and the number and size of the remaining messages. The horizon is the entry `horizon_entry` of the
    ledger `horizon_ledger`. `compacted_ms`: when the compaction ended, in ms since the epoch."""

    ledger_id: int
    horizon_ledger: int
    horizon_entry: int
    end_index: int  # one past the last message that the compaction read
    messages: int = 0  # that remain, in so many entries and bytes
    entries: int = 0
    size: int = 0
    compacted_ms: int = 0


class KeyIndexLocation(msgspec.Struct, frozen=True, array_like=True):
    """Where the key index of a closed ledger is stored: in a ledger of its own (broker/log/key_indexes.py).
    `ledger_id`: the closed ledger; `index_ledger_id`: the ledger that has its index."""

    ledger_id: int
    index_ledger_id: int
    with_properties: bool = False  # it has the properties of messages, too


class LostRange(msgspec.Struct, frozen=True, kw_only=True):
    """A range of entries of a topic that every replica has lost. An operator has ordered that readers skip it
    (broker/log/managed_ledger.py). `skipped_ms`: when the operator ordered it, in ms since the epoch."""

    ledger_id: int
    first_entry: int = 0
    last_entry: int = -1  # -1: to an end that is not known
    first_index: int = 0  # of its messages; no other message ever has these
    end_index: int = 0
    skipped_ms: int = 0
    forced: bool = False  # some replica could not be asked


class TopicRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a topic without partitions, or of one partition: the list of its ledgers, and its
    state."""

    kind = 11
    ledgers: tuple[TopicLedger, ...] = ()
    terminated: bool = False
    created_ms: int = 0
    dedup: DeduplicationStateLocation | None = None  # None: publishes are not deduplicated
    # None: no entry and no acknowledgement was ever in a transaction
    transactions: TransactionOutcomesLocation | None = None
    epoch: int = 0  # grows with each producer that takes exclusive access; above created_ms from the first on
    compacted: CompactedLedgerInfo | None = None
    pending_deletion: tuple[int, ...] = ()  # compacted ledgers that are being written or were replaced: never read
    claim: str = ""  # random, of the owner that changes the record: another value means that the topic was taken over
    subscriptions: tuple[str, ...] | None = None  # durable ones: one without a record is lost. None: not known, or long
    lost: tuple[LostRange, ...] = ()  # what was passed over, in order; its indexes are not used again
    key_indexes: tuple[KeyIndexLocation, ...] = ()  # of ledgers in the list, in its order; others may be left: no use


class DelayBucket(msgspec.Struct, frozen=True, kw_only=True):
    """A closed ledger with the delivery times of delayed entries of a subscription (broker/subscription/delays.py).
    `last_ms` is in ms since the epoch."""

    ledger_id: int
    entries: int
    last_ms: int  # delivery time of its last entry


class CursorRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a subscription's state. The state is the `snapshot` in this record; if that is empty, the
    last snapshot in the ledger `ledger_id`; without that ledger, the mark-delete position in this record. If the
    `snapshot` lacks holes, those in the ledger are acknowledged too."""

    kind = 12
    ledger_id: int = -1
    mark_ledger: int = -1  # mark-delete position when it was written: all up to and with it is acknowledged
    mark_entry: int = -1
    properties: dict[str, str] = {}
    created_ms: int = 0
    claim: str = ""  # of the broker that writes the state; another value means that the subscription was taken over
    snapshot: bytes = b""  # a small state, of an owner that closed in order or had no bookies; newer than the ledger's
    snapshot_lacks: int = 0  # so many acknowledged entries had no room in it; 0: it is the whole state
    delays: tuple[DelayBucket, ...] = ()  # delayed entries outside these buckets are read from the log


class DamagedEntriesRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a damage report: which entries of a ledger are damaged at one bookie. A repair replaces
    the bookie's copies of these entries (bookie/maintenance/scrub.py)."""

    kind = 13
    ledger_id: int
    bookie: str
    ranges: tuple[tuple[int, int], ...]  # first and last entry of each, ascending


class UnderReplicatedRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a ledger's repair mark: the ledger lacks copies, or its recovery has not ended. The record
    also has the result of the last attempt to repair the ledger (bookie/maintenance/repair_core.py). `since_ms`: when
    the mark was made, in ms since the epoch."""

    kind = 20
    ledger_id: int
    bookies: dict[str, str]  # bookie whose copies are missing → reason, a value of `RepairReason`
    in_recovery: bool = False  # its recovery was begun and has not ended
    since_ms: int = 0
    attempts: int = 0  # since the last change of `bookies`
    stuck: str = ""  # why the last attempt did not repair it: a value of `StuckReason`
    last_error: str = ""
    retry_ms: int = 0  # no attempt before this wall-clock time
    moves: dict[str, str] = {}  # bookie with the reason "moving" → bookie that gets its copy


class RepairSettingsRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the cluster's switch for auto-recovery."""

    kind = 21
    enabled: bool = True  # False: auditor and workers pause, and missing copies stay missing


class AuditorRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the cluster's auditor: the process that was elected to mark ledgers for repair.
    `since_ms`: when it was elected, in ms since the epoch."""

    kind = 22
    name: str
    token: str  # random: by it a process recognises its own election
    since_ms: int = 0


class RepairLockRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the lock on a ledger: it names the worker that repairs the ledger now. `token`: random
    text, by which the worker recognises its own lock."""

    kind = 23
    worker: str
    token: str


class RepairWorkerRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a repair worker's progress: what it has done since its start, as of `updated_ms` (in ms
    since the epoch)."""

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


class DepartingRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of an operator's order to move all copies away from a bookie, which may be running
    (decommission) or lost (recover). `since_ms`: when the order was given, in ms since the epoch."""

    kind = 25
    bookie: str
    since_ms: int = 0
    forget: bool = False  # its cookie is deleted once it is empty and stopped


class RebalanceRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of an operator's order to move copies of sealed ledgers from full bookies to emptier ones
    (bookie/maintenance/rebalance_core.py), and of how far it is. It stays when the work has ended, until the next
    order. `used`: bytes of each bookie's disk, counted forward with each move, those under way included."""

    kind = 49
    share: float  # a bookie that uses more of its disk is full
    group: str = ""  # only bookies of it take part; "": all
    since_ms: int = 0
    ended_ms: int = 0  # 0: under way
    end: str = ""  # why it ended: a value of `RebalanceEnd`
    used: dict[str, int] = {}  # bookie → bytes
    total: dict[str, int] = {}  # bookie → bytes of its disk
    before: dict[str, int] = {}  # bookie → bytes that it reported as used when the order was given
    moved_off: dict[str, int] = {}  # bookie → bytes that it may drop
    position: int = -1  # ledgers up to this id were looked at in this pass
    moved_in_pass: int = 0
    moves: dict[str, tuple[tuple[str, str, int], ...]] = {}  # under way: ledger → (source, target, bytes) of each copy
    planned_ledgers: int = 0  # when the order was given
    planned_bytes: int = 0
    ledgers: int = 0  # moved, of each as many as it has copies that moved
    bytes: int = 0  # moved
    skipped: int = 0  # moves that were not made: the target did not take the copy, or the ledger was deleted


class MemberRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of a member of a secured cluster, with its public key. A member is a process of the cluster,
    or an operator's command."""

    kind = 63
    role: str  # "broker", "bookie" or "operator", as in its path
    name: str  # of its certificate; for logs
    key: str  # public, 64 hexadecimal digits


class Incarnation(msgspec.Struct, frozen=True, kw_only=True):
    """A period during which one process of the metadata service had the metadata file open. Each opening of the file
    begins a new one."""

    number: int  # one more than that of the incarnation before
    token: str  # random
    revision: int  # of the tree when it began
    restored: bool = False  # it began with a backup (`magnetar metadata restore`)


class TransactionsRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the transaction coordinators: their number, and which of them have a record. The number is
    fixed by the cluster's first transaction, because each transaction id contains the number of its coordinator."""

    kind = 27
    coordinators: int
    begun: tuple[int, ...] = ()  # that have a record: one of them without a record has lost it


class CoordinatorRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of one transaction coordinator: its epoch, the claim of its owner, and the ledger with its
    state (broker/transaction/log.py)."""

    kind = 28
    epoch: int = 0  # grows with each claim; it is in the ids, so none is given twice
    ledger_id: int = -1  # begins with the whole state; -1: nothing was written so far
    claim: str = ""  # random, of the owner: another value means that the coordinator was taken over
    idle: bool = False  # it was closed in order, with nothing open or unsettled: it is loaded when a client asks


class IncarnationsRecord(MetadataRecord, frozen=True, kw_only=True):
    """The record of the incarnations of the metadata file, the latest one last. The metadata service computes it when
    it opens the file; no client writes it."""

    kind = 26
    incarnations: tuple[Incarnation, ...] = ()


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule of a topic: a message, and when it is published (broker/session/schedules_core.py). One of `cron` (in
    the time zone `zone`), `every_ms` (a period in ms) and `at_ms` (a time in ms since the epoch) is set. `missed`:
    which of the times that passed without a broker are made up for: "skip" (none), "last" or "all"."""

    name: str
    id: str  # random: another schedule of this name has another one
    topic_ms: int  # when its topic was created: it is not of a topic that was made anew
    cron: str = ""
    every_ms: int = 0
    at_ms: int = 0
    zone: str = "UTC"
    payload: bytes = b""
    key: str | None = None
    properties: dict[str, str] = {}
    missed: str = "skip"
    is_paused: bool = False
    created_ms: int = 0
    since_ms: int = 0  # only fires after that count: its creation, or the end of its last pause


class SchedulesRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the schedules of a topic, or of all partitions of a topic."""

    kind = 66
    schedules: tuple[Schedule, ...] = ()


class ScheduleProgressRecord(MetadataRecord, frozen=True, kw_only=True):
    """The metadata record of the progress of a schedule. `firing`: the times for which messages may be in the log
    already, because their publishing began. When it began, the last entry of the log of `partition` was
    `last_ledger`:`last_entry`, and `log_end` was the index of its next message. `firing` and `decided_ms` are in ms
    since the epoch."""

    kind = 67
    id: str  # of the schedule
    decided_ms: int  # what is due up to then was published or dropped
    firing: tuple[int, ...] = ()
    partition: int = -1
    last_ledger: int = -1
    last_entry: int = -1
    log_end: int = 0
    fired: int = 0  # messages
    dropped: int = 0  # missed fires
    problem: str = ""  # why the last attempt failed


_KINDS: dict[int, type[MetadataRecord]] = {
    cls.kind: cls
    for cls in (
        ClusterRecord, CounterRecord, LedgerRecord, DeletedLedgersRecord, CookieRecord, BookieRecord, BrokerRecord,
        DrainRecord, StartedBrokerRecord, BalancerRecord, OwnerRecord,
        TenantRecord, NamespaceRecord, PartitionedRecord, TopicRecord,
        CursorRecord, DamagedEntriesRecord, RacksRecord, UnderReplicatedRecord, RepairSettingsRecord, AuditorRecord,
        RepairLockRecord, RepairWorkerRecord, DepartingRecord, RebalanceRecord,
        PoliciesRecord, GrantsRecord, MemberRecord,
        SchemaListRecord, SchemaRecord, TransactionsRecord, CoordinatorRecord,
        IncarnationsRecord, SchedulesRecord, ScheduleProgressRecord,
    )
}  # fmt: skip


PATH_OF_RECORD: dict[type[MetadataRecord], Callable[[Any], str]] = {
    LedgerRecord: lambda record: paths.ledger(record.ledger_id),
    DeletedLedgersRecord: lambda record: paths.deleted_ledgers(record.page),
    CookieRecord: lambda record: paths.cookie(record.bookie),
    DamagedEntriesRecord: lambda record: paths.damaged_copies_of_bookie(record.ledger_id, record.bookie),
    UnderReplicatedRecord: lambda record: paths.under_replicated(record.ledger_id),
    DepartingRecord: lambda record: paths.departing_bookie(record.bookie),
    DrainRecord: lambda record: paths.draining_broker(record.broker),
    StartedBrokerRecord: lambda record: paths.started_broker(record.broker),
}
"""For each class of record that names its own path: the function that returns the path. A record of the class is valid
at this path only."""


def encode_record(record: MetadataRecord, path: str, *, cluster_format: int | None = None) -> bytes:
    """Encodes `record` for the node at `path` and returns the bytes. `cluster_format`: the cluster format to use; None:
    the format in which this process writes."""
    body = msgspec.json.encode(record)
    written = _Written.format if cluster_format is None else cluster_format
    if written < Feature.RECORD_OF_PATH.value[0]:
        return _HEAD.pack(RECORD_MAGIC, VERSION_WITHOUT_PATH_CHECKSUM, record.kind, crc32c(body)) + body
    return _HEAD.pack(RECORD_MAGIC, RECORD_VERSION, record.kind, crc32c(body, crc32c(path.encode()))) + body


def decode_record(data: bytes, cls: type[R], path: str) -> R:
    """Decodes the bytes of the node at `path` and returns the record, which must be of class `cls`. Raises
    DamagedRecord, which names the path, if the bytes are damaged, of a newer format, of another class, or the record of
    another path."""
    if len(data) < _HEAD.size:
        raise DamagedRecord(f"{path}: {len(data)} bytes are too few for a record")
    magic, version, kind, crc = _HEAD.unpack_from(data)
    body = memoryview(data)[_HEAD.size :]
    if magic != RECORD_MAGIC:
        raise DamagedRecord(f"{path}: not a Magnetar record")
    if not 1 <= version <= RECORD_VERSION:
        raise DamagedRecord(
            describe_newer_format(METADATA_RECORD, version, path) if version else f"{path}: format version 0"
        )
    if kind != cls.kind:
        found = _KINDS.get(kind)
        raise DamagedRecord(f"{path}: a {found.__name__ if found else kind}, not a {cls.__name__}")
    if (crc32c(body) if version == VERSION_WITHOUT_PATH_CHECKSUM else crc32c(body, crc32c(path.encode()))) != crc:
        raise DamagedRecord(f"{path}: checksum does not match")
    try:
        record = msgspec.json.decode(body, type=cls)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedRecord(f"{path}: {error}") from error
    place = PATH_OF_RECORD.get(cls)
    if place is not None and place(record) != path:
        raise DamagedRecord(f"{path}: the record of {place(record)}")
    return record


def decode_record_of_any_class(data: bytes, path: str) -> MetadataRecord:
    """Decodes the bytes of the node at `path` and returns the record, of whatever class it is. Raises DamagedRecord as
    `decode_record` does, also for a class that this version does not know."""
    cls = _KINDS.get(data[3]) if len(data) >= _HEAD.size else MetadataRecord
    if cls is None:
        raise DamagedRecord(f"{path}: {data[3]} is no kind of a record")
    return decode_record(data, cls, path)
