"""Tokens that expire on a living connection, on virtual time: the broker verifies them, the client brings new ones."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import jwt
import pytest

from magnetar.client.client import Client
from magnetar.client.common.errors import AuthenticationError, Timeout
from magnetar.client.connect.authentication import AuthenticationToken
from magnetar.runtime.access import ListenerAccess
from magnetar.runtime.network import Endpoint
from magnetar.runtime.sim.world import Simulation
from magnetar.security.authenticator import Authenticator
from magnetar.security.settings import BrokerSection, Secret, SecuritySettings, TokenSection
from magnetar.security.token import create_token
from tests.client.fake_broker import FakeBroker

KEY = b"k" * 32
HERE = "magnetar://localhost"
Body = Callable[[Any], Awaitable[None]]


def run(monkeypatch: pytest.MonkeyPatch, body: Body, seed: int = 1) -> None:
    monkeypatch.setenv("MAGNETAR_TEST_TOKEN_KEY", KEY.decode())
    settings = SecuritySettings(token=TokenSection("env:MAGNETAR_TEST_TOKEN_KEY"), broker=BrokerSection("x"))
    simulation = Simulation(seed)

    async def main() -> None:
        world = simulation.world("broker")
        access = ListenerAccess(Authenticator(settings, world.clock))
        serving = world.network.serve(Endpoint("localhost", 7650), [("Broker", FakeBroker())], access)
        await simulation.spawn("broker", serving)
        await simulation.spawn("client", body(simulation.world("client")))

    simulation.run(main())
    assert not simulation.complaints


def made(world: Any, lifetime_s: float) -> str:
    return create_token(Secret(KEY), "HS256", "ada", world.clock.wall_ms(), lifetime_s)


def _failed(outcome: object) -> bool:
    return isinstance(outcome, BaseException)


EXPIRED = r"has expired at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC; it is .* at this server"


def test_a_client_that_brings_the_same_token_again_is_told_since_when_it_has_expired(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is open keeps its messages and tries again, as in Pulsar: a token that comes late is not too late."""

    async def body(world: Any) -> None:
        token = [made(world, 3)]
        async with Client(HERE, AuthenticationToken(lambda: token[0]), world=world) as client:
            producer, consumer = await client.create_producer("t"), await client.subscribe("t", "s")
            await producer.send(b"in time")
            await consumer.acknowledge(await consumer.receive())
            await asyncio.sleep(5)
            for new in (client.create_producer("t"), client.subscribe("t", "other")):
                with pytest.raises(AuthenticationError, match=EXPIRED):
                    await new
            late = asyncio.ensure_future(producer.send(b"late"))
            await asyncio.sleep(10)
            assert not late.done()
            token[0] = made(world, 3600)
            await late
            assert (await consumer.receive()).data() == b"late"
            token[0] = made(world, -1)
            await asyncio.sleep(3600)
            with pytest.raises(Timeout, match=EXPIRED):
                await producer.send(b"too late")

    run(monkeypatch, body)
    assert "the token has expired at" in caplog.text


@pytest.mark.parametrize(("hours", "of"), [(2, "exp"), (1, "nbf")])
def test_a_difference_of_whole_hours_says_to_compare_the_clocks(
    monkeypatch: pytest.MonkeyPatch, hours: int, of: str
) -> None:
    async def body(world: Any) -> None:
        apart_s = hours * 3600 * (-1 if of == "exp" else 1)
        token = jwt.encode({"sub": "ada", of: world.clock.wall_ms() // 1000 + apart_s}, KEY, "HS256")
        async with Client(HERE, AuthenticationToken(token), world=world) as client:
            with pytest.raises(AuthenticationError, match=f"Compare the clocks: {hours} h apart may be a time zone"):
                await client.create_producer("t")

    run(monkeypatch, body)
