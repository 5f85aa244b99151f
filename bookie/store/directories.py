"""The directories of a bookie besides `data`: where its journal and its ledgers are, each maybe on a disk of its own.

    magnetar bookie --data DATA --journal JOURNAL --ledgers A --ledgers B

Each ledgers directory has a whole store (store.py) and a journal of its own, in JOURNAL. No store knows of another one.
DATA has the bookie's identity. Without `--ledgers` it is the one ledgers directory, without `--journal` the journal is
in it.

**The map.** A ledger is in one directory for ever: `find_ledgers_directory` (metadata/records.py) decides by the id and
by the *generations* of the bookie, rows of (first ledger id, number of directories). They are part of its identity: in
its cookie record and in the cookie of DATA, which both only get rows. A directory that is added gets a row for ledgers
with larger ids than any that was given out. So no ledger moves.

**The cookies.** Every directory but DATA has a cookie with the bookie's uuid, its role and its number. Its path is not
part of the identity. `judge_extra_directory` compares what is given with what is known; the first row that fits counts:

| a directory | and | verdict |
|---|---|---|
| is given twice | | refuse, TWICE |
| is known | and is not given | refuse, MISSING |
| has another bookie's cookie | | refuse, FOREIGN |
| has this bookie's cookie | of another role or number | refuse, REORDERED |
| has no cookie, and other files | | refuse, OCCUPIED |
| has no cookie and is known | its replacement was accepted | REPLACED: starts empty, in limbo |
| has no cookie and is known | | refuse, EMPTY: not mounted, or lost |
| has no cookie and is not known | | NEW |
| has the right cookie | | START |

A journal that moves out of DATA is not known at its new place: `check_journal_moved`. `magnetar bookies
replace-directory` accepts a replacement for one start. The store of a replaced directory is in limbo, and the bookie
fetches what was in it from the others (maintenance/restore.py).

Order of a start: DATA is claimed (identity.py), then each directory is judged, locked, and gets its cookie; then the
stores open; then `record_bookie_start` makes the generations durable, before the bookie serves. A start that is cut
short gets the same verdicts again. So a bookie starts without a disk when an empty directory takes its place. The disk
may come back in its own place later: its store finds that the journal has gone on, and compares (limbo). Guarded by
tests/bookie/test_several_disks.py.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from typing import NamedTuple

from ...metadata.records import LedgerGenerations
from ...metadata.store import MetadataStore
from ...proto.errors import InvalidConfiguration
from ...runtime.files import File, Files, join_path
from ...runtime.network import World
from ..format.mark import Cookie, DirectoryRole, encode_cookie
from . import boot, disk
from .checkpoint import MARK_FILE
from .identity import COOKIE_FILE, LOCK_FILE, BookieIdentity, lock_directory, read_cookie
from .replay import list_journal_file_numbers
from .state_log import ReadLargestLedger, RecordedDirectoryState

_LOG = logging.getLogger("magnetar.bookie.node")

JOURNAL_NAME = "journal"
"""The name of the journal's directory in `CookieRecord.replaced`; ledgers directories have their numbers."""
HARMLESS_FILES = frozenset((LOCK_FILE, f"{COOKIE_FILE}.tmp", "lost+found"))
"""Files that an empty directory may have; the second is of a start that was cut short."""


class ExtraDirectoryVerdict(enum.Enum):
    """The verdict on a directory besides `data` when the bookie starts. The bookie does not start if
    `DIRECTORY_REFUSALS` has the verdict."""

    START = "the directory that the bookie knows"
    NEW = "a new directory"
    REPLACED = "an empty one in the place of a directory that is lost"
    TWICE = "a directory that is given twice"
    MISSING = "a directory that is not given"
    FOREIGN = "another bookie's directory"
    REORDERED = "another directory of this bookie"
    OCCUPIED = "a directory with other files"
    EMPTY = "a directory that lost its data"


DIRECTORY_REFUSALS = {
    ExtraDirectoryVerdict.TWICE: "{path} is given twice: each directory once",
    ExtraDirectoryVerdict.MISSING: (
        "bookie {bookie} has {name}, which is not given: give --journal if it has one, and all its --ledgers in their "
        "order, {known} in number. Ledgers are in each of them. If its disk is lost for good, give an empty directory "
        "of any disk in its place: the start then says which command accepts it. To have fewer disks, empty the bookie "
        "(`magnetar bookies decommission`) and start a new one"
    ),
    ExtraDirectoryVerdict.FOREIGN: (
        "{path} belongs to bookie {other}, and this is bookie {bookie}: directories were exchanged. Put them back; "
        "nothing was changed"
    ),
    ExtraDirectoryVerdict.REORDERED: (
        "{path} is given as {name} of bookie {bookie}, and it is its {other}: give the directories in their order; "
        "nothing was changed"
    ),
    ExtraDirectoryVerdict.OCCUPIED: (
        "{path} has files but no cookie: a file was lost, or something else wrote it. Give an empty directory"
    ),
    ExtraDirectoryVerdict.EMPTY: (
        "{path} is empty, and {name} of bookie {bookie} has data: is its disk mounted? If the disk is lost for good, "
        "run `magnetar bookies replace-directory {bookie} {name}` and start again: the bookie fetches what was in it "
        "from the other bookies"
    ),
}
"""The error texts for the operator, by verdict."""


class GivenDirectories(NamedTuple):
    """The directories that a bookie was given, as paths. `journal`: "" if it is in `data`."""

    data: str
    journal: str
    ledgers: tuple[str, ...]

    @classmethod
    def name(cls, data: str, journal: str, ledgers: Sequence[str]) -> GivenDirectories:
        """Returns the directories by their settings: without a slash at the end, and the usual place of the journal
        and of the ledgers, in `data`, by that name."""
        data, journal = data.rstrip("/") or data, journal.rstrip("/")
        usual = join_path(data, boot.JOURNAL_FOLDER)
        return cls(data, "" if journal == usual else journal, tuple(each.rstrip("/") for each in ledgers) or (data,))

    @property
    def is_single(self) -> bool:
        """Returns whether all is in `data`, as without any option."""
        return not self.journal and self.ledgers == (self.data,)

    def journal_of(self, number: int) -> str:
        """Returns the directory of the journal of a ledgers directory."""
        root = self.journal or join_path(self.data, boot.JOURNAL_FOLDER)
        return root if number == 0 else join_path(root, name_directory(number))


class DirectoryFacts(NamedTuple):
    """The facts about a directory by which `judge_extra_directory` decides. `number`: of a ledgers directory. `known`:
    whether the bookie had it before; `replaced`: whether an operator accepted that it is lost; `occupied`: whether it
    has files."""

    path: str
    role: DirectoryRole
    number: int
    cookie: Cookie | None
    known: bool
    replaced: bool
    occupied: bool

    @property
    def name(self) -> str:
        """The name of the directory for operators."""
        return JOURNAL_NAME if self.role is DirectoryRole.JOURNAL else name_directory(self.number)


class ClaimedDirectory(NamedTuple):
    """A ledgers directory that may be used. `known`: what identity and metadata say of it, for `Store.open`; `journal`:
    where its journal is."""

    path: str
    number: int
    journal: str
    known: RecordedDirectoryState


class ClaimedDirectories(NamedTuple):
    """The directories of a bookie that this process has locked. `generations`: the map of its ledgers; () if it has one
    directory. `locks`: to be closed when the process has ended."""

    ledgers: tuple[ClaimedDirectory, ...]
    generations: LedgerGenerations
    own_journal: bool
    locks: tuple[File, ...]

    def close(self) -> None:
        """Releases the locks."""
        for lock in self.locks:
            lock.close()


def name_directory(number: int) -> str:
    """Returns the name of the ledgers directory with this number."""
    return f"ledgers-{number}"


def judge_extra_directory(facts: DirectoryFacts, bookie: str) -> ExtraDirectoryVerdict:
    """Returns the verdict whether bookie `bookie` may start with this directory, by the table in the module's
    docstring."""
    cookie = facts.cookie
    if cookie is None:
        if facts.occupied:
            return ExtraDirectoryVerdict.OCCUPIED
        if not facts.known:
            return ExtraDirectoryVerdict.NEW
        return ExtraDirectoryVerdict.REPLACED if facts.replaced else ExtraDirectoryVerdict.EMPTY
    if cookie.bookie != bookie:
        return ExtraDirectoryVerdict.FOREIGN
    if (cookie.role, cookie.number) != (facts.role, facts.number):
        return ExtraDirectoryVerdict.REORDERED
    return ExtraDirectoryVerdict.START


def extend_generations(known: LedgerGenerations, count: int, upto: int) -> LedgerGenerations:
    """Returns the generations of a bookie that has `count` ledgers directories now. Every row of `known` stays. `upto`:
    the largest ledger id that was ever given out, -1: none."""
    had = known[-1][1] if known else 0
    assert count >= had, "a directory was taken away"
    return known if count == had else (*known, (upto + 1 if known else 0, count))


def merge_generations(record: LedgerGenerations, cookie: LedgerGenerations) -> LedgerGenerations:
    """Returns the longer of the two, of which the other is the beginning: a start that was cut short wrote the cookie
    alone, and a metadata that was restored lacks rows. Raises InvalidConfiguration if they contradict each other."""
    longer, shorter = (record, cookie) if len(record) >= len(cookie) else (cookie, record)
    if longer[: len(shorter)] != shorter:
        raise InvalidConfiguration(
            f"the metadata maps the ledgers of this bookie by {record}, its cookie by {cookie}: one of the two is of "
            "another bookie; nothing was changed"
        )
    return longer


async def claim_directories(
    world: World, metadata: MetadataStore, given: GivenDirectories, identity: BookieIdentity,
    upto: ReadLargestLedger,
) -> ClaimedDirectories:  # fmt: skip
    """Judges and locks the directories of a bookie besides `data`, which `claim_directory` has claimed as `identity`.
    `upto` returns the largest ledger id that was given out. Makes new directories, and writes their cookies.

    Raises InvalidConfiguration if the bookie may not start with them; the text says what to do. Raises Busy if another
    process has locked one, NoSpace if there is no room for a cookie, and the errors of `upto`. After an error none of
    them is locked."""
    record = identity.known
    assert record is not None, "the directory was claimed"
    cookie = read_cookie(world.files, given.data)
    generations = merge_generations(record.ledgers, () if cookie is None else cookie.ledgers)
    if given.is_single and not generations and not record.own_journal:
        return ClaimedDirectories((_claimed(given, identity, 0, (), upto),), (), False, ())
    if not generations and record.starts > 0:
        generations = ((0, 1),)  # before it had several, `data` was the one
    if given.journal and not record.own_journal and record.starts > 0:
        check_journal_moved(world.files, given, generations[-1][1])
    facts = _find_facts(world.files, given, identity, generations)
    verdicts = _judge(facts, given, identity, generations)
    had = generations[-1][1] if generations else 0
    if len(given.ledgers) > had:
        generations = extend_generations(generations, len(given.ledgers), await upto() if generations else -1)
    locks = _lock(world.files, facts, given, identity)
    lost = {
        number: (f"the directory {each.path} replaces one that is lost",)
        for each, verdict in zip(facts, verdicts, strict=True)
        if verdict is ExtraDirectoryVerdict.REPLACED
        for number in (range(had) if each.role is DirectoryRole.JOURNAL else (each.number,))
    }
    ledgers = tuple(
        _claimed(given, identity, number, lost.get(number, ()), upto) for number in range(len(given.ledgers))
    )
    return ClaimedDirectories(ledgers, generations, bool(given.journal), tuple(locks))


def check_journal_moved(files: Files, given: GivenDirectories, count: int) -> None:
    """Raises InvalidConfiguration unless the files of the journals of `count` ledgers directories were moved from
    `data` to the new directory. Their headers have the bookie's uuid."""
    before = join_path(given.data, boot.JOURNAL_FOLDER)
    inside = given._replace(journal="")

    def has_files(path: str) -> bool:
        return files.exists(path) and bool(list_journal_file_numbers(files, path))

    numbers = range(count)
    if any(has_files(inside.journal_of(each)) for each in numbers) or not all(
        has_files(given.journal_of(each)) for each in numbers
    ):
        raise InvalidConfiguration(
            f"the journal of this bookie is in {before}, not in {given.journal}: while the bookie is stopped, move all "
            f"files from {before} to {given.journal}, and start again", directory=given.journal
        )  # fmt: skip


def _lock(
    files: Files, facts: Sequence[DirectoryFacts], given: GivenDirectories, identity: BookieIdentity
) -> tuple[File, ...]:
    """Locks each directory but `data`, and writes the cookies of those that have none. Returns the locks."""
    locks: list[File] = []
    try:
        for each in facts:
            if each.path != given.data:
                locks.append(lock_directory(files, each.path))
                if each.cookie is None:
                    _write_cookie(files, each, given, identity)
    except BaseException:
        for lock in locks:
            lock.close()
        raise
    return tuple(locks)


def _claimed(
    given: GivenDirectories, identity: BookieIdentity, number: int, losses: tuple[str, ...], upto: ReadLargestLedger
) -> ClaimedDirectory:
    position = identity.stored_journal_positions(number + 1)[number]
    known = RecordedDirectoryState(position, (*identity.losses, *losses), upto)
    return ClaimedDirectory(given.ledgers[number], number, given.journal_of(number), known)


def _has_store(files: Files, path: str) -> bool:
    return any(
        files.exists(join_path(path, name)) for name in (MARK_FILE, boot.ENTRIES_FOLDER, boot.LEDGERS_FOLDER)
    )


def _find_facts(
    files: Files, given: GivenDirectories, identity: BookieIdentity, generations: LedgerGenerations
) -> list[DirectoryFacts]:
    """Looks at each directory. Raises InvalidConfiguration if one cannot be read."""
    record = identity.known
    assert record is not None
    had = generations[-1][1] if generations else 0
    wanted = [(path, DirectoryRole.LEDGERS, number, number < had) for number, path in enumerate(given.ledgers)]
    if given.journal:
        wanted.insert(0, (given.journal, DirectoryRole.JOURNAL, 0, record.own_journal))
    facts: list[DirectoryFacts] = []
    for path, role, number, known in wanted:
        name = JOURNAL_NAME if role is DirectoryRole.JOURNAL else name_directory(number)
        try:
            cookie = read_cookie(files, path)
            names = files.list_directory(path) if files.exists(path) else []
        except OSError as error:
            raise InvalidConfiguration(
                f"{name} of bookie {identity.uuid_text} at {path} cannot be read: {error.strerror}. Mend or mount its "
                "disk; or, if it is lost for good, give an empty directory of any disk in its place, and run `magnetar "
                f"bookies replace-directory {identity.uuid_text} {name}`", directory=path
            ) from error  # fmt: skip
        occupied = bool(set(names) - HARMLESS_FILES)
        if path == given.data:
            occupied = _has_store(files, path)
        elif role is DirectoryRole.JOURNAL and not known and record.starts > 0:
            occupied = False  # by the files of a journal that moved
        facts.append(DirectoryFacts(path, role, number, cookie, known, name in record.replaced, occupied))
    return facts


def _judge(
    facts: Sequence[DirectoryFacts], given: GivenDirectories, identity: BookieIdentity, generations: LedgerGenerations
) -> list[ExtraDirectoryVerdict]:
    """Returns the verdict on each directory. Raises InvalidConfiguration, with `verdict`, if one is refused."""
    record, bookie = identity.known, identity.uuid_text
    assert record is not None
    had = generations[-1][1] if generations else 0
    paths = [each.path for each in facts]

    def refuse(verdict: ExtraDirectoryVerdict, path: str, name: str, other: str = "") -> InvalidConfiguration:
        text = DIRECTORY_REFUSALS[verdict].format(path=path, name=name, bookie=bookie, other=other, known=had)
        return InvalidConfiguration(text, verdict=verdict.name, directory=path)

    for path in paths:
        if paths.count(path) > 1 or (path == given.data == given.journal):
            raise refuse(ExtraDirectoryVerdict.TWICE, path, "")
    if record.own_journal and not given.journal:
        raise refuse(ExtraDirectoryVerdict.MISSING, "", JOURNAL_NAME)
    if len(given.ledgers) < had:
        raise refuse(ExtraDirectoryVerdict.MISSING, "", name_directory(len(given.ledgers)))
    verdicts: list[ExtraDirectoryVerdict] = []
    for each in facts:
        verdict = _judge_data(each) if each.path == given.data else judge_extra_directory(each, bookie)
        if verdict in DIRECTORY_REFUSALS:
            other = "" if each.cookie is None else each.cookie.bookie
            if verdict is ExtraDirectoryVerdict.REORDERED and each.cookie is not None:
                other = DirectoryFacts(each.path, each.cookie.role, each.cookie.number, None, True, False, True).name
            raise refuse(verdict, each.path, each.name, other)
        verdicts.append(verdict)
    return verdicts


def _judge_data(facts: DirectoryFacts) -> ExtraDirectoryVerdict:
    """Returns the verdict on `data` as a ledgers directory: it is the first or none. Its cookie is the bookie's."""
    if facts.number > 0 or facts.role is not DirectoryRole.LEDGERS:
        return ExtraDirectoryVerdict.REORDERED
    return ExtraDirectoryVerdict.EMPTY if facts.known and not facts.occupied else ExtraDirectoryVerdict.START


def _write_cookie(files: Files, facts: DirectoryFacts, given: GivenDirectories, identity: BookieIdentity) -> None:
    journal = given.journal_of(facts.number) if facts.role is DirectoryRole.LEDGERS else ""
    cookie = Cookie(
        identity.uuid_text, identity.instance, (facts.path,), journal=journal, number=facts.number, role=facts.role
    )
    disk.replace_file(files, facts.path, COOKIE_FILE, encode_cookie(cookie))
    _LOG.info("%s of bookie %s is %s", facts.name, identity.uuid_text, facts.path)
