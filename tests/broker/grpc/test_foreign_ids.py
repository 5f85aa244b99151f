"""Frames and calls with guessed ids of others, by hand: of producers, consumers and transactions. Each is refused.

The thieves: a role with the rights of the owner, a role without any, and the owner's own role on another stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from magnetar.metadata import paths
from magnetar.metadata.records import GrantsRecord
from magnetar.metadata.store import put_record
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import encode_entry
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import (
    ConnectionLost,
    InvalidRequest,
    MagnetarError,
    NotOwner,
    ProducerBusy,
    TransactionAborted,
    TransactionEnded,
    Unauthenticated,
    Unauthorized,
    Unavailable,
    from_wire,
)
from magnetar.proto.states import TxnId
from magnetar.runtime.access import Caller, CallerAccess, ListenerAccess, Principal, PrincipalKind
from magnetar.runtime.network import Endpoint, find_rpc
from tests.broker.grpc.test_connect import Raw, T
from tests.support.cluster import Cluster, cluster

IDS = range(6)
ABSENT = (ConnectionLost, InvalidRequest, NotOwner)
"""NotOwner: of an epoch that is to come."""
COORDINATOR = 5
GRANTS = GrantsRecord(roles=dict.fromkeys(("ada", "eve"), ("produce", "consume")))


class Names:
    """A guard whose tokens are names."""

    async def authenticate(self, caller: Caller) -> Principal:
        kind, _, name = caller.authorization.partition(" ")
        if kind != "Bearer":
            raise Unauthenticated("bring a token")
        return Principal(name, PrincipalKind.CLIENT, "token", is_super=name == "root")

    def authorize(self, principal: Principal, path: str) -> None: ...

    def why_lapsed(self, principal: Principal) -> str:
        return ""


class Role(Raw):
    """A stream of a role, and its calls."""

    def __init__(self, running: Cluster, endpoint: Endpoint, role: str) -> None:
        super().__init__(running)
        self.role = role
        self.channel = running.world.network.connect(
            endpoint, CallerAccess(authorization=lambda: f"Bearer {role}")
        )
        self.stream = self.channel.stream(find_rpc("Broker", "Connect"))

    async def call(self, method: str, request: Any) -> Any:
        return await self.channel.call(find_rpc("Transactions", method), request, timeout_s=20.0)

    async def begin(self) -> TxnId:
        found = await self.call("Begin", wire.BeginRequest(coordinator=COORDINATOR))
        return TxnId(found.first.most, found.first.least)

    async def end(self, txn: TxnId, verb: str) -> MagnetarError | wire.TransactionState:
        item = wire.EndItem(txn=on_wire(txn), verb=verb)  # type: ignore[arg-type]
        reply = (await self.call("End", wire.EndRequest(items=[item]))).items[0]
        return from_wire(reply.error) if reply.HasField("error") else reply.state

    async def get_status(self, txn: TxnId) -> MagnetarError | wire.TransactionState:
        reply = (await self.call("Status", wire.StatusRequest(txns=[on_wire(txn)]))).items[0]
        return from_wire(reply.error) if reply.HasField("error") else reply.state

    def publish_in(self, id_: int, sequence_id: int, txn: TxnId, name: str = "") -> None:
        metadata = MessageMetadata(producer_name=name or f"p{id_}", sequence_id=sequence_id, publish_time=1)
        metadata.txnid_most_bits, metadata.txnid_least_bits = txn.most, txn.least
        self.send(id_, publish=encode_entry(metadata, b"x"))


def on_wire(txn: TxnId) -> wire.TransactionId:
    return wire.TransactionId(most=txn.most, least=txn.least)


@asynccontextmanager
async def roles(folder: Path, *names: str) -> AsyncIterator[list[Role]]:
    async with cluster(folder) as running:
        await put_record(running.sessions[0], paths.grants("public", "default"), GRANTS)
        broker = running.brokers[0]
        listener = await running.world.network.serve(
            Endpoint("127.0.0.1", 0), list(broker._services.items()), ListenerAccess(Names())
        )
        found: list[Any] = [Role(running, listener.endpoint, name) for name in names]
        try:
            found.append(maker := Raw(running))
            await maker.producer(1, name="maker")  # makes the topic
            yield found[:-1]
        finally:
            for each in found:
                await each.close()
            await listener.close(1.0)


def frames_at(place: wire.Position, txn: TxnId) -> list[dict[str, Any]]:
    """Each kind of frame that acts on what has an id."""
    acked = [wire.AckedEntry(ledger_id=place.ledger_id, entry_id=place.entry_id)]
    metadata = MessageMetadata(producer_name="p1", sequence_id=9, publish_time=1)
    return [
        {"publish": encode_entry(metadata, b"stolen")}, {"permits": 1000},
        {"ack": wire.Ack(entries=acked, request_id=1)}, {"ack": wire.Ack(kind=wire.Ack.CUMULATIVE, entries=acked)},
        {"ack": wire.Ack(entries=acked, request_id=1, txn=on_wire(txn))}, {"redeliver": wire.Redeliver(request_id=1)},
        {"seek": wire.Seek(request_id=1, index=0)}, {"unsubscribe": 1}, {"last_message_id": 1}, {"close": 1},
    ]  # fmt: skip


async def attack_ids(role: Role, place: wire.Position, txn: TxnId) -> None:
    """It has no producer and no consumer of its own."""
    for id_ in IDS:
        for frame in frames_at(place, txn):
            role.send(id_, **frame)
            role.send(1 << 40, close=1)  # so that the next stray frame is answered, and not counted to the last
            found = await role.next(id_)
            assert found.WhichOneof("kind") == "closed", (id_, frame, found)
            assert isinstance(from_wire(found.closed), ABSENT)


async def attack_txn(role: Role, txn: TxnId) -> None:
    told = [await role.end(txn, verb) for verb in ("PREPARE", "COMMIT")] + [await role.get_status(txn)]
    told.append(await role.end(txn, "ABORT"))
    skipped = told[-1] == wire.ABORTED and told[-2] == wire.ABORTED
    """A number that was passed over: nobody has it, and it counts as aborted."""
    kinds = (TransactionAborted,) if skipped else ABSENT
    assert all(isinstance(each, kinds) for each in told[:2]), told
    assert skipped or all(isinstance(each, kinds) for each in told), told
    refused = 0
    for method, request in (
        ("Join", wire.JoinRequest()), ("Settle", wire.SettleRequest()),
        ("AbortOpen", wire.AbortOpenRequest()),
    ):  # fmt: skip
        try:
            await role.call(method, request)
        except Unauthorized:
            refused += 1
    assert refused == 3


async def attack_in_own(role: Role, txn: TxnId, place: wire.Position, sequence_id: int) -> None:
    """By its own producer 2 and consumer 3 beside those of the owner."""
    role.publish_in(2, sequence_id, txn, "thief")
    found = await role.next(2)
    while found.WhichOneof("kind") == "credit":
        found = await role.next(2)
    assert found.WhichOneof("kind") == "failed", found
    acked = [wire.AckedEntry(ledger_id=place.ledger_id, entry_id=place.entry_id)]
    for kind in (wire.Ack.INDIVIDUAL, wire.Ack.CUMULATIVE):
        role.send(3, ack=wire.Ack(kind=kind, entries=acked, request_id=7, txn=on_wire(txn)))
        done = await role.kind(3, "done")
        assert done.HasField("error"), done
        assert isinstance(from_wire(done.error), (*ABSENT, TransactionAborted, TransactionEnded, Unavailable)), done


async def scene(folder: Path) -> None:
    async with roles(folder, "ada", "ada", "eve", "mallory") as (owner, twin, thief, nobody):
        await owner.producer(1)
        await owner.consumer(2, type=wire.Subscribe.SHARED)
        owner.publish(1, 0, b"one")
        delivered = await owner.deliveries(2, 1)
        place = wire.Position(ledger_id=delivered[0][0], entry_id=delivered[0][1])
        txn = await owner.begin()
        owner.publish_in(1, 1, txn)
        for role in (twin, thief, nobody):
            await attack_ids(role, place, txn)
        thief.send(1, open_producer=wire.OpenProducer(topic=T, producer_name="p1"))
        assert isinstance(await thief.error(1), ProducerBusy), "it is of another role"
        await thief.producer(2, name="thief")
        await thief.consumer(3, permits=0, type=wire.Subscribe.SHARED)
        guesses = [TxnId(COORDINATOR, txn.least + by) for by in (0, 1, -1, 1 << 40)]
        guesses += [TxnId(each, txn.least) for each in (COORDINATOR - 1, COORDINATOR + 1)]
        for number, guess in enumerate(guesses):
            for role in (thief, nobody):
                await attack_txn(role, guess)
            await attack_in_own(thief, guess, place, number)

        acked = [wire.AckedEntry(ledger_id=place.ledger_id, entry_id=place.entry_id)]
        owner.send(2, ack=wire.Ack(entries=acked, request_id=3, txn=on_wire(txn)))
        done = await owner.kind(2, "done")
        assert not done.HasField("error"), done
        owner.publish_in(1, 2, txn)
        assert await owner.end(txn, "COMMIT") == wire.COMMITTED
        owner.publish(1, 3, b"last")
        seen = await owner.deliveries(2, 3)
        assert [payload for *_, payload in seen] == [b"x", b"x", b"last"]
        assert [entry for _, entry, _ in seen] == [place.entry_id + each for each in (1, 2, 3)], "nothing else"
        assert not any(frame.WhichOneof("kind") == "closed" for frames in owner.came.values() for frame in frames)


async def test_no_guessed_id_of_another_stream_or_role_does_anything(tmp_path: Path) -> None:
    async with asyncio.timeout(120):
        await scene(tmp_path)
