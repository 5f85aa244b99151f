"""The tree in a ZooKeeper over TLS, with credentials: a real server."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from magnetar.cli.run.servers import parse_metadata_address
from magnetar.metadata.remote import connect_metadata_at
from magnetar.metadata.session import MetadataAccess, SessionState, ZookeeperAddress, parse_address
from magnetar.metadata.store import NODE_ABSENT, NodeChanged, PutNode, WatchReset
from magnetar.proto.errors import (
    InvalidConfiguration,
    Unauthorized,
    Unavailable,
    UntrustedServer,
    WrongProtocol,
)
from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import make_system_world
from tests.support.certificates import Authority
from tests.support.steps import stopwatch
from tests.support.zookeeper import ZookeeperServer, why_no_zookeeper

if why_no_zookeeper():
    pytest.skip(str(why_no_zookeeper()), allow_module_level=True)

from magnetar.metadata.zookeeper import ZookeeperStore

OURS = "magnetar:tr33"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[ZookeeperServer]:
    files = authority.issue("zookeeper", hosts=("127.0.0.1",))
    with ZookeeperServer(tmp_path_factory.mktemp("zookeeper"), files) as server:
        yield server


def _address(server: ZookeeperServer, ca: str, credentials: str = OURS, root: str = "/magnetar") -> ZookeeperAddress:
    found = parse_address(server.url)
    assert isinstance(found, ZookeeperAddress)
    own = (lambda: credentials) if credentials else None
    return found._replace(root=root, access=MetadataAccess(ca, credentials=own))


@asynccontextmanager
async def _open(address: ZookeeperAddress, timeout_s: float = 10.0) -> AsyncIterator[ZookeeperStore]:
    store = await connect_metadata_at(make_system_world(1), address, timeout_s)
    assert isinstance(store, ZookeeperStore)
    try:
        yield store
    finally:
        await store.close()


async def _tree(store: ZookeeperStore, znode: str) -> dict[str, Any]:
    """Each node from there on, with its access list."""
    found = {znode: (await store._line.read_acl(znode)).value[0]}
    for name in (await store._line.children(znode)).value[0]:
        found.update(await _tree(store, f"{znode}/{name}"))
    return found


async def test_every_node_is_open_to_its_maker_alone_and_watches_survive_a_reconnect(
    server: ZookeeperServer, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    address = _address(server, authority.ca)
    logging.getLogger("magnetar.kazoo").setLevel(logging.DEBUG)
    async with _open(address) as store, _open(address) as other:
        told: asyncio.Queue[object] = asyncio.Queue()

        async def follow() -> None:
            async for event in other.watch("/topics", await other.revision()):
                await told.put(event)

        following = asyncio.create_task(follow())
        await store.commit(
            [PutNode("/topics/a/b", b"1", NODE_ABSENT), PutNode("/owners/x", b"2", NODE_ABSENT, ephemeral=True)]
        )
        before = other._watches._connection
        other._line.reconnect()
        async with asyncio.timeout(20):
            while other._watches._connection == before or other.state is not SessionState.CONNECTED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await store.commit([PutNode("/topics/a/c", b"3", NODE_ABSENT)])
        async with asyncio.timeout(20):
            while True:
                event = await told.get()
                if isinstance(event, WatchReset) or (isinstance(event, NodeChanged) and event.path == "/topics/a/c"):
                    break
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        tree = await _tree(store, "/magnetar")
        assert len(tree) > 6
        for znode, access in tree.items():
            assert [each.id.scheme for each in access] == ["digest"], znode
            assert access[0].id.id.startswith("magnetar:"), znode
    logging.getLogger("magnetar.kazoo").setLevel(logging.ERROR)
    assert "Auth(" in caplog.text
    assert "tr33" not in caplog.text


@pytest.mark.parametrize("credentials", ["", "magnetar:wrong", "other:tr33"])
async def test_who_is_not_the_maker_can_neither_read_nor_write(
    server: ZookeeperServer, authority: Authority, credentials: str
) -> None:
    root = f"/kept/{credentials.replace(':', '-') or 'none'}"
    async with _open(_address(server, authority.ca, root=root)) as store:
        await store.commit([PutNode("/a", b"1", NODE_ABSENT)])
    with pytest.raises(Unauthorized) as refused:
        async with _open(_address(server, authority.ca, credentials, root=root)) as store:
            await store.get("/a")
    assert "tr33" not in str(refused.value)
    with pytest.raises(Unauthorized):
        async with _open(_address(server, authority.ca, credentials, root=root)) as store:
            await store.commit([PutNode("/b", b"1", NODE_ABSENT)])


async def test_another_authority_another_host_and_a_server_in_clear_are_said_at_once(
    server: ZookeeperServer, authority: Authority, tmp_path: Path
) -> None:
    other = Authority.make(tmp_path / "other")
    by_name = _address(server, authority.ca)._replace(servers=(Endpoint("localhost", server.port),))
    clear = await asyncio.start_server(lambda reader, writer: writer.write(b"no TLS"), "127.0.0.1", 0)
    port = clear.sockets[0].getsockname()[1]
    in_the_clear = _address(server, authority.ca)._replace(servers=(Endpoint("127.0.0.1", port),))
    with stopwatch() as seconds:
        with pytest.raises(UntrustedServer, match="certificate of ZooKeeper"):
            await connect_metadata_at(make_system_world(1), _address(server, other.ca))
        with pytest.raises(UntrustedServer, match="localhost"):
            await connect_metadata_at(make_system_world(1), by_name)
        with pytest.raises(WrongProtocol, match="does not speak TLS"):
            await connect_metadata_at(make_system_world(1), in_the_clear)
        clear.close()
        with pytest.raises(InvalidConfiguration, match="TLS files"):
            await connect_metadata_at(make_system_world(1), _address(server, str(tmp_path / "none.pem")))
    assert seconds() < 5
    in_clear = parse_address(server.url)
    with pytest.raises(Unavailable):
        await connect_metadata_at(make_system_world(1), in_clear, 1.0)


async def test_a_tree_that_was_made_in_the_open_is_said_with_what_to_type(
    server: ZookeeperServer, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    async with _open(_address(server, authority.ca, "", root="/open")) as store:
        await store.commit([PutNode("/a", b"1", NODE_ABSENT)])
    async with _open(_address(server, authority.ca, root="/open")) as store:
        assert await store.get("/a") is not None
    assert "setAcl -R /open auth::cdrwa" in caplog.text
    assert "tr33" not in caplog.text


def test_the_settings_say_what_zookeeper_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tmp_path / "security.toml"
    monkeypatch.setenv("ZK", OURS)
    members = '[members]\nfolder = "m"\nca = "ca.pem"\ncluster = "c"\n'
    settings.write_text(f'{members}[zookeeper]\nca = "zk.pem"\ncredentials = "env:ZK"\n')
    found = parse_metadata_address("zk://a:1/t", str(settings))
    assert isinstance(found, ZookeeperAddress)
    assert found.access.ca == str(tmp_path / "zk.pem")
    assert found.access.credentials is not None
    assert found.access.credentials() == OURS
    assert OURS not in repr(found)
    assert parse_metadata_address("127.0.0.1:7640", str(settings)) == Endpoint("127.0.0.1", 7640)
    for wrong, why in (
        ("[zookeeper]\n", "needs ca"), ('[zookeeper]\ncertificate = "x"\nca = "y"\n', "give both"),
        ('[zookeeper]\ncredentials = "env:ZK"\n', "needs ca"),
        ('[zookeeper]\nca = "y"\ncredentials = "data:;base64,YTpi"\n', "a file or env:NAME"),
    ):  # fmt: skip
        settings.write_text(members + wrong)
        with pytest.raises(InvalidConfiguration, match=why):
            parse_metadata_address("zk://a:1/t", str(settings))
    monkeypatch.setenv("ZK", "nopassword")
    settings.write_text(f'{members}[zookeeper]\nca = "y"\ncredentials = "env:ZK"\n')
    with pytest.raises(InvalidConfiguration, match="has no user:password") as refused:
        parse_metadata_address("zk://a:1/t", str(settings))
    assert "nopassword" not in str(refused.value)
