"""Encryption and decryption of messages (`Encryptor`, `Decryptor`), the interface by which a program provides the keys
(`CryptoKeyReader`), and the description of an encrypted message for a program (`EncryptionContext`). The public classes
have the names and methods of Pulsar's Python client.

Also in this file, under the heading "cipher": the two ciphers of an encrypted entry, over the package `cryptography`.
That package is imported when the first key is loaded."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from ...proto.entry import EncryptFunction, encode_client_part, parse_header, split_broker_part
from ...proto.entry_pb2 import EncryptionKeys, MessageMetadata
from ..common.checks import PATH_CHECK, check_parameters, shorten_value
from ..common.errors import CryptoError, OperationNotSupported
from ..common.loggers import reraise_interrupt

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey, RSAPublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

class EncryptionKey:
    """A data key that is wrapped (encrypted) for one of the readers of a message. A reader is named by its public
    key."""

    def __init__(self, key: EncryptionKeys) -> None:
        self._key = key

    @property
    def key(self) -> str:
        """Returns the name of the reader's key, with which the data key is wrapped."""
        return self._key.key

    @property
    def value(self) -> bytes:
        """Returns the data key, wrapped (encrypted) with the reader's public key."""
        return self._key.value

    @property
    def metadata(self) -> dict[str, str]:
        """Returns the metadata that the producer's key reader added to the key. It is stored unencrypted, and not
        authenticated."""
        return {pair.key: pair.value for pair in self._key.metadata}


class EncryptionContext:
    """The description of how an entry is encrypted; `Message.encryption_context` returns it. A consumer with
    `ConsumerCryptoFailureAction.CONSUME` gets entries that it cannot decrypt: the program can then decrypt them
    itself by this description."""

    def __init__(self, metadata: MessageMetadata, *, failed: bool) -> None:
        self._metadata = metadata
        self._failed = failed

    def keys(self) -> list[EncryptionKey]:
        """Returns the wrapped data keys, one for each reader for whom the entry is encrypted."""
        return [EncryptionKey(each) for each in self._metadata.encryption_keys]

    def param(self) -> bytes:
        """Returns the initialization vector (IV) with which the entry is encrypted by AES-256-GCM."""
        return self._metadata.encryption_param

    def algorithm(self) -> str:
        """Returns the name of the algorithm: always an empty text, because Pulsar's clients write none."""
        return self._metadata.encryption_algo

    def compression_type(self) -> int:
        """Returns the compression of the payload before it was encrypted, as a number of CompressionType; 0: it was not
        compressed."""
        return int(self._metadata.compression)

    def uncompressed_message_size(self) -> int:
        """Returns the size of the payload in bytes before compression; 0: the payload was not compressed."""
        return self._metadata.uncompressed_size

    def batch_size(self) -> int:
        """Returns the number of messages in the entry; -1: the entry is not a batch."""
        metadata = self._metadata
        return metadata.num_messages_in_batch if metadata.HasField("num_messages_in_batch") else -1

    def is_decryption_failed(self) -> bool:
        """Returns whether the message's data is still encrypted, because it could not be decrypted."""
        return self._failed


# -------------------------------------------------------------------------------------------------------- cipher
# The two ciphers of an encrypted entry, over the package `cryptography`, which is loaded when the first key is.
#
#     payload     = AES-256-GCM(data key, IV, payload) with the tag of 16 bytes after it, and no associated data
#     wrapped key = RSA-OAEP(SHA-1, MGF1 with SHA-1) of the data key, with one reader's public key
#
# These are the bytes of Pulsar's clients. SHA-1 is no weakness here: OAEP needs no resistance against collisions. EC
# keys are refused: Pulsar's Java client wraps with an ECIES of BouncyCastle that no other client reads. Guard:
# tests/client/model/test_keys.py, tests/client/model/test_pulsar.py.


DATA_KEY_BYTES = 32
IV_BYTES = 12
TAG_BYTES = 16
RSA_BITS_MIN = 2048
RSA_BITS_MAX = 16384
"""Most bits of an RSA key. The time to unwrap a data key grows with the third power of the key's length: 0.1 s with
this length."""


def _load(name: str) -> Any:
    try:
        return importlib.import_module(f"cryptography.{name}")
    except ImportError as error:
        raise OperationNotSupported("encryption needs a package: pip install 'magnetar[security]'") from error


def require_cryptography() -> None:
    """Raises OperationNotSupported if the Python package `cryptography`, which encryption needs, is not installed."""
    _load("hazmat.primitives.ciphers.aead")


def make_cipher(key: bytes) -> AESGCM:
    """Returns the AES-256-GCM cipher of a data key of DATA_KEY_BYTES bytes. Raises OperationNotSupported if
    `cryptography` is not installed."""
    found: AESGCM = _load("hazmat.primitives.ciphers.aead").AESGCM(key)
    return found


def decrypt_payload(key: AESGCM, iv: bytes, ciphertext: bytes) -> bytes:
    """Decrypts a payload and returns it. Raises CryptoError if the ciphertext does not belong to this key and IV, or
    was changed."""
    try:
        return key.decrypt(iv, ciphertext, None)
    except _load("exceptions").InvalidTag as error:
        raise CryptoError("the ciphertext does not fit its key: it was changed, or cut") from error


def wrap_data_key(key: bytes, reader: RSAPublicKey) -> bytes:
    """Returns the data key `key`, encrypted with the public key of one reader; `unwrap_data_key` reverses this. Raises
    OperationNotSupported if `cryptography` is not installed."""
    return reader.encrypt(key, _oaep())


def unwrap_data_key(value: bytes, reader: RSAPrivateKey) -> bytes | None:
    """Decrypts a wrapped data key and returns it. Returns None if `value` was wrapped for another reader, or is not a
    wrapped key. A value of a wrong length is refused without the cost of decrypting it."""
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
def parse_public_key(pem: bytes, name: str) -> RSAPublicKey:
    """Parses a public key in PEM and returns it. `name`: the name of the key, for error messages. Raises CryptoError
    unless it is an RSA key of RSA_BITS_MIN to RSA_BITS_MAX bits, both included."""
    found: RSAPublicKey = _rsa(_parsed("load_pem_public_key", (pem,), f"the public key of {shorten_value(name)}"), name)
    return found


def parse_private_key(pem: bytes, name: str) -> RSAPrivateKey:
    """Parses a private key in PEM and returns it. `name`: the name of the key, for error messages. Raises CryptoError
    unless it is an RSA key of RSA_BITS_MIN to RSA_BITS_MAX bits, both included, without a password."""
    found: RSAPrivateKey = _rsa(
        _parsed("load_pem_private_key", (pem, None), f"the private key of {shorten_value(name)}"), name
    )
    return found


def _parsed(load: str, arguments: tuple[Any, ...], what: str) -> Any:
    """Parses a key with the function `load`. The library's error texts are left out, because some quote the key."""
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
        raise CryptoError(f"the key of {shorten_value(name)} is an EC key: {why}; use RSA")
    if not isinstance(key, rsa.RSAPublicKey | rsa.RSAPrivateKey):
        raise CryptoError(f"the key of {shorten_value(name)} is not an RSA key")
    if not RSA_BITS_MIN <= key.key_size <= RSA_BITS_MAX:
        raise CryptoError(
            f"the key of {shorten_value(name)} has {key.key_size} bits: use {RSA_BITS_MIN} to {RSA_BITS_MAX}"
        )
    return key


# ---------------------------------------------------------------------------------------------------- key_reader
# The keys of readers: from the program's `KeyReader`, or from the default that reads two files.
#
# Keys are PEM: a public key is SubjectPublicKeyInfo, a private key PKCS#8 or PKCS#1, without a password. A reader is
# called in the client's event loop and must not wait for long; what it returns is kept for KEY_CACHE_S
# (client/model/encryption.py). Guard: tests/client/model/test_keys.py.


KEY_CACHE_S = 4 * 3600.0
"""Seconds for which a data key is used, and for which a key of the reader is cached: Pulsar's figure."""
KEY_FILE_BYTES_MAX = 1 << 16
"""Largest key file, in bytes: the PEM of a key of 16,384 bits has 13 KB."""


class EncryptionKeyInfo(NamedTuple):
    """An encryption key in PEM (`key`), with metadata that is stored unencrypted with each entry, such as the key's
    version."""

    key: bytes  # PEM
    metadata: Mapping[str, str] = {}

    def __repr__(self) -> str:
        return f"EncryptionKeyInfo(<{len(self.key)} bytes>, {dict(self.metadata)!r})"


class KeyReader(Protocol):
    """The interface of the parameter `crypto_key_reader`, which a program implements. The client calls the methods in
    its event loop, so they must not wait for long, and caches each result for KEY_CACHE_S seconds. A method raises any
    exception if there is no such key, or if the key cannot be read now; the client then raises CryptoError."""

    def get_public_key(self, name: str) -> bytes | EncryptionKeyInfo:
        """Returns the public key with the name `name`, in PEM. Producers call this. Raises any exception if there is no
        such key."""
        ...

    def get_private_key(self, name: str, metadata: Mapping[str, str]) -> bytes | EncryptionKeyInfo:
        """Returns the private key with the name `name`, in PEM. Consumers call this. `metadata`: the metadata that the
        producer's key reader returned with the public key; it is not authenticated. Raises any exception if there is no
        such key."""
        ...


class CryptoKeyReader:
    """A key reader that reads the same two files for every key name, as Pulsar's class with this name does. Raises
    InvalidConfiguration if an argument is no path."""

    def __init__(self, public_key_path: str, private_key_path: str) -> None:
        """Sets the paths of the PEM files. A producer needs only the first, a consumer only the second. Raises
        InvalidConfiguration if an argument is no path; does not read the files."""
        check_parameters(_PATHS, {"public_key_path": public_key_path, "private_key_path": private_key_path})
        self._public_key_path = public_key_path
        self._private_key_path = private_key_path

    def __repr__(self) -> str:
        return f"CryptoKeyReader({self._public_key_path!r}, {self._private_key_path!r})"

    def get_public_key(self, name: str) -> bytes:
        """Returns the content of the file at `public_key_path`, whatever `name` is. Raises CryptoError if the file
        cannot be read, or is larger than KEY_FILE_BYTES_MAX."""
        return _read(self._public_key_path)

    def get_private_key(self, name: str, metadata: Mapping[str, str]) -> bytes:
        """Returns the content of the file at `private_key_path`, whatever `name` is. Raises CryptoError if the file
        cannot be read, or is larger than KEY_FILE_BYTES_MAX."""
        return _read(self._private_key_path)


_PATHS = {"public_key_path": PATH_CHECK, "private_key_path": PATH_CHECK}


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


# ----------------------------------------------------------------------------------------------------- encryptor
# Encrypts the entries of one producer with a data key that is wrapped for each reader.
#
#     encryptor = Encryptor(reader, ["analytics", "audit"], now)    makes the first data key, or raises CryptoError
#     ciphertext = encryptor(metadata, payload)                     once per stored entry; writes into `metadata`
#
# **Which bytes.** An entry's payload is encrypted as it would be stored: a batch as a whole, compressed if it is, each
# chunk alone. `metadata` gets `encryption_keys` (name, wrapped data key, the reader's metadata) and `encryption_param`
# (the IV); `encryption_algo` stays empty, as Pulsar's clients leave it.
#
# **No IV twice.** Each entry has a random IV of 96 bits. A data key makes at most DATA_KEY_USES_MAX of them and lives
# KEY_CACHE_S; then one is made, and the public keys are read anew. The chunks of a message share one, so that they
# have one size.
#
# **Never in clear.** When a new data key cannot be made, CryptoError is raised: the entry is not sent.
# Guard: tests/client/model/test_decryptor.py.


DATA_KEY_USES_MAX = 1 << 31
"""Most entries that are encrypted with one data key: half of what random IVs of 96 bits allow."""


class Encryptor:
    """Encrypts the payloads of one producer. Must be used only in the producer's event loop."""

    def __init__(
        self, reader: KeyReader, names: Sequence[str], now: Callable[[], float],
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:  # fmt: skip
        """Makes an encryptor, and its first data key. `names`: the names of the readers' public keys, at least one;
        `now`: a clock, in seconds. Raises CryptoError if a public key cannot be read, OperationNotSupported if
        `cryptography` is not installed."""
        assert names, "something is encrypted for a reader"
        require_cryptography()
        self._reader = reader
        self._names = names
        self._now = now
        self._random = random
        self._renew()

    def __call__(self, metadata: MessageMetadata, payload: bytes) -> bytes:
        """Encrypts a payload and returns the ciphertext. Writes the wrapped data keys and the initialization vector
        into `metadata`. `payload`: the bytes as they would be stored, compressed if they are. Raises CryptoError if a
        new data key is due, and a public key cannot be read."""
        if not metadata.num_chunks_from_msg and (self._uses >= DATA_KEY_USES_MAX or self._now() >= self._until):
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
        self._key: AESGCM = make_cipher(fresh)
        self._wrapped = found
        self._uses = 0
        self._until = self._now() + KEY_CACHE_S

    def _wrapped_for(self, name: str, fresh: bytes) -> EncryptionKeys:
        try:
            info = self._reader.get_public_key(name)
            key, metadata = info if isinstance(info, EncryptionKeyInfo) else (info, {})
            found = EncryptionKeys(key=name, value=wrap_data_key(fresh, parse_public_key(key, name)))
            for key_, value in metadata.items():
                found.metadata.add(key=key_, value=value)
        except CryptoError:
            raise
        except BaseException as error:  # the reader's; its text may hold a secret
            raise CryptoError(
                f"there is no public key of {shorten_value(name)}: {type(error).__name__}"
            ) from reraise_interrupt(error)
        return found


# ----------------------------------------------------------------------------------------------------- decryptor
# Decrypts the entries of one consumer: finds the data key that a private key of ours unwraps.
#
#     payload = decryptor(metadata, ciphertext)        CryptoError says why it cannot
#
# An entry is encrypted when its metadata has an IV (`encryption_param`), which every client of Pulsar writes.
#
# A data key is found by its wrapped bytes in a cache; a miss asks the reader for the private key of each name until one
# unwraps. Data keys and private keys are kept for KEY_CACHE_S. What failed under a name and its metadata is tried again
# after ERROR_CACHE_S; it hides nothing that another name unwraps.
#
# **Hostile metadata** costs at most WRAPPED_KEYS_MAX unwrappings an entry (0.5 ms each for 2048 bits) and none when its
# keys are known, or too long, or too many. A private key that comes under many names is parsed once (30 ms). Caches are
# bounded. Guard: tests/client/model/test_decryptor.py.


WRAPPED_KEYS_MAX = 100
"""Most wrapped keys of one entry that a consumer accepts: one per reader."""
WRAPPED_KEY_BYTES_MAX = 8192
"""Largest wrapped key of an entry, in bytes: its name, its value (256 bytes for 2048 bits) and its metadata
together."""
KEY_CACHE_MAX = 1000
"""Most items of each cache of a Decryptor."""
ERROR_CACHE_S = 10.0

T = TypeVar("T")


class _TimedCache(Generic[T]):
    """A cache of results for KEY_CACHE_S, and of errors for ERROR_CACHE_S; at most KEY_CACHE_MAX of both together."""

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
        if len(self._found) >= KEY_CACHE_MAX:
            del self._found[next(iter(self._found))]
        self._found[name] = value, self._now() + (ERROR_CACHE_S if isinstance(value, CryptoError) else KEY_CACHE_S)


class Decryptor:
    """Decrypts the payloads of one consumer. Must be used only in the consumer's event loop."""

    def __init__(self, reader: KeyReader | None, now: Callable[[], float]) -> None:
        """Makes a decryptor. `reader` None: nothing can be decrypted. `now`: a clock, in seconds. Raises
        OperationNotSupported if there is a reader and `cryptography` is not installed."""
        if reader is not None:
            require_cryptography()
        self._reader = reader
        self._data_keys: _TimedCache[AESGCM] = _TimedCache(now)  # by their wrapped bytes
        self._failures: _TimedCache[AESGCM] = _TimedCache(now)  # by the whole EncryptionKeys
        self._private_keys: _TimedCache[RSAPrivateKey] = _TimedCache(now)  # by name and metadata
        self._parsed: _TimedCache[RSAPrivateKey] = _TimedCache(now)  # by their PEM

    def __call__(self, metadata: MessageMetadata, ciphertext: bytes) -> bytes:
        """Decrypts a payload and returns it, still compressed if it was compressed before encryption. Raises
        CryptoError if there is no key reader, no private key of the reader fits, or `metadata` or the ciphertext is
        damaged."""
        iv, keys = metadata.encryption_param, metadata.encryption_keys
        if self._reader is None:
            raise CryptoError("it is encrypted, and there is no crypto_key_reader")
        if len(iv) != IV_BYTES:
            raise CryptoError(f"its encryption_param has {len(iv)} bytes, not {IV_BYTES}")
        if len(ciphertext) < TAG_BYTES:
            raise CryptoError(f"its ciphertext has {len(ciphertext)} bytes, fewer than a tag")
        return decrypt_payload(self._data_key(self._reader, list(keys)), iv, ciphertext)

    def decrypt_entry(self, entry: bytes) -> bytes:
        """Decrypts a stored entry and returns it, without the fields of encryption in its metadata. Returns an entry
        that is not encrypted unchanged. Raises CorruptEntry if the entry is damaged, CryptoError if it cannot be
        decrypted."""
        header = parse_header(entry)
        metadata = header.metadata
        if not metadata.encryption_param:
            return entry
        payload = self(metadata, entry[header.payload_offset :])
        metadata.ClearField("encryption_keys")
        metadata.ClearField("encryption_param")
        metadata.ClearField("encryption_algo")
        start = len(entry) - len(split_broker_part(entry)[2])
        return entry[:start] + encode_client_part(metadata, payload)

    def make_copy_encryptor(self, metadata: MessageMetadata) -> EncryptFunction:
        """Returns a function that encrypts a copy of a message for the readers of that message. `metadata`: that of the
        message, whose data key is used again, with a new initialization vector for each copy. Raises CryptoError if
        there is no key reader, or no private key decrypts the message."""
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
        if not 0 < len(keys) <= WRAPPED_KEYS_MAX:
            raise CryptoError(f"it is encrypted for {len(keys)} keys; the limit is {WRAPPED_KEYS_MAX}")
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
        if not isinstance(key.key, str) or key.ByteSize() > WRAPPED_KEY_BYTES_MAX:
            return CryptoError(f"an encryption key is not UTF-8, or larger than {WRAPPED_KEY_BYTES_MAX} bytes")
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
                found = parse_private_key(pem, key.key)
            except CryptoError as error:
                return error
            self._parsed.put(pem, found)
        return found


def _unwrapped_with(private: RSAPrivateKey, key: EncryptionKeys) -> AESGCM | CryptoError:
    found = unwrap_data_key(key.value, private)
    if found is None:
        return CryptoError(f"the private key of {shorten_value(key.key)} is not the one that it is encrypted for")
    return make_cipher(found)


def _pem(reader: KeyReader, key: EncryptionKeys) -> bytes | CryptoError:
    try:
        info = reader.get_private_key(key.key, {str(pair.key): str(pair.value) for pair in key.metadata})
        pem = info.key if isinstance(info, EncryptionKeyInfo) else info
        return (
            pem if isinstance(pem, bytes) else CryptoError(f"the private key of {shorten_value(key.key)} is not bytes")
        )
    except CryptoError as error:
        return error
    except BaseException as error:  # the reader's; its text may hold a secret
        found = CryptoError(f"there is no private key of {shorten_value(key.key)}: {type(error).__name__}")
        found.__cause__ = reraise_interrupt(error)
        return found
