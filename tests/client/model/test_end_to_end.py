"""What producers encrypt, consumers, readers and tables decrypt; the broker has ciphertext only."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import CryptoError, InvalidConfiguration, Timeout
from magnetar.client.consume.ranges import StoredEntry
from magnetar.client.model.encryption import KEY_CACHE_S
from magnetar.client.model.message_id import MessageId
from magnetar.client.model.settings import (
    CompressionType,
    ConsumerCryptoFailureAction,
    ConsumerType,
    InitialPosition,
)
from magnetar.proto.entry import encode_client_part, parse_header, split_broker_part
from tests.client.fake_broker import FakeBroker
from tests.client.model.keys import Keys, files
from tests.client.simulated import simulate

pytestmark = pytest.mark.run_by.with_args(simulate)

FULL = "persistent://public/default/t"
EARLIEST = InitialPosition.Earliest
FAIL, DISCARD, CONSUME = ConsumerCryptoFailureAction


def contents(count: int) -> list[bytes]:
    return [b"content %d" % at for at in range(count)]


async def sent(client: Client, messages: list[bytes], keys: Any = None, *names: str, **options: Any) -> None:
    options = {"encryption_keys": names or ("a",), "crypto_key_reader": keys or Keys("a"), **options}
    producer = await client.create_producer("t", **options)
    await producer.send_many(messages)
    await producer.close()


async def take(consumer: Any, count: int) -> list[bytes]:
    return [(await consumer.receive(60_000)).data() for _ in range(count)]


@pytest.mark.parametrize("compression", CompressionType)
@pytest.mark.parametrize("batching", [True, False])
async def test_what_is_encrypted_is_decrypted_and_the_broker_sees_none_of_it(
    client: Client, broker: FakeBroker, /, compression: CompressionType, batching: bool
) -> None:
    messages = [b"secret %d " % at * 20 for at in range(25)]
    await sent(client, messages, batching_enabled=batching, batching_max_messages=7, compression_type=compression)
    stored = broker.topics[FULL].entries
    assert len(stored) == (4 if batching else 25)
    assert not any(b"secret" in entry for entry in stored)
    ivs = {parse_header(split_broker_part(entry)[2]).metadata.encryption_param for entry in stored}
    assert len(ivs) == len(stored), "each entry has its own"
    consumer = await client.subscribe("t", "s", initial_position=EARLIEST, crypto_key_reader=Keys("a"))
    assert await take(consumer, 25) == messages
    reader = await client.create_reader("t", MessageId.earliest, crypto_key_reader=Keys("a"))
    message = await reader.read_next(1000)
    assert message.data() == messages[0]
    context = message.encryption_context()
    assert context is not None
    assert not context.is_decryption_failed()
    assert [each.key for each in context.keys()] == ["a"]  # noqa: SIM118


@pytest.mark.parametrize("compression", [CompressionType.NONE, CompressionType.ZSTD])
async def test_each_chunk_is_encrypted_alone_and_none_is_larger_than_an_entry_may_be(
    client: Client, broker: FakeBroker, /, compression: CompressionType
) -> None:
    broker.max_message_size = 2000
    content = bytes(at * 7919 % 251 for at in range(20_000)) + client.connections.world.rng.randbytes(9000)
    options = {"chunking_enabled": True, "batching_enabled": False, "compression_type": compression}
    await sent(client, [content, b"small"], Keys("a", metadata={"version": "7"}), **options)
    stored = [split_broker_part(entry)[2] for entry in broker.topics[FULL].entries]
    assert len(stored) > 4
    assert max(map(len, stored)) <= 2000
    assert len({parse_header(entry).metadata.encryption_param for entry in stored}) == len(stored)
    consumer = await client.subscribe("t", "s", initial_position=EARLIEST, crypto_key_reader=Keys("a"))
    assert await take(consumer, 2) == [content, b"small"]
    consumer.check()


async def test_a_message_is_for_each_of_its_readers_and_for_no_other(client: Client, broker: FakeBroker, /) -> None:
    await sent(client, contents(3), None, "a", "b", "a")
    for name in "ab":
        consumer = await client.subscribe("t", name, initial_position=EARLIEST, crypto_key_reader=Keys(name))
        assert await take(consumer, 3) == contents(3)
    other = await client.subscribe("t", "c", initial_position=EARLIEST, crypto_key_reader=Keys("c"))
    with pytest.raises(Timeout):
        await other.receive(1000)


async def test_a_reader_gets_the_metadata_of_the_key(client: Client, broker: FakeBroker, /) -> None:
    await sent(client, contents(1), Keys("a", metadata={"version": "7"}))
    keys = Keys("a")
    consumer = await client.subscribe("t", "s", initial_position=EARLIEST, crypto_key_reader=keys)
    message = await consumer.receive(1000)
    assert keys.asked == [("a", {"version": "7"})]
    assert message.encryption_context().keys()[0].metadata == {"version": "7"}


async def test_keys_change_in_the_middle_of_a_topic_and_a_data_key_lives_four_hours(
    client: Client, broker: FakeBroker, /
) -> None:
    keys = Keys("a")
    producer = await client.create_producer("t", encryption_key="a", crypto_key_reader=keys)
    for at in range(3):
        await producer.send(b"%d" % at)
    assert keys.wrapped == 1
    await asyncio.sleep(KEY_CACHE_S)
    await producer.send(b"3")
    assert keys.wrapped == 2
    await sent(client, [b"4"], None, "b")
    await sent(client, [b"5"])
    wrapped = [header.metadata.encryption_keys[0].value for header in broker.topics[FULL].headers]
    assert [wrapped.count(each) for each in wrapped] == [3, 3, 3, 1, 1, 1]
    both = Keys("a", "b")
    consumer = await client.subscribe("t", "s", initial_position=EARLIEST, crypto_key_reader=both)
    assert await take(consumer, 6) == [b"%d" % at for at in range(6)]
    assert [name for name, _ in both.asked] == ["a", "b"], "private keys are kept"


async def test_what_cannot_be_encrypted_is_not_sent(client: Client, broker: FakeBroker, /) -> None:
    keys = Keys("a")
    keys.broken = OSError("the text of a stranger: password hunter2")
    with pytest.raises(CryptoError, match="no public key of 'a': OSError") as caught:
        await client.create_producer("t", encryption_key="a", crypto_key_reader=keys)
    assert "hunter2" not in str(caught.value)
    keys.broken = None
    producer = await client.create_producer("t", encryption_key="a", crypto_key_reader=keys)
    await producer.send(b"one")
    await asyncio.sleep(KEY_CACHE_S)
    keys.broken = OSError("gone")
    with pytest.raises(CryptoError):
        await producer.send(b"two")
    with pytest.raises(CryptoError):
        await producer.send_many([b"three", b"four"])
    keys.broken = None
    await producer.send(b"five")
    assert len(broker.topics[FULL].entries) == 2
    producer.check()


async def test_a_key_without_a_reader_and_a_reader_without_a_key_are_refused(
    client: Client, broker: FakeBroker, /
) -> None:
    for options in (
        {"encryption_key": "a"}, {"encryption_keys": ["a"]}, {"crypto_key_reader": Keys("a")},
        {"encryption_keys": [], "crypto_key_reader": Keys("a")},
        {"encryption_key": "a", "encryption_keys": ["b"], "crypto_key_reader": Keys("a")},
        {"encryption_key": "", "crypto_key_reader": Keys("a")},
        {"encryption_keys": "a", "crypto_key_reader": Keys("a")},
        {"encryption_key": "a", "crypto_key_reader": object()},
    ):  # fmt: skip
        with pytest.raises(InvalidConfiguration):
            await client.create_producer("t", **options)
    with pytest.raises(InvalidConfiguration):
        await client.subscribe("t", "s", crypto_key_reader=object())  # type: ignore[arg-type]
    assert not broker.streams


# ---------------------------------------------------------------------------------- what is not decrypted
async def test_fail_withholds_what_is_not_decrypted_until_a_key_is_there(
    client: Client, broker: FakeBroker, /, caplog: pytest.LogCaptureFixture
) -> None:
    await sent(client, contents(20), batching_max_messages=5)
    keys = Keys()
    consumer = await client.subscribe(
        "t", "s", ConsumerType.Shared, initial_position=EARLIEST, crypto_key_reader=keys, receiver_queue_size=10,
        unacked_messages_timeout_ms=10_000,
    )  # fmt: skip
    with pytest.raises(Timeout):
        await consumer.receive(60_000)
    assert broker.redeliveries > 1
    assert not broker.topics[FULL].subscriptions["s"].done
    assert "is not decrypted: no private key decrypts it: there is no private key of 'a': KeyError" in caplog.text
    assert caplog.text.count("is not decrypted") < 10
    consumer.check()
    keys.names.add("a")
    got = []
    for _ in range(20):
        message = await consumer.receive(60_000)
        await consumer.acknowledge(message)
        got.append(message.data())
    assert sorted(got) == sorted(contents(20))
    consumer.check()


async def test_fail_without_an_ack_time_out_stops_at_a_full_queue_and_a_reconnect_brings_all_again(
    client: Client, broker: FakeBroker, /
) -> None:
    await sent(client, contents(30), batching_enabled=False)
    keys = Keys()
    consumer = await client.subscribe(
        "t", "s", initial_position=EARLIEST, crypto_key_reader=keys, receiver_queue_size=10
    )
    with pytest.raises(Timeout):
        await consumer.receive(100_000)
    assert broker.topics[FULL].subscriptions["s"].next_entry == 10, "they count against the permits"
    keys.names.add("a")
    broker.reset_cursor(FULL, "s")
    assert await take(consumer, 30) == contents(30)
    consumer.check()


@pytest.mark.parametrize("how", ["redeliver", "seek"])
async def test_what_is_withheld_comes_again_when_all_is_asked_for_again(
    client: Client, broker: FakeBroker, /, how: str
) -> None:
    await sent(client, contents(10), batching_enabled=False)
    keys = Keys()
    consumer = await client.subscribe(
        "t", "s", initial_position=EARLIEST, crypto_key_reader=keys, receiver_queue_size=4
    )
    await asyncio.sleep(20)
    keys.names.add("a")
    if how == "seek":
        await consumer.seek(MessageId.earliest)
    else:
        consumer.redeliver_unacknowledged_messages()
    assert await take(consumer, 10) == contents(10)
    consumer.check()


async def test_no_cumulative_ack_covers_what_was_withheld(client: Client, broker: FakeBroker, /) -> None:
    await sent(client, [b"0"], batching_enabled=False)
    await sent(client, [b"1"], None, "b", batching_enabled=False)
    await sent(client, [b"2"], batching_enabled=False)
    keys = Keys("a")
    consumer = await client.subscribe("t", "s", initial_position=EARLIEST, crypto_key_reader=keys)
    assert await take(consumer, 1) == [b"0"]
    message = await consumer.receive(1000)
    assert message.data() == b"2"
    await consumer.acknowledge_cumulative(message)
    await consumer.close()
    assert broker.topics[FULL].subscriptions["s"].done == {0}
    again = await client.subscribe("t", "s", crypto_key_reader=Keys("a", "b"))
    broker.reset_cursor(FULL, "s", 1)
    assert await take(again, 2) == [b"1", b"2"]


async def test_discard_acknowledges_what_is_not_decrypted(client: Client, broker: FakeBroker, /) -> None:
    await sent(client, contents(20), None, "b", batching_max_messages=5)
    await sent(client, [b"ours"])
    consumer = await client.subscribe(
        "t", "s", initial_position=EARLIEST, crypto_key_reader=Keys("a"), crypto_failure_action=DISCARD,
        receiver_queue_size=10,
    )  # fmt: skip
    assert await take(consumer, 1) == [b"ours"]
    await asyncio.sleep(1)
    assert broker.topics[FULL].subscriptions["s"].done == {0, 1, 2, 3}
    consumer.check()


async def test_consume_gives_the_ciphertext_of_an_entry_as_one_message(client: Client, broker: FakeBroker, /) -> None:
    options = {"batching_max_messages": 5, "compression_type": CompressionType.ZSTD}
    await sent(client, contents(20), None, "b", **options)
    consumer = await client.subscribe(
        "t", "s", initial_position=EARLIEST, crypto_key_reader=Keys("a"), crypto_failure_action=CONSUME,
        receiver_queue_size=10,
    )  # fmt: skip
    for header, entry in zip(broker.topics[FULL].headers, broker.topics[FULL].entries, strict=True):
        message = await consumer.receive(1000)
        context = message.encryption_context()
        assert context is not None
        assert context.is_decryption_failed()
        assert (context.batch_size(), context.algorithm(), context.compression_type()) == (5, "", 3)
        assert context.uncompressed_message_size() == header.metadata.uncompressed_size > 0
        assert context.keys()[0].value == header.metadata.encryption_keys[0].value
        assert context.param() == header.metadata.encryption_param
        assert entry.endswith(message.data())
        await consumer.acknowledge(message)
    await asyncio.sleep(1)
    assert broker.topics[FULL].subscriptions["s"].done == {0, 1, 2, 3}
    consumer.check()


async def test_a_consumer_without_keys_is_not_given_ciphertext_as_if_it_were_content(
    client: Client, broker: FakeBroker, /
) -> None:
    await sent(client, [b"one"], batching_enabled=False)
    consumer = await client.subscribe("t", "s", initial_position=EARLIEST)
    with pytest.raises(Timeout):
        await consumer.receive(1000)
    with pytest.raises(CryptoError):
        StoredEntry(-1, 7, 0, broker.topics[FULL].entries[0]).messages()


@pytest.mark.parametrize("missing", range(3))
def test_a_gap_in_the_chunks_by_a_missing_key_acknowledges_none_of_them(missing: int) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        broker.max_message_size = 2000
        content = client.connections.world.rng.randbytes(4000)
        await sent(client, [content], chunking_enabled=True, batching_enabled=False)
        assert len(broker.topics[FULL].entries) == 3
        whole = broker.topics[FULL].entries[missing]
        body = split_broker_part(whole)[2]
        header = parse_header(body)
        header.metadata.encryption_param = bytes(12)
        broken = encode_client_part(header.metadata, bytes(body[header.payload_offset :]))
        broker.topics[FULL].entries[missing] = whole[: len(whole) - len(body)] + broken
        consumer = await client.subscribe(
            "t", "s", initial_position=EARLIEST, crypto_key_reader=Keys("a"), unacked_messages_timeout_ms=10_000,
            negative_ack_redelivery_delay_ms=1000,
        )  # fmt: skip
        with pytest.raises(Timeout):
            await consumer.receive(300_000)
        assert not broker.topics[FULL].subscriptions["s"].done
        broker.topics[FULL].entries[missing] = whole
        assert (await consumer.receive(300_000)).data() == content

    simulate(body)


# ---------------------------------------------------------------------------------- tables, both faces, files
async def test_a_table_view_decrypts_and_refuses_what_it_cannot(client: Client, broker: FakeBroker, /) -> None:
    producer = await client.create_producer("t", encryption_key="a", crypto_key_reader=Keys("a"))
    await producer.send(b"v", partition_key="k")
    await producer.send(b"w", partition_key="l")
    await producer.send(None, partition_key="l")
    view = await client.create_table_view("t", crypto_key_reader=Keys("a"))
    assert dict(view.items()) == {"k": b"v"}
    for keys in (None, Keys("b")):
        with pytest.raises(CryptoError, match="is not decrypted"):
            await client.create_table_view("t", crypto_key_reader=keys)


def test_no_secret_is_in_what_producers_and_consumers_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(client: Client, broker: FakeBroker) -> None:
        keys = files(tmp_path)
        producer = await client.create_producer("t", encryption_key="a", crypto_key_reader=keys)
        await producer.send(b"the plaintext")
        consumer = await client.subscribe("t", "s", initial_position=EARLIEST, crypto_key_reader=keys)
        await consumer.receive(1000)
        assert "CryptoKeyReader" not in repr(producer.settings)
        assert "CryptoKeyReader" not in repr(consumer.settings)

    with caplog.at_level(logging.DEBUG):
        simulate(body)
    assert "plaintext" not in caplog.text
    assert "PRIVATE KEY" not in caplog.text
