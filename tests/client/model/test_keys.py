"""Keys of readers: which are taken, and which are refused, by a typed error that says why and quotes nothing."""

import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.client.common.errors import CryptoError, InvalidConfiguration, OperationNotSupported
from magnetar.client.model import encryption as cipher
from magnetar.client.model.encryption import (
    KEY_FILE_BYTES_MAX,
    CryptoKeyReader,
    EncryptionKeyInfo,
    parse_private_key,
    parse_public_key,
    unwrap_data_key,
    wrap_data_key,
)
from tests.client.model.keys import NO_PASSWORD, PEM, PKCS1, PKCS8, files, pair, pair_of

INFO = serialization.PublicFormat.SubjectPublicKeyInfo


@pytest.mark.parametrize("form", [PKCS1, PKCS8])
def test_a_private_key_is_pkcs1_or_pkcs8(form: serialization.PrivateFormat) -> None:
    keys = pair_of(rsa.generate_private_key(65537, 2048), form)
    data_key = bytes(range(32))
    assert (
        unwrap_data_key(
            wrap_data_key(data_key, parse_public_key(keys.public, "a")), parse_private_key(keys.private, "a")
        )
        == data_key
    )


def test_a_data_key_is_unwrapped_by_its_own_reader_alone_and_has_32_bytes() -> None:
    other = parse_private_key(pair("b").private, "b")
    reader, own = parse_public_key(pair("a").public, "a"), parse_private_key(pair("a").private, "a")
    value = wrap_data_key(bytes(32), reader)
    assert unwrap_data_key(value, own) == bytes(32)
    assert unwrap_data_key(value, other) is None
    assert unwrap_data_key(wrap_data_key(bytes(16), reader), own) is None
    for broken in (b"", value[:-1], value + b"x", bytes(256), bytes(1 << 20), value[:-1] + bytes([value[-1] ^ 1])):
        assert unwrap_data_key(broken, own) is None


def test_ec_keys_are_refused_and_the_error_says_why() -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(CryptoError, match=r"EC key: only Pulsar's Java client can read .* use RSA"):
        parse_public_key(key.public_key().public_bytes(PEM, INFO), "a")
    with pytest.raises(CryptoError, match="EC key"):
        parse_private_key(key.private_bytes(PEM, PKCS8, NO_PASSWORD), "a")


def test_short_and_other_keys_and_those_with_a_password_are_refused() -> None:
    with pytest.raises(CryptoError, match="has 1024 bits: use 2048"):
        parse_public_key(pair("short", 1024).public, "a")
    with pytest.raises(CryptoError, match="has 1024 bits"):
        parse_private_key(pair("short", 1024).private, "a")
    with pytest.raises(CryptoError, match="not an RSA key"):
        parse_public_key(ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(PEM, INFO), "a")
    locked = rsa.generate_private_key(65537, 2048).private_bytes(
        PEM, PKCS8, serialization.BestAvailableEncryption(b"hunter2")
    )
    with pytest.raises(CryptoError, match="has a password"):
        parse_private_key(locked, "a")


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=300), st.integers(0, 1600).map(lambda at: pair("a").private[:at])))
def test_what_is_no_pem_is_refused_and_not_quoted(pem: bytes) -> None:
    for load in (parse_public_key, parse_private_key):
        with pytest.raises(CryptoError, match="is not a PEM") as caught:
            load(pem, "a")
        assert caught.value.__context__ is None or caught.value.__suppress_context__
        if len(pem) >= 60:
            assert pem[40:60].decode("latin-1") not in str(caught.value)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    missing = CryptoKeyReader(str(tmp_path / "no.pem"), str(tmp_path))
    with pytest.raises(CryptoError, match=r"no\.pem cannot be read: No such file"):
        missing.get_public_key("a")
    with pytest.raises(CryptoError, match="cannot be read: Is a directory"):
        missing.get_private_key("a", {})
    large = tmp_path / "large"
    large.write_bytes(bytes(KEY_FILE_BYTES_MAX + 1))
    with pytest.raises(CryptoError, match="is larger than"):
        CryptoKeyReader(str(large), "").get_public_key("a")
    with pytest.raises(InvalidConfiguration):
        CryptoKeyReader(b"x", "")  # type: ignore[arg-type]


def test_no_key_is_in_a_repr_or_a_long_name_in_an_error(tmp_path: Path) -> None:
    assert "KEY" not in repr(EncryptionKeyInfo(pair("a").private)) + repr(files(tmp_path))
    with pytest.raises(CryptoError) as caught:
        parse_public_key(b"x", "n" * 100_000)
    assert len(str(caught.value)) < 200


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(OperationNotSupported, match=r"pip install 'magnetar\[security\]'"):
        cipher.require_cryptography()


def test_a_program_without_encryption_does_not_load_the_package() -> None:
    program = (
        "import sys, magnetar; client = magnetar.Client('magnetar://localhost'); client.inner();"
        "magnetar.CryptoKeyReader('a', 'b'); assert not [m for m in sys.modules if m.startswith('cryptography')]"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
