"""A client that is given the port of Pulsar's protocol, or of HTTP, finds where the broker serves gRPC."""

import re
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import magnetar
from magnetar.broker.session.topics import find_listener_endpoint
from magnetar.client.client import Client
from magnetar.client.connect import connections
from magnetar.client.connect.discovery import parse_authorization
from magnetar.metadata.records import BrokerRecord
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.errors import MagnetarError, NotFound, Unavailable
from magnetar.runtime.network import ByteStream, Endpoint
from magnetar.runtime.sim.world import Simulation
from tests.broker.pulsar.raw import ANY
from tests.client.conftest import in_thread
from tests.client.fake_broker import FakeBroker
from tests.support.cluster import cluster


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Of one broker: pulsar:// and http://, at ports that say nothing."""
    folder: Path = tmp_path_factory.mktemp("cluster")

    @asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        async with cluster(folder, pulsar_listen=ANY, http_listen=ANY) as running:
            broker = running.brokers[0]
            yield f"{broker.pulsar_urls[''][0]} {broker.http_url}"

    with in_thread(serve) as found:
        pulsar_url, _, http_url = found.partition(" ")
        yield pulsar_url, http_url


@pytest.mark.parametrize("which", [0, 1])
def test_programs_for_pulsar_keep_their_urls(urls: tuple[str, str], which: int) -> None:
    with magnetar.Client(urls[which]) as client:
        producer, consumer = client.create_producer(f"t{which}"), client.subscribe(f"t{which}", "s")
        producer.send(b"x")
        assert consumer.receive(30_000).data() == b"x"
    with magnetar.admin.Admin(urls[which]) as admin:
        assert f"persistent://public/default/t{which}" in admin.topics("public/default")


def test_one_address_that_answers_is_enough_and_the_others_cost_no_wait(urls: tuple[str, str]) -> None:
    for url in urls:
        with magnetar.Client(url.replace("://", "://127.0.0.1:1,")) as client:
            client.create_producer("t").send(b"x")


def test_an_unknown_listener_is_said_and_its_name(urls: tuple[str, str]) -> None:
    refused = pytest.raises(magnetar.PulsarException, match="'test'")
    with magnetar.Client(urls[0], listener_name="test") as client, refused:
        client.create_producer("t")


def test_a_listener_is_an_address_of_grpc_by_its_name() -> None:
    urls = {"inside": ("pulsar://a:1",), "outside": ("pulsar://b:1", "magnetar://b:2")}
    broker = BrokerRecord(name="one", endpoint="a:7650", pulsar=urls)
    assert (find_listener_endpoint(broker, ""), find_listener_endpoint(broker, "outside")) == ("a:7650", "b:2")
    for name in ("inside", "other", "x" * 100_000):
        with pytest.raises(NotFound, match="pulsar_listeners"):
            find_listener_endpoint(broker, name)


# ------------------------------------------------------------------ what else may be there
Serve = Callable[[ByteStream], Awaitable[None]]


def framed(**command: object) -> bytes:
    name, value = next(iter(command.items()))
    data = pulsar.BaseCommand(type=pulsar.BaseCommand.Type.Value(name.upper()), **{name: value}).SerializeToString()
    return struct.pack(">II", len(data) + 4, len(data)) + data


def answers(data: bytes) -> Serve:
    async def serve(stream: ByteStream) -> None:
        await stream.read_into(lambda: memoryview(bytearray(4096)))
        stream.write_nowait(data)

    return serve


def _found(url: str, serve: Serve) -> list[str]:
    """What a client raises that is given `url`; a broker serves gRPC at 7650, and answers so at the other ports."""
    simulation, raised = Simulation(seed=1), []

    async def client_side() -> None:
        async with Client(url, world=simulation.world("client"), operation_timeout_seconds=5) as client:
            try:
                await client.create_producer("t")
            except magnetar.PulsarException as error:
                raised.append(f"{type(error).__name__}: {error}")

    async def main() -> None:
        broker = simulation.world("broker")
        await simulation.spawn("broker", broker.network.serve(Endpoint("broker", 7650), [("Broker", FakeBroker())]))
        await simulation.spawn("broker", broker.network.serve_bytes(Endpoint("broker", 6650), serve))
        await simulation.spawn("broker", broker.network.serve_bytes(Endpoint("broker", 8080), serve))
        await simulation.spawn("client", client_side())

    simulation.run(main())
    return raised


CONNECTED = pulsar.CommandConnected(server_version="Magnetar 1", magnetar_address="broker:7650")


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (framed(connected=CONNECTED), ""),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", ""),  # not Pulsar's protocol: 7650 is tried, as where nothing listens
        (b"\x00\x00\x00\x06\x00\x00\x00\x02\xff\xff", ""),
        (b"\xff" * 100, ""),
        (b"", ""),
        (framed(connected=pulsar.CommandConnected(server_version="Pulsar 4.0.8")), "Pulsar 4.0.8.*pulsar-client"),
        (framed(connected=pulsar.CommandConnected(server_version="Magnetar 1")), "does not serve at the moment"),
        (framed(error=pulsar.CommandError(request_id=1, error=pulsar.AuthenticationError, message="who?")), "who?"),
    ],
)
def test_what_answers_at_the_port_of_pulsar_is_told_apart(answer: bytes, raised: str) -> None:
    found = _found("pulsar://broker", answers(answer))
    assert bool(found) == bool(raised)
    assert all(re.search(raised, each) for each in found)


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        (b'HTTP/1.1 200 OK\r\n\r\n{"serviceUrl":"magnetar://broker:7650"}', ""),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "no broker of Magnetar"),
        (b"HTTP/1.1 200 OK\r\n\r\n[]", "no broker of Magnetar"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 10000, "no broker of Magnetar"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b" " * 100_000, "too large"),
        (b"HTTP/1.1 503 later\r\n\r\n", "503"),
        (b"\x00\x00\x00", "does not speak HTTP"),
    ],
)
def test_what_answers_over_http_is_told_apart(answer: bytes, raised: str) -> None:
    found = _found("http://broker", answers(answer))
    assert bool(found) == bool(raised)
    assert all(raised in each for each in found)


def test_a_broker_that_comes_back_at_another_port_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(error: MagnetarError) -> str | None:
        """As gRPC says it, and the simulation does not."""
        return "refused" if isinstance(error, Unavailable) else None

    monkeypatch.setattr(connections, "why_unreachable", refused)
    simulation = Simulation(seed=1)

    async def start(grpc: int) -> None:
        broker = simulation.world("broker")
        told = pulsar.CommandConnected(server_version="Magnetar 1", magnetar_address=f"broker:{grpc}")
        await simulation.spawn("broker", broker.network.serve(Endpoint("broker", grpc), [("Broker", FakeBroker())]))
        serve = answers(framed(connected=told))
        await simulation.spawn("broker", broker.network.serve_bytes(Endpoint("broker", 6650), serve))

    async def client_side() -> None:
        async with Client("pulsar://broker", world=simulation.world("client")) as client:
            producer = await client.create_producer("t")
            await producer.send(b"1")
            simulation.crash("broker")
            await start(7999)
            await producer.send(b"2")

    async def main() -> None:
        await start(7650)
        await simulation.spawn("client", client_side())

    simulation.run(main())


@pytest.mark.parametrize(
    ("header", "credentials"),
    [("", ("", b"")), ("Bearer abc", ("token", b"abc")), ("Basic dTpw", ("basic", b"u:p")), ("abc", ("", b""))],
)
def test_credentials_travel_in_the_form_of_pulsars_protocol(header: str, credentials: tuple[str, bytes]) -> None:
    assert parse_authorization(header) == credentials
