"""A real ZooKeeper server on loopback, for tests: jars that pyspark brings with it, on the Java that Spark needs.

    with ZookeeperServer(tmp_path / "zookeeper") as server:      # started, and answers, when this returns
        store = await connect_metadata(world, server.url)
        server.kill(); server.start()                            # kill -9, and back on the same port and data
        server.pause(); server.resume()                          # SIGSTOP, SIGCONT

It dies with the thread that started it, so start it from the main one. Nothing is downloaded: the version is the one of
pyspark, which pyproject.toml asks for.
"""

import importlib.util
import os
import signal
import socket
import ssl
import subprocess
import time
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

from magnetar.cli.common.processes import add_parent_death_signal, find_free_port
from magnetar.cli.demo import find_java
from magnetar.runtime.access import TlsFiles

JARS = ("zookeeper-[0-9]*", "zookeeper-jute-*", "slf4j-api-*", "metrics-core-*", "commons-io-*", "snappy-java-*")
JUTE_MAXBUFFER = 16 << 20
"""Above COMMIT_BYTES_MAX, so that whatever the store allows can be sent; ZooKeeper's own default is 1 MiB - 1."""
READY_TIMEOUT_S = 30.0
TICK_MS = 100
"""A session lasts at least two ticks; ends of sessions are rounded up to one."""


@cache
def why_no_zookeeper() -> str | None:
    """None when a server can be started here; else one line that says what is missing."""
    if importlib.util.find_spec("kazoo") is None:
        return "kazoo is not installed: pip install 'magnetar[zookeeper]'"
    if importlib.util.find_spec("pyspark") is None:
        return "no ZooKeeper: its jars come with pyspark, which is not installed: pip install 'magnetar[spark]'"
    if find_java() is None:
        return "no Java 17 or newer for ZooKeeper: apt-get install openjdk-17-jre-headless, or set JAVA_HOME"
    if missing := [name for name in JARS if not list(_jars().glob(f"{name}.jar"))]:
        return f"no ZooKeeper: pyspark has no jar {missing[0]}"
    return None


def _jars() -> Path:
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "jars"


class ZookeeperServer:
    """Starts at once; `start` again after `kill` or `stop` takes the same port and the same data."""

    def __init__(self, directory: Path, tls: TlsFiles | None = None) -> None:
        """`tls`: it takes TLS only, and no client certificates."""
        self.directory = directory
        self.port = find_free_port("127.0.0.1")
        self._tls = tls
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def hosts(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """For --metadata; each path below it is a tree of its own."""
        return f"zk://{self.hosts}/magnetar?jute_maxbuffer={JUTE_MAXBUFFER}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> None:
        """Answers when this returns, unless it shall not `wait` (a program is started in a moment, Java is not)."""
        assert not self.is_running, "ZooKeeper runs already"
        self.directory.mkdir(parents=True, exist_ok=True)
        port = "clientPort" if self._tls is None else "secureClientPort"
        (self.directory / "zoo.cfg").write_text(
            f"dataDir={self.directory}/data\n{port}={self.port}\n{port}Address=127.0.0.1\n{self._tls_settings()}"
            f"tickTime={TICK_MS}\nmaxSessionTimeout=600000\nmaxClientCnxns=0\nadmin.enableServer=false\n"
        )
        java = find_java()
        assert java is not None, why_no_zookeeper()
        names = JARS if self._tls is None else (*JARS, "netty-*")
        jars = ":".join(str(jar) for name in names for jar in sorted(_jars().glob(f"{name}.jar")))
        command = [
            os.path.join(java.home, "bin", "java"), "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m",
            f"-Djute.maxbuffer={JUTE_MAXBUFFER}", "-Dzookeeper.forceSync=no", "-cp", jars,  # kill -9 needs none
            "org.apache.zookeeper.server.ZooKeeperServerMain", str(self.directory / "zoo.cfg"),
        ]  # fmt: skip
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                add_parent_death_signal(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        if wait:
            self.wait_ready()

    def _tls_settings(self) -> str:
        if self._tls is None:
            return ""
        both = self.directory / "server.pem"
        both.write_bytes(Path(self._tls.key).read_bytes() + Path(self._tls.certificate).read_bytes())
        return (
            "serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\nssl.clientAuth=none\n"
            f"ssl.keyStore.location={both}\nssl.keyStore.type=PEM\n"
            f"ssl.trustStore.location={self._tls.ca}\nssl.trustStore.type=PEM\n"
        )

    def wait_ready(self) -> None:
        end = time.monotonic() + READY_TIMEOUT_S
        while not self._answers():
            said = (self.directory / "log").read_text(errors="replace")
            assert self.is_running, f"ZooKeeper ended:\n{said}"
            assert time.monotonic() < end, f"ZooKeeper does not answer:\n{said}"
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5.0) as plain:
                connection = plain
                if self._tls is not None:
                    context = ssl.create_default_context(cafile=self._tls.ca)
                    connection = context.wrap_socket(plain, server_hostname="127.0.0.1")
                connection.sendall(b"srvr")
                return b"Mode: " in connection.makefile("rb").read()
        except OSError:
            return False

    def pause(self) -> None:
        """Returns when each of its threads stands still: until then one may still answer."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """In order."""
        assert self._process is not None
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()
