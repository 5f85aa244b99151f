"""A real broker with one bookie, on real sockets and files, in a thread of its own; and a broker in memory likewise."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from magnetar.runtime.network import Endpoint
from magnetar.runtime.process import make_system_world
from tests.client.fake_broker import FakeBroker
from tests.support.cluster import cluster


@contextmanager
def in_thread(serve: Callable[[], AbstractAsyncContextManager[str]]) -> Iterator[str]:
    """Runs a server in a loop of its own until the block ends; its address."""
    started = threading.Event()
    address: list[str] = []
    failure: list[BaseException] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        async with serve() as url:
            address.append(url)
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(main())
        except BaseException as error:
            failure.append(error)
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run, name="server")
    thread.start()
    started.wait(30)
    try:
        if failure:
            raise failure[0]
        yield address[0]
    finally:
        if not loop.is_closed():
            loop.call_soon_threadsafe(stop.set)
        thread.join(30)
    if failure:
        raise failure[0]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a real broker; shared by the tests of a module, so each uses its own topics."""
    folder: Path = tmp_path_factory.mktemp("cluster")

    @asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        async with cluster(folder) as running:
            yield f"magnetar://{running.brokers[0].endpoint}"

    with in_thread(serve) as address:
        yield address


@contextmanager
def served(broker: FakeBroker) -> Iterator[str]:
    """The URL of a broker in memory."""

    @asynccontextmanager
    async def serve() -> AsyncIterator[str]:
        serving = await make_system_world(1).network.serve(Endpoint("127.0.0.1", 0), broker.services)
        try:
            yield f"pulsar://{serving.endpoint}"
        finally:
            await serving.close()

    with in_thread(serve) as address:
        yield address


@pytest.fixture
def fake() -> Iterator[tuple[str, FakeBroker]]:
    """URL and broker in memory."""
    broker = FakeBroker({"parts": 3})
    with served(broker) as address:
        yield address, broker
