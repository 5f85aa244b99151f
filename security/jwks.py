"""JSON Web Key Sets: the public keys of an issuer. A key that cannot be used is left out, with all it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from .token import RSA_BITS_MAX, algorithms_of

KEYS_MAX = 100
TEXT_MAX = 256
_NUMBER_MAX = RSA_BITS_MAX // 6 + 8  # characters of base64
_EXPONENT_MAX = 16
_ALLOWED = {"RS256", "RS384", "RS512", "ES256", "ES384", "ES512"}
"""Algorithms that are taken, as by Pulsar's OpenID provider."""


class IssuerKey(NamedTuple):
    """A public key of an issuer."""

    kid: str
    algorithms: tuple[str, ...]
    key: Any

    def __repr__(self) -> str:
        return f"<key {self.kid!r} of {', '.join(self.algorithms)}>"


def parse_keys(document: Mapping[str, Any]) -> tuple[IssuerKey, ...]:
    """The keys that verify; of two with one `kid` the first. Empty: it has none, or is no key set."""
    found = document.get("keys")
    if not isinstance(found, list):
        return ()
    keys: dict[str, IssuerKey] = {}
    for each in found[:KEYS_MAX]:
        key = _parsed(each)
        if key is not None:
            keys.setdefault(key.kid, key)
    return tuple(keys.values())


def _parsed(jwk: object) -> IssuerKey | None:
    if not isinstance(jwk, dict) or jwk.get("use", "sig") != "sig" or "d" in jwk:
        return None
    kid, algorithm = jwk.get("kid", ""), jwk.get("alg")
    if not isinstance(kid, str) or len(kid) > TEXT_MAX:
        return None
    key = _public(jwk)
    fits = tuple(each for each in algorithms_of(key) if each in _ALLOWED and algorithm in (None, each))
    return IssuerKey(kid, fits, key) if fits else None


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
