"""The address of the metadata: HOST:PORT of `magnetar metadata`, or `zk://HOST:PORT,HOST:PORT/ROOT` of a ZooKeeper.

    address = parse("zk://zk1:2181,zk2:2181/magnetar")       ValueError says what is wrong with it
    store = await connect(world, address, timeout_s)          metadata/remote.py: a store with an open session

`?jute_maxbuffer=BYTES` is the limit that the ZooKeeper servers were started with (ZooKeeper's default is 1 MiB - 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from urllib.parse import parse_qsl

from ..proto.names import parse_number
from ..runtime.network import Endpoint
from .tree_core import check_path

SCHEME = "zk://"
PORT = 2181
ROOT = "/magnetar"
JUTE_MAXBUFFER = (1 << 20) - 1
"""The largest request to ZooKeeper, in bytes, by ZooKeeper's default. A server closes the connection of a client that
sends a larger one."""


class ZookeeperAccess(NamedTuple):
    """The TLS files and the credentials with which a process connects to ZooKeeper. If ZooKeeper can authenticate the
    process, only this identity may access the nodes that the process creates."""

    ca: str = ""  # PEM file of the authority of ZooKeeper's certificates; empty: in clear
    certificate: str = ""  # PEM files of the client certificate, where ZooKeeper asks for one
    key: str = ""
    credentials: Callable[[], str] | None = None  # "user:password" of the scheme `digest`, read at each session

    @property
    def is_authenticated(self) -> bool:
        """Returns whether the process shows an identity to ZooKeeper: credentials or a client certificate."""
        return self.credentials is not None or bool(self.certificate)


class ZookeeperAddress(NamedTuple):
    """The servers of a ZooKeeper ensemble, and the path of the znode below which the metadata tree is stored."""

    servers: tuple[Endpoint, ...]
    root: str = ROOT
    jute_maxbuffer: int = JUTE_MAXBUFFER
    access: ZookeeperAccess = ZookeeperAccess()

    @property
    def hosts(self) -> str:
        return ",".join(map(str, self.servers))

    def __str__(self) -> str:
        return f"{SCHEME}{self.hosts}{self.root}"


Address = Endpoint | ZookeeperAddress


def parse(text: str) -> Address:
    """Parses a metadata address, as operators write it, and returns it. Raises ValueError; its text describes the
    mistake."""
    if not text.startswith(SCHEME):
        return Endpoint.parse(text)
    where, _, query = text[len(SCHEME) :].partition("?")
    hosts, slash, root = where.partition("/")
    servers = tuple(_server(each) for each in hosts.split(","))
    return ZookeeperAddress(servers, _root(f"/{root}" if slash and root else ROOT), _limit(query))


def _server(text: str) -> Endpoint:
    host, colon, port = text.rpartition(":")
    if not colon or (text.startswith("[") and text.endswith("]")):
        host, port = text, str(PORT)
    if not host:
        raise ValueError(f"{text!r} is not HOST or HOST:PORT of a ZooKeeper server")
    return Endpoint.parse(f"{host}:{port}")


def _root(root: str) -> str:
    try:
        check_path(root)
    except Exception as error:
        raise ValueError(f"{root!r} is not a path for ZooKeeper") from error
    if root == "/zookeeper" or root.startswith("/zookeeper/"):
        raise ValueError("/zookeeper is ZooKeeper's own: take another path")
    return root


def _limit(query: str) -> int:
    limit = JUTE_MAXBUFFER
    for name, number in parse_qsl(query, keep_blank_values=True):
        if name != "jute_maxbuffer" or (parse_number(number) or 0) < 1 << 16:
            raise ValueError(f"{name}={number} is not jute_maxbuffer=BYTES")
        limit = int(number)
    return limit
