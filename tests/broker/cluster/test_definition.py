"""What a schema of each type has to be, and which ones go together."""

import base64
import itertools
import json
from typing import Any

import pytest
from google.protobuf import struct_pb2
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from magnetar.broker.cluster.schema_core import CheckedSchemaDefinition, why_consumer_cannot_read, why_incompatible
from magnetar.proto.errors import InvalidSchema
from magnetar.proto.schema import (
    Compatibility,
    SchemaInfo,
    SchemaType,
    decode_version,
    encode_version,
    join_key_value,
    split_key_value,
)


def avro(*fields: dict[str, Any], type_: SchemaType = SchemaType.AVRO, **more: Any) -> SchemaInfo:
    text = json.dumps({"type": "record", "name": "R", "fields": fields, **more})
    return SchemaInfo(type=type_, data=text.encode())


def field(name: str, type_: Any = "int", **more: Any) -> dict[str, Any]:
    return {"name": name, "type": type_, **more}


def native(root: str = "google.protobuf.Struct", **changed: Any) -> SchemaInfo:
    file = FileDescriptorProto.FromString(struct_pb2.DESCRIPTOR.serialized_pb)
    text = {
        "fileDescriptorSet": base64.b64encode(FileDescriptorSet(file=[file]).SerializeToString()).decode(),
        "rootMessageTypeName": root, "rootFileDescriptorName": file.name, **changed,
    }  # fmt: skip
    return SchemaInfo(type=SchemaType.PROTOBUF_NATIVE, data=json.dumps(text).encode())


NONE = SchemaInfo(type=SchemaType.NONE)
INT32, STRING = SchemaInfo(type=SchemaType.INT32), SchemaInfo(type=SchemaType.STRING)
PLAIN = avro(field("a"))
WITH_DEFAULT = avro(field("a"), field("b", default=1))
WITHOUT_DEFAULT = avro(field("a"), field("b"))


def of(*given: SchemaInfo) -> list[tuple[int, CheckedSchemaDefinition]]:
    return [(number, CheckedSchemaDefinition.parse(each)) for number, each in enumerate(given)]


@pytest.mark.parametrize(
    "info", [INT32, STRING, SchemaInfo(type=SchemaType.STRING, data=b"null"), PLAIN, native(),
             native("google.protobuf.Value"), join_key_value(STRING, PLAIN), join_key_value(NONE, INT32),
             SchemaInfo(type=SchemaType.EXTERNAL, data=b"anything"), avro(type_=SchemaType.JSON),
             SchemaInfo(type=SchemaType.JSON, data=b'{"type":"object","id":"urn:x","properties":{}}')],
)  # fmt: skip
def test_a_schema_of_each_type_is_taken_and_equals_itself(info: SchemaInfo) -> None:
    assert CheckedSchemaDefinition.parse(info).fingerprint == CheckedSchemaDefinition.parse(info).fingerprint
    assert why_incompatible(Compatibility.FULL_TRANSITIVE, CheckedSchemaDefinition.parse(info), of(info)) is None


@pytest.mark.parametrize(
    ("info", "why"),
    [
        (NONE, "not registered"), (SchemaInfo(type=SchemaType.AUTO_CONSUME), "not registered"),
        (SchemaInfo(type=SchemaType.INT32, data=b"x"), "has no definition"),
        (SchemaInfo(type=SchemaType.AVRO), "no JSON"),
        (SchemaInfo(type=SchemaType.AVRO, data=b'["null","int"]'), "is a union"),
        (SchemaInfo(type=SchemaType.AVRO, data=b'{"type":"object"}'), "there is no type"),
        (native("google.protobuf.Nothing"), "there is no message"), (native("other.Struct"), "there is no message"),
        (native(rootFileDescriptorName="x.proto"), "no file 'x.proto'"), (native(fileDescriptorSet="é"), "no set"),
        (SchemaInfo(type=SchemaType.PROTOBUF_NATIVE, data=b"{}"), "no set of descriptors"),
        (SchemaInfo(type=SchemaType.KEY_VALUE, data=b"\0\0\0\x05ab"), "5 bytes, and 2 are there"),
        (SchemaInfo(type=SchemaType.KEY_VALUE, data=b"\0"), "ends before a length"),
        (SchemaInfo(type=SchemaType.KEY_VALUE, data=bytes(9)), "1 bytes follow"),
        (SchemaInfo(type=SchemaType.KEY_VALUE, data=b"\0\0\0\0\0\0\0\x02{}"), "no type .properties"),
        (join_key_value(join_key_value(INT32, INT32), INT32), "a half of KEY_VALUE is a KEY_VALUE"),
        (SchemaInfo(type=SchemaType.AVRO, data=bytes(600_000)), "at most"),
        (SchemaInfo(type=SchemaType.INT32, properties={"a": "b" * 70_000}), "name and properties"),
        (SchemaInfo(type=SchemaType.AVRO, data=b'"\xff"'), "no JSON"),
    ],
)  # fmt: skip
def test_what_is_no_schema_of_its_type_is_refused(info: SchemaInfo, why: str) -> None:
    with pytest.raises(InvalidSchema, match=why):
        CheckedSchemaDefinition.parse(info)


def test_descriptors_whose_imports_are_missing_are_refused() -> None:
    lonely = FileDescriptorProto(name="a.proto", dependency=["b.proto"])
    lonely.message_type.add(name="A")
    text = {
        "fileDescriptorSet": base64.b64encode(FileDescriptorSet(file=[lonely]).SerializeToString()).decode(),
        "rootMessageTypeName": "A", "rootFileDescriptorName": "a.proto",
    }  # fmt: skip
    with pytest.raises(InvalidSchema, match=r"imports 'b[.]proto'"):
        CheckedSchemaDefinition.parse(SchemaInfo(type=SchemaType.PROTOBUF_NATIVE, data=json.dumps(text).encode()))


def test_equal_definitions_have_equal_hashes_and_others_not() -> None:
    spaced = SchemaInfo(type=SchemaType.AVRO, data=json.dumps(json.loads(PLAIN.data), indent=3).encode(), name="x")
    assert CheckedSchemaDefinition.parse(spaced).fingerprint == CheckedSchemaDefinition.parse(PLAIN).fingerprint
    as_json = SchemaInfo(type=SchemaType.JSON, data=PLAIN.data)
    assert CheckedSchemaDefinition.parse(as_json).fingerprint != CheckedSchemaDefinition.parse(PLAIN).fingerprint
    inline, separated = join_key_value(STRING, PLAIN), join_key_value(STRING, PLAIN, separated=True)
    assert inline.data == separated.data
    assert CheckedSchemaDefinition.parse(inline).fingerprint != CheckedSchemaDefinition.parse(separated).fingerprint
    assert split_key_value(inline).key.type is SchemaType.STRING
    assert split_key_value(inline).value.data == PLAIN.data


# ------------------------------------------------------------------ together
CASES = [
    # new, old: whether BACKWARD and FORWARD let it in
    (PLAIN, PLAIN, True, True),
    (WITH_DEFAULT, PLAIN, True, True),
    (WITHOUT_DEFAULT, PLAIN, False, True),
    (PLAIN, WITH_DEFAULT, True, True),
    (PLAIN, WITHOUT_DEFAULT, True, False),
    (avro(field("a", "long")), PLAIN, True, False),
    (avro(field("a", ["null", "int"])), PLAIN, True, False),
    (avro(field("c")), PLAIN, False, False),
    (avro(field("c", aliases=["a"])), PLAIN, True, False),
    (join_key_value(STRING, WITHOUT_DEFAULT), join_key_value(STRING, PLAIN), False, True),
    (join_key_value(INT32, PLAIN), join_key_value(STRING, PLAIN), False, False),
    (join_key_value(STRING, PLAIN), join_key_value(STRING, PLAIN, separated=True), False, False),
    (native("google.protobuf.Value"), native(), False, False),
    (INT32, STRING, False, False),
    (SchemaInfo(type=SchemaType.JSON, data=PLAIN.data), PLAIN, False, False),
]


@pytest.mark.parametrize(("new", "old", "backward", "forward"), CASES)
def test_each_mode_lets_in_what_its_rule_says(new: SchemaInfo, old: SchemaInfo, backward: bool, forward: bool) -> None:
    expected = {
        Compatibility.ALWAYS_COMPATIBLE: True, Compatibility.ALWAYS_INCOMPATIBLE: False,
        Compatibility.BACKWARD: backward, Compatibility.FORWARD: forward, Compatibility.FULL: backward and forward,
    }  # fmt: skip
    for mode, allowed in expected.items():
        why = why_incompatible(mode, CheckedSchemaDefinition.parse(new), of(old))
        assert (why is None) == allowed, (mode, why)
        assert why_incompatible(mode, CheckedSchemaDefinition.parse(new), []) is None
    for mode in (Compatibility.BACKWARD, Compatibility.FORWARD, Compatibility.FULL):
        transitive = Compatibility(f"{mode.value}_transitive")
        assert (why_incompatible(transitive, CheckedSchemaDefinition.parse(new), of(old)) is None) == expected[mode]
    assert (
        why_consumer_cannot_read(Compatibility.FULL, CheckedSchemaDefinition.parse(new), of(old)) is None
    ) == backward


def test_a_transitive_mode_looks_at_all_and_its_refusal_names_the_version() -> None:
    there = of(WITHOUT_DEFAULT, PLAIN)
    new = CheckedSchemaDefinition.parse(avro(field("a"), field("b", "string", default="")))
    assert why_incompatible(Compatibility.FULL, new, there) is None
    why = why_incompatible(Compatibility.FULL_TRANSITIVE, new, there)
    assert why is not None
    assert "FULL_TRANSITIVE against version 0" in why
    assert "field `b`: string does not read int" in why
    one, all_ = Compatibility.BACKWARD, Compatibility.BACKWARD_TRANSITIVE
    for some in itertools.permutations([PLAIN, WITH_DEFAULT, WITHOUT_DEFAULT, avro(field("a", "long"))], 3):
        *before, added = some
        if why_incompatible(all_, CheckedSchemaDefinition.parse(added), of(*before)) is None:
            assert why_incompatible(one, CheckedSchemaDefinition.parse(added), of(*before)) is None


def test_a_version_is_eight_bytes() -> None:
    assert encode_version(0) == bytes(8)
    assert decode_version(encode_version(2**40)) == 2**40
    assert encode_version(None) == b""
    assert decode_version(b"") is decode_version(b"1234567") is None
    assert decode_version(encode_version(5) + bytes(56)) == 5
