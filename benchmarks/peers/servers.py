"""The servers of one row: each starts when a side first asks for it, and all end with the row, with what they stored.

All have their data in the folder for temporary files, one device, and sync before every acknowledgement.
"""

from __future__ import annotations

import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

from ..harness import ROOT, Server, progress, server
from .kafka_server import Kafka, command
from .maven import Missing, tool

JAVA_OF_PULSAR = (
    "-Xms2g", "-Xmx2g", "-XX:MaxDirectMemorySize=4g", "-XX:+UseZGC", "-XX:+PerfDisableSharedMem",
)  # fmt: skip
"""As its own start script, but without AlwaysPreTouch, which takes long at the start and nothing later."""
COPIES = {1: (1, 1, 1), 3: (3, 3, 2)}
"""Ensemble, write quorum and acknowledgements of a ledger by bookies."""
DISK = {"journalMaxBackups": "1", "gcWaitTime": "60000"}
"""What was deleted leaves the disk within a minute, as turns write tens of gigabytes."""


class PulsarServer:
    """Where a Pulsar is."""

    def __init__(self, url: str, http_url: str) -> None:
        self.url, self.http_url = url, http_url

    def admin(self, method: str, path: str) -> None:
        """One request about a topic of public/default. urllib's HTTPError: it was refused."""
        asked = urllib.request.Request(f"{self.http_url}/admin/v2/persistent/public/default/{path}", method=method)
        with urllib.request.urlopen(asked, timeout=60) as reply:
            reply.read()


class Servers:
    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack
        self._ours = cache(self._start_ours)
        self._pulsar = cache(self._start_pulsar)
        self.kafka = cache(self._start_kafka)
        """Its bootstrap server. Missing."""

    def ours(self, bookies: int = 1) -> Server:
        return self._ours(bookies)

    def pulsar(self, bookies: int = 1) -> PulsarServer:
        """Missing."""
        return self._pulsar(bookies)

    def _start_ours(self, bookies: int) -> Server:
        return self.stack.enter_context(server(bookies))

    def _start_pulsar(self, bookies: int) -> PulsarServer:
        from tests.interop.pulsar_process import Pulsar

        java = pulsar_command()
        at = java.index("-cp")
        ensemble, write, acks = COPIES[bookies]
        more = DISK | {
            "managedLedgerDefaultEnsembleSize": str(ensemble), "managedLedgerDefaultWriteQuorum": str(write),
            "managedLedgerDefaultAckQuorum": str(acks), "transactionCoordinatorEnabled": "false",
        }  # fmt: skip
        progress(f"  Pulsar starts, bookies: {bookies}")
        java = [*java[:at], *JAVA_OF_PULSAR, *java[at:]]
        pulsar = self.stack.enter_context(Pulsar(java, self._folder("pulsar"), bookies=bookies, more=more))
        return PulsarServer(pulsar.url, pulsar.http_url)

    def _start_kafka(self) -> str:
        java = command()
        progress("  Kafka starts")
        return self.stack.enter_context(Kafka(java, self._folder("kafka"))).url

    def _folder(self, name: str) -> Path:
        made = tempfile.mkdtemp(prefix=f"{name}-peer-")
        self.stack.callback(shutil.rmtree, made, ignore_errors=True)
        return Path(made)


@cache
def pulsar_command() -> list[str]:
    """Missing: Java or Maven is absent, or Maven cannot bring it."""
    from tests.interop.pulsar_process import Unavailable, build

    for each in ("java", "mvn"):
        tool(each)
    try:
        return build(ROOT / ".venv" / "pulsar-broker-4.0.8")
    except Unavailable as error:
        raise Missing(f"no Pulsar: {error}; a Maven registry has to answer") from error


@contextmanager
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)
