"""What --metadata may say."""

import sys

import pytest

from magnetar.metadata.remote import connect_metadata_at
from magnetar.metadata.session import DEFAULT_JUTE_MAXBUFFER, EtcdAddress, ZookeeperAddress, parse_address
from magnetar.proto.errors import InvalidConfiguration
from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import make_system_world


@pytest.mark.parametrize(
    ("text", "hosts", "root", "limit"),
    [
        ("zk://zk1:2181,zk2:2182/prod/magnetar", "zk1:2181,zk2:2182", "/prod/magnetar", DEFAULT_JUTE_MAXBUFFER),
        ("zk://zk1", "zk1:2181", "/magnetar", DEFAULT_JUTE_MAXBUFFER),
        ("zk://zk1/", "zk1:2181", "/magnetar", DEFAULT_JUTE_MAXBUFFER),
        ("zk://[::1]:2181,[::2]/m?jute_maxbuffer=9000000", "[::1]:2181,[::2]:2181", "/m", 9_000_000),
    ],
)
def test_an_address_of_a_zookeeper(text: str, hosts: str, root: str, limit: int) -> None:
    address = parse_address(text)
    assert isinstance(address, ZookeeperAddress)
    assert (address.hosts, address.root, address.jute_maxbuffer) == (hosts, root, limit)
    assert str(address) == f"zk://{hosts}{root}"


def test_an_address_of_an_etcd() -> None:
    address = parse_address("etcd://e1:2379,[::1]/m/n?max_txn_ops=1024&max_request_bytes=9000000")
    assert address == EtcdAddress((Endpoint("e1", 2379), Endpoint("::1", 2379)), "/m/n", 1024, 9_000_000)
    assert str(address) == "etcd://e1:2379,[::1]:2379/m/n"
    assert parse_address("etcd://e1") == EtcdAddress((Endpoint("e1", 2379),), "/magnetar")


def test_an_address_of_our_own_service() -> None:
    assert parse_address("metadata:7640") == Endpoint("metadata", 7640)


@pytest.mark.parametrize(
    "text",
    ["zk://", "zk:///magnetar", "zk://a,,b/m", "zk://a:x/m", "zk://a/m/", "zk://a//m", "zk://a/zookeeper",
     "zk://a/m?jute_maxbuffer=1", "zk://a/m?limit=1000000", "http://a", "a",
     "etcd://", "etcd://a,,b", "etcd://a/m/", "etcd://a/m?max_txn_ops=1", "etcd://a/m?jute_maxbuffer=9000000"],
)  # fmt: skip
def test_what_is_no_address_says_so(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_address(text)


async def test_without_kazoo_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*sys.modules]:
        if name.startswith(("kazoo", "magnetar.metadata.zookeeper")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kazoo", None)
    with pytest.raises(InvalidConfiguration, match=r"pip install 'magnetar\[zookeeper\]'"):
        await connect_metadata_at(make_system_world(1), parse_address("zk://127.0.0.1:1/m"), 0.1)
