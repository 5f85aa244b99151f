"""Decrypts the entries of one consumer: finds the data key that a private key of ours unwraps.

    payload = decryptor(metadata, ciphertext)        CryptoError says why it cannot

An entry is encrypted when its metadata has an IV (`encryption_param`), which every client of Pulsar writes.

A data key is found by its wrapped bytes in a cache; a miss asks the reader for the private key of each name until one
unwraps. Data keys and private keys are kept for KEPT_S. What failed under a name and its metadata is tried again after
FAILED_S; it hides nothing that another name unwraps.

**Hostile metadata** costs at most KEYS_MAX unwrappings an entry (0.5 ms each for 2048 bits) and none when its keys are
known, or too long, or too many. A private key that comes under many names is parsed once (30 ms). All caches are
bounded. Guard: tests/client/crypto/test_decryptor.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

from ...proto.entry import Encrypt, client_part, parse_header, split_broker_part
from ...proto.entry_pb2 import EncryptionKeys, MessageMetadata
from ..common.checks import shown
from ..common.errors import CryptoError
from ..common.guard import own
from .cipher import IV_BYTES, TAG_BYTES, data_key, decrypted, private_key, require_package, unwrapped
from .key_reader import KEPT_S, EncryptionKeyInfo, KeyReader

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEYS_MAX = 100
"""Most keys of one entry: readers that it is encrypted for."""
KEY_BYTES_MAX = 8192
"""Most bytes of a key of an entry: its name, its wrapped key (256 bytes for 2048 bits) and its metadata."""
KNOWN_MAX = 1000
"""Entries of each cache."""
FAILED_S = 10.0

T = TypeVar("T")


class _Kept(Generic[T]):
    """Results kept for KEPT_S, and errors for FAILED_S; at most KNOWN_MAX of both."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._found: dict[bytes, tuple[T | CryptoError, float]] = {}

    def __len__(self) -> int:
        return len(self._found)

    def get(self, name: bytes) -> T | CryptoError | None:
        found = self._found.get(name)
        if found is None or found[1] <= self._now():
            return None
        return found[0]

    def put(self, name: bytes, value: T | CryptoError) -> None:
        self._found.pop(name, None)
        if len(self._found) >= KNOWN_MAX:
            del self._found[next(iter(self._found))]
        self._found[name] = value, self._now() + (FAILED_S if isinstance(value, CryptoError) else KEPT_S)


class Decryptor:
    """Decrypts the payloads of one consumer, in its event loop."""

    def __init__(self, reader: KeyReader | None, now: Callable[[], float]) -> None:
        """Makes a decryptor. `reader` None: nothing can be decrypted. OperationNotSupported: the package for it is not
        installed."""
        if reader is not None:
            require_package()
        self._reader = reader
        self._data_keys: _Kept[AESGCM] = _Kept(now)  # by their wrapped bytes
        self._failures: _Kept[AESGCM] = _Kept(now)  # by the whole EncryptionKeys
        self._private_keys: _Kept[RSAPrivateKey] = _Kept(now)  # by name and metadata
        self._parsed: _Kept[RSAPrivateKey] = _Kept(now)  # by their PEM

    def __call__(self, metadata: MessageMetadata, ciphertext: bytes) -> bytes:
        """The payload as it was before it was encrypted: compressed, if it is. CryptoError."""
        iv, keys = metadata.encryption_param, metadata.encryption_keys
        if self._reader is None:
            raise CryptoError("it is encrypted, and there is no crypto_key_reader")
        if len(iv) != IV_BYTES:
            raise CryptoError(f"its encryption_param has {len(iv)} bytes, not {IV_BYTES}")
        if len(ciphertext) < TAG_BYTES:
            raise CryptoError(f"its ciphertext has {len(ciphertext)} bytes, fewer than a tag")
        return decrypted(self._data_key(self._reader, list(keys)), iv, ciphertext)

    def entry_in_clear(self, entry: bytes) -> bytes:
        """A stored entry as if it had not been encrypted; itself, when it was not. CorruptEntry, CryptoError."""
        header = parse_header(entry)
        metadata = header.metadata
        if not metadata.encryption_param:
            return entry
        payload = self(metadata, entry[header.payload_offset :])
        metadata.ClearField("encryption_keys")
        metadata.ClearField("encryption_param")
        metadata.ClearField("encryption_algo")
        start = len(entry) - len(split_broker_part(entry)[2])
        return entry[:start] + client_part(metadata, payload)

    def encrypt_like(self, metadata: MessageMetadata) -> Encrypt:
        """Encrypts what is copied from a message of ours for the same readers: with its data key, and an IV of its own.
        CryptoError: we have no key for it."""
        if self._reader is None:
            raise CryptoError("it is encrypted, and there is no crypto_key_reader")
        keys = list(metadata.encryption_keys)
        data_key = self._data_key(self._reader, keys)

        def encrypt(copy: MessageMetadata, payload: bytes) -> bytes:
            iv = os.urandom(IV_BYTES)
            del copy.encryption_keys[:]
            copy.encryption_keys.extend(keys)
            copy.encryption_param = iv
            return data_key.encrypt(iv, payload, None)

        return encrypt

    def _data_key(self, reader: KeyReader, keys: list[EncryptionKeys]) -> AESGCM:
        if not 0 < len(keys) <= KEYS_MAX:
            raise CryptoError(f"it is encrypted for {len(keys)} keys; the limit is {KEYS_MAX}")
        for key in keys:
            known = self._data_keys.get(key.value)
            if known is not None and not isinstance(known, CryptoError):
                return known
        whys: list[str] = []
        for key in keys:
            found = self._unwrapped(reader, key)
            if not isinstance(found, CryptoError):
                self._data_keys.put(key.value, found)
                return found
            whys.append(found.message)
        raise CryptoError(f"no private key decrypts it: {whys[0]}")

    def _unwrapped(self, reader: KeyReader, key: EncryptionKeys) -> AESGCM | CryptoError:
        if not isinstance(key.key, str) or key.ByteSize() > KEY_BYTES_MAX:
            return CryptoError(f"an encryption key is not UTF-8, or larger than {KEY_BYTES_MAX} bytes")
        whole = key.SerializePartialToString()
        failure = self._failures.get(whole)
        if failure is not None:
            return failure
        private = self._private_key(reader, key)
        found = private if isinstance(private, CryptoError) else _unwrapped_with(private, key)
        if isinstance(found, CryptoError):
            self._failures.put(whole, found)
        return found

    def _private_key(self, reader: KeyReader, key: EncryptionKeys) -> RSAPrivateKey | CryptoError:
        about = EncryptionKeys(key=key.key, value=b"", metadata=key.metadata).SerializePartialToString()
        found = self._private_keys.get(about)
        if found is None:
            found = self._asked(reader, key)
            self._private_keys.put(about, found)
        return found

    def _asked(self, reader: KeyReader, key: EncryptionKeys) -> RSAPrivateKey | CryptoError:
        pem = _pem(reader, key)
        if isinstance(pem, CryptoError):
            return pem
        found = self._parsed.get(pem)
        if found is None:
            try:
                found = private_key(pem, key.key)
            except CryptoError as error:
                return error
            self._parsed.put(pem, found)
        return found


def _unwrapped_with(private: RSAPrivateKey, key: EncryptionKeys) -> AESGCM | CryptoError:
    found = unwrapped(key.value, private)
    if found is None:
        return CryptoError(f"the private key of {shown(key.key)} is not the one that it is encrypted for")
    return data_key(found)


def _pem(reader: KeyReader, key: EncryptionKeys) -> bytes | CryptoError:
    try:
        info = reader.get_private_key(key.key, {str(pair.key): str(pair.value) for pair in key.metadata})
        pem = info.key if isinstance(info, EncryptionKeyInfo) else info
        return pem if isinstance(pem, bytes) else CryptoError(f"the private key of {shown(key.key)} is not bytes")
    except CryptoError as error:
        return error
    except BaseException as error:  # the reader's; its text may hold a secret
        found = CryptoError(f"there is no private key of {shown(key.key)}: {type(error).__name__}")
        found.__cause__ = own(error)
        return found
