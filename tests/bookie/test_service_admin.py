"""ADMIN requests: their own tasks, bounded, never in the way of adds."""

import asyncio
import json

import pytest

from magnetar.bookie.server import Bookie
from magnetar.bookie.service import ADMIN_REQUESTS_MAX
from magnetar.ledger.peer_format import (
    ADMIN_BYTES_MAX,
    BookieAnswerHead,
    BookieOperation,
    Status,
    decode_answer,
    encode_admin_request,
)
from magnetar.runtime.access import Principal
from tests.bookie.bookies import Cluster, with_cluster
from tests.bookie.entries import PeerCaller

pytestmark = pytest.mark.run_by.with_args(with_cluster)


async def ask(caller: PeerCaller, *frames: bytes) -> tuple[BookieAnswerHead, list[bytes]]:
    reply = await caller.peer.request(encode_admin_request(), frames, timeout_s=30)
    return decode_answer(reply.head), [bytes(frame) for frame in reply.frames]


async def with_echo(cluster: Cluster) -> tuple[Bookie, PeerCaller]:
    async def echo(request: bytes, sender: Principal, local: bool) -> bytes:
        if json.loads(request)["verb"] == "wrong":
            raise KeyError("a fault of the verb")
        return json.dumps({"was": json.loads(request)}).encode()

    bookie = await cluster.start()
    bookie.first.service.on_admin = echo
    return bookie, cluster.caller(bookie)


async def test_admin_answers_json_with_json_and_bad_request_for_anything_else(cluster: Cluster, /) -> None:
    _, caller = await with_echo(cluster)
    head, frames = await ask(caller, b'{"verb": "state"}')
    assert (head.op, head.status, head.count) == (BookieOperation.ADMIN, Status.OK, 1)
    assert json.loads(frames[0]) == {"was": {"verb": "state"}}
    for bad in ((), (b"",), (b"no json",), (b"{}", b"{}"), (bytes(ADMIN_BYTES_MAX + 1),)):
        assert (await ask(caller, *bad))[0].status is Status.BAD_REQUEST, bad[:1]
    assert (await ask(caller, b'{"verb": "wrong"}'))[0].status is Status.UNKNOWN
    assert (await caller.add(1, 0, b"and the bookie serves")).status is Status.OK


async def test_a_bookie_without_verbs_says_bad_request(cluster: Cluster, /) -> None:
    caller = cluster.caller(await cluster.start())
    assert (await ask(caller, b"{}"))[0].status is Status.BAD_REQUEST


async def test_admin_requests_that_hang_hold_up_no_add_and_are_bounded_and_end_with_the_bookie(
    cluster: Cluster, /
) -> None:
    bookie, caller = await with_echo(cluster)
    ended: list[str] = []

    async def hang(request: bytes, sender: Principal, local: bool) -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("hung")
        return request

    bookie.first.service.on_admin = hang
    asks = [asyncio.ensure_future(ask(caller, b"{}")) for _ in range(ADMIN_REQUESTS_MAX)]
    await asyncio.sleep(1)
    assert bookie.statistics()["admin_requests"] == ADMIN_REQUESTS_MAX
    assert (await ask(caller, b"{}"))[0].status is Status.BUSY
    assert (await caller.add(1, 0, b"not held up")).status is Status.OK
    await cluster.simulation.spawn("bookie", bookie.close())
    assert len(ended) == ADMIN_REQUESTS_MAX
    await asyncio.gather(*asks, return_exceptions=True)
