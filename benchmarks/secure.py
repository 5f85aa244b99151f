"""What security costs: TLS and a token against plain, taking turns in one run, on two standalone servers; and with keys
between broker and bookies (CURVE) on two clusters, of one bookie and one copy or of three and three copies.

The files are those of `magnetar security init`, in a folder of their own beside the servers' data.
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from .harness import Options, Run, Server, Usage, measured, percentiles
from .messaging import PENDING, WARM_UP_S, Paced, Sending, payloads

ROUNDS = 4
"""Of each kind: the machine changes more within a minute than what is measured."""
STARTS = 3
AT_ONCE = 8
"""Connections that are made at the same time."""


IMPORTS = 5
"""Processes that import."""


class Place(NamedTuple):
    """A running cluster."""

    url: str
    pid: int  # of the broker
    bookies: list[int]


class Both(NamedTuple):
    plain: Server | Place
    secure: Server | Place
    folder: Path

    def client(self, secure: bool) -> Any:
        import magnetar

        return magnetar.Client(self.secure.url, **self.credentials()) if secure else magnetar.Client(self.plain.url)

    def credentials(self) -> dict[str, Any]:
        import magnetar

        token = (self.folder / "admin.token").read_text().strip()
        trust = str(self.folder / "ca.pem")
        return {"authentication": magnetar.AuthenticationToken(token), "tls_trust_certs_file_path": trust}


@contextmanager
def _files() -> Iterator[Path]:
    """An empty folder with `security` in it."""
    from magnetar.security.authority import create_authority_files

    root = Path(tempfile.mkdtemp(prefix="magnetar-bench-"))
    try:
        create_authority_files(root / "security", ["127.0.0.1"], datetime.now(UTC))
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _both(bookies: int) -> Iterator[Both]:
    """A server without security, and one with."""
    with _files() as root:
        plain, secure = _servers(root, bookies)
        try:
            plain.start(), secure.start()
            yield Both(plain, secure, root / "security")
        finally:
            plain.stop(), secure.stop()


def _servers(root: Path, bookies: int) -> tuple[Server, Server]:
    settings = str(root / "security" / "security.toml")
    return Server(str(root / "plain"), bookies), Server(str(root / "secure"), bookies, "--security", settings)


@contextmanager
def _both_clusters(bookies: int) -> Iterator[Both]:
    """A cluster of processes without security, and one with: as many copies as bookies."""
    from magnetar.cli.common.processes import Cluster, Process

    names = ("ENSEMBLE_SIZE", "WRITE_QUORUM", "ACK_QUORUM") if bookies == 1 else ()
    copies = {f"MAGNETAR_BROKER_{name}": "1" for name in names}

    class Copies(Cluster):
        def start(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
            return super().start(name, *arguments, environment={**copies, **(environment or {})})

    def place(cluster: Cluster) -> Place:
        return Place(cluster.url, cluster.brokers[0].pid, [each.pid for each in cluster.bookies])

    with _files() as root:
        settings = str(root / "security" / "security.toml")
        with (
            Copies(root / "plain", bookies=bookies, brokers=1) as plain,
            Copies(root / "secure", bookies=bookies, brokers=1, security=settings) as secure,
        ):
            yield Both(place(plain), place(secure), root / "security")


def secure_produce(options: Options) -> Run:
    """Messages per second over TLS with a token / plain; medians of the rounds."""
    with _both(options.bookies) as both:
        return _produced(options, both)


def secure_cluster(options: Options) -> Run:
    """The same of a cluster, with keys between broker and bookies too."""
    with _both_clusters(options.bookies) as both:
        run = _produced(options, both)
    run.detail["copies"] = options.bookies
    return run


def _produced(options: Options, both: Both) -> Run:
    with both.client(False) as plain, both.client(True) as secure:
        contents = payloads(options.size, options.seed)
        sending = {each: Sending(_producer(client), contents) for each, client in ((False, plain), (True, secure))}
        for each in sending.values():
            each.run(seconds=WARM_UP_S)
            each.samples.clear()
        run, rates = Run(0.0), {False: list[float](), True: list[float]()}
        with measured(run, **_pids("plain", both.plain), **_pids("secure", both.secure)):
            for _ in range(ROUNDS):
                for on, each in sending.items():
                    before = each.acked
                    seconds = each.run(seconds=options.seconds / ROUNDS / 2)
                    rates[on].append((each.acked - before) / seconds)
        run.value = median(rates[True]) / median(rates[False])
        run.latencies_ms = percentiles(sending[True].samples)
        run.detail = {
            "secure_msg_s": median(rates[True]), "plain_msg_s": median(rates[False]),
            "failed": sum(each.failed for each in sending.values()),
        }  # fmt: skip
        return run


def _pids(name: str, place: Server | Place) -> dict[str, int]:
    bookies = place.bookies if isinstance(place, Place) else []
    return {name: place.pid, **{f"{name}_bookie_{number}": pid for number, pid in enumerate(bookies)}}


def _producer(client: Any) -> Any:
    return client.create_producer(
        "bench", batching_enabled=True, block_if_queue_full=True, max_pending_messages=PENDING
    )


def secure_latency(options: Options) -> Run:
    """p99 of single sends at --rate over TLS with a token / plain."""
    with _both(options.bookies) as both, both.client(False) as plain, both.client(True) as secure:
        contents = payloads(options.size, options.seed)
        paced = {on: Paced(client, contents, options.rate) for on, client in ((False, plain), (True, secure))}
        samples: dict[bool, list[float]] = {False: [], True: []}
        for each in paced.values():
            each.stretch(WARM_UP_S)
        for _ in range(ROUNDS):
            for on, each in paced.items():
                each.stretch(options.seconds / ROUNDS / 2)
                samples[on] += each.samples
        found = {on: percentiles(each) for on, each in samples.items()}
        run = Run(found[True]["p99"] / found[False]["p99"])
        run.latencies_ms = found[True]
        run.detail = {"plain_p99_ms": found[False]["p99"], "plain_p50_ms": found[False]["p50"], "rate": options.rate}
        return run


def connect(options: Options) -> Run:
    """Connections per second, each with a handshake, an authenticated look-up, and its end; AT_ONCE at a time."""
    from magnetar.client.connect.authentication import make_caller_access
    from magnetar.client.connect.connections import make_client_world
    from magnetar.client.connect.discovery import parse_service_url
    from magnetar.proto import wire_pb2 as wire
    from magnetar.runtime.network import find_rpc

    async def main(both: Both) -> tuple[int, float]:
        credentials = both.credentials()
        url, network = parse_service_url(both.secure.url), make_client_world().network
        access = make_caller_access(url, credentials.pop("authentication"), credentials)
        made, until, begin = 0, time.perf_counter() + options.seconds, time.perf_counter()

        async def worker() -> None:
            nonlocal made
            while time.perf_counter() < until:
                channel = network.connect(url.endpoints[0], access)
                topic = wire.LookupRequest(topic="persistent://public/default/bench")
                await channel.call(find_rpc("Broker", "Lookup"), topic, timeout_s=10.0)
                await channel.close()
                made += 1

        await asyncio.gather(*[worker() for _ in range(AT_ONCE)])
        return made, time.perf_counter() - begin

    with _both(options.bookies) as both:
        run, usage = Run(0.0), Usage(both.secure.pid)
        with measured(run):
            made, seconds = asyncio.run(main(both))
        run.processes["server"] = usage.read()
        run.value = made / seconds
        each_ms = 1000 * run.processes["server"]["cpu_s"] / made
        run.detail = {"connections": made, "server_cpu_ms_each": round(each_ms, 2)}
        return run


def secure_startup(options: Options) -> Run:
    """Time to the `ready` line with security / without; medians of STARTS starts each, on empty directories.

    `import_ms`: of what a server with security imports besides, before it reads a key.
    """
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(STARTS):
        with _files() as root:
            plain, secure = _servers(root, options.bookies)
            try:
                times[False].append(plain.start())
                times[True].append(secure.start())
            finally:
                plain.stop(), secure.stop()
    run = Run(median(times[True]) / median(times[False]))
    run.detail = {
        "secure_s": round(median(times[True]), 3), "plain_s": round(median(times[False]), 3),
        "import_ms": round(median([_import_ms() for _ in range(IMPORTS)]), 1),
    }  # fmt: skip
    return run


def _import_ms() -> float:
    code = (
        "import time; import magnetar.cli.run.servers, magnetar.broker.server, magnetar.bookie.server\n"
        "begin = time.perf_counter()\n"
        "import magnetar.security.authenticator; print((time.perf_counter() - begin) * 1000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    return float(done.stdout)
