"""The verbs of a running bookie: plans name ledgers and topics, a collection goes on by itself, errors are typed."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from magnetar.bookie.format.journal import DamagedFile
from magnetar.bookie.maintenance.garbage import GarbageRefusal
from magnetar.bookie.server import Bookie
from magnetar.bookie.store.entrylog.mover import CompactionPolicy, EntryLogUsage
from magnetar.ledger import client as deletions
from magnetar.ledger.peer_format import Status, decode_answer, encode_admin_request
from magnetar.metadata import paths, records
from magnetar.proto.versions import PRODUCT
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import KEY, PeerCaller
from tests.bookie.maintenance.test_garbage import with_logs
from tests.bookie.stores import NODE

pytestmark = pytest.mark.run_by.with_args(with_cluster)


async def ask(caller: PeerCaller, verb: str, **options: object) -> dict[str, Any]:
    request = json.dumps({"verb": verb, **options}).encode()
    reply = await caller.local.request(encode_admin_request(), (request,), timeout_s=30)
    assert decode_answer(reply.head).status is Status.OK
    assert KEY not in bytes(reply.frames[0])
    answer = json.loads(bytes(reply.frames[0]))
    assert isinstance(answer, dict)
    return answer


async def until_done(caller: PeerCaller) -> dict[str, Any]:
    for _ in range(1000):
        status = await ask(caller, "gc-status")
        if not status["running"]:
            return status
        await asyncio.sleep(0.1)
    raise AssertionError("it runs for ever")


async def owned(cluster: Cluster, ledger: int, properties: dict[str, str]) -> None:
    found = await cluster.metadata.get(paths.ledger(ledger))
    assert found is not None
    record = records.decode_record(found.value, records.LedgerRecord, paths.ledger(ledger))
    record = msgspec.structs.replace(record, properties=properties)
    await cluster.metadata.put(paths.ledger(ledger), records.encode_record(record, paths.ledger(ledger)))


async def deleted(cluster: Cluster, bookie: Bookie, ledger: int) -> None:
    """Deleted by two passes."""
    await deletions.delete_ledgers(cluster.metadata, [ledger])
    for _ in range(2):
        await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(minor=False))
        await asyncio.sleep(1)


async def test_the_plan_names_who_holds_each_log_and_what_would_be_done(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster)
    await owned(cluster, 1, {"topic": "persistent://public/default/orders"})
    await owned(cluster, 2, {"topic": "persistent://public/default/orders", "cursor": "billing"})
    await deletions.delete_ledgers(cluster.metadata, [3])
    before = cluster.simulation.node(NODE).disk.list_paths()
    logs = (await ask(caller, "gc-plan"))["logs"]
    assert cluster.simulation.node(NODE).disk.list_paths() == before
    holders = {log["holders"][0]["ledger"]: log for log in logs}
    bookie.garbage_collector._refused = GarbageRefusal.WENT_BACK
    assert (await ask(caller, "gc-plan"))["refused"] == GarbageRefusal.WENT_BACK.describe()
    assert list(holders) == [1, 2, 3, 4]
    assert holders[1]["holders"] == [
        {
            "ledger": 1, "liveBytes": holders[1]["liveBytes"], "topic": "persistent://public/default/orders",
            "state": "open",
        }
    ]  # fmt: skip
    assert holders[2]["holders"][0]["cursor"] == "billing"
    assert holders[3]["holders"][0]["deleted"] is True
    assert {(log["action"], log["livePercent"]) for log in logs} == {("keep", 100.0)}
    assert holders[4]["reason"] == "it still grows"
    assert all(log["bytes"] >= log["dataBytes"] >= log["liveBytes"] > 0 for log in logs)


async def test_a_collection_by_hand_frees_the_space_and_says_what_it_did(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster)
    assert (await ask(caller, "gc-status")) == {"running": False, "progress": None, "last": None}
    await deletions.delete_ledgers(cluster.metadata, [2])
    await cluster.simulation.spawn(NODE, bookie.garbage_collector.run_pass(minor=False))
    await asyncio.sleep(1)
    assert await ask(caller, "gc-start") == {"started": True}
    last = (await until_done(caller))["last"]
    assert (last["error"], last["refused"], last["ledgersDeleted"]) == (None, None, 1)
    assert (len(last["logsDeleted"]), last["badRecords"]) == (1, 0)
    assert last["bytesFreed"] > 3000
    assert last["endedMs"] >= last["startedMs"]
    assert [log["log"] for log in (await ask(caller, "gc-plan"))["logs"]] == [1, 3, 4]


async def test_a_collection_that_is_asked_for_while_the_bookie_closes_is_refused_with_a_type(
    cluster: Cluster, /
) -> None:
    bookie, caller = await with_logs(cluster)
    await ask(caller, "gc-status")  # the first question makes what is closed then
    await cluster.simulation.spawn(NODE, bookie._admin.close())
    refused = await ask(caller, "gc-start")
    assert (refused["error"], (await ask(caller, "gc-status"))["running"]) == ("Unavailable", False)


async def test_a_second_collection_at_the_same_time_is_busy(cluster: Cluster, /) -> None:
    _, caller = await with_logs(cluster)
    await ask(caller, "gc-start")
    busy = await ask(caller, "gc-start")
    assert busy["error"] == "Busy"
    assert (await ask(caller, "gc-status"))["running"] is True
    await until_done(caller)
    assert await ask(caller, "gc-start") == {"started": True}
    await until_done(caller)


async def test_a_collection_that_fails_says_why(cluster: Cluster, /) -> None:
    _, caller = await with_logs(cluster)
    await cluster.metadata.delete(paths.CLUSTER)
    await ask(caller, "gc-start", major=True)
    last = (await until_done(caller))["last"]
    assert last["error"] == "ValueError"
    assert "is missing from the metadata: nothing is deleted" in last["message"]


async def test_a_collection_that_finds_an_index_damaged_while_it_moves_says_so(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster)

    async def damaged(logs: list[EntryLogUsage], policy: CompactionPolicy, on_progress: object) -> list[int]:
        raise DamagedFile("entrylogs/1.idx", 4096, "group of the index does not match its checksum")

    bookie.store.compactor._compact = damaged  # type: ignore[method-assign, assignment]
    assert (await caller.add(1, 10, b"grows")).status is Status.OK
    await cluster.simulation.spawn(NODE, bookie.store.checkpoint())
    for ledger in (1, 2):
        await deleted(cluster, bookie, ledger)
    await ask(caller, "gc-start", major=True, roll=True)
    last = (await until_done(caller))["last"]
    assert (last["error"], last["endedMs"] is None) == ("DamagedFile", False)
    assert "entrylogs/1.idx: damaged at offset 4096" in last["message"]


async def test_a_bookie_that_closes_ends_a_collection_by_hand(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster)
    await deleted(cluster, bookie, 2)
    await ask(caller, "gc-start", major=True)
    assert bookie.garbage_collector.statistics()["gc_running"] == 1
    await cluster.simulation.spawn(NODE, bookie.close())
    assert bookie.garbage_collector.statistics()["gc_running"] == 0


async def test_the_state_of_a_bookie(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster)
    state = await ask(caller, "state")
    assert (state["bookie"], state["disk"], state["readOnly"]) == (bookie.id, "writable", False)
    assert (state["ledgers"], state["logs"], state["limboUpto"], state["quarantined"]) == (4, 4, -1, 0)
    assert (state["version"], state["clusterFormat"]) == (PRODUCT, 2)
    assert 0 < state["freeBytes"] <= state["totalBytes"]
    assert state["gc"] == {"running": False, "progress": None, "last": None}
    bookie.store.descriptors.quarantine(1, 3, 4)
    bookie.store.descriptors.enter_limbo(4)
    state = await ask(caller, "state")
    assert (state["limboUpto"], state["fencedUpto"], state["quarantined"]) == (4, 4, 1)
    assert state["scrub"] == await ask(caller, "scrub-status")


async def test_a_departing_bookie_is_read_only_whatever_its_disk(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster)
    bookie.disk_monitor.set_bookie_departing(True)
    assert (await caller.add(9, 0, b"new")).status is Status.READ_ONLY
    state = await ask(caller, "state")
    assert (state["disk"], state["readOnly"]) == ("writable", True)
    bookie.disk_monitor.set_bookie_departing(False)
    assert (await ask(caller, "state"))["readOnly"] is False


async def test_a_bookie_reports_its_clock_and_how_long_its_syncs_take(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster)
    report = await ask(caller, "report")
    assert (report["bookie"], report["version"]) == (bookie.id, PRODUCT)
    assert report["syncs"] > 0
    assert 0 <= report["syncP50Seconds"] <= report["syncP99Seconds"]
    assert report["clockMs"] == cluster.simulation.world(NODE).clock.wall_ms()
    assert report["openFilesMax"] > 0


async def test_a_pass_that_refused_to_delete_is_seen_until_one_does_not(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster, 12)
    for ledger in range(1, 13):
        await cluster.metadata.delete(paths.ledger(ledger))
    await ask(caller, "gc-start")
    last = (await until_done(caller))["last"]
    assert last["refused"].startswith("the metadata has no record of them, and none of their deletion; put the right")
    assert (await ask(caller, "state"))["gcRefused"] == last["refused"]
    assert bookie.statistics()["gc_refused"] == 1
    await ask(caller, "gc-start", force=True)
    assert (await until_done(caller))["last"]["refused"] is None
    assert (await ask(caller, "state"))["gcRefused"] is None


async def test_limbo_is_seen_and_left_by_decision_only(cluster: Cluster, /) -> None:
    bookie, caller = await with_logs(cluster)
    assert (await ask(caller, "limbo-status"))["upto"] == -1
    assert (await ask(caller, "accept-loss"))["error"] == "InvalidRequest"
    bookie.store.descriptors.enter_limbo(4)
    assert (await ask(caller, "limbo-status"))["upto"] == 4
    answer = await ask(caller, "accept-loss")
    assert answer["ledgers"] == 4, "this is the only bookie: nobody knows what its ledgers had"
    assert "stays in recovery" in answer["givenUp"]["1"]
    status = await ask(caller, "limbo-status")
    assert (status["upto"], status["limbo_ledgers"], status["limbo_ledgers_done"]) == (-1, 4, 0)
    assert (await ask(caller, "state"))["limboUpto"] == -1


async def test_unknown_verbs_and_options_are_refused_with_those_that_exist(cluster: Cluster, /) -> None:
    _, caller = await with_logs(cluster, 1)
    unknown = await ask(caller, "format-disk")
    assert (unknown["error"], "gc-plan" in unknown["message"]) == ("InvalidRequest", True)
    for verb, options in (("gc-plan", {"major": "yes"}), ("gc-start", {"fast": True}), ("state", {"a": 1})):
        assert (await ask(caller, verb, **options))["error"] == "InvalidRequest", (verb, options)
    for text in (b"[]", b'{"verb"', b"{}"):
        reply = await caller.local.request(encode_admin_request(), (text,), timeout_s=30)
        assert decode_answer(reply.head).status is Status.BAD_REQUEST
