"""RSA keys for tests, made once a run, and a key reader that has some of them."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from magnetar.client.model.encryption import CryptoKeyReader, EncryptionKeyInfo

PEM = serialization.Encoding.PEM
PKCS8, PKCS1 = serialization.PrivateFormat.PKCS8, serialization.PrivateFormat.TraditionalOpenSSL
NO_PASSWORD = serialization.NoEncryption()


class Pair(NamedTuple):
    public: bytes
    private: bytes


def pair_of(key: rsa.RSAPrivateKey, form: serialization.PrivateFormat = PKCS8) -> Pair:
    public = key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return Pair(public, key.private_bytes(PEM, form, NO_PASSWORD))


@cache
def pair(name: str, bits: int = 2048) -> Pair:
    return pair_of(rsa.generate_private_key(65537, bits))


def files(folder: Path, name: str = "a") -> CryptoKeyReader:
    public, private = folder / f"{name}-public.pem", folder / f"{name}-private.pem"
    public.write_bytes(pair(name).public)
    private.write_bytes(pair(name).private)
    return CryptoKeyReader(str(public), str(private))


class Keys:
    """Knows the pairs of `names`; counts what it is asked for; `broken`: raises this."""

    def __init__(self, *names: str, metadata: dict[str, str] | None = None) -> None:
        self.names = set(names)
        self.metadata = metadata
        self.broken: Exception | None = None
        self.asked: list[tuple[str, Mapping[str, str]]] = []
        self.wrapped = 0

    def get_public_key(self, name: str) -> bytes | EncryptionKeyInfo:
        self.wrapped += 1
        if self.broken is not None:
            raise self.broken
        if self.metadata is not None:
            return EncryptionKeyInfo(pair(name).public, self.metadata)
        return pair(name).public

    def get_private_key(self, name: str, metadata: Mapping[str, str]) -> bytes:
        self.asked.append((name, metadata))
        if self.broken is not None:
            raise self.broken
        if name not in self.names:
            raise KeyError(name)
        return pair(name).private
