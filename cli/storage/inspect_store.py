"""`magnetar bookie inspect …`: shows the content of a bookie's directory. Changes nothing and takes no lock, so it also
works while the bookie runs.

The files are read by bookie/inspect/. These commands filter and print rows while they read, so they need little memory
for a directory of any size.

Also in this file, each below its heading: the common part of the commands of `magnetar bookie inspect`
(inspect_common); `magnetar bookie inspect ledger` (inspect_ledgers).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from itertools import islice
from os.path import basename
from typing import TYPE_CHECKING, Any

import click

from ..common.exits import FAILED, CommandFailure
from ..common.lazy import LazyCommand, LazyGroup
from ..common.output import OUTPUT_OPTION, CommandOutput, OutputRow, show_progress

if TYPE_CHECKING:
    from ...bookie.inspect.logs import IndexedLedger, LedgerIndexOverview
    from ...bookie.inspect.snapshot import FileDamage, RemovedFile, StoreSnapshot
    from ...bookie.inspect.summary import EntryLogSummary, StoreSummary
    from ...bookie.store.index import ExtentLocation

# ------------------------------------------------------------------------------------------------ inspect_common
# The common part of the commands of `magnetar bookie inspect`: a directory to read, an output, and the count of
# damage.
#
# A damaged place is a row like the others with its reason under `damage`; the exit code is then 1, and stderr names the
# first one. Files that a running bookie removed meanwhile are named on stderr.


class StoreInspection:
    """Reads a bookie's directory for one `magnetar bookie inspect` command. Prints the output of the command, and
    counts the damage that it finds. `limit`: the option --limit. Raises NotFound if the directory is not a bookie's."""

    def __init__(self, directory: str, output: str, limit: int | None = None) -> None:
        from ...bookie.inspect.snapshot import snapshot_directory
        from ...runtime.process import make_system_world

        self.out = CommandOutput(output)
        self.snapshot: StoreSnapshot = snapshot_directory(make_system_world().files, directory)
        self.limit = limit
        self._first: FileDamage | None = None
        self.damages = 0
        for damage in self.snapshot.damages:
            self.count_damage(damage)

    def count_damage(self, damage: FileDamage) -> str:
        """Counts one damaged place of the store. Returns the reason of the damage as text for the output."""
        self._first = self._first or damage
        self.damages += 1
        return damage.reason

    def warn_of_deleted_files(self, gone: RemovedFile) -> None:
        """Prints on stderr that the running bookie has removed a file meanwhile."""
        print(f"magnetar: {gone.path} is gone: the bookie removed it meanwhile", file=sys.stderr)

    def limit_rows(self, rows: Iterable[OutputRow]) -> Iterator[OutputRow]:
        """Yields the rows up to the option --limit. If there are more, prints a note on stderr."""
        each = iter(rows)
        yield from islice(each, self.limit)
        if self.limit is not None and next(each, None) is not None:
            print(f"magnetar: stopped after {self.limit} rows (--limit)", file=sys.stderr)

    def finish(self) -> None:
        """Raises CommandFailure, which names the first damaged place, if any damage was counted."""
        if self._first is not None:
            path, offset, reason = self._first
            more = "" if self.damages == 1 else f" (the first of {self.damages} damaged places)"
            raise CommandFailure(f"{path}: damaged at offset {offset}: {reason}{more}", FAILED)


def with_inspection(function: Callable[..., None]) -> Callable[..., None]:
    """Decorates a command: adds the argument DIR and the option -o, passes a StoreInspection of that directory as the
    first argument, and exits with code 1 if damage was found."""

    @click.argument("directory", metavar="DIR", type=click.Path(file_okay=False))
    @OUTPUT_OPTION
    @wraps(function)
    def command(directory: str, output: str, limit: int | None = None, **options: Any) -> None:
        look = StoreInspection(directory, output, limit)
        function(look, **options)
        look.finish()

    return command


def with_filter_options() -> Callable[[Any], Any]:
    """Returns a decorator that adds the options --number, --ledger, --entry, --from, --to and --limit."""
    options = [
        click.option("--number", type=click.IntRange(0), default=None, help="Only the file of this number."),
        click.option("--ledger", type=click.IntRange(0), default=None, help="Only this ledger."),
        click.option("--entry", type=click.IntRange(0), default=None, help="Only this entry."),
        click.option("--from", "start", type=click.IntRange(0), default=0, help="From this offset in the file."),
        click.option("--to", "stop", type=click.IntRange(0), default=None, help="Up to this offset in the file."),
        click.option("--limit", type=click.IntRange(1), default=None, help="At most so many rows."),
    ]

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def make_damage_row(look: StoreInspection, kind: str, number: int, damage: FileDamage) -> OutputRow:
    """Returns the row for a damaged place of a file, and counts the damage. `kind`: the column with the `number` of the
    file, such as "log"."""
    return {kind: number, "file": basename(damage.path), "offset": damage.offset, "damage": look.count_damage(damage)}


# ------------------------------------------------------------------------------------------------- inspect_store


LOG_COLUMNS = ("log", "state", "bytes", "livePercent", "ledgers", "liveLedgers", "entries", "extents", "damaged")
HOLDERS_SHOWN_MAX = 5


@click.command()
@click.option("--html", type=click.Path(dir_okay=False, writable=True), default=None, help="Write a picture there.")
@with_inspection
def store(look: StoreInspection, html: str | None) -> None:
    """Show a summary of a bookie's directory: logs with the share of live data and the ledgers in them, journals, and
    the ledger index.

    --html writes one page with a bar for each log; it needs no other file and is readable in light and dark.

    \b
    Examples:
      magnetar bookie inspect store magnetar-data/bookie-1
      magnetar bookie inspect store magnetar-data/bookie-1 --html store.html
    """
    from ...bookie.inspect.summary import summarize_store

    known = len(look.snapshot.damages)
    with show_progress("files", None) as advance:
        summary = summarize_store(look.snapshot, advance)
    for damage in summary.damages[known:]:
        look.count_damage(damage)
    if html is not None:
        from ...bookie.inspect.summary import render_html

        with open(html, "w", encoding="utf-8") as page:
            page.write(render_html(look.snapshot, summary))
        look.out.print_result_text(f"wrote {html}", html=html)
    elif look.out.is_structured:
        look.out.print_document(make_summary_document(look, summary))
    else:
        _print(look, summary)


def make_summary_document(look: StoreInspection, summary: StoreSummary) -> OutputRow:
    """Returns the summary of a bookie's directory as one record for JSON and YAML. Sizes are in bytes."""
    cookie = look.snapshot.cookie
    return {
        "bookie": None if cookie is None else cookie.bookie,
        "directory": summary.directory,
        "mark": None if look.snapshot.mark is None else look.snapshot.mark._asdict(),
        "logs": [make_log_row(log) for log in summary.logs],
        "logBytes": summary.log_bytes,
        "liveBytes": summary.live_bytes,
        "journals": [
            {"journal": each.journal, "bytes": each.bytes, "end": each.end, "damaged": len(each.damages)}
            for each in summary.journals
        ],
        "spareBytes": summary.spare_bytes,
        "ledgers": summary.ledgers,
        "tombstoneIntervals": summary.tombstones,
        "quarantinedIntervals": summary.quarantined,
        "limboUpto": summary.limbo_upto,
        "fencedUpto": summary.fenced_upto,
        "limboReasons": list(look.snapshot.reasons),
        "ledgerIndexBytes": summary.ledger_index_bytes,
        "otherBytes": summary.other_bytes,
        "damages": [damage._asdict() for damage in summary.damages],
    }


def _print(look: StoreInspection, summary: StoreSummary) -> None:
    whole = make_summary_document(look, summary)
    journal_bytes = sum(each.bytes for each in summary.journals)
    names = ("bookie", "directory", "ledgers", "tombstoneIntervals", "quarantinedIntervals", "limboUpto", "fencedUpto")
    sizes = {"journals": len(summary.journals), "journalBytes": journal_bytes, "spareBytes": summary.spare_bytes}
    rest = ("ledgerIndexBytes", "otherBytes", "logBytes", "liveBytes")
    look.out.print_record({name: whole[name] for name in names} | sizes | {name: whole[name] for name in rest})
    print()
    look.out.print_row_stream((make_log_row(log) for log in summary.logs), (*LOG_COLUMNS, "holders"), empty="no logs")
    if look.snapshot.reasons:
        print("\nIn limbo, because:")
        print("\n".join(f"  {reason}" for reason in look.snapshot.reasons))
    if summary.damages:
        print()
        look.out.print_row_stream((damage._asdict() for damage in summary.damages), ("path", "offset", "reason"))


def make_log_row(log: EntryLogSummary) -> dict[str, object]:
    """Returns the row of one entry log. `holders` has at most HOLDERS_SHOWN_MAX ledgers."""
    first = log.damages[0] if log.damages else None
    return {
        "log": log.log, "state": log.state, "bytes": log.bytes, "dataBytes": log.data_bytes,
        "liveBytes": log.live_bytes, "livePercent": round(100 * log.live_share, 1), "ledgers": log.ledgers,
        "liveLedgers": log.live_ledgers, "entries": log.entries, "extents": log.extents, "groups": log.groups,
        "holders": [holder.ledger for holder in log.holders if holder.live][:HOLDERS_SHOWN_MAX],
        "damaged": len(log.damages), "damage": None if first is None else f"at {first.offset}: {first.reason}",
    }  # fmt: skip


def make_log_rows(look: StoreInspection, numbers: Sequence[int], verify: bool) -> Iterator[OutputRow]:
    """Yields one row for each entry log in `numbers`, and counts damage. With `verify`, reads and checks all records of
    the logs. Leaves out logs that the running bookie has removed. Raises InvalidRequest if a file has a newer format
    than this Magnetar knows."""
    from ...bookie.inspect.logs import read_ledger_index_overview
    from ...bookie.inspect.snapshot import RemovedFile
    from ...bookie.inspect.summary import summarize_entry_log

    seen = read_ledger_index_overview(look.snapshot)
    for damage in seen.damages:
        look.count_damage(damage)
    for number in numbers:
        found = summarize_entry_log(look.snapshot, number, seen.facts)
        if isinstance(found, RemovedFile):
            look.warn_of_deleted_files(found)
            continue
        row = make_log_row(found)
        for damage in found.damages:
            look.count_damage(damage)
        yield row | verify_log(look, number) if verify and found.bytes else row


def verify_log(look: StoreInspection, number: int) -> dict[str, object]:
    """Reads and checks all records of the entry log `number`, and counts damage. Returns those columns of the log's row
    that result from the check. Raises InvalidRequest if a file has a newer format than this Magnetar knows.
    """
    from ...bookie.inspect import logs
    from ...bookie.inspect.snapshot import FileDamage

    whole, damages = 0, list[str]()
    with show_progress(f"log {number}", None, shown=not sys.stdout.isatty()) as advance:
        for found in logs.walk_entry_log(look.snapshot, number):
            if isinstance(found, logs.LoggedEntry):
                whole += 1
                if whole % 1000 == 0:
                    advance(whole)
            elif isinstance(found, FileDamage):
                damages.append(f"at {found.offset}: {look.count_damage(found)}")
    return {"wholeRecords": whole, "damaged": len(damages), "damage": damages[0] if damages else None}


# ----------------------------------------------------------------------------------------------- inspect_ledgers
# `magnetar bookie inspect ledger`: what the bookie knows of its ledgers, and where the entries of one lie.


LEDGER_COLUMNS = ("ledger", "state", "fenced", "lac", "last", "quarantined", "limbo")
COPY_COLUMNS = ("entry", "kind", "number", "offset", "bytes", "damage")
EXTENT_COLUMNS = ("log", "first", "last", "entries", "start", "bytes")


@click.command()
@click.option("--ledger", type=click.IntRange(0), default=None, help="Only this one, with its extents.")
@click.option("--entries", is_flag=True, help="With --ledger: where each entry lies, and whether it is whole.")
@click.option("--entry", type=click.IntRange(0), default=None, help="With --ledger: where this entry lies.")
@click.option("--deleted", is_flag=True, help="The tombstones: intervals of deleted ledgers.")
@click.option("--from", "start", type=click.IntRange(0), default=0, help="From this ledger.")
@click.option("--to", "stop", type=click.IntRange(0), default=None, help="Up to this ledger.")
@click.option("--limit", type=click.IntRange(1), default=None, help="At most so many rows.")
@with_inspection
def ledger(
    look: StoreInspection,
    ledger: int | None,
    entries: bool,
    entry: int | None,
    deleted: bool,
    start: int,
    stop: int | None,
) -> None:
    """Show the ledgers as of the last checkpoint: fenced, LAC (last add confirmed), last entry, deleted, quarantined,
    in limbo. Keys of ledgers are never shown.

    With --ledger also what the journal has after the checkpoint, and the extents in the entry logs; with --entries each
    copy of each entry, read and checked.

    \b
    Examples:
      magnetar bookie inspect ledger magnetar-data/bookie-1
      magnetar bookie inspect ledger magnetar-data/bookie-1 --ledger 5 --entries
    """
    from ...bookie.inspect.logs import read_ledger_index_overview

    if ledger is None and (entries or entry is not None):
        raise click.UsageError("--entries and --entry are about one ledger: give --ledger as well")
    seen = read_ledger_index_overview(look.snapshot)
    for damage in seen.damages:
        look.count_damage(damage)
    if deleted:
        rows = ({"first": first, "last": last} for first, last in seen.facts.tombstones)
        look.out.print_row_stream(look.limit_rows(rows), ("first", "last"), empty="no ledger was deleted")
    elif ledger is None:
        look.out.print_row_stream(
            look.limit_rows(_ledgers(look, seen, start, stop)), LEDGER_COLUMNS, empty="no ledgers"
        )
    else:
        _one(look, seen, ledger, entries or entry is not None, entry)


def _ledgers(look: StoreInspection, seen: LedgerIndexOverview, start: int, stop: int | None) -> Iterator[OutputRow]:
    from ...bookie.inspect.logs import walk_ledger_records

    for state in walk_ledger_records(look.snapshot, seen, start, None if stop is None else stop + 1):
        yield _row(seen, state.ledger, state)


def _row(seen: LedgerIndexOverview, ledger: int, state: IndexedLedger | None) -> dict[str, object]:
    facts = seen.facts
    known = "unknown" if state is None else "live"
    return {
        "ledger": ledger,
        "state": "deleted" if ledger in facts.tombstones else known,
        "fenced": (state is not None and state.fenced) or ledger <= facts.fenced_upto,
        "lac": None if state is None else state.lac,
        "last": None if state is None else state.last,
        "quarantined": [f"{first}-{last}" for first, last in seen.quarantined.get(ledger, [])] or None,
        "limbo": ledger <= facts.limbo_upto,
    }


def _one(look: StoreInspection, seen: LedgerIndexOverview, ledger: int, entries: bool, entry: int | None) -> None:
    from ...bookie.inspect.logs import walk_ledger_extents, walk_ledger_records
    from ...bookie.inspect.snapshot import FileDamage, RemovedFile

    state = next(iter(walk_ledger_records(look.snapshot, seen, ledger, ledger + 1)), None)
    places: list[ExtentLocation] = []
    for found in walk_ledger_extents(look.snapshot, ledger):
        if isinstance(found, FileDamage):
            look.count_damage(found)
        elif isinstance(found, RemovedFile):
            look.warn_of_deleted_files(found)
        else:
            places.append(found)
    row = _row(seen, ledger, state)
    row["journal"] = _journal(look, ledger)
    if row["state"] == "unknown" and row["journal"] is not None:
        row["state"] = "only in the journal"
    each = [_extent(place) for place in places]
    if look.out.is_structured:
        copies = list(look.limit_rows(_copies(look, ledger, places, entry))) if entries else None
        look.out.print_document(row | {"extents": each} | ({} if copies is None else {"entries": copies}))
        return
    look.out.print_record(row)
    print()
    look.out.print_row_stream(each, EXTENT_COLUMNS, empty="no extents in the entry logs")
    if entries:
        print()
        look.out.print_row_stream(
            look.limit_rows(_copies(look, ledger, places, entry)), COPY_COLUMNS, empty="no copies"
        )


def _extent(place: ExtentLocation) -> OutputRow:
    extent = place.extent
    return {
        "log": place.log, "first": extent.first, "last": extent.last, "entries": extent.entries,
        "start": extent.start, "bytes": extent.length,
    }  # fmt: skip


def _journal(look: StoreInspection, ledger: int) -> str | None:
    """Returns the journal's records of the ledger after the last checkpoint, in words."""
    from ...bookie.inspect.logs import read_journal_record_types

    counts: dict[str, int] = {}
    for kind in read_journal_record_types(look.snapshot, ledger):
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{number} {kind}" for kind, number in counts.items()) or None


def _copies(look: StoreInspection, ledger: int, places: list[ExtentLocation], entry: int | None) -> Iterator[OutputRow]:
    from itertools import chain

    from ...bookie.inspect.logs import find_journal_copies, find_log_copies
    from ...bookie.inspect.snapshot import FileDamage, RemovedFile

    snapshot: StoreSnapshot = look.snapshot
    for found in chain(find_log_copies(snapshot, places, entry), find_journal_copies(snapshot, ledger, entry)):
        match found:
            case FileDamage():
                yield {"offset": found.offset, "damage": f"{found.path}: {look.count_damage(found)}"}
            case RemovedFile():
                look.warn_of_deleted_files(found)
            case _:
                if found.damage is not None:
                    look.count_damage(FileDamage(found.path, found.offset, found.damage))
                yield {name: value for name, value in found._asdict().items() if name != "path"}


inspect = LazyGroup(
    "inspect",
    {
        "store": LazyCommand(".storage.inspect_store", "store", "All of it in short, and as a picture (--html)."),
        "journal": LazyCommand(".storage.inspect_store", "journal", "Journal files, blocks and records."),
        "log": LazyCommand(".storage.inspect_store", "log", "Entry logs and their records."),
        "index": LazyCommand(".storage.inspect_store", "index", "Index files: groups, extents, places of entries."),
        "ledger": LazyCommand(
            ".storage.inspect_store", "ledger", "Ledgers: fenced, LAC, last, deleted; where entries lie."
        ),
        "cookie": LazyCommand(".storage.inspect_store", "cookie", "Whose directory it is."),
        "mark": LazyCommand(".storage.inspect_store", "mark", "How far the last checkpoint came."),
    },
    help="""Look into a bookie's data directory: read-only, offline or beside the running bookie.

    Exit code 1: something is damaged; it is shown with its file and offset, and what is after it as well.

    Example: magnetar bookie inspect log magnetar-data/bookie-1
    """,
)


# ---------------------------------------------------------------------------------------- cookie and mark
@click.command()
@with_inspection
def cookie(look: StoreInspection) -> None:
    """Show to which bookie and cluster a directory belongs, and where it was created.

    Example: magnetar bookie inspect cookie magnetar-data/bookie-1
    """
    import msgspec

    found = look.snapshot.cookie
    look.out.print_record({} if found is None else msgspec.to_builtins(found))


@click.command()
@with_inspection
def mark(look: StoreInspection) -> None:
    """Show the mark of the last checkpoint: the position in the journal after which records are replayed, and the ends
    of the files that count.

    Example: magnetar bookie inspect mark magnetar-data/bookie-1
    """
    found = look.snapshot.mark
    look.out.print_record({} if found is None else {"marks_written": look.snapshot.marks_written, **found._asdict()})


# ---------------------------------------------------------------------------------------- journal
@click.command()
@click.option("--records", is_flag=True, help="Each record (also with --ledger or --entry).")
@with_filter_options()
@with_inspection
def journal(
    look: StoreInspection,
    records: bool,
    number: int | None,
    ledger: int | None,
    entry: int | None,
    start: int,
    stop: int | None,
) -> None:
    """Show the journal files: what they contain, where the mark of the last checkpoint is, and where they end.

    \b
    Examples:
      magnetar bookie inspect journal magnetar-data/bookie-1
      magnetar bookie inspect journal magnetar-data/bookie-1 --ledger 5 -o json
    """
    from ...bookie.inspect import journals

    chosen = [each for each in journals.list_journal_numbers(look.snapshot) if number in (None, each)]
    for damage in journals.find_missing_journals(look.snapshot):
        look.count_damage(damage)
    if records or ledger is not None or entry is not None or start or stop is not None:
        columns = ("journal", "offset", "block", "type", "ledger", "entry", "lac", "bytes", "lastLedger", "damage")
        rows = (row for each in chosen for row in _journal_records(look, each, ledger, entry, start, stop))
        look.out.print_row_stream(look.limit_rows(rows), columns, empty="no records")
        return
    with show_progress("journals", len(chosen)) as advance:
        rows_ = [_journal_row(look, each, advance, i) for i, each in enumerate(chosen)]
    spares = journals.list_spare_journal_names(look.snapshot) if number is None else []
    spare = [{"file": name, "state": "spare"} for name in spares]
    columns = ("journal", "file", "state", "bytes", "end", "previousEnd", "blocks", "records", "damaged", "damage")
    look.out.print_row_stream(look.limit_rows([*(row for row in rows_ if row), *spare]), columns, empty="no journals")


def _journal_row(look: StoreInspection, number: int, advance: Callable[[int], None], at: int) -> OutputRow:
    """Returns a row for one file; `end` is after its last whole block."""
    from ...bookie.format.journal import BLOCK_ALIGNMENT_BYTES
    from ...bookie.inspect import journals
    from ...bookie.inspect.snapshot import FileDamage, RemovedFile
    from ...bookie.store.replay import journal_file_name

    position = look.snapshot.mark.position if look.snapshot.mark is not None else (0, 0)
    state = "before the mark" if number < position[0] else "after the mark"
    row: dict[str, object] = {"journal": number, "file": journal_file_name(number)}
    row |= {"state": f"mark at {position[1]}" if number == position[0] else state, "blocks": 0, "records": 0}
    blocks = records = damaged = 0
    for found in journals.walk_journal(look.snapshot, number):
        match found:
            case journals.OpenedJournalFile():
                row |= {"bytes": found.bytes, "previousEnd": found.header.a, "end": BLOCK_ALIGNMENT_BYTES}
            case journals.JournalBlock():
                blocks, records = blocks + 1, records + len(found.records)
                row["end"] = found.end_offset
            case journals.TornTail():
                row["torn"] = found.offset
            case FileDamage():
                damaged += 1
                row.setdefault("damage", f"at {found.offset}: {look.count_damage(found)}")
            case RemovedFile():
                look.warn_of_deleted_files(found)
                return {}
    advance(at + 1)
    return {**row, "blocks": blocks, "records": records, "damaged": damaged}


def _journal_records(
    look: StoreInspection, number: int, ledger: int | None, entry: int | None, start: int, stop: int | None
) -> Iterator[OutputRow]:
    from ...bookie.format.journal import RecordType
    from ...bookie.inspect import journals
    from ...bookie.inspect.snapshot import FileDamage, RemovedFile
    from ...ledger.peer_format import ENTRY_HEADER_STRUCT

    for found in journals.walk_journal(look.snapshot, number, start):
        match found:
            case FileDamage():
                yield make_damage_row(look, "journal", number, found)
            case RemovedFile():
                look.warn_of_deleted_files(found)
            case journals.JournalBlock():
                for offset, record in found.records_with_offsets():
                    if stop is not None and offset >= stop:
                        return
                    is_tombstone = record.type is RecordType.TOMBSTONE
                    last = record.entry if is_tombstone else record.ledger
                    if ledger is not None and not record.ledger <= ledger <= last:
                        continue
                    if entry is not None and (record.type is not RecordType.ADD or record.entry != entry):
                        continue
                    lac = record.entry if record.type is RecordType.LAC else None
                    if record.type is RecordType.ADD and len(record.payload) >= ENTRY_HEADER_STRUCT.size:
                        lac = ENTRY_HEADER_STRUCT.unpack_from(record.payload)[2]
                    yield {
                        "journal": number, "offset": offset, "block": found.header.sequence, "type": record.type.name,
                        "ledger": record.ledger, "entry": record.entry if record.type is RecordType.ADD else None,
                        "lac": lac, "bytes": len(record.payload), "lastLedger": last if is_tombstone else None,
                    }  # fmt: skip


# ---------------------------------------------------------------------------------------- entry logs
@click.command()
@click.option("--records", is_flag=True, help="Each record (also with --ledger, --entry, --from, --to).")
@click.option("--verify", is_flag=True, help="Check every record's checksum.")
@with_filter_options()
@with_inspection
def log(
    look: StoreInspection, records: bool, verify: bool, number: int | None, ledger: int | None, entry: int | None,
    start: int,
    stop: int | None,
) -> None:  # fmt: skip
    """Show the entry logs: size, share of live data, and ledgers; with --records each record. --verify checks all
    records.

    \b
    Examples:
      magnetar bookie inspect log magnetar-data/bookie-1 --verify
      magnetar bookie inspect log magnetar-data/bookie-1 --number 3 --records --limit 20
    """
    from ...bookie.format.entry_log import FIRST_RECORD_OFFSET
    from ...bookie.inspect import logs

    chosen = [each for each in logs.list_entry_log_numbers(look.snapshot) if number in (None, each)]
    if records or ledger is not None or entry is not None or start or stop is not None:
        begin = start or FIRST_RECORD_OFFSET
        rows = (row for each in chosen for row in _log_records(look, each, ledger, entry, begin, stop))
        columns: tuple[str, ...] = ("log", "offset", "bytes", "ledger", "entry", "lac", "damage")
        look.out.print_row_stream(look.limit_rows(rows), columns, empty="no records")
        return
    columns = (*LOG_COLUMNS, *(["wholeRecords"] if verify else []), "damage")
    look.out.print_row_stream(look.limit_rows(make_log_rows(look, chosen, verify)), columns, empty="no logs")


def _log_records(
    look: StoreInspection, number: int, ledger: int | None, entry: int | None, start: int, stop: int | None
) -> Iterator[OutputRow]:
    from ...bookie.inspect import logs
    from ...bookie.inspect.snapshot import FileDamage, RemovedFile

    for found in logs.walk_entry_log(look.snapshot, number, start):
        match found:
            case FileDamage():
                yield make_damage_row(look, "log", number, found)
            case RemovedFile():
                look.warn_of_deleted_files(found)
            case logs.LoggedEntry():
                if stop is not None and found.offset >= stop:
                    return
                if ledger in (None, found.ledger) and entry in (None, found.entry):
                    yield found._asdict()


# ---------------------------------------------------------------------------------------- index
@click.command()
@click.option("--extents", is_flag=True, help="Each extent (also with --ledger).")
@with_filter_options()
@with_inspection
def index(
    look: StoreInspection,
    extents: bool,
    number: int | None,
    ledger: int | None,
    entry: int | None,
    start: int,
    stop: int | None,
) -> None:
    """Show the index files: the group of each flush or compaction, and its extents. With --entry, show where the record
    of the entry is.

    \b
    Examples:
      magnetar bookie inspect index magnetar-data/bookie-1
      magnetar bookie inspect index magnetar-data/bookie-1 --ledger 5 --entry 17
    """
    from ...bookie.inspect import logs

    chosen = [each for each in logs.list_entry_log_numbers(look.snapshot) if number in (None, each)]
    wanted = extents or ledger is not None or entry is not None
    found = (row for each in chosen for row in _groups(look, each, wanted, ledger, entry, start, stop))
    columns: tuple[str, ...] = ("log", "offset", "extents", "bytes", "damage")
    if wanted:
        columns = ("log", "group", "ledger", "first", "last", "entries", "start", "bytes", "damage")
    if entry is not None:
        columns = (*columns[:-1], "entryStart", "entryBytes", "damage")
    look.out.print_row_stream(look.limit_rows(found), columns, empty="no groups")


def _groups(
    look: StoreInspection,
    number: int,
    extents: bool,
    ledger: int | None,
    entry: int | None,
    start: int,
    stop: int | None,
) -> Iterator[OutputRow]:
    from ...bookie.inspect import logs
    from ...bookie.inspect.snapshot import FileDamage, RemovedFile

    opened = logs.open_index_file(look.snapshot, number)
    if isinstance(opened, FileDamage):
        yield make_damage_row(look, "log", number, opened)
        return
    if isinstance(opened, RemovedFile):
        look.warn_of_deleted_files(opened)
        return
    try:
        for group in opened.walk_groups(start):
            if isinstance(group, FileDamage):
                yield make_damage_row(look, "log", number, group)
            elif stop is not None and group.offset >= stop:
                return
            elif extents:
                yield from _extents(look, opened, group, ledger, entry)
            else:
                size = group.end_offset - group.offset
                yield {"log": number, "offset": group.offset, "extents": group.header.extents, "bytes": size}
    finally:
        opened.file.close()


def _extents(
    look: StoreInspection, opened: Any, group: Any, ledger: int | None, entry: int | None
) -> Iterator[OutputRow]:
    from ...bookie.inspect.snapshot import FileDamage
    from ...bookie.store.index import find_record_number

    for place in opened.walk_extents(group):
        extent = place.extent
        if ledger not in (None, extent.ledger) or (entry is not None and not extent.first <= entry <= extent.last):
            continue
        row = {
            "log": place.log, "group": group.offset, "ledger": extent.ledger, "first": extent.first,
            "last": extent.last, "entries": extent.entries, "start": extent.start, "bytes": extent.length,
        }  # fmt: skip
        if entry is not None:
            table = opened.read_table(place)
            if isinstance(table, FileDamage):
                yield {**row, "damage": look.count_damage(table)}
                continue
            at = find_record_number(place, table, entry)
            if at is None:
                continue
            begin, end = table.offsets[at], table.offsets[at + 1]
            row |= {"entryStart": extent.start + begin, "entryBytes": end - begin}
        yield row
