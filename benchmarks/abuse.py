"""What good clients see of a secured cluster while others abuse it, and what memory the abusers get.

The cluster is metadata, one bookie and one broker, each a process; the abusers are processes of the lowest priority
(`abusers.py`), because they stand for other machines. A good client sends single messages at --rate (at most RATE_MAX)
and consumes them all. Needs 12,000 open files for each process: the limit is raised to that if it may be.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .abusers import AT_ONCE, many_files
from .floods import FLOODS
from .harness import REHEARSAL_S, ROOT, Options, Run, Usage, percentiles, progress
from .messaging import WARM_UP_S, Paced, payloads

FLOOD, SLOW, UNREAD = 10_000, 1_000, 300
RATE_MAX = 200.0
MEMORY = 256 << 20
"""`client_memory_bytes` of the broker: the unread clients ask for four times as much."""
BACKLOG = 16 << 20
"""Bytes of the topic that the unread clients ask for, each all of it."""
CONNECTION_BYTES = 80 << 10
"""Of an open connection with TLS, in gRPC (docs/security.md)."""
REHEARSAL = 1 / 20
"""Of the abusers."""
STREAM_BYTES = 1 << 20
"""Of a stream that is not read, in gRPC, beside what the broker counts (docs/security.md)."""


@contextmanager
def _cluster() -> Iterator[tuple[Any, Path, list[tuple[str, int]]]]:
    """A secured cluster, the folder of its credentials, and all its ports: the broker's first."""
    from magnetar.cli.common.processes import Cluster, Process
    from magnetar.runtime.network import Endpoint
    from magnetar.security.authority import create_authority_files

    class Shown(Cluster):
        """With metrics of the broker."""

        def start(self, name: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Process:
            more = ("--metrics", f"127.0.0.1:{metrics}") if name.startswith("broker") else ()
            one = {f"MAGNETAR_BROKER_{each}": "1" for each in ("ENSEMBLE_SIZE", "WRITE_QUORUM", "ACK_QUORUM")}
            bound = {"MAGNETAR_BROKER_CLIENT_MEMORY_BYTES": str(MEMORY)}
            return super().start(name, *arguments, *more, environment={**one, **bound, **(environment or {})})

    root, metrics = Path(tempfile.mkdtemp(prefix="magnetar-bench-")), _free_port()
    create_authority_files(root / "security", ["127.0.0.1"], datetime.now(UTC))
    try:
        with Shown(root, bookies=1, brokers=1, security=str(root / "security" / "security.toml")) as cluster:
            processes = (*cluster.brokers, *cluster.bookies, cluster.metadata)
            ports = [tuple(Endpoint.parse(each.address)) for each in processes]
            yield cluster, root / "security", [*ports, ("127.0.0.1", metrics)]
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _abuser(kind: str, **orders: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.abusers", kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=ROOT,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(orders) + "\n")
        process.stdin.flush()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def _abused(kind: str, found: dict[str, Any], **orders: Any) -> Iterator[Callable[[], None]]:
    """While an abuser of that kind is at work; what it counts goes to `found`. The value waits until it is in place."""
    with _abuser(kind, **orders) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield lambda: _told(process)
        process.stdin.close()
        *_, last = process.stdout.read().splitlines()
        found[kind] = json.loads(last)


def _told(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    assert process.stdout.readline() == "in place\n", "the abuser ended"


class Good:
    """A producer at a steady rate and a consumer of what it sends."""

    def __init__(self, client: Any, options: Options) -> None:
        self._paced = Paced(client, payloads(options.size, options.seed), min(options.rate, RATE_MAX))
        self._consumer = client.subscribe("bench", "good")
        self.arrivals: list[float] = []  # seconds from publishing to receiving, of the last stretch
        self.sent = self.received = 0

    def stretch(self, seconds: float) -> dict[str, float]:
        """Latencies of the sends in ms; every message arrives."""
        self.arrivals.clear()
        sent = threading.Event()
        reading = threading.Thread(target=self._read, args=(sent,), daemon=True)
        reading.start()
        self.sent += self._paced.stretch(seconds)
        sent.set()
        reading.join(60)
        assert self.received == self.sent, f"{self.sent - self.received} messages did not arrive"
        return percentiles(self._paced.samples)

    def _read(self, sent: threading.Event) -> None:
        import magnetar

        until = time.perf_counter() + 120
        while time.perf_counter() < until and not (sent.is_set() and self.received >= self.sent):
            try:
                message = self._consumer.receive(200)
            except magnetar.Timeout:
                continue
            self.arrivals.append(time.time() - message.publish_timestamp() / 1000)
            self._consumer.acknowledge(message)
            self.received += 1


def abuse(options: Options) -> Run:
    """Good clients' p99 of sends while the worst kind of abuse begins, and while it lasts, or during the worst flood of
    one connection (floods.py) / without any; the worst."""
    run, counted, late_ms, files = Run(0.0), dict[str, Any](), dict[str, float](), many_files()
    share = REHEARSAL if options.rehearses else 1.0
    flood, slow, unread = (int(share * each) for each in (FLOOD, SLOW, UNREAD))
    with _cluster() as (cluster, folder, ports):
        token, trust = (folder / "admin.token").read_text().strip(), str(folder / "ca.pem")
        kinds: dict[str, dict[str, Any]] = {
            "flood": {"count": flood}, "slow": {"count": slow}, "garbage": {"count": AT_ONCE},
            "unread": {"count": unread, "token": token, "ca": trust, "topic": "persistent://public/default/old"},
        }  # fmt: skip
        usages = {"broker": Usage(cluster.brokers[0].pid), "bookie": Usage(cluster.bookies[0].pid)}
        usages["metadata"] = Usage(cluster.metadata.pid)
        with _client(cluster.url, token, trust) as client:
            _fill(client)
            good = Good(client, options)
            good.stretch(options.at_most(WARM_UP_S))
            rest_mb = usages["broker"].read()["rss_mb"]
            alone = good.stretch(options.seconds)
            found = dict[str, dict[str, float]]()
            for kind, orders in kinds.items():
                with _abused(kind, counted, ports=ports, **orders) as in_place:
                    found[f"{kind}_begins"] = good.stretch(options.seconds)
                    in_place()
                    found[kind] = good.stretch(options.seconds)
                    late_ms[kind] = _late(cluster.url, token, trust)
                progress(f"  {kind}: p99 {found[f'{kind}_begins']['p99']:.1f} ms, then {found[kind]['p99']:.1f} ms")
            floods = _floods(good, alone["p99"], ports[0], folder, options.seconds)
            run.processes = {name: usage.read() for name, usage in usages.items()}
            late_ms["after"] = _late(cluster.url, token, trust)
    run.latencies_ms = max(found.values(), key=lambda each: each["p99"])
    run.value = max(run.latencies_ms["p99"] / alone["p99"], *(each["times_alone"] for each in floods.values()))
    bound_mb = rest_mb + (MEMORY + (flood + slow) * CONNECTION_BYTES + unread * STREAM_BYTES) / (1 << 20)
    run.detail = {
        "alone_p99_ms": round(alone["p99"], 2),
        **{f"{kind}_p99_ms": round(each["p99"], 2) for kind, each in found.items()},
        "floods": floods, "broker_rest_rss_mb": rest_mb, "broker_bound_mb": round(bound_mb, 1),
        "within": run.processes["broker"]["peak_rss_mb"] <= bound_mb, "counted": counted, "messages": good.sent,
        "new_client_ms": late_ms, "open_files": files,
    }  # fmt: skip
    return run


def _floods(
    good: Good, alone_ms: float, port: tuple[str, int], folder: Path, seconds: float
) -> dict[str, dict[str, float]]:
    """p99 of sends while each flood comes on one connection without credentials, at the broker and, as its control, at
    another process of this machine. Stretches below REHEARSAL_S: two of them.
    """
    found = dict[str, dict[str, float]]()
    host, shown = port[0], {"certificate": str(folder / "broker.pem"), "key": str(folder / "broker-key.pem")}
    with _abuser("sink", ports=[port], **shown) as sink:
        assert sink.stdout is not None
        elsewhere = (host, int(sink.stdout.readline()))
        for name in FLOODS if seconds >= REHEARSAL_S else list(FLOODS)[:2]:
            p99 = []
            for target in (elsewhere, port):
                with _abused("http2", {}, ports=[target], flood=name) as in_place:
                    in_place()
                    p99.append(good.stretch(seconds)["p99"])
            control, here = p99
            found[name] = {
                "p99_ms": round(here, 2), "control_p99_ms": round(control, 2),
                "times_alone": round(here / alone_ms, 2), "times_control": round(here / control, 2),
            }  # fmt: skip
            progress(f"  {name}: p99 {here:.1f} ms; {control:.1f} ms with the flood elsewhere")
    return found


def _client(url: str, token: str, trust: str) -> Any:
    import magnetar

    return magnetar.Client(
        url, magnetar.AuthenticationToken(token), tls_trust_certs_file_path=trust, operation_timeout_seconds=10
    )


def _late(url: str, token: str, trust: str) -> float:
    """Milliseconds until a client that comes now has sent a message; -1: it was refused."""
    import magnetar

    begin = time.perf_counter()
    try:
        with _client(url, token, trust) as late:
            late.create_producer("late").send(b"x")
    except magnetar.PulsarException:
        return -1.0
    return round((time.perf_counter() - begin) * 1000, 1)


def _fill(client: Any) -> None:
    producer = client.create_producer("old", batching_enabled=True, block_if_queue_full=True)
    for _ in range(BACKLOG // (64 << 10)):
        producer.send_async(bytes(64 << 10), None)
    producer.flush()
    producer.close()
