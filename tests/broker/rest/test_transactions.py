"""Transactions over REST: Pulsar's v3 as its tools call it, and our own routes. Topics and coordinators are real."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from magnetar.broker.server import Broker
from magnetar.client.client import Client
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.proto.names import TopicName
from tests.broker.rest.http import ANY, V2, Http, serving
from tests.support.cluster import Cluster

V3 = "/admin/v3/transactions"
ORDERS = "public/default/orders"
FULL, OTHER = "persistent://public/default/orders", "persistent://public/default/bills"


class Scene:
    """A client with an open transaction: two messages to ORDERS, one acknowledgement on `s` of BILLS."""

    def __init__(self, http: Http, client: Client, txn: Any) -> None:
        self.http, self.client, self.txn = http, client, txn
        self.id = f"{txn.id.most}/{txn.id.least}"


@asynccontextmanager
async def scene(folder: Path) -> AsyncIterator[tuple[Scene, Broker, Cluster]]:
    async with serving(folder) as (http, broker, running), Client(f"magnetar://{broker.endpoint}") as client:
        orders = await client.create_producer("orders")
        bills = await client.create_producer("bills")
        consumer = await client.subscribe("bills", "s", ConsumerType.Shared, initial_position=InitialPosition.Earliest)
        for number in range(3):
            await bills.send(b"%d" % number)
        await orders.send(b"before")
        txn = await client.transaction(timeout=60)
        for _ in range(2):
            await orders.send(b"hidden", txn=txn)
        await consumer.acknowledge(await consumer.receive(), txn=txn)
        await orders.send(b"after")
        yield Scene(http, client, txn), broker, running


async def test_a_stuck_transaction_names_who_began_it_and_what_waits_for_it(tmp_path: Path) -> None:
    async with scene(tmp_path) as (it, _, _):
        [row] = await it.http.get(V3)
        assert (row["txn"], row["state"], sorted(row["topics"])) == (str(it.txn.id), "OPEN", [OTHER, FULL])
        assert row["address"].startswith("127.0.0.1:")
        assert 0 < row["remainingMs"] <= 60_000
        shown = await it.http.get(f"{V3}/id/{it.id}")
        at = {each["topic"]: each for each in shown["at"]}
        orders, bills = at[FULL], at[OTHER]
        assert (orders["entries"], orders["holds"], orders["waiting"]) == (2, True, 3), "its two, and one after them"
        assert (bills["entries"], bills["holds"], bills["first"]) == (0, False, None)
        assert bills["pending"] == {"s": {"entries": 1, "upTo": None}}
        stats = await it.http.get(f"{V2}/{FULL.replace('://', '/')}/stats")
        assert stats["ongoingTxnCount"] == 1
        transactions = stats["transactions"]
        assert transactions["oldest"][0]["txn"] == str(it.txn.id)
        assert (transactions["open"], transactions["waiting"]) == (1, 3)
        assert transactions["lastStablePositions"][0].endswith(":0")
        assert (await it.http.ask("POST", f"{V3}/id/{it.id}/abort")).json == {"txn": str(it.txn.id), "state": "ABORTED"}
        assert (await it.http.get(f"{V3}/id/{it.id}"))["reason"] == "admin"


async def test_a_topic_without_transactions_has_no_snapshot_and_is_read_to_its_end(tmp_path: Path) -> None:
    async with serving(tmp_path) as (http, broker, _), Client(f"magnetar://{broker.endpoint}") as client:
        await (await client.create_producer("orders")).send(b"plain")
        found = await http.get(f"{V3}/transactionBufferStats/{ORDERS}")
        assert (found["state"], found["snapshotType"]) == ("NoSnapshot", None)
        assert found["maxReadPosition"].endswith(":0")


async def test_a_topic_is_deleted_by_force_when_nothing_prepared_is_there(tmp_path: Path) -> None:
    async with scene(tmp_path) as (it, broker, _):
        path = f"{V2}/persistent/{ORDERS}?force=true"
        await it.txn.prepare()
        refused = await it.http.ask("DELETE", path)
        assert refused.status == 412
        assert f"{it.txn.id} from" in refused.json["reason"]
        assert FULL in broker.topics
        await it.http.done("POST", f"{V3}/abortTransaction/{it.id}")
        await it.http.done("DELETE", path)
        opened = await it.client.transaction(timeout=60)
        bills = await it.client.create_producer("bills")
        await bills.send(b"hidden", txn=opened)
        await it.http.done("DELETE", f"{V2}/persistent/public/default/bills?force=true")
        found = await it.http.get(f"{V3}/id/{opened.id.most}/{opened.id.least}")
        assert (found["state"], found["reason"]) == ("ABORTED", "a topic of it was deleted by force")


async def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    async with scene(tmp_path) as (it, _, _):
        number = it.txn.id.most
        await it.http.get(f"{V3}/transactionMetadata/{number}/1", 200)  # of an earlier epoch: it has ended
        await it.http.get(f"{V3}/transactionMetadata/{number}/{(1 << 41) - 1}", 404)
        await it.http.get(f"{V3}/transactionMetadata/{number}/x", 400)
        await it.http.get(f"{V3}/transactionMetadata/9999/1", 412)
        await it.http.get(f"{V3}?limit=0", 412)
        await it.http.done("POST", f"{V3}/abortTransaction/{number}/{(1 << 41) - 1}", status=412)
        await it.http.done("POST", f"{V3}/transactionCoordinator/replicas", 32, 405)
        await it.http.done("POST", f"{V3}/transactionCoordinator/replicas", 16)
        await it.http.done("POST", f"{V3}/id/{it.id}/detach", "orders", 404)
        await it.http.done("POST", f"{V3}/abortTransaction/{it.id}")
        await it.http.done("POST", f"{V3}/abortTransaction/{it.id}")


async def test_a_broker_asks_the_others_for_their_coordinators_and_topics(tmp_path: Path) -> None:
    async with scene(tmp_path) as (it, first, running):
        second = await running.add_broker(http_listen=ANY)
        http = Http(second.http_url)
        try:
            found = await http.get(f"{V3}/transactionMetadata/{it.id}")
            assert found["producedPartitions"].keys() == {FULL}
            assert found["ackedPartitions"][OTHER].keys() == {"s"}
            elsewhere = await http.ask("GET", f"{V3}/pendingAckStats/public/default/bills/s")
            assert (elsewhere.status, elsewhere.headers["location"]) == (
                307, f"{first.http_url}{V3}/pendingAckStats/public/default/bills/s"
            )
            await http.done("POST", f"{V3}/abortTransaction/{it.id}")
            assert (await it.http.get(f"{V3}/id/{it.id}"))["state"] == "ABORTED"
        finally:
            await http.close()
        assert (await second.topic_manager.find_owner(TopicName.parse(FULL))).name == first.topic_manager.name


@pytest.mark.parametrize("text", ["", "1", "(1,x)"])
async def test_a_route_of_an_id_takes_two_numbers(text: str, http: Http) -> None:
    assert (await http.ask("GET", f"{V3}/id/{text}/2")).status in (400, 404)
