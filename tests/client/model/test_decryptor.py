"""Encryptor and decryptor alone: renewal, caches, and metadata of a stranger."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from magnetar.client.client import Client
from magnetar.client.common.errors import ChecksumError, CryptoError, Timeout
from magnetar.client.model import encryption as decryptor_module
from magnetar.client.model import encryption as encryptor_module
from magnetar.client.model.encryption import (
    ERROR_CACHE_S,
    KEY_CACHE_MAX,
    KEY_CACHE_S,
    WRAPPED_KEY_BYTES_MAX,
    WRAPPED_KEYS_MAX,
    Decryptor,
    Encryptor,
    parse_private_key,
)
from magnetar.client.model.settings import ConsumerCryptoFailureAction, InitialPosition
from magnetar.proto.entry import encode_client_part, parse_header
from magnetar.proto.entry_pb2 import MessageMetadata
from tests.client.fake_broker import FakeBroker
from tests.client.model.keys import Keys, pair
from tests.client.simulated import simulate
from tests.support.steps import slowness

FULL = "persistent://public/default/t"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def fresh() -> MessageMetadata:
    return MessageMetadata(producer_name="p", sequence_id=1, publish_time=1)


def encrypted(payload: bytes = b"payload", *names: str) -> tuple[MessageMetadata, bytes]:
    metadata = fresh()
    return metadata, Encryptor(Keys(), names or ("a",), Clock())(metadata, payload)


def test_a_data_key_is_renewed_after_four_hours_and_before_its_last_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryptor_module, "DATA_KEY_USES_MAX", 5)
    clock, keys = Clock(), Keys()
    encrypt = Encryptor(keys, ["a"], clock)
    decrypt = Decryptor(Keys("a"), clock)
    wrapped = []
    for at in range(12):
        metadata = fresh()
        assert decrypt(metadata, encrypt(metadata, b"%d" % at)) == b"%d" % at
        wrapped.append(metadata.encryption_keys[0].value)
    assert [wrapped.count(each) for each in wrapped] == [5] * 10 + [2] * 2
    clock.now = KEY_CACHE_S
    encrypt(fresh(), b"")
    assert keys.wrapped == 4


def test_chunks_of_a_message_have_one_data_key() -> None:
    clock, keys = Clock(), Keys()
    encrypt = Encryptor(keys, ["a"], clock)
    clock.now = KEY_CACHE_S
    chunk = fresh()
    chunk.num_chunks_from_msg = 2
    encrypt(chunk, b"x")
    assert (keys.wrapped, len(chunk.encryption_keys)) == (1, 1)
    encrypt(fresh(), b"x")
    assert keys.wrapped == 2


def test_keys_are_kept_for_four_hours_and_failures_for_seconds() -> None:
    clock, keys = Clock(), Keys()
    decrypt = Decryptor(keys, clock)
    metadata, ciphertext = encrypted()
    for _ in range(3):
        with pytest.raises(CryptoError, match="no private key of 'a': KeyError"):
            decrypt(metadata, ciphertext)
    assert len(keys.asked) == 1
    keys.names.add("a")
    clock.now += ERROR_CACHE_S
    for _ in range(3):
        assert decrypt(metadata, ciphertext) == b"payload"
    assert len(keys.asked) == 2
    clock.now += KEY_CACHE_S
    assert decrypt(metadata, ciphertext) == b"payload"
    assert len(keys.asked) == 3


@pytest.mark.parametrize("length", [0, 1, 11, 13, 16, 1 << 20])
def test_an_iv_of_another_length_is_refused(length: int) -> None:
    metadata, ciphertext = encrypted()
    metadata.encryption_param = bytes(length)
    with pytest.raises(CryptoError, match=f"encryption_param has {length} bytes"):
        Decryptor(Keys("a"), Clock())(metadata, ciphertext)


def test_changed_and_cut_ciphertext_is_refused() -> None:
    metadata, ciphertext = encrypted()
    decrypt = Decryptor(Keys("a"), Clock())
    for broken in (b"", ciphertext[:15], ciphertext[:-1], ciphertext + b"x", bytes(len(ciphertext))):
        with pytest.raises(CryptoError):
            decrypt(metadata, broken)
    assert decrypt(metadata, ciphertext) == b"payload"


def test_ten_thousand_keys_and_huge_ones_cost_nothing() -> None:
    keys = Keys("a")
    decrypt = Decryptor(keys, Clock())
    metadata, ciphertext = encrypted()
    for _ in range(10_000):
        metadata.encryption_keys.add(key="a", value=b"x" * 256)
    began = time.process_time()
    with pytest.raises(CryptoError, match=f"for 10001 keys; the limit is {WRAPPED_KEYS_MAX}"):
        decrypt(metadata, ciphertext)
    assert not keys.asked
    metadata, ciphertext = encrypted()
    metadata.encryption_keys[0].value += bytes(4 << 20)
    metadata.encryption_keys.add(key="n" * (WRAPPED_KEY_BYTES_MAX + 1), value=b"")
    with pytest.raises(CryptoError, match="larger than"):
        decrypt(metadata, ciphertext)
    assert not keys.asked
    assert time.process_time() - began < 5 * slowness()


def test_the_caches_are_bounded() -> None:
    decrypt = Decryptor(Keys(), Clock())
    metadata, ciphertext = encrypted()
    for at in range(KEY_CACHE_MAX + 50):
        metadata.encryption_keys[0].key, metadata.encryption_keys[0].value = f"{at}", b"%d" % at
        with pytest.raises(CryptoError):
            decrypt(metadata, ciphertext)
    assert max(len(decrypt._data_keys), len(decrypt._failures), len(decrypt._private_keys)) <= KEY_CACHE_MAX


def test_what_failed_under_one_name_hides_no_other() -> None:
    decrypt = Decryptor(Keys("a"), Clock())
    metadata, ciphertext = encrypted()
    own, metadata.encryption_keys[0].key = metadata.encryption_keys[0].key, "evil"
    with pytest.raises(CryptoError, match="no private key of 'evil'"):
        decrypt(metadata, ciphertext)
    metadata.encryption_keys[0].key = own
    assert decrypt(metadata, ciphertext) == b"payload"


def test_one_private_key_is_parsed_once_however_many_names_a_stranger_gives_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[str] = []

    def counted(pem: bytes, name: str) -> RSAPrivateKey:
        parsed.append(name)
        return parse_private_key(pem, name)

    monkeypatch.setattr(decryptor_module, "parse_private_key", counted)
    metadata, ciphertext = encrypted()
    right = metadata.encryption_keys[0].value
    del metadata.encryption_keys[:]
    for at in range(WRAPPED_KEYS_MAX - 1):
        metadata.encryption_keys.add(key=f"{at}", value=bytes([at]) * 256)
    metadata.encryption_keys.add(key="a", value=right)

    class OneFile(Keys):
        def get_private_key(self, name: str, metadata: Mapping[str, str]) -> bytes:
            return pair("a").private

    assert Decryptor(OneFile(), Clock())(metadata, ciphertext) == b"payload"
    assert parsed == ["0"]


HOSTILE = st.builds(
    lambda keys, iv, algorithm, batch, chunks, compression: (keys, iv, algorithm, batch, chunks, compression),
    st.lists(st.tuples(st.sampled_from(["a", "b", "", "\u00e4" * 9]), st.binary(max_size=300)), min_size=1, max_size=5),
    st.binary(max_size=20),
    st.text(max_size=5),
    st.none() | st.integers(1, 3),
    st.integers(0, 3),
    st.integers(0, 4),
)


@settings(max_examples=60, deadline=None)
@given(HOSTILE, st.binary(max_size=100), st.booleans(), st.sampled_from(ConsumerCryptoFailureAction))
def test_no_metadata_of_encryption_ends_a_consumer(
    hostile: tuple[list[tuple[str, bytes]], bytes, str, int | None, int, int], payload: bytes, genuine: bool,
    action: ConsumerCryptoFailureAction,
) -> None:  # fmt: skip
    """`genuine`: the ciphertext is right, and what is in it is a stranger's."""
    keys, iv, algorithm, batch, chunks, compression = hostile

    async def body(client: Client, broker: FakeBroker) -> None:
        metadata = fresh()
        if genuine:
            payload_ = Encryptor(Keys(), ["a"], Clock())(metadata, payload)
        else:
            payload_, metadata.encryption_param = payload, iv
        for name, value in keys:
            metadata.encryption_keys.add(key=name, value=value)
        metadata.encryption_algo = algorithm
        if batch is not None and batch * 6 <= len(payload_):
            metadata.num_messages_in_batch = batch
        if chunks:
            metadata.num_chunks_from_msg, metadata.uuid, metadata.total_chunk_msg_size = chunks, "u", 10
        if compression and not metadata.HasField("num_messages_in_batch"):
            metadata.compression = compression  # type: ignore[assignment]
            metadata.uncompressed_size = 100
        entry = encode_client_part(metadata, payload_)
        broker.store(broker.topic(FULL), entry, parse_header(entry))
        plain = encode_client_part(fresh(), b"plain")
        broker.store(broker.topic(FULL), plain, parse_header(plain))
        consumer = await client.subscribe(
            "t", "s", initial_position=InitialPosition.Earliest, crypto_key_reader=Keys("a"),
            crypto_failure_action=action,
        )  # fmt: skip
        got = b""
        while got != b"plain":
            try:
                got = (await consumer.receive(1000)).data()
            except ChecksumError:
                continue
        with pytest.raises(Timeout):
            await consumer.receive(100)
        consumer.check()

    simulate(body)
