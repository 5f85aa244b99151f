"""Tokens of OpenID Connect: verified with the public keys that their issuer publishes.

The issuer of a token (`iss`) must be exactly one of those in the settings; its discovery document names the address of
its keys. Keys are fetched again after KEYS_REFRESH_S; a token with an unknown `kid` fetches them too, at most every
KEYS_FETCH_INTERVAL_MIN_S. Each issuer has a worker that fetches, so that the event loop never waits. If an issuer does
not answer, its keys stay in use until they are KEYS_EXPIRE_S old. Without keys its callers get Unavailable, and for
FETCH_RETRY_S after a failure they get it at once.

A token must have `iss`, `sub`, `aud`, `iat` and `exp`. Pulsar requires `nbf` too, which several issuers do not set; it
is compared where it is set. Of the headers of a token only `kid` is used, to choose a key of the issuer.

Also in this file, below its heading: JSON Web Key Sets (jwks).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..proto.errors import InvalidConfiguration, MagnetarError, Unauthenticated, Unavailable
from ..runtime.access import Principal, TlsFiles
from ..runtime.clock import Clock
from ..runtime.tasks import Worker, Workers
from ..runtime.tcp.http_client import REQUEST_TIMEOUT_S, JsonClient
from .settings import OidcSection
from .token import (
    RSA_BITS_MAX,
    ClaimRules,
    PrincipalCache,
    compute_credential_digest,
    decode_unverified_token,
    find_public_key_algorithms,
    verify_claims,
    verify_principal_claims,
)

# ---------------------------------------------------------------------------------------------------------- jwks
# JSON Web Key Sets: the public keys of an issuer. A key that cannot be used is left out, with all it says.


KEYS_PER_ISSUER_MAX = 100
KEY_ID_CHARACTERS_MAX = 256
_NUMBER_MAX = RSA_BITS_MAX // 6 + 8  # characters of base64
_EXPONENT_MAX = 16
_ALLOWED = {"RS256", "RS384", "RS512", "ES256", "ES384", "ES512"}
"""Algorithms that are taken, as by Pulsar's OpenID provider."""


class IssuerPublicKey(NamedTuple):
    """A public key of an issuer of tokens, with which the signatures of its tokens are verified. `kid`: its id, "" if
    it has none; `algorithms`: those for which it may be used; `key`: an object of the package `cryptography`."""

    kid: str
    algorithms: tuple[str, ...]
    key: Any

    def __repr__(self) -> str:
        return f"<key {self.kid!r} of {', '.join(self.algorithms)}>"


def parse_issuer_keys(document: Mapping[str, Any]) -> tuple[IssuerPublicKey, ...]:
    """Returns those keys of the key set `document` of an issuer that can verify signatures. Looks at the first
    KEYS_PER_ISSUER_MAX keys. Of keys with the same `kid`, returns only the first. Returns () if the document is not a
    key set, or has no such key."""
    found = document.get("keys")
    if not isinstance(found, list):
        return ()
    keys: dict[str, IssuerPublicKey] = {}
    for each in found[:KEYS_PER_ISSUER_MAX]:
        key = _parsed(each)
        if key is not None:
            keys.setdefault(key.kid, key)
    return tuple(keys.values())


def _parsed(jwk: object) -> IssuerPublicKey | None:
    if not isinstance(jwk, dict) or jwk.get("use", "sig") != "sig" or "d" in jwk:
        return None
    kid, algorithm = jwk.get("kid", ""), jwk.get("alg")
    if not isinstance(kid, str) or len(kid) > KEY_ID_CHARACTERS_MAX:
        return None
    key = _public(jwk)
    fits = tuple(each for each in find_public_key_algorithms(key) if each in _ALLOWED and algorithm in (None, each))
    return IssuerPublicKey(kid, fits, key) if fits else None


def _public(jwk: Mapping[str, Any]) -> object:
    from jwt.algorithms import ECAlgorithm, RSAAlgorithm

    named = {name: jwk.get(name) for name in ("kty", "crv", "x", "y", "n", "e") if name in jwk}
    if not all(isinstance(each, str) and len(each) <= _NUMBER_MAX for each in named.values()):
        return None
    if len(named.get("e") or "") > _EXPONENT_MAX:  # a large one makes each verification slow
        return None
    try:
        match named.get("kty"):
            case "RSA":
                return RSAAlgorithm.from_jwk(named)
            case "EC":
                return ECAlgorithm.from_jwk(named)
    except Exception:  # of several types without a common base
        return None
    return None


# ---------------------------------------------------------------------------------------------------------- oidc


KEYS_REFRESH_S = 18 * 3600.0
KEYS_EXPIRE_S = 24 * 3600.0
KEYS_FETCH_INTERVAL_MIN_S = 300.0
FETCH_RETRY_S = 5.0
DISCOVERY_PATH = "/.well-known/openid-configuration"

_LOG = logging.getLogger("magnetar.security")


class OidcProvider:
    """Authenticates callers by tokens of OpenID issuers. The constructor contacts no issuer; it raises
    InvalidConfiguration if the address of an issuer is not https, or `ca` cannot be read."""

    def __init__(self, settings: OidcSection, clock: Clock, workers: Workers, client: JsonClient | None = None) -> None:
        client = client or JsonClient(clock, TlsFiles(ca=settings.ca), require_https=settings.require_https)
        for issuer in settings.issuers:
            if not client.is_url_allowed(issuer):
                raise InvalidConfiguration(f"the issuer {issuer} of [oidc] does not begin with https://")
        self._clock = clock
        self._issuers = {issuer: _Issuer(issuer, client, clock, workers) for issuer in settings.issuers}
        required = ("iss", "sub", "aud", "iat", "exp", settings.role_claim)
        self._rules = ClaimRules(settings.role_claim, "aud", settings.audiences, settings.clock_skew_s, required)
        self._known = PrincipalCache()
        self._version = 0

    def is_issuer_known(self, token: str) -> bool:
        """Returns whether the token names one of the configured issuers. The token is not verified. Raises
        Unauthenticated if the text is not a token."""
        return self._issuer_of(decode_unverified_token(token)[1].get("iss")) is not None

    async def verify_principal(self, token: str) -> Principal:
        """Verifies a token and returns its principal. May wait for the issuer's keys. Raises Unauthenticated if the
        token is not valid, Unavailable if the issuer's keys are not known and the issuer does not answer."""
        version = sum(each.version for each in self._issuers.values())
        if version != self._version:
            self._version = version
            self._known.clear()
        digest = compute_credential_digest(token)
        found = self._known.find(digest, self._clock.wall_ms())
        if found is None:
            found = await self._verified(token)
            self._known.add(digest, found, found.expires_ms)
        return found

    async def _verified(self, token: str) -> Principal:
        header, claims = decode_unverified_token(token)
        issuer = self._issuer_of(claims.get("iss"))
        if issuer is None:
            raise Unauthenticated("the token is of an issuer that this server does not know")
        kid = header.get("kid", "")
        if not isinstance(kid, str) or len(kid) > KEY_ID_CHARACTERS_MAX:
            raise Unauthenticated("the token's `kid` is no short text")
        key = await issuer.key(kid)
        if key is None:
            raise Unauthenticated("the token is not signed with a key of its issuer")
        return verify_principal_claims(
            verify_claims(token, key.key, key.algorithms), self._rules, self._clock.wall_ms()
        )

    def _issuer_of(self, name: object) -> _Issuer | None:
        return self._issuers.get(name) if isinstance(name, str) else None


class _Issuer:
    """The keys of one issuer. `version` is incremented when they change."""

    def __init__(self, name: str, client: JsonClient, clock: Clock, workers: Workers) -> None:
        self.version = 0
        self._name = name
        self._client = client
        self._clock = clock
        self._workers = workers
        self._worker: Worker | None = None
        self._keys: tuple[IssuerPublicKey, ...] = ()
        self._shown: object = None  # the document of the keys
        self._fetched_at: float | None = None
        self._asked_at = -KEYS_FETCH_INTERVAL_MIN_S
        self._failure: MagnetarError | None = None
        self._fetching: asyncio.Future[dict[str, object]] | None = None

    async def key(self, kid: str) -> IssuerPublicKey | None:
        """Returns the issuer's key with this id, or None if the issuer has no such key. Raises Unavailable if the
        issuer does not answer."""
        age_s = self._age_s()
        if age_s is None or age_s >= KEYS_EXPIRE_S:
            await self._fetch()
        elif age_s >= KEYS_REFRESH_S and self._may_ask():
            self._start()
        found = self._find(kid)
        if found is None and self._may_ask():
            await self._fetch()
            found = self._find(kid)
        if found is None and self._failure is not None:
            raise self._unavailable(self._failure)
        return found

    def _may_ask(self) -> bool:
        """Returns whether the keys may be fetched again, because of an unknown `kid` or because they are old."""
        pause_s = FETCH_RETRY_S if self._failure else KEYS_FETCH_INTERVAL_MIN_S
        return self._clock.monotonic() - self._asked_at >= pause_s

    def _find(self, kid: str) -> IssuerPublicKey | None:
        if not kid and len(self._keys) == 1:
            return self._keys[0]
        return next((each for each in self._keys if kid and each.kid == kid), None)

    def _age_s(self) -> float | None:
        return None if self._fetched_at is None else self._clock.monotonic() - self._fetched_at

    async def _fetch(self) -> None:
        if self._failure is not None and self._fetching is None and not self._may_ask():
            raise self._unavailable(self._failure)
        fetching = self._start()
        await asyncio.wait((fetching,), timeout=2 * REQUEST_TIMEOUT_S)
        if not fetching.done() or self._failure is not None:
            raise self._unavailable(self._failure)

    def _unavailable(self, failure: MagnetarError | None) -> Unavailable:
        return Unavailable(f"the keys of the issuer {self._name} are not known: {failure or 'it does not answer'}")

    def _start(self) -> asyncio.Future[dict[str, object]]:
        """Starts a fetch of the keys, or joins the one that is under way."""
        if self._fetching is None:
            self._asked_at = self._clock.monotonic()
            if self._worker is None:
                self._worker = self._workers.start("oidc")
            self._fetching = self._worker.run(self._ask)
            self._fetching.add_done_callback(self._fetched)
        return self._fetching

    def _ask(self) -> dict[str, object]:
        """Fetches the keys; runs in the worker."""
        found = self._client.request_json(self._name.removesuffix("/") + DISCOVERY_PATH)
        if found.get("issuer") != self._name:
            raise Unavailable("its discovery document is of another issuer")
        address = found.get("jwks_uri")
        if not isinstance(address, str) or not self._client.is_url_allowed(address):
            raise Unavailable("its discovery document has no `jwks_uri` with https://")
        return self._client.request_json(address)

    def _fetched(self, fetching: asyncio.Future[dict[str, object]]) -> None:
        self._fetching = None
        if fetching.cancelled():
            return
        failure = fetching.exception()
        keys = () if failure is not None else parse_issuer_keys(fetching.result())
        if not keys:
            why = failure if isinstance(failure, MagnetarError) else Unavailable(f"no keys ({type(failure).__name__})")
            self._failure = why
            _LOG.error("the keys of the issuer %s are not fetched: %s", self._name, why)
            return
        self._failure, self._fetched_at = None, self._clock.monotonic()
        if fetching.result() != self._shown:
            self._keys, self._shown, self.version = keys, fetching.result(), self.version + 1
            _LOG.info("the issuer %s has %d keys", self._name, len(keys))
