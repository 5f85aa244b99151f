"""txn-small, txn-large, txn-none, process: transactions through the SDK, against a server process.

txn-small    64 transactions are open at once; each sends 1 message to one of 4 topics, acknowledges 1 of a backlog, and
             commits, as those of `pulsar-perf transaction`
txn-large    messages in transactions of 1,000 / without, the same producer taking turns, as many messages under way
txn-none     `produce` here / in the tree before there were transactions, taking turns: what other topics pay for them
process      `magnetar.asyncio.process` copies a backlog of --messages into another topic
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from .harness import ROOT, Options, Run, measured, percentiles, server
from .messaging import PENDING, WARM_UP_S, payloads

OPEN, TOPICS = 64, 4
LARGE = 1000
"""Messages of a transaction of txn-large."""
TURNS = 4
UNDER_WAY = PENDING // LARGE
"""Commits: as many messages wait for an outcome as without transactions."""
RATE_MAX = 8000
"""Transactions a second for which there is a backlog."""


# ------------------------------------------------------------------------------------- txn-small
def txn_small(options: Options) -> Run:
    with server(options.bookies) as running:
        return asyncio.run(_small(running.url, running.pid, options))


async def _small(url: str, pid: int, options: Options) -> Run:
    import magnetar

    contents = payloads(options.size, options.seed)
    async with magnetar.asyncio.Client(url) as client:
        outputs = [await client.create_producer(f"out-{n}") for n in range(TOPICS)]
        inputs = [f"in-{n}" for n in range(TOPICS)]
        consumer = await client.subscribe(
            inputs, "bench", magnetar.ConsumerType.Shared, initial_position=magnetar.InitialPosition.Earliest,
            receiver_queue_size=1000,
        )  # fmt: skip
        warm_up_s = options.at_most(WARM_UP_S * 2)
        backlog = round(RATE_MAX * (options.seconds + warm_up_s))
        await asyncio.gather(*(_fill(client, each, contents, backlog // TOPICS) for each in inputs))
        stop = asyncio.Event()
        samples: list[tuple[float, float, float]] = []  # when it was over, seconds of all, of the commit
        failed = 0

        async def work(number: int) -> None:
            nonlocal failed
            producer, count = outputs[number % TOPICS], 0
            while not stop.is_set():
                message = await consumer.receive()
                begin = time.perf_counter()
                try:
                    txn = await client.transaction()
                    producer.send_nowait(contents[count % len(contents)], txn=txn)
                    consumer.acknowledge_in(txn, message)
                    asked = time.perf_counter()
                    await txn.commit()
                except magnetar.PulsarException:
                    failed += 1
                    continue
                over = time.perf_counter()
                samples.append((over, over - begin, over - asked))
                count += 1

        workers = [asyncio.ensure_future(work(number)) for number in range(OPEN)]
        await asyncio.sleep(warm_up_s)
        run, first = Run(0.0), time.perf_counter()
        with measured(run, server=pid):
            await asyncio.sleep(options.seconds)
            last = time.perf_counter()
        stop.set()
        await asyncio.sleep(0.5)
        for each in workers:
            each.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    assert len(samples) < backlog - OPEN, "the backlog ran out"
    counted = [each for each in samples if first <= each[0] <= last]
    run.value = len(counted) / (last - first)
    run.latencies_ms = percentiles([commit for _, _, commit in counted])
    run.detail = {
        "transactions": len(counted), "failed": failed, "open": OPEN, "topics": TOPICS,
        "whole_ms": {name: round(ms, 3) for name, ms in percentiles([whole for _, whole, _ in counted]).items()},
        "server_cpu_ms_per_transaction": round(run.processes["server"]["cpu_s"] * 1000 / max(1, len(counted)), 4),
        "client_cpu_ms_per_transaction": round(run.processes["client"]["cpu_s"] * 1000 / max(1, len(counted)), 4),
    }  # fmt: skip
    return run


async def _fill(client: Any, topic: str, contents: list[bytes], count: int) -> None:
    """Messages of an entry each."""
    producer = await client.create_producer(topic, batching_enabled=False, max_pending_messages=1000)
    for _ in range(0, count, len(contents)):
        await producer.send_many(contents)
    await producer.close()


# ------------------------------------------------------------------------------------- txn-large
def txn_large(options: Options) -> Run:
    import magnetar

    contents = payloads(options.size, options.seed)
    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        producer = client.create_producer(
            "bench", batching_enabled=True, block_if_queue_full=True, max_pending_messages=PENDING
        )
        seconds = options.seconds / TURNS
        for with_transactions in (False, True):
            _send(client, producer, contents, options.at_most(WARM_UP_S), with_transactions=with_transactions)
        rates: dict[bool, list[float]] = {False: [], True: []}
        run = Run(0.0)
        with measured(run, server=running.pid):
            for _ in range(TURNS):
                for with_transactions, found in rates.items():
                    found.append(_send(client, producer, contents, seconds, with_transactions=with_transactions))
        run.value = median(rates[True]) / median(rates[False])
        run.detail = {
            "messages_per_transaction": LARGE,
            "msg_s": round(median(rates[True])), "plain_msg_s": round(median(rates[False])),
            "mb_s": round(median(rates[True]) * options.size / 1e6, 1),
        }  # fmt: skip
        return run


def _send(client: Any, producer: Any, contents: list[bytes], seconds: float, *, with_transactions: bool) -> float:
    """Messages per second that are stored, and committed."""
    sent, count = 0, len(contents)
    begin = time.perf_counter()
    commits: deque[Future[None]] = deque()
    with ThreadPoolExecutor(UNDER_WAY) as pool:
        while time.perf_counter() - begin < seconds:
            txn = client.transaction() if with_transactions else None
            for number in range(LARGE):
                producer.send_async(contents[number % count], None, txn=txn)
            sent += LARGE
            if txn is not None:
                commits.append(pool.submit(txn.commit))
                while len(commits) >= UNDER_WAY:
                    commits.popleft().result()
        producer.flush()
        for each in commits:
            each.result()
    return sent / (time.perf_counter() - begin)


# ------------------------------------------------------------------------------------- txn-none
FIRST = "broker/transaction/coordinator.py"
"""Came with transactions: the commit before it is the tree to compare with, unless `--baseline` names one."""


def txn_none(options: Options) -> Run:
    """Both trees run their own client and server."""
    with tempfile.TemporaryDirectory(prefix="magnetar-bench-") as folder, _other(folder, options) as other:
        rates: dict[Path, list[float]] = {ROOT: [], other: []}
        for turn in range(4):
            for tree in (ROOT, other) if turn % 2 else (other, ROOT):
                rates[tree].append(_produce_in(tree, Path(folder, f"path-{len(rates[tree])}-{tree is ROOT}"), options))
    here, there = median(rates[ROOT]), median(rates[other])
    return Run(here / there, detail={"msg_s": round(here), "baseline_msg_s": round(there)})


@contextmanager
def _other(folder: str, options: Options) -> Iterator[Path]:
    if (given := options.extra.get("baseline")) is not None:
        yield Path(given).resolve()
        return
    first = _git("log", "--diff-filter=A", "--format=%H", "--", FIRST).split()[-1]
    tree = Path(folder, "before")
    _git("worktree", "add", "--detach", str(tree), f"{first}~1")
    try:
        yield tree
    finally:
        _git("worktree", "remove", "--force", str(tree))


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _produce_in(tree: Path, path: Path, options: Options) -> float:
    """The tree's own `magnetar`, under that name on the path."""
    path.mkdir()
    path.joinpath("magnetar").symlink_to(tree, target_is_directory=True)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "produce", "--json", "--runs", "1", "--size", str(options.size),
         "--bookies", str(options.bookies), "--seconds", str(options.seconds)],
        cwd=tree, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(path)},
    )  # fmt: skip
    return float(json.loads(done.stdout)["value"])


# --------------------------------------------------------------------------------------- process
def process(options: Options) -> Run:
    with server(options.bookies) as running:
        return asyncio.run(_process(running.url, running.pid, options))


async def _process(url: str, pid: int, options: Options) -> Run:
    import magnetar

    contents, run = payloads(options.size, options.seed), Run(0.0)
    async with magnetar.asyncio.Client(url) as client:
        consumer = await client.subscribe(
            "in", "bench", initial_position=magnetar.InitialPosition.Earliest, receiver_queue_size=10_000
        )
        async with await client.create_producer("in", max_pending_messages=PENDING, block_if_queue_full=True) as source:
            for _ in range(-(-options.messages // 2_560)):
                await source.send_many(contents * 10)
        producer = await client.create_producer("out", max_pending_messages=PENDING)
        statistics = magnetar.ProcessStatistics()
        with measured(run, server=pid):
            begin = time.perf_counter()
            running = asyncio.ensure_future(
                magnetar.asyncio.process(
                    consumer, producer, lambda message: message.data(), messages_max=5000, statistics=statistics
                )
            )
            while statistics.sent < options.messages and not running.done():
                await asyncio.wait([running], timeout=0.01)
            run.value = statistics.sent / (time.perf_counter() - begin)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    run.detail = {
        "messages": statistics.sent, "transactions": statistics.committed, "aborted": statistics.aborted,
        "server_cpu_us_per_message": round(run.processes["server"]["cpu_s"] * 1e6 / max(1, statistics.sent), 2),
        "client_cpu_us_per_message": round(run.processes["client"]["cpu_s"] * 1e6 / max(1, statistics.sent), 2),
    }  # fmt: skip
    return run
