"""Long items are left in their envelope, and say what protobuf says of them; all else is protobuf's."""

from __future__ import annotations

import random
from typing import Any

import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.checksum import encode_varint
from magnetar.runtime.grpc.messages import (
    LONG_BYTES,
    LongItem,
    find_long_item_fields,
    measure_item_to_parse,
    split_long_items,
)
from magnetar.runtime.network import find_rpc

FIELDS = find_long_item_fields(wire.ClientFrames)
PUBLISH = 0x1A


def taken(data: bytes | bytearray) -> tuple[list[LongItem], int]:
    return split_long_items(data, FIELDS)


def read(frame: Any) -> tuple[int, str, bytes]:
    kind = frame.WhichOneof("kind")
    return frame.id, kind, bytes(getattr(frame, kind))


def test_only_fields_of_bytes_beside_an_id_are_left() -> None:
    assert FIELDS == {PUBLISH: "publish"}
    for method in ("Read", "WatchTopics"):
        assert find_long_item_fields(find_rpc("Broker", method).request) == {}


@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_long_items_are_what_protobuf_makes_of_them(kind: type[bytes]) -> None:
    rng = random.Random(7)
    for _ in range(50):
        frames = [
            wire.ClientFrame(id=rng.choice((1, 127, 128, 1 << 32, (1 << 64) - 1)), publish=rng.randbytes(size))
            for size in rng.choices((LONG_BYTES, LONG_BYTES + 200, 3 * LONG_BYTES), k=rng.randrange(1, 5))
        ]
        data = kind(wire.ClientFrames(items=frames).SerializeToString())
        items, rest = taken(data)
        assert rest == len(data)
        assert [read(each) for each in items] == [read(each) for each in frames]
        assert not hasattr(items[0], "permits")


def test_they_are_taken_from_the_beginning_up_to_one_that_is_short() -> None:
    long, short = wire.ClientFrame(id=3, publish=bytes(LONG_BYTES)), wire.ClientFrame(id=4, permits=7)
    data = wire.ClientFrames(items=[long, long, short, long]).SerializeToString()
    items, rest = taken(data)
    assert [each.id for each in items] == [3, 3]
    assert list(wire.ClientFrames.FromString(data[rest:]).items) == [short, long]
    assert taken(wire.ClientFrames(items=[short, long]).SerializeToString()) == ([], 0)


def field(tag: int, content: bytes) -> bytes:
    return bytes([tag]) + encode_varint(len(content)) + content


CONTENT = bytes(LONG_BYTES)
ID = b"\x08\x05"


@pytest.mark.parametrize(
    "data",
    [
        field(0x0A, ID + field(PUBLISH, CONTENT))[:-1],  # torn
        field(0x0A, ID + field(PUBLISH, CONTENT)[:-1]),  # the field is longer than its item
        field(0x0A, ID + field(PUBLISH, CONTENT) + b"\x28\x01"),  # followed by another kind
        field(0x0A, field(PUBLISH, CONTENT) + ID),  # the id comes last
        field(0x0A, field(PUBLISH, CONTENT)),  # none
        field(0x0A, b"\x10\x05" + field(PUBLISH, CONTENT)),  # another number
        field(0x0A, ID + ID + field(PUBLISH, CONTENT)),  # twice
        field(0x0A, b"\x08" + b"\x80" * 10 + b"\x01" + field(PUBLISH, CONTENT)),  # a number that is too long
        field(0x0A, b"\x08" + b"\xff" * 9 + b"\x7f" + field(PUBLISH, CONTENT)),  # one above 64 bits
        field(0x0A, ID + field(0x12, CONTENT)),  # another field
        field(0x0A, ID + bytes(LONG_BYTES)),
        field(0x0A, b"\x08" + b"\xff" * LONG_BYTES),
        field(0x12, ID + field(PUBLISH, CONTENT)),  # no item
        b"\x0a" + b"\xff" * 40,
        b"\x0a",
    ],
)  # fmt: skip
def test_what_is_not_exactly_one_is_left_to_protobuf(data: bytes) -> None:
    assert taken(data) == ([], 0)


def test_a_number_that_never_ends_is_not_read_to_its_end() -> None:
    class Counted(bytes):
        looked = 0

        def __getitem__(self, at: Any) -> Any:
            Counted.looked += 1
            return super().__getitem__(at)

    data = Counted(field(0x0A, b"\x08" + b"\xff" * LONG_BYTES))
    taken(data)
    measure_item_to_parse(data, 0, frozenset((PUBLISH,)))
    assert Counted.looked < 60
