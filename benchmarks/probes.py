"""What a process allocates, and which bytes it copies, counted by the kernel: probes at the functions that do it.

    probes = Probes()                       places them; `why_not` says why there are none
    with probes.counting(pid) as counted:
        …                                   the load
    counted.copied_bytes                    of the block
    probes.close()                          removes them

A probe (uprobe) at a function of a library counts its calls in every process; `perf` counts those of one process. A
call costs the process about a microsecond then: count in a stretch of its own, never where time is taken.

| counted | where |
|---|---|
| `objects` | the interpreter's allocator of objects: PyObject_Malloc, PyObject_Calloc, PyObject_Realloc |
| `blocks` | the C library's malloc: what is longer than 512 bytes, and what libraries take |
| `copies`, `copied_bytes` | the C library's memmove and memcpy, of COPY_BYTES_MIN or more |

What the kernel copies, from and to sockets and files, is not among them. Needs Linux, root and `perf`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

COPY_BYTES_MIN = 128
"""Shorter copies are part of everything; these are of payloads and of what is written around them."""
_EVENTS = Path("/sys/kernel/tracing/uprobe_events")
_THIRD_ARGUMENT = {"x86_64": "%dx", "aarch64": "%x2"}
_FUNCTIONS = {
    "object": ("PyObject_Malloc", "PyObject_Calloc", "PyObject_Realloc"), "block": ("malloc",),
    "copy": ("memmove", "memcpy"),
}  # fmt: skip
_ATTACH_S = 10.0


@dataclass
class Counted:
    """Of one block: calls, and bytes."""

    objects: int = 0
    blocks: int = 0
    copies: int = 0
    copied_bytes: int = 0


class Probes:
    """Probes of this interpreter's libraries: count processes that were started with the same one."""

    def __init__(self) -> None:
        self.why_not = ""
        self._group = f"magnetar{os.getpid()}"
        self._placed: list[str] = []
        register = _THIRD_ARGUMENT.get(platform.machine())
        if register is None:
            self.why_not = f"no probes on {platform.machine()}"
        elif shutil.which("perf") is None:
            self.why_not = "perf is not installed"
        else:
            try:
                self._place(register)
            except OSError as error:
                self.why_not = f"probes cannot be placed: {error}"
                self.close()

    def _place(self, register: str) -> None:
        for kind, functions in _FUNCTIONS.items():
            what = f"size={register}:u64" if kind == "copy" else ""
            for number, place in enumerate(sorted({_place_of(function) for function in functions})):
                name = f"{self._group}/{kind}{number}"
                _tell(f"p:{name} {place} {what}")
                self._placed.append(name)

    @contextmanager
    def counting(self, pid: int) -> Iterator[Counted]:
        """Zeros when there are no probes."""
        counted = Counted()
        if self.why_not:
            yield counted
            return
        with tempfile.TemporaryDirectory(prefix="magnetar-probes-") as folder:
            stat = _Perf(["stat", "-x", ",", *self._events(), "-p", str(pid)], f"{folder}/stat")
            sizes = f"size >= {COPY_BYTES_MIN}"
            copies = [part for event in self._of("copy") for part in ("-e", event, "--filter", sizes)]
            record = _Perf(["record", "-q", "-o", f"{folder}/copies", *copies, "-p", str(pid)], f"{folder}/record")
            with record, stat:
                yield counted
            for calls, kind in re.findall(r"^(\d+),.*?:(object|block)\d,", stat.said, re.M):
                setattr(counted, f"{kind}s", getattr(counted, f"{kind}s") + int(calls))
            script = ["perf", "script", "-i", f"{folder}/copies", "-F", "trace"]
            told = subprocess.run(script, capture_output=True, text=True, check=True).stdout
            found = [int(size) for size in re.findall(r"size=(\d+)", told)]
            counted.copies, counted.copied_bytes = len(found), sum(found)

    def _of(self, kind: str) -> list[str]:
        return [name.replace("/", ":") for name in self._placed if name.startswith(f"{self._group}/{kind}")]

    def _events(self) -> list[str]:
        return [part for kind in ("object", "block") for event in self._of(kind) for part in ("-e", event)]

    def close(self) -> None:
        for name in self._placed:
            _tell(f"-:{name}")
        self._placed.clear()


class _Perf:
    """A `perf` that counts from `__enter__` to `__exit__` alone."""

    def __init__(self, arguments: list[str], path: str) -> None:
        self.said = ""
        self._control, self._answers = f"{path}.control", f"{path}.answers"
        os.mkfifo(self._control)
        os.mkfifo(self._answers)
        verb, *rest = arguments
        command = ["perf", verb, "-D", "-1", "--control", f"fifo:{self._control},{self._answers}", *rest]
        self._perf = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def __enter__(self) -> None:
        self._asked("enable")

    def __exit__(self, *exc: object) -> None:
        try:
            self._asked("disable")
        finally:
            self._perf.send_signal(2)
            self.said = self._perf.communicate(timeout=60)[1]

    def _asked(self, what: str) -> None:
        control, answers = os.open(self._control, os.O_RDWR), os.open(self._answers, os.O_RDWR | os.O_NONBLOCK)
        try:
            os.write(control, what.encode() + b"\n")
            deadline = time.monotonic() + _ATTACH_S
            while self._perf.poll() is None and time.monotonic() < deadline:
                try:
                    if b"ack" in os.read(answers, 100):
                        return
                except BlockingIOError:
                    time.sleep(0.01)
            self._perf.kill()
            raise OSError(f"perf does not {what}: {self._perf.communicate()[1].strip()}")
        finally:
            os.close(control)
            os.close(answers)


def _tell(definition: str) -> None:
    """Adds a line to the file of probes; Python's own files seek, and this one cannot."""
    events = os.open(_EVENTS, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(events, definition.encode() + b"\n")
    finally:
        os.close(events)


def _place_of(function: str) -> str:
    """FILE:OFFSET of the code that runs when this interpreter calls the C function."""
    address = ctypes.cast(getattr(ctypes.CDLL(None), function), ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, offset, _, _, *path = line.split()
        begin, end = (int(each, 16) for each in span.split("-"))
        if begin <= address < end and path:
            return f"{path[0]}:0x{address - begin + int(offset, 16):x}"
    raise OSError(f"{function} is in no file")
