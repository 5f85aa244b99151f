"""Plays scenes beside each other on one server, as many at a time as are not in each other's way."""

import asyncio
import random
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from itertools import starmap
from pathlib import Path

from magnetar.cli.common.processes import Process, Processes, find_free_port
from magnetar.client.connect import topic_watch as partitions_watcher
from magnetar.runtime.network import Endpoint
from tests.client.model.keys import files
from tests.pairs.features import changed
from tests.pairs.pairs import Names, title
from tests.pairs.scene import ENTRY_BYTES, Scene, Server
from tests.support.cluster import cluster

AT_ONCE = 12


class Together:
    """Waits until `count` of them wait or have left, and then does something once for all."""

    def __init__(self, count: int, act: Callable[[], Awaitable[None]]) -> None:
        self._left = count
        self._act = act
        self._done = asyncio.Event()

    async def wait(self) -> None:
        await self.leave()
        await self._done.wait()

    async def leave(self) -> None:
        """One of them comes no more."""
        self._left -= 1
        if self._left == 0:
            try:
                await self._act()
            finally:
                self._done.set()


Played = list[tuple[Names, list[str]]]
"""Scenes and their faults."""


async def play(server: Server, scenes: Sequence[Names], at_once: int = AT_ONCE, seed: int | None = None) -> Played:
    """The faults of each. `seed`: what no feature asks for is drawn."""
    room = asyncio.Semaphore(at_once)

    async def one(number: int, names: Names) -> list[str]:
        async with room:
            return await _play_one(number, names, server, seed)

    return list(zip(scenes, await asyncio.gather(*starmap(one, enumerate(scenes))), strict=True))


async def _play_one(number: int, names: Names, server: Server, seed: int | None = None) -> list[str]:
    scene = changed(Scene(title(names), number, server), names)
    if seed is not None:
        scene.vary(random.Random(f"{seed} {title(names)}"))
    try:
        return await scene.play()
    except Exception as error:
        return [*scene.faults, f"{type(error).__name__}: {error}", *traceback.format_exception(error)[-3:]]


async def play_through_a_kill(process: Process, server: Server, scenes: Sequence[Names]) -> Played:
    """All at once: the process is killed once, while each of them sends its second wave."""

    async def kill() -> None:
        process.kill()
        process.start()
        await asyncio.to_thread(process.wait_ready)

    async def nothing() -> None:
        return

    first, second = Together(len(scenes), nothing), Together(len(scenes), kill)

    async def one(number: int, names: Names) -> list[str]:
        came: set[Together] = set()

        async def at(which: Together) -> None:
            came.add(which)
            await which.wait()

        own = replace(server, gather=lambda: at(first), kill=lambda: at(second))
        try:
            return await _play_one(number, names, own)
        finally:
            for each in (first, second):
                if each not in came:
                    await each.leave()

    return list(zip(scenes, await asyncio.gather(*starmap(one, enumerate(scenes))), strict=True))


def pair_of_keys(folder: Path) -> tuple[str, str]:
    files(folder)
    return str(folder / "a-public.pem"), str(folder / "a-private.pem")


@asynccontextmanager
async def in_process(folder: Path) -> AsyncIterator[Server]:
    """A broker and a bookie on loopback, in this loop; what servers and clients look at every minute they look at at
    once."""
    before, partitions_watcher.DISCOVER_EVERY_S = partitions_watcher.DISCOVER_EVERY_S, 0.1
    try:
        listen = Endpoint("127.0.0.1", 0)
        async with cluster(
            folder, limit_s=None, trim_interval_s=0.1, pulsar_listen=listen, max_message_bytes=ENTRY_BYTES
        ) as running:
            [broker] = running.brokers
            [pulsar_url] = broker.pulsar_urls[""]
            yield Server(f"magnetar://{broker.endpoint}", pulsar_url, folder, pair_of_keys(folder))
    finally:
        partitions_watcher.DISCOVER_EVERY_S = before


@contextmanager
def in_processes(processes: Processes, folder: Path) -> Iterator[tuple[Process, Server]]:
    """A standalone server, at the same ports after each start."""
    (folder / "magnetar.toml").write_text(f"[broker]\nmax_message_bytes = {ENTRY_BYTES}\ntrim_interval_s = 0.2\n")
    pulsar_port = str(find_free_port("127.0.0.1"))
    process = processes.start(
        "standalone", "standalone", "--port", "0", "--pulsar-port", pulsar_port, "--data", "data", "--config",
        str(folder / "magnetar.toml"),
    )  # fmt: skip
    before, partitions_watcher.DISCOVER_EVERY_S = partitions_watcher.DISCOVER_EVERY_S, 0.1
    try:
        url = process.wait_ready()
        yield process, Server(url, f"pulsar://127.0.0.1:{pulsar_port}", folder, pair_of_keys(folder))
    finally:
        partitions_watcher.DISCOVER_EVERY_S = before
