"""Entry logs that are written direct: the same bytes as those that are not, and as safe wherever the power fails."""

import random

import pytest

from magnetar.bookie.format import entry_log
from magnetar.bookie.format.index import (
    GROUP_HEADER_BYTES,
    decode_group_header_if_intact,
    decode_table_if_intact,
)
from magnetar.bookie.format.journal import FILE_HEADER_BYTES
from magnetar.bookie.store import disk
from magnetar.bookie.store.entrylog.writer import (
    APPEND_SLICE_BYTES,
    ENCODE_PIECE_BYTES,
    ENTRIES_ENCODED_AT_ONCE,
    EntryLogWriter,
    LogNumberSequence,
    MemtableFlush,
)
from magnetar.bookie.store.memtable import Memtable
from magnetar.runtime.files import DIRECT_ALIGNMENT
from magnetar.runtime.sim.disk import DiskOperation
from magnetar.runtime.sim.world import Simulation
from tests.bookie.entries import decode_extents, stored_entry
from tests.bookie.stores import NODE, UUID

LOGS = "/logs"
BUFFERS = [b"a" * 10, b"b" * 4096, b"c" * 8192, b"d" * 4086, b"e", b"", b"f" * 5000, b"g" * 3000, b"h" * 100_000]


def writer_on(simulation: Simulation, *, direct: bool) -> EntryLogWriter:
    simulation.node(NODE).disk.takes_direct = direct
    files = simulation.world(NODE).files
    files.make_directories(LOGS)
    return EntryLogWriter(files, LOGS, UUID, LogNumberSequence(0), log_bytes_max=1 << 30, allocate_bytes=64 << 10)


def content(simulation: Simulation, end: int) -> bytes:
    return disk.read_file(simulation.world(NODE).files, f"{LOGS}/{1:016d}.log", end)


def commit(writer: EntryLogWriter) -> None:
    writer.write_index([], [])
    writer.on_committed()


@pytest.mark.parametrize("direct", [False, True])
def test_appends_of_any_size_lie_one_behind_the_other(direct: bool) -> None:
    simulation = Simulation(1)
    writer = writer_on(simulation, direct=direct)
    writes: list[DiskOperation] = []

    def record(operation: DiskOperation) -> None:
        if operation.kind == "pwrite" and operation.path.endswith(".log"):
            writes.append(operation)

    simulation.node(NODE).disk.record = record
    rng = random.Random(2)
    expected = b""
    for _ in range(40):
        writer.ensure_room(300_000)
        for _ in range(rng.randint(1, 3)):
            buffers = rng.choices(BUFFERS, k=rng.randint(1, 4))
            writer.append(buffers)
            expected += b"".join(buffers)
        commit(writer)
        assert writer.end_offset == entry_log.FIRST_RECORD_OFFSET + len(expected)
        assert content(simulation, writer.end_offset)[entry_log.FIRST_RECORD_OFFSET :] == expected
    aligned = all(w.offset % DIRECT_ALIGNMENT == 0 and len(w.data) % DIRECT_ALIGNMENT == 0 for w in writes)
    assert aligned == direct
    writer.close()
    assert len(content(simulation, 1 << 30)) == entry_log.FIRST_RECORD_OFFSET + len(expected)


def test_flush_writes_each_ledger_in_entry_order_whatever_its_entries_are_made_of() -> None:
    """In one piece or two, few or many, small ones between large ones, and further apart than an extent can say."""
    rng = random.Random(3)
    memtable = Memtable(1 << 30)
    table = memtable.active
    numbers = {
        7: [0, 3 << 32, (3 << 32) + 1, 9 << 32],
        2: rng.sample(range(5000), 2 * ENTRIES_ENCODED_AT_ONCE + 9),
        5: [1],
    }
    for ledger, ids in numbers.items():
        for number in ids:
            size = rng.choice((0, 1, 300, 300, 300, 5000, ENCODE_PIECE_BYTES if rng.random() < 0.2 else 7))
            stored = stored_entry(ledger, number, rng.randbytes(size))
            pieces = (stored,) if rng.random() < 0.5 or not size else (stored[:36], stored[36:])
            memtable.insert_entries(ledger, [(number, pieces, len(stored))], len(stored))
    simulation = Simulation(1)
    writer = writer_on(simulation, direct=False)
    flush = MemtableFlush(writer, table)
    flush.start()
    slices: list[int] = []
    while several := flush.take_next_slices(rng.randint(1, 3)):
        slices += [sum(map(len, buffers)) for buffers in several]
        writer.append_slices(several)
    assert flush.flushed_share == pytest.approx(1.0, abs=0.01)
    assert len(slices) > 2
    assert all(APPEND_SLICE_BYTES <= size <= APPEND_SLICE_BYTES + ENCODE_PIECE_BYTES + 44 for size in slices[:-1])
    written = flush.write_index()
    data = content(simulation, writer.end_offset)
    index = disk.read_file(simulation.world(NODE).files, f"{LOGS}/{1:016d}.idx")[FILE_HEADER_BYTES:]
    header = decode_group_header_if_intact(index)
    assert header is not None
    found: list[tuple[int, int]] = []
    at, tables_at = entry_log.FIRST_RECORD_OFFSET, GROUP_HEADER_BYTES + header.extent_heads_bytes
    for extent in decode_extents(header, index) or []:
        places = decode_table_if_intact(extent, index[tables_at : tables_at + extent.table_bytes])
        assert places is not None
        assert extent.start == at
        for delta, offset, end in zip(places.deltas, places.offsets, places.offsets[1:], strict=False):
            stored = b"".join(table.ledgers[extent.ledger][extent.first + delta])
            assert entry_log.decode_record_if_intact(data, at + offset, at + end) == stored
            found.append((extent.ledger, extent.first + delta))
        at, tables_at = at + extent.length, tables_at + extent.table_bytes
    assert found == sorted((ledger, number) for ledger, ids in numbers.items() for number in ids)
    assert (at, written.group.extents) == (writer.end_offset, 5)


@pytest.mark.parametrize("how", ["begin", "trim"])
def test_what_was_not_committed_is_written_over(how: str) -> None:
    simulation = Simulation(1)
    writer = writer_on(simulation, direct=True)
    expected = b""
    for size in (10, 4096, 5000, 100, 8182):
        writer.ensure_room(size)
        writer.append([b"x" * size])
        expected += b"x" * size
        commit(writer)
        writer.ensure_room(9000)
        writer.append([b"never committed" * 300, b"!" * 500])
        if how == "trim":
            writer.release_unused_space()
        writer.ensure_room(10)
    writer.append([b"the end"])
    assert content(simulation, writer.end_offset)[entry_log.FIRST_RECORD_OFFSET :] == expected + b"the end"
