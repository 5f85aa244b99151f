"""`topics skip-lost` and its REST route, on a topic that lost a ledger: what they show, refuse, and write down."""

import asyncio
import json
from pathlib import Path

import pytest

from magnetar.bookie.store import identity
from magnetar.proto.errors import Unavailable
from tests.broker.log.test_skip_lost import NAME, _publish, _replace_bookie
from tests.broker.rest.http import V2, T, serving
from tests.broker.rest.test_access import guarded, lines
from tests.support.cluster import Cluster, cluster
from tests.support.processes import Result, run_cli

__all__ = ["lines"]


async def _lose(running: Cluster) -> tuple[int, str]:
    """A ledger of the topic is lost with four messages; (its id, the bookie that had it and is not forgotten yet)."""
    await _publish(running, *range(4))
    topic = await running.brokers[0].topic_manager.load_topic(NAME)
    await topic.registry.subscribe("s", topic.log.shape.start_position)
    (ledger,) = [span.ledger_id for span in topic.log.shape.spans]
    await running.brokers[0].topic_manager.unload_topic(NAME)
    gone = await _replace_bookie(running)
    await _publish(running, 4)
    running.brokers[0].topic_manager.cache.discard(ledger)
    return ledger, gone


async def test_the_command_asks_first_and_shows_what_was_passed_over(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        ledger, gone = await _lose(running)
        url = f"magnetar://{running.brokers[0].endpoint}"

        async def run(*more: str) -> Result:
            return await asyncio.to_thread(run_cli, "topics", "skip-lost", *more, stdin="", MAGNETAR_URL=url)

        asked = await run("t")
        assert (asked.code, "Pass over what" in asked.out + asked.err, "--yes" in asked.err) == (2, True, True), asked
        unknown = await run("t", "--yes")
        assert (unknown.code, "may have them: nothing was passed over" in unknown.err) == (1, True), unknown
        await identity.delete_bookie(running.sessions[-1], gone)
        assert (await run("ghost", "--yes")).code == 4
        other = await run("t", "--yes", "--ledger", "99999")
        assert (other.code, "has no ledger 99999" in other.err) == (2, True), other
        done = await run("t", "--yes", "-o", "json", "--ledger", str(ledger))
        assert done.code == 0, done.err
        found = json.loads(done.out)
        (hole,) = found["ranges"]
        assert (hole["ledger_id"], hole["first_entry"], hole["last_entry"]) == (ledger, 0, 3)
        assert [(each["name"], each["messages"]) for each in found["subscriptions"]] == [("s", 4)]
        again = await run("t", "--yes")
        assert (again.code, "nothing is lost" in again.out + again.err) == (0, True), again


async def test_clients_that_load_the_topic_again_and_again_hold_the_command_up_not(tmp_path: Path) -> None:
    async with cluster(tmp_path) as running:
        ledger, gone = await _lose(running)
        await identity.delete_bookie(running.sessions[-1], gone)
        owned, refused = running.brokers[0].topic_manager, []

        async def load() -> None:
            while True:
                try:
                    await owned.load_topic(NAME)
                except Unavailable as error:
                    refused.append(error)
                await asyncio.sleep(0)

        clients = [asyncio.create_task(load()) for _ in range(4)]
        try:
            (hole,) = await owned.skip_lost(NAME, only=-1, force=False)
        finally:
            for each in clients:
                each.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
        assert (hole.ledger_id, hole.first_entry, hole.last_entry) == (ledger, 0, 3)
        assert any("being passed over" in each.message for each in refused)
        assert (await owned.load_topic(NAME)).name == NAME


async def test_the_route_passes_over_what_is_lost_of_the_topic_or_of_a_ledger(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, _, running):
        ledger, gone = await _lose(running)
        unknown = await http.ask("POST", f"{T}/skipLost")
        assert (unknown.status, "may have them" in unknown.reason) == (405, True), unknown
        await identity.delete_bookie(running.sessions[-1], gone)
        for wrong, status in (("ledger=x", 400), ("ledger=-1", 412), ("force=perhaps", 400), ("ledger=99999", 412)):
            assert (await http.ask("POST", f"{T}/skipLost?{wrong}")).status == status, wrong
        assert (await http.ask("POST", f"{V2}/persistent/public/default/ghost/skipLost")).status == 404
        done = await http.ask("POST", f"{T}/skipLost?ledger={ledger}&force=false")
        assert done.status == 200
        (found,) = done.json
        assert found == {
            "topic": NAME.full, "subscriptions": {"s": 4}, "forgotten": [],
            "ranges": [{"ledgerId": ledger, "firstEntryId": 0, "lastEntryId": 3, "firstIndex": 0, "endIndex": 4,
                        "forced": False}],
        }  # fmt: skip
        (again,) = (await http.ask("POST", f"{T}/skipLost")).json
        assert again["ranges"] == []
        await http.done("PUT", f"{V2}/persistent/public/default/many/partitions", 2)
        answers = (await http.ask("POST", f"{V2}/persistent/public/default/many/skipLost")).json
        assert [(each["topic"][-1], each["ranges"]) for each in answers] == [("0", []), ("1", [])]


async def test_who_passed_over_what_is_in_the_audit_log_with_the_result(
    tmp_path: Path, lines: list[dict[str, str]]
) -> None:
    async with guarded(tmp_path) as (http, free):
        await free.done("PUT", T)
        root, alice = ({"Authorization": f"Bearer {name}"} for name in ("root", "alice"))
        assert (await http.ask("POST", f"{T}/skipLost?ledger=99999&force=true", **root)).status == 412
        assert (await http.ask("POST", f"{T}/skipLost?force=true", **root)).status == 200
        assert (await http.ask("POST", f"{T}/skipLost", **alice)).status == 403
        acts = [(line["principal"], line["act"], line["on"], line["result"]) for line in lines]
        assert acts == [
            ("client:root", "Admin.SkipLost", NAME.full, "InvalidRequest"),
            ("client:root", "Admin.SkipLost", NAME.full, "done"),
            ("client:alice", "manage", NAME.full, "denied"),
        ]
        assert "force" in lines[1]["fields"], "that it was by force"


@pytest.mark.parametrize("verb", ["GET", "PUT", "DELETE"])
async def test_other_verbs_pass_over_nothing(tmp_path: Path, verb: str) -> None:
    async with serving(tmp_path) as (http, _, _):
        await http.done("PUT", T)
        assert (await http.ask(verb, f"{T}/skipLost")).status in (404, 405)
