"""The table of docs/design/data-deletion.md: each condition between "acknowledged" and "the bytes are gone", in order.

Conditions that are members of an enum of reasons come from it, all of them; the others are written here.
"""

import enum
from collections.abc import Callable, Iterator
from typing import NamedTuple

from magnetar.bookie.maintenance.garbage import GarbageCollector
from magnetar.bookie.maintenance.garbage import GarbageRefusal as PassRefused
from magnetar.bookie.store.checkpoint import Checkpoint
from magnetar.bookie.store.entrylog.compaction import EntryLogCompactor
from magnetar.bookie.store.entrylog.mover import CompactionReason
from magnetar.bookie.store.index_files import TombstoneWriter
from magnetar.broker.cluster import orphans
from magnetar.broker.log.managed_ledger import ManagedLedger
from magnetar.proto.states import LedgerStays as Stays

SETTINGS: dict[enum.Enum, str] = {
    PassRefused.UNEXPLAINED: "gc_grace_s",
    PassRefused.WENT_BACK: "gc_grace_s",
    Stays.OPEN: "roll_entries, roll_bytes, roll_minutes, roll_idle_s",
    Stays.NOT_ACKNOWLEDGED: "message_ttl_s, subscription_expiration_s, backlog_quota_bytes, backlog_quota_s",
    Stays.NOT_IN_SNAPSHOT: "deduplication, dedup_snapshot_entries, dedup_snapshot_s",
    Stays.NOT_IN_OUTCOMES: "trim_interval_s",
    Stays.NOT_COMPACTED: "compaction_threshold_bytes",
    Stays.NOT_SUBSCRIBED: "unsubscribed_minutes, unsubscribed_mib",
    Stays.RETAINED_BY_TIME: "retention_minutes, retention_mib",
    Stays.RETAINED_BY_SIZE: "retention_minutes, retention_mib",
    CompactionReason.SPARSE: "gc_minor_share, gc_minor_interval_s, gc_major_share, gc_major_interval_s, gc_full_share",
    CompactionReason.SMALL: "gc_major_interval_s",
    CompactionReason.WAITS: "gc_major_interval_s, disk_warn_share",
    CompactionReason.OPEN: "log_bytes_max, gc_minor_share, gc_major_share, disk_full_share",
}
FORCED = "`gc_grace_s` after an operator ran `magnetar bookies gc --now --force`"
ENDS: dict[enum.Enum, str] = {
    Stays.OPEN: "it ends, because it is full, old, or idle and acknowledged by all; and the next one is listed",
    Stays.NOT_ACKNOWLEDGED: "every durable subscription has stored that it is done: acknowledged, skipped or expired",
    Stays.NOT_IN_SNAPSHOT: "the next snapshot is stored, or deduplication is turned off",
    Stays.TRANSACTION_OPEN: "the transaction has ended: by its client, its time-out, or `magnetar transactions abort`",
    Stays.NOT_IN_OUTCOMES: "the outcomes are stored anew: after the next one, or at the next look after the topic "
    "went on",
    Stays.NOT_COMPACTED: "a compaction has passed it; of a topic that was never compacted also: the threshold is 0 "
    "and none is running",
    Stays.NOT_SUBSCRIBED: "`unsubscribed_minutes` have passed since it ended, or the ledgers after it contain "
    "`unsubscribed_mib`; or a durable subscription is made, which needs it or not",
    Stays.RETAINED_BY_TIME: "`retention_minutes` have passed since it ended, or `retention_mib` is reached",
    Stays.RETAINED_BY_SIZE: "the acknowledged ledgers after it in the topic contain `retention_mib`, or "
    "`retention_minutes` have passed since it ended",
    PassRefused.LIMBO: "limbo ends (docs/design/protocol.md §2.7)",
    PassRefused.UNEXPLAINED: f"the right metadata is back; or {FORCED}",
    PassRefused.WENT_BACK: f"the right metadata is back, and the bookie was started again; or {FORCED}",
    CompactionReason.DEAD: "no longer: the log is deleted",
    CompactionReason.OPEN: "it is closed: at `log_bytes_max`; the cold log also by a compaction that finds its live "
    "share below `gc_minor_share` (0.2; a major one `gc_major_share`, 0.5); both open logs below `gc_major_share` "
    "on a full disk, and by `magnetar bookies gc --now --roll`",
    CompactionReason.UNREADABLE: "the next start rebuilds its index from the log",
    CompactionReason.SPARSE: "the compaction that is due copies what lives to the cold log and deletes the log",
    CompactionReason.SMALL: "a major compaction finds two or more logs below 64 MiB: it copies what lives in them to "
    "the cold log and deletes them",
    CompactionReason.LIVE: "its live share falls below the share of major compaction",
    CompactionReason.WAITS: "the next major compaction",
}


class Row(NamedTuple):
    condition: str
    ends: str
    settings: str
    where: str


def deletion_table() -> str:
    lines = ["| step | condition: the bytes stay | until | settings | decided in |", "|---|---|---|---|---|"]
    for step, rows in STEPS.items():
        for row in rows():
            settings = ", ".join(f"`{name}`" for name in row.settings.split(", ") if name)
            lines.append(f"| {step} | {row.condition} | {row.ends} | {settings} | {row.where} |")
    return "\n".join(lines)


def place(thing: object, name: str = "") -> str:
    """`path` `Name` of a class, function or enum, wherever its module is."""
    module = thing.__name__ if name else thing.__module__  # type: ignore[attr-defined]
    path = module.removeprefix("magnetar.").replace(".", "/") + ".py"
    return f"`{path}` `{name or thing.__qualname__}`"  # type: ignore[attr-defined]


def _of(kind: type[enum.Enum]) -> Iterator[Row]:
    for member in kind.reasons() if issubclass(kind, Stays) else kind:
        yield Row(f"{member.value} (`{member.name}`)", ENDS[member], SETTINGS.get(member, ""), place(kind))


def _list() -> Iterator[Row]:
    yield from _of(Stays)
    yield Row("the topic was not looked at", "the next look, or `magnetar topics trim`", "trim_interval_s",
              "`broker/topic/maintenance.py` `TopicMaintenance`")  # fmt: skip


def _record() -> Iterator[Row]:
    yield Row("the list in the metadata names it, or it is not certain that the list changed",
              "the list is changed by compare-and-set", "", place(ManagedLedger.remove_ledgers))  # fmt: skip
    yield Row("it is not noted as deleted, or its own record exists",
              "it is noted, and its record deleted, after the list", "", place(ManagedLedger.delete_ledgers))
    yield Row("a crash came between the two: it is an orphan", "the sweep finds, closes and deletes it; one whose "
              "owner has no record, or a younger one, stays until `magnetar ledgers orphans --delete --unexplained`",
              "orphan_sweep_s, orphan_age_s", place(orphans, "find_orphans"))  # fmt: skip
    yield Row("it is a cursor's, a snapshot's, a delay bucket's, a key index's or the compacted ledger, and is in use",
              "the record of its owner names the next one", "cursor_roll_entries, cursor_roll_bytes",
              "`broker/subscription/cursors.py` `DurableCursor`")  # fmt: skip


def _collection() -> Iterator[Row]:
    yield Row(
        "no pass ran since", "the next pass, or `magnetar bookies gc --now`", "gc_interval_s", place(GarbageCollector)
    )
    for row in _of(PassRefused):
        yield row._replace(condition=f"it is kept: {row.condition}")
    yield Row("it is missing in one pass only", "a pass at least `gc_grace_s` later finds no record of it either",
              "gc_grace_s", place(GarbageCollector))  # fmt: skip
    yield Row(
        "ten or more ledgers, more than half of those here, were deleted",
        "a pass at least `gc_doubt_s` later finds no record of it either",
        "gc_doubt_s",
        place(GarbageCollector),
    )
    yield Row(
        "it is a copy that no record names any more (surplus): it was made again elsewhere",
        "the ledger is closed and has no repair mark, and all bookies that its record names are there, in two passes "
        "at least `gc_grace_s` apart (`gc_doubt_s`: as above)",
        "gc_grace_s, gc_doubt_s",
        place(GarbageCollector),
    )
    yield Row(
        "its tombstone is not durable in the journal",
        "the journal has synced the tombstone",
        "",
        place(TombstoneWriter),
    )


def _log() -> Iterator[Row]:
    yield from _of(CompactionReason)
    yield Row(
        "compaction reads and writes no faster than its rate",
        "the rate of `gc_bytes_per_s` lets it go on",
        "gc_bytes_per_s",
        place(EntryLogCompactor),
    )


def _file() -> Iterator[Row]:
    yield Row("the mark does not name the log as drained", "the commit of the move or deletion: one mark file",
              "", place(Checkpoint.commit))  # fmt: skip
    yield Row("the files of a drained log exist", "they are removed, or the next start removes them", "",
              place(EntryLogCompactor))  # fmt: skip
    yield Row("journals from before the last checkpoint hold the records", "their files are overwritten",
              "journal_bytes, checkpoint_interval_s, journal_spares_max", place(Checkpoint))  # fmt: skip


STEPS: dict[str, Callable[[], Iterator[Row]]] = {
    "1 trimming": _list, "2 metadata": _record, "3 collection": _collection, "4 entry logs": _log, "5 files": _file,
}  # fmt: skip
