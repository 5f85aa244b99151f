"""dedup: what deduplication costs a producer. Topics with and without it take turns, in one run, on one server."""

from __future__ import annotations

import asyncio
from statistics import median
from typing import Any

from .harness import Options, Run, measured, percentiles, server
from .messaging import PENDING, WARM_UP_S, Sending, payloads

ROUNDS = 4
"""Of each kind: the machine changes more within a minute than what is measured."""


def dedup(options: Options) -> Run:
    """Messages per second with deduplication / without; medians of the rounds."""
    import magnetar

    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        contents = payloads(options.size, options.seed)
        sending = {each: Sending(_producer(client, each), contents) for each in (False, True)}
        asyncio.run(_turn_on(running.url))
        for each in sending.values():
            each.run(seconds=options.at_most(WARM_UP_S))
            each.samples.clear()
        run, rates = Run(0.0), {False: list[float](), True: list[float]()}
        with measured(run, server=running.pid):
            for _ in range(ROUNDS):
                for on, each in sending.items():
                    before = each.acked
                    seconds = each.run(seconds=options.seconds / ROUNDS / 2)
                    rates[on].append((each.acked - before) / seconds)
        run.value = median(rates[True]) / median(rates[False])
        run.latencies_ms = percentiles(sending[True].samples)
        run.detail = {
            "with_msg_s": median(rates[True]), "without_msg_s": median(rates[False]),
            "failed": sum(each.failed for each in sending.values()),
        }  # fmt: skip
        return run


def _topic(on: bool) -> str:
    return "bench-with" if on else "bench-without"


def _producer(client: Any, on: bool) -> Any:
    return client.create_producer(
        _topic(on), producer_name="bench", batching_enabled=True, block_if_queue_full=True, max_pending_messages=PENDING
    )


async def _turn_on(url: str) -> None:
    from magnetar.client.admin import AdminClient
    from magnetar.proto.policies import Policies

    admin = AdminClient(url)
    try:
        await admin.set_topic_policies(_topic(True), Policies(deduplication=True))
    finally:
        await admin.close()
