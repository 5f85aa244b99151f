"""Every option is checked at the border, with a text that says what to do."""

import json
import re

import pytest

from magnetar.proto.errors import InvalidConfiguration
from magnetar.spark_connector.offsets import offset_to_json
from magnetar.spark_connector.options import (
    EARLIEST_OFFSET,
    LATEST_OFFSET,
    ExactlyOnceOptions,
    parse_sink_options,
    parse_source_options,
)

BASE = {"service.url": "magnetar://localhost:7650", "topic": "flights"}
ONCE = BASE | {"deliveryGuarantee": "exactly-once"}
FLIGHTS = "persistent://public/default/flights"


def test_names_are_case_insensitive_and_have_aliases() -> None:
    options = parse_source_options(
        {"ServiceUrl": "magnetar://h:1", "SUBSCRIBE": "a, b", "maxoffsetspertrigger": "5"}, streaming=True
    )
    assert [str(t) for t in options.topics] == ["persistent://public/default/a", "persistent://public/default/b"]
    assert options.max_offsets_per_trigger == 5


def test_offsets_are_words_or_kafkas_json() -> None:
    assert parse_source_options(BASE | {"startingOffsets": "earliest"}, streaming=True).starting == EARLIEST_OFFSET
    assert parse_source_options(BASE | {"startingOffsets": "latest"}, streaming=True).starting == LATEST_OFFSET
    parsed = parse_source_options(BASE | {"startingOffsets": '{"flights":{"0":23,"1":-2}}'}, streaming=True)
    assert parsed.starting == {FLIGHTS: {0: 23, 1: EARLIEST_OFFSET}}


def test_sparks_own_options_pass() -> None:
    assert parse_sink_options(BASE | {"checkpointLocation": "/x", "path": "y"}).topic == FLIGHTS


@pytest.mark.parametrize(
    ("options", "streaming", "says"),
    [
        ({"topic": "t"}, True, "service.url"),
        ({"service.url": "x"}, True, "exactly one"),
        (BASE | {"topicsPattern": "a.*"}, True, "exactly one"),
        (BASE | {"serviceUrl": "magnetar://other:1"}, True, "mean the same"),
        (BASE | {"topics": "other"}, True, "mean the same"),
        (BASE | {"maxOffsetPerTrigger": "5"}, True, "unknown option"),
        (BASE | {"maxOffsetsPerTrigger": "0"}, True, "at least 1"),
        (BASE | {"maxOffsetsPerTrigger": "5", "minOffsetsPerTrigger": "6"}, True, "above"),
        (BASE | {"maxTriggerDelay": "5m"}, True, "minOffsetsPerTrigger"),
        (BASE | {"minOffsetsPerTrigger": "5", "maxTriggerDelay": "soon"}, True, "duration"),
        (BASE | {"endingOffsets": "latest"}, True, "no meaning for a stream"),
        (BASE | {"maxOffsetsPerTrigger": "5"}, False, "no meaning for a batch"),
        (BASE | {"startingOffsets": "latest"}, False, "a batch cannot"),
        (BASE | {"endingOffsets": "earliest"}, False, "a batch cannot"),
        (BASE | {"startingOffsets": '{"flights":{"0":-3}}'}, True, "below -2"),
        (BASE | {"startingOffsets": '["flights"]'}, True, "startingoffsets"),
        (BASE | {"startingTimestamp": "-1"}, True, "ms since the epoch"),
        (BASE | {"startingTimestamp": str(1 << 70)}, True, "ms since the epoch"),
        (BASE | {"startingOffsetsByTimestamp": '{"flights":{"0":-1}}'}, True, "ms since the epoch"),
        (BASE | {"topic": "persistent://a/b"}, True, "topic"),
        (BASE | {"topic": "t-partition-0"}, True, "names partition"),
        (BASE | {"failOnDataLoss": "maybe"}, True, "true or false"),
        (BASE | {"valueFormat": "xml"}, True, "one of"),
        ({"service.url": "x", "topicsPattern": "("}, True, "regular expression"),
        (BASE | {"token": "/etc/token"}, True, "file:PATH"),
        (BASE | {"token": "secret", "tls.certificate.file": "c", "tls.private.key.file": "k"}, True, "two ways"),
        (BASE | {"tls.trust.certs.file": "ca.pem"}, True, "magnetar\\+ssl"),
        (BASE | {"auth.plugin": "basic"}, True, "go together"),
        (BASE | {"auth.plugin": "basic", "auth.params": "{}"}, True, "username"),
        (BASE | {"subscriptionPrefix": "x"}, True, "durableCursor"),
        (BASE | {"magnetar.client.colour": "blue"}, True, "unknown option"),
        (BASE | {"magnetar.client.operation_timeout_seconds": "soon"}, True, "cannot be"),
        (BASE | {"filter": "region ="}, True, "'filter': filter, at character 9"),
    ],
)
def test_wrong_options_are_refused_with_a_reason(options: dict[str, str], streaming: bool, says: str) -> None:
    with pytest.raises(InvalidConfiguration, match=says):
        parse_source_options(options, streaming=streaming)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (BASE | {"deliveryGuarantee": "maybe"}, "one of at-least-once, exactly-once"),
        (BASE | {"sinkId": "a"}, "'sinkid' has a meaning only with deliveryGuarantee=exactly-once"),
        (BASE | {"sendAtEnd": "true"}, "'sendatend' has a meaning only with"),
        (ONCE | {"sinkId": "a"}, "go together.*foreachBatch"),
        (ONCE | {"batchId": "1"}, "go together"),
        (ONCE | {"sinkId": " ", "batchId": "1"}, "1 to 400 characters"),
        (ONCE | {"sinkId": "a" * 401, "batchId": "1"}, "1 to 400 characters"),
        (ONCE | {"sinkId": "a", "batchId": "-1"}, "whole number"),
        (ONCE | {"sinkId": "a", "batchId": str(1 << 63)}, "whole number"),
        (ONCE | {"sinkId": "a", "txnAppId": "b", "batchId": "1"}, "mean the same"),
        (ONCE | {"onNewCheckpoint": "ignore"}, "error, adopt"),
        (ONCE | {"batchTimeout": "soon"}, "duration"),
        (ONCE | {"batchTimeout": "1s"}, "at least 10s"),
        (ONCE | {"sendAtEnd": "maybe"}, "true or false"),
        (BASE | {"startingOffsets": "earliest"}, "no meaning for a sink"),
        (BASE | {"magnetar.producer.linger": "1"}, "unknown option"),
        (BASE | {"magnetar.producer.max_pending_messages": "-1"}, "a whole number from 0"),
        (BASE | {"magnetar.producer.send_timeout_millis": "-1"}, "send_timeout_millis"),
        (BASE | {"magnetar.producer.batching_max_messages": "0"}, "a whole number from 1"),
        (BASE | {"magnetar.client.operation_timeout_seconds": "nan"}, "operation_timeout_seconds"),
        (BASE | {"magnetar.client.connection_timeout_ms": "0"}, "a whole number from 1"),
    ],
)
def test_wrong_sink_options_are_refused(options: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidConfiguration, match=says):
        parse_sink_options(options)


def test_a_stream_writes_exactly_once_where_it_can_and_takes_deltas_names() -> None:
    assert parse_sink_options(BASE).once is None
    assert parse_sink_options(BASE, streaming=True).once == ExactlyOnceOptions(batch_timeout_s=86_400.0)
    assert parse_sink_options(BASE | {"deliveryGuarantee": "at-least-once"}, streaming=True).once is None
    assert parse_sink_options(BASE, streaming=True, complete=True).once is None
    transient = BASE | {"topic": "non-persistent://public/default/t"}
    assert parse_sink_options(transient, streaming=True).once is None
    with pytest.raises(InvalidConfiguration, match="at-least-once"):
        parse_sink_options(transient | {"deliveryGuarantee": "exactly-once"}, streaming=True)
    with pytest.raises(InvalidConfiguration, match="outputMode"):
        parse_sink_options(ONCE, streaming=True, complete=True)
    assert parse_sink_options(ONCE, streaming=True).once == ExactlyOnceOptions(batch_timeout_s=86_400.0)
    assert parse_sink_options(ONCE).once == ExactlyOnceOptions(batch_timeout_s=3_600.0)
    delta = parse_sink_options(
        ONCE | {"txnAppId": "orders", "txnVersion": "7", "batchTimeout": "1h", "sendAtEnd": "false"}
    )
    assert delta.once == ExactlyOnceOptions("orders", 7, False, 3600.0, False)
    adopting = parse_sink_options(ONCE | {"sinkId": "orders", "onNewCheckpoint": "adopt"}, streaming=True)
    assert adopting.once == ExactlyOnceOptions("orders", None, True, 86_400.0)
    with pytest.raises(InvalidConfiguration, match="no meaning for a stream"):
        parse_sink_options(ONCE | {"sinkId": "orders", "batchId": "1"}, streaming=True)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("maxOffsetPerTrigger", "maxOffsetsPerTrigger"), ("max_offsets_per_trigger", "maxOffsetsPerTrigger"),
        ("startingOffset", "startingOffsets"), ("starting.offsets", "startingOffsets"),
        ("failOnDataLos", "failOnDataLoss"), ("topicPattern", "topicsPattern"), ("serviceUlr", "service.url"),
        ("service_url", "service.url"), ("crypto.private.key", "crypto.private.key.file"), ("shema", "schema"),
        ("subscription.name", "subscription"), ("tls_trust_certs_file", "tls.trust.certs.file"),
        ("magnetar.client.operation_timeout_second", "magnetar.client.operation_timeout_seconds"),
        ("kafka.bootstrap.servers", "service.url"), ("assign", "startingOffsets"), ("groupIdPrefix", "Prefix"),
        ("kafka.max.poll.records", "magnetar.client"), ("kafka.sasl.jaas.config", "auth.params"),
        ("kafka.ssl.truststore.location", "tls.trust.certs.file"), ("pulsar.reader.receiverQueueSize", "known:"),
        ("admin.url", "service.url alone"), ("password", "auth.plugin=basic"),
    ],
)  # fmt: skip
def test_a_misspelt_option_is_refused_with_the_nearest_name(name: str, meant: str) -> None:
    lower = {name.lower(): "1"}
    with pytest.raises(InvalidConfiguration, match=f"unknown option '{re.escape(name.lower())}'") as caught:
        parse_source_options({"topic": "t", "service.url": "magnetar://localhost", **lower}, streaming=True)
    assert meant in str(caught.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("sink.id", "sinkId"), ("deliveryGuarantees", "deliveryGuarantee"), ("kafka.transactional.id", "sinkId"),
     ("magnetar.producer.batching_max_message", "magnetar.producer.batching_max_messages")],
)  # fmt: skip
def test_a_misspelt_option_of_a_sink_is_refused_with_the_nearest_name(name: str, meant: str) -> None:
    with pytest.raises(InvalidConfiguration, match=f"unknown option '{re.escape(name.lower())}'") as caught:
        parse_sink_options(BASE | {name.lower(): "1"})
    assert repr(meant) in str(caught.value) or f"use {meant}" in str(caught.value)


def test_offsets_that_a_query_reported_are_offsets_to_start_at() -> None:
    """With the incarnations of their topics, which `startingOffsets` has not."""
    reported = json.dumps(offset_to_json({(FLIGHTS, 0): 7, (FLIGHTS, 1): 9}, {(FLIGHTS, 0): 5, (FLIGHTS, 1): 6}))
    assert "incarnations" in reported
    assert parse_source_options(
        BASE | {"startingOffsets": reported}, streaming=True
    ).starting == {FLIGHTS: {0: 7, 1: 9}}
