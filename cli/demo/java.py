"""Java 17 or newer, which only Spark needs: find it, install it where permitted, else say what to install.

The order of the search: `JAVA_HOME`, `java` on the PATH, and the usual folders of the systems. A runtime counts only if
it starts with the module that Spark's launcher always requests (jlinked ones often lack it). Only `ensure_java`
installs, with apt and as root.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import NamedTuple

VERSION_MIN = 17
SPARK_MODULE = "jdk.incubator.vector"
PACKAGES = ("openjdk-17-jre-headless", "openjdk-21-jre-headless", "default-jre-headless")
"""Tried in turn: the first is in Debian 12 and Ubuntu, the second in Debian 13, the last in later ones."""
PLACES = (
    "/usr/lib/jvm/*/bin/java",
    "/Library/Java/JavaVirtualMachines/*/Contents/Home/bin/java",
    "/opt/homebrew/opt/openjdk*/bin/java",
)

WHAT_TO_INSTALL = (
    "Spark needs Java 17 or newer, and none was found. Install it and try again:\n"
    "  Debian, Ubuntu:  sudo apt-get install openjdk-17-jre-headless\n"
    "  Fedora:          sudo dnf install java-21-openjdk-headless\n"
    "  macOS:           brew install openjdk@17\n"
    "or set JAVA_HOME to one that is there."
)


class Java(NamedTuple):
    """A runtime: its folder and its version."""

    home: str
    version: int


def find_java() -> Java | None:
    """The first runtime that Spark can use, or None."""
    seen: set[str] = set()
    for candidate in _candidates():
        real = os.path.realpath(candidate)
        if real not in seen and os.access(real, os.X_OK):
            seen.add(real)
            version = _version(real)
            if version is not None and version >= VERSION_MIN:
                return Java(str(Path(real).parent.parent), version)
    return None


def _candidates() -> Iterator[str]:
    if home := os.environ.get("JAVA_HOME"):
        yield str(Path(home, "bin", "java"))
    if found := shutil.which("java"):
        yield found
    for place in PLACES:
        yield from sorted(glob(place))


def _version(java: str) -> int | None:
    """The major version, if it starts with Spark's module."""
    command = [java, f"--add-modules={SPARK_MODULE}", "-version"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(\d+)', done.stderr)
    return int(match[1]) if match and done.returncode == 0 else None


def ensure_java(*, install: bool) -> Java | None:
    """Finds Java; with `install`, as root and with apt, installs it first. Sets `JAVA_HOME` for pyspark."""
    java = find_java()
    if java is None and install and os.geteuid() == 0 and shutil.which("apt-get"):
        _install()
        java = find_java()
    if java is not None:
        os.environ["JAVA_HOME"] = java.home
    return java


def _install() -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    print("No Java 17 found; installing it with apt …", file=sys.stderr)
    subprocess.run(["apt-get", "update", "-qq"], env=environment, stdout=sys.stderr, timeout=300, check=False)
    for package in PACKAGES:
        command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", package]
        if subprocess.run(command, env=environment, stdout=sys.stderr, timeout=600, check=False).returncode == 0:
            return


def why_no_spark() -> str | None:
    """Returns None when Spark can run; else one line that says what is missing."""
    from importlib.util import find_spec

    if find_spec("pyspark") is None or find_spec("pyarrow") is None:
        return "pyspark is not installed: pip install 'magnetar[spark]'"
    if ensure_java(install=False) is None:
        return "no Java 17 or newer: apt-get install openjdk-17-jre-headless, or set JAVA_HOME"
    return None
