"""metadata: commits of a client on `magnetar metadata` (SQLite) and on an etcd of three servers, taking turns.

`rate` is with UNDER_WAY commits under way, `p50` and `p99` are of commits one after the other; each commit writes a
record of RECORD_BYTES that is its own, as brokers do. Both sync to the disk of this machine. At the end the leader of
etcd is killed: `silence` is the longest time in which a writer, which decides by content what it does not know, had no
commit, from the kill on.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from .harness import Options, Run, percentiles

UNDER_WAY = 64
RECORD_BYTES = 200
TURNS = 3
SILENT_S = 12.0


def metadata(options: Options) -> Run:
    """Commits/s on etcd / on SQLite."""
    from magnetar.cli.common.processes import Processes
    from tests.support.etcd import EtcdCluster, why_no_etcd

    if reason := why_no_etcd():
        raise SystemExit(reason)
    folder = tempfile.TemporaryDirectory(prefix="magnetar-benchmark-")
    with folder as directory, Processes(Path(directory) / "logs") as processes:
        service = processes.start(
            "metadata", "metadata", "--listen", "127.0.0.1:0", "--data", str(Path(directory) / "metadata")
        )
        address = service.wait_ready().removeprefix("metadata://")
        with EtcdCluster(Path(directory) / "etcd", servers=3, sync=True) as cluster:
            run = Run(0.0)
            measuring = _measure(
                {"sqlite": address, "etcd": cluster.url}, max(0.2, options.seconds / (4 * TURNS))
            )
            run.detail = asyncio.run(measuring)
            run.value = round(run.detail["etcd_rate"] / run.detail["sqlite_rate"], 3)
            run.detail["leader_killed_silence_s"] = round(asyncio.run(_kill_leader(cluster)), 2)
    return run


async def _measure(addresses: dict[str, str], seconds: float) -> dict[str, Any]:
    counts = dict.fromkeys(addresses, 0)
    samples: dict[str, list[float]] = {name: [] for name in addresses}
    for _ in range(TURNS):
        for name, address in addresses.items():
            store = await _connect(address)
            try:
                counts[name] += sum(await asyncio.gather(*[_write(store, at, seconds) for at in range(UNDER_WAY)]))
                await _write(store, UNDER_WAY, seconds, samples[name])
            finally:
                await store.close()
    detail: dict[str, Any] = {}
    for name in addresses:
        told = percentiles(samples[name])
        detail |= {
            f"{name}_rate": round(counts[name] / (TURNS * seconds)),
            f"{name}_p50_ms": round(told["p50"], 2), f"{name}_p99_ms": round(told["p99"], 2),
        }  # fmt: skip
    return detail


async def _connect(address: str) -> Any:
    from magnetar.metadata.remote import connect_metadata_at
    from magnetar.metadata.session import parse_address
    from magnetar.runtime.process import make_system_world

    return await connect_metadata_at(make_system_world(), parse_address(address))


async def _write(store: Any, writer: int, seconds: float, samples: list[float] | None = None) -> int:
    """Commits one version after the other of a node for so long; returns how many."""
    from magnetar.metadata.store import ANY_VERSION

    end, count, version = time.perf_counter() + seconds, 0, ANY_VERSION
    while (begin := time.perf_counter()) < end:
        version = await store.put(f"/bench/{writer}", bytes(RECORD_BYTES), version)
        count += 1
        if samples is not None:
            samples.append(time.perf_counter() - begin)
    return count


async def _kill_leader(cluster: Any) -> float:
    """Kills the leader; returns the longest time without a commit of any of the writers, each on one server."""
    from magnetar.metadata.store import update_node

    stores = [await _connect(cluster.url) for _ in range(3)]
    longest = 0.0

    async def write(number: int) -> None:
        nonlocal longest
        last, at = time.perf_counter(), 0
        while last < end:
            at += 1
            value = b"%d" % at
            await update_node(stores[number], f"/silence/{number}", lambda current, value=value: value)  # type: ignore[misc]
            now = time.perf_counter()
            longest, last = max(longest, now - last), now
            await asyncio.sleep(0.005)

    end = time.perf_counter() + SILENT_S
    writing: list[Coroutine[Any, Any, None]] = [write(number) for number in range(3)]

    async def kill() -> None:
        await asyncio.sleep(1.0)
        leader = await asyncio.to_thread(cluster.leader)
        cluster.kill(leader)

    await asyncio.gather(kill(), *writing)
    for store in stores:
        await store.close()
    return longest
