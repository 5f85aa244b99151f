"""A fresh cluster of brokers of one group: topics are spread over them, whatever protocol asks for their owners."""

import asyncio
import json
import urllib.request
from collections import Counter
from pathlib import Path

import magnetar.asyncio as magnetar
from magnetar.metadata.records import NamespaceRecord
from magnetar.proto.names import NamespaceName
from magnetar.runtime.network import Endpoint
from tests.support.cluster import cluster

PORT = Endpoint("127.0.0.1", 0)


async def test_forty_topics_of_a_fresh_cluster_are_spread_and_a_new_broker_gets_some(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        for number in range(2):
            await running.add_broker(name=f"b{number}", share_group="all")
        client = magnetar.Client(f"magnetar://{running.brokers[0].endpoint}")
        try:
            for number in range(40):
                producer = await client.create_producer(f"persistent://public/default/t{number}")
                await producer.send(b"x")
            counts = [len(broker.topics) for broker in running.brokers]
            assert sum(counts) == 40
            assert min(counts) >= 8, counts
            for broker in running.brokers:
                await broker.topic_manager.report_load(0)
            await running.add_broker(name="new", share_group="all")
            await running.brokers[0].topic_manager.catalog.create_namespace(
                NamespaceName.parse("public/other"), NamespaceRecord(bundles=32)
            )
            for number in range(40):
                await client.create_producer(f"persistent://public/other/t{number}")
            other = Counter[str]()
            for broker in running.brokers:
                other[broker.name] = sum("other" in name for name in broker.topics)
            assert sum(other.values()) == 40
            assert other["new"] >= 10, other
        finally:
            await client.close()


def _read(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        found: bytes = answer.read()
        return found


async def test_a_look_up_over_http_and_one_over_grpc_name_the_same_broker(tmp_path: Path) -> None:
    async with cluster(tmp_path, brokers=0) as running:
        for number in range(3):
            await running.add_broker(name=f"b{number}", share_group="all", http_listen=PORT, pulsar_listen=PORT)
        named = Counter[str]()
        for number in range(12):
            topic = f"public/default/t{number}"
            found = []
            for broker in running.brokers:
                url = f"{broker.http_url}/lookup/v2/topic/persistent/{topic}"
                found.append(json.loads(await asyncio.to_thread(_read, url))["brokerUrl"])
            assert len(set(found)) == 1, found
            named[found[0]] += 1
        assert len(named) == 3, named
