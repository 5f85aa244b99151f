"""A dead letter's bytes: everything of the original, and where it comes from."""

from magnetar.broker.subscription.core.redelivery_backoff import (
    DeadLetterOrigin,
    make_chunk_dead_letter,
    make_dead_letters,
)
from magnetar.proto.entry import (
    decode_batch,
    encode_batch,
    encode_broker_part,
    encode_client_part,
    encode_entry,
    encode_item_prefix,
    parse_header,
)
from magnetar.proto.entry_pb2 import MessageMetadata, SingleMessageMetadata
from magnetar.proto.names import Position, TopicName

SOURCE = DeadLetterOrigin(TopicName.parse("persistent://public/default/t-partition-3"), "s", Position(7, 9), 4, 3)
NOBODY: frozenset[int] = frozenset()


def taken_apart(letter: bytes) -> tuple[MessageMetadata, bytes, dict[str, str]]:
    header = parse_header(letter)
    ((_, payload),) = decode_batch(header, letter)
    return header.metadata, payload, {pair.key: pair.value for pair in header.metadata.properties}


def batch(*payloads: bytes, compression: int = 0) -> bytes:
    items = []
    for number, payload in enumerate(payloads):
        single = SingleMessageMetadata(payload_size=len(payload), partition_key=f"k{number}", event_time=number)
        single.properties.add(key="n", value=str(number))
        items += [encode_item_prefix(single), payload]
    metadata = MessageMetadata(producer_name="p", sequence_id=50, publish_time=1, compression=compression)
    return encode_broker_part(99, 5) + encode_batch(metadata, items, len(payloads))


def test_each_message_that_is_not_acknowledged_is_a_letter_of_its_own() -> None:
    letters = make_dead_letters(SOURCE, batch(b"a", b"b", b"c", compression=2), frozenset([1]), 1234)
    found = [taken_apart(letter) for letter in letters]
    assert [payload for _, payload, _ in found] == [b"a", b"c"]
    metadata, _, properties = found[1]
    assert (metadata.partition_key, metadata.event_time, metadata.publish_time) == ("k2", 2, 1234)
    assert properties == {
        "n": "2", "REAL_TOPIC": "persistent://public/default/t-partition-3", "REAL_SUBSCRIPTION": "s",
        "ORIGIN_MESSAGE_ID": "(7,9,3,2)", "REDELIVERY_COUNT": "4",
        "DEAD_LETTER_REASON": "given back 4 times, at most 3 redeliveries are allowed",
    }  # fmt: skip


def test_a_second_copy_has_the_same_producer_and_sequence_id() -> None:
    first = [taken_apart(letter)[0] for letter in make_dead_letters(SOURCE, batch(b"a", b"b"), NOBODY, 1)]
    again = [taken_apart(letter)[0] for letter in make_dead_letters(SOURCE, batch(b"a", b"b"), NOBODY, 2)]
    assert [(each.producer_name, each.sequence_id) for each in first] == [
        (each.producer_name, each.sequence_id) for each in again
    ]
    assert [each.sequence_id for each in first] == [0, 1]
    other = SOURCE._replace(position=Position(7, 10))
    assert taken_apart(make_dead_letters(other, batch(b"a"), NOBODY, 1)[0])[0].producer_name != first[0].producer_name


def test_a_single_message_keeps_all_it_says_of_itself_but_its_delay() -> None:
    metadata = MessageMetadata(
        producer_name="p", sequence_id=5, publish_time=1, partition_key="k", ordering_key=b"o", event_time=8,
        deliver_at_time=10**15, null_value=True,
    )  # fmt: skip
    metadata.properties.add(key="REAL_TOPIC", value="the first")
    ((found, payload, properties),) = [
        taken_apart(letter) for letter in make_dead_letters(SOURCE, encode_entry(metadata, b""), NOBODY, 1)
    ]
    assert (found.partition_key, found.ordering_key, found.event_time, found.null_value) == ("k", b"o", 8, True)
    assert not found.HasField("deliver_at_time")
    assert properties["REAL_TOPIC"] == "the first", "a letter that died again says where it came from at first"
    assert payload == b""


def test_an_entry_that_cannot_be_taken_apart_travels_as_it_is() -> None:
    damaged = bytearray(batch(b"a", b"b"))
    damaged[-1] ^= 1
    ((_, payload, properties),) = [
        taken_apart(letter) for letter in make_dead_letters(SOURCE, bytes(damaged), NOBODY, 1)
    ]
    assert payload == bytes(damaged)
    assert "damaged" in properties["DEAD_LETTER_REASON"]


def test_a_chunk_keeps_its_bytes_its_keys_and_its_place_in_the_message() -> None:
    metadata = MessageMetadata(
        producer_name="p", sequence_id=5, publish_time=1, uuid="u", num_chunks_from_msg=3, total_chunk_msg_size=30,
        chunk_id=1, compression=2, uncompressed_size=99, deliver_at_time=10**15, schema_version=b"12345678",
        ordering_key=b"\xff", encryption_param=b"iv",
    )  # fmt: skip
    metadata.encryption_keys.add(key="k", value=b"v")
    letter = make_chunk_dead_letter(
        SOURCE, encode_broker_part(99, 5) + encode_client_part(metadata, b"ciphertext"), 1234
    )
    header = parse_header(letter)
    found = header.metadata
    assert letter[header.payload_offset :] == b"ciphertext"
    assert (found.chunk_id, found.num_chunks_from_msg, found.total_chunk_msg_size) == (1, 3, 30)
    assert (found.compression, found.uncompressed_size, found.ordering_key) == (2, 99, b"\xff")
    assert (found.encryption_param, found.encryption_keys[0].value) == (b"iv", b"v")
    assert found.uuid != "u", "two subscriptions may have one dead-letter topic"
    assert found.uuid == parse_header(
        make_chunk_dead_letter(SOURCE, encode_client_part(metadata, b"x"), 5)
    ).metadata.uuid
    assert not found.HasField("deliver_at_time")
    assert found.schema_version == b"12345678", "who publishes it makes it a version of this topic"
