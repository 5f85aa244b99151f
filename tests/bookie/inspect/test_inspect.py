"""Looking into a store: all is found, damage is shown with its place and does not end the look, nothing is touched."""

import asyncio
import random
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import pytest

from magnetar.bookie.format.entry_log import FIRST_RECORD_OFFSET
from magnetar.bookie.format.journal import RecordType
from magnetar.bookie.format.mark import Cookie, encode_cookie
from magnetar.bookie.inspect import journals, logs, snapshot, summary
from magnetar.bookie.inspect.snapshot import FileDamage, StoreSnapshot
from magnetar.bookie.inspect.summary import render_html
from magnetar.bookie.store import disk
from magnetar.bookie.store.index import ExtentLocation
from magnetar.bookie.store.store import Store
from magnetar.runtime.files import File, Files, join_path
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import KEY
from tests.bookie.stores import DATA, NODE, Model, fence, load, open_store, simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

BOOKIE = "00010203-0405-0607-0809-0a0b0c0d0e0f"


class OnlyReads:
    """Files that can be looked at; anything else fails the test."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def open(self, path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> File:
        assert (create, exclusive, write) == (False, False, False), f"{path} was opened for writing"
        return self._files.open(path, write=False)

    def exists(self, path: str) -> bool:
        return self._files.exists(path)

    def list_directory(self, path: str) -> list[str]:
        return self._files.list_directory(path)

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} was called")


def look(simulation: Simulation) -> StoreSnapshot:
    return snapshot.snapshot_directory(OnlyReads(simulation.world(NODE).files), DATA)  # type: ignore[arg-type]


def everything(found: StoreSnapshot) -> Iterator[object]:
    """All that all readers yield."""
    yield from found.damages
    yield from logs.read_ledger_index_overview(found).damages
    yield from journals.find_missing_journals(found)
    for number in journals.list_journal_numbers(found):
        yield from journals.walk_journal(found, number)
    for log in logs.list_entry_log_numbers(found):
        yield from logs.walk_log_extents(found, log)
        yield from logs.walk_entry_log(found, log)


def damages(found: StoreSnapshot) -> list[FileDamage]:
    return [each for each in everything(found) if isinstance(each, FileDamage)]


async def filled(simulation: Simulation, *, closed: bool = True) -> tuple[Store, Model]:
    """A store of several logs, with fences and a deleted ledger; its last checkpoint left adds in the journal."""
    files = simulation.world(NODE).files
    store = await open_store(simulation)
    disk.replace_file(files, DATA, "cookie", encode_cookie(Cookie(BOOKIE, "i", ("h:/d",))))
    model = Model()
    await load(store, model, random.Random(7), 60)
    await store.delete_ledgers([3])
    await store.checkpoint()
    await fence(store, 1)
    await store.checkpoint()
    await model.add(store, 20, 0, 300)
    if closed:
        await store.close()
    return store, model


def flip(simulation: Simulation, path: str, offset: int) -> None:
    file = simulation.world(NODE).files.open(path)
    old = file.pread(1, offset)
    file.pwrite([bytes([old[0] ^ 0x40])], offset)
    file.close()


def counted(found: StoreSnapshot) -> tuple[int, int, int, int]:
    """(log records, extents, ledgers, journal records) that can be seen."""
    seen = logs.read_ledger_index_overview(found)
    each = list(everything(found))
    return (
        sum(isinstance(one, logs.LoggedEntry) for one in each),
        sum(isinstance(one, ExtentLocation) for one in each),
        len(list(logs.walk_ledger_records(found, seen))),
        sum(len(one.records) for one in each if isinstance(one, journals.JournalBlock)),
    )


def first_log(found: StoreSnapshot) -> int:
    return logs.list_entry_log_numbers(found)[0]


def groups_of(found: StoreSnapshot, log: int) -> Iterator[logs.IndexGroup]:
    opened = logs.open_index_file(found, log)
    assert isinstance(opened, logs.IndexFile)
    yield from (group for group in opened.walk_groups() if isinstance(group, logs.IndexGroup))
    opened.file.close()


def blocks_of(found: StoreSnapshot, number: int) -> list[journals.JournalBlock]:
    return [each for each in journals.walk_journal(found, number) if isinstance(each, journals.JournalBlock)]


async def test_each_acknowledged_entry_is_found_where_it_lies_and_whole(simulation: Simulation, /) -> None:
    _, model = await filled(simulation)
    found = look(simulation)
    for ledger in sorted({ledger for ledger, _ in model.acked}):
        places = [each for each in logs.walk_ledger_extents(found, ledger) if isinstance(each, ExtentLocation)]
        copies = [*logs.find_log_copies(found, places), *logs.find_journal_copies(found, ledger)]
        assert all(isinstance(copy, logs.EntryCopy) and copy.damage is None for copy in copies)
        present = {copy.entry for copy in copies if isinstance(copy, logs.EntryCopy)}
        acked = {entry for at, entry in model.acked if at == ledger}
        assert acked <= present or ledger == 3
        for entry in sorted(acked)[:2]:
            assert [copy for copy in copies if copy.entry == entry] == [  # type: ignore[union-attr]
                *logs.find_log_copies(found, places, entry), *logs.find_journal_copies(found, ledger, entry)
            ]  # fmt: skip
    assert damages(found) == []


async def test_a_log_read_record_by_record_holds_what_its_index_says(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    numbers = logs.list_entry_log_numbers(found)
    assert len(numbers) >= 1
    for log in numbers:
        records = [each for each in logs.walk_entry_log(found, log) if isinstance(each, logs.LoggedEntry)]
        indexed = [each.extent for each in logs.walk_log_extents(found, log) if isinstance(each, ExtentLocation)]
        assert len(records) == sum(extent.entries for extent in indexed) > 0
        for extent in indexed:
            inside = [each for each in records if extent.start <= each.offset < extent.start + extent.length]
            assert {each.ledger for each in inside} == {extent.ledger}
            assert [inside[0].entry, inside[-1].entry, len(inside)] == [extent.first, extent.last, extent.entries]


async def test_the_ledger_index_says_what_the_store_knew_and_no_key(simulation: Simulation, /) -> None:
    store, model = await filled(simulation, closed=False)
    await store.checkpoint()
    found = look(simulation)
    seen = logs.read_ledger_index_overview(found)
    states = {state.ledger: state for state in logs.walk_ledger_records(found, seen)}
    assert list(states) == sorted(states) == sorted(seen.ledgers)
    assert {ledger for ledger, state in states.items() if state.fenced} == {*model.fenced, 1} & states.keys()
    assert list(seen.facts.tombstones) == [(3, 3)]
    assert 3 not in states
    assert KEY not in repr((seen, states)).encode()
    for ledger, state in states.items():
        assert (state.lac, state.last) == store.read_lac(ledger)[1:]
    assert list(logs.walk_ledger_records(found, seen, 5, 7)) == [
        states[ledger] for ledger in (5, 6) if ledger in states
    ]
    await store.close()


async def test_ledgers_are_shown_in_order_whatever_the_window(
    simulation: Simulation, /, monkeypatch: pytest.MonkeyPatch
) -> None:
    await filled(simulation)
    found = look(simulation)
    seen = logs.read_ledger_index_overview(found)
    whole = list(logs.walk_ledger_records(found, seen))
    monkeypatch.setattr(logs, "LEDGERS_PER_PASS", 2)
    assert list(logs.walk_ledger_records(found, seen)) == whole
    assert len(whole) > 4


async def test_the_journal_is_read_record_by_record(simulation: Simulation, /) -> None:
    store, _model = await filled(simulation, closed=False)
    found = look(simulation)
    blocks = [
        each for number in journals.list_journal_numbers(found) for each in journals.walk_journal(found, number)
        if isinstance(each, journals.JournalBlock)
    ]  # fmt: skip
    kinds = [record.type for block in blocks for record in block.records]
    assert {RecordType.ADD, RecordType.KEY, RecordType.FENCE} <= set(kinds)
    for block in blocks:
        file = simulation.world(NODE).files.open(
            join_path(DATA, "journal", f"{block.journal:016d}.jnl"), write=False
        )
        for offset, record in block.records_with_offsets():
            assert file.pread(len(record.payload), offset + 25) == record.payload
    assert any(
        copy.entry == 0 for copy in logs.find_journal_copies(found, 20) if isinstance(copy, logs.EntryCopy)
    )
    await store.close()


@pytest.mark.parametrize("seed", range(3))
def test_beside_a_running_bookie_nothing_is_called_damaged_at_any_moment(seed: int) -> None:
    async def main(simulation: Simulation) -> None:
        store, model = await filled(simulation, closed=False)
        work = simulation.spawn(NODE, load(store, model, random.Random(seed), 60))
        looks = 0
        while not work.done():
            found = look(simulation)
            assert damages(found) == []
            store_in_short = summary.summarize_store(found)
            assert store_in_short.damages == []
            looks += 1
            await asyncio.sleep(0.0007)
        await work
        assert looks > 20
        await store.close()

    simulate(main, seed)


async def test_a_walk_may_begin_in_the_middle(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    log = first_log(found)
    records = [each for each in logs.walk_entry_log(found, log) if isinstance(each, logs.LoggedEntry)]
    assert records[0].offset == FIRST_RECORD_OFFSET
    middle = records[5].offset
    assert [each for each in logs.walk_entry_log(found, log, middle) if isinstance(each, logs.LoggedEntry)] == records[
        5:
    ]
    number = journals.list_journal_numbers(found)[-1]
    blocks = blocks_of(found, number)
    behind = [
        each
        for each in journals.walk_journal(found, number, blocks[-1].offset)
        if isinstance(each, journals.JournalBlock)
    ]
    assert behind == blocks[-1:]


async def test_heads_are_read_in_pieces_of_any_size(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    for log in logs.list_entry_log_numbers(found):
        opened = logs.open_index_file(found, log)
        assert isinstance(opened, logs.IndexFile)
        for group in groups_of(found, log):
            assert list(opened.walk_extents(group)) == list(opened.walk_extents(group, pieces=1 << 30))


# ---------------------------------------------------------------------------------------- the picture
async def test_the_summary_adds_up(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    short = summary.summarize_store(found)
    for log in short.logs:
        extents = [
            each.extent for each in logs.walk_log_extents(found, log.log) if isinstance(each, ExtentLocation)
        ]
        assert log.data_bytes == sum(extent.length for extent in extents)
        assert log.live_bytes == sum(extent.length for extent in extents if extent.ledger != 3)
        assert log.entries == sum(extent.entries for extent in extents)
        assert log.ledgers == len({extent.ledger for extent in extents})
        for holder in log.holders:
            assert holder.bytes == sum(each.length for each in extents if each.ledger == holder.ledger)
            assert holder.live == (holder.ledger != 3)
    assert short.live_bytes < sum(log.data_bytes for log in short.logs)
    assert {log.state for log in short.logs} <= {"open", "closed"}


async def test_the_picture_is_well_formed_needs_nothing_else_and_shows_the_numbers(simulation: Simulation, /) -> None:
    await filled(simulation)
    found = look(simulation)
    found = found._replace(cookie=Cookie('<b onload="x">&', "i", ()), reasons=("log 3 is <gone>",))
    short = summary.summarize_store(found)._replace(damages=[FileDamage("/a<b>", 3, "&c")])
    page = render_html(found, short)
    root = ET.fromstring(page)
    assert "<b onload" not in page
    assert not {"src", "href", "srcset"} & {name for each in root.iter() for name in each.attrib}
    assert {each.tag for each in root.iter()}.isdisjoint({"script", "link", "img", "iframe", "object"})
    style = "".join(each.text or "" for each in root.iter("style"))
    assert "http" not in page
    assert "@import" not in style
    assert "prefers-color-scheme: dark" in style
    assert style.count("url(") == style.count("url(#")
    rows = {each.attrib["id"]: each for each in root.iter("div") if "id" in each.attrib}
    for log in short.logs:
        pieces = {"room": 0, "dead": 0, "live": 0}
        for rect in rows[f"log-{log.log}"].iter("rect"):
            kind = {"live-a": "live", "live-b": "live", "rest": "live"}.get(
                rect.attrib["class"], rect.attrib["class"]
            )
            if kind in pieces:
                pieces[kind] += int(rect.attrib["data-bytes"])
        assert pieces == {
            "live": log.live_bytes, "dead": log.data_bytes - log.live_bytes, "room": log.bytes - log.data_bytes
        }  # fmt: skip
        assert f"{100 * log.live_share:.0f} % live" in "".join(rows[f"log-{log.log}"].itertext())
    assert found.mark is not None
    marked = rows[f"journal-{found.mark.journal}"]
    assert [each for each in marked.iter("rect") if each.attrib["class"] == "mark"]
    assert "ledger-1" in rows
    assert "log 3 is <gone>" in "".join(root.itertext())
