"""Listening sockets of the event loop, with TLS or without, and TCP connections that carry bytes.

    server = await listen(endpoint, make_protocol, tls, limits)        port 0: a free one

**Listening.** `listen` binds an address without a look-up, because asyncio would look it up like a name, for which it
starts four threads and loads tables of names. With TLS, `TlsListener` accepts the connections: so a connection counts
(`UnauthenticatedConnections`) and has a descriptor from its first byte on, and its handshake ends after
HANDSHAKE_TIMEOUT_S. `make_protocol` is called when the handshake is done.
**Bytes.** `serve` and `connect` implement `serve_bytes` and `connect_bytes` of `runtime/network.py`.
**Certificates.** `PROCESS_CERTIFICATES` has the TLS certificates that this process shows to others, and when each ends,
for its metrics:

    PROCESS_CERTIFICATES.add(path)              called by the code that makes a TLS context from the file
    PROCESS_CERTIFICATES.read_expiry_times()    by path, the time at which its first certificate expires (s since the
    epoch)

A file that was replaced is read again, because the next handshake uses it. For a file that cannot be read, or has no
certificate, the last known time stays. Only the end of its validity is read from a certificate, so the standard library
is enough.

Guarding tests: tests/runtime/tcp/test_listen.py, tests/runtime/tcp/test_strangers.py,
tests/runtime/tcp/test_certificates.py, tests/cli/test_start.py.

Also in this file, each below its heading: the limit for connections whose callers are not authenticated, which comments
call strangers (strangers); TLS contexts that are made again when their files change (tls).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import os
import re
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol, cast

from ...proto.errors import Busy, ConnectionLost, InvalidConfiguration, MagnetarError, Unavailable, UntrustedServer
from ..access import OPEN_ACCESS, Caller, CallerLimits, Guard, ListenerAccess, TlsFiles
from ..descriptors import PROCESS_DESCRIPTORS
from ..network import STREAM_QUEUE_BYTES, ByteService, Endpoint, MustWakeReader, ProvideBuffer, find_caller_network
from ..tasks import Tasks

_PEM = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.S)
_VERSION, _UTC_TIME = 0xA0, 0x17


class CertificateFiles:
    """The certificate files that this process uses, each with the time at which its certificate expires."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[object, float | None]] = {}  # path → (inode, time, size) as it was read, its end

    def add(self, path: str) -> None:
        """Adds the certificate file `path`. Does nothing if it is known."""
        self._found.setdefault(path, (None, None))

    def read_expiry_times(self) -> dict[str, float]:
        """Returns, by file, the time at which its certificate expires (for a chain, the earliest time), in seconds
        since the epoch. Reads a file again if it has changed. Leaves out a file that was never readable."""
        for path, (stamp, end) in self._found.items():
            try:
                known = os.stat(path)
                now = (known.st_ino, known.st_mtime_ns, known.st_size)
                if now != stamp:
                    with open(path, encoding="ascii", errors="replace") as file:
                        self._found[path] = now, find_certificate_expiry(file.read())
            except (OSError, ValueError) as error:
                _LOG.debug("when the certificate of %s ends is not read: %s", path, error)
                self._found[path] = stamp, end
        return {path: end for path, (_, end) in self._found.items() if end is not None}

    def find_first_end_ms(self) -> int:
        """Returns when the first of the certificates expires, in ms since the epoch; 0: there is none."""
        return int(1000 * min(self.read_expiry_times().values(), default=0))


PROCESS_CERTIFICATES = CertificateFiles()
"""Those of this process."""


def find_certificate_expiry(pem: str) -> float:
    """Returns the earliest time at which a certificate of a PEM text expires, in seconds since the epoch. Raises
    ValueError if the text contains no certificate, or a damaged one."""
    return min(_end(ssl.PEM_cert_to_DER_cert(each)) for each in _PEM.findall(pem))


def _end(der: bytes) -> float:
    """Returns the end of a certificate: { to be signed { [version] serial algorithm issuer { begin end } … …"""
    tbs = _content(der, _content(der, 0)[0])[0]
    at = tbs
    if der[at] == _VERSION:
        at = _content(der, at)[1]
    for _ in range(3):
        at = _content(der, at)[1]
    not_before = _content(der, at)[0]
    kind_at = _content(der, not_before)[1]
    first, end = _content(der, kind_at)
    text = der[first:end].decode("ascii")
    if der[kind_at] == _UTC_TIME:  # of two digits, 50 to 99 are of the last century
        text = ("19" if text >= "5" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _content(der: bytes, at: int) -> tuple[int, int]:
    """Returns where the content of the element at `at` begins and ends. Raises ValueError."""
    if at + 2 > len(der):
        raise ValueError("the certificate is cut")
    size, at = der[at + 1], at + 2
    if size & 0x80:
        count = size & 0x7F
        size, at = int.from_bytes(der[at : at + count], "big"), at + count
    if at + size > len(der):
        raise ValueError("the certificate is cut")
    return at, at + size


# ----------------------------------------------------------------------------------------------------- strangers
# Connections of a port whose callers are not known yet: they are bounded, and keep no other caller out.
#
#     strangers.add(stranger, peer)     a connection in its TLS handshake, or without an admitted call
#     strangers.remove(stranger)        its caller is authenticated now, or the connection has ended
#
# **Bound.** Half of the port's connections, at most an eighth of those that the process may have: so the strangers of
# all ports leave room for callers that are known. When one more comes, the oldest of the address that has most of them
# leaves. So a flood pushes out itself first, and a caller that does what it came for is in: it has the time in which
# the flood fills the bound once. One that is being asked who it is (`is_busy`) stays. **Time.** Its owner ends one that
# takes too long (HANDSHAKE_TIMEOUT_S, `first_frame_s`, `STRANGER_CHECKS`). Guarding tests:
# tests/runtime/tcp/test_strangers.py, tests/runtime/grpc/test_limits.py.


STRANGER_CONNECTIONS_MIN = 16
"""Strangers that a port may have, however few connections it may have."""


class UnauthenticatedConnection(Protocol):
    """A connection whose caller is not authenticated yet, as `UnauthenticatedConnections` sees it."""

    @property
    def is_busy(self) -> bool:
        """Returns whether the caller is being authenticated now: then the connection is not evicted."""
        ...

    def evict(self) -> None:
        """Closes the connection at once, to make room for other connections."""
        ...


class UnauthenticatedConnections:
    """The connections of one port whose callers are not authenticated yet. Limits their number. A port with TLS has two
    such objects: one for connections in the TLS handshake, and one for those after it. `pushed_out`: how many were
    closed to make room."""

    def __init__(self, limits: CallerLimits) -> None:
        self._half = max(limits.connections // 2, min(limits.connections, STRANGER_CONNECTIONS_MIN))
        self._of: dict[str, dict[UnauthenticatedConnection, None]] = {}  # by address, the oldest first
        self._address: dict[UnauthenticatedConnection, str] = {}
        self.pushed_out = 0

    def __len__(self) -> int:
        return len(self._address)

    def __contains__(self, stranger: UnauthenticatedConnection) -> bool:
        return stranger in self._address

    def __iter__(self) -> Iterator[UnauthenticatedConnection]:
        """Yields the connections, the oldest first."""
        return iter(list(self._address))

    @property
    def count_max(self) -> int:
        """Returns how many connections may be in this object at the same time."""
        return min(self._half, max(PROCESS_DESCRIPTORS.connections_max // 8, STRANGER_CONNECTIONS_MIN))

    def add(self, stranger: UnauthenticatedConnection, peer: str) -> bool:
        """Adds a connection from `peer` (HOST:PORT), and returns True. If there are too many connections, closes an old
        one first. Returns False, and adds nothing, if none of them may be closed."""
        if len(self._address) >= self.count_max and not self._push_out():
            return False
        address = find_caller_network(peer)
        self._address[stranger] = address
        self._of.setdefault(address, {})[stranger] = None
        return True

    def remove(self, stranger: UnauthenticatedConnection) -> None:
        """Removes a connection: its caller is authenticated now, or it has ended. Does nothing if it is not there."""
        address = self._address.pop(stranger, None)
        if address is not None:
            group = self._of[address]
            del group[stranger]
            if not group:
                del self._of[address]

    def _push_out(self) -> bool:
        for group in sorted(self._of.values(), key=len, reverse=True):
            for oldest in group:
                if not oldest.is_busy:
                    self.pushed_out += 1
                    self.remove(oldest)
                    oldest.evict()
                    return True
        return False


# ----------------------------------------------------------------------------------------------------------- tls
# TLS of listeners on plain TCP: one context whose certificate and authority are read again when their files change.
#
# The files are looked at before each handshake: open connections stay, the next one is shown the new certificate, and
# asked for one of the new authority. A session is resumed in TLS 1.2 alone, and only while the files are those of the
# start: a resumed session brings the certificate that was verified when it began. Files that cannot be used leave those
# before in use, and are logged. Guarding tests: tests/runtime/tcp/test_tls.py.


HANDSHAKE_TIMEOUT_S = 5.0
TLS_SHUTDOWN_TIMEOUT_S = 1.0

_LOG = logging.getLogger("magnetar.bytes")


def make_listener_tls_context(tls: TlsFiles, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Returns the TLS context of a listener: TLS 1.2 or later. If `tls` has a `ca`, each caller must present a
    certificate of that authority, or may do so if `optional` is set. `protocols` are offered in the handshake (ALPN).
    Raises InvalidConfiguration if a file cannot be used."""
    found = _Reloaded(tls, protocols)
    found.outer.sni_callback = found.before_handshake
    return found.outer


def make_caller_tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """Returns the TLS context of a client. The client verifies the server with `ca`, or with the authorities of the
    system, and presents the certificate of `tls` if there is one. Raises InvalidConfiguration if a file cannot be used.
    """
    try:
        context = ssl.create_default_context(cafile=tls.ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if tls.certificate:
            context.load_cert_chain(tls.certificate, tls.key or None)
            PROCESS_CERTIFICATES.add(tls.certificate)
    except (ssl.SSLError, OSError) as error:
        files = f"{tls.ca} {tls.certificate} {tls.key}".strip()
        raise InvalidConfiguration(f"{files} cannot be read as certificates and key in PEM: {error}") from error
    return context


class _Reloaded:
    def __init__(self, tls: TlsFiles, protocols: Sequence[str]) -> None:
        self._tls = tls
        self._protocols = protocols
        self._stamps = _stamps(tls)
        self.outer = self._now = _context(tls, protocols)

    def before_handshake(
        self, connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, _: ssl.SSLContext
    ) -> int | None:
        """Loads changed files before a handshake. Returns None, or a TLS alert that ends the handshake."""
        try:
            stamps = _stamps(self._tls)
            if stamps != self._stamps:
                self._now, self._stamps = _context(self._tls, self._protocols), stamps
                _LOG.info("new TLS files are used from now on: %s", self._tls.certificate)
        except InvalidConfiguration as error:
            _LOG.error("new TLS files are not used, the ones before stay: %s", error)
        if self._now is not self.outer:
            if connection.session_reused:
                return ssl.ALERT_DESCRIPTION_HANDSHAKE_FAILURE  # of a certificate that another authority verified
            connection.context = self._now
        return None


def _context(tls: TlsFiles, protocols: Sequence[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    if protocols:
        context.set_alpn_protocols(list(protocols))
    try:
        context.load_cert_chain(tls.certificate, tls.key)
        PROCESS_CERTIFICATES.add(tls.certificate)
        if tls.ca:
            context.load_verify_locations(tls.ca)
            context.verify_mode = ssl.CERT_OPTIONAL if tls.optional else ssl.CERT_REQUIRED
    except (ssl.SSLError, OSError) as error:
        raise InvalidConfiguration(f"the TLS files {tls.certificate} and {tls.key} do not fit: {error}") from error
    return context


def _stamps(tls: TlsFiles) -> list[tuple[int, int, int]]:
    try:
        found = [os.stat(path) for path in (tls.certificate, tls.key, tls.ca) if path]
    except OSError as error:
        raise InvalidConfiguration(f"{error.filename} cannot be read: {error.strerror}") from error
    return [(each.st_ino, each.st_mtime_ns, each.st_size) for each in found]


# ----------------------------------------------------------------------------------------------------- listening


LISTEN_BACKLOG = 1024
"""Connections that wait to be accepted: all clients of a broker come back at once."""
ACCEPTS_A_TURN = 64
ACCEPT_AGAIN_S = 1.0
"""Seconds to the next accept after the system had no descriptor for a connection."""

_NO_ROOM = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))

MakeProtocol = Callable[[], asyncio.BaseProtocol]


class TcpListening:
    """The listening sockets of one port. The function `listen` creates this object."""

    def __init__(self, server: asyncio.Server | TlsListener) -> None:
        self._server = server

    @property
    def port(self) -> int:
        """Returns the actual number of the port."""
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def handshakes(self) -> UnauthenticatedConnections | None:
        """Returns the connections whose TLS handshake is in progress; None if the listener does not use TLS."""
        return self._server.handshakes if isinstance(self._server, TlsListener) else None

    def close(self) -> None:
        """Stops listening, and ends TLS handshakes that are in progress. Connections that are made stay open."""
        self._server.close()


async def listen(
    endpoint: Endpoint, make_protocol: MakeProtocol, tls: ssl.SSLContext | None, limits: CallerLimits
) -> TcpListening:
    """Starts to listen at `endpoint` (port 0: a free port), and returns the listening sockets. `make_protocol` is
    called for each connection, with TLS after its handshake. Raises Busy if the port is taken, or the address does not
    belong to this machine."""
    loop = asyncio.get_running_loop()
    try:
        if tls is not None:
            return TcpListening(TlsListener(await _all_bound(endpoint), make_protocol, tls, limits))
        named = {"host": endpoint.host, "port": endpoint.port} if _is_name(endpoint.host) else None
        where: dict[str, Any] = named or {"sock": _bound(endpoint)}
        return TcpListening(await loop.create_server(make_protocol, backlog=LISTEN_BACKLOG, **where))
    except OSError as error:
        raise Busy(f"cannot listen on {endpoint}: the port is taken or not ours", endpoint=endpoint) from error


class TlsListener:
    """Accepts the connections of a port and makes their TLS handshakes. `sockets` are bound; the constructor starts to
    listen."""

    def __init__(
        self, sockets: Sequence[socket.socket], make_protocol: MakeProtocol, tls: ssl.SSLContext, limits: CallerLimits
    ) -> None:
        self.sockets = sockets
        self.handshakes = UnauthenticatedConnections(limits)
        self.tasks = Tasks()
        self._make_protocol = make_protocol
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._again: dict[int, asyncio.TimerHandle] = {}
        for each in sockets:
            each.listen(LISTEN_BACKLOG)
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

    async def handshake(self, connection: socket.socket, peer: str) -> None:
        """Makes the TLS handshake of a connection and creates its protocol. If the handshake fails, closes the
        connection."""
        try:
            await self._loop.connect_accepted_socket(
                self._make_protocol, connection, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S,
                ssl_shutdown_timeout=TLS_SHUTDOWN_TIMEOUT_S,
            )  # fmt: skip
        except (OSError, EOFError) as error:  # also ssl.SSLError, and a time-out
            _LOG.debug("%s: no TLS: %s", peer, error)

    def close(self) -> None:
        """Closes the listening sockets, and cancels the TLS handshakes that are in progress."""
        for each in self.sockets:
            if each.fileno() >= 0:
                self._loop.remove_reader(each.fileno())
            each.close()
        for timer in self._again.values():
            timer.cancel()
        self._again.clear()
        self.tasks.cancel()


class _Handshake:
    """A TLS handshake that is under way."""

    is_busy = False

    def __init__(self, door: TlsListener, connection: socket.socket, peer: str) -> None:
        self._door = door
        self._connection = connection
        self._task: asyncio.Task[None] | None = None
        if not door.handshakes.add(self, peer):
            connection.close()
        elif not PROCESS_DESCRIPTORS.reserve_connection():
            door.handshakes.remove(self)
            connection.close()
        else:
            self._task = door.tasks.spawn(door.handshake(connection, peer), "tls-handshake")
            self._task.add_done_callback(self._on_task_ended)

    def evict(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _on_task_ended(self, task: asyncio.Task[None]) -> None:
        self._door.handshakes.remove(self)
        PROCESS_DESCRIPTORS.release_connection()
        if task.cancelled():
            self._connection.close()  # it may not have begun; else it is closed already


def _is_name(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


async def _all_bound(endpoint: Endpoint) -> list[socket.socket]:
    """Returns bound sockets: one, or one for each address of a name."""
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


EARLY_READ_BYTES = 16 << 10
"""Most bytes that came while no reader waited; then the socket is not read until one does."""
CLOSE_TIMEOUT_S = 1.0
"""Seconds for what is queued when a connection is closed: a peer that does not read must not keep it open."""


class TcpStream(asyncio.BufferedProtocol):
    """One end of a TCP connection, in clear or with TLS; implements `runtime.network.ByteStream`. Received bytes are
    written directly into the reader's buffer."""

    def __init__(
        self, accepted: Callable[[TcpStream], None] | None = None, guard: Guard | None = None,
        known: Callable[[TcpStream], None] = lambda stream: None,
    ) -> None:  # fmt: skip
        """Creates a stream. `accepted` is called when the connection is made, `known` when its caller is authenticated;
        both may raise. `guard` is that of the listener."""
        self.peer = "?"
        self.guard = guard
        self._known = known
        self._accepted = accepted
        self._transport: asyncio.Transport
        self._room: ProvideBuffer | None = None  # of the reader that waits …
        self._enough: MustWakeReader | None = None
        self._reader: asyncio.Future[int] | None = None
        self._given = memoryview(b"")  # … and where the bytes of now go
        self._early = memoryview(b"")
        self._paused = False  # the socket is not read
        self._ended = False  # the other end sends no more
        self._failure: Exception | None = None  # with which the connection broke, before the other end had ended it
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writable: list[asyncio.Future[None]] | None = None  # who waits for the peer to read; None: no need to

    # ------------------------------------------------------------------ the protocol of asyncio
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass
        self._transport.set_write_buffer_limits(high=STREAM_QUEUE_BYTES)
        host, port = (transport.get_extra_info("peername") or ("?", 0))[:2]
        self.peer = str(Endpoint(host, port))
        if self._accepted is not None:
            self._accepted(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Returns the buffer into which the transport writes the next bytes. With TLS it may be called although no
        bytes follow."""
        self._given = self._room() if self._room is not None else memoryview(bytearray(EARLY_READ_BYTES))
        return self._given

    def buffer_updated(self, nbytes: int) -> None:
        given, self._given = self._given, memoryview(b"")
        early = self._room is None
        if early:
            self._early = given[:nbytes]
        elif self._enough is not None and not self._enough(nbytes):
            return
        else:
            self._room = None
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(nbytes)
        if early or nbytes == len(given):  # else the socket is empty for now
            self._paused = True
            self._transport.pause_reading()

    def eof_received(self) -> bool:
        self._ended = True
        self._wake()
        return self._transport.get_extra_info("ssl_object") is None  # the other direction stays open

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._ended:
            self._failure = exc
        self._ended = True
        if not self._lost.done():
            self._lost.set_result(None)
        self._wake(exc)
        self.resume_writing()

    def pause_writing(self) -> None:
        self._writable = []

    def resume_writing(self) -> None:
        waiting, self._writable = self._writable, None
        for each in waiting or ():
            if not each.done():
                each.set_result(None)

    def _wake(self, why: Exception | None = None) -> None:
        reader = self._reader
        if reader is not None and not reader.done():
            if why is None:
                reader.set_result(0)
            else:
                reader.set_exception(ConnectionLost(f"{self.peer}: {why}"))

    # ------------------------------------------------------------------ a ByteStream
    @property
    def caller(self) -> Caller:
        tls: ssl.SSLObject | None = self._transport.get_extra_info("ssl_object")
        if tls is None:
            return Caller(self.peer)
        found = tls.getpeercert(binary_form=True)
        return Caller(self.peer, "", ssl.DER_cert_to_PEM_cert(found).encode() if found else b"", is_encrypted=True)

    def on_caller_authenticated(self) -> None:
        self._known(self)

    is_busy = False

    def evict(self) -> None:
        self.abort()

    async def read_into(self, room: ProvideBuffer, enough: MustWakeReader | None = None) -> int:
        while self._early:
            into = room()
            size = min(len(into), len(self._early))
            into[:size], self._early = self._early[:size], self._early[size:]
            if enough is None or enough(size):
                return size
        if self._failure is not None:
            raise ConnectionLost(f"{self.peer}: {self._failure}")
        if self._ended:
            return 0
        self._room, self._enough, self._reader = room, enough, asyncio.get_running_loop().create_future()
        if self._paused:
            self._paused = False
            self._transport.resume_reading()
        try:
            return await self._reader
        finally:
            self._room = self._enough = self._reader = None

    def write_nowait(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    @property
    def queued_bytes(self) -> int:
        return self._transport.get_write_buffer_size()

    def limit_queue(self, bytes_max: int) -> None:
        self._transport.set_write_buffer_limits(high=bytes_max)

    async def wait_drained(self) -> None:
        if self._writable is not None and not self._lost.done():
            waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._writable.append(waiting)
            await waiting
        if self._lost.done():
            raise ConnectionLost(f"{self.peer}: the connection is lost")

    def abort(self) -> None:
        """Closes the connection at once; queued bytes are lost."""
        self._transport.abort()

    async def close(self) -> None:
        self._transport.close()
        if not (await asyncio.wait((self._lost,), timeout=CLOSE_TIMEOUT_S))[0]:
            self._transport.abort()


class RunningTcpServer:
    """A listener for TCP connections that carry bytes; implements `runtime.network.RunningByteServer`."""

    def __init__(self, service: ByteService, access: ListenerAccess) -> None:
        self._service = service
        self._access = access
        self._server: TcpListening
        self._handlers = Tasks()
        self.strangers = UnauthenticatedConnections(access.limits)
        self._known: dict[TcpStream, str] = {}  # with their addresses
        self._of_address: Counter[str] = Counter()  # those that are known
        self.endpoint: Endpoint

    @property
    def is_encrypted(self) -> bool:
        return self._access.tls is not None

    async def listen(self, endpoint: Endpoint) -> None:
        """Starts to listen at `endpoint`. Must be called once, before anything else. Raises Busy if the port is taken,
        InvalidConfiguration if a TLS file cannot be used."""
        tls = make_listener_tls_context(self._access.tls) if self._access.tls is not None else None
        access = self._access
        made = lambda: TcpStream(self._accept, access.guard, self._admit)
        self._server = await listen(endpoint, made, tls, access.limits)
        self.endpoint = Endpoint(endpoint.host, self._server.port)

    def _accept(self, stream: TcpStream) -> None:
        if self._handlers.closed or not self.strangers.add(stream, stream.peer):
            stream.abort()
        elif (
            len(self.strangers) + len(self._known) > self._access.limits.connections
            or not PROCESS_DESCRIPTORS.reserve_connection()
        ):
            self.strangers.remove(stream)
            stream.abort()
        else:
            self._handlers.spawn(self._handle(stream), "bytes-connection")

    def _admit(self, stream: TcpStream) -> None:
        """Counts a connection whose caller is authenticated. Raises ConnectionLost if its address has as many
        connections as it may have.
        """
        if stream in self._known or stream not in self.strangers:
            return
        self.strangers.remove(stream)
        place, most = find_caller_network(stream.peer), self._access.limits.streams_per_address
        if self._of_address[place] >= most:
            stream.abort()
            raise ConnectionLost(f"{place} has {most} connections")
        self._known[stream] = place
        self._of_address[place] += 1

    async def _handle(self, stream: TcpStream) -> None:
        self._access.memory.connections += 1
        _LOG.debug("%s has connected to port %d", stream.peer, self.endpoint.port)
        try:
            await self._service(stream)
        except MagnetarError as error:
            _LOG.debug("%s: %s", stream.peer, error)
        except Exception:
            _LOG.exception("the service of a connection failed")
        finally:
            self._access.memory.connections -= 1
            PROCESS_DESCRIPTORS.release_connection()
            _LOG.debug("%s has disconnected from port %d", stream.peer, self.endpoint.port)
            await stream.close()
            self.strangers.remove(stream)
            place = self._known.pop(stream, None)
            if place is not None:
                self._of_address[place] -= 1
                if not self._of_address[place]:
                    del self._of_address[place]

    async def close(self, grace_s: float = 0.0) -> None:
        """Stops accepting connections. Services of open connections may continue for `grace_s` seconds, and are then
        cancelled; their connections are closed. May be called twice."""
        self._server.close()
        await self._handlers.close(grace_s)


async def serve(endpoint: Endpoint, service: ByteService, access: ListenerAccess = OPEN_ACCESS) -> RunningTcpServer:
    """Starts a listener for TCP connections, with the parameters, the result and the errors of
    `Network.serve_bytes`."""
    serving = RunningTcpServer(service, access)
    await serving.listen(endpoint)
    return serving


async def connect(endpoint: Endpoint, tls: TlsFiles | None = None) -> TcpStream:
    """Makes a TCP connection, with the parameters, the result and the errors of `Network.connect_bytes`."""
    context = make_caller_tls_context(tls) if tls is not None else None
    connecting = asyncio.get_running_loop().create_connection
    try:
        return (await connecting(TcpStream, endpoint.host, endpoint.port, ssl=context))[1]
    except ssl.SSLCertVerificationError as error:
        raise UntrustedServer(f"the certificate of {endpoint} is not trusted: {error.verify_message}") from error
    except OSError as error:
        raise Unavailable(f"no process listens on {endpoint}: {error}") from error
