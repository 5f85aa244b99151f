"""The admission to a peer server with keys: ZeroMQ asks, over ZAP (RFC 27), before it completes a connection.

One handler for a context; ZeroMQ names the server in each question by its domain. The answer may wait for the gate, so
questions are answered in any order. The user id of the answer is the client's public key: it comes back with each
message of the connection, whatever routing id the client chooses.

    question = version "1.0" | id | domain | address | identity | mechanism "CURVE" | key, 32 bytes
    answer   = version | id | status 200, 300 (ask again later: the client is disconnected) or 400 | text | user id |

Without an answer, and without a handler, ZeroMQ admits no client (`ZAP_ENFORCE_DOMAIN`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from ...proto.errors import MagnetarError
from ..tasks import Tasks
from .keys import PeerGate

if TYPE_CHECKING:
    import zmq

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
ADMISSIONS_MAX = 64
"""Questions that wait for their gate at a time; further ones are told to come again."""

_LOG = logging.getLogger("magnetar.peers")
_FIELDS = 9
"""Frames of a question: route, an empty one, and the seven of the table."""


class Admission:
    """The handler. `socket` stays the context's."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        import zmq

        self.socket = socket
        self._zmq = zmq
        self._gates: dict[str, PeerGate] = {}
        self._number = 0
        self._tasks = Tasks()
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fd, self._drain)

    def add(self, gate: PeerGate) -> str:
        self._number += 1
        domain = f"peers-{self._number}"
        self._gates[domain] = gate
        return domain

    def remove(self, domain: str) -> bool:
        """Whether there is no other one."""
        del self._gates[domain]
        return not self._gates

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        self._tasks.cancel()

    def _drain(self) -> None:
        """Takes all questions: the descriptor signals once (runtime/peer/sockets.py)."""
        while not self.socket.closed:
            try:
                question = self.socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            self._take(question)

    def _take(self, question: list[bytes]) -> None:
        if len(question) != _FIELDS or question[2] != b"1.0" or question[7] != b"CURVE" or len(question[8]) != 32:
            self._answer(question, b"400", b"a key is wanted")
            return
        gate = self._gates.get(question[4].decode("latin-1"))
        if gate is None:
            self._answer(question, b"400", b"this server has ended")
        elif len(self._tasks) >= ADMISSIONS_MAX:
            self._answer(question, b"300", b"too many at once")
        else:
            self._tasks.spawn(self._decide(question, gate), "peer-admission")

    async def _decide(self, question: list[bytes], gate: PeerGate) -> None:
        key = question[8].hex()
        try:
            admitted = await gate.admit(key)
        except MagnetarError as error:
            _LOG.warning("a peer at %s is not admitted now: %s", question[5].decode("latin-1"), error)
            self._answer(question, b"300", b"it cannot be decided now")
            return
        if not admitted:
            _LOG.warning("a peer at %s is refused: no member has its key", question[5].decode("latin-1"))
        self._answer(question, b"200" if admitted else b"400", b"", key.encode() if admitted else b"")

    def _answer(self, question: list[bytes], status: bytes, text: bytes, user: bytes = b"") -> None:
        if not self.socket.closed:
            route, request = question[0], question[3] if len(question) > 3 else b""
            self.socket.send_multipart([route, b"", b"1.0", request, status, text, user, b""], self._zmq.NOBLOCK)
            self._loop.call_soon(self._drain)
