"""The file descriptors of this process: the limit is raised at the start, files have a reserve, ports share the rest.

    PROCESS_DESCRIPTORS.open_spares()                       once, when a server starts
    PROCESS_DESCRIPTORS.open_file(path, flags)              does not fail because connections use all descriptors
    if PROCESS_DESCRIPTORS.reserve_connection(): …          for a connection of a port, until `release_connection`

**Limit.** The soft limit of RLIMIT_NOFILE, often 1,024, is raised to the hard one (FILES_MAX at most).
**Reserve.** SPARE_DESCRIPTORS descriptors are open without a file. If a file cannot be opened because no descriptor is
free (EMFILE, ENFILE), a spare descriptor is closed and the file is opened again; missing spare descriptors are opened
again later. So a process can use its files even if its connections (also those of ZeroMQ, which are not counted here)
use all other descriptors.
**Ports.** All ports of a process together may have `connections_max` connections: the limit less RESERVED_DESCRIPTORS.
Each port has a lower limit of its own (runtime/access.py `CallerLimits`). Guarding tests:
tests/runtime/test_descriptors.py.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, TypeVar

T = TypeVar("T")

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows, where only clients run
    resource = None

FILES_MAX = 1 << 20
"""Limit of descriptors above which more are worth nothing: a connection has 80 KiB."""
SPARE_DESCRIPTORS = 64
RESERVED_DESCRIPTORS = 256
"""Descriptors for what is no connection of a port: a bookie has about 110 files open, a process 20 sockets and pipes of
its own."""
NO_DESCRIPTOR_ERRORS = frozenset((errno.EMFILE, errno.ENFILE))


class DescriptorLimits(NamedTuple):
    """The limits of this process that `FileDescriptors.open_spares` has set: `limit`, how many files may be open, and
    `connections_max`, how many connections its ports may have together."""

    limit: int
    connections_max: int


class FileDescriptors:
    """The file descriptors of one process: keeps a few spare descriptors for files, and limits the number of
    connections. Files may be opened from any thread; connections are counted in the event loop. `lent`: spare
    descriptors that files have used and that are not open again."""

    def __init__(self) -> None:
        self.connections = 0  # that ports accepted and that are open
        self.refused = 0  # … and that were refused for want of descriptors
        self.lent = 0  # spares that a file took
        self._spares: list[int] = []
        self._lock = threading.Lock()
        self._pid = 0
        self.limit = get_soft_files_limit()

    @property
    def connections_max(self) -> int:
        """Returns how many connections all ports of the process may have together: the limit of open files less a
        reserve."""
        return max(self.limit - min(RESERVED_DESCRIPTORS, self.limit // 2), 1)

    def open_spares(self) -> DescriptorLimits:
        """Raises the process's limit of open files, opens the spare descriptors, and returns the limits. In a forked
        process, first drops the state that it inherited from its parent."""
        self.limit = raise_files_limit()
        if self._pid != os.getpid():  # those of a parent are open here, too
            for each in self._spares:
                os.close(each)
            self._pid, self._spares, self.connections = os.getpid(), [], 0
        self.open_missing_spares()
        return DescriptorLimits(self.limit, self.connections_max)

    def open_missing_spares(self) -> None:
        """Opens spare descriptors again, as many as are missing and as the limit allows. Does nothing in a process that
        has not called `open_spares`. Never raises."""
        with self._lock, contextlib.suppress(OSError):
            while self._pid == os.getpid() and len(self._spares) < min(SPARE_DESCRIPTORS, self.limit // 8):
                self._spares.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def open_file(self, path: str, flags: int, mode: int = 0o600) -> int:
        """Opens a file like `os.open`, and returns its descriptor. If no file descriptor is free, closes a spare one
        first. Raises the OSError of `os.open`; for want of a descriptor only if there is no spare one either."""
        return self._opened(lambda: os.open(path, flags, mode))

    def list_directory(self, path: str) -> list[str]:
        """Lists a directory like `os.listdir`. If no file descriptor is free, closes a spare one first. Raises the
        OSError of `os.listdir`; for want of a descriptor only if there is no spare one either."""
        return self._opened(lambda: os.listdir(path))

    def _opened(self, opening: Callable[[], T]) -> T:
        while True:
            try:
                found = opening()
                break
            except OSError as error:
                if error.errno not in NO_DESCRIPTOR_ERRORS or not self._lend():
                    raise
        if self.lent:
            self._recover()
        return found

    def _lend(self) -> bool:
        """Closes a spare file, so that its descriptor can be used. Returns False if there is no spare."""
        with self._lock:
            if self._pid != os.getpid() or not self._spares:
                return False
            os.close(self._spares.pop())
            self.lent += 1
            return True

    def _recover(self) -> None:
        """Opens the lent spares again; they count as lent until all of them are open."""
        self.open_missing_spares()
        with self._lock:
            if len(self._spares) >= min(SPARE_DESCRIPTORS, self.limit // 8):
                self.lent = 0

    def reserve_connection(self) -> bool:
        """Counts a new connection. Returns False, and counts it only in `refused`, if there are as many connections as
        there may be. The caller must call `release_connection` when a counted connection ends."""
        if self.connections >= self.connections_max:
            self.refused += 1
            return False
        self.connections += 1
        return True

    def release_connection(self) -> None:
        """Counts the end of a connection for which `reserve_connection` has returned True."""
        self.connections -= 1


def get_soft_files_limit() -> int:
    """Returns the soft limit of open files of this process, at most FILES_MAX; returns FILES_MAX where the system has
    no such limit (Windows)."""
    if resource is None:
        return FILES_MAX
    return _bounded(resource.getrlimit(resource.RLIMIT_NOFILE)[0])


def raise_files_limit() -> int:
    """Raises the soft limit of open files to the hard limit, but at most to FILES_MAX. Returns the soft limit, which
    stays as it was if the system refuses. Returns FILES_MAX where the system has no such limit (Windows)."""
    if resource is None:
        return FILES_MAX
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _bounded(hard)
    if _bounded(soft) < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a limit of its own below its hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return get_soft_files_limit()


def _bounded(limit: int) -> int:
    return FILES_MAX if limit < 0 else min(limit, FILES_MAX)  # RLIM_INFINITY


PROCESS_DESCRIPTORS = FileDescriptors()
"""The descriptors of this process."""
