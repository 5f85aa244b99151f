"""`magnetar bookie inspect ledger`: what the bookie knows of its ledgers, and where the entries of one lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from ..common.output import Row
from .inspect_common import Look, inspecting

if TYPE_CHECKING:
    from ...bookie.inspect.ledgers import Ledger, Overview
    from ...bookie.store.index.index import ExtentPlace

COLUMNS = ("ledger", "state", "fenced", "lac", "last", "quarantined", "limbo")
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
@inspecting
def ledger(
    look: Look, ledger: int | None, entries: bool, entry: int | None, deleted: bool, start: int, stop: int | None
) -> None:
    """Ledgers as of the last checkpoint: fenced, LAC, last entry, deleted, quarantined, in limbo; never their keys.

    With --ledger also what the journal has after it, and the extents in the entry logs; with --entries each copy of
    each entry, read and checked.

    \b
    Examples:
      magnetar bookie inspect ledger magnetar-data/bookie-1
      magnetar bookie inspect ledger magnetar-data/bookie-1 --ledger 5 --entries
    """
    from ...bookie.inspect.ledgers import overview

    if ledger is None and (entries or entry is not None):
        raise click.UsageError("--entries and --entry are about one ledger: give --ledger as well")
    seen = overview(look.snapshot)
    for damage in seen.damages:
        look.damaged(damage)
    if deleted:
        rows = ({"first": first, "last": last} for first, last in seen.facts.tombstones)
        look.out.stream(look.limited(rows), ("first", "last"), empty="no ledger was deleted")
    elif ledger is None:
        look.out.stream(look.limited(_ledgers(look, seen, start, stop)), COLUMNS, empty="no ledgers")
    else:
        _one(look, seen, ledger, entries or entry is not None, entry)


def _ledgers(look: Look, seen: Overview, start: int, stop: int | None) -> Iterator[Row]:
    from ...bookie.inspect.ledgers import states

    for state in states(look.snapshot, seen, start, None if stop is None else stop + 1):
        yield _row(seen, state.ledger, state)


def _row(seen: Overview, ledger: int, state: Ledger | None) -> dict[str, object]:
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


def _one(look: Look, seen: Overview, ledger: int, entries: bool, entry: int | None) -> None:
    from ...bookie.inspect.entries import extents
    from ...bookie.inspect.ledgers import states
    from ...bookie.inspect.snapshot import Damage, Gone

    state = next(iter(states(look.snapshot, seen, ledger, ledger + 1)), None)
    places: list[ExtentPlace] = []
    for found in extents(look.snapshot, ledger):
        if isinstance(found, Damage):
            look.damaged(found)
        elif isinstance(found, Gone):
            look.gone(found)
        else:
            places.append(found)
    row = _row(seen, ledger, state)
    row["journal"] = _journal(look, ledger)
    if row["state"] == "unknown" and row["journal"] is not None:
        row["state"] = "only in the journal"
    each = [_extent(place) for place in places]
    if look.out.json:
        copies = list(look.limited(_copies(look, ledger, places, entry))) if entries else None
        look.out.document(row | {"extents": each} | ({} if copies is None else {"entries": copies}))
        return
    look.out.record(row)
    print()
    look.out.stream(each, EXTENT_COLUMNS, empty="no extents in the entry logs")
    if entries:
        print()
        look.out.stream(look.limited(_copies(look, ledger, places, entry)), COPY_COLUMNS, empty="no copies")


def _extent(place: ExtentPlace) -> Row:
    extent = place.extent
    return {
        "log": place.log, "first": extent.first, "last": extent.last, "entries": extent.entries,
        "start": extent.start, "bytes": extent.length,
    }  # fmt: skip


def _journal(look: Look, ledger: int) -> str | None:
    """Returns the journal's records of the ledger after the last checkpoint, in words."""
    from ...bookie.inspect.entries import in_journal_records

    counts: dict[str, int] = {}
    for kind in in_journal_records(look.snapshot, ledger):
        counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{number} {kind}" for kind, number in counts.items()) or None


def _copies(look: Look, ledger: int, places: list[ExtentPlace], entry: int | None) -> Iterator[Row]:
    from itertools import chain

    from ...bookie.inspect.entries import in_journals, in_logs
    from ...bookie.inspect.snapshot import Damage, Gone, Snapshot

    snapshot: Snapshot = look.snapshot
    for found in chain(in_logs(snapshot, places, entry), in_journals(snapshot, ledger, entry)):
        match found:
            case Damage():
                yield {"offset": found.offset, "damage": f"{found.path}: {look.damaged(found)}"}
            case Gone():
                look.gone(found)
            case _:
                if found.damage is not None:
                    look.damaged(Damage(found.path, found.offset, found.damage))
                yield {name: value for name, value in found._asdict().items() if name != "path"}
