"""slow-bookie: what a bookie that is ten times slower than the others costs a writer with 3/3/2.

The bookies are in this process, answer after a fixed time and keep nothing: LATENCY_S for an add, after one that is
before it in the queue has taken SERVICE_S. One of them takes SLOWER times as long for both, and keeps up with 2,000
requests a second; above that it is given up after `add_timeout_s`, and the ledger ends. The value is the p99 of the
appends beside it, divided by the p99 beside three alike, at `--rate`.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence

from magnetar.ledger import LedgerClient, LedgerConfig
from magnetar.ledger.peer_format import BookieAnswerHead, BookieOperation, Status, decode_request, encode_add_statuses
from magnetar.metadata import paths
from magnetar.metadata.records import BookieRecord, encode_record
from magnetar.metadata.sqlite import SqliteStore
from magnetar.metadata.store import MetadataStore
from magnetar.runtime.network import Endpoint, PeerRequest, RunningServer, World
from magnetar.runtime.process import make_system_world

from ..harness import Options, Run, percentiles

LATENCY_S, SERVICE_S, SLOWER = 0.020, 0.00005, 10


class TimedBookie:
    """Answers adds after a time, and stores nothing."""

    def __init__(self, number: int, slower: float) -> None:
        self.id = str(uuid.UUID(int=number + 1))
        self._latency_s, self._service_s = LATENCY_S * slower, SERVICE_S * slower
        self._free_at = 0.0
        self._loop = asyncio.get_running_loop()

    async def start(self, world: World, metadata: MetadataStore) -> RunningServer:
        serving = await world.network.serve_peers(Endpoint("127.0.0.1", 0), uuid.UUID(self.id).bytes, self._serve)
        record = BookieRecord(bookie=self.id, endpoint=str(serving.endpoint), rack="/default")
        await metadata.put(paths.bookie(self.id), encode_record(record, paths.bookie(self.id)))
        return serving

    def _serve(self, requests: Sequence[PeerRequest]) -> None:
        for request in requests:
            self._free_at = max(self._loop.time(), self._free_at) + self._service_s
            self._loop.call_at(self._free_at + self._latency_s, self._answer, request)

    def _answer(self, request: PeerRequest) -> None:
        head = decode_request(bytes(request.head))
        if head.op is BookieOperation.ADD_MANY:
            request.reply(*encode_add_statuses(head.ledger, head.entry, bytes(head.count)))
        else:
            request.reply(BookieAnswerHead(head.op, Status.OK, head.ledger, head.entry, -1, 0).encode(), [])


async def _append(options: Options, slower: Sequence[float]) -> list[float]:
    """The seconds of each append."""
    world, loop, waits = make_system_world(seed=options.seed), asyncio.get_running_loop(), list[float]()
    store = await SqliteStore.open(world, ":memory:")
    session = store.new_session()
    serving = [await TimedBookie(number, each).start(world, session) for number, each in enumerate(slower)]
    client = LedgerClient(world, session, LedgerConfig(ensemble_size=3, write_quorum=3, ack_quorum=2))
    writer, payload, start = await client.create(), bytes(options.size), loop.time()

    async def one() -> None:
        begin = loop.time()
        await writer.append(payload)
        waits.append(loop.time() - begin)

    async with asyncio.TaskGroup() as group:
        for number in range(max(1, int(options.rate * options.seconds))):
            await asyncio.sleep(max(0.0, start + number / options.rate - loop.time()))
            group.create_task(one())
    await client.close()
    for each in serving:
        await each.close()
    await session.close()
    await store.close()
    return waits


def slow_bookie(options: Options) -> Run:
    alike = percentiles(asyncio.run(_append(options, (1, 1, 1))))
    beside = percentiles(asyncio.run(_append(options, (1, 1, SLOWER))))
    return Run(beside["p99"] / alike["p99"], beside, detail={"alike": alike, "rate": options.rate})
