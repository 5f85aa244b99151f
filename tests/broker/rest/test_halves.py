"""Half messages over REST, as an operator lists and decides them. Coordinators and topics are real."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from magnetar.broker.server import Broker
from magnetar.client.client import Client
from tests.broker.rest.http import ANY, Http, serving
from tests.support.cluster import Cluster

HALVES = "/admin/v3/transactions/halves"
class Scene:
    """A half of `orders`, of group `shop`, that no program answers for."""

    def __init__(self, http: Http, client: Client, half: Any) -> None:
        self.http, self.client, self.half = http, client, half
        self.path = f"{HALVES}/{half.id.most}/{half.id.least}"

    async def state(self) -> str:
        found: str = (await self.http.get(self.path))["state"]
        return found


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[tuple[Scene, Broker, Cluster]]:
    async with serving(folder) as (http, broker, running), Client(f"magnetar://{broker.endpoint}") as client:
        producer = await client.create_producer("orders")
        yield Scene(http, client, await producer.prepare(b"17", group="shop", check_key="17")), broker, running


async def test_the_oldest_come_first_and_no_more_than_asked_for(tmp_path: Path) -> None:
    async with scene(tmp_path) as (it, _, _):
        producer = await it.client.create_producer("orders")
        later = await producer.prepare(b"18", group="shop", check_key="18")
        rows = await it.http.get(HALVES)
        assert [each["half"] for each in rows] == [str(it.half.id), str(later.id)]
        assert [each["half"] for each in await it.http.get(f"{HALVES}?limit=1")] == [str(it.half.id)]


async def test_ids_that_are_none_and_what_is_no_half_are_refused(tmp_path: Path) -> None:
    async with scene(tmp_path) as (it, _, _):
        most, least = it.half.id
        txn = await it.client.transaction(timeout=60)
        never = (1 << 41) - 1
        for id_, seen, changed in (
            (f"{most}/x", 400, 400), (f"x/{least}", 400, 400), (f"{most}/-1", 412, 412), (f"9999/{least}", 412, 412),
            (f"{most}/{1 << 63}", 412, 412), (f"900/{least}", 404, 404), (f"{most}/{never}", 404, 412),
            (f"{txn.id.most}/{txn.id.least}", 404, 404),
        ):  # fmt: skip
            await it.http.get(f"{HALVES}/{id_}", seen)
            for verb in ("park", "revive", "commit", "rollback"):
                await it.http.done("POST", f"{HALVES}/{id_}/{verb}", status=changed)
        await it.http.get(f"{HALVES}/{most}", 404)
        await it.http.done("POST", f"{it.path}/forget", status=404)
        await it.http.done("GET", f"{it.path}/park", status=405)
        for query, status in (
            ("limit=0", 412), ("limit=x", 400), ("coordinatorId=900", 404), ("coordinatorId=x", 400),
            ("coordinatorId=5000", 404),
        ):  # fmt: skip
            await it.http.get(f"{HALVES}?{query}", status)
        assert await it.state() == "WAITING"


async def test_a_broker_asks_the_one_that_has_the_coordinator(tmp_path: Path) -> None:
    async with scene(tmp_path) as (it, first, running):
        second = await running.add_broker(http_listen=ANY)
        http = Http(second.http_url)
        try:
            assert (await http.get(it.path))["half"] == str(it.half.id)
            assert [each["half"] for each in await http.get(HALVES)] == [str(it.half.id)]
            await http.done("POST", f"{it.path}/park")
        finally:
            await http.close()
        assert await it.state() == "PARKED"
        assert [each.number for each in first.topic_manager.transactions.loaded_coordinators] == [it.half.id.most]
