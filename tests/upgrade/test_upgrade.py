"""What earlier versions wrote is read by this one; what a later one writes is refused, with what to do."""

import contextlib
import sqlite3
import struct
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import magnetar
from magnetar.bookie import holdings
from magnetar.bookie.format import mark as note
from magnetar.bookie.format.journal import FileHeader, decode_file_header, encode_file_header
from magnetar.broker.log import compaction_core as compacted
from magnetar.broker.log import key_index_core as key_indexes
from magnetar.broker.subscription import cursor_format as cursor
from magnetar.broker.subscription import delays
from magnetar.broker.subscription.core.cursor_state import CursorChunkKey, CursorChunkKind
from magnetar.broker.topic import dedup, outcomes
from magnetar.broker.topic.dedup_core import DedupSnapshot
from magnetar.broker.transaction import log as coordinator
from magnetar.cli.common.processes import Processes
from magnetar.ledger import peer_format as peer
from magnetar.metadata import records, transfer
from magnetar.metadata.rebuild_core import BookieHoldings
from magnetar.metadata.sqlite import SqliteStore
from magnetar.proto import versions
from magnetar.proto.checksum import crc32c
from magnetar.proto.errors import NewerFormat
from magnetar.proto.names import Position
from magnetar.runtime.peer import envelope
from magnetar.runtime.process import make_system_world
from tests import layout as house
from tests.support.processes import run_cli
from tests.upgrade import content

FOLDER = Path(__file__).parent
ARCHIVES = sorted(FOLDER.glob("*.tar.xz"))
UUID = bytes(range(16))


def _opened(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    (folder / "config.toml").write_text(content.CONFIG)
    return folder / "data"


def test_this_version_has_an_archive() -> None:
    assert f"{versions.PRODUCT}.tar.xz" in {each.name for each in ARCHIVES}
    settings = tomllib.loads((house.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["project"]["version"] == versions.PRODUCT


@pytest.mark.processes
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda archive: archive.name)
def test_what_that_version_wrote_is_read_back_twice(archive: Path, tmp_path: Path) -> None:
    """The second time as this version left it."""
    data = _opened(archive, tmp_path)
    with Processes(tmp_path) as processes:
        arguments = ("standalone", "--port", "0", "--data", str(data), "--config", str(tmp_path / "config.toml"))
        for name in ("first", "second"):
            server = processes.start(name, *arguments)
            content.check(server.wait_ready())
            assert server.stop() == 0


@pytest.mark.processes
def test_what_an_earlier_version_wrote_is_back_after_its_metadata_is_lost(tmp_path: Path) -> None:
    """It wrote no labels: a pass of this version makes them, and a rebuild reads the indexes of the first entries."""
    data = _opened(ARCHIVES[0], tmp_path)
    served = ("standalone", "--port", "0", "--data", str(data), "--config", str(tmp_path / "config.toml"))
    with Processes(tmp_path) as processes:
        server = processes.start("before", *served)
        done = run_cli("bookies", "gc", "--now", "--url", server.wait_ready())
        assert done.code == 0, done.err
        server.kill()
        for file in data.glob("metadata.sqlite*"):
            file.unlink()
        metadata = processes.start("metadata", "metadata", "--listen", "127.0.0.1:0", "--data", str(data))
        done = run_cli("metadata", "rebuild", str(data / "bookie-1"), "--metadata", metadata.address)
        assert done.code == 0, done.err
        assert metadata.stop() == 0
        server = processes.start("after", *served)
        with magnetar.Client(server.wait_ready()) as client:
            earliest = magnetar.InitialPosition.Earliest
            consumer = client.subscribe("plain", "after", initial_position=earliest)
            assert [consumer.receive(10_000).data() for _ in content.PLAIN] == content.PLAIN


# ------------------------------------------------------------------------------------ a later version's
def _with_crc(data: bytes, version_at: int, size: int, crc_at: int, covered: bytes = b"", more: int = 1) -> bytes:
    """The bytes with a version so much higher (the last of its bytes is at `version_at`) and the checksum of that."""
    newer = bytearray(data)
    newer[version_at] += more
    newer[crc_at : crc_at + 4] = struct.pack(">I", crc32c(bytes(newer[:size]) + covered))
    return bytes(newer)


def _bookie_file(form: versions.StoredFormat) -> Callable[[], object]:
    data = _with_crc(encode_file_header(FileHeader(form.magic, UUID, 3)), 9, 52, 52)
    return lambda: decode_file_header(data, form.magic, UUID, 3, "the/path")


def _note() -> object:
    whole = note.encode_checksummed_json(b"MGN-SCRB", {"a": 1})
    return note.decode_checksummed_json(
        _with_crc(whole, 9, len(whole) - 4, len(whole) - 4), b"MGN-SCRB", dict, "the/path"
    )


def _bookie_cookie() -> object:
    whole = note.encode_cookie(note.Cookie("b", "i", ("h:/d",), ledgers=((0, 2),)))
    return note.decode_cookie(_with_crc(whole, 9, len(whole) - 4, len(whole) - 4), "the/path")


def _cursor() -> object:
    row = {CursorChunkKey(CursorChunkKind.NOTE, 0, 0): cursor.CursorChunkPlace(1, 0, 1, 50)}
    (entry,) = cursor.encode_marker(Position(7, 3), row, 1)
    return cursor.decode_piece(_with_crc(entry, 2, 32, 32, entry[36:]))


def _dedup() -> object:
    (entry,) = dedup.encode_snapshot(DedupSnapshot(Position(7, 3), {}), 1)
    return dedup.decode_piece(_with_crc(entry, 2, 20, 20, entry[24:]))


def _outcomes() -> object:
    (entry,) = outcomes.encode_marker(outcomes.OutcomesSnapshotMarker(Position(7, 3), (), {}), 1)
    size = outcomes.ENTRY_HEAD_BYTES - 4
    return outcomes.decode_piece(_with_crc(entry, 2, size, size, entry[outcomes.ENTRY_HEAD_BYTES :]))


def _coordinator() -> object:
    (entry,) = coordinator.encode_snapshot([])
    size = coordinator.ENTRY_HEAD_BYTES - 4
    return coordinator.decode_coordinator_entry(
        _with_crc(entry, 2, size, size, entry[coordinator.ENTRY_HEAD_BYTES :]), 0, "the/path"
    )


def _delays() -> object:
    head = struct.pack(">2sBBII", b"MD", versions.DELAYS.version + 1, delays.DIRECTORY_KIND, 0, 0)
    return delays.decode_directory(head + struct.pack(">I", crc32c(head)), 0)


def _key_index() -> object:
    builder = key_indexes.KeyIndexBuilder(7, 0, 1, with_properties=False)
    *_, directory = builder.finish()
    entry = bytearray(directory)
    entry[2] += 1
    return key_indexes.decode_directory(bytes(entry), 7)


def _compacted() -> object:
    entry = bytearray(compacted.encode_survivor(Position(5, 7), b"hi"))
    entry[2] += 1
    return compacted.decode_survivor(bytes(entry))


def _record() -> object:
    data = bytearray(records.encode_record(records.CounterRecord(next=1), "/the/path"))
    data[2] += 1
    return records.decode_record(bytes(data), records.CounterRecord, "/the/path")


def _envelope() -> object:
    header = bytearray(envelope.encode_refusal_envelope(envelope.EnvelopeKind.WRONG_PROTOCOL, UUID))
    header[4] += 1
    return envelope.decode_envelope(bytes(header))


def _export() -> object:
    head = transfer.ExportHead(versions.METADATA_EXPORT.version + 1, "", 0)
    return transfer.parse_export([msgspec.json.encode(head)], "x")


def _peer() -> object:
    head = bytearray(peer.encode_ping_request())
    head[0] += 1
    return peer.decode_request(bytes(head))


def _holdings() -> object:
    data = holdings.encode_holdings(BookieHoldings(bookie="b", instance="i", place="h:/d", starts=1))
    return holdings.decode_holdings(data[:8] + (versions.HOLDINGS.version + 1).to_bytes(2) + data[10:], "saved")


READERS: dict[versions.StoredFormat, Callable[[], object]] = {
    **{form: _bookie_file(form) for form in versions.BOOKIE_FILES},
    versions.NOTE: _note, versions.COOKIE: _bookie_cookie, versions.CURSOR: _cursor,
    versions.DEDUPLICATION: _dedup, versions.DELAYS: _delays,
    versions.OUTCOMES: _outcomes, versions.COORDINATOR: _coordinator, versions.COMPACTED: _compacted,
    versions.METADATA_RECORD: _record, versions.PEER_ENVELOPE: _envelope,
    versions.PEER: _peer, versions.KEY_INDEX: _key_index, versions.METADATA_EXPORT: _export,
    versions.HOLDINGS: _holdings,
}  # fmt: skip
RAISED: dict[versions.StoredFormat, type[Exception]] = {
    versions.METADATA_RECORD: records.DamagedRecord, versions.PEER_ENVELOPE: envelope.WrongEnvelopeMagic,
    versions.PEER: ValueError,
}  # fmt: skip
"""Others than NewerFormat: one record, or one process, does not stop the others."""


@pytest.mark.parametrize("form", READERS, ids=lambda form: form.name)
def test_a_later_version_is_refused_with_what_to_do(form: versions.StoredFormat) -> None:
    with pytest.raises(RAISED.get(form, NewerFormat)) as refused:
        READERS[form]()
    text = str(refused.value)
    assert f"{form.name} of format version {form.version + 1}" in text
    assert f"Magnetar {versions.PRODUCT} reads up to {form.version}" in text
    assert "upgrade this one" in text


async def test_a_metadata_file_of_a_later_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "metadata.sqlite"
    await (await SqliteStore.open(make_system_world(), str(path))).close()
    with contextlib.closing(sqlite3.connect(path)) as sql:
        sql.execute(f"PRAGMA user_version = {versions.METADATA_FILE.version + 1}")
    with pytest.raises(NewerFormat, match="upgrade this one"):
        await SqliteStore.open(make_system_world(), str(path))


def test_every_stored_format_is_tried() -> None:
    assert {*READERS, versions.METADATA_FILE, versions.GRPC} == {*versions.STORAGE_FORMATS, *versions.WIRE_FORMATS}
    assert len({form.name for form in READERS}) == len(READERS)


@pytest.mark.processes
def test_a_server_on_a_later_versions_folder_says_so_and_changes_nothing(tmp_path: Path) -> None:
    data = _opened(ARCHIVES[-1], tmp_path)
    cookie = data / "bookie-1" / "cookie"
    whole = cookie.read_bytes()
    newer = _with_crc(whole, 9, len(whole) - 4, len(whole) - 4, more=versions.COOKIE.version)
    cookie.write_bytes(newer)
    done = run_cli("standalone", "--port", "0", "--data", str(data))
    assert done.code == 2
    (line,) = (line for line in done.err.splitlines() if line.startswith("magnetar: "))
    assert f"bookie cookie of format version {versions.COOKIE.version + 1}" in line
    assert "upgrade this one" in line
    assert cookie.read_bytes() == newer


def test_the_command_line_says_every_version() -> None:
    done = run_cli("--version")
    assert (done.code, done.err) == (0, "")
    first, wire, storage = done.out.splitlines()
    assert first in (f"magnetar {versions.PRODUCT} (pure Python)", f"magnetar {versions.PRODUCT} (compiled)")
    assert all(f"{form.name} {form.version}" in wire for form in versions.WIRE_FORMATS)
    assert all(f"{form.name} {form.version}" in storage for form in versions.STORAGE_FORMATS)
