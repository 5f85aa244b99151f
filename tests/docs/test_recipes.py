"""The recipes of docs/design/recipes.md lead where they say: each is followed by something that only this test knows.

A new kind of metadata store is guarded by tests/metadata/test_conformance.py, which asks each backend all questions.
"""

import asyncio
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from magnetar.bookie.server import Bookie
from magnetar.broker.access.table_core import PERMISSION_RULES
from magnetar.broker.grpc import checked
from magnetar.cli.run import metrics as samples
from magnetar.cli.run.metrics import MeasuredParts
from magnetar.metadata import records
from magnetar.metadata.records import CounterRecord, DamagedRecord, MetadataRecord
from magnetar.metadata.sqlite import IN_MEMORY_PATH, SqliteStore
from magnetar.metadata.store import get_record, update_record
from magnetar.runtime import tasks as supervisor
from magnetar.runtime.metrics import MetricsPage
from magnetar.runtime.process import make_system_world
from magnetar.runtime.tasks import Supervisor
from tests.support.cluster import cluster


class NoteRecord(MetadataRecord, frozen=True, kw_only=True):
    """A record that no Magnetar has."""

    kind = 250
    text: str
    changes: int = 0  # a field that came later: it has a default


def _changed(record: NoteRecord | None) -> NoteRecord:
    return NoteRecord(text="n") if record is None else msgspec.structs.replace(record, changes=record.changes + 1)


async def test_a_new_record_is_stored_changed_and_read_and_refused_as_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(records._KINDS, NoteRecord.kind, NoteRecord)
    sqlite = await SqliteStore.open(make_system_world(1), IN_MEMORY_PATH)
    store = sqlite.new_session()
    for _ in range(3):
        await update_record(store, "/notes/a", NoteRecord, _changed)
    assert await get_record(store, "/notes/a", NoteRecord) == (NoteRecord(text="n", changes=2), 2)
    with pytest.raises(DamagedRecord, match="a NoteRecord, not a CounterRecord"):
        await get_record(store, "/notes/a", CounterRecord)
    await sqlite.close()


async def test_a_new_background_part_begins_again_is_shown_by_its_name_and_ends_with_its_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "RETRY_MIN_S", 0.01)
    begun, again = list[int](), asyncio.Event()

    async def work() -> None:
        begun.append(len(begun))
        if begun == [0]:
            raise ValueError("a fault")
        again.set()
        await asyncio.Event().wait()

    async with cluster(tmp_path) as running:
        kept = running.brokers[0].background.start_supervised("broker-new", work)
        await asyncio.wait_for(again.wait(), 20)
        assert begun == [0, 1]
        assert Supervisor.count_failing_tasks()["broker-new"] == 1, "until it has run for a while"
    assert kept.ended.cancelled()


async def test_a_new_number_of_a_part_is_a_counter_unless_it_is_among_the_gauges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = Bookie.statistics
    monkeypatch.setattr(Bookie, "statistics", lambda self: {**honest(self), "notes": 3, "notes_waiting": 2})
    monkeypatch.setattr(samples, "BOOKIE_GAUGES", samples.BOOKIE_GAUGES | {"notes_waiting"})
    page = MetricsPage()
    async with cluster(tmp_path) as running:
        await MeasuredParts(bookies=running.bookies)(page)
    registry = CollectorRegistry()
    registry.register(page)
    text = generate_latest(registry).decode()
    assert "# TYPE magnetar_bookie_notes_total counter" in text
    assert "# TYPE magnetar_bookie_notes_waiting gauge" in text


async def test_a_broker_with_a_call_that_has_no_permission_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        without = {path: rule for path, rule in PERMISSION_RULES.items() if path != "Broker.Offsets"}
        monkeypatch.setattr(checked, "PERMISSION_RULES", without)
        with pytest.raises(KeyError, match=r"Broker\.Offsets"):
            await running.add_broker()
        monkeypatch.undo()
        await running.add_broker()
