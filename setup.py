"""The optional compiled wheel: the hot paths as C, by mypyc. The pure Python of the same files stays the reference.

    MAGNETAR_COMPILE=1 pip install .      compiles the modules of HOT, and installs their Python too

It needs gcc or clang. Without the variable nothing is compiled. The same tests run on both: `make test-compiled`.
docs/performance.md has what it brings, and what differs.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

HOT = [
    "bookie/format/framing.py",
    "bookie/format/journal.py",
    "bookie/requests/adds.py",
    "bookie/store/intervals.py",
    "bookie/store/journal/arenas.py",
    "bookie/store/journal/core/group_commit.py",
    "bookie/store/journal/journal.py",
    "bookie/store/memtable.py",
    "broker/common/token_bucket.py",
    "broker/common/turns.py",
    "broker/log/appender.py",
    "broker/log/cache.py",
    "broker/log/core/log_queue.py",
    "broker/log/core/sequence_range.py",
    "broker/log/publish.py",
    "broker/session/producer.py",
    "broker/topic/core/dedup.py",
    "broker/topic/core/publish.py",
    "broker/topic/gate.py",
    "broker/topic/producer.py",
    "client/core/acks.py",
    "client/core/batcher.py",
    "client/core/consumer.py",
    "client/core/pending.py",
    "client/core/permits.py",
    "client/core/producer.py",
    "client/core/redelivery.py",
    "client/core/withheld.py",
    "client/model/message_id.py",
    "client/produce/outcomes.py",
    "client/produce/partition_producer.py",
    "ledger/core/pending.py",
    "ledger/core/stored.py",
    "ledger/core/striping.py",
    "ledger/core/writer.py",
    "ledger/format/adds.py",
    "ledger/format/peer.py",
    "ledger/handle.py",
    "ledger/memory.py",
    "ledger/sender.py",
    "proto/checksum.py",
    "proto/entry.py",
    "runtime/alarm.py",
    "runtime/monitoring/metrics.py",
    "runtime/peer/in_flight.py",
    "runtime/peer/inside.py",
    "runtime/peer/outbox.py",
]
"""What runs for each message: in a client, and in a server on the way of a publish, from the session of its producer
through the ledger to the bookie's journal. Not among them:

- what another class derives from, unless that is here too: mypyc's classes are closed;
- classes that tests replace by others (`Bookies`, `Store`, `TopicLog`): compiled code insists on its own;
- how a client receives: compiled code hands the GIL over less often, so that is better as it is;
- the topic's log, its shape, and the connection (`runtime/http2`, `runtime/grpc`, its handlers): no topic opened on a
  twin that had all of these ("interpreted classes cannot inherit from compiled").
"""
GROUP = "magnetar.proto.compiled"
"""The shared library of all has this name, and two underscores and mypyc."""


def compiled() -> list[Extension]:
    """Module names come from the folders below the current one, so the repository is seen through a link `magnetar`."""
    from mypyc.build import mypycify

    root = Path.cwd()
    place = root / "build" / "compiled"
    for stale in root.glob("build/lib.*/**/*.so"):  # of a module that is compiled no more
        stale.unlink()
    place.mkdir(parents=True, exist_ok=True)
    link = place / "magnetar"
    if not link.is_symlink():
        link.symlink_to(root, target_is_directory=True)
    (place / "mypy.ini").write_text(CHECKED)
    os.chdir(place)
    try:
        paths = [f"magnetar/{each}" for each in HOT]
        found = mypycify(
            ["--config-file", "mypy.ini", "--cache-dir", ".mypy_cache", *paths],
            opt_level="2", multi_file=True, separate=[(paths, GROUP)], target_dir=str(place / "c"),
            include_runtime_files=True,
        )  # fmt: skip
    finally:
        os.chdir(root)
    for each in found:
        if each.name == f"{GROUP}__mypyc":
            each.include_dirs.append(str(place / "c" / "magnetar" / "proto"))  # its headers
            each.extra_compile_args = [*each.extra_compile_args, *EXTRA_HEADERS]
    return found


CHECKED = """[mypy]
python_version = 3.11
explicit_package_bases = True
follow_imports = silent
ignore_missing_imports = True
"""
"""`make types` checks all of it; here only what is compiled matters, and pip's environment has no other package."""
EXTRA_HEADERS = ["-include", "CPy.h", "-include", "bytearray_extra_ops.h", "-include", "bytes_extra_ops.h"]
"""mypyc leaves them out of files that only use them through others."""


class Modules(build_py):
    """The repository's folder is the package's: this file is there, and is none of its modules. A second name
    (`magnetar.asyncio`) is a stub there, because a file asyncio.py would hide Python's from every program that runs in
    that folder; what is installed has the module too, for tools that look for a stub's source. `magnetar` itself
    never loads it (`_SecondNames`)."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        return [each for each in super().find_package_modules(package, package_dir) if each[1:2] != ("setup",)]

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for stub in Path().glob("*.pyi"):
                self.copy_file(str(stub), str(Path(self.build_lib, "magnetar", f"{stub.stem}.py")))


wanted = os.environ.get("MAGNETAR_COMPILE", "") not in ("", "0")
try:
    extensions = compiled() if wanted else []
except ImportError:
    if "egg_info" not in sys.argv:  # pip's first call, which asks what is needed
        sys.exit("MAGNETAR_COMPILE needs mypy: pip install mypy types-protobuf, or leave --no-build-isolation out")
    extensions = []
setup(
    cmdclass={"build_py": Modules}, ext_modules=extensions,
    setup_requires=["mypy>=1.19", "types-protobuf", "setuptools>=77"] if wanted else [],
)  # fmt: skip
