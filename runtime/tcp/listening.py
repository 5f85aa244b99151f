"""A listening socket of the event loop: at an address, which is not looked up, or at a name.

    server = await listen(endpoint, make_protocol, tls, limits)        port 0: a free one

A loop looks an address up like a name, for which it starts four threads and loads tables of names; an address is bound
here. With TLS a connection is accepted here, too: so its handshake has a place (`Strangers`) and a descriptor from the
first byte on, and HANDSHAKE_S. `make_protocol` is asked when the handshake is done.
Guards: tests/runtime/tcp/test_listen.py, tests/runtime/tcp/test_strangers.py, tests/cli/test_start.py.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from ...proto.errors import Busy
from ..access import Limits
from ..memory.descriptors import PROCESS
from ..network import Endpoint
from ..tasks import Tasks
from .strangers import Strangers
from .tls import HANDSHAKE_S, SHUTDOWN_S

BACKLOG = 1024
"""Connections that wait to be accepted: all clients of a broker come back at once."""
ACCEPTS_A_TURN = 64
ACCEPT_AGAIN_S = 1.0
"""Seconds to the next accept after the system had no descriptor for a connection."""

_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_LOG = logging.getLogger("magnetar.bytes")

MakeProtocol = Callable[[], asyncio.BaseProtocol]


class Listening:
    """The listening sockets that `listen` returns."""

    def __init__(self, server: asyncio.Server | TlsDoor) -> None:
        self._server = server

    @property
    def port(self) -> int:
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def handshakes(self) -> Strangers | None:
        """Returns the handshakes of TLS that are under way."""
        return self._server.handshakes if isinstance(self._server, TlsDoor) else None

    def close(self) -> None:
        self._server.close()


async def listen(
    endpoint: Endpoint, make_protocol: MakeProtocol, tls: ssl.SSLContext | None, limits: Limits
) -> Listening:
    """Listens. Busy: the port is taken, or the address is not of this machine."""
    loop = asyncio.get_running_loop()
    try:
        if tls is not None:
            return Listening(TlsDoor(await _all_bound(endpoint), make_protocol, tls, limits))
        named = {"host": endpoint.host, "port": endpoint.port} if _is_name(endpoint.host) else None
        where: dict[str, Any] = named or {"sock": _bound(endpoint)}
        return Listening(await loop.create_server(make_protocol, backlog=BACKLOG, **where))
    except OSError as error:
        raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error


class TlsDoor:
    """Accepts the connections of a port and shakes hands with them."""

    def __init__(
        self, sockets: Sequence[socket.socket], make_protocol: MakeProtocol, tls: ssl.SSLContext, limits: Limits
    ) -> None:
        self.sockets = sockets
        self.handshakes = Strangers(limits)
        self.tasks = Tasks()
        self._make_protocol = make_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._again: dict[int, asyncio.TimerHandle] = {}
        for each in sockets:
            each.listen(BACKLOG)
            self._loop.add_reader(each.fileno(), self._accept, each)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_A_TURN):
            try:
                connection, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                fd = listening.fileno()
                self._loop.remove_reader(fd)
                self._again[fd] = self._loop.call_later(ACCEPT_AGAIN_S, self._accept_again, listening)
                return
            connection.setblocking(False)
            _Handshake(self, connection, str(Endpoint(address[0], address[1])))

    def _accept_again(self, listening: socket.socket) -> None:
        self._again.pop(listening.fileno(), None)
        self._loop.add_reader(listening.fileno(), self._accept, listening)

    async def shaken(self, connection: socket.socket, peer: str) -> None:
        """Makes the protocol of the connection, which exists when this returns, or the connection is over."""
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=SHUTDOWN_S,
            )  # fmt: skip
        except (OSError, EOFError) as error:  # also ssl.SSLError, and a time-out
            _LOG.debug("%s: no TLS: %s", peer, error)

    def close(self) -> None:
        """Accepts no more; handshakes under way end."""
        for each in self.sockets:
            if each.fileno() >= 0:
                self._loop.remove_reader(each.fileno())
            each.close()
        for timer in self._again.values():
            timer.cancel()
        self._again.clear()
        self.tasks.cancel()


class _Handshake:
    """A handshake that is under way."""

    is_busy = False

    def __init__(self, door: TlsDoor, connection: socket.socket, peer: str) -> None:
        self._door = door
        self._connection = connection
        self._task: asyncio.Task[None] | None = None
        if not door.handshakes.came(self, peer):
            connection.close()
        elif not PROCESS.connection():
            door.handshakes.left(self)
            connection.close()
        else:
            self._task = door.tasks.spawn(door.shaken(connection, peer), "tls-handshake")
            self._task.add_done_callback(self._over)

    def leave(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._door.handshakes.left(self)
        PROCESS.connection_over()
        if task.cancelled():
            self._connection.close()  # it may not have begun; else it is closed already


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


async def _all_bound(endpoint: Endpoint) -> list[socket.socket]:
    """Returns one socket, or one for each address of a name."""
    if not _is_name(endpoint.host):
        return [_bound(endpoint)]
    found = await asyncio.get_running_loop().getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
    bound: list[socket.socket] = []
    try:
        for address in {str(each[4][0]): None for each in found}:
            bound.append(_bound(Endpoint(address, endpoint.port)))  # noqa: PERF401 - what is bound is closed
    except OSError:
        for each in bound:
            each.close()
        raise
    return bound


def _bound(endpoint: Endpoint) -> socket.socket:
    is_6 = ":" in endpoint.host
    # By its protocol asyncio knows a socket whose answers must not wait for what would go with them (TCP_NODELAY).
    found = socket.socket(socket.AF_INET6 if is_6 else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_6:
            found.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        found.bind((endpoint.host, endpoint.port))
        found.setblocking(False)
    except OSError:
        found.close()
        raise
    return found
