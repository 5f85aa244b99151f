"""The state of the metadata that the bookie has seen, durable in its own directory: it does not trust an older metadata
store.

    seen = note `metadata` of the data directory (format/mark.py, magic "MGN-SEEN"), written when it has changed, at
           most every REVISION_SAVE_INTERVAL_S for the revision alone

| remembered | from |
|---|---|
| `number`, `token` | the incarnation of the metadata's file (metadata/tree.py); a ZooKeeper or an etcd has none |
| `revision` | the largest revision of the tree |
| `ledger` | the largest id that was given out, by the counter, or that is here |
| `restore` | the last restore that it saw |

`judge_metadata_age`, the first row that fits:

| the metadata | verdict |
|---|---|
| has another restore than `restore`, and is older than what is remembered | RESTORED: on purpose |
| has no incarnation `token`, or the one after it began before `revision` | OLDER |
| is at a smaller revision, where it has no incarnations | OLDER |
| has a counter of ids below `ledger`, or none where there was one | OLDER |
| has a counter of ids below a ledger that is here | OLDER |
| else | CURRENT |

OLDER: a start and a registration are refused, an existing registration is withdrawn (an older copy has the bookie's
session), and nothing is deleted. RESTORED: the counter of ids is raised above `ledger`, so that no id is given out
twice; the ledgers that the older copy lacks are unexplained (garbage.py), and their data stays.
`magnetar bookies accept-metadata` turns OLDER into RESTORED. What an operator accepts for the garbage collection
(garbage.py) counts for one state of the metadata (`is_same_metadata`): not after another restore.
Guarded by tests/bookie/maintenance/test_seen.py.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable

import msgspec

from ...metadata import paths
from ...metadata.records import CounterRecord, Incarnation, IncarnationsRecord
from ...metadata.store import MetadataStore, get_record, update_record
from ...proto.errors import InvalidConfiguration
from ...runtime.files import join_path
from ...runtime.network import World
from ..format import mark as note
from ..store import disk

_LOG = logging.getLogger("magnetar.bookie.maintenance")

METADATA_STATE_FILE = "metadata"
SEEN_MAGIC = b"MGN-SEEN"
REVISION_SAVE_INTERVAL_S = 60.0
"""The shortest time, in seconds, between two writes of the recorded state. Each costs two syncs of the disk that the
journal uses."""


class RecordedMetadataState(msgspec.Struct, frozen=True):
    """The latest state of the metadata that the bookie has seen, as its disk has it recorded. The table in the module's
    docstring explains each field."""

    number: int = 0
    token: str = ""
    revision: int = 0
    ledger: int = -1
    restore: str = ""


class CurrentMetadataState(msgspec.Struct, frozen=True):
    """The state of the metadata as it is read now, together with `here`, the largest ledger id in the bookie's
    store."""

    incarnations: tuple[Incarnation, ...]
    revision: int
    next_id: int | None  # None: there is no counter
    here: int = -1  # the largest ledger id in the store, before the counter was asked for; -1: none


class MetadataAgeVerdict(enum.Enum):
    """The verdict whether the metadata is older than the state that the bookie has recorded. RESTORED: it is older,
    because an operator restored a backup."""

    CURRENT = "as it was, or younger"
    OLDER = "older than what this bookie saw"
    RESTORED = "restored from a backup on purpose"


def judge_metadata_age(seen: RecordedMetadataState, shown: CurrentMetadataState) -> MetadataAgeVerdict:
    """Compares the present state of the metadata (`shown`) with the recorded state (`seen`), by the table in the
    module's docstring. Returns the verdict whether the metadata is older than recorded."""
    if not _is_behind(seen, shown):
        return MetadataAgeVerdict.CURRENT
    restore = _last_restore(shown.incarnations)
    return MetadataAgeVerdict.RESTORED if restore and restore != seen.restore else MetadataAgeVerdict.OLDER


def _is_behind(seen: RecordedMetadataState, shown: CurrentMetadataState) -> bool:
    """Returns whether the metadata lacks something that the bookie has recorded."""
    if seen.ledger >= 0 and (shown.next_id is None or shown.next_id <= seen.ledger):
        return True
    if shown.next_id is not None and shown.next_id <= shown.here:
        return True
    if not shown.incarnations:
        return shown.revision < seen.revision
    if not seen.token or seen.number < shown.incarnations[0].number:
        return False  # nothing is remembered, or it is too long ago
    for at, each in enumerate(shown.incarnations):
        if each.token == seen.token:
            ended = shown.incarnations[at + 1].revision if at + 1 < len(shown.incarnations) else shown.revision
            return ended < seen.revision
    return True


def is_same_metadata(seen: RecordedMetadataState, shown: CurrentMetadataState) -> bool:
    """Returns whether the metadata, whose present state is `shown`, still has all that it had in the state `seen`, and
    was not restored since. Returns False also if that cannot be told any more."""
    if shown.incarnations and seen.number < shown.incarnations[0].number:
        return False
    is_current = judge_metadata_age(seen, shown) is MetadataAgeVerdict.CURRENT
    return is_current and _last_restore(shown.incarnations) == seen.restore


def _last_restore(incarnations: tuple[Incarnation, ...]) -> str:
    return next((each.token for each in reversed(incarnations) if each.restored), "")


def make_recorded_metadata_state(
    seen: RecordedMetadataState, shown: CurrentMetadataState, *, restored: bool
) -> RecordedMetadataState:
    """Returns the state that the bookie must record after it has read the present state (`shown`) of the metadata.
    `seen` is the state recorded before. `restored`: whether an older copy was accepted; then the recorded revision may
    decrease. So it may if the tree was moved to a store that has incarnations, which counts its own revisions."""
    last = shown.incarnations[-1] if shown.incarnations else None
    known = -1 if shown.next_id is None else max(shown.next_id - 1, shown.here)
    is_moved = last is not None and not seen.token
    return RecordedMetadataState(
        number=last.number if last else 0,
        token=last.token if last else "",
        revision=shown.revision if restored or is_moved else max(seen.revision, shown.revision),
        ledger=max(seen.ledger, known),
        restore=_last_restore(shown.incarnations),
    )


class RollbackGuard:
    """Finds out whether the metadata was replaced by an older copy: records its state on the bookie's disk, and
    compares later states with the record. `seen` is the recorded state. Calling `here`, which the owner sets, returns
    the largest ledger id in the bookie's store."""

    def __init__(self, world: World, directory: str) -> None:
        self._world = world
        self._directory = directory
        self._worker = world.workers.start("bookie-seen")
        self._saved_at = world.clock.monotonic()
        self.seen = RecordedMetadataState()
        self._kept = RecordedMetadataState()  # of it, what is in the note
        self.here: Callable[[], int] = lambda: -1

    async def load(self) -> None:
        """Reads the recorded state from the data directory; without one, `seen` stays as new. Raises DamagedFile,
        NewerFormat or OSError if it cannot be read: then the bookie cannot judge the metadata."""
        path = join_path(self._directory, METADATA_STATE_FILE)
        if self._world.files.exists(path):
            data = await self._worker.run(disk.read_file, self._world.files, path)
            self.seen = self._kept = note.decode_checksummed_json(data, SEEN_MAGIC, RecordedMetadataState, path)

    async def check_metadata_not_older(self, metadata: MetadataStore, *, accepted: bool = False) -> None:
        """Compares the metadata with the recorded state, then records its present state. Raises InvalidConfiguration if
        the metadata is older, unless it was restored on purpose or `accepted` says that an operator accepts it. Raises
        the errors of `read_current_metadata_state`, and, if an older copy is accepted, those of `update_record`.

        If an older copy is accepted, increases the counter of ledger ids in the metadata above every id that this
        bookie knows. If the disk has no room, the state is recorded in memory alone."""
        shown = await read_current_metadata_state(metadata, self.here())
        verdict = judge_metadata_age(self.seen, shown)
        if verdict is MetadataAgeVerdict.OLDER and not accepted:
            raise InvalidConfiguration(_text(self.seen, shown), verdict=verdict.name)
        restored = verdict is not MetadataAgeVerdict.CURRENT
        if restored:
            shown = await self._raise_counter(metadata, shown)
        seen = make_recorded_metadata_state(self.seen, shown, restored=restored)
        if restored:
            _LOG.error(
                "the metadata was restored from an older copy: ledgers up to %d that are here and not in it are kept, "
                "and none of their ids is given out again; `magnetar bookies gc --now --force` gives them up",
                max(seen.ledger, shown.here),
            )  # fmt: skip
        await self._save(seen)

    async def _raise_counter(self, metadata: MetadataStore, shown: CurrentMetadataState) -> CurrentMetadataState:
        """Raises the counter of ledger ids in the metadata above every ledger id that this bookie knows. Returns
        `shown` with the new counter."""
        least = max(self.seen.ledger, self.here()) + 1

        def raised(counter: CounterRecord | None) -> CounterRecord | None:
            return CounterRecord(next=least) if counter is None or counter.next < least else None

        await update_record(metadata, paths.LEDGER_IDS, CounterRecord, raised)
        return msgspec.structs.replace(shown, next_id=max(shown.next_id or 0, least))

    async def _save(self, seen: RecordedMetadataState) -> None:
        """Records `seen` in memory, and on the disk if that is due. If the disk has no room, only the record in memory
        counts."""
        self.seen = seen
        now = self._world.clock.monotonic()
        important = seen != msgspec.structs.replace(self._kept, revision=seen.revision)
        if seen == self._kept or not (important or now - self._saved_at >= REVISION_SAVE_INTERVAL_S):
            return
        data = note.encode_checksummed_json(SEEN_MAGIC, seen)
        try:
            await self._worker.run(disk.replace_file, self._world.files, self._directory, METADATA_STATE_FILE, data)
        except (disk.NoSpace, OSError) as error:
            _LOG.warning("the last seen state of the metadata is not stored: %s", error)
            return
        self._kept, self._saved_at = seen, now

    async def close(self) -> None:
        """Waits until the state that is being written is on the disk, and ends the worker."""
        await self._worker.close()


async def read_current_metadata_state(metadata: MetadataStore, here: int = -1) -> CurrentMetadataState:
    """Reads the present state of the metadata and returns it. `here`: the largest ledger id in the bookie's store; -1:
    it is not compared. Raises the errors of the metadata.

    The revision is read first, because the metadata service may restart in between. A revision of the new incarnation,
    recorded with the token of the old one, would make the metadata count as an older copy from then on."""
    revision = await metadata.revision()
    incarnations = await get_record(metadata, paths.INCARNATIONS, IncarnationsRecord)
    counter = await get_record(metadata, paths.LEDGER_IDS, CounterRecord)
    listed = incarnations[0].incarnations if incarnations else ()
    return CurrentMetadataState(listed, revision, None if counter is None else counter[0].next, here)


def _text(seen: RecordedMetadataState, shown: CurrentMetadataState) -> str:
    """Returns the error text for an operator: what the metadata lacks, and what to do."""
    highest = max(seen.ledger, shown.here)
    return (
        f"the metadata is older than what this bookie saw of it: it gave out ledger ids up to "
        f"{(shown.next_id or 0) - 1} and is at revision {shown.revision}; ids up to {highest}, incarnation "
        f"{seen.number} and revision {seen.revision} were seen. Ledgers made since are missing in it. Start the right "
        "metadata; or, if only an older copy is left, put it in place with `magnetar metadata restore`, or say so for "
        "each bookie with `magnetar bookies accept-metadata`. Nothing was changed"
    )
