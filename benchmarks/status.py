"""status: what an operator waits for `magnetar status` of a cluster of processes with --topics topics.

The value is the median of the seconds from the start of the command to its end, of RUNS. The cluster has a metadata
service, BOOKIES bookies and BROKERS brokers; half of the topics are in a namespace of their own, each with a
subscription. In the detail the same of `magnetar namespaces stats` of that namespace, of `magnetar tenants list`, which
is the start of a command and one small answer, and of the command's help, which asks nobody. Of each also the processor
time: `…_command_cpu_s` of the command, `…_brokers_cpu_s` of all brokers and the metadata service, with their own work
meanwhile. On a machine with other work it is the processor time that can be compared. The command has its bytecode, as
it has once it is installed, also where this process may write none (PYTHONDONTWRITEBYTECODE).
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from .harness import Options, Run, progress, read_cpu_s

TOPICS = 10_000
BOOKIES, BROKERS = 5, 4
AT_ONCE = 64
RUNS = 9
NAMESPACE = "public/half"


def status(options: Options) -> Run:
    from magnetar.cli.common.processes import Cluster

    count = int(options.extra.get("topics", TOPICS // 50 if options.rehearses else TOPICS))
    directory = tempfile.mkdtemp(prefix="magnetar-bench-")
    try:
        with Cluster(Path(directory), bookies=BOOKIES, brokers=BROKERS) as running:
            asyncio.run(_made(running.url, count))
            url = running.url.partition(",")[0]
            servers = [running.metadata.pid, *(broker.pid for broker in running.brokers)]
            detail: dict[str, float] = {"topics": count}
            environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{directory}/bytecode"}
            asked, medians = ("--url", url), partial(_medians, servers, environment)
            detail |= medians("status", "status", *asked, codes=(0, 1))
            detail |= medians("namespace_stats", "namespaces", "stats", NAMESPACE, *asked)
            detail |= medians("tenants_list", "tenants", "list", *asked)
            detail |= medians("help", "--help")
            run = Run(detail.pop("status_s"), detail=detail)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return run


async def _made(url: str, count: int) -> None:
    from magnetar.admin import AdminClient

    async with AdminClient(url) as admin:
        await admin.create_namespace(NAMESPACE)
        turns = asyncio.Semaphore(AT_ONCE)

        async def make(number: int) -> None:
            name = f"persistent://{NAMESPACE if number % 2 else 'public/default'}/t{number}"
            async with turns:
                await admin.create_topic(name)
                await admin.create_subscription(name, "s")

        began = time.perf_counter()
        await asyncio.gather(*map(make, range(count)))
        progress(f"status: {count:,} topics made in {time.perf_counter() - began:.1f} s")


def _medians(
    servers: Sequence[int], environment: Mapping[str, str], name: str, *arguments: str, codes: tuple[int, ...] = (0,)
) -> dict[str, float]:
    """Returns the medians of the seconds that the command takes, and of the processor time of it and of the processes
    `servers`."""
    command = [sys.executable, "-m", "magnetar.cli.main", *arguments]
    took: dict[str, list[float]] = {"_s": [], "_command_cpu_s": [], "_brokers_cpu_s": []}
    for _ in range(RUNS + 1):  # the first fills the caches of the system
        served, own, began = sum(map(read_cpu_s, servers)), _children_cpu_s(), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        took["_s"].append(time.perf_counter() - began)
        took["_command_cpu_s"].append(_children_cpu_s() - own)
        took["_brokers_cpu_s"].append(sum(map(read_cpu_s, servers)) - served)
        assert done.returncode in codes, done.stderr
    return {name + figure: round(statistics.median(each[1:]), 3) for figure, each in took.items()}


def _children_cpu_s() -> float:
    """Returns the processor time of the processes that this one has waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
