"""A client that reached no broker yet: what is at the address is said soon, with what to do.

The bounds are those of the documentation: 2 s where nothing listens, `connection_timeout_ms` where nothing answers.
"""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

import magnetar
from magnetar.client.client import Client as AsyncClient
from magnetar.client.connect.connections import make_unreachable_error
from magnetar.proto.errors import Unavailable
from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import make_system_world
from tests.client.fake_broker import FakeBroker
from tests.support.steps import stopwatch

SOON_S = 2.0
LATER_S = 20.0  # the test gives up; well under the operation's 30 s


@contextlib.contextmanager
def _listening(answer: Callable[[socket.socket], None] = lambda _: None) -> Iterator[int]:
    """The port of a server that is no broker."""
    kept: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                kept.append(connection)
                with contextlib.suppress(OSError):
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    for each in kept:
        each.close()


@contextlib.contextmanager
def _black_hole() -> Iterator[int]:
    """A port that answers no connection: its queue is full, so the kernel drops what comes."""
    waiting: list[socket.socket] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for _ in range(4):
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(server.getsockname())
        yield server.getsockname()[1]
        for each in waiting:
            each.close()


@pytest.fixture
def refusing_port() -> Iterator[Callable[[], int]]:
    """Makes ports that refuse: each is taken and does not listen, so that no other test gets it meanwhile."""
    with contextlib.ExitStack() as taken:

        def make() -> int:
            each = taken.enter_context(socket.socket())
            each.bind(("127.0.0.1", 0))
            port: int = each.getsockname()[1]
            return port

        yield make


def _refusal(url: str, within_s: float, *, connection_timeout_ms: int = 10000) -> magnetar.ConnectError:
    """What opening a producer, a consumer, a reader and asking the admin say; each within that time."""
    errors: list[magnetar.PulsarException] = []
    with contextlib.closing(magnetar.Client(url, connection_timeout_ms=connection_timeout_ms)) as client:
        for use in (
            lambda: client.create_producer("t"),
            lambda: client.subscribe("t", "s"),
            lambda: client.create_reader("t", magnetar.MessageId.earliest),
            lambda: client.get_topic_partitions("t"),
        ):
            with stopwatch() as seconds, pytest.raises(magnetar.ConnectError) as caught:
                use()
            assert seconds() < within_s, caught.value
            errors.append(caught.value)
    assert len({str(each) for each in errors}) == 1
    assert isinstance(errors[0], magnetar.ConnectError)
    return errors[0]


def test_where_nobody_listens_it_is_said_within_two_seconds_with_the_command_that_starts_a_server(
    refusing_port: Callable[[], int],
) -> None:
    port = refusing_port()
    error = _refusal(f"magnetar://127.0.0.1:{port}", SOON_S)
    assert f"127.0.0.1:{port}" in str(error)
    assert "Connection refused" in str(error)
    assert f"'magnetar standalone --port {port}' starts one" in str(error)
    assert error.definite, "nothing was sent"


def test_the_port_of_pulsars_clients_is_told_apart() -> None:
    told = make_unreachable_error(Unavailable("cannot connect"), [Endpoint("localhost", 6650)])
    assert told.message == "cannot connect. 6650 is the port of Pulsar's clients; this one connects to 7650"


def test_every_address_is_tried_before_it_is_said(refusing_port: Callable[[], int]) -> None:
    error = _refusal(f"magnetar://127.0.0.1:{refusing_port()},127.0.0.1:{refusing_port()}", SOON_S)
    assert "Connection refused" in str(error)


def test_a_host_name_that_does_not_exist_is_said_within_two_seconds() -> None:
    error = _refusal("magnetar://no-such-host.invalid", SOON_S)
    assert "no-such-host.invalid" in str(error)
    assert "name" in str(error)


SSH, HTTP = b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize("banner", [SSH, HTTP])
def test_a_port_that_speaks_something_else_is_said_within_two_seconds(banner: bytes) -> None:
    with _listening(lambda connection: connection.sendall(banner)) as port:
        error = _refusal(f"magnetar://127.0.0.1:{port}", SOON_S)
        assert f"127.0.0.1:{port} does not speak" in str(error)


def test_a_server_that_takes_connections_and_never_answers_has_the_connection_timeout() -> None:
    with _listening() as port:
        error = _refusal(f"magnetar://127.0.0.1:{port}", 4.0, connection_timeout_ms=1500)
        assert f"127.0.0.1:{port}" in str(error)
        assert "1.5 s" in str(error)


@pytest.mark.parametrize("scheme", ["magnetar", "pulsar", "http"])
def test_an_address_that_swallows_everything_has_the_connection_timeout(scheme: str) -> None:
    with _black_hole() as port:
        error = _refusal(f"{scheme}://127.0.0.1:{port}", 4.0, connection_timeout_ms=1500)
        assert f"127.0.0.1:{port}" in str(error)
        assert str(error).count("within 1.5 s") == 1


async def test_a_client_that_had_a_connection_waits_for_its_broker_as_long_as_an_operation_may_take() -> None:
    broker = FakeBroker()
    world = make_system_world(1)
    serving = await world.network.serve(Endpoint("127.0.0.1", 0), [("Broker", broker)])
    port = serving.endpoint.port
    async with AsyncClient(f"magnetar://127.0.0.1:{port}", connection_timeout_ms=1000) as client:
        producer = await client.create_producer("t")
        await producer.send(b"before")
        await serving.close()
        opening = asyncio.ensure_future(client.create_producer("u"))
        done, _ = await asyncio.wait((opening,), timeout=3.0)  # past what a first contact may take
        assert not done, "it gave up while its broker was away"
        serving = await world.network.serve(Endpoint("127.0.0.1", port), [("Broker", broker)])
        async with asyncio.timeout(LATER_S):
            await (await opening).send(b"after")
            await producer.send(b"after")
    await serving.close()


async def test_one_broker_of_several_is_enough(refusing_port: Callable[[], int]) -> None:
    serving = await make_system_world(1).network.serve(Endpoint("127.0.0.1", 0), [("Broker", FakeBroker())])
    for _ in range(5):  # the first that is asked is chosen by chance
        url = f"magnetar://127.0.0.1:{refusing_port()},{serving.endpoint},127.0.0.1:{refusing_port()}"
        async with AsyncClient(url) as client:
            with stopwatch() as seconds:
                await (await client.create_producer("t")).send(b"x")
            assert seconds() < SOON_S
    await serving.close()
