"""The client: what everything else is made from (asyncio face).

    async with Client("magnetar://localhost:7650") as client:
        producer = await client.create_producer("flights")

Names, parameters and defaults are those of `pulsar.asyncio`. Nothing connects before it is needed. Errors are the SDK's
(client/errors.py), whatever layer they come from.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import fields
from types import TracebackType
from typing import Any, TypeVar

from ..proto import wire_pb2 as wire
from ..proto.errors import MagnetarError
from ..proto.names import TopicName
from ..runtime.world import World
from .authentication import check_authentication
from .connections import Connections
from .consumer import Consumer
from .core.router import PartitionsRoutingMode
from .errors import AlreadyClosed, InvalidConfiguration, InvalidTopicName, OperationNotSupported, translate
from .message_id import MessageId
from .producer import Producer
from .reader import Reader
from .schema import Schema
from .service_url import parse_service_url
from .settings import ClientSettings, ConsumerSettings, ProducerSettings
from .world import client_world

T = TypeVar("T")
Topics = str | Sequence[str] | re.Pattern[str]

_UNSUPPORTED_PRODUCER = {"encryption_key", "crypto_key_reader"}
_IGNORED_PRODUCER = {"lazy_start_partitioned_producers"}  # all partitions are connected to at once
_UNSUPPORTED_CONSUMER = {
    "crypto_key_reader", "is_read_compacted", "replicate_subscription_state_enabled", "dead_letter_policy",
}  # fmt: skip
_IGNORED_CONSUMER = {
    # Named by Pulsar's programs; what they choose between does not exist here, or is always on.
    "batch_index_ack_enabled", "broker_consumer_stats_cache_time_ms", "crypto_failure_action", "key_shared_policy",
    "max_pending_chunked_message", "auto_ack_oldest_chunked_message_on_queue_full", "pattern_auto_discovery_period",
    "regex_subscription_mode",
}  # fmt: skip
_IGNORED_CLIENT = {
    "io_threads", "message_listener_threads", "concurrent_lookup_requests", "log_conf_file_path",
    "stats_interval_in_seconds", "logger", "listener_name",
}  # fmt: skip
_TLS_CLIENT = {
    "use_tls", "tls_trust_certs_file_path", "tls_allow_insecure_connection", "tls_validate_hostname",
    "tls_private_key_file_path", "tls_certificate_file_path",
}  # fmt: skip


class Client:
    def __init__(self, service_url: str, authentication: object = None, *, world: World | None = None, **options: Any):
        self._endpoints = parse_service_url(service_url)
        check_authentication(authentication)
        self.settings = client_settings(options)
        self._service_url = service_url
        self._world = world
        self._connections: Connections | None = None
        self._open: dict[Producer | Consumer | Reader, None] = {}
        self._closed = False

    @property
    def connections(self) -> Connections:
        """Made when first used, in the event loop that uses it."""
        if self._closed:
            raise AlreadyClosed("the client is closed")
        if self._connections is None:
            self._connections = Connections(self._world or client_world(), self._endpoints, self.settings)
        return self._connections

    async def create_producer(self, topic: str, **options: Any) -> Producer:
        """Parameters: ProducerSettings; batching is on, as in `pulsar.asyncio`."""
        options.setdefault("batching_enabled", True)
        settings = producer_settings(options)
        return await self._keep(lambda: Producer.open(self.connections, parse_topic(topic), settings))

    async def subscribe(self, topic: Topics, subscription_name: str, **options: Any) -> Consumer:
        """Parameters: ConsumerSettings. `topic`: a name, a list of names, or a compiled pattern."""
        policy = options.pop("batch_receive_policy", None)
        is_pattern = options.pop("is_pattern_topic", False)
        if options.pop("message_listener", None) is not None:
            raise OperationNotSupported("a message_listener belongs to the blocking client; here use `async for`")
        settings = consumer_settings(options)
        if is_pattern and isinstance(topic, str):
            topic = re.compile(topic)

        async def subscribe() -> Consumer:
            names = await self._names(topic)
            return await Consumer.open(self.connections, names, subscription_name, settings, policy)

        return await self._keep(subscribe)

    async def create_reader(
        self,
        topic: str,
        start_message_id: MessageId,
        *,
        schema: Schema | None = None,
        receiver_queue_size: int = 1000,
        reader_name: str | None = None,
        subscription_role_prefix: str | None = None,
        start_message_id_inclusive: bool = False,
        **options: Any,
    ) -> Reader:
        """From behind `start_message_id` on (from it on, when inclusive)."""
        if options.pop("reader_listener", None) is not None:
            raise OperationNotSupported("a reader_listener belongs to the blocking client; here use `async for`")
        given = {"receiver_queue_size": receiver_queue_size, "consumer_name": reader_name, **options}
        given["start_message_id_inclusive"] = start_message_id_inclusive
        settings = consumer_settings(given | ({"schema": schema} if schema is not None else {}))
        name = f"{subscription_role_prefix or ''}reader-{self.connections.world.rng.randbytes(5).hex()}"
        start, inclusive = start_message_id, start_message_id_inclusive
        return await self._keep(
            lambda: Reader.open(self.connections, parse_topic(topic), start, settings, name=name, inclusive=inclusive)
        )

    async def get_topic_partitions(self, topic: str) -> list[str]:
        """Full names of the partitions; the topic itself when it has none."""
        name = parse_topic(topic)
        partitions = await translated(self.connections.partitions(name))
        return [name.with_partition(i).full for i in range(partitions)] or [name.full]

    async def _names(self, topic: Topics) -> list[TopicName]:
        if isinstance(topic, str):
            return [parse_topic(topic)]
        if isinstance(topic, re.Pattern):
            return await self._matching(topic)
        names = list(dict.fromkeys(parse_topic(each) for each in topic))
        if not names:
            raise InvalidConfiguration("subscribe needs at least one topic")
        return names

    async def _matching(self, pattern: re.Pattern[str]) -> list[TopicName]:
        """The topics of one namespace whose names match: what exists now."""
        text = pattern.pattern.removeprefix("persistent://")
        parts = text.split("/", 2)
        tenant, namespace, local = parts if len(parts) == 3 else ("public", "default", text)
        request = wire.ListTopicsRequest(namespace=f"{tenant}/{namespace}")
        reply: wire.Names = await self.connections.ask("ListTopics", request, service="Admin")
        match = re.compile(local, pattern.flags)
        bases = {TopicName.parse(name).base: None for name in reply.names}
        return [name for name in bases if match.fullmatch(name.local)]

    async def _keep(self, make: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Remembers what was opened, to close it with the client."""
        made = await translated(make())
        for old in [each for each in self._open if not each.lanes or all(_is_closed(lane) for lane in each.lanes)]:
            del self._open[old]
        assert isinstance(made, Producer | Consumer | Reader)
        self._open[made] = None
        return made

    def shutdown(self) -> None:
        """Ends everything at once, without waiting: what is under way has an unknown outcome."""
        self._closed = True
        for each in self._open:
            for lane in each.lanes:
                lane.abort()
        self._open.clear()

    async def close(self) -> None:
        """Closes all producers (flushing them), consumers and readers, then the connections."""
        if self._closed and self._connections is None:
            return
        open_, self._open = list(self._open), {}
        outcomes = await asyncio.gather(*(each.close() for each in open_), return_exceptions=True)
        self._closed = True
        connections, self._connections = self._connections, None
        if connections is not None:
            await connections.close()
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, AlreadyClosed):
                raise outcome

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(AlreadyClosed):
            await self.close()


def _is_closed(lane: Any) -> bool:
    return bool(lane.state.name == "CLOSED")


async def translated(awaitable: Awaitable[T]) -> T:
    try:
        return await awaitable
    except MagnetarError as error:
        raise translate(error) from error


def parse_topic(text: str) -> TopicName:
    if not isinstance(text, str):
        raise InvalidTopicName(f"a topic name is text, not {text!r}")
    try:
        return TopicName.parse(text)
    except MagnetarError as error:
        raise translate(error) from error


# ---------------------------------------------------------------------------------- options → settings
def client_settings(options: dict[str, Any]) -> ClientSettings:
    """From `pulsar.Client`'s parameters."""
    given = dict(options)
    timeout_s = given.pop("operation_timeout_seconds", 30)
    connection_s = given.pop("connection_timeout_ms", 10000) / 1000
    for name in _TLS_CLIENT:
        if given.pop(name, None):
            raise OperationNotSupported(f"{name}: TLS is not there yet")
    for name in _IGNORED_CLIENT:
        given.pop(name, None)
    if given:
        raise InvalidConfiguration(f"the client does not know {', '.join(sorted(given))}")
    return ClientSettings(operation_timeout_s=timeout_s, connection_timeout_s=connection_s)


def producer_settings(options: dict[str, Any]) -> ProducerSettings:
    given = _without(options, _UNSUPPORTED_PRODUCER, _IGNORED_PRODUCER, "producer")
    _only(given, ProducerSettings, "producer")
    if given.get("properties") is None:
        given.pop("properties", None)
    if given.get("message_router") is not None:
        given.setdefault("message_routing_mode", PartitionsRoutingMode.CustomPartition)
    mode = given.get("message_routing_mode", PartitionsRoutingMode.RoundRobinDistribution)
    given["message_routing_mode"] = PartitionsRoutingMode(mode)
    return ProducerSettings(**given)


def consumer_settings(options: dict[str, Any]) -> ConsumerSettings:
    given = _without(options, _UNSUPPORTED_CONSUMER, _IGNORED_CONSUMER, "consumer")
    _only(given, ConsumerSettings, "consumer")
    if given.get("properties") is None:
        given.pop("properties", None)
    return ConsumerSettings(**given)


def _without(options: dict[str, Any], unsupported: set[str], ignored: set[str], what: str) -> dict[str, Any]:
    for name in sorted(unsupported):
        if options.get(name):
            raise OperationNotSupported(f"{name} of a {what} is not there yet")
    return {name: value for name, value in options.items() if name not in unsupported | ignored}


def _only(given: dict[str, Any], settings: Any, what: str) -> None:
    unknown = sorted(given.keys() - {each.name for each in fields(settings)})
    if unknown:
        raise InvalidConfiguration(f"a {what} does not know {', '.join(unknown)}")
