"""The authentication of callers: the rules of a listener (`ListenerAccess`), the credentials of a client
(`CallerAccess`), and the authenticated caller (`Principal`).

A listener has a `Guard` or none. With a guard, each call is authenticated before its handler starts and before anything
of its request is read, decompressed or parsed: the guard sees only the connection and the header `authorization`. The
`Principal` that the guard returns is part of the call's context (`runtime/network.py`). Without a guard every caller is
LOCAL and may do everything: such a listener should accept only callers of its own machine (docs/security.md).

Source of the rules: Pulsar's authentication providers; security of this design: docs/security.md.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from .budget import CallerMemory


class PrincipalKind(Enum):
    """How a caller was authenticated. LOCAL: not at all, because the listener has no guard. ANONYMOUS: the caller sent
    no credentials, and the configuration has a role for such callers. CLIENT: by the credentials of a client. MEMBER:
    by a certificate of the cluster."""

    LOCAL = "local"  # nothing was asked: a listener without security
    ANONYMOUS = "anonymous"  # it brought no credentials, and the configuration has a role for such callers
    CLIENT = "client"  # a role that a credential names
    MEMBER = "member"  # a process of this cluster, or an operator, by the certificate of the cluster


@dataclass(frozen=True, slots=True)
class Principal:
    """An authenticated caller. `name` is the role in Pulsar's sense; a member of the cluster has the name
    `broker/NAME`, `bookie/UUID` or `operator/NAME`."""

    name: str
    kind: PrincipalKind
    method: str = ""  # "token", "basic", "tls"; empty: none
    expires_ms: int = 0  # wall clock, milliseconds since the epoch; 0: never
    credential_id: str = ""  # the token's `jti` or the certificate's serial number, for revocation and audit
    is_super: bool = False  # the settings name it as a super user: it may do everything
    proof: bytes = field(default=b"", repr=False, compare=False)  # a digest of the key or hash that verified it

    def __str__(self) -> str:
        return f"{self.kind.value}:{self.name}" if self.name else self.kind.value


LOCAL_PRINCIPAL = Principal("", PrincipalKind.LOCAL)


class CredentialScheme(NamedTuple):
    """A scheme of the header `authorization`, and the same method in Pulsar's protocol."""

    name: str  # the first word of the header, in any case: "Bearer"
    method: str  # `auth_method_name` of Pulsar's protocol, `Principal.method`
    is_base64: bool = False  # the header has the base64 of what Pulsar's protocol has as bytes

    def make_header(self, data: bytes) -> str:
        """Returns the value of the header for the credentials `data` of Pulsar's protocol."""
        return f"{self.name} {base64.b64encode(data).decode() if self.is_base64 else data.decode('latin-1').strip()}"

    def parse_header_value(self, value: str) -> bytes:
        """Returns the credentials for Pulsar's protocol. `value`: what follows the scheme in the header. Raises
        ValueError if it is not base64 although the scheme has base64."""
        return base64.b64decode(value) if self.is_base64 else value.encode()


BEARER = CredentialScheme("Bearer", "token")
CREDENTIAL_SCHEMES = (BEARER, CredentialScheme("Basic", "basic", is_base64=True))
"""The schemes of the header that servers understand. HTTP's challenge, OpenAPI, Pulsar's protocol on both sides and the
patterns of a support bundle are made from this table."""


@dataclass(frozen=True, slots=True)
class Caller:
    """What the listener knows about a caller before it reads a request. Only `certificate` has been verified."""

    peer: str  # HOST:PORT of the other end of the socket, never from a header
    authorization: str = ""  # of the header `authorization`, such as "Bearer …", at most AUTHORIZATION_MAX characters
    certificate: bytes = b""  # PEM of the client certificate that TLS verified; empty: none
    is_encrypted: bool = False  # TLS

    def __repr__(self) -> str:
        return f"Caller({self.peer!r}, encrypted={self.is_encrypted})"


AUTHORIZATION_MAX = 16 << 10
"""Characters; a token with many groups has a few thousand."""


class Guard(Protocol):
    """Authenticates the callers of one listener, and decides which rpcs a caller may use. `Authenticator` is the guard
    of a broker, `MemberGuard` that of the metadata service; the listener calls the methods."""

    async def authenticate(self, caller: Caller) -> Principal:
        """Returns the principal of a caller. Raises Unauthenticated if its credentials are missing, wrong, expired or
        of another cluster; the error's text names the reason, and never quotes the credentials. Raises Unavailable if a
        provider cannot decide now, because its issuer does not answer.
        """
        ...

    def authorize(self, principal: Principal, path: str) -> None:
        """Raises Unauthorized if the principal may not call `path`, an rpc such as "/magnetar.wire.Admin/DeleteTopic".
        """
        ...

    def why_lapsed(self, principal: Principal) -> str:
        """Returns the reason why credentials that have not expired are no longer valid: they were revoked, or the key
        that verified them was replaced. Returns "" if they are still valid. The listener calls this method every few
        seconds for callers with open streams, so it must not wait."""
        ...


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of the PEM files of a listener or a client; "": there is no such file. Changed files are read again for
    the next handshake of a listener, and for the next connection of a client; open connections stay."""

    certificate: str = ""
    key: str = ""
    ca: str = ""  # whom to trust: of servers (empty: the system's), at a listener of clients
    optional: bool = False  # at a listener: clients may have none


@dataclass(frozen=True, slots=True)
class CallerLimits:
    """The limits for the callers of one listener: numbers of connections, streams and simultaneous authentications, and
    the seconds that a stream may stay without progress."""

    connections: int = 10_000  # in all; further ones are refused
    streams_per_address: int = 1_000  # open ones of a host (IPv6: of a network of 64 bits); further ones: BackPressure
    first_frame_s: float = 10.0  # a stream on which nothing came for so long is cut
    unread_s: float = 300.0  # … and one whose caller takes nothing of what waits for it
    authentications: int = 256  # at a time; further callers get BackPressure


@dataclass(frozen=True, slots=True)
class ListenerAccess:
    """The rules for the callers of a listener. `guard` authenticates them; None: every caller is LOCAL. `tls`: the
    files for TLS; None: in clear. `limits` and `memory` limit what callers may use."""

    guard: Guard | None = None
    tls: TlsFiles | None = None  # with `ca` each caller has to have a certificate of it, or may (`optional`)
    limits: CallerLimits = CallerLimits()
    memory: CallerMemory = field(default_factory=CallerMemory)


@dataclass(frozen=True, slots=True)
class CallerAccess:
    """The credentials that a client sends to a listener: its TLS files (None: in clear), and `authorization`, a
    function that returns the value of the header `authorization`. The function is called for each call and stream; it
    must not wait. `headers`: further headers of each call and stream, (name, value), as a service of another project
    may ask for."""

    tls: TlsFiles | None = None
    authorization: Callable[[], str] | None = None
    headers: tuple[tuple[bytes, bytes], ...] = ()


OPEN_ACCESS = ListenerAccess()
"""Access of a listener without a guard: every caller is LOCAL, in clear."""

NO_CREDENTIALS = CallerAccess()
