"""The guard of a listener (`runtime.access.Guard`): authenticates callers by their credentials.

    Bearer TOKEN          → security/oidc.py if its `iss` is one of the configured issuers, else security/token.py
    Basic BASE64          → security/basic.py
    a client certificate  → `CertificateProvider`, if the settings have a section [certificate]
    no credentials        → the anonymous role, if the settings name one

Wrong credentials are refused: the caller does not become the anonymous role (as in Pulsar's HTTP), and is not
authenticated by its other credentials. If a caller has both a header and a certificate, the header decides its role,
and the caller is admitted until one of both expires. In Pulsar the client chooses one method, and with a token the
certificate is used only for the connection.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from hmac import compare_digest
from typing import TYPE_CHECKING, Any

from ..proto.errors import InvalidConfiguration, Unauthenticated, Unavailable
from ..proto.names import is_valid_role
from ..runtime.access import (
    AUTHORIZATION_MAX,
    NO_CREDENTIALS,
    OPEN_ACCESS,
    Caller,
    CallerAccess,
    ListenerAccess,
    Principal,
    PrincipalKind,
    TlsFiles,
)
from ..runtime.clock import Clock
from ..runtime.logs import open_audit_log
from ..runtime.network import (
    ByteService,
    Channel,
    Endpoint,
    Network,
    Rep,
    Req,
    Rpc,
    RunningByteServer,
    RunningServer,
    Stream,
    World,
)
from ..runtime.tasks import SystemWorkers, Workers
from .settings import (
    AUTHENTICATION_SECTIONS,
    CertificateSection,
    SecuritySettings,
    describe_secret_source,
    list_sections,
    read_private_file,
    read_secret,
)
from .token import (
    PrincipalCache,
    RevocationList,
    TokenProvider,
    compute_credential_digest,
    format_time,
    read_token_end_ms,
)

if TYPE_CHECKING:
    from cryptography import x509

    from .basic import BasicProvider
    from .oidc import OidcProvider

_LOG = logging.getLogger("magnetar.security")

# --------------------------------------------------------------------------------------------------- certificate
# The principal of a client certificate that TLS has verified.
#
# | certificate | principal |
# |---|---|
# | URI `magnetar://CLUSTER/role/NAME` | CLIENT `NAME` |
# | URI `magnetar://CLUSTER/broker/NAME`, `…/bookie/UUID`, `…/operator/NAME` | MEMBER `broker/NAME`, … |
# | no URI, and `common_name` | CLIENT, the one common name of the subject |
#
# A certificate has at most one URI, and its cluster is this one: a certificate of the test cluster is refused here.
# What is ambiguous is refused, never chosen from: two URIs, two common names, a relative name with several values. The
# names are read as the certificate has them, never out of a printed subject, so a comma in a name is a part of it
# (Pulsar splits at it).


CERTIFICATE_BYTES_MAX = 64 << 10
"""Most bytes of a certificate in PEM; one of RSA-4096 with fifty names has 6 KiB."""

_URI = re.compile(r"magnetar://([A-Za-z0-9._-]+)/(role|broker|bookie|operator)/([^/?#%\s]+)")


class CertificateProvider:
    """Finds the principal that a client certificate names, by the table in the comment before this class. The
    constructor raises InvalidConfiguration if the library for certificates is missing."""

    def __init__(self, settings: CertificateSection, clock: Clock) -> None:
        try:
            import cryptography  # noqa: F401
        except ImportError as error:
            raise InvalidConfiguration("security needs more packages: pip install 'magnetar[security]'") from error
        self._settings = settings
        self._clock = clock
        self._known = PrincipalCache()

    def verify_principal(self, pem: bytes) -> Principal:
        """Returns the principal that a certificate (PEM, verified by TLS) names. Raises Unauthenticated if the
        certificate is too large, has expired, or does not name exactly one principal of this cluster."""
        if len(pem) > CERTIFICATE_BYTES_MAX:
            raise Unauthenticated(f"the client certificate has more than {CERTIFICATE_BYTES_MAX} bytes")
        digest, now_ms = compute_credential_digest(pem), self._clock.wall_ms()
        found = self._known.find(digest, now_ms)
        if found is None:
            found = self._read(pem, now_ms)
            self._known.add(digest, found, found.expires_ms)
        return found

    def _read(self, pem: bytes, now_ms: int) -> Principal:
        certificate, uris, ends_ms = _parsed(pem)
        if now_ms >= ends_ms:
            raise Unauthenticated(
                f"the client certificate has expired at {format_time(ends_ms)};"
                f" it is {format_time(now_ms)} at this server"
            )
        name, kind = self._of_uri(uris) if uris else (self._common_name(certificate), PrincipalKind.CLIENT)
        return Principal(name, kind, "tls", ends_ms, f"{certificate.serial_number:x}")

    def _of_uri(self, uris: list[str]) -> tuple[str, PrincipalKind]:
        match = _URI.fullmatch(uris[0])
        if len(uris) > 1 or match is None:
            raise Unauthenticated("the client certificate has another URI than one magnetar://CLUSTER/role/NAME")
        cluster, kind, name = match.groups()
        if cluster != self._settings.cluster:
            raise Unauthenticated("the client certificate is of another cluster than `cluster` of [certificate] names")
        if not is_valid_role(name) or (kind == "bookie" and not _is_uuid(name)):
            raise Unauthenticated("the magnetar:// URI of the client certificate names no role")
        return (name, PrincipalKind.CLIENT) if kind == "role" else (f"{kind}/{name}", PrincipalKind.MEMBER)

    def _common_name(self, certificate: x509.Certificate) -> str:
        from cryptography.x509.oid import NameOID

        if not self._settings.common_name:
            raise Unauthenticated("the client certificate has no URI magnetar://CLUSTER/role/NAME")
        holders = [rdn for rdn in certificate.subject.rdns if rdn.get_attributes_for_oid(NameOID.COMMON_NAME)]
        if len(holders) != 1 or len(list(holders[0])) != 1:
            raise Unauthenticated("the subject of the client certificate needs exactly one common name, by itself")
        name = next(iter(holders[0])).value
        if not isinstance(name, str) or not is_valid_role(name):
            raise Unauthenticated("the common name of the client certificate is no role")
        return name


def _parsed(pem: bytes) -> tuple[x509.Certificate, list[str], int]:
    """Returns the certificate, its URIs, and when it expires, in milliseconds since the epoch."""
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(pem)
        _ = certificate.subject, certificate.serial_number  # parsed at their first use: here
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        except x509.ExtensionNotFound:
            uris = []
        return certificate, uris, int(certificate.not_valid_after_utc.timestamp() * 1000)
    except Exception:  # of a dozen types without a common base, and some quote the certificate
        raise Unauthenticated("the client certificate does not parse") from None


def _is_uuid(text: str) -> bool:
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


# ------------------------------------------------------------------------------------------------- authenticator


class Authenticator:
    """Authenticates the callers of a broker; implements `runtime.access.Guard`. `workers` are the threads that compare
    passwords and fetch the keys of issuers. The constructor raises InvalidConfiguration if a key cannot be read or is
    of the wrong kind."""

    def __init__(self, settings: SecuritySettings, clock: Clock, workers: Workers | None = None) -> None:
        self._settings = settings
        self._tokens = TokenProvider(settings.token, clock) if settings.token else None
        revoked = settings.token.revoked if settings.token else ""
        self._revoked = RevocationList(revoked, clock) if revoked else None
        workers = workers or SystemWorkers()
        self._oidc = _oidc(settings, clock, workers)
        self._basic = _basic(settings, clock, workers)
        self._certificates = CertificateProvider(settings.certificate, clock) if settings.certificate else None

    async def authenticate(self, caller: Caller) -> Principal:
        """Returns the principal of a caller. Raises Unauthenticated if its credentials are missing, wrong, expired or
        revoked; Unavailable if too many passwords wait to be compared, or if an issuer of tokens does not answer."""
        found = await self._identified(caller)
        return replace(found, is_super=True) if self._is_super(found) else found

    async def _identified(self, caller: Caller) -> Principal:
        shown = None
        if self._certificates is not None and caller.certificate:
            shown = self._certificates.verify_principal(caller.certificate)
        if caller.authorization:
            named = await self._of_header(caller)
            return named if shown is None else _until_the_first_expires(named, shown)
        if shown is not None:
            return shown
        if role := self._settings.authentication.anonymous_role:
            return Principal(role, PrincipalKind.ANONYMOUS)
        raise Unauthenticated(f"this server asks who calls: bring {self._wanted()}")

    async def _of_header(self, caller: Caller) -> Principal:
        scheme, _, value = caller.authorization[:AUTHORIZATION_MAX].partition(" ")
        if scheme.lower() == "bearer":
            token = value.strip()
            if self._oidc is not None and (self._tokens is None or self._oidc.is_issuer_known(token)):
                return self._check_revoked(await self._oidc.verify_principal(token))
            if self._tokens is not None:
                return self._check_revoked(self._tokens.verify_principal(token))
        if scheme.lower() == "basic" and self._basic is not None:
            return await self._basic.authenticate(value.strip(), caller)
        raise Unauthenticated(f"the header `authorization` does not fit: bring {self._wanted()}")

    def _check_revoked(self, principal: Principal) -> Principal:
        """Returns the principal. Raises Unauthenticated if its token is revoked."""
        if self._revoked is not None and self._revoked.is_revoked(principal):
            raise Unauthenticated("the token is revoked")
        return principal

    def why_lapsed(self, principal: Principal) -> str:
        if principal.method == "basic" and self._basic is not None:
            return self._basic.why_lapsed(principal)
        if principal.method != "token":
            return ""
        if self._revoked is not None and self._revoked.is_revoked(principal):
            return "its token is revoked"
        return self._tokens.why_lapsed(principal) if self._tokens is not None and principal.proof else ""

    def _wanted(self) -> str:
        """Returns a text that says which credentials are accepted."""
        ways = {
            "a token": self._tokens or self._oidc,
            "a user and password": self._basic,
            "a client certificate": self._certificates,
        }
        return " or ".join(name for name, way in ways.items() if way is not None)

    def authorize(self, principal: Principal, path: str) -> None:
        """Does nothing, and admits every call. Each service of the broker checks permissions itself (broker/access/),
        because only the service knows which object a request is about."""

    def _is_super(self, principal: Principal) -> bool:
        known = principal.name in self._settings.authorization.super_users
        return known and principal.kind is PrincipalKind.CLIENT


def _oidc(settings: SecuritySettings, clock: Clock, workers: Workers) -> OidcProvider | None:
    if settings.oidc is None:
        return None
    from .oidc import OidcProvider  # it needs urllib.request: 50 ms of a start

    return OidcProvider(settings.oidc, clock, workers)


def _basic(settings: SecuritySettings, clock: Clock, workers: Workers) -> BasicProvider | None:
    if settings.basic is None:
        return None
    from .basic import BasicProvider

    return BasicProvider(settings.basic, clock, workers)


def _until_the_first_expires(named: Principal, shown: Principal) -> Principal:
    """Returns the principal `named`, which expires when the first of the two does."""
    if named.expires_ms and named.expires_ms <= shown.expires_ms:
        return named
    return replace(named, expires_ms=shown.expires_ms)


class SecuredNetwork:
    """A network for a broker: its listeners authenticate their callers, and its calls to other brokers contain the
    broker's own token or certificate. Wraps another `runtime.network.Network`; peer connections and outgoing TCP
    connections are those of the other network."""

    def __init__(self, inner: Network, settings: SecuritySettings, clock: Clock, workers: Workers) -> None:
        """Creates the network and its guard. Raises InvalidConfiguration if a key, a token or a certificate cannot be
        used.
        """
        if settings.tls is not None:
            read_private_file(settings.tls.key)
        self._inner = inner
        self._listener = ListenerAccess(Authenticator(settings, clock, workers), settings.tls_files)
        self.own_token = BrokerOwnToken(settings.broker.token, clock) if settings.broker.token else None
        self._caller = _own_access(settings, self.own_token)
        self.connect_bytes = inner.connect_bytes
        self.serve_peers, self.connect_peer, self.generate_keys = (
            inner.serve_peers,
            inner.connect_peer,
            inner.generate_keys,
        )

    async def serve(
        self, endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess = OPEN_ACCESS
    ) -> RunningServer:
        access = replace(self._listener, limits=access.limits, memory=access.memory)
        return await self._inner.serve(endpoint, services, access)

    async def serve_bytes(
        self, endpoint: Endpoint, service: ByteService, access: ListenerAccess = OPEN_ACCESS
    ) -> RunningByteServer:
        access = replace(self._listener, limits=access.limits, memory=access.memory)
        return await self._inner.serve_bytes(endpoint, service, access)

    def connect(self, endpoint: Endpoint, access: CallerAccess = NO_CREDENTIALS) -> Channel:
        return BrokerChannel(self._inner.connect(endpoint, self._caller))


class BrokerChannel:
    """A channel to another broker; implements `runtime.network.Channel`. If the other broker refuses the credentials of
    this broker, raises Unavailable instead, because the program whose request caused this call is not at fault."""

    def __init__(self, inner: Channel) -> None:
        self._inner = inner
        self.is_answering, self.close = inner.is_answering, inner.close

    @property
    def endpoint(self) -> Endpoint:
        return self._inner.endpoint

    async def call(self, rpc: Rpc[Req, Rep], request: Req, *, timeout_s: float) -> Rep:
        try:
            return await self._inner.call(rpc, request, timeout_s=timeout_s)
        except Unauthenticated as error:
            raise _own_refusal(self.endpoint, error) from error

    def stream(self, rpc: Rpc[Any, Any]) -> Stream[Any, Any]:
        return AuthenticatedBrokerStream(self._inner.stream(rpc), self.endpoint)


class AuthenticatedBrokerStream:
    """A stream to another broker; implements `runtime.network.Stream`. If the other broker refuses the credentials of
    this broker, `receive` raises Unavailable instead, as `BrokerChannel` does."""

    def __init__(self, inner: Stream[Any, Any], endpoint: Endpoint) -> None:
        self._inner, self._endpoint = inner, endpoint
        self.send_nowait, self.send, self.wait_drained = inner.send_nowait, inner.send, inner.wait_drained
        self.wait_sent, self.close, self.cancel = inner.wait_sent, inner.close, inner.cancel

    @property
    def queued_bytes(self) -> int:
        return self._inner.queued_bytes

    @property
    def sent_bytes(self) -> int:
        return self._inner.sent_bytes

    async def receive(self) -> Sequence[Any]:
        try:
            return await self._inner.receive()
        except Unauthenticated as error:
            raise _own_refusal(self._endpoint, error) from error


def _own_refusal(endpoint: Endpoint, error: Unauthenticated) -> Unavailable:
    return Unavailable(
        f"the broker at {endpoint} refuses the own token or certificate of the broker that asks it"
        f" ([broker] of its security settings), not yours: {error}"
    )


TOKEN_EXPIRY_WARNING_MS = 14 * 86_400_000
"""A broker whose own token ends within so many ms warns of it in its log, daily."""


class BrokerOwnToken:
    """The token with which this broker calls other brokers. It is read again for each call. When the broker starts, a
    log line says when the token expires. From TOKEN_EXPIRY_WARNING_MS before that time on, a warning is logged once a
    day. The constructor raises InvalidConfiguration if there is no token."""

    def __init__(self, source: str, clock: Clock) -> None:
        self._source, self._clock = source, clock
        self._token, self._ends_ms, self._warned_ms = "", 0, 0
        self.read()
        if self._ends_ms:
            _LOG.info(
                "%s, the broker's own token, ends at %s", describe_secret_source(source), format_time(self._ends_ms)
            )

    def read(self) -> str:
        """Reads the token from its source and returns it. Logs the warning if it is due. Raises InvalidConfiguration if
        the token cannot be read."""
        token = read_token(self._source)
        if not compare_digest(token.encode(), self._token.encode()):
            self._token, self._ends_ms = token, read_token_end_ms(token)
        now_ms = self._clock.wall_ms()
        if (
            self._ends_ms
            and self._ends_ms - now_ms < TOKEN_EXPIRY_WARNING_MS
            and now_ms - self._warned_ms >= 86_400_000
        ):
            self._warned_ms = now_ms
            _LOG.warning(
                "%s, the broker's own token, ends at %s: no other broker answers this one then; write a new one to the"
                " same file", describe_secret_source(self._source), format_time(self._ends_ms)
            )  # fmt: skip
        return token

    def ends_ms(self) -> int:
        """Returns when the token expires, in ms since the epoch; 0 if it never expires. If the token cannot be read
        now, returns the time that was read last."""
        with suppress(InvalidConfiguration):
            self.read()
        return self._ends_ms


def _own_access(settings: SecuritySettings, token: BrokerOwnToken | None) -> CallerAccess:
    """Returns the credentials of this broker for calls to others: its token if it has one, and its certificate if
    callers need one.
    """
    tls = settings.tls
    files = None
    if tls is not None:
        files = TlsFiles(tls.certificate, tls.key, settings.broker.ca) if tls.ca else TlsFiles(ca=settings.broker.ca)
    return CallerAccess(files, None if token is None else lambda: f"Bearer {token.read()}")


def read_token(source: str) -> str:
    """Returns the token that `source` names (see `read_secret`), without white space at its ends. Raises
    InvalidConfiguration if it cannot be read, or is not ASCII."""
    try:
        return read_secret(source).reveal_bytes().decode("ascii").strip()
    except UnicodeDecodeError:
        raise InvalidConfiguration(f"{describe_secret_source(source)} has no token") from None


def make_secured_world(world: World, path: str) -> World:
    """Returns the world of a broker, with a network that is secured by the settings in the file `path`. Starts the
    audit log if the settings name a file for it. Raises InvalidConfiguration if the settings are invalid, if they have
    no section by which callers can authenticate, if a key, a token or a certificate cannot be used, or if the file of
    the audit log cannot be written."""
    settings = SecuritySettings.load(path)
    if not settings.authenticates_callers:
        raise InvalidConfiguration(
            f"{path}: nothing says who may call a broker: it needs a section {list_sections(AUTHENTICATION_SECTIONS)}"
        )
    network = SecuredNetwork(world.network, settings, world.clock, world.workers)
    if settings.audit.file:
        open_audit_log(settings.audit.file)
    own = network.own_token
    return replace(world, network=network, own_token_ends_ms=world.own_token_ends_ms if own is None else own.ends_ms)
