"""Parsers of what Pulsar's clients and tools send: frames and commands, schemas, payloads by a schema, REST bodies."""

import json
import struct
from collections.abc import Callable
from typing import Any

from magnetar.broker.cluster.schema_core import CheckedSchemaDefinition, why_consumer_cannot_read, why_incompatible
from magnetar.broker.pulsar import consumer, lookup, translate
from magnetar.broker.pulsar.frames import PulsarFrameSplitter, encode_frame, parse_frame, parse_sent_entry
from magnetar.broker.rest import application  # noqa: F401 (the routes of all modules, in their order)
from magnetar.broker.rest.call import HttpError
from magnetar.broker.rest.policies import POLICY_ROWS, convert_value, parse_namespace_policies
from magnetar.client.model.fields import CheckedSchema
from magnetar.client.model.schema import decode_avro_payload, parse_avro_schema
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.entry import encode_client_part
from magnetar.proto.entry_pb2 import KeyValue, MessageIdData, MessageMetadata
from magnetar.proto.errors import MagnetarError
from magnetar.proto.schema import Compatibility, SchemaInfo, SchemaType

FRAME_BYTES_MAX = 1 << 20


# ---------------------------------------------------------------------------------- frames
def frames() -> list[bytes]:
    schema = pulsar.Schema(name="s", schema_data=b'{"type":"int"}', type=SchemaType.AVRO)
    start = MessageIdData(ledgerId=1, entryId=2, batch_index=3, ack_set=[5, 1 << 62])
    shared = pulsar.KeySharedMeta(keySharedMode=pulsar.STICKY, hashRanges=[pulsar.IntRange(start=0, end=9)])
    subscribe = pulsar.CommandSubscribe(
        topic="t", subscription="s", subType=pulsar.CommandSubscribe.Key_Shared, consumer_id=1, request_id=2,
        durable=False, start_message_id=start, keySharedMeta=shared, schema=schema,
        metadata=[KeyValue(key="k", value="v")],
    )  # fmt: skip
    send = encode_frame(send=pulsar.CommandSend(producer_id=1, sequence_id=7, num_messages=2))
    entry = encode_client_part(MessageMetadata(producer_name="p", sequence_id=7, publish_time=1), b"payload")
    return [
        encode_frame(connect=pulsar.CommandConnect(client_version="x", protocol_version=21, auth_data=b"t")),
        encode_frame(subscribe=subscribe), encode_frame(ping=pulsar.CommandPing()) * 3,
        encode_frame(producer=pulsar.CommandProducer(topic="t", producer_id=1, request_id=2, schema=schema)),
        struct.pack(">I", len(send) - 4 + len(entry)) + send[4:] + entry,
        encode_frame(ack=pulsar.CommandAck(consumer_id=1, ack_type=0, message_id=[start] * 3)),
        encode_frame(watch_topic_list=pulsar.CommandWatchTopicList(
            request_id=1, watcher_id=1, namespace="public/default", topics_pattern="public/default/(a|b)*c{2,3}.*"
        )),
        encode_frame(get_schema=pulsar.CommandGetSchema(request_id=1, topic="t", schema_version=bytes(8))),
    ]  # fmt: skip


def run_frames(data: bytes) -> None:
    """In two pieces, as TCP brings them."""
    cutter = PulsarFrameSplitter(FRAME_BYTES_MAX)
    for part in (data[: len(data) // 3], data[len(data) // 3 :]):
        while part:
            room = cutter.get_free_buffer()
            size = min(len(room), len(part))
            room[:size] = part[:size]
            part = part[size:]
            for each in cutter.receive_frames(size):
                _take(each)
            assert cutter.held_bytes <= 2 * FRAME_BYTES_MAX, "more is held than a frame may have"


def _take(each: memoryview) -> None:
    command, rest = parse_frame(each)
    for work in _WORK.get(command.type, ()):
        work(command, rest)


def _ids(command: pulsar.BaseCommand, rest: memoryview) -> None:
    for each in command.ack.message_id:
        translate.parse_message_id(each)


_WORK: dict[int, tuple[Callable[[pulsar.BaseCommand, memoryview], object], ...]] = {
    pulsar.BaseCommand.SEND: (lambda command, rest: parse_sent_entry(rest),),
    pulsar.BaseCommand.ACK: (_ids,),
    pulsar.BaseCommand.SUBSCRIBE: (lambda command, rest: consumer.parse_subscribe_command(command.subscribe).check(),),
    pulsar.BaseCommand.PRODUCER: (lambda command, rest: translate.parse_schema(command.producer.schema),),
    pulsar.BaseCommand.WATCH_TOPIC_LIST: (
        lambda command, rest: lookup.compile_topic_pattern(command.watch_topic_list.topics_pattern)(
            "public/default/abc"
        ),
    ),
}


# ---------------------------------------------------------------------------------- schemas
_RECORD: dict[str, Any] = {
    "type": "record", "name": "Order", "namespace": "shop", "fields": [
        {"name": "id", "type": "long"}, {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "lines", "type": {"type": "array", "items": {
            "type": "record", "name": "Line", "fields": [{"name": "n", "type": "int", "aliases": ["m"]}]}}},
        {"name": "kind", "type": {"type": "enum", "name": "Kind", "symbols": ["A", "B"], "default": "A"}},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "next", "type": ["null", "Order"], "default": None},
        {"name": "by", "type": {"type": "map", "values": {"type": "fixed", "name": "F", "size": 4}}},
    ],
}  # fmt: skip
_TEXT = json.dumps(_RECORD).encode()
_DEFINED = (
    SchemaType.AVRO, SchemaType.JSON, SchemaType.PROTOBUF_NATIVE, SchemaType.KEY_VALUE, SchemaType.STRING
)  # fmt: skip
_OLD = CheckedSchemaDefinition.parse(SchemaInfo(type=SchemaType.AVRO, data=_TEXT))


def schemas() -> list[bytes]:
    pair = struct.pack(">I", 5) + b'"int"' + struct.pack(">I", len(_TEXT)) + _TEXT
    return [_TEXT, b'"int"', b"[" * 3000, b'["null", "int"]', b"{}", pair, b'{"type": "fixed", "name": "x", "size": 1}']


def run_schemas(data: bytes) -> None:
    """As a definition of each type that has one, and against one that is there."""
    for type_ in _DEFINED:
        properties = {"key.schema.type": "AVRO", "value.schema.type": "JSON", "kv.encoding.type": "INLINE"}
        try:
            new = CheckedSchemaDefinition.parse(SchemaInfo(type=type_, data=data, properties=properties))
        except MagnetarError:
            continue
        for mode in (Compatibility.FULL_TRANSITIVE, Compatibility.BACKWARD):
            why_incompatible(mode, new, [(0, _OLD)])
            why_consumer_cannot_read(mode, new, [(0, _OLD)])


_WRITER = CheckedSchema(parse_avro_schema(SchemaInfo(type=SchemaType.AVRO, data=_TEXT)))


def payloads() -> list[bytes]:
    one = b"\x02\x02\x04hi\x02\x06\x00\x00\x02\x00\x00"
    return [one, bytes(20), b"\x02\x00" + b"\x80" * 12, b"\x02\x00" + b"\x02" * 4000]


def run_payload(data: bytes) -> None:
    decode_avro_payload(data, _WRITER)


# ---------------------------------------------------------------------------------- REST
def bodies() -> list[bytes]:
    policies = {
        "max_consumers_per_topic": 3, "retention_policies": {"retentionTimeInMinutes": 5, "retentionSizeInMB": 5},
        "backlog_quota_map": {"destination_storage": {"limitSize": 1 << 20}}, "schema_validation_enforced": True,
        "topicDispatchRate": {"standalone": {"dispatchThrottlingRateInMsg": 100, "ratePeriodInSecond": 7}},
    }  # fmt: skip
    return [json.dumps(policies).encode(), b"{}", b"3", b'"10"', b'{"limit": "10"}', b"[" * 2000, b"null"]


def run_body(data: bytes) -> None:
    """As the policies of a namespace, and as the value of each policy."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(given, dict):
        _refused(lambda: parse_namespace_policies(given))
    for row in POLICY_ROWS:
        _refused(lambda row=row: row.take(convert_value(given, row.kind, row.namespace)))  # type: ignore[misc]


def _refused(work: Callable[[], object]) -> None:
    try:
        work()
    except (HttpError, MagnetarError):
        return
