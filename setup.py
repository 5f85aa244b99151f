"""The build: where a C compiler is, mypyc compiles the hot paths. The pure Python of the same files stays the
reference.

    pip install .                         compiles the modules of HOT, and installs their Python too
    MAGNETAR_COMPILE=0 pip install .      compiles nothing
    MAGNETAR_COMPILE=1 pip install .      fails where it cannot compile, instead of going on without
    MAGNETAR_COMPILE_LEVEL=0              gcc's level of optimization; 1 when not given

What is installed from the repository in place (`pip install --editable .`, `make`) runs on the sources, unless the
variable is 1. The same tests run on both: `make test-compiled`; `magnetar --version` says which it is.
docs/performance.md has what it brings, and what differs.
"""

import contextlib
import heapq
import io
import os
import shutil
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

HOT = [
    "bookie/adds.py",
    "bookie/format/journal.py",
    "bookie/service.py",
    "bookie/store/group_commit_core.py",
    "bookie/store/journal.py",
    "bookie/store/memtable.py",
    "broker/grpc/connection.py",
    "broker/grpc/translate.py",
    "broker/log/appender.py",
    "broker/log/cache.py",
    "broker/log/log_queue_core.py",
    "broker/pulsar/frames.py",
    "broker/pulsar/translate.py",
    "broker/session/consumer.py",
    "broker/session/producer.py",
    "broker/subscription/acks.py",
    "broker/subscription/consumer.py",
    "broker/subscription/core/cursor.py",
    "broker/subscription/core/cursor_state.py",
    "broker/subscription/core/dispatch.py",
    "broker/subscription/core/pending_acks.py",
    "broker/subscription/core/positions.py",
    "broker/subscription/read_ahead.py",
    "broker/topic/dedup_core.py",
    "broker/topic/producer.py",
    "client/connect/broker_stream.py",
    "client/consume/acknowledgements.py",
    "client/consume/deliveries.py",
    "client/consume/partition_consumer.py",
    "client/core/batcher.py",
    "client/core/chunking.py",
    "client/core/consumer.py",
    "client/core/producer.py",
    "client/core/redelivery.py",
    "client/model/message_id.py",
    "client/produce/partition_producer.py",
    "ledger/peer_format.py",
    "ledger/handle.py",
    "ledger/writer_core.py",
    "ledger/reader.py",
    "ledger/reader_core.py",
    "ledger/sender.py",
    "proto/checksum.py",
    "proto/entry.py",
    "runtime/alarm.py",
    "runtime/grpc/client.py",
    "runtime/grpc/messages.py",
    "runtime/grpc/server.py",
    "runtime/grpc/stream.py",
    "runtime/metrics.py",
    "runtime/peer/inside.py",
    "runtime/tcp/http2.py",
    "runtime/tcp/http2_frames.py",
    "runtime/tcp/share.py",
    "runtime/token_bucket.py",
]
"""Modules whose code runs for each message: in a client, and in a server from gRPC through the session, the topic and
the ledger to the bookie's journal, and back through the cursor and the dispatcher to the consumer. Not among them:

- what another class derives from, unless that is here too: mypyc's classes are closed. So `runtime/grpc` and
  `runtime/tcp` are all here, or none of them; the shapes of a log are not;
- classes that users derive from, or ask `help()` about, which has no text and no types then (`MessageId` is here);
- what Ctrl-C may end at any point (`ReceiverQueue`): compiled, the exception comes later, when the message is taken;
- what tests replace by others (`Bookies`, `Store`, `TopicLog` and its reader, which run once for many entries);
- the connection, producers and consumers of Pulsar's protocol: they look at an attribute again after a wait, and mypyc
  takes it for what it was before: a TypeError.

mypyc understands five things otherwise, which tests/test_compiled.py refuses in these modules: it computes the bound
of a slice twice, so that has no effects; while a coroutine waits within `except` or `finally`, the exception is that of
the whole thread (runtime/tasks.py); `__new__` calls `__init__`; the attributes of a subclass of `threading.local`
are the same in all threads; and an attribute that was looked at is taken for what it was, whatever was called since:
what is looked at again was given a name the first time, or is read in a method of its own.
"""
GROUP = "magnetar.proto.compiled"
"""The shared library of all has this name, and two underscores and mypyc."""


def compiled() -> list[Extension]:
    """Returns the extensions. Module names come from the folders below the current one, so the repository is seen
    through a link `magnetar`. Raises RuntimeError, with the compiler's output, if mypyc finds errors."""
    from mypyc.build import mypycify

    root = Path.cwd()
    place = root / "build" / "compiled"
    place.mkdir(parents=True, exist_ok=True)
    link = place / "magnetar"
    if not link.is_symlink():
        link.symlink_to(root, target_is_directory=True)
    (place / "mypy.ini").write_text(CHECKED)
    os.chdir(place)
    try:
        paths = [f"magnetar/{each}" for each in HOT]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            found = mypycify(
                ["--config-file", "mypy.ini", "--cache-dir", ".mypy_cache", *paths],
                opt_level=LEVEL, debug_level="0", multi_file=True, separate=[(paths, GROUP)],
                target_dir=str(place / "c"), include_runtime_files=True,
            )  # fmt: skip
    except SystemExit as error:  # it has printed why
        raise RuntimeError(said.getvalue()) from error
    finally:
        os.chdir(root)
    for each in found:
        if each.name == f"{GROUP}__mypyc":
            each.include_dirs.append(str(place / "c" / "magnetar" / "proto"))  # its headers
            each.extra_compile_args = [*each.extra_compile_args, "-Wno-error", HIDDEN, *EXTRA_HEADERS]
            each.sources = together(each.sources, place / "c")
    return found


def together(sources: list[str], place: Path) -> list[str]:
    """Returns UNITS files that include the sources, of about the same size each: the headers of all are 2.8 MB, and
    half a second of the compiler for each file."""
    units: list[tuple[int, int, list[str]]] = [(0, number, []) for number in range(UNITS)]
    for source in sorted(sources, key=lambda each: -os.stat(each).st_size):
        size, number, members = heapq.heappop(units)
        heapq.heappush(units, (size + os.stat(source).st_size, number, [*members, source]))
    made = []
    for _, number, members in sorted(units, reverse=True):
        unit = place / f"unit{number}.c"
        unit.write_text("".join(f'#include "{os.path.relpath(each, place)}"\n' for each in members))
        made.append(str(unit))
    return made


UNITS = 12
LEVEL = os.environ.get("MAGNETAR_COMPILE_LEVEL", "1")
"""gcc's -O1: two thirds of the time of -O2, and as fast. Medians of three rounds in turn, `produce --size 100`: -Og
1.30, -O1 1.41, -O2 1.39 million messages a second; `small-sends` 14,000, 13,800, 14,000 (two cores, gcc 12).
`make test-compiled` takes 0: its tests ask what mypyc made of the Python, not how fast it is, and of 80 s of gcc 45 are
left out."""
HIDDEN = "-fvisibility=hidden"
"""The functions of the library call each other directly, not by the table of a shared one: 1 MB less, and a fifth less
time to compile. The entry point of a module is exported by Python's own macro."""


CHECKED = """[mypy]
python_version = 3.11
explicit_package_bases = True
follow_imports = silent
ignore_missing_imports = True
disallow_subclassing_any = True

[mypy-hpack.*,mmh3.*,zmq.*,pyroaring.*,sortedcontainers.*,uvloop.*,crc32c.*,cramjam.*,prometheus_client.*]
follow_imports = skip
"""
"""`make types` checks all of it; here only what is compiled matters. pip's environment has no other package than
`setup_requires` names, so the types of others are unknown in each build: what is tested is what users install. A
compiled class that derives from an unknown one writes into memory that is not its own."""
EXTRA_HEADERS = ["-include", "CPy.h", "-include", "bytearray_extra_ops.h", "-include", "bytes_extra_ops.h"]
"""mypyc leaves them out of files that only use them through others."""


SLOWER = "the slower Python of the same modules is installed"


class Modules(build_py):
    """The repository's folder is the package's: this file is there, and is none of its modules. A second name
    (`magnetar.asyncio`) is a stub there, because a file asyncio.py would hide Python's from every program that runs in
    that folder; what is installed has the module too, for tools that look for a stub's source. `magnetar` itself
    never loads it (`_SecondNames`)."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        return [each for each in super().find_package_modules(package, package_dir) if each[1:2] != ("setup",)]

    def run(self) -> None:
        if not self.editable_mode:  # an earlier build leaves modules that have moved since, and hide what is there now
            shutil.rmtree(Path(self.build_lib, "magnetar"), ignore_errors=True)
        super().run()
        if WHY_NOT:
            say(f"not compiled: {WHY_NOT}; {SLOWER}")
        if not self.editable_mode:
            for stub in Path().glob("*.pyi"):
                self.copy_file(str(stub), str(Path(self.build_lib, "magnetar", f"{stub.stem}.py")))


class Compile(build_ext):
    """Builds with all cores. What cannot be compiled is installed as Python, unless MAGNETAR_COMPILE=1 asks for it."""

    def run(self) -> None:
        if not WANTED:
            return
        began = time.monotonic()
        say(f"compiling {len(HOT)} modules, which takes about a minute (MAGNETAR_COMPILE=0 does not)")
        try:
            self.distribution.ext_modules = compiled()
            kept = self.inplace, self.editable_mode
            self.initialize_options()
            self.inplace, self.editable_mode = kept
            self.finalize_options()
            super().run()
        except Exception as error:
            if REQUIRED:
                raise
            self.extensions = self.distribution.ext_modules = []
            for made in Path(self.build_lib).glob("**/*.so"):
                made.unlink()
            why = " ".join(str(error).split())[:300]
            say(f"not compiled: {why}; {SLOWER}")
        else:
            say(f"compiled {len(HOT)} modules in {time.monotonic() - began:.0f} s")

    def build_extensions(self) -> None:
        """Compiles sources in parallel: one extension has nearly all of them, and setuptools compiles those of one in
        turn."""
        in_turn = self.compiler.compile

        def compile_(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
                return list(chain.from_iterable(pool.map(lambda source: in_turn([source], **options), sources)))

        self.compiler.compile = compile_
        self.parallel = os.cpu_count() or 1
        super().build_extensions()


def say(line: str) -> None:
    """Prints to the terminal as well: pip shows what a build prints with `-v` only."""
    print(f"magnetar: {line}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
        print(f"magnetar: {line}", file=terminal)


def why_not() -> str:
    """Returns why nothing can be compiled here; "": it can."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler})"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else f"the headers of Python are not installed ({header})"


ASKED = os.environ.get("MAGNETAR_COMPILE", "")
REQUIRED = ASKED not in ("", "0")
IN_PLACE = bool({"editable_wheel", "develop"} & set(sys.argv))
WHY_NOT = "" if REQUIRED or ASKED == "0" or IN_PLACE else why_not()
WANTED = REQUIRED or (ASKED != "0" and not IN_PLACE and not WHY_NOT)
setup(
    cmdclass={"build_py": Modules, "build_ext": Compile},
    ext_modules=[Extension(f"{GROUP}__mypyc", [])] if WANTED else [],  # the others are known when mypy has run
    setup_requires=["mypy>=2.4,<2.5", "types-protobuf", "msgspec>=0.19"] if WANTED else [],
)
