"""The service of a restore: members show their keys, everything else is as without a service, strangers stay out."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from magnetar.cli.storage.metadata_copies import serve_metadata_copy
from magnetar.metadata import paths, records
from magnetar.metadata.remote import (
    BACKUP_RPC,
    CHILDREN_RPC,
    COMMIT_RPC,
    GET_RPC,
    SESSION_RPC,
    connect_metadata,
    make_commit_request,
)
from magnetar.metadata.server import MetadataServer
from magnetar.metadata.store import ANY_VERSION, NODE_ABSENT, CheckNodeVersion, CommitOperation, DeleteNode, PutNode
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import MagnetarError, Unauthenticated, Unauthorized, Unavailable
from magnetar.runtime.access import OPEN_ACCESS, CallerAccess, TlsFiles
from magnetar.runtime.network import Channel, Endpoint, World
from magnetar.runtime.peer.sockets import MemberNetwork
from magnetar.runtime.process import make_system_world
from magnetar.security.authority import create_authority_files
from tests.security.test_members import world_of

ANYWHERE = Endpoint("127.0.0.1", 0)
KEY = "ab" * 32
OWN = paths.member("operator", KEY)
RECORD = records.encode_record(records.MemberRecord(role="operator", name="a", key=KEY), OWN)
ELSEWHERE = ("/", "/incarnations", "/ledgers", "/ledgers/1", "/bookies", "/membersx", "/brokers/a", "/cluster/x")


@asynccontextmanager
async def served(folder: Path, world: World | None = None) -> AsyncIterator[MetadataServer]:
    """Of a copy that has a ledger's record and a cluster's."""
    world = world or make_system_world(1)
    live = await MetadataServer.start(world, ANYWHERE, str(folder / "metadata.sqlite"))
    session = live.store.new_session(10.0)
    for path in (paths.CLUSTER, "/ledgers/1"):
        await session.put(path, b"x", NODE_ABSENT)
    await session.put("/brokers/a", b"x", NODE_ABSENT, ephemeral=True)
    copy, _, _ = await live.store.back_up("copy")
    await live.close()
    before = content(copy)
    async with serve_metadata_copy(world, ANYWHERE, copy, str(folder / "scratch")) as server:
        yield server
    assert content(copy) == before
    assert not any(name.startswith("scratch") for name in os.listdir(folder))


def content(path: str) -> bytes:
    return Path(path).read_bytes()


async def refused(channel: Channel, rpc: object, request: object) -> MagnetarError:
    with pytest.raises(MagnetarError) as error:
        await channel.call(rpc, request, timeout_s=10)  # type: ignore[arg-type]
    return error.value


async def test_members_are_shown_read_and_watched_and_the_revision_is_there(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        one, two = [await connect_metadata(make_system_world(1), server.endpoint, 10.0) for _ in range(2)]
        changes = two.watch(paths.MEMBERS, await two.revision())
        await one.commit([DeleteNode(OWN, ANY_VERSION), PutNode(OWN, RECORD, NODE_ABSENT, ephemeral=True)])
        assert (await anext(changes)).path == OWN  # type: ignore[union-attr]
        assert await two.children(paths.member("operator", "")[:-1]) == [KEY]
        await one.close()
        assert (await anext(changes)).path == OWN, "it ends with its session"  # type: ignore[union-attr]
        assert await two.get(OWN) is None
        await two.close()


async def test_every_other_request_is_answered_as_without_a_service(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        channel = make_system_world(1).network.connect(server.endpoint)
        store = await connect_metadata(make_system_world(1), server.endpoint, 10.0)
        revision = await store.revision()
        for path in ELSEWHERE:
            for rpc in (GET_RPC, CHILDREN_RPC):
                assert isinstance(await refused(channel, rpc, wire.GetRequest(path=path)), Unavailable), (rpc, path)
        mine = PutNode(OWN, RECORD, NODE_ABSENT, ephemeral=True)
        others: list[list[CommitOperation]] = [
            [PutNode("/ledgers/2", b"x", NODE_ABSENT)], [DeleteNode("/ledgers/1", ANY_VERSION)],
            [CheckNodeVersion("/ledgers/1", 0)],
            [mine, DeleteNode("/ledgers/1", ANY_VERSION)], [PutNode(paths.LEDGER_IDS, b"x", ANY_VERSION)],
            [PutNode(paths.CLUSTER, b"x", ANY_VERSION)],
        ]  # fmt: skip
        for operations in others:
            request = make_commit_request(operations, store.session_id)
            assert isinstance(await refused(channel, COMMIT_RPC, request), Unavailable), operations
        assert isinstance(await refused(channel, BACKUP_RPC, wire.BackupRequest(name="b")), Unavailable)
        assert await store.revision() == revision, "nothing was written"
        await store.close()
        await channel.close()


async def test_a_session_of_the_stopped_service_is_neither_continued_nor_ended(tmp_path: Path) -> None:
    async with served(tmp_path) as server:
        channel = make_system_world(1).network.connect(server.endpoint)
        stream = channel.stream(SESSION_RPC)
        stream.send_nowait(wire.SessionRequest(open=wire.OpenSession(session="of-before", timeout_s=5.0)))
        with pytest.raises(Unavailable):
            await stream.receive()
        await channel.close()


def with_tls(files: TlsFiles) -> World:
    world = make_system_world(1)
    return replace(world, network=MemberNetwork(world.network, OPEN_ACCESS, CallerAccess(files)))


async def test_strangers_and_other_roles_get_no_key_in(tmp_path: Path) -> None:
    ours, theirs, data = tmp_path / "ours", tmp_path / "theirs", tmp_path / "data"
    for folder, name in ((ours, "one"), (theirs, "two")):
        create_authority_files(folder, ["127.0.0.1"], datetime.now(UTC), name)
    data.mkdir()
    put = [PutNode(OWN, RECORD, NODE_ABSENT, ephemeral=True)]
    async with served(data, world_of(ours, "metadata")) as server:
        trust = str(ours / "ca.pem")
        own = TlsFiles(str(theirs / "members/operator.pem"), str(theirs / "members/operator-key.pem"), trust)
        for stranger in (
            make_system_world(1),
            world_of(theirs, "operator"),
            with_tls(own),
            with_tls(TlsFiles(ca=trust)),
        ):
            with pytest.raises(MagnetarError):
                await connect_metadata(stranger, server.endpoint, 1.0)
        listener = TlsFiles(str(ours / "broker.pem"), str(ours / "broker-key.pem"), trust)
        with pytest.raises(Unauthenticated):
            await connect_metadata(with_tls(listener), server.endpoint, 30.0)
        for role in ("bookie", "broker"):
            store = await connect_metadata(world_of(ours, role), server.endpoint, 10.0)
            with pytest.raises(Unauthorized):
                await store.commit(put)
            await store.close()
        operator = await connect_metadata(world_of(ours, "operator"), server.endpoint, 10.0)
        with pytest.raises(Unauthorized):
            await operator.commit([PutNode(OWN, RECORD, NODE_ABSENT)])  # it would outlive its session
        await operator.commit(put)
        await operator.close()
