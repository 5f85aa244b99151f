"""The owner of a data directory: its lock, its cookie, and what happens when the metadata disagrees (ledger protocol
§2.7).

The cookie in the directory and its record in the metadata both name the owner and count the completed starts. The
record also has the *places* at which the directory may be, and a position up to which the journal was synced. A place
is the `place` setting, or `advertised host:data directory` without it. `judge_directory` decides by this table; the
first row that fits counts:

| cookie here | record | store here | and | verdict |
|---|---|---|---|---|
| no  | –    | yes | | refuse, ORPHAN: files without an owner |
| no  | none names this place | no | | NEW: a new bookie, under a new uuid |
| no  | one names this place | no | | refuse, WIPED: the directory lost its data |
| yes | –    | –   | the cookie is of another cluster | refuse, OTHER_CLUSTER |
| yes | no   | no  | | FINISH: a first start that was cut short |
| yes | no   | yes | | refuse, UNKNOWN: another metadata, or it lost data |
| yes | yes  | –   | another bookie's record names this place, its own does not | refuse, SWAPPED |
| yes | yes  | –   | its own record does not name this place | refuse, MOVED, until an operator confirms it |
| yes | yes  | –   | the cookie counts more than one start above the record, not accepted | refuse, OLD_METADATA |
| yes | yes  | no  | a start was completed | refuse, WIPED |
| yes | yes  | –   | accepted | ROLLED_BACK |
| yes | yes  | –   | the cookie counts fewer starts than the record | ROLLED_BACK: starts in limbo |
| yes | yes  | –   | | START |

*Accepted*: an operator accepted the metadata for the next start (`accept_restored_metadata`).

Order of a start. `claim_directory` locks and judges. Then the store opens: everything that it misses (also a journal
that ends before the record's position) becomes durable as limbo. Then `record_bookie_start` counts the start, first in
the cookie, then in the record. Only then the bookie serves. So a start that is cut short gets the same verdict again,
and the cookie is at most one start ahead. A host that lost its data returns under a new uuid (invariant 25).

Commands of operators call `delete_bookie`, `change_bookie_directory` and `accept_restored_metadata`. One process may
use a directory: it keeps the lock until it ends. Guarded by tests/bookie/test_identity.py."""

from __future__ import annotations

import enum
import logging
import uuid as uuids
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...metadata import paths, records
from ...metadata.records import CookieRecord, LedgerGenerations
from ...metadata.store import (
    ANY_VERSION,
    NODE_ABSENT,
    CheckNodeVersion,
    DeleteNode,
    MetadataStore,
    ensure_cluster_record,
    get_readable_record,
    get_record,
    put_record,
    update_record,
)
from ...proto.errors import BadVersion, Busy, InvalidConfiguration, NodeExists, NotFound, Unavailable
from ...runtime.files import File, Files, join_path
from ...runtime.network import World
from ..format.mark import Cookie, decode_cookie, encode_cookie
from . import boot, checkpoint, disk
from .replay import JournalPosition

_LOG = logging.getLogger("magnetar.bookie.node")

COOKIE_FILE = "cookie"
LOCK_FILE = "lock"


class DirectoryVerdict(enum.Enum):
    """The verdict on a bookie's data directory when the bookie starts. The bookie does not start if REFUSAL_TEXTS has
    the verdict."""

    NEW = "a new bookie"
    FINISH = "a first start that was cut short"
    START = "the bookie that the metadata knows"
    ROLLED_BACK = "an older state of it"
    ORPHAN = "files without an owner"
    WIPED = "the directory lost its data"
    OTHER_CLUSTER = "a bookie of another cluster"
    UNKNOWN = "a bookie that the metadata does not know"
    SWAPPED = "another bookie's directory"
    MOVED = "a directory at another place"
    OLD_METADATA = "the metadata is older than the directory"


REFUSAL_TEXTS = {
    DirectoryVerdict.ORPHAN: (
        "{directory} holds a bookie's files but no cookie: a file was lost, or something else wrote it. "
        "Give an empty directory to start a new bookie"
    ),
    DirectoryVerdict.WIPED: (
        "the metadata knows bookie {other} at {place}, but {directory} is empty: its data is lost. Restore the "
        "directory; or, if it is lost for good, run `magnetar bookies forget {other}` and start again: as a new bookie"
    ),
    DirectoryVerdict.OTHER_CLUSTER:
        "{directory} belongs to a bookie of cluster {theirs}; the metadata is of cluster {ours}",
    DirectoryVerdict.UNKNOWN: (
        "{directory} belongs to bookie {bookie}, which the metadata does not know: "
        "it is the wrong metadata, or it lost data, or the bookie was forgotten; nothing was changed"
    ),
    DirectoryVerdict.SWAPPED: (
        "{directory} holds the data of bookie {bookie}, but {place} is the place of bookie {other}: directories were "
        "exchanged. Put them back; nothing was changed"
    ),
    DirectoryVerdict.MOVED: (
        "{directory} belongs to bookie {bookie} at {places}, and this is {place}. If the directory was moved, and "
        "no copy of it is left there, run `magnetar bookies move {bookie} {place}` and start again"
    ),
    DirectoryVerdict.OLD_METADATA: (
        "{directory} of bookie {bookie} has seen {starts} starts, the metadata knows of {known}: the metadata is "
        "older than the directory. Start it on the right metadata; or, if it was restored on purpose, run "
        "`magnetar bookies accept-metadata {bookie}` and start again"
    ),
}
"""The error texts for the operator, by verdict."""


class DirectoryAtStart(NamedTuple):
    """The facts by which `judge_directory` decides: the directory's cookie (None: missing), the bookie's cookie record
    in the metadata (None: missing), whether the directory has a store, and its place. `aliases` are other names that
    its place may have in the metadata. `others` are the other bookies whose cookie records name this place. `instance`
    is the id of the metadata's cluster."""

    cookie: Cookie | None
    record: CookieRecord | None
    store: bool
    place: str
    aliases: tuple[str, ...]
    others: tuple[str, ...]
    instance: str


class BookieIdentity(msgspec.Struct, frozen=True):
    """The identity of a bookie whose data directory this process has locked. `known` is the bookie's cookie record as
    it was before this start, `version` its version. `losses` are the reasons why data is known to be missing. The owner
    must close `lock` when it has ended. `instance`: the id of the cluster. `place`: the name of the directory in the
    metadata."""

    uuid: bytes
    instance: str
    lock: File
    place: str = ""
    known: CookieRecord | None = None  # the record before this start
    losses: tuple[str, ...] = ()  # why data is known to be missing in the directory
    version: int = ANY_VERSION  # of that record

    @property
    def uuid_text(self) -> str:
        """The bookie's uuid as text."""
        return str(uuids.UUID(bytes=self.uuid))

    @property
    def is_metadata_accepted(self) -> bool:
        """Returns whether an operator accepted the present metadata for this start (`accept_restored_metadata`), or
        made it from the bookies' directories."""
        return self.known is not None and (self.known.rebuilt or _is_accepted(self.known))

    def stored_journal_positions(self, count: int) -> tuple[JournalPosition, ...]:
        """Returns the positions up to which the journals of the `count` ledgers directories were synced, as the
        metadata says. If a journal ends before its position, data was lost."""
        return get_journal_positions(self.known, count)


def judge_directory(facts: DirectoryAtStart) -> DirectoryVerdict:
    """Returns the verdict whether the bookie may start with this directory, by the table in the module's docstring."""
    cookie, record = facts.cookie, facts.record
    if cookie is None:
        if facts.store:
            return DirectoryVerdict.ORPHAN
        return DirectoryVerdict.WIPED if facts.others else DirectoryVerdict.NEW
    if cookie.instance != facts.instance:
        return DirectoryVerdict.OTHER_CLUSTER
    if record is None:
        return DirectoryVerdict.UNKNOWN if facts.store else DirectoryVerdict.FINISH
    if not any(place in record.directories for place in (facts.place, *facts.aliases)):
        return DirectoryVerdict.SWAPPED if facts.others else DirectoryVerdict.MOVED
    if cookie.starts > record.starts + 1 and not _is_accepted(record):
        return DirectoryVerdict.OLD_METADATA
    if not facts.store and record.starts > 0:
        return DirectoryVerdict.WIPED
    if _is_accepted(record):
        return DirectoryVerdict.ROLLED_BACK
    return DirectoryVerdict.ROLLED_BACK if cookie.starts < record.starts else DirectoryVerdict.START


# ------------------------------------------------------------------------------------------ a start
def lock_directory(files: Files, directory: str) -> File:
    """Locks the data directory for this process and returns the lock. Raises Busy if another process has the lock,
    InvalidConfiguration if the directory cannot be used."""
    try:
        files.make_directories(directory)
        return files.lock(join_path(directory, LOCK_FILE))
    except BlockingIOError as error:
        raise Busy(
            f"the data directory {directory} is used by another process; stop that process or give another directory",
            directory=directory,
        ) from error
    except (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError) as error:
        raise make_unusable_directory_error(directory, error) from error


def make_unusable_directory_error(directory: str, error: OSError) -> InvalidConfiguration:
    """Returns the error for an operator that the process cannot use the data directory, because of `error`."""
    return InvalidConfiguration(
        f"the data directory {directory} cannot be used: {error.strerror} ({error.filename}). The process needs to "
        "own it, to write into it, and nothing else may have its name",
        directory=directory,
    )


async def claim_directory(
    world: World, metadata: MetadataStore, directory: str, place: str, *aliases: str
) -> BookieIdentity:
    """Locks the data directory, judges whether the bookie may start with it, and returns the bookie's identity. Makes a
    new bookie of an empty directory. `place` names the directory and must be unique in the cluster; the metadata may
    still name it by one of `aliases`.

    Raises Busy if another process has locked the directory. Raises InvalidConfiguration if the bookie may not start;
    the text says what to do. Raises DamagedFile or NewerFormat if the cookie cannot be read, NoSpace if there is no
    room for a new one, and the errors of the metadata. After an error the directory is not locked."""
    lock = lock_directory(world.files, directory)
    try:
        return await _claim(world, metadata, directory, lock, (place, *aliases))
    except PermissionError as error:
        lock.close()
        raise make_unusable_directory_error(directory, error) from error
    except records.DamagedRecord as error:
        lock.close()
        raise InvalidConfiguration(f"the metadata is damaged: {error}") from error
    except BaseException:
        lock.close()
        raise


async def _claim(
    world: World, metadata: MetadataStore, directory: str, lock: File, places: tuple[str, ...]
) -> BookieIdentity:
    files = world.files
    instance = (await ensure_cluster_record(metadata, world.rng)).instance
    cookie = read_cookie(files, directory)
    known = None if cookie is None else await get_record(metadata, paths.cookie(cookie.bookie), CookieRecord)
    facts = DirectoryAtStart(
        cookie, None if known is None else known[0], _holds_store(files, directory, cookie), places[0], places[1:],
        await _at_place(metadata, places, "" if cookie is None else cookie.bookie), instance,
    )  # fmt: skip
    verdict = judge_directory(facts)
    if verdict in REFUSAL_TEXTS:
        raise InvalidConfiguration(_text(verdict, facts, directory), verdict=verdict.name)
    if cookie is None:
        cookie = _make_cookie(world, directory, places[0], instance)
    if known is None:
        record = CookieRecord(bookie=cookie.bookie, instance=instance, directories=(places[0],))
        version = await put_record(metadata, paths.cookie(cookie.bookie), record, NODE_ABSENT)
    else:
        record, version = known
    losses: tuple[str, ...] = ()
    if verdict is DirectoryVerdict.ROLLED_BACK:
        known_starts = "the metadata was restored" if _is_accepted(record) else f"{record.starts} were completed"
        losses = (f"the directory is of start {cookie.starts}, and {known_starts}",)
    return BookieIdentity(uuids.UUID(cookie.bookie).bytes, instance, lock, places[0], record, losses, version)


async def record_bookie_start(
    world: World, metadata: MetadataStore, directory: str, identity: BookieIdentity, end: JournalPosition,
    more: Sequence[JournalPosition] = (), *, ledgers: LedgerGenerations = (), journal: str = "",
    paths_of_ledgers: tuple[str, ...] = (),
) -> None:  # fmt: skip
    """Counts this start in the bookie's cookie file and in its cookie record in the metadata. Also stores the position
    `end` up to which the journal is synced. If data was lost, the bookie's limbo must be durable before this call.

    With several directories, `more` are the positions of the ledgers directories 1, 2, …; `ledgers` is the map of the
    ledgers to these, which are at `paths_of_ledgers`; `journal` is the directory of the journal ("": in `data`).

    Raises Unavailable if the cookie record has changed since it was read, because an operator has deleted the bookie or
    changed its place; and the other errors of `put_record`. If the disk has no room for the cookie file, the start is
    not counted, which is only logged."""
    known = identity.known
    assert known is not None, "the directory was claimed"
    record = msgspec.structs.replace(
        known, starts=known.starts + 1, directories=(identity.place,), journal=end.journal, offset=end.offset,
        more=tuple((each.journal, each.offset) for each in more), ledgers=ledgers, own_journal=bool(journal),
        replaced=(), rebuilt=False,
    )  # fmt: skip
    cookie = Cookie(
        record.bookie, record.instance, record.directories, record.starts, ledgers=ledgers, journal=journal,
        paths=paths_of_ledgers if ledgers else (),
    )  # fmt: skip
    try:
        disk.replace_file(world.files, directory, COOKIE_FILE, encode_cookie(cookie))
    except disk.NoSpace as error:
        _LOG.warning("this start is not counted, there is no room: %s", error)
        record = msgspec.structs.replace(record, starts=known.starts)
    try:
        await put_record(metadata, paths.cookie(record.bookie), record, identity.version)
    except (BadVersion, NotFound) as error:
        raise Unavailable(
            f"what the metadata says of bookie {record.bookie} was changed while it started: it begins again",
            bookie=record.bookie,
        ) from error


def get_journal_positions(record: CookieRecord | None, count: int) -> tuple[JournalPosition, ...]:
    """Returns the positions of the journals of the `count` ledgers directories in the cookie record; (0, 0) for those
    that it does not have."""
    found = () if record is None else ((record.journal, record.offset), *record.more)
    return tuple(JournalPosition(*(found[number] if number < len(found) else (0, 0))) for number in range(count))


async def store_journal_position(
    metadata: MetadataStore, identity: BookieIdentity, end: Sequence[JournalPosition], told: Sequence[JournalPosition]
) -> bool:
    """Stores in the bookie's cookie record that the journals of its ledgers directories are synced up to `end`, one
    position each. A stored position never decreases. Raises the errors of `update_record`.

    `told` are the positions that this process stored before. Returns True if the record has at least these. Returns
    False if one is smaller, or the record is missing: then the metadata was replaced by an older copy, or by another
    one."""
    kept = True

    def later(record: CookieRecord | None) -> CookieRecord | None:
        nonlocal kept
        stored = get_journal_positions(record, len(end))
        kept = record is not None and all(one >= other for one, other in zip(stored, told, strict=True))
        new = [max(one, other) for one, other in zip(stored, end, strict=True)]
        if record is None or new == list(stored):
            return None
        more = tuple((each.journal, each.offset) for each in new[1:])
        return msgspec.structs.replace(record, journal=new[0].journal, offset=new[0].offset, more=more)

    await update_record(metadata, paths.cookie(identity.uuid_text), CookieRecord, later)
    return kept


def read_cookie(files: Files, directory: str) -> Cookie | None:
    """Returns the cookie of a directory; None: it has none. Raises DamagedFile, NewerFormat or OSError."""
    path = join_path(directory, COOKIE_FILE)
    return decode_cookie(disk.read_file(files, path), path) if files.exists(path) else None


def _holds_store(files: Files, directory: str, cookie: Cookie | None) -> bool:
    if cookie is not None and cookie.ledgers:
        return True  # in other directories, which are judged by themselves (directories.py)
    names = (checkpoint.MARK_FILE, boot.JOURNAL_FOLDER, boot.ENTRIES_FOLDER, boot.LEDGERS_FOLDER)
    return any(files.exists(join_path(directory, name)) for name in names)


async def _at_place(metadata: MetadataStore, places: tuple[str, ...], own: str) -> tuple[str, ...]:
    """Returns the bookies, except `own`, whose cookie records name one of `places`. Skips records that cannot be
    read."""
    found: list[str] = []
    for bookie in await metadata.children(paths.COOKIES):
        record = None if bookie == own else await get_readable_record(metadata, paths.cookie(bookie), CookieRecord)
        if record is not None and any(place in record[0].directories for place in places):
            found.append(bookie)
    return tuple(found)


def _make_cookie(world: World, directory: str, place: str, instance: str) -> Cookie:
    """Makes the cookie of a new bookie, with a new id, and writes it into the directory. Its record in the metadata is
    written later."""
    cookie = Cookie(str(uuids.UUID(bytes=world.rng.randbytes(16), version=4)), instance, (place,))
    disk.replace_file(world.files, directory, COOKIE_FILE, encode_cookie(cookie))
    _LOG.info("new bookie %s in %s", cookie.bookie, directory)
    return cookie


def _text(verdict: DirectoryVerdict, facts: DirectoryAtStart, directory: str) -> str:
    """Returns the error text for the operator: why the bookie does not start, and what to do."""
    cookie, record = facts.cookie, facts.record
    bookie = "" if cookie is None else cookie.bookie
    return REFUSAL_TEXTS[verdict].format(
        directory=directory, place=facts.place, bookie=bookie, other=", ".join(facts.others) or bookie,
        places=", ".join(record.directories) if record else "", known=record.starts if record else 0,
        starts=cookie.starts if cookie else 0, theirs=cookie.instance if cookie else "", ours=facts.instance,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ what an operator says
async def delete_bookie(metadata: MetadataStore, bookie: str) -> CookieRecord:
    """Deletes the cookie record of a bookie whose data is lost for good, and returns the record. After that a new
    bookie may use the same place, and no bookie starts with the old directory again.

    Raises NotFound if there is no such bookie, Busy if it is registered or just starts, and the errors of the metadata.
    The ledgers on it keep their records and have one copy less. A bookie registers only while its cookie record exists
    (registration.py), and the record is deleted only while the bookie is not registered: if `delete_bookie` and a start
    run at the same moment, one of them fails."""
    record = await _stopped(metadata, bookie)
    if not await delete_cookie(metadata, bookie):
        raise Busy(f"bookie {bookie} starts at this moment: stop it first", bookie=bookie)
    return record


async def delete_cookie(metadata: MetadataStore, bookie: str, *more: DeleteNode) -> bool:
    """Deletes a bookie's cookie record and carries out the deletions `more`, all of them or none. Returns True if that
    succeeded; returns False, and deletes nothing, if the bookie is registered. Raises the errors of the metadata."""
    try:
        await metadata.commit(
            [CheckNodeVersion(paths.bookie(bookie), NODE_ABSENT), DeleteNode(paths.cookie(bookie), ANY_VERSION), *more]
        )
    except (BadVersion, NodeExists):
        return False
    return True


async def change_bookie_directory(metadata: MetadataStore, bookie: str, place: str) -> CookieRecord:
    """Changes a bookie's cookie record: from now on its data directory is at `place`. Returns the new record. Raises
    NotFound if there is no such bookie, Busy if it is registered, and the errors of the metadata."""
    await _stopped(metadata, bookie)
    return await _change(metadata, bookie, directories=(place,))


async def accept_replaced_directory(metadata: MetadataStore, bookie: str, name: str) -> CookieRecord:
    """Makes the next start of a bookie accept an empty directory in the place of one that is lost for good: `name` is
    "journal" or "ledgers-N" (directories.py). Returns the bookie's new cookie record. The bookie will be in limbo and
    fetch from the others what was in it.

    Raises NotFound if there is no such bookie or it has no such directory, Busy if it is registered, and the errors of
    the metadata."""
    record = await _stopped(metadata, bookie)
    count = record.ledgers[-1][1] if record.ledgers else 0
    names = [f"ledgers-{number}" for number in range(count)] + ["journal"] * record.own_journal
    if name not in names:
        there = ", ".join(names) or "none besides its data directory"
        raise NotFound(f"bookie {bookie} has no directory {name}; it has {there}", bookie=bookie)
    return await _change(metadata, bookie, replaced=tuple(sorted({*record.replaced, name})))


async def accept_restored_metadata(metadata: MetadataStore, bookie: str) -> CookieRecord:
    """Makes the next start of a bookie accept the metadata as it is, because an operator restored an older copy on
    purpose, or moved the tree to another store. Returns the bookie's new cookie record.

    Raises NotFound if there is no such bookie, Busy if it is registered, and the errors of the metadata. The bookie
    will start in limbo and compare its ledgers with the metadata."""
    record = await _stopped(metadata, bookie)
    return await _change(metadata, bookie, starts=max(_ACCEPT, (record.starts // _STEP + 1) * _STEP))


_ACCEPT = 1 << 60
"""A number of starts that no directory reaches by starting."""
_STEP = 1 << 40
"""A record that counts a multiple of so many starts, at least _ACCEPT, is accepted. The start that this is for counts
one more, so that the next start is not accepted any more."""


def _is_accepted(record: CookieRecord) -> bool:
    return record.starts >= _ACCEPT and record.starts % _STEP == 0


async def _stopped(metadata: MetadataStore, bookie: str) -> CookieRecord:
    """Returns the cookie record of a bookie. Raises NotFound if there is no such bookie, Busy if it is registered."""
    found = await get_record(metadata, paths.cookie(bookie), CookieRecord)
    if found is None:
        raise NotFound(f"the metadata knows no bookie {bookie}; `magnetar bookies list` shows them", bookie=bookie)
    if await metadata.get(paths.bookie(bookie)) is not None:
        raise Busy(f"bookie {bookie} is registered: stop it first", bookie=bookie)
    return found[0]


async def _change(metadata: MetadataStore, bookie: str, **changes: object) -> CookieRecord:
    def changed(record: CookieRecord | None) -> CookieRecord | None:
        return None if record is None else msgspec.structs.replace(record, **changes)

    found = await update_record(metadata, paths.cookie(bookie), CookieRecord, changed)
    if found is None:
        raise NotFound(f"the metadata knows no bookie {bookie}", bookie=bookie)
    return found[0]
