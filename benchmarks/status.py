"""status: what an operator waits for `magnetar status` of a cluster of processes with --topics topics.

The value is the median of the seconds from the start of the command to its end, of RUNS. The cluster has a metadata
service, BOOKIES bookies and BROKERS brokers; half of the topics are in a namespace of their own, each with a
subscription. In the detail the same of `magnetar namespaces stats` of that namespace, of `magnetar tenants list`, which
is the start of a command and one small answer, and of the command's help, which asks nobody.
"""

from __future__ import annotations

import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .harness import Options, Run, progress

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
            run = Run(_median_s("status", "--url", url, codes=(0, 1)))
            run.detail = {
                "topics": count,
                "namespace_stats_s": _median_s("namespaces", "stats", NAMESPACE, "--url", url),
                "tenants_list_s": _median_s("tenants", "list", "--url", url),
                "help_s": _median_s("--help"),
            }
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


def _median_s(*arguments: str, codes: tuple[int, ...] = (0,)) -> float:
    """Returns the median of the seconds that the command takes."""
    command, took = [sys.executable, "-m", "magnetar.cli.main", *arguments], list[float]()
    for _ in range(RUNS + 1):  # the first fills the caches of the system
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        took.append(time.perf_counter() - began)
        assert done.returncode in codes, done.stderr
    return round(statistics.median(took[1:]), 3)
