"""Parameters, their order and their defaults are those of `pulsar-client` 3.13: positional calls mean the same."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

import magnetar
from magnetar.client import aio
from magnetar.client.blocking import client as sync
from tests.client.fake_broker import FakeBroker
from tests.client.simulated import simulate

SEND = (
    "properties=None partition_key=None ordering_key=None sequence_id=None replication_clusters=None"
    " disable_replication=False event_timestamp=None deliver_at=None deliver_after=None"
)
CLIENT = (
    "service_url authentication=None operation_timeout_seconds=30 io_threads=1 message_listener_threads=1"
    " concurrent_lookup_requests=50000 log_conf_file_path=None stats_interval_in_seconds=600 use_tls=False"
    " tls_trust_certs_file_path=None tls_allow_insecure_connection=False tls_validate_hostname=False logger=None"
    " connection_timeout_ms=10000 listener_name=None tls_private_key_file_path=None tls_certificate_file_path=None"
)
PRODUCER = (
    "topic producer_name=None schema=None initial_sequence_id=None send_timeout_millis=30000 compression_type=NONE"
    " max_pending_messages=1000 max_pending_messages_across_partitions=50000 block_if_queue_full=False"
    " batching_enabled=False batching_max_messages=1000 batching_max_allowed_size_in_bytes=131072"
    " batching_max_publish_delay_ms=10 chunking_enabled=False message_routing_mode=RoundRobinDistribution"
    " lazy_start_partitioned_producers=False properties=None batching_type=Default encryption_key=None"
    " crypto_key_reader=None access_mode=Shared message_router=None"
)
CONSUMER = (
    "topic subscription_name consumer_type=Exclusive schema=None message_listener=None receiver_queue_size=1000"
    " max_total_receiver_queue_size_across_partitions=50000 consumer_name=None unacked_messages_timeout_ms=None"
    " broker_consumer_stats_cache_time_ms=30000 negative_ack_redelivery_delay_ms=60000 is_read_compacted=False"
    " properties=None pattern_auto_discovery_period=60 initial_position=Latest crypto_key_reader=None"
    " replicate_subscription_state_enabled=False max_pending_chunked_message=10"
    " auto_ack_oldest_chunked_message_on_queue_full=False start_message_id_inclusive=False batch_receive_policy=None"
    " key_shared_policy=None batch_index_ack_enabled=False regex_subscription_mode=PersistentOnly"
    " dead_letter_policy=None crypto_failure_action=FAIL"
)
READER = (
    "topic start_message_id schema=None reader_listener=None receiver_queue_size=1000 reader_name=None"
    " subscription_role_prefix=None is_read_compacted=False crypto_key_reader=None start_message_id_inclusive=False"
    " crypto_failure_action=FAIL"
)
TABLE: list[tuple[Callable[..., Any], str]] = [
    (sync.Client, CLIENT),
    (sync.Client.create_producer, PRODUCER),
    (sync.Client.subscribe, CONSUMER),
    (sync.Client.create_reader, READER),
    (sync.Client.get_topic_partitions, "topic"),
    (sync.Producer.send, f"content {SEND}"),
    (sync.Producer.send_async, f"content callback {SEND}"),
    (sync.Consumer.receive, "timeout_millis=None"),
    (sync.Consumer.acknowledge, "message"),
    (sync.Consumer.acknowledge_cumulative, "message"),
    (sync.Consumer.negative_acknowledge, "message"),
    (sync.Consumer.seek, "messageid"),
    (sync.Reader.read_next, "timeout_millis=None"),
    (sync.Reader.seek, "messageid"),
    (aio.Client, CLIENT),
    (aio.Client.create_producer, PRODUCER.replace("batching_enabled=False", "batching_enabled=True")),
    (
        aio.Client.subscribe,
        CONSUMER.replace(" message_listener=None", "").replace(" pattern_auto_discovery_period=60", "")
        + " is_pattern_topic=False",
    ),
    (aio.Client.create_reader, READER.replace(" reader_listener=None", "")),
    (aio.Client.get_topic_partitions, "topic"),
    (aio.Producer.send, f"content {SEND}".replace("disable_replication=False", "disable_replication=None")),
    (aio.Consumer.receive, "timeout_millis=None"),  # ours: pulsar.asyncio has no time-outs
    (aio.Consumer.acknowledge, "message"),
    (aio.Consumer.acknowledge_cumulative, "message"),
    (aio.Consumer.negative_acknowledge, "message"),
    (aio.Consumer.seek, "messageid"),
    (aio.Reader.read_next, "timeout_millis=None"),
    (aio.Reader.seek, "messageid"),
]
"""`schema=None` is BytesSchema(), which `pulsar.Client` has as its default."""


def _written(parameter: inspect.Parameter) -> str:
    default = parameter.default
    return parameter.name if default is parameter.empty else f"{parameter.name}={getattr(default, 'name', default)}"


@pytest.mark.parametrize(("method", "expected"), TABLE, ids=lambda each: getattr(each, "__qualname__", ""))
def test_parameters_stand_in_pulsars_order_with_its_defaults(method: Callable[..., Any], expected: str) -> None:
    parameters = [each for each in inspect.signature(method).parameters.values() if each.name != "self"]
    positional = [each for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert " ".join(map(_written, positional)) == expected
    assert not [each for each in parameters if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    assert all(each.annotation is not each.empty for each in parameters)


def test_positional_calls_work_in_both_faces(fake: tuple[str, FakeBroker]) -> None:
    with magnetar.Client(fake[0], None, 20) as client:
        producer = client.create_producer("t", "name", magnetar.schema.StringSchema(), 41)
        consumer = client.subscribe("t", "s", magnetar.ConsumerType.Shared, magnetar.schema.StringSchema(), None, 10)
        producer.send("x", {"a": "b"}, "key", None, 77)
        message = consumer.receive(5000)
        assert (producer.producer_name(), message.value(), message.properties()) == ("name", "x", {"a": "b"})
        assert (message.partition_key(), message.sequence_id()) == ("key", 77)
        reader = client.create_reader("t", magnetar.MessageId.earliest, magnetar.schema.StringSchema())
        assert reader.read_next(5000).value() == "x"

    async def body(client: aio.Client, broker: FakeBroker) -> None:
        producer = await client.create_producer("t", "name", None, 41)
        consumer = await client.subscribe("t", "s", magnetar.ConsumerType.Shared, None, 10)
        await producer.send(b"x", {"a": "b"}, "key")
        message = await consumer.receive(5000)
        assert (message.sequence_id(), message.partition_key(), producer.producer_name()) == (42, "key", "name")

    simulate(body)


def test_a_sequence_id_of_0_is_one(fake: tuple[str, FakeBroker]) -> None:
    with magnetar.Client(fake[0]) as client:
        producer = client.create_producer("zero", None, None, 5)
        producer.send_async(b"x", None, None, None, None, 0)
        producer.flush()
    assert fake[1].received == [(0, 1)]


def test_an_unknown_parameter_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match="batch_size"):
        magnetar.Client("magnetar://localhost").create_producer("t", batch_size=5)  # type: ignore[call-arg]
