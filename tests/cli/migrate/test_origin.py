"""The field in which a copied entry has its place in the source."""

import pytest

from magnetar.cli.migrate.source import ORIGIN_BYTES, Origin, decode_origin, encode_copied_entry, hash_topic
from magnetar.proto.entry import (
    decode_batch,
    encode_batch,
    encode_broker_part,
    encode_client_part,
    encode_plain_items,
    parse_header,
)
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.names import Position

ORIGIN = Origin(1, Position(5, 7))


def metadata(**more: object) -> MessageMetadata:
    return MessageMetadata(producer_name="p", sequence_id=7, publish_time=1000, **more)  # type: ignore[arg-type]


def copy(entry: bytes, version: bytes | None = None) -> bytes:
    return encode_copied_entry(entry, parse_header(entry), ORIGIN, version)


def test_the_layout_is_that_of_the_example() -> None:
    entry = encode_client_part(metadata(), b"hi")
    end = parse_header(copy(entry)).payload_offset
    example = "8ab518 1c 6d677231 0000000000000001 0000000000000005 0000000000000007"
    assert copy(entry)[end - ORIGIN_BYTES : end] == bytes.fromhex(example)


@pytest.mark.parametrize("broker", [b"", encode_broker_part(3, 1)])
def test_a_copy_has_its_origin_and_another_entry_has_none(broker: bytes) -> None:
    entry = encode_client_part(metadata(partition_key="k"), b"hi")
    assert decode_origin(broker + copy(entry)) == ORIGIN
    assert decode_origin(broker + entry) is None


def test_a_copy_of_a_copy_has_the_place_in_its_own_source() -> None:
    first = copy(encode_client_part(metadata(), b"hi"))
    assert decode_origin(encode_copied_entry(first, parse_header(first), Origin(2, Position(8, 9)), None)) == Origin(
        2, Position(8, 9)
    )


def test_a_copy_keeps_everything_else() -> None:
    told = metadata(deliver_at_time=5, encryption_param=b"x", ordering_key=b"o", uuid="u", schema_version=bytes(8))
    entry = encode_client_part(told, b"hi")
    found = parse_header(copy(entry)).metadata
    found.DiscardUnknownFields()  # type: ignore[attr-defined]
    assert found == told
    batch = encode_batch(metadata(compression=3), encode_plain_items([b"a", b"b"]), 2)
    made = copy(batch)
    assert [payload for _, payload in decode_batch(parse_header(made), made)] == [b"a", b"b"]


def test_the_schema_is_named_by_the_version_of_the_destination() -> None:
    entry = encode_client_part(metadata(schema_version=(3).to_bytes(8)), b"hi")
    assert parse_header(copy(entry, (1).to_bytes(8))).metadata.schema_version == (1).to_bytes(8)
    assert parse_header(copy(entry, b"")).metadata.schema_version == b""
    assert parse_header(copy(entry)).metadata.schema_version == (3).to_bytes(8)


def test_partitions_and_topics_have_numbers_of_their_own() -> None:
    assert len({hash_topic(f"persistent://public/default/{name}") for name in ("a", "a-partition-0", "b")}) == 3
