"""Encrypts the entries of one producer with a data key that is wrapped for each reader.

    encryptor = Encryptor(reader, ["analytics", "audit"], now)    makes the first data key, or raises CryptoError
    ciphertext = encryptor(metadata, payload)                     once per stored entry; writes into `metadata`

**Which bytes.** An entry's payload is encrypted as it would be stored: a batch as a whole, compressed if it is, each
chunk alone. `metadata` gets `encryption_keys` (name, wrapped data key, the reader's metadata) and `encryption_param`
(the IV); `encryption_algo` stays empty, as Pulsar's clients leave it.

**No IV twice.** Each entry has a random IV of 96 bits. A data key makes at most USES_MAX of them and lives KEPT_S; then
a new one is made, and the public keys are read anew. The chunks of a message share one, so that they have one size.

**Never in clear.** When a new data key cannot be made, CryptoError is raised: the entry is not sent.
Guard: tests/client/crypto/test_decryptor.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...proto.entry_pb2 import EncryptionKeys, MessageMetadata
from ..common.checks import shown
from ..common.errors import CryptoError
from ..common.guard import own
from .cipher import DATA_KEY_BYTES, IV_BYTES, data_key, public_key, require_package, wrapped
from .key_reader import KEPT_S, EncryptionKeyInfo, KeyReader

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

USES_MAX = 1 << 31
"""Most uses of a key: half of what random IVs of 96 bits allow."""


class Encryptor:
    """Encrypts the payloads of one producer, in its event loop."""

    def __init__(
        self, reader: KeyReader, names: Sequence[str], now: Callable[[], float],
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:  # fmt: skip
        """Makes an encryptor. `names`: of at least one key. OperationNotSupported: the package for it is not installed.
        """
        assert names, "something is encrypted for a reader"
        require_package()
        self._reader = reader
        self._names = names
        self._now = now
        self._random = random
        self._renew()

    def __call__(self, metadata: MessageMetadata, payload: bytes) -> bytes:
        """The ciphertext; `metadata` says how to decrypt it."""
        if not metadata.num_chunks_from_msg and (self._uses >= USES_MAX or self._now() >= self._until):
            self._renew()
        iv = self._random(IV_BYTES)
        self._uses += 1
        del metadata.encryption_keys[:]
        metadata.encryption_keys.extend(self._wrapped)
        metadata.encryption_param = iv
        return self._key.encrypt(iv, payload, None)

    def _renew(self) -> None:
        fresh = self._random(DATA_KEY_BYTES)
        found = [self._wrapped_for(name, fresh) for name in self._names]
        self._key: AESGCM = data_key(fresh)
        self._wrapped = found
        self._uses = 0
        self._until = self._now() + KEPT_S

    def _wrapped_for(self, name: str, fresh: bytes) -> EncryptionKeys:
        try:
            info = self._reader.get_public_key(name)
            key, metadata = info if isinstance(info, EncryptionKeyInfo) else (info, {})
            found = EncryptionKeys(key=name, value=wrapped(fresh, public_key(key, name)))
            for key_, value in metadata.items():
                found.metadata.add(key=key_, value=value)
        except CryptoError:
            raise
        except BaseException as error:  # the reader's; its text may hold a secret
            raise CryptoError(f"there is no public key of {shown(name)}: {type(error).__name__}") from own(error)
        return found
