"""The summary of a store: each entry log with its live share and its largest ledgers, the journals, the ledger index.

Live bytes are those of extents whose ledger has no tombstone, in a log that is not drained. Garbage collection decides
by the same number (bookie/maintenance/garbage.py); it is stored nowhere. The ledgers of a log are summed up by merging
its groups, each sorted by ledger: memory is bounded by the number of groups, not by that of ledgers.

**The store as one HTML page** (`render_html`): its logs as bars with the ledgers inside, its journals with the mark,
its ledgers. The page needs nothing else: no script, no font, no picture from elsewhere. Its colours follow the reader's
light or dark setting; words and hatching say the same as the colours. It is well-formed XML, every text is escaped.

A log's bar is as long as its file is large, compared with the largest. Inside, from the left: the ledgers that hold it,
largest first; all smaller living ones; dead bytes, hatched; what is no record (headers, room allocated ahead).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from html import escape
from itertools import groupby
from typing import NamedTuple

from ..format.journal import BLOCK_ALIGNMENT_BYTES
from ..store.boot import ENTRIES_FOLDER, JOURNAL_FOLDER, LEDGERS_FOLDER
from ..store.index import ExtentLocation
from ..store.state_log import StateLog
from . import journals, logs
from . import logs as ledgers
from .logs import IndexFile, IndexGroup
from .snapshot import FileDamage, RemovedFile, StoreSnapshot, open_file

SHOWN_HOLDERS_MAX = 20


class LedgerLogUsage(NamedTuple):
    """How many bytes a ledger has in an entry log, and whether these bytes are live (the ledger is not deleted)."""

    ledger: int
    bytes: int
    live: bool


class EntryLogSummary(NamedTuple):
    """The summary of an entry log: its state, its size, the bytes of live data in it, and its damage. Live: of ledgers
    that are not deleted."""

    log: int
    state: str  # open (checkpoints write to it), cold (compaction does), closed, drained, not committed
    bytes: int  # of the file
    data_bytes: int  # of records that an extent names
    live_bytes: int
    groups: int
    extents: int
    entries: int
    ledgers: int
    live_ledgers: int
    holders: list[LedgerLogUsage]  # the largest
    damages: list[FileDamage]

    @property
    def live_share(self) -> float:
        """Returns the live bytes divided by the bytes of all records; 0.0 if the log has no records."""
        return self.live_bytes / self.data_bytes if self.data_bytes else 0.0


class JournalSummary(NamedTuple):
    """The summary of a journal file: its size, the end of its last valid block, and its damage."""

    journal: int
    bytes: int
    end: int  # after the last whole block
    damages: list[FileDamage]


class StoreSummary(NamedTuple):
    """The summary of a bookie's store: its entry logs, its journals, and the numbers of ledgers, tombstones and other
    facts in its ledger index. `spare_bytes`: the size of the spare journal files. `limbo_upto` and `fenced_upto` are
    ledger ids; -1: none."""

    directory: str
    logs: list[EntryLogSummary]
    journals: list[JournalSummary]
    spare_bytes: int
    ledgers: int
    tombstones: int  # intervals
    quarantined: int  # intervals
    limbo_upto: int
    fenced_upto: int
    ledger_index_bytes: int
    other_bytes: int  # index files, reserve and the small files
    damages: list[FileDamage]  # all

    @property
    def live_bytes(self) -> int:
        """The live bytes of all entry logs."""
        return sum(log.live_bytes for log in self.logs)

    @property
    def log_bytes(self) -> int:
        """The total size of the log files, in bytes."""
        return sum(log.bytes for log in self.logs)


def summarize_entry_log(snapshot: StoreSnapshot, log: int, facts: StateLog) -> EntryLogSummary | RemovedFile:
    """Returns the summary of an entry log, or RemovedFile if the bookie has removed the log. Reads only the log's
    index. `facts` says which ledgers are deleted and which logs are drained. Raises the errors of
    `classify_missing_log`, also for a newer format of the index."""
    size = _size(snapshot, logs.log_path(snapshot, log))
    damages: list[FileDamage] = []
    if size is None:
        absent = logs.classify_missing_log(snapshot, log)
        if isinstance(absent, RemovedFile):
            return absent
        damages.append(absent)
    opened = logs.open_index_file(snapshot, log)
    if isinstance(opened, RemovedFile):
        return opened
    sums = _Sums(facts)
    if isinstance(opened, FileDamage):
        damages.append(opened)
    elif snapshot.is_committed(log):
        try:
            sums.add(opened, damages)
        finally:
            opened.file.close()
    state = _state(snapshot, log, facts)
    return EntryLogSummary(
        log, state, size or 0, sums.data_bytes, 0 if state == "drained" else sums.live_bytes, sums.groups, sums.extents,
        sums.entries, sums.ledgers, sums.live_ledgers, sums.largest_ledgers(), damages,
    )  # fmt: skip


def _state(snapshot: StoreSnapshot, log: int, facts: StateLog) -> str:
    if not snapshot.is_committed(log):
        return "not committed"
    if log in facts.drained:
        return "drained"
    if snapshot.mark is not None and log == snapshot.mark.cold_log:
        return "cold"
    return "open" if snapshot.mark is not None and log == snapshot.mark.log else "closed"


class _Sums:
    def __init__(self, facts: StateLog) -> None:
        self._facts = facts
        self.groups = self.extents = self.entries = self.data_bytes = self.live_bytes = 0
        self.ledgers = self.live_ledgers = 0
        self.holders: list[LedgerLogUsage] = []

    def add(self, opened: IndexFile, damages: list[FileDamage]) -> None:
        for ledger, places in groupby(_merged(opened, damages, self), key=lambda place: place.extent.ledger):
            size = 0
            for place in places:
                size += place.extent.length
                self.extents += 1
                self.entries += place.extent.entries
            live = ledger not in self._facts.tombstones
            self.ledgers += 1
            self.live_ledgers += live
            self.data_bytes += size
            self.live_bytes += size * live
            self._hold(LedgerLogUsage(ledger, size, live))

    def _hold(self, holder: LedgerLogUsage) -> None:
        self.holders.append(holder)
        if len(self.holders) >= 4 * SHOWN_HOLDERS_MAX:
            self.holders = heapq.nlargest(SHOWN_HOLDERS_MAX, self.holders, key=_weight)

    def largest_ledgers(self) -> list[LedgerLogUsage]:
        return heapq.nlargest(SHOWN_HOLDERS_MAX, self.holders, key=_weight)


def _weight(holder: LedgerLogUsage) -> tuple[bool, int]:
    """Returns a sort key for the ledgers to show: live ledgers before deleted ledgers, because they keep the log; then
    by size."""
    return holder.live, holder.bytes


def _merged(opened: IndexFile, damages: list[FileDamage], sums: _Sums) -> Iterator[ExtentLocation]:
    groups: list[IndexGroup] = []
    for found in opened.walk_groups():
        if isinstance(found, FileDamage):
            damages.append(found)
        else:
            groups.append(found)
    sums.groups = len(groups)
    each = [opened.walk_extents(group, pieces=len(groups)) for group in groups]
    return heapq.merge(*each, key=lambda place: (place.extent.ledger, place.extent.first))


def summarize_journal(snapshot: StoreSnapshot, number: int) -> JournalSummary | RemovedFile:
    """Reads a whole journal file and returns its summary; returns RemovedFile if the bookie has removed the file.
    Raises InvalidRequest if the file has a newer format than this Magnetar knows, OSError if the file cannot be
    read."""
    end, size, damages = BLOCK_ALIGNMENT_BYTES, 0, list[FileDamage]()
    for found in journals.walk_journal(snapshot, number):
        match found:
            case journals.OpenedJournalFile():
                size = found.bytes
            case journals.JournalBlock():
                end = found.end_offset
            case FileDamage():
                damages.append(found)
            case RemovedFile():
                return found
    return JournalSummary(number, size, end, damages)


def summarize_store(snapshot: StoreSnapshot, advance: Callable[[int], None] = lambda files: None) -> StoreSummary:
    """Returns the summary of the whole store. Reads the journals and the indexes of all entry logs. Leaves out files
    that the bookie removes meanwhile. Calls `advance` after each log and journal, with the number of those that are
    done. Raises InvalidRequest if a file has a newer format than this Magnetar knows, NotFound if the directory was
    removed meanwhile, OSError if a file cannot be read."""
    seen = ledgers.read_ledger_index_overview(snapshot)
    of_logs: list[EntryLogSummary | RemovedFile] = []
    for number in logs.list_entry_log_numbers(snapshot):
        of_logs.append(summarize_entry_log(snapshot, number, seen.facts))
        advance(len(of_logs))
    of_journals: list[JournalSummary | RemovedFile] = []
    for number in journals.list_journal_numbers(snapshot):
        of_journals.append(summarize_journal(snapshot, number))
        advance(len(of_logs) + len(of_journals))
    known_logs = [each for each in of_logs if isinstance(each, EntryLogSummary)]
    known_journals = [each for each in of_journals if isinstance(each, JournalSummary)]
    damages = [*snapshot.damages, *seen.damages, *journals.find_missing_journals(snapshot)]
    damages += [damage for log in known_logs for damage in log.damages]
    damages += [damage for journal in known_journals for damage in journal.damages]
    spares = [
        _size(snapshot, snapshot.path(JOURNAL_FOLDER, name)) or 0
        for name in journals.list_spare_journal_names(snapshot)
    ]
    return StoreSummary(
        snapshot.directory, known_logs, known_journals, sum(spares), len(seen.ledgers), len(seen.facts.tombstones),
        len(seen.facts.quarantined()), seen.facts.limbo_upto, seen.facts.fenced_upto, seen.bytes,
        _other_bytes(snapshot), damages,
    )  # fmt: skip


def _size(snapshot: StoreSnapshot, path: str) -> int | None:
    file = open_file(snapshot, path)
    if file is None:
        return None
    try:
        return file.size()
    finally:
        file.close()


def _other_bytes(snapshot: StoreSnapshot) -> int:
    """Returns the total size in bytes of all files that are neither an entry log nor a journal nor the ledger index."""
    total = 0
    for name in snapshot.files.list_directory(snapshot.directory):
        if name not in (ENTRIES_FOLDER, JOURNAL_FOLDER, LEDGERS_FOLDER):
            total += _size_of_plain(snapshot, snapshot.path(name))
    for log in logs.list_entry_log_numbers(snapshot):
        total += _size(snapshot, logs.index_file_path(snapshot, log)) or 0
    return total


def _size_of_plain(snapshot: StoreSnapshot, path: str) -> int:
    try:
        return _size(snapshot, path) or 0
    except OSError:  # a folder
        return 0


LEDGERS_SHOWN = 30
BAR_WIDTH = 1000.0
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")

PAGE_STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --ink: #1d1f23; --faint: #5d636d; --line: #c9ccd1; --live-a: #2f6fb3;
  --live-b: #5a93cf; --rest: #9dbfe3; --dead: #b9bcc2; --room: #eceef0; --mark: #b4540a; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --page: #17191c; --ink: #e8e9eb; --faint: #a3a9b3; --line: #454a52;
  --live-a: #6ea8e6; --live-b: #4a83c2; --rest: #35597f; --dead: #5b6069; --room: #24272c; --mark: #f0a35e;
  --bad: #ff8a80; } }
body { background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto;
  max-width: 70rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; } .faint { color: var(--faint); }
dl { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem 1.5rem; }
dt { color: var(--faint); font-size: .85rem; } dd { margin: 0; font-variant-numeric: tabular-nums; }
.row { margin: .7rem 0; } .row p { margin: 0 0 .15rem; font-variant-numeric: tabular-nums; }
svg { display: block; height: 1.4rem; width: 100%; } rect { shape-rendering: crispEdges; }
.live-a { fill: var(--live-a); } .live-b { fill: var(--live-b); } .rest { fill: var(--rest); }
.dead { fill: url(#hatch); } .hatch { stroke: var(--dead); stroke-width: 3; } .room { fill: var(--room); }
.mark { fill: var(--mark); } .frame { fill: none; stroke: var(--line); } .bad { color: var(--bad); }
ul.key { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; list-style: none; padding: 0; }
ul.key svg { display: inline-block; height: .9rem; width: 1.6rem; vertical-align: -.1rem; margin-right: .4rem; }
"""
HATCH_PATTERN_SVG = (
    '<svg style="position:absolute;width:0;height:0" aria-hidden="true"><defs><pattern id="hatch" width="6" height="6"'
    ' patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><line class="hatch" x1="0" y1="0" x2="0" y2="6"/>'
    "</pattern></defs></svg>"
)


class BarPiece(NamedTuple):
    """A coloured part of a bar in the HTML picture of a store: its kind, its size in bytes, and its title."""

    kind: str
    bytes: int
    title: str


def render_html(snapshot: StoreSnapshot, summary: StoreSummary) -> str:
    """Returns the summary of a store as one HTML page, which the module's docstring describes. `snapshot` must be the
    one of which the summary was made."""
    cookie = snapshot.cookie
    name = "unknown bookie" if cookie is None else f"bookie {cookie.bookie}"
    return "\n".join([
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8"/><meta name="viewport" content="width=device-width"/>',
        f"<title>Store of {escape(name)}</title><style>{escape(PAGE_STYLE, quote=False)}</style></head><body>",
        HATCH_PATTERN_SVG,
        f'<h1>Store of {escape(name)}</h1><p class="faint">{escape(summary.directory)}</p>',
        *_numbers(summary),
        *_limbo(snapshot),
        *_damages(summary),
        f"<h2>Entry logs</h2>{_KEY}",
        *_logs(summary.logs),
        "<h2>Journals</h2>",
        *_journals(snapshot, summary.journals),
        "<h2>Ledgers that hold most</h2>",
        *_ledgers(summary.logs),
        "</body></html>",
        "",
    ])  # fmt: skip


def format_size(count: int) -> str:
    """Returns a size as text, such as `1.5 GiB`."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} bytes"


def _numbers(summary: StoreSummary) -> Iterator[str]:
    dead = sum(log.data_bytes - log.live_bytes for log in summary.logs)
    limbo = "no" if summary.limbo_upto < 0 else f"up to ledger {summary.limbo_upto}"
    facts = {
        "entry logs": f"{len(summary.logs)}, {format_size(summary.log_bytes)}",
        "live in them": format_size(summary.live_bytes),
        "dead in them": format_size(dead),
        "journals": f"{len(summary.journals)}, {format_size(sum(each.bytes for each in summary.journals))}",
        "spare segments": format_size(summary.spare_bytes),
        "ledgers": f"{summary.ledgers:,}",
        "deleted (intervals)": f"{summary.tombstones:,}",
        "quarantined (intervals)": f"{summary.quarantined:,}",
        "limbo": limbo,
        "ledger index": format_size(summary.ledger_index_bytes),
    }
    yield "<dl>"
    for name, value in facts.items():
        yield f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
    yield "</dl>"


def _limbo(snapshot: StoreSnapshot) -> Iterator[str]:
    if snapshot.reasons:
        yield '<h2 class="bad">In limbo, because</h2><ul>'
        yield from (f"<li>{escape(reason)}</li>" for reason in snapshot.reasons)
        yield "</ul>"


def _damages(summary: StoreSummary) -> Iterator[str]:
    if summary.damages:
        yield f'<h2 class="bad">Damaged: {len(summary.damages)}</h2><ul>'
        for damage in summary.damages:
            yield f"<li>{escape(damage.path)}, offset {damage.offset}: {escape(damage.reason)}</li>"
        yield "</ul>"


def _logs(logs: list[EntryLogSummary]) -> Iterator[str]:
    largest = max((log.bytes for log in logs), default=0)
    if not logs:
        yield '<p class="faint">none</p>'
    for log in logs:
        bad = f', <span class="bad">{len(log.damages)} damaged</span>' if log.damages else ""
        yield (
            f'<div class="row" id="log-{log.log}"><p>log {log.log}, {escape(log.state)}: {format_size(log.bytes)}, '
            f"{100 * log.live_share:.0f} % live, held by {log.live_ledgers:,} of {log.ledgers:,} ledgers{bad}</p>"
        )
        yield _bar(f"log {log.log}", _pieces(log), largest) + "</div>"


def _pieces(log: EntryLogSummary) -> list[BarPiece]:
    live = log.state != "drained"
    holders = [holder for holder in log.holders if holder.live and live]
    shown = sum(holder.bytes for holder in holders)
    pieces = [
        BarPiece("live-a" if i % 2 == 0 else "live-b", holder.bytes,
        f"ledger {holder.ledger}: {format_size(holder.bytes)}")
        for i, holder in enumerate(holders)
    ]
    others = log.live_ledgers - len(holders)
    pieces.append(
        BarPiece("rest", log.live_bytes - shown, f"{others:,} other ledgers: {format_size(log.live_bytes - shown)}")
    )
    dead = log.data_bytes - log.live_bytes
    pieces.append(BarPiece("dead", dead, f"dead: {format_size(dead)}"))
    room = max(log.bytes - log.data_bytes, 0)
    pieces.append(BarPiece("room", room, f"no records: {format_size(room)}"))
    return pieces


def _journals(snapshot: StoreSnapshot, journals: list[JournalSummary]) -> Iterator[str]:
    largest = max((each.bytes for each in journals), default=0)
    number, offset = (0, 0) if snapshot.mark is None else snapshot.mark.position
    if not journals:
        yield '<p class="faint">none</p>'
    for each in journals:
        before = each.end if each.journal < number else min(offset, each.end) if each.journal == number else 0
        marked = f", the mark at {offset:,}" if each.journal == number else ""
        bad = f', <span class="bad">{len(each.damages)} damaged</span>' if each.damages else ""
        yield (
            f'<div class="row" id="journal-{each.journal}"><p>journal {each.journal}: {format_size(each.bytes)}, '
            f"written up to {each.end:,}{marked}{bad}</p>"
        )
        pieces = [
            BarPiece("dead", before, f"before the mark: {format_size(before)} are in entry logs"),
            BarPiece(
                "live-a", each.end - before, f"after the mark: {format_size(each.end - before)} would be replayed"
            ),
            BarPiece("room", max(each.bytes - each.end, 0), "not written yet"),
        ]
        yield _bar(f"journal {each.journal}", pieces, largest, offset if each.journal == number else None) + "</div>"


def _ledgers(logs: list[EntryLogSummary]) -> Iterator[str]:
    totals: dict[int, LedgerLogUsage] = {}
    for log in logs:
        for holder in log.holders:
            known = totals.get(holder.ledger, holder._replace(bytes=0))
            totals[holder.ledger] = known._replace(bytes=known.bytes + holder.bytes)
    largest = sorted(totals.values(), key=lambda each: (-each.bytes, each.ledger))[:LEDGERS_SHOWN]
    yield '<p class="faint">Their bytes in the logs of which they are among the largest holders.</p>'
    for each in largest:
        what = "live" if each.live else "deleted"
        size = format_size(each.bytes)
        yield f'<div class="row" id="ledger-{each.ledger}"><p>ledger {each.ledger}: {size}, {what}</p>'
        piece = BarPiece("live-a" if each.live else "dead", each.bytes, f"{what}: {format_size(each.bytes)}")
        yield _bar(f"ledger {each.ledger}", [piece], largest[0].bytes) + "</div>"


def _bar(label: str, pieces: list[BarPiece], largest: int, mark: int | None = None) -> str:
    """Returns the HTML of a bar that shows the pieces one after the other; a size of `largest` bytes fills the whole
    width."""
    scale = BAR_WIDTH / largest if largest else 0.0
    said = "; ".join(piece.title for piece in pieces if piece.bytes)
    parts = [
        f'<svg viewBox="0 0 {BAR_WIDTH:.0f} 20" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}: {escape(said)}">'
    ]
    at = 0
    for piece in pieces:
        if piece.bytes > 0:
            width = piece.bytes * scale
            parts.append(
                f'<rect class="{piece.kind}" x="{at * scale:.2f}" y="0" width="{width:.2f}" height="20" '
                f'data-bytes="{piece.bytes}"><title>{escape(piece.title)}</title></rect>'
            )
            at += piece.bytes
    parts.append(f'<rect class="frame" x="0" y="0" width="{at * scale:.2f}" height="20"/>')
    if mark is not None:
        parts.append(f'<rect class="mark" x="{max(mark * scale - 1.5, 0):.2f}" y="0" width="3" height="20"/>')
    return "".join(parts) + "</svg>"


def _key_of(kind: str, text: str) -> str:
    rect = f'<rect class="{kind}" x="0" y="0" width="28" height="14"/><rect class="frame" width="28" height="14"/>'
    return f'<li><svg viewBox="0 0 28 14" aria-hidden="true">{rect}</svg>{text}</li>'


_KEY = (
    '<ul class="key">'
    + _key_of("live-a", "a ledger")
    + _key_of("live-b", "the next ledger")
    + _key_of("rest", "all smaller ledgers")
    + _key_of("dead", "dead: of deleted ledgers")
    + _key_of("room", "no records")
    + "</ul>"
)
