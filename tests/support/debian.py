"""Installs a package of Debian for the tests, where we are root and apt-get is there."""

import os
import shutil
import subprocess

INSTALL_TIMEOUT_S = 600.0
PATIENT = ("-o", "Acquire::Retries=3", "-o", "Acquire::http::Timeout=60")


def can_install() -> bool:
    """Returns whether we are root, and apt-get is there."""
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install_as_root(package: str) -> None:
    """Installs `package` without what it recommends: by the lists of packages that are here, or else by new ones. Says
    on standard output what failed, and raises nothing; does nothing where `can_install` is false."""
    install = ["apt-get", *PATIENT, "install", "--yes", "--no-install-recommends", package]
    if not can_install() or _failure(install) is None:
        return
    for command in (["apt-get", *PATIENT, "update"], install):
        if failure := _failure(command):
            print(failure)
            return


def _failure(command: list[str]) -> str | None:
    """Runs the command; returns what failed, None if nothing did."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        subprocess.run(command, env=environment, check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True)
    except subprocess.CalledProcessError as error:
        return f"{error}\n{error.stderr.decode(errors='replace')}"
    except (subprocess.SubprocessError, OSError) as error:
        return f"{' '.join(command)}: {error}"
    return None
