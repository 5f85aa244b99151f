"""Records of settings, grants and transactions are damaged, one by one and together: what is told, and what is refused.

A damaged record may be any that there was, also of another path: nothing is decided as if it were not there.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from magnetar.metadata import paths
from magnetar.metadata.store import ANY_VERSION
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import DataLost, MagnetarError, from_wire
from magnetar.proto.states import TxnId
from magnetar.runtime.network import find_rpc
from tests.support.cluster import Cluster, TestProducer

TOPIC = "persistent://public/default/t"
OTHER = "persistent://public/default/other"
NUMBER = 0
GIVEN = '{"message_ttl_s": 90000}'
NAMESPACE, OF_TOPIC = paths.namespace_policies("public", "default"), paths.topic_policies("public", "default", "t")
COORDINATOR = paths.coordinator(NUMBER)


async def _call(running: Cluster, service: str, method: str, request: Any) -> Any:
    channel = running.world.network.connect(running.brokers[-1].endpoint)
    try:
        return await channel.call(find_rpc(service, method), request, timeout_s=20)
    finally:
        await channel.close()


async def _made(running: Cluster) -> TxnId:
    """A topic with policies of its own, of its namespace and of all brokers, and a prepared transaction."""
    producer = await TestProducer(running.world, running.brokers[0], TOPIC).opened()
    await producer.send(b"x")
    await producer.close()
    for where in ({"topic": TOPIC}, {"namespace": "public/default"}, {}):
        await _call(running, "Admin", "ChangePolicies", wire.ChangePoliciesRequest(set=GIVEN, **where))
    begun = await _call(running, "Transactions", "Begin", wire.BeginRequest(coordinator=NUMBER))
    txn = TxnId(begun.first.most, begun.first.least)
    assert await _ended(running, txn, wire.EndItem.PREPARE) == wire.PREPARED
    return txn


@asynccontextmanager
async def records_damaged(running: Cluster, *damaged: str) -> AsyncIterator[dict[str, bytes]]:
    """A bit of each differs, until they are restored; what they contain meanwhile."""
    session, whole = running.store.new_session(), dict[str, bytes]()
    for path in damaged:
        found = await session.get(path)
        assert found is not None
        whole[path] = found.value
    bad = {each: value[:-3] + bytes([value[-3] ^ 1]) + value[-2:] for each, value in whole.items()}
    for path, value in bad.items():
        await session.put(path, value, ANY_VERSION)
    yield bad
    for path, value in whole.items():
        await session.put(path, value, ANY_VERSION)
    await session.close()


async def _restarted(running: Cluster) -> None:
    await running.brokers[-1].close()
    await running.add_broker()


async def _publish(running: Cluster, topic: str = TOPIC) -> None:
    producer = await TestProducer(running.world, running.brokers[-1], topic).opened()
    await producer.send(b"y")
    await producer.close()


async def _changes(running: Cluster, **where: str) -> None:
    await _call(running, "Admin", "GetPolicies", wire.PoliciesRequest(**where))
    await _call(running, "Admin", "ChangePolicies", wire.ChangePoliciesRequest(set=GIVEN, **where))


async def _ended(
    running: Cluster, txn: TxnId, verb: wire.EndItem.Verb = wire.EndItem.COMMIT
) -> wire.TransactionState | MagnetarError:
    item = wire.EndItem(txn=wire.TransactionId(most=txn.most, least=txn.least), verb=verb)
    reply = (await _call(running, "Transactions", "End", wire.EndRequest(items=[item]))).items[0]
    return from_wire(reply.error) if reply.HasField("error") else reply.state


@pytest.mark.parametrize(
    "damaged", [[NAMESPACE], [OF_TOPIC], [COORDINATOR], [NAMESPACE, OF_TOPIC, COORDINATOR]],
    ids=["namespace", "topic", "coordinator", "all"],
)  # fmt: skip
async def test_who_asks_for_what_a_damaged_record_decides_is_told_and_all_goes_on_when_it_was_restored(
    damaged: list[str], running: Cluster
) -> None:
    txn = await _made(running)
    async with records_damaged(running, *damaged) as bad:
        await _restarted(running)
        for topic, where in ((TOPIC, OF_TOPIC), (OTHER, NAMESPACE)):
            if {NAMESPACE, OF_TOPIC} & set(damaged):
                with pytest.raises(DataLost, match="restore the metadata"):
                    await _publish(running, topic)
            else:
                await _publish(running, topic)
            place = {"topic": TOPIC} if where == OF_TOPIC else {"namespace": "public/default"}
            if where in damaged:
                with pytest.raises(DataLost, match=where):
                    await _changes(running, **place)
            else:
                await _changes(running, **place)
        if COORDINATOR in damaged:
            assert isinstance(await _ended(running, txn), DataLost), "neither committed nor aborted"
            with pytest.raises(DataLost, match="coordinator"):
                await _call(running, "Transactions", "Begin", wire.BeginRequest(coordinator=NUMBER))
        for path, value in bad.items():
            found = await running.sessions[0].get(path)
            assert found is not None
            assert found.value == value, "nothing is written over it"
    await _restarted(running)
    await _publish(running)
    await _changes(running, topic=TOPIC)
    assert await _ended(running, txn) == wire.COMMITTED


async def test_a_broker_does_not_start_on_damaged_settings_of_all_and_says_what_to_do(running: Cluster) -> None:
    """It would keep and trim by others; those that run go on by what they know."""
    await _made(running)
    async with records_damaged(running, paths.BROKER_POLICIES):
        with pytest.raises(DataLost) as told:
            await running.add_broker()
        assert "restore the metadata" in told.value.message
        await _publish(running)
    await running.add_broker()
