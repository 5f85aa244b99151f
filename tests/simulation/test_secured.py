"""Secured clusters in the simulation: they pass as others do, and a right that is lost, or was never there, is seen."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from magnetar.broker.transaction.coordinator import RunningCoordinator
from magnetar.client.client import Client
from magnetar.client.connect.authentication import AuthenticationToken
from magnetar.client.model.settings import InitialPosition
from magnetar.proto.errors import MagnetarError
from magnetar.runtime.sim.world import Simulation
from tests.mutants.bank import BANK, planted
from tests.simulation.cluster import CLIENT, METADATA, Cluster
from tests.simulation.load import topics
from tests.simulation.load.roles import Roles
from tests.simulation.load.topics import TopicLoad
from tests.simulation.options import SECURED_RATE, Options, draw
from tests.simulation.run import Outcome, run_seed
from tests.simulation.security import APP
from tests.simulation.strikes.operations import TOPIC
from tests.simulation.verdict import rest
from tests.simulation.verdict.observer import Observer


def secured(seed: int, **times: int) -> Outcome:
    """With these strikes alone, where any are named."""

    def change(_: Options) -> Options:
        drawn = draw(seed, secured=True)
        return replace(drawn, rates={}, times=times) if times else drawn

    return run_seed(seed, change=change)


def test_a_share_of_the_seeds_is_secured() -> None:
    assert abs(sum(draw(seed).secured for seed in range(1, 1001)) - 1000 * SECURED_RATE) < 60


@pytest.mark.parametrize("seed", [1, 4])
def test_a_secured_seed_passes_and_has_the_same_trace_again(seed: int) -> None:
    begin = RunningCoordinator.begin_transactions
    first, second = secured(seed), secured(seed)
    assert RunningCoordinator.begin_transactions is begin, (
        "the judges put back what they replaced, or each keeps its whole cluster"
    )
    assert first.failures == []
    assert first.trace_hash == second.trace_hash
    assert first.figures["refused"] > 10, "who knows the ids of others tried"


def test_rights_that_come_and_go_under_traffic_lose_nothing_and_are_obeyed() -> None:
    outcome = secured(1, revoke=8)
    assert outcome.failures == []
    assert outcome.figures["grants"] > 6
    assert outcome.figures["uses"] > 20


def test_a_stranger_with_keys_is_answered_by_no_bookie() -> None:
    assert secured(6, stranger=4).failures == []


FOUND: dict[str, tuple[int, dict[str, int]]] = {
    "M50": (2, {"revoke": 1}), "M54": (6, {}), "M58": (1, {}), "M60": (6, {"stranger": 6}),
    "M63": (1, {}), "M63b": (2, {}), "M63c": (6, {}), "M63d": (9, {}), "M63e": (2, {}),
}  # fmt: skip
"""The seed that found it last, which need not find it for ever, and its strikes."""
SEEDS = (2, 1, 4, 6, 5, 8)


@pytest.mark.parametrize(("id_", "seed", "strikes"), [(id_, *each) for id_, each in FOUND.items()])
def test_a_seed_finds(id_: str, seed: int, strikes: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rest, topics):
        monkeypatch.setattr(module, "LIVENESS_S", 120.0)  # what is stuck is so after two minutes, too
    if strikes:
        assert not secured(SEEDS[0], **strikes).failures, "and what is right is not"
    with planted(BANK[id_]):
        assert any(secured(each, **strikes).failures for each in (seed, *SEEDS)), BANK[id_].what


# ---------------------------------------------------------------------------------- grants that cannot be read
def run(seed: int, program: Callable[[Cluster], Any]) -> None:
    options = replace(draw(seed, secured=True), rates={}, times={}, ledger_entries_max=1000)
    simulation = Simulation(seed)
    cluster = Cluster(simulation, options, Observer(simulation))

    async def main() -> None:
        await cluster.start()
        await cluster.start_brokers(1)
        assert cluster.security is not None
        await Roles(cluster, cluster.security, TopicLoad(cluster)).grant()
        await cluster.simulation.spawn(CLIENT, program(cluster))

    simulation.run(main())


def test_without_metadata_open_traffic_goes_on_and_after_half_a_minute_no_other_is_admitted() -> None:
    async def program(cluster: Cluster) -> None:
        world = cluster.simulation.world(CLIENT)
        assert cluster.security is not None
        lasting = AuthenticationToken(cluster.security.token(APP))
        client = Client(cluster.service_url, lasting, 3, world=world)
        producer = await client.create_producer(TOPIC)
        consumer = await client.subscribe(TOPIC, "s", initial_position=InitialPosition.Earliest)
        await producer.send(b"before")
        assert (await consumer.receive()).data() == b"before"
        cluster.simulation.wires.partition_nodes("broker-1", METADATA)
        for number in range(25):
            await producer.send(b"%d" % number)
            assert (await consumer.receive()).data() == b"%d" % number
            await asyncio.sleep(1.0)
        await asyncio.sleep(10.0)
        with pytest.raises(MagnetarError):
            await client.create_producer(TOPIC)
        cluster.simulation.wires.heal_partition("broker-1", METADATA)
        await asyncio.sleep(10.0)
        await (await client.create_producer(TOPIC)).send(b"after")
        while (await consumer.receive()).data() != b"after":
            continue  # what was not acknowledged comes again
        await client.close()

    run(1, program)
