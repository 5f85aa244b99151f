"""How many connections a peer server has: each takes its place among those of the process, and one without is cut.

ZeroMQ accepts without a bound, and spins when no descriptor is free. Its monitor tells each connection that it accepts
and loses, by its descriptor. One that the process has no place for (`runtime/memory/descriptors.py`) is shut down at
once: so strangers fill what is free and push out no member that is connected. A stranger that does not shake hands is
dropped by ZeroMQ after 3 s (`sockets.py`), and its place is free again.
An event may come late, when its descriptor is another file already: only a connection to this very port is shut down.
Guard: `test_connections_above_the_bound_are_cut_and_those_that_are_open_go_on`.
"""

from __future__ import annotations

import asyncio
import logging
import socket as socketlib
import struct
from types import ModuleType
from typing import TYPE_CHECKING

from ..memory.descriptors import PROCESS

if TYPE_CHECKING:
    import zmq

_LOG = logging.getLogger("magnetar.peers")
_EVENT = struct.Struct("=Hi")
TOLD_EVERY_S = 10.0


class Accepted:
    """The accepted connections of one server's socket. Call `close` before the socket's."""

    def __init__(self, socket: zmq.Socket[bytes], port: int) -> None:
        import zmq

        self.cut = 0
        self.is_listening = True
        self._zmq = zmq
        self._port = port
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set()  # descriptors
        self._told = -TOLD_EVERY_S
        self._socket = socket
        self._monitor = socket.get_monitor_socket(_events(zmq))
        self._fd = int(self._monitor.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)
        self._drain()

    @property
    def count(self) -> int:
        return len(self._open)

    def _drain(self) -> None:
        """Handles all events that wait: the descriptor signals once."""
        while True:
            try:
                event, _ = self._monitor.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                if int(self._monitor.getsockopt(self._zmq.EVENTS)) & int(self._zmq.POLLIN):
                    continue
                return
            kind, fd = _EVENT.unpack_from(event)
            if kind == self._zmq.EVENT_ACCEPTED:
                self._came(fd)
            elif kind == self._zmq.EVENT_CLOSED:
                self.is_listening = False
            elif fd in self._open:
                self._open.remove(fd)
                PROCESS.connection_over()

    def _came(self, fd: int) -> None:
        if fd in self._open:
            return
        if PROCESS.connection():
            self._open.add(fd)
            return
        self.cut += 1
        _shut(fd, self._port)
        if self._loop.time() - self._told >= TOLD_EVERY_S:
            self._told = self._loop.time()
            _LOG.warning("%d peers were refused: all %d connections are open", self.cut, PROCESS.connections_max)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._socket.disable_monitor()
        self._monitor.close(0)
        for _ in self._open:
            PROCESS.connection_over()
        self._open.clear()


def _events(zmq: ModuleType) -> int:
    return int(zmq.EVENT_ACCEPTED) | int(zmq.EVENT_DISCONNECTED) | int(zmq.EVENT_CLOSED)


def _shut(fd: int, port: int) -> None:
    """Shuts a connection down; its owner, ZeroMQ, closes it."""
    try:
        connection = socketlib.socket(fileno=fd)
    except OSError:  # it is gone, or another file
        return
    try:
        if connection.family in (socketlib.AF_INET, socketlib.AF_INET6) and connection.getsockname()[1] == port:
            connection.shutdown(socketlib.SHUT_RDWR)
    except OSError:  # it is gone
        return
    finally:
        connection.detach()
