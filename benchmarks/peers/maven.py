"""Maven brings the jars of a peer once, into a folder of the virtual environment."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ..harness import ROOT, progress

HERE = Path(__file__).parent
TIMEOUT_S = 900.0


class Missing(Exception):
    """A peer cannot run here; the text says why, and what to install."""


def tool(name: str) -> str:
    """The path of `java` or `mvn`; Missing."""
    found = shutil.which(name)
    if found is None:
        wanted = "Java 17 or later" if name == "java" else "Maven"
        raise Missing(f"{name} is missing: install {wanted} (on Debian: openjdk-17-jdk-headless, maven)")
    return found


def jars(name: str, pom: Path, *options: str) -> Path:
    """The folder with the jars of a pom and of what it needs; Missing when Maven cannot bring them."""
    folder = ROOT / ".venv" / name
    tool("java")
    if not (folder / ".complete").exists():
        progress(f"Maven brings {name}")
        brought = [tool("mvn"), "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", *options]
        brought += ["-DincludeScope=runtime", f"-DoutputDirectory={folder}"]
        done = subprocess.run(brought, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode != 0:
            reason = next((line for line in done.stdout.splitlines() if "ERROR" in line), done.stderr[-300:])
            raise Missing(f"Maven did not bring {name}: {reason.strip()[:300]}; a Maven registry has to answer")
        (folder / ".complete").touch()
    return folder
