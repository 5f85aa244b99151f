"""A real PostgreSQL server for tests: its own, on loopback, in a temporary folder, ended with the block.

    with Postgres() as server:
        url = server.database("orders")           # a new database

PostgreSQL refuses to run as root: there the server's user is `postgres`, or else `nobody`.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

WHAT_TO_INSTALL = "PostgreSQL is missing: apt-get install postgresql (`python -m tests.postgres` does it as root)"
START_TIMEOUT_S = 60.0


def binaries() -> Path | None:
    """The folder with `initdb` and `postgres`; the newest that is installed."""
    found = sorted(
        (each.parent for each in Path("/usr/lib/postgresql").glob("*/bin/postgres")), key=lambda p: int(p.parent.name)
    )
    if found:
        return found[-1]
    postgres = shutil.which("postgres")
    return Path(postgres).resolve().parent if postgres and shutil.which("initdb") else None


def why_no_postgres() -> str | None:
    return WHAT_TO_INSTALL if binaries() is None else None


def _user() -> dict[str, Any]:
    """For subprocess: who the server runs as."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    raise RuntimeError("PostgreSQL refuses to run as root, and there is no user postgres or nobody")


class Postgres:
    def __init__(self) -> None:
        found = binaries()
        assert found is not None, WHAT_TO_INSTALL
        self._binaries = found
        self.folder = Path(tempfile.mkdtemp(prefix="magnetar-postgres-"))
        self._as = _user()
        if self._as:
            os.chown(self.folder, self._as["user"], self._as["group"])
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._initialize()
        self.start()

    def _initialize(self) -> None:
        done = subprocess.run(
            [str(self._binaries / "initdb"), "-D", str(self.folder / "data"), "-U", "magnetar", "-A", "trust", "-N",
             "--encoding=UTF8", "--locale=C"],
            cwd=self.folder, capture_output=True, text=True, check=False, timeout=START_TIMEOUT_S, **self._as,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def start(self) -> None:
        """Also again, after `kill`."""
        log = (self.folder / "log").open("ab")
        self._process = subprocess.Popen(
            [str(self._binaries / "postgres"), "-D", str(self.folder / "data"), "-k", str(self.folder), "-p",
             str(self.port), "-c", "listen_addresses=127.0.0.1", "-c", "max_connections=50"],
            cwd=self.folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL, **self._as,
        )  # fmt: skip
        log.close()
        deadline = time.monotonic() + START_TIMEOUT_S
        ready = [str(self._binaries / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port), "-t", "1"]
        while subprocess.run(ready, check=False).returncode != 0:
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline, (self.folder / "log").read_text()

    def database(self, name: str) -> str:
        """Makes it; its URL for SQLAlchemy."""
        from sqlalchemy import create_engine, text

        admin = create_engine(self.url("postgres"), isolation_level="AUTOCOMMIT")
        with admin.connect() as connection:
            connection.execute(text(f'CREATE DATABASE "{name}"'))
        admin.dispose()
        return self.url(name)

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://magnetar@127.0.0.1:{self.port}/{database}"

    def kill(self) -> None:
        """An immediate shutdown, as after a crash: no checkpoint, the log is replayed at the next start."""
        self._end(signal.SIGQUIT)

    def _end(self, how: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(how)
            try:
                self._process.wait(START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def close(self) -> None:
        self._end(signal.SIGINT)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
