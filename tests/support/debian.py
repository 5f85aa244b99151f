"""Installs a package of Debian for the tests, where we are root and apt-get is there."""

import os
import shutil
import subprocess

INSTALL_TIMEOUT_S = 600.0


def install_as_root(package: str) -> None:
    """Installs `package` without what it recommends. Says on standard output what failed, and raises nothing; does
    nothing where we are not root or there is no apt-get."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--yes", "--no-install-recommends", package]
    for command in (["apt-get", "update"], install):
        try:
            subprocess.run(command, env=environment, check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{' '.join(command)}: {error}")
            return
