"""A client that goes from one cluster to another: by a provider of the program, or because one does not answer."""

import asyncio
import threading
from collections.abc import Callable

import pytest

import magnetar
from magnetar import AutoClusterFailover, ServiceInfo, ServiceInfoProvider
from magnetar.client.client import Client
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.runtime.network import Endpoint
from magnetar.runtime.sim.world import Simulation
from tests.client.connect.test_discovery import answers, framed
from tests.client.fake_broker import FakeBroker

ONE, OTHER = "pulsar://one:6650", "pulsar://other:6652"
PORTS = {"one": (7650, 6650), "other": (7652, 6652)}


class Provided(ServiceInfoProvider):
    update: Callable[[ServiceInfo], None]
    closed = 0

    def __init__(self, first: object = None) -> None:
        self.first = first or ServiceInfo("magnetar://one")

    def initial_service_info(self) -> ServiceInfo:
        return self.first  # type: ignore[return-value]

    def initialize(self, on_service_info_update: Callable[[ServiceInfo], None]) -> None:
        self.update = on_service_info_update

    def close(self) -> None:
        self.closed += 1


class Clusters:
    """Two brokers in memory, `one` and `other`, that know nothing of each other."""

    def __init__(self) -> None:
        self.simulation = Simulation(seed=1)
        self.brokers = {name: FakeBroker() for name in ("one", "other")}

    async def start(self, name: str) -> None:
        network, (grpc, pulsar_port) = self.simulation.world(name).network, PORTS[name]
        told = pulsar.CommandConnected(server_version="Magnetar 1", magnetar_address=f"{name}:{grpc}")
        serve = answers(framed(connected=told))
        await self.simulation.spawn(name, network.serve(Endpoint(name, grpc), [("Broker", self.brokers[name])]))
        await self.simulation.spawn(name, network.serve_bytes(Endpoint(name, pulsar_port), serve))

    def run(self, body: Callable[[Client], object], service: object) -> None:
        async def client_side() -> None:
            async with Client(service, world=self.simulation.world("client")) as client:  # type: ignore[arg-type]
                await body(client)  # type: ignore[misc]

        async def main() -> None:
            for name in self.brokers:
                await self.start(name)
            await self.simulation.spawn("client", client_side())

        self.simulation.run(main())


def test_a_provider_moves_the_client_and_its_producers_go_on_there() -> None:
    clusters, provider = Clusters(), Provided()

    async def body(client: Client) -> None:
        producer = await client.create_producer("t")
        await producer.send(b"1")
        assert client.get_service_info().service_url == "magnetar://one"
        provider.update(ServiceInfo("magnetar://other:7652"))
        assert client.get_service_info().service_url == "magnetar://other:7652"
        await asyncio.sleep(1)
        await producer.send(b"2")
        with pytest.raises(magnetar.InvalidConfiguration):
            provider.update("magnetar://x")  # type: ignore[arg-type]

    clusters.run(body, provider)
    assert [len(clusters.brokers[name].received) for name in ("one", "other")] == [1, 1]
    assert provider.closed == 1


def test_a_cluster_that_does_not_answer_is_left_and_taken_again() -> None:
    clusters = Clusters()
    failover = AutoClusterFailover(ServiceInfo(ONE), [ServiceInfo(OTHER)], 200, 2, 2)

    async def body(client: Client) -> None:
        producer = await client.create_producer("t", send_timeout_millis=0)
        await producer.send(b"1")
        clusters.simulation.crash("one")
        await asyncio.sleep(3)
        assert client.get_service_info().service_url == OTHER
        await producer.send(b"2")
        await clusters.start("one")
        await asyncio.sleep(3)
        assert client.get_service_info().service_url == ONE
        await producer.send(b"3")

    clusters.run(body, failover)
    assert [len(clusters.brokers[name].received) for name in ("one", "other")] == [2, 1]


def test_a_provider_is_closed_with_a_blocking_client_and_may_tell_from_any_thread() -> None:
    provider = Provided()
    client = magnetar.Client(provider)
    thread = threading.Thread(target=lambda: provider.update(ServiceInfo("magnetar://other:7652")))
    thread.start()
    thread.join()
    assert client.get_service_info().service_url == "magnetar://other:7652"
    client.close()
    assert provider.closed == 1


def test_wrong_services_are_value_errors() -> None:
    info, token = ServiceInfo("magnetar://a"), magnetar.AuthenticationToken("x")
    assert repr(info) == "ServiceInfo(service_url='magnetar://a', use_tls=False, tls_trust_certs_file_path=None)"
    assert ServiceInfo("pulsar+ssl://a", None, "ca.pem").use_tls
    for wrong in (
        lambda: ServiceInfo(None), lambda: ServiceInfo("x"), lambda: ServiceInfo("magnetar://a", "token"),
        lambda: ServiceInfo("magnetar://a", None, 5), lambda: ServiceInfo.wrap(5),
        lambda: AutoClusterFailover(info, []), lambda: AutoClusterFailover(info, info),
        lambda: AutoClusterFailover(info, [5]), lambda: AutoClusterFailover(5, [info]),
        lambda: AutoClusterFailover(info, [info], 0), lambda: AutoClusterFailover(info, [info], 5, 0),
        lambda: AutoClusterFailover(info, [info], 5, 1, "1"),
        lambda: magnetar.Client(AutoClusterFailover(info, [info]), token),
        lambda: magnetar.Client(Provided(), tls_trust_certs_file_path="ca.pem"),
        lambda: magnetar.Client(Provided(5)),
        lambda: magnetar.Client(AutoClusterFailover(info, [ServiceInfo("magnetar://b", token)])),
    ):  # fmt: skip
        with pytest.raises(ValueError):  # noqa: PT011
            wrong()
