"""The guard of a listener: who a caller is, by its credentials (`runtime.access.Guard`).

    Bearer TOKEN    → security/token.py
    nothing         → the anonymous role, where the configuration names one

Wrong credentials are refused: they never become the anonymous role (Pulsar's HTTP does that). A verified token is
remembered until it expires, so that the next call costs a look-up. The key's file is looked at every KEY_CHECK_S; a new
key is used from then on, and what the old one verified is forgotten. A file that cannot be used keeps the key before in
use.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace

from ..proto.errors import InvalidConfiguration, MagnetarError, Unauthenticated, Unauthorized
from ..runtime.access import (
    AUTHORIZATION_MAX,
    NOTHING,
    OPEN,
    Caller,
    CallerAccess,
    ListenerAccess,
    Principal,
    PrincipalKind,
    TlsFiles,
)
from ..runtime.clock import Clock
from ..runtime.network import Channel, Endpoint, Network, Serving
from ..runtime.world import World
from .secrets import read_secret
from .settings import SecuritySettings, TokenSection
from .token import TokenVerifier

ADMIN = "/magnetar.wire.Admin/"
OF_EVERY_ROLE = {"/magnetar.wire.Admin/CreateSubscription"}
"""What the SDK itself asks: a consumer makes the first subscription of its dead letter topic."""

KEY_CHECK_S = 10.0
REMEMBERED_MAX = 10_000
"""Verified tokens: a verification takes 50 to 200 µs, a look-up 2."""

_LOG = logging.getLogger("magnetar.security")


class Authenticator:
    """InvalidConfiguration: a key cannot be read, or does not fit."""

    def __init__(self, settings: SecuritySettings, clock: Clock) -> None:
        assert settings.token is not None, "the settings were checked"
        self._settings = settings
        self._clock = clock
        self._tokens = _Tokens(settings.token, clock)

    async def authenticate(self, caller: Caller) -> Principal:
        """Unauthenticated."""
        scheme, _, value = caller.authorization[:AUTHORIZATION_MAX].partition(" ")
        if not caller.authorization:
            if role := self._settings.authentication.anonymous_role:
                return Principal(role, PrincipalKind.ANONYMOUS)
            raise Unauthenticated("this server asks who calls: bring a token")
        if scheme.lower() != "bearer":
            raise Unauthenticated("the header `authorization` is not `Bearer TOKEN`: this server takes tokens")
        return self._tokens.principal(value.strip())

    def authorize(self, principal: Principal, path: str) -> None:
        """Administration is of super users, all else of every role."""
        if path.startswith(ADMIN) and path not in OF_EVERY_ROLE and not self._is_super(principal):
            raise Unauthorized(f"{principal} is no super user, and only those may administer")

    def _is_super(self, principal: Principal) -> bool:
        known = principal.name in self._settings.authorization.super_users
        return known and principal.kind is PrincipalKind.CLIENT


class _Tokens:
    def __init__(self, settings: TokenSection, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._verifier = TokenVerifier(settings, clock)
        self._stamp = self._looked()
        self._look_at = clock.monotonic() + KEY_CHECK_S
        self._known: OrderedDict[bytes, Principal] = OrderedDict()

    def principal(self, token: str) -> Principal:
        self._renew_key()
        digest = hashlib.sha256(token.encode(errors="replace")).digest()
        known = self._known.get(digest)
        if known is not None and (not known.expires_ms or self._clock.wall_ms() < known.expires_ms):
            self._known.move_to_end(digest)
            return known
        found = self._verifier.verify(token)
        self._known[digest] = found
        if len(self._known) > REMEMBERED_MAX:
            self._known.popitem(last=False)
        return found

    def _renew_key(self) -> None:
        now = self._clock.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + KEY_CHECK_S
        stamp = self._looked()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._verifier = TokenVerifier(self._settings, self._clock)
        except MagnetarError as error:
            _LOG.error("the new key of tokens is not used, the one before stays: %s", error)
            return
        self._known.clear()
        _LOG.info("tokens are verified with a new key from now on")

    def _looked(self) -> object:
        source = self._settings.secret_key or self._settings.public_key
        try:
            found = os.stat(source.removeprefix("file:").removeprefix("//"))
        except (OSError, ValueError):
            return None  # `env:` and `data:` do not change
        return found.st_ino, found.st_mtime_ns, found.st_size


class SecuredNetwork:
    """A process' network whose gRPC listener asks who calls, and whose calls to other brokers bring its own token."""

    def __init__(self, inner: Network, settings: SecuritySettings, clock: Clock) -> None:
        """InvalidConfiguration: a key, a token or a certificate cannot be used."""
        read_token(settings.broker.token)
        self._inner = inner
        self._listener = ListenerAccess(Authenticator(settings, clock), settings.tls_files)
        own = None if settings.tls is None else TlsFiles(ca=settings.broker.ca)
        self._caller = CallerAccess(own, lambda: f"Bearer {read_token(settings.broker.token)}")
        self.serve_bytes, self.connect_bytes = inner.serve_bytes, inner.connect_bytes
        self.serve_peers, self.peer, self.new_keys = inner.serve_peers, inner.peer, inner.new_keys

    async def serve(
        self, endpoint: Endpoint, services: Sequence[tuple[str, object]], access: ListenerAccess = OPEN
    ) -> Serving:
        return await self._inner.serve(endpoint, services, self._listener)

    def connect(self, endpoint: Endpoint, access: CallerAccess = NOTHING) -> Channel:
        return self._inner.connect(endpoint, self._caller)


def read_token(source: str) -> str:
    """InvalidConfiguration."""
    try:
        return read_secret(source).reveal().decode("ascii").strip()
    except UnicodeDecodeError as error:
        raise InvalidConfiguration(f"{source} has no token") from error


def secured(world: World, path: str) -> World:
    """The world of a broker, by the settings in the file. InvalidConfiguration."""
    settings = SecuritySettings.load(path)
    if settings.token is None:
        raise InvalidConfiguration(f"{path}: nothing says who may call a broker: it needs a section [token]")
    return replace(world, network=SecuredNetwork(world.network, settings, world.clock))
