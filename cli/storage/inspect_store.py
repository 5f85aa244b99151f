"""`magnetar bookie inspect store`: a bookie's directory in short; its logs as rows, or all of it as a picture."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from ..common.output import Row, progress
from .inspect_common import Look, inspecting

if TYPE_CHECKING:
    from ...bookie.inspect.summary import LogSummary, StoreSummary

LOG_COLUMNS = ("log", "state", "bytes", "livePercent", "ledgers", "liveLedgers", "entries", "extents", "damaged")
HOLDERS_SHOWN = 5


@click.command()
@click.option("--html", type=click.Path(dir_okay=False, writable=True), default=None, help="Write a picture there.")
@inspecting
def store(look: Look, html: str | None) -> None:
    """A bookie's directory in short: logs with live share and the ledgers that hold them, journals, ledger index.

    --html writes one page with a bar for each log; it needs no other file and is readable in light and dark.

    \b
    Examples:
      magnetar bookie inspect store magnetar-data/bookie-1
      magnetar bookie inspect store magnetar-data/bookie-1 --html store.html
    """
    from ...bookie.inspect.summary import store_summary

    known = len(look.snapshot.damages)
    with progress("files", None) as advance:
        summary = store_summary(look.snapshot, advance)
    for damage in summary.damages[known:]:
        look.damaged(damage)
    if html is not None:
        from ...bookie.inspect.picture import picture

        with open(html, "w", encoding="utf-8") as page:
            page.write(picture(look.snapshot, summary))
        look.out.done(f"wrote {html}", html=html)
    elif look.out.json:
        look.out.document(document(look, summary))
    else:
        _print(look, summary)


def document(look: Look, summary: StoreSummary) -> Row:
    cookie = look.snapshot.cookie
    return {
        "bookie": None if cookie is None else cookie.bookie,
        "directory": summary.directory,
        "mark": None if look.snapshot.mark is None else look.snapshot.mark._asdict(),
        "logs": [log_row(log) for log in summary.logs],
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


def _print(look: Look, summary: StoreSummary) -> None:
    whole = document(look, summary)
    journal_bytes = sum(each.bytes for each in summary.journals)
    names = ("bookie", "directory", "ledgers", "tombstoneIntervals", "quarantinedIntervals", "limboUpto", "fencedUpto")
    sizes = {"journals": len(summary.journals), "journalBytes": journal_bytes, "spareBytes": summary.spare_bytes}
    rest = ("ledgerIndexBytes", "otherBytes", "logBytes", "liveBytes")
    look.out.record({name: whole[name] for name in names} | sizes | {name: whole[name] for name in rest})
    print()
    look.out.stream((log_row(log) for log in summary.logs), (*LOG_COLUMNS, "holders"), empty="no logs")
    if look.snapshot.reasons:
        print("\nIn limbo, because:")
        print("\n".join(f"  {reason}" for reason in look.snapshot.reasons))
    if summary.damages:
        print()
        look.out.stream((damage._asdict() for damage in summary.damages), ("path", "offset", "reason"))


def log_row(log: LogSummary) -> dict[str, object]:
    first = log.damages[0] if log.damages else None
    return {
        "log": log.log, "state": log.state, "bytes": log.bytes, "dataBytes": log.data_bytes,
        "liveBytes": log.live_bytes, "livePercent": round(100 * log.live_share, 1), "ledgers": log.ledgers,
        "liveLedgers": log.live_ledgers, "entries": log.entries, "extents": log.extents, "groups": log.groups,
        "holders": [holder.ledger for holder in log.holders if holder.live][:HOLDERS_SHOWN],
        "damaged": len(log.damages), "damage": None if first is None else f"at {first.offset}: {first.reason}",
    }  # fmt: skip


def log_rows(look: Look, numbers: Sequence[int], verify: bool) -> Iterator[Row]:
    """A row for each log; `verify` reads all their records."""
    from ...bookie.inspect.ledgers import overview
    from ...bookie.inspect.snapshot import Gone
    from ...bookie.inspect.summary import log_summary

    seen = overview(look.snapshot)
    for damage in seen.damages:
        look.damaged(damage)
    for number in numbers:
        found = log_summary(look.snapshot, number, seen.facts)
        if isinstance(found, Gone):
            look.gone(found)
            continue
        row = log_row(found)
        for damage in found.damages:
            look.damaged(damage)
        yield row | verified(look, number) if verify and found.bytes else row


def verified(look: Look, number: int) -> dict[str, object]:
    """The columns of a log's row that need all its records."""
    from ...bookie.inspect import logs
    from ...bookie.inspect.snapshot import Damage

    whole, damages = 0, list[str]()
    with progress(f"log {number}", None, shown=not sys.stdout.isatty()) as advance:
        for found in logs.walk(look.snapshot, number):
            if isinstance(found, logs.Entry):
                whole += 1
                if whole % 1000 == 0:
                    advance(whole)
            elif isinstance(found, Damage):
                damages.append(f"at {found.offset}: {look.damaged(found)}")
    return {"wholeRecords": whole, "damaged": len(damages), "damage": damages[0] if damages else None}
