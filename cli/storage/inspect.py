"""`magnetar bookie inspect …`: what is in a bookie's directory. Read-only, takes no lock, also beside a running bookie.

The readers are bookie/inspect/; these commands filter and print while they read, and collect nothing, whatever the
size. This module has cookie, mark, journal, log and index; ledger is cli/storage/inspect_store.py, store
cli/storage/inspect_store.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import click

from ..common.lazy import LazyCommand, LazyGroup
from ..common.output import Row, show_progress
from .inspect_store import LOG_COLUMNS, StoreInspection, damage_row, log_rows, with_filters, with_inspection

inspect = LazyGroup(
    "inspect",
    {
        "store": LazyCommand(".storage.inspect_store", "store", "All of it in short, and as a picture (--html)."),
        "journal": LazyCommand(".storage.inspect", "journal", "Journal files, blocks and records."),
        "log": LazyCommand(".storage.inspect", "log", "Entry logs and their records."),
        "index": LazyCommand(".storage.inspect", "index", "Index files: groups, extents, places of entries."),
        "ledger": LazyCommand(
            ".storage.inspect_store", "ledger", "Ledgers: fenced, LAC, last, deleted; where entries lie."
        ),
        "cookie": LazyCommand(".storage.inspect", "cookie", "Whose directory it is."),
        "mark": LazyCommand(".storage.inspect", "mark", "How far the last checkpoint came."),
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
    """Whose directory it is: bookie, cluster, where it was made.

    Example: magnetar bookie inspect cookie magnetar-data/bookie-1
    """
    import msgspec

    found = look.snapshot.cookie
    look.out.print_record({} if found is None else msgspec.to_builtins(found))


@click.command()
@with_inspection
def mark(look: StoreInspection) -> None:
    """How far the last checkpoint came: what is after it in the journal, and which ends of files count.

    Example: magnetar bookie inspect mark magnetar-data/bookie-1
    """
    found = look.snapshot.mark
    look.out.print_record({} if found is None else {"marks_written": look.snapshot.marks_written, **found._asdict()})


# ---------------------------------------------------------------------------------------- journal
@click.command()
@click.option("--records", is_flag=True, help="Each record (also with --ledger or --entry).")
@with_filters()
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
    """Journal files: what is in them, where the mark stands, where they end.

    \b
    Examples:
      magnetar bookie inspect journal magnetar-data/bookie-1
      magnetar bookie inspect journal magnetar-data/bookie-1 --ledger 5 -o json
    """
    from ...bookie.inspect import journals

    chosen = [each for each in journals.list_journal_numbers(look.snapshot) if number in (None, each)]
    for damage in journals.missing_journals(look.snapshot):
        look.count_damage(damage)
    if records or ledger is not None or entry is not None or start or stop is not None:
        columns = ("journal", "offset", "block", "type", "ledger", "entry", "lac", "bytes", "lastLedger", "damage")
        rows = (row for each in chosen for row in _journal_records(look, each, ledger, entry, start, stop))
        look.out.print_stream(look.limit_rows(rows), columns, empty="no records")
        return
    with show_progress("journals", len(chosen)) as advance:
        rows_ = [_journal_row(look, each, advance, i) for i, each in enumerate(chosen)]
    spares = journals.spare_names(look.snapshot) if number is None else []
    spare = [{"file": name, "state": "spare"} for name in spares]
    columns = ("journal", "file", "state", "bytes", "end", "previousEnd", "blocks", "records", "damaged", "damage")
    look.out.print_stream(look.limit_rows([*(row for row in rows_ if row), *spare]), columns, empty="no journals")


def _journal_row(look: StoreInspection, number: int, advance: Callable[[int], None], at: int) -> Row:
    """Returns a row for one file; `end` is after its last whole block."""
    from ...bookie.format.journal import ALIGNMENT
    from ...bookie.inspect import journals
    from ...bookie.inspect.snapshot import Damage, RemovedFile
    from ...bookie.store.journal.replay import journal_name

    position = look.snapshot.mark.position if look.snapshot.mark is not None else (0, 0)
    state = "before the mark" if number < position[0] else "after the mark"
    row: dict[str, object] = {"journal": number, "file": journal_name(number)}
    row |= {"state": f"mark at {position[1]}" if number == position[0] else state, "blocks": 0, "records": 0}
    blocks = records = damaged = 0
    for found in journals.walk_journal(look.snapshot, number):
        match found:
            case journals.OpenedJournal():
                row |= {"bytes": found.bytes, "previousEnd": found.header.a, "end": ALIGNMENT}
            case journals.Block():
                blocks, records = blocks + 1, records + len(found.records)
                row["end"] = found.end_offset
            case journals.TornTail():
                row["torn"] = found.offset
            case Damage():
                damaged += 1
                row.setdefault("damage", f"at {found.offset}: {look.count_damage(found)}")
            case RemovedFile():
                look.warn_gone(found)
                return {}
    advance(at + 1)
    return {**row, "blocks": blocks, "records": records, "damaged": damaged}


def _journal_records(
    look: StoreInspection, number: int, ledger: int | None, entry: int | None, start: int, stop: int | None
) -> Iterator[Row]:
    from ...bookie.format.journal import RecordType
    from ...bookie.inspect import journals
    from ...bookie.inspect.snapshot import Damage, RemovedFile
    from ...ledger.peer_format import ENTRY_HEADER

    for found in journals.walk_journal(look.snapshot, number, start):
        match found:
            case Damage():
                yield damage_row(look, "journal", number, found)
            case RemovedFile():
                look.warn_gone(found)
            case journals.Block():
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
                    if record.type is RecordType.ADD and len(record.payload) >= ENTRY_HEADER.size:
                        lac = ENTRY_HEADER.unpack_from(record.payload)[2]
                    yield {
                        "journal": number, "offset": offset, "block": found.header.sequence, "type": record.type.name,
                        "ledger": record.ledger, "entry": record.entry if record.type is RecordType.ADD else None,
                        "lac": lac, "bytes": len(record.payload), "lastLedger": last if is_tombstone else None,
                    }  # fmt: skip


# ---------------------------------------------------------------------------------------- entry logs
@click.command()
@click.option("--records", is_flag=True, help="Each record (also with --ledger, --entry, --from, --to).")
@click.option("--verify", is_flag=True, help="Check every record's checksum.")
@with_filters()
@with_inspection
def log(
    look: StoreInspection, records: bool, verify: bool, number: int | None, ledger: int | None, entry: int | None,
    start: int,
    stop: int | None,
) -> None:  # fmt: skip
    """Entry logs: size, live share, ledgers; each record; --verify checks all of them.

    \b
    Examples:
      magnetar bookie inspect log magnetar-data/bookie-1 --verify
      magnetar bookie inspect log magnetar-data/bookie-1 --number 3 --records --limit 20
    """
    from ...bookie.format.entry_log import DATA_OFFSET
    from ...bookie.inspect import indexes

    chosen = [each for each in indexes.list_log_numbers(look.snapshot) if number in (None, each)]
    if records or ledger is not None or entry is not None or start or stop is not None:
        begin = start or DATA_OFFSET
        rows = (row for each in chosen for row in _log_records(look, each, ledger, entry, begin, stop))
        columns: tuple[str, ...] = ("log", "offset", "bytes", "ledger", "entry", "lac", "damage")
        look.out.print_stream(look.limit_rows(rows), columns, empty="no records")
        return
    columns = (*LOG_COLUMNS, *(["wholeRecords"] if verify else []), "damage")
    look.out.print_stream(look.limit_rows(log_rows(look, chosen, verify)), columns, empty="no logs")


def _log_records(
    look: StoreInspection, number: int, ledger: int | None, entry: int | None, start: int, stop: int | None
) -> Iterator[Row]:
    from ...bookie.inspect import logs
    from ...bookie.inspect.snapshot import Damage, RemovedFile

    for found in logs.walk_log(look.snapshot, number, start):
        match found:
            case Damage():
                yield damage_row(look, "log", number, found)
            case RemovedFile():
                look.warn_gone(found)
            case logs.LoggedEntry():
                if stop is not None and found.offset >= stop:
                    return
                if ledger in (None, found.ledger) and entry in (None, found.entry):
                    yield found._asdict()


# ---------------------------------------------------------------------------------------- index
@click.command()
@click.option("--extents", is_flag=True, help="Each extent (also with --ledger).")
@with_filters()
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
    """Index files: a group for each flush or compaction, extents, with --entry the record's place.

    \b
    Examples:
      magnetar bookie inspect index magnetar-data/bookie-1
      magnetar bookie inspect index magnetar-data/bookie-1 --ledger 5 --entry 17
    """
    from ...bookie.inspect import indexes

    chosen = [each for each in indexes.list_log_numbers(look.snapshot) if number in (None, each)]
    wanted = extents or ledger is not None or entry is not None
    found = (row for each in chosen for row in _groups(look, each, wanted, ledger, entry, start, stop))
    columns: tuple[str, ...] = ("log", "offset", "extents", "bytes", "damage")
    if wanted:
        columns = ("log", "group", "ledger", "first", "last", "entries", "start", "bytes", "damage")
    if entry is not None:
        columns = (*columns[:-1], "entryStart", "entryBytes", "damage")
    look.out.print_stream(look.limit_rows(found), columns, empty="no groups")


def _groups(
    look: StoreInspection,
    number: int,
    extents: bool,
    ledger: int | None,
    entry: int | None,
    start: int,
    stop: int | None,
) -> Iterator[Row]:
    from ...bookie.inspect import indexes
    from ...bookie.inspect.snapshot import Damage, RemovedFile

    opened = indexes.open_index(look.snapshot, number)
    if isinstance(opened, Damage):
        yield damage_row(look, "log", number, opened)
        return
    if isinstance(opened, RemovedFile):
        look.warn_gone(opened)
        return
    try:
        for group in opened.groups(start):
            if isinstance(group, Damage):
                yield damage_row(look, "log", number, group)
            elif stop is not None and group.offset >= stop:
                return
            elif extents:
                yield from _extents(look, opened, group, ledger, entry)
            else:
                size = group.end_offset - group.offset
                yield {"log": number, "offset": group.offset, "extents": group.header.extents, "bytes": size}
    finally:
        opened.file.close()


def _extents(look: StoreInspection, opened: Any, group: Any, ledger: int | None, entry: int | None) -> Iterator[Row]:
    from ...bookie.inspect.snapshot import Damage
    from ...bookie.store.index import record_number

    for place in opened.extents(group):
        extent = place.extent
        if ledger not in (None, extent.ledger) or (entry is not None and not extent.first <= entry <= extent.last):
            continue
        row = {
            "log": place.log, "group": group.offset, "ledger": extent.ledger, "first": extent.first,
            "last": extent.last, "entries": extent.entries, "start": extent.start, "bytes": extent.length,
        }  # fmt: skip
        if entry is not None:
            table = opened.table(place)
            if isinstance(table, Damage):
                yield {**row, "damage": look.count_damage(table)}
                continue
            at = record_number(place, table, entry)
            if at is None:
                continue
            begin, end = table.offsets[at], table.offsets[at + 1]
            row |= {"entryStart": extent.start + begin, "entryBytes": end - begin}
        yield row
