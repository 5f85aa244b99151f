"""The optional compiled wheel: the hot paths as C, by mypyc. The pure Python of the same files stays the reference.

    MAGNETAR_COMPILE=1 pip install .      compiles the modules of HOT, and installs their Python too

It needs gcc or clang. Without the variable nothing is compiled. The same tests run on both: `make test-compiled`.
docs/performance.md has what it brings, and what differs.
"""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

HOT = [
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
    "proto/entry.py",
]
"""Per message work of a client, which is what limits it. A class from which programs derive is not among them: mypyc's
classes are closed. Compiled code hands the GIL over less often, so receiving is better as it is."""
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

wanted = os.environ.get("MAGNETAR_COMPILE", "") not in ("", "0")
try:
    extensions = compiled() if wanted else []
except ImportError:
    if "egg_info" not in sys.argv:  # pip's first call, which asks what is needed
        sys.exit("MAGNETAR_COMPILE needs mypy: pip install mypy types-protobuf, or leave --no-build-isolation out")
    extensions = []
setup(ext_modules=extensions, setup_requires=["mypy>=1.19", "types-protobuf", "setuptools>=77"] if wanted else [])
