"""Half messages over gRPC: who may prepare one, what is refused before anything is stored, and streams that ask."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from magnetar.broker.grpc.transactions import HalfMessageAdminService, HalfMessageService, TransactionService
from magnetar.broker.server import Broker
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import InvalidRequest, MagnetarError, NotAllowed, NotFound, NotOwner, Unauthorized
from magnetar.proto.states import TxnId, coordinator_of
from magnetar.runtime.access import Principal, PrincipalKind
from magnetar.runtime.network import CallContext, find_rpc
from tests.support.cluster import SMALL, Cluster, client_part, cluster

TOPIC = "persistent://public/default/t"
LOCAL = CallContext("127.0.0.1:1")
STRANGER = CallContext("127.0.0.1:1", Principal("stranger", PrincipalKind.CLIENT))
NUMBER = coordinator_of("g", SMALL.transaction_coordinators)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with cluster(tmp_path) as found:
        yield found


@pytest.fixture
def broker(running: Cluster) -> Broker:
    return running.brokers[0]


async def begun(service: TransactionService, caller: CallContext = LOCAL) -> wire.TransactionId:
    reply = await service.begin(wire.BeginRequest(coordinator=NUMBER, count=1), caller)
    return wire.TransactionId(most=reply.first.most, least=reply.first.least)


def request(half: wire.TransactionId, topic: str = TOPIC, entry: bytes = b"", group: str = "g") -> wire.HalfRequest:
    return wire.HalfRequest(
        half=half, group=group, messages=[wire.HalfMessage(topic=topic, entry=entry or client_part("p", 0, b"x"))]
    )


async def test_a_half_is_prepared_by_a_role_that_may_publish_all_of_it(broker: Broker) -> None:
    transactions, service = TransactionService(broker.topic_manager), HalfMessageService(broker.topic_manager)
    with pytest.raises(Unauthorized, match="produce"):
        await service.prepare_half(request(await begun(transactions, STRANGER)), STRANGER)
    half = await begun(transactions)
    reply = await service.prepare_half(request(half), LOCAL)
    assert reply.state == wire.PREPARED
    for verb in wire.EndHalfRequest.Verb.values():
        with pytest.raises(InvalidRequest, match="never given"):
            await service.end_half(wire.EndHalfRequest(half=half, verb=verb), STRANGER)


@pytest.mark.parametrize(
    ("topic", "entry", "group", "error"),
    [
        (TOPIC, b"no entry", "g", InvalidRequest),
        (TOPIC, client_part("p", 0, b"x", b"y"), "g", InvalidRequest),
        (TOPIC, b"", "another group", InvalidRequest),
        ("non-persistent://public/default/t", b"", "g", NotAllowed),
        ("a/b/c/d/e", b"", "g", MagnetarError),
        ("", b"", "g", MagnetarError),
    ],
    ids=["no entry", "batch", "group of another coordinator", "non-persistent", "no topic", "empty"],
)
async def test_what_a_half_cannot_be_is_refused_and_nothing_is_stored(
    broker: Broker, topic: str, entry: bytes, group: str, error: type[MagnetarError]
) -> None:
    transactions, service = TransactionService(broker.topic_manager), HalfMessageService(broker.topic_manager)
    assert coordinator_of("another group", SMALL.transaction_coordinators) != NUMBER
    with pytest.raises(error):
        await service.prepare_half(request(await begun(transactions), topic, entry, group), LOCAL)
    found = await HalfMessageAdminService(broker.topic_manager).list_halves(
        wire.ListHalvesRequest(coordinator=NUMBER), LOCAL
    )
    assert not found.items


async def test_verbs_and_ids_that_are_none_are_refused(broker: Broker) -> None:
    transactions, service = TransactionService(broker.topic_manager), HalfMessageService(broker.topic_manager)
    admin = HalfMessageAdminService(broker.topic_manager)
    half = await begun(transactions)
    await service.prepare_half(request(half), LOCAL)
    with pytest.raises(InvalidRequest, match="no way to end"):
        await service.end_half(wire.EndHalfRequest(half=half, verb=9), LOCAL)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="no change"):
        await admin.change_half(wire.ChangeHalfRequest(half=half, verb=9), LOCAL)  # type: ignore[arg-type]
    for wrong in (wire.TransactionId(most=5000), wire.TransactionId(most=NUMBER, least=(1 << 63) + 1)):
        with pytest.raises(MagnetarError):
            await service.end_half(wire.EndHalfRequest(half=wrong), LOCAL)
    later = wire.TransactionId(most=NUMBER, least=TxnId.from_parts(NUMBER, 77, 0).least)
    with pytest.raises(NotOwner):
        await service.end_half(wire.EndHalfRequest(half=later), LOCAL)
    with pytest.raises(NotFound):
        await admin.list_halves(wire.ListHalvesRequest(coordinator=900), LOCAL)
    untouched = wire.ListHalvesRequest(coordinator=(NUMBER + 1) % SMALL.transaction_coordinators)
    assert not (await admin.list_halves(untouched, LOCAL)).items
    assert len(broker.topic_manager.transactions.loaded_coordinators) == 1, (
        "and no coordinator is loaded for the question"
    )


async def test_a_watch_names_its_group_and_ends_with_its_coordinator(running: Cluster, broker: Broker) -> None:
    channel = running.world.network.connect(broker.endpoint)
    for item, error in ((wire.WatchHalvesItem(), InvalidRequest), (wire.WatchHalvesItem(group="g"), NotOwner)):
        stream = channel.stream(find_rpc("Transactions", "WatchHalves"))
        stream.send_nowait(item)
        if item.group:
            coordinator = await broker.topic_manager.transactions.load_owned_coordinator(NUMBER)
            while not coordinator.core.halves._groups:  # noqa: ASYNC110 - the core has no event for it
                await asyncio.sleep(0.01)
            await coordinator.close()
        with pytest.raises(error):
            await stream.receive()
        stream.cancel()
    await channel.close()
