"""JSON Web Tokens: verifies them, and finds the role of a caller by the rules of Pulsar's token provider.

A key verifies with its own algorithms only: a public key never as an HMAC secret, and "none" never. Headers that name
keys or addresses (jku, x5u, jwk) are not followed. Time claims are compared with the server's wall clock, which
may be wrong: a token that is not valid yet, or has expired, is refused with both times. Source: Pulsar's
AuthenticationProviderToken.

Also in this file, each below its heading: principals of credentials that were verified (remembered); tokens that are
refused before their end (revoked).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import hmac
import json
import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..proto.errors import InvalidConfiguration, InvalidRequest, Unauthenticated
from ..proto.names import ROLE_CHARACTERS_MAX, is_valid_role
from ..runtime.access import Principal, PrincipalKind
from ..runtime.clock import Clock
from .settings import Secret, TokenSection, WatchedValue, read_secret

# ---------------------------------------------------------------------------------------------------- remembered
# Principals of credentials that were verified: a look-up takes 2 µs, a verification 50 to 200, a password 80,000.


CACHED_TOKENS_MAX = 10_000


def compute_credential_digest(credential: str | bytes) -> bytes:
    """Returns the SHA-256 digest of a credential. Caches store the verified principal under this digest."""
    return hashlib.sha256(credential if isinstance(credential, bytes) else credential.encode(errors="replace")).digest()


class PrincipalCache:
    """A cache of the principals of verified credentials, by the digests of the credentials. When it is full, it evicts
    the principal that was not used for the longest time.

    `now` and `until` are times of the caller's clock. A principal that is added with `until` 0 does not expire.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()

    def find(self, digest: bytes, now: float) -> Principal | None:
        """Returns the principal with this digest; None if it is not in the cache, or has expired at the time `now`."""
        principal, until = self._known.get(digest, (None, 0.0))
        if principal is None or (until and now >= until):
            return None
        self._known.move_to_end(digest)
        return principal

    def add(self, digest: bytes, principal: Principal, until: float) -> None:
        """Adds a principal, which `find` returns before the time `until`; 0: always."""
        self._known[digest] = principal, until
        if len(self._known) > CACHED_TOKENS_MAX:
            self._known.popitem(last=False)

    def clear(self) -> None:
        """Removes all principals."""
        self._known.clear()


# --------------------------------------------------------------------------------------------------------- token


TOKEN_CHARACTERS_MAX = 16 << 10
WHOLE_HOUR_TOLERANCE_MS = 120_000
"""Milliseconds around a whole hour that still count as one: clocks and lifetimes are not exact."""
SECRET_BYTES_MIN = 32
"""Least bytes of an HMAC key, as RFC 7518 asks for HS256."""
RSA_BITS_MIN, RSA_BITS_MAX = 2048, 16_384
PUBLIC_KEYS_MAX = 4
"""Most public keys in one file: each is tried, so a wrong token costs that many verifications."""

_NO_TOKEN_FIELD = "that is no token: it has three parts of base64, signed JSON"
_HMAC = ("HS256", "HS384", "HS512")
_RSA = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")
_PEM = re.compile(rb"-----BEGIN ([A-Z ]+)-----.*?-----END \1-----", re.DOTALL)
_EC = {"secp256r1": "ES256", "secp384r1": "ES384", "secp521r1": "ES512"}


class TokenProvider:
    """Authenticates callers by tokens: verifies them with the current key, and caches the results. When the key
    changes, drops all cached results."""

    def __init__(self, settings: TokenSection, clock: Clock) -> None:
        """Creates the provider. Raises InvalidConfiguration like TokenVerifier."""
        source = settings.secret_key or settings.public_key
        self._verifier = WatchedValue(source, lambda: TokenVerifier(settings, clock), clock)
        self._version = 0
        self._clock = clock
        self._known = PrincipalCache()

    def verify_principal(self, token: str) -> Principal:
        """Verifies a token and returns its principal. Raises Unauthenticated if the token is not valid."""
        verifier = self._verifier.load_current()
        if self._version != self._verifier.version:
            self._version = self._verifier.version
            self._known.clear()
        digest = compute_credential_digest(token)
        found = self._known.find(digest, self._clock.wall_ms())
        if found is None:
            found = verifier.verify(token)
            self._known.add(digest, found, found.expires_ms)
        return found

    def why_lapsed(self, principal: Principal) -> str:
        """Returns the reason why the principal's token is not valid any more; empty if it is still valid. This provider
        must have authenticated the principal."""
        known = [hmac.compare_digest(principal.proof, proof) for proof in self._verifier.load_current().proofs]
        return "" if any(known) else "the key of its token is replaced"


class TokenVerifier:
    """Verifies tokens with one secret key, or with the public keys of a file; the signature must match one of them.

    The constructor raises InvalidConfiguration if a key cannot be read, is weak, or is of the wrong kind. `proofs`: a
    digest of each key, which principals have as their `proof`.
    """

    def __init__(self, settings: TokenSection, clock: Clock) -> None:
        self._clock = clock
        data = (
            read_secret(settings.secret_key).reveal_bytes()
            if settings.secret_key
            else _public_bytes(settings.public_key)
        )
        self._keys = [
            (key, _chosen(possible, settings.algorithm), compute_credential_digest(own))
            for key, possible, own in _verification_keys(settings, data)
        ]
        self.proofs = [proof for _, _, proof in self._keys]
        audiences = (settings.audience,) if settings.audience else ()
        self._rules = ClaimRules(settings.role_claim, settings.audience_claim, audiences, settings.clock_skew_s)

    def verify(self, token: str) -> Principal:
        """Verifies a token and returns its principal. Raises Unauthenticated if the token is not valid; the error text
        quotes nothing of the token except its times."""
        claims, proof = self._claims(token)
        return replace(verify_principal_claims(claims, self._rules, self._clock.wall_ms()), proof=proof)

    def _claims(self, token: str) -> tuple[Mapping[str, Any], bytes]:
        """Returns the claims of a token, and the digest of the key that signed them."""
        for key, algorithms, proof in self._keys[:-1]:
            with contextlib.suppress(Unauthenticated):
                return verify_claims(token, key, algorithms), proof
        key, algorithms, proof = self._keys[-1]
        return verify_claims(token, key, algorithms), proof


@dataclass(frozen=True, slots=True)
class ClaimRules:
    """The rules for the claims of a token: which claim contains the role, which claims are required, and how many
    seconds clocks may differ. The token must be for one of `audiences`; if `audiences` is empty, any audience is
    accepted, as in Pulsar."""

    role_claim: str = "sub"
    audience_claim: str = "aud"
    audiences: tuple[str, ...] = ()
    clock_skew_s: int = 0
    required: tuple[str, ...] = ()


def verify_claims(token: str, key: Any, algorithms: Sequence[str]) -> Mapping[str, Any]:
    """Verifies the signature of a token and returns its claims. Raises Unauthenticated if the token is malformed or too
    long, or was not signed by the key with one of the algorithms; InvalidConfiguration if the packages of
    `magnetar[security]` are missing. Does not check the claims: `verify_principal_claims` does."""
    jwt = _sized(token)
    options = {f"verify_{each}": False for each in ("exp", "nbf", "iat", "aud", "iss", "sub", "jti")}
    try:
        claims: Mapping[str, Any] = jwt.decode(token, key, algorithms=algorithms, options=options)
    except jwt.InvalidSignatureError:
        raise Unauthenticated("the token is not signed with a key of this server or its issuer") from None
    except jwt.InvalidAlgorithmError:
        raise Unauthenticated(f"the token's algorithm is none of {', '.join(algorithms)}") from None
    except (jwt.InvalidTokenError, ValueError, TypeError, RecursionError, OverflowError):
        raise Unauthenticated(_NO_TOKEN_FIELD) from None
    return claims


def decode_unverified_token(token: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Decodes a token and returns its header and claims, without any check. Must be used only to choose the key that
    verifies the token. Raises Unauthenticated if the text is not a token; InvalidConfiguration if the packages of
    `magnetar[security]` are missing."""
    jwt = _sized(token)
    try:
        found = jwt.decode_complete(token, options={"verify_signature": False})
    except (jwt.InvalidTokenError, ValueError, TypeError, RecursionError, OverflowError):
        raise Unauthenticated(_NO_TOKEN_FIELD) from None
    return found["header"], found["payload"]


def read_token_end_ms(token: str) -> int:
    """Returns when a token expires, in ms since the epoch, without verifying the token. Returns 0 if it never expires,
    or if the text is not a token. Raises InvalidConfiguration if the packages of `magnetar[security]` are missing."""
    try:
        return _time_ms(decode_unverified_token(token)[1], "exp") or 0
    except Unauthenticated:
        return 0


def _sized(token: str) -> Any:
    if len(token) > TOKEN_CHARACTERS_MAX:
        raise Unauthenticated(f"the token has {len(token)} characters; at most {TOKEN_CHARACTERS_MAX} are read")
    return _jwt()


def verify_principal_claims(claims: Mapping[str, Any], rules: ClaimRules, now_ms: int) -> Principal:
    """Checks the claims of a token and returns its principal. Raises Unauthenticated if a claim is missing or
    malformed, or if the token has expired, is not valid yet, or is for another audience. `now_ms`: ms since the
    epoch."""
    missing = [name for name in rules.required if name not in claims]
    if missing:
        raise Unauthenticated(f"the token has no claim {missing[0]!r}")
    skew_ms = 1000 * rules.clock_skew_s
    if "iat" in rules.required and (_time_ms(claims, "iat") or 0) > now_ms + skew_ms:
        raise Unauthenticated(f"the token was made in the future; it is {format_time(now_ms)} at this server")
    expires_ms = _check_times(claims, skew_ms, now_ms)
    _check_audience(claims, rules)
    identity = claims.get("jti", "")
    return Principal(
        _role(claims, rules.role_claim), PrincipalKind.CLIENT, "token", expires_ms,
        identity if isinstance(identity, str) and len(identity) <= ROLE_CHARACTERS_MAX else "",
    )  # fmt: skip


def _check_times(claims: Mapping[str, Any], skew_ms: int, now_ms: int) -> int:
    """Returns when the token expires, in milliseconds since the epoch; 0 if it does not. Raises Unauthenticated if it
    is not valid now.
    """
    ends_ms, begins_ms = _time_ms(claims, "exp"), _time_ms(claims, "nbf")
    if begins_ms is not None and now_ms + skew_ms < begins_ms:
        hint = _clocks(begins_ms - now_ms)
        raise Unauthenticated(
            f"the token is valid from {format_time(begins_ms)} on; it is {format_time(now_ms)} at this server{hint}"
        )
    if ends_ms is None:
        return 0
    if ends_ms + skew_ms <= now_ms:
        hint = _clocks(now_ms - ends_ms)
        raise Unauthenticated(
            f"the token has expired at {format_time(ends_ms)}; it is {format_time(now_ms)} at this server{hint}"
        )
    return ends_ms + skew_ms


def _clocks(apart_ms: int) -> str:
    """Returns a hint to compare the clocks, or "". A difference near whole hours is often a clock that shows local time
    as UTC.
    """
    hours, rest_ms = divmod(apart_ms + WHOLE_HOUR_TOLERANCE_MS, 3_600_000)
    if not 1 <= hours <= 14 or rest_ms > 2 * WHOLE_HOUR_TOLERANCE_MS:
        return ""
    return f". Compare the clocks: {hours} h apart may be a time zone"


def _check_audience(claims: Mapping[str, Any], rules: ClaimRules) -> None:
    if not rules.audiences:
        return
    found = claims.get(rules.audience_claim)
    names = found if isinstance(found, list) else [found]
    if not any(isinstance(name, str) and name in rules.audiences for name in names):
        raise Unauthenticated("the token is for another audience")


def _role(claims: Mapping[str, Any], claim: str) -> str:
    found = claims.get(claim)
    if isinstance(found, list) and found:
        found = found[0]
    if not isinstance(found, str) or not is_valid_role(found):
        raise Unauthenticated(f"the token's claim {claim!r} is no role")
    return found


def format_unverified_token(token: str) -> str:
    """Decodes a token and returns its header and claims as JSON text, without any check. Raises InvalidRequest if the
    text is not a token; InvalidConfiguration if the packages of `magnetar[security]` are missing."""
    jwt = _jwt()
    try:
        claims = jwt.decode(token, options={"verify_signature": False})
        return json.dumps({"header": jwt.get_unverified_header(token), "claims": claims}, indent=2)
    except (jwt.InvalidTokenError, ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(_NO_TOKEN_FIELD) from error


def create_token(key: Secret, algorithm: str, subject: str, now_ms: int, lifetime_s: float | None = None) -> str:
    """Creates a signed token for the role `subject` and returns it. The token has an id (jti), by which it can be
    revoked. It expires `lifetime_s` seconds after `now_ms` (ms since the epoch); None: never. `key`: a shared secret,
    or a private key in PEM. Raises InvalidConfiguration if the key does not fit the algorithm, or if the packages of
    `magnetar[security]` are missing."""
    claims: dict[str, Any] = {"sub": subject, "iat": now_ms // 1000, "jti": os.urandom(12).hex()}
    if lifetime_s is not None:
        claims["exp"] = int(now_ms / 1000 + lifetime_s)
    try:
        made: str = _jwt().encode(claims, key.reveal_bytes(), algorithm=algorithm)
    except Exception as error:
        raise InvalidConfiguration(f"no token of {algorithm} can be made with that key") from error
    return made


def _time_ms(claims: Mapping[str, Any], name: str) -> int | None:
    found = claims.get(name)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | float) or not -1e11 < found < 1e11:
        raise Unauthenticated(f"the token's claim {name!r} is no time in seconds")
    return int(found * 1000)


def format_time(ms: int) -> str:
    """Returns a time in ms since the epoch as text, such as "2025-10-09 08:53:20 UTC"; as "N ms" if it is no date."""
    try:
        return datetime.datetime.fromtimestamp(ms / 1000, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{ms} ms"


def _chosen(possible: tuple[str, ...], algorithm: str) -> tuple[str, ...]:
    if algorithm and algorithm not in possible:
        raise InvalidConfiguration(f"the key of [token] verifies {', '.join(possible)}, not {algorithm}")
    return (algorithm,) if algorithm else possible


def _verification_keys(settings: TokenSection, data: bytes) -> list[tuple[Any, tuple[str, ...], bytes]]:
    """Returns for each key its algorithms and its bytes: (key, algorithms, bytes)."""
    if settings.secret_key:
        if len(data) < SECRET_BYTES_MIN:
            raise InvalidConfiguration(f"the secret key of [token] has {len(data)} bytes; {SECRET_BYTES_MIN} or more")
        if b"-----BEGIN" in data:
            raise InvalidConfiguration("the secret key of [token] is a PEM file: a public key belongs to public_key")
        return [(data, _HMAC, data)]
    found = [each[0] for each in _PEM.finditer(data)] or [data]
    if len(found) > PUBLIC_KEYS_MAX:
        raise InvalidConfiguration(f"{settings.public_key} has {len(found)} keys; at most {PUBLIC_KEYS_MAX} are tried")
    return [(*_public_key(settings.public_key, each), each) for each in found]


def _public_key(source: str, data: bytes) -> tuple[Any, tuple[str, ...]]:
    from cryptography.hazmat.primitives import serialization

    load = serialization.load_pem_public_key if b"-----BEGIN" in data else serialization.load_der_public_key
    try:
        key = load(data)
    except (ValueError, TypeError) as error:
        raise InvalidConfiguration(f"{source} is no public key in PEM or DER form") from error
    if not (algorithms := find_public_key_algorithms(key)):
        raise InvalidConfiguration(f"{source} is neither RSA of 2048 bits or more nor EC on a curve of JWT")
    return key, algorithms


def find_public_key_algorithms(key: object) -> tuple[str, ...]:
    """Returns the signature algorithms that a public key can verify; () if the key is too weak, or of a kind that is
    not supported."""
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    if isinstance(key, rsa.RSAPublicKey) and RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX:
        return _RSA
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _EC:
        return (_EC[key.curve.name],)
    return ()


def _public_bytes(source: str) -> bytes:
    if source.startswith(("env:", "data:")):
        return read_secret(source).reveal_bytes()
    try:
        with open(source.removeprefix("file:").removeprefix("//"), "rb") as file:
            return file.read(64 << 10)
    except OSError as error:
        raise InvalidConfiguration(f"{source} cannot be read: {error.strerror}") from error


def _jwt() -> Any:
    try:
        import jwt
    except ImportError as error:
        raise InvalidConfiguration("security needs more packages: pip install 'magnetar[security]'") from error
    return jwt


# ------------------------------------------------------------------------------------------------------- revoked
# Tokens that are refused before their end: a file with one id (`jti`) or role (`sub`) a line.
#
# Empty lines and lines that begin with # are skipped. The file is looked at every few seconds (`WatchedValue`): tokens
# on it are refused from then on, and open streams of theirs end. A file that is missing at the start is an error,
# because a misspelled path would revoke nothing; one that cannot be used later keeps the list before.


FILE_BYTES_MAX = 1 << 20
REVOCATION_FILE_HEADER = "# Tokens that are refused: one id (jti) or role (sub) a line. See docs/security.md.\n"


class RevocationList:
    """The list of revoked token ids and roles, in a file that is read again when it changes. The constructor raises
    InvalidConfiguration if the file cannot be read, or if a line is neither an id nor a role. If a changed file cannot
    be used, the list before stays."""

    def __init__(self, path: str, clock: Clock) -> None:
        self._listed = WatchedValue(path, lambda: read_revocations(path), clock)

    def is_revoked(self, principal: Principal) -> bool:
        """Returns whether the principal's role, or the token with which it authenticated, is revoked."""
        listed = self._listed.load_current()
        return principal.name in listed or principal.credential_id in listed


def read_revocations(path: str) -> frozenset[str]:
    """Returns the token ids and the roles in the file of revoked tokens, one a line; empty lines, and lines that begin
    with #, are skipped. Raises InvalidConfiguration if the file cannot be read, is too large, or has another line."""
    try:
        with open(path.removeprefix("file:").removeprefix("//"), "rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
        lines = [line.strip() for line in data.decode().split("\n")]
    except OSError as error:
        raise InvalidConfiguration(f"the list of revoked tokens {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise InvalidConfiguration(f"the list of revoked tokens {path} is not UTF-8") from None
    if len(data) > FILE_BYTES_MAX:
        raise InvalidConfiguration(f"the list of revoked tokens {path} has more than {FILE_BYTES_MAX} bytes")
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#") and not is_valid_role(line):
            raise InvalidConfiguration(f"line {number} of {path} is neither the id nor the role of a token")
    return frozenset(line for line in lines if line and not line.startswith("#"))


def read_token_id(token: str) -> str:
    """Returns the id (`jti`) of a token, whose signature is not verified. Raises Unauthenticated if the text is not a
    token, InvalidRequest if the token has no id."""
    found = decode_unverified_token(token)[1].get("jti")
    if not isinstance(found, str):
        raise InvalidRequest("the token has no id (jti): revoke its role, or replace the key of tokens")
    return found


def add_revocation(path: str, what: str) -> None:
    """Adds `what`, a token id or a role, to the file of revoked tokens, which is created if it is missing. The file is
    synced when this function returns. Does nothing if `what` is in the file already. Raises InvalidRequest if `what` is
    neither, InvalidConfiguration if the file cannot be used."""
    if not is_valid_role(what) or what != what.strip() or what.startswith("#"):
        raise InvalidRequest(
            "neither the id nor the role of a token: printable text on one line, without # at its start"
        )
    listed = read_revocations(path) if os.path.exists(path) else frozenset()
    if what in listed:
        return
    try:
        with open(path, "ab") as file:
            begun = not file.tell() or Path(path).read_bytes().endswith(b"\n")
            file.write(("" if begun else "\n").encode() + what.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InvalidConfiguration(f"the list of revoked tokens {path} cannot be written: {error.strerror}") from error
