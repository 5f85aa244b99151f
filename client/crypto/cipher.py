"""The two ciphers of an encrypted entry, over the package `cryptography`, which is loaded when the first key is.

    payload     = AES-256-GCM(data key, IV, payload) with the tag of 16 bytes after it, and no associated data
    wrapped key = RSA-OAEP(SHA-1, MGF1 with SHA-1) of the data key, with one reader's public key

These are the bytes of Pulsar's clients. SHA-1 is no weakness here: OAEP needs no resistance against collisions. EC keys
are refused: Pulsar's Java client wraps with an ECIES of BouncyCastle that no other client reads.
Guard: tests/client/crypto/test_keys.py, tests/client/crypto/test_pulsar.py.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ..common.checks import shown
from ..common.errors import CryptoError, OperationNotSupported

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

DATA_KEY_BYTES = 32
IV_BYTES = 12
TAG_BYTES = 16
RSA_BITS_MIN = 2048
RSA_BITS_MAX = 16384
"""Most bits of a key. The cost of an unwrapping grows with the third power of the length: 0.1 s at this one."""


def _load(name: str) -> Any:
    try:
        return importlib.import_module(f"cryptography.{name}")
    except ImportError as error:
        raise OperationNotSupported("encryption needs a package: pip install 'magnetar[security]'") from error


def require_package() -> None:
    """Raises OperationNotSupported if the package `cryptography` is not installed."""
    _load("hazmat.primitives.ciphers.aead")


def data_key(key: bytes) -> AESGCM:
    found: AESGCM = _load("hazmat.primitives.ciphers.aead").AESGCM(key)
    return found


def decrypted(key: AESGCM, iv: bytes, ciphertext: bytes) -> bytes:
    """Decrypts. CryptoError: the ciphertext is not of this key and IV, or was changed."""
    try:
        return key.decrypt(iv, ciphertext, None)
    except _load("exceptions").InvalidTag as error:
        raise CryptoError("the ciphertext does not fit its key: it was changed, or cut") from error


def wrapped(key: bytes, reader: RSAPublicKey) -> bytes:
    return reader.encrypt(key, _oaep())


def unwrapped(value: bytes, reader: RSAPrivateKey) -> bytes | None:
    """The data key; None: it was wrapped for another reader, or is no key. A wrong length costs nothing."""
    if len(value) != (reader.key_size + 7) // 8:
        return None
    try:
        found = reader.decrypt(value, _oaep())
    except ValueError:
        return None
    return found if len(found) == DATA_KEY_BYTES else None


def _oaep() -> Any:
    padding, sha1 = _load("hazmat.primitives.asymmetric.padding"), _load("hazmat.primitives.hashes").SHA1
    return padding.OAEP(padding.MGF1(sha1()), sha1(), None)


# ------------------------------------------------------------------------------ keys of readers
def public_key(pem: bytes, name: str) -> RSAPublicKey:
    """Parses a public key. CryptoError: it is no public RSA key of RSA_BITS_MIN or more."""
    found: RSAPublicKey = _rsa(_parsed("load_pem_public_key", (pem,), f"the public key of {shown(name)}"), name)
    return found


def private_key(pem: bytes, name: str) -> RSAPrivateKey:
    """Parses a private key. CryptoError: it is no private RSA key of RSA_BITS_MIN or more, or has a password."""
    found: RSAPrivateKey = _rsa(_parsed("load_pem_private_key", (pem, None), f"the private key of {shown(name)}"), name)
    return found


def _parsed(load: str, arguments: tuple[Any, ...], what: str) -> Any:
    """Parses by `load`. The library's texts are left out: some of them quote what they were given."""
    serialization = _load("hazmat.primitives.serialization")
    try:
        return getattr(serialization, load)(*arguments)
    except TypeError:
        raise CryptoError(f"{what} has a password, or is not bytes: give a PEM without one") from None
    except Exception as error:  # ValueError, UnsupportedAlgorithm, and what else a stranger's bytes cause
        raise CryptoError(f"{what} is not a PEM that can be read ({type(error).__name__})") from None


def _rsa(key: Any, name: str) -> Any:
    rsa, ec = _load("hazmat.primitives.asymmetric.rsa"), _load("hazmat.primitives.asymmetric.ec")
    if isinstance(key, ec.EllipticCurvePublicKey | ec.EllipticCurvePrivateKey):
        why = "only Pulsar's Java client can read what is wrapped with it"
        raise CryptoError(f"the key of {shown(name)} is an EC key: {why}; use RSA")
    if not isinstance(key, rsa.RSAPublicKey | rsa.RSAPrivateKey):
        raise CryptoError(f"the key of {shown(name)} is not an RSA key")
    if not RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX:
        raise CryptoError(f"the key of {shown(name)} has {key.key_size} bits: use {RSA_BITS_MIN} to {RSA_BITS_MAX}")
    return key
