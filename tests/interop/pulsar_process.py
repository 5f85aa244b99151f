"""A real Pulsar on this machine: the broker of Maven Central, standalone, on free loopback ports in a folder.

    command = build(folder)                 Maven brings the jars, the classes are made; Unavailable
    with Pulsar(command, folder) as pulsar:
        pulsar.url, pulsar.http_url

What is acknowledged is synced before (`journalSyncData`), as in a cluster of Pulsar; its file for standalone says no.
"""

import re
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from magnetar.cli.common.processes import add_parent_death_signal, find_free_port
from tests.interop.drivers import HERE, Unavailable, fetch, find_tool
from tests.interop.drivers import build as compile_

READY_TIMEOUT_S = 120.0
OPENED = (
    "java.base/java.lang", "java.base/java.nio", "java.base/java.util.zip", "java.base/jdk.internal.loader",
    "java.base/jdk.internal.platform", "java.base/sun.net", "java.management/sun.management",
    "jdk.management/com.sun.management.internal",
)  # fmt: skip
SETTINGS = {
    "bindAddress": "127.0.0.1", "advertisedAddress": "127.0.0.1", "allowLoopback": "true", "clusterName": "standalone",
    "managedLedgerDefaultEnsembleSize": "1", "managedLedgerDefaultWriteQuorum": "1",
    "managedLedgerDefaultAckQuorum": "1", "journalSyncData": "true", "journalMaxGroupWaitMSec": "1",
    "ledgerStorageClass": "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
    "nettyMaxFrameSizeBytes": "5253120", "numAddWorkerThreads": "0", "numReadWorkerThreads": "8",
    "diskUsageThreshold": "0.99", "diskUsageWarnThreshold": "0.98", "httpServerEnabled": "false",
    "brokerDeleteInactiveTopicsEnabled": "false", "loadBalancerEnabled": "false",
    "transactionCoordinatorEnabled": "true",
}  # fmt: skip


def build(folder: Path) -> list[str]:
    """The command without its arguments. Unavailable: Maven or Java is absent, or the registry does not answer."""
    maven, compiler, java = find_tool("mvn"), find_tool("javac"), find_tool("java")
    copied = [maven, "-q", "-B", "-f", "pulsar/pom.xml", "dependency:copy-dependencies"]
    fetch([*copied, f"-DoutputDirectory={folder / 'lib'}"])
    sources = [str(path) for path in sorted((HERE / "pulsar" / "src").rglob("*.java"))]
    jars = f"{folder / 'lib'}/*"
    compile_([compiler, "-proc:none", "-cp", jars, "-d", str(folder / "out"), *sources])
    opened = [word for each in OPENED for word in ("--add-opens", f"{each}=ALL-UNNAMED")]
    netty = "-Dio.netty.tryReflectionSetAccessible=true"
    return [java, "-Xmx2g", "-XX:MaxDirectMemorySize=2g", *opened, netty, "-cp", f"{folder / 'out'}:{jars}"]


class Pulsar:
    """Ends with the block, or with the test run; its log is in the folder. `more` goes before SETTINGS."""

    def __init__(
        self, command: list[str], folder: Path, *, bookies: int = 1, more: Mapping[str, str] | None = None
    ) -> None:
        broker, http, bookie, metrics = range(first := find_free_port("127.0.0.1", count=4), first + 4)
        self.url, self.http_url = f"pulsar://127.0.0.1:{broker}", f"http://127.0.0.1:{http}"
        ports = {"brokerServicePort": broker, "webServicePort": http, "prometheusStatsHttpPort": metrics}
        folder.mkdir(parents=True, exist_ok=True)
        settings = folder / "standalone.conf"
        written = {**SETTINGS, **(more or {}), **ports}
        settings.write_text("".join(f"{name}={value}\n" for name, value in written.items()))
        arguments = [
            "Standalone", "--config", str(settings), "--no-functions-worker", "--no-stream-storage",
            "--num-bookies", str(bookies), "--bookkeeper-port", str(bookie),
            "--bookkeeper-dir", str(folder / "bookkeeper"), "--metadata-dir", str(folder / "metadata"),
        ]  # fmt: skip
        self._log = folder / "pulsar.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                add_parent_death_signal([*command, *arguments]),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=folder,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self) -> None:
        ends = threading.Event()
        for _ in range(int(READY_TIMEOUT_S / 0.1)):
            text = self._log.read_text(errors="replace")
            if re.search(r"^ready$", text, re.MULTILINE):
                return
            if self._process.poll() is not None:
                break
            ends.wait(0.1)
        raise RuntimeError(f"Pulsar did not start: {text[-4000:]}")

    def __enter__(self) -> Self:
        try:
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


__all__ = ["Pulsar", "Unavailable", "build"]
