"""Pulsar's binary protocol: the service of a listener, and what its connections share.

    serving = await world.network.serve_bytes(endpoint, PulsarProtocol(broker).serve, access)

A connection (connection.py) has producers (producer.py) and consumers (consumer.py) on the broker's sessions;
lookup.py answers requests for owners, partitions and topics, and watches topics. The messages are those of
proto/pulsar.proto, in the frames of frames.py. These modules are imported by the first connection.

Also in this file, below its heading: the addresses at which Pulsar clients reach a broker, for the answers to their
look-ups (listeners).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...proto.errors import InvalidConfiguration
from ...runtime.grpc.limits import CallerAuthenticator
from ...runtime.network import ByteStream, Endpoint
from ...runtime.tasks import run_to_end
from ..common.config import BrokerConfig
from ..node.topic_manager import TopicManager

if TYPE_CHECKING:
    from .frames import SharedReceiveBuffer
    from .producer import PulsarProducerHandler


class PulsarProtocol:
    """Serves the connections of a listener for Pulsar's protocol. The listener calls `serve` for each connection."""

    def __init__(self, broker: TopicManager) -> None:
        self._broker = broker
        self._names = OpenPulsarProducers()
        self._spare: SharedReceiveBuffer | None = None
        self._callers: CallerAuthenticator | None = None  # of the listener

    async def serve(self, stream: ByteStream) -> None:
        """Serves one connection until the client or the broker ends it; its producers and consumers have then left.
        Raises the error with which it ended: Unauthenticated, Unauthorized, CredentialsExpired, or Unavailable if the
        credentials could not be checked; InvalidRequest; ConnectionLost, also if the client does not authenticate in
        time."""
        if self._callers is None:
            self._callers = CallerAuthenticator(stream.guard, self._broker.world.clock)
        await self._broker.world.workers.load(f"{__package__}.connection")
        from .connection import PulsarConnection
        from .frames import SharedReceiveBuffer

        if self._spare is None:
            self._spare = SharedReceiveBuffer()
        connection = PulsarConnection(self._broker, stream, self._names, self._callers, self._spare)
        try:
            await connection.serve()
        finally:
            await run_to_end(connection.close())


# ----------------------------------------------------------------------------------------------------- listeners
# The addresses at which Pulsar clients reach a broker, for the answers to their look-ups.
#
# `pulsar_listeners` has Pulsar's form, `NAME:URL,NAME:URL`; a name may come several times, with a `pulsar://` and a
# `pulsar+ssl://` URL, and a `magnetar://` URL for Magnetar's SDK (`listener_name`). A client of Pulsar that names no
# listener gets the first one, and the SDK the address of `--advertise`.


SERVICE_URL_SCHEMES = ("pulsar", "pulsar+ssl", "magnetar", "magnetar+ssl")


def make_advertised_urls(
    config: BrokerConfig, listening: Endpoint, *, is_encrypted: bool
) -> dict[str, tuple[str, ...]]:
    """Returns the URLs at which Pulsar clients reach this broker, by the name of the listener; the key "" has those of
    the default listener. `listening`: the address at which the broker listens. `is_encrypted`: whether it serves TLS.
    Raises InvalidConfiguration if the setting `pulsar_listeners` is invalid."""
    if config.pulsar_listeners:
        return parse_listeners(config.pulsar_listeners)
    host = config.advertised.host if config.advertised is not None else listening.host
    return {"": (f"{SERVICE_URL_SCHEMES[is_encrypted]}://{Endpoint(host, listening.port)}",)}


def parse_listeners(text: str) -> dict[str, tuple[str, ...]]:
    """Parses the setting `pulsar_listeners`. Returns the URLs of each listener, by its name; the key "" has the URLs of
    the first listener, which is the default. Raises InvalidConfiguration if the text is invalid."""
    found: dict[str, tuple[str, ...]] = {}
    for part in text.split(","):
        name, _, url = part.strip().partition(":")
        scheme, _, address = url.partition("://")
        try:
            Endpoint.parse(address)
        except ValueError:
            address = ""
        if not name or not address or scheme not in SERVICE_URL_SCHEMES:
            raise InvalidConfiguration(
                f"pulsar_listeners: {part.strip()!r} is not NAME:pulsar://HOST:PORT", setting="pulsar_listeners"
            )
        found[name] = (*found.get(name, ()), url)
    return {"": found[next(iter(found))], **found}


class OpenPulsarProducers:
    """The open producers of all Pulsar connections to this broker, by topic and producer name."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], PulsarProducerHandler] = {}

    def find_replaced_instance(self, topic: str, name: str, place: str, epoch: int) -> str:
        """Returns the instance id of the open producer that a new producer replaces, because its client has
        reconnected. That is a producer with the same topic and name, from the same host (`place`), and with a lower
        epoch. Returns "" if there is no such producer."""
        known = self._open.get((topic, name))
        returns = known is not None and known.network == place and known.epoch < epoch
        return known.instance if known is not None and returns else ""

    def add(self, topic: str, name: str, producer: PulsarProducerHandler) -> None:
        """Adds an open producer. It replaces the one with the same topic and name."""
        self._open[topic, name] = producer

    def remove(self, topic: str, name: str, producer: PulsarProducerHandler) -> None:
        """Removes the producer, unless another one has replaced it."""
        if self._open.get((topic, name)) is producer:
            del self._open[topic, name]
