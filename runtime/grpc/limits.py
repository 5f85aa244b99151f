"""Limits of a gRPC listener: how many streams callers may have, and how long a stream may stay without progress
(`OpenStreams`); the authentication of callers (`CallerAuthenticator`); and the TLS of listeners and channels.

The listener limits the number of connections, and the windows of a connection limit its memory (runtime/tcp/http2.py).
`OpenStreams` limits the streams of an address. It checks all streams periodically, so that a message causes no work. It
counts checks and not seconds, so that a process that was paused does not end streams for the time of the pause.

Also in this file, below its heading: TLS and credentials of gRPC (access).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ...proto.errors import BackPressure, ConnectionLost, CredentialsExpired, InvalidConfiguration, MagnetarError
from ..access import LOCAL_PRINCIPAL, Caller, CallerAccess, CallerLimits, Guard, Principal, PrincipalKind, TlsFiles
from ..budget import MemoryBudget
from ..clock import Clock
from ..logs import AuditLog
from ..network import Endpoint, find_caller_network
from ..tcp.listening import make_caller_tls_context, make_listener_tls_context
from .stream import TIGHT_MEMORY_QUEUE_BYTES

IDLE_CONNECTION_S = 120
"""Seconds without a call after which a connection is closed; the caller's next call makes a new one."""
CALLS_MAX = 1_000
"""Most calls of one connection at a time, with those whose caller is gone and whose handler runs on; further ones are
refused."""
CHECKS_PER_LIMIT = 4
"""Number of looks at the streams within the shorter of the two times."""
TIGHT_MEMORY_CHECKS = 2
"""Looks after which, while memory is tight, a caller that took nothing is cut, if more than TIGHT_MEMORY_QUEUE_BYTES
wait for it. While there is none, after one."""

_LOG = logging.getLogger("magnetar.rpc")


class WatchedStream(Protocol):
    """A stream of a listener, as `OpenStreams` checks it; `GrpcStream` implements it. `queued_bytes`: bytes that wait
    to be sent. `sent_bytes`: bytes that were sent since the stream began."""

    has_read: bool  # something came

    @property
    def queued_bytes(self) -> int: ...
    @property
    def sent_bytes(self) -> int: ...
    def terminate_with_error(self, error: MagnetarError) -> None: ...


class _Seen:
    """What the periodic checks have found about one stream."""

    __slots__ = ("left", "peer", "silent", "unread")

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.silent = self.unread = 0
        self.left = -1


class OpenStreams:
    """The open streams of one listener. Limits how many streams an address may have. Ends a stream with ConnectionLost
    if its caller sends nothing for `first_frame_s` at its beginning, or takes none of the queued bytes for `unread_s`,
    which is less while memory is short (`CallerLimits`)."""

    def __init__(self, limits: CallerLimits, answers: MemoryBudget) -> None:
        self._limits = limits
        self._answers = answers
        self._pause = min(limits.first_frame_s, limits.unread_s) / CHECKS_PER_LIMIT
        self._silent_max = math.ceil(limits.first_frame_s / self._pause)
        self._unread_max = math.ceil(limits.unread_s / self._pause)
        self._seen: dict[WatchedStream, _Seen] = {}
        self._hosts: Counter[str] = Counter()
        self._next: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def count_stream_while_open(self, peer: str) -> Iterator[None]:
        """Counts one more stream of the caller's address `peer` (HOST:PORT) while the `with` block runs. Raises
        BackPressure if the address has as many streams as it may have."""
        host, limit = find_caller_network(peer), self._limits.streams_per_address
        if self._hosts[host] >= limit:
            raise BackPressure(f"{host} has {limit} streams open, which is what one address may have")
        self._hosts[host] += 1
        try:
            yield
        finally:
            self._hosts[host] -= 1
            if not self._hosts[host]:
                del self._hosts[host]

    def add(self, stream: WatchedStream, peer: str) -> None:
        """Starts to check the stream, which a caller at `peer` (HOST:PORT) has opened."""
        self._seen[stream] = _Seen(peer)
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._pause, self._check_streams)

    def remove(self, stream: WatchedStream) -> None:
        """Stops checking the stream. Does nothing if it is not checked."""
        self._seen.pop(stream, None)
        if not self._seen and self._next is not None:
            self._next.cancel()
            self._next = None

    def _check_streams(self) -> None:
        self._next = asyncio.get_running_loop().call_later(self._pause, self._check_streams)
        for stream, seen in list(self._seen.items()):
            if why := self._why_cut(stream, seen):
                self._seen.pop(stream, None)
                _LOG.warning("a stream of %s is cut: %s", seen.peer, why)
                stream.terminate_with_error(ConnectionLost(f"the server cut the stream: {why}"))

    def _why_cut(self, stream: WatchedStream, seen: _Seen) -> str:
        """Returns why the stream must be ended; empty if it may stay."""
        if not stream.has_read:
            seen.silent += 1
            return f"it sent nothing for {self._limits.first_frame_s:g} s" if seen.silent > self._silent_max else ""
        left = stream.sent_bytes
        seen.unread = seen.unread + 1 if stream.queued_bytes and left == seen.left else 0
        seen.left = left
        if seen.unread > self._unread_max:
            return f"it took nothing for {self._limits.unread_s:g} s"
        looks = TIGHT_MEMORY_CHECKS if self._answers.held <= self._answers.limit else 0
        if (
            seen.unread > looks
            and stream.queued_bytes > TIGHT_MEMORY_QUEUE_BYTES
            and self._answers.held > self._answers.tight
        ):
            return f"it took nothing for {max(looks, 1) * self._pause:g} s, and memory is short"
        return ""


# ------------------------------------------------------------------------------------------------------- callers
# The callers of one listener, and for how long they are admitted: the same at gRPC's listeners and at simulated ones.
#
#     principal = await callers.admit(caller, path)     or raises the guard's error, which the audit log records
#     with callers.end_when_credentials_expire(principal, stream.terminate_with_error): …
#
# A stream ends when the credentials of its caller expire, and within STREAM_CHECK_S after the guard says that they have
# lapsed. The error is CredentialsExpired, so a client connects again, and is refused if its credentials are not valid.


STREAM_CHECK_S = 2.0

EndCall = Callable[[MagnetarError], None]


class CallerAuthenticator:
    """Authenticates the callers of one listener, and ends their streams when their credentials expire. Without a guard,
    every caller is authenticated as LOCAL_PRINCIPAL."""

    def __init__(self, guard: Guard | None, clock: Clock) -> None:
        self._guard = guard
        self._clock = clock
        self._audit = AuditLog(clock)
        self._held: dict[object, tuple[Principal, EndCall]] = {}
        self._next: asyncio.TimerHandle | None = None

    @property
    def requires_authentication(self) -> bool:
        """Returns whether the listener has a guard."""
        return self._guard is not None

    async def admit(self, caller: Caller, path: str) -> Principal:
        """Authenticates a caller, and checks that it may call the rpc `path`. Returns its principal; LOCAL if the
        listener has no guard. Raises the errors of the guard (Unauthenticated, Unauthorized, Unavailable), and writes
        each refusal to the audit log."""
        if self._guard is None:
            return LOCAL_PRINCIPAL
        try:
            principal = await self._guard.authenticate(caller)
        except MagnetarError as refusal:
            self.record_refusal(caller, path, refusal)
            raise
        try:
            self._guard.authorize(principal, path)
        except MagnetarError as refusal:
            self._audit.record_denial(principal, _act(path), "", refusal.message, caller.peer)
            raise
        return principal

    def record_refusal(self, caller: Caller, path: str, refusal: MagnetarError) -> None:
        """Writes to the audit log that the caller was refused when it called the rpc `path`, with the text of the
        error."""
        self._audit.record_refusal(caller, _act(path), refusal.message)

    @contextmanager
    def end_when_credentials_expire(self, principal: Principal, end: EndCall) -> Iterator[None]:
        """While the `with` block runs, calls `end` with the error CredentialsExpired when the credentials of the
        principal expire, or at most STREAM_CHECK_S seconds after they were revoked (looked for only if the kind of
        the principal is CLIENT)."""
        key, timer = object(), self._expiry(principal, end)
        if principal.kind is PrincipalKind.CLIENT:
            self._held[key] = principal, end
            self._look_later()
        try:
            yield
        finally:
            self._held.pop(key, None)
            if timer is not None:
                timer.cancel()
            if not self._held and self._next is not None:
                self._next.cancel()
                self._next = None

    def _expiry(self, principal: Principal, end: EndCall) -> asyncio.TimerHandle | None:
        if not principal.expires_ms:
            return None
        wait_s = max(0.0, (principal.expires_ms - self._clock.wall_ms()) / 1000)
        return asyncio.get_running_loop().call_later(wait_s, end, _ended("expired"))

    def _look_later(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(STREAM_CHECK_S, self._check_expired)

    def _check_expired(self) -> None:
        assert self._guard is not None
        self._next = None
        why: dict[tuple[Principal, bytes], str] = {}
        for key, (principal, end) in list(self._held.items()):
            known = principal, principal.proof
            if known not in why:
                why[known] = self._guard.why_lapsed(principal)
            if why[known]:
                del self._held[key]
                end(_ended(f"lapsed: {why[known]}"))
        if self._held:
            self._look_later()


def _act(path: str) -> str:
    return path.rpartition(".")[2].replace("/", ".")


def _ended(how: str) -> CredentialsExpired:
    return CredentialsExpired(f"the credentials of this connection have {how}: connect again with new ones")


# -------------------------------------------------------------------------------------------------------- access
# TLS and credentials of gRPC: the header of a call, the context of a listener, and that of a channel.
#
# A listener's files are looked at before each handshake (runtime/tcp/listening.py). A connection of a client has its
# credentials for all its life: when its files have changed, the next call makes a new connection. A file that cannot be
# used keeps the one before in use. The host's name is always compared with the certificate's.


AUTHORIZATION_HEADER = b"authorization"
"""Header of a call: "Bearer TOKEN" or "Basic BASE64"."""

ALPN_PROTOCOL = "h2"
"""Protocol name by which both ends agree on HTTP/2 in the handshake (ALPN)."""


def make_authorization_header(access: CallerAccess) -> bytes:
    """Returns the value of the header `authorization` for a client's credentials; b"" if there are none. Raises the
    errors of `access.authorization`."""
    return access.authorization().encode("latin-1", "replace") if access.authorization is not None else b""


def make_server_tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """Returns the TLS context of a listener. Raises InvalidConfiguration if a file cannot be read or is no PEM file, or
    if the private key does not belong to the certificate."""
    _pem(tls.certificate, "CERTIFICATE")
    _pem(tls.key, "PRIVATE KEY")
    _check_pair(tls)
    if tls.ca:
        _pem(tls.ca, "CERTIFICATE")
    return make_listener_tls_context(tls, (ALPN_PROTOCOL,))


class ChannelTls:
    """The TLS of a channel: makes its context from PEM files, and keeps the present one in `context`. The constructor
    raises InvalidConfiguration like `make_channel_tls_context`."""

    def __init__(self, tls: TlsFiles) -> None:
        self._tls = tls
        self.context = make_channel_tls_context(tls)
        self._stamps = _stamps(tls)

    def reload(self) -> bool:
        """Reads the PEM files again if they have changed. Returns True if there is a new `context`, which later
        connections must use. If the new files cannot be used, logs the error, keeps the context and returns False."""
        try:
            stamps = _stamps(self._tls)
            if stamps == self._stamps:
                return False
            self._stamps = stamps
            self.context = make_channel_tls_context(self._tls)
        except (InvalidConfiguration, ValueError) as error:
            _LOG.error("new TLS files are not used, the ones before stay: %s", error)
            return False
        return True


def make_channel_tls_context(tls: TlsFiles) -> ssl.SSLContext:
    """Returns the TLS context of a channel. Raises InvalidConfiguration if a file cannot be read or is no PEM file, if
    a certificate is given without its key or the reverse, or if the two do not belong together."""
    if bool(tls.certificate) != bool(tls.key):
        raise InvalidConfiguration("a client certificate has a certificate file and a private key file: give both")
    if tls.certificate:
        _pem(tls.certificate, "CERTIFICATE")
        _pem(tls.key, "PRIVATE KEY")
        _check_pair(tls)
    if tls.ca:
        _pem(tls.ca, "CERTIFICATE")
    context = make_caller_tls_context(tls)
    context.set_alpn_protocols([ALPN_PROTOCOL])
    return context


def check_credentials_encrypted(endpoint: Endpoint, access: CallerAccess) -> None:
    """Raises InvalidConfiguration if a client would send its credentials to another machine without encryption."""
    if access.authorization is not None and access.tls is None and not endpoint.is_loopback:
        raise InvalidConfiguration(
            f"credentials are not sent to {endpoint} in clear: use a magnetar+ssl:// URL, which encrypts them"
        )


def _check_pair(tls: TlsFiles) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.key)
    except (ssl.SSLError, OSError) as error:
        raise InvalidConfiguration(f"{tls.key} is not the private key of {tls.certificate}: {error}") from error


def _pem(path: str, kind: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(1 << 20)
    except OSError as error:
        raise InvalidConfiguration(f"{path} cannot be read: {error.strerror}") from error
    if f"{kind}-----".encode() not in data:
        raise InvalidConfiguration(f"{path} has no {kind} in PEM form")
    return data


def _stamps(tls: TlsFiles) -> list[tuple[int, int, int]]:
    return [_stamp(path) for path in (tls.certificate, tls.key, tls.ca) if path]


def _stamp(path: str) -> tuple[int, int, int]:
    try:
        found = os.stat(path)
    except OSError as error:
        raise InvalidConfiguration(f"{path} cannot be read: {error.strerror}") from error
    return found.st_ino, found.st_mtime_ns, found.st_size
