"""The keys of readers: from the program's `KeyReader`, or from the default that reads two files.

Keys are PEM: a public key is SubjectPublicKeyInfo, a private key PKCS#8 or PKCS#1, without a password. A reader is
called in the client's event loop and must not wait for long; what it returns is kept for KEPT_S
(client/crypto/encryptor.py, client/crypto/decryptor.py). Guard: tests/client/crypto/test_keys.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ..common.checks import PATH, check
from ..common.errors import CryptoError

KEPT_S = 4 * 3600.0
"""Seconds that a data key is used, and that a key is kept before it is read again: Pulsar's figure."""
KEY_FILE_BYTES_MAX = 1 << 16
"""Most bytes of a key's file: a PEM of a key of 16,384 bits has 13 KB."""


class EncryptionKeyInfo(NamedTuple):
    """A key and what is stored about it beside each entry, in clear: for example its version."""

    key: bytes  # PEM
    metadata: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"EncryptionKeyInfo(<{len(self.key)} bytes>, {dict(self.metadata)!r})"


class KeyReader(Protocol):
    """The interface of `crypto_key_reader`. An exception says that there is no such key, or that it cannot be read now.
    """

    def get_public_key(self, name: str) -> bytes | EncryptionKeyInfo:
        """The public key of that name, for a producer."""
        ...

    def get_private_key(self, name: str, metadata: Mapping[str, str]) -> bytes | EncryptionKeyInfo:
        """The private key of that name, for a consumer. `metadata`: what the producer's reader returned with the public
        key; it is not authenticated."""
        ...


class CryptoKeyReader:
    """Reads the same two files for every name of a key, as Pulsar's class of this name does. CryptoError: it cannot."""

    def __init__(self, public_key_path: str, private_key_path: str) -> None:
        """Takes the paths of PEM files. A producer needs the first one only, and a consumer the second."""
        check(_PATHS, {"public_key_path": public_key_path, "private_key_path": private_key_path})
        self._public_key_path = public_key_path
        self._private_key_path = private_key_path

    def __repr__(self) -> str:
        return f"CryptoKeyReader({self._public_key_path!r}, {self._private_key_path!r})"

    def get_public_key(self, name: str) -> bytes:
        """The content of the first file. CryptoError."""
        return _read(self._public_key_path)

    def get_private_key(self, name: str, metadata: Mapping[str, str]) -> bytes:
        """The content of the second file. CryptoError."""
        return _read(self._private_key_path)


_PATHS = {"public_key_path": PATH, "private_key_path": PATH}


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            found = file.read(KEY_FILE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise CryptoError(f"the key file {path} cannot be read: {why}") from error
    if len(found) > KEY_FILE_BYTES_MAX:
        raise CryptoError(f"the key file {path} is larger than {KEY_FILE_BYTES_MAX} bytes")
    return found
