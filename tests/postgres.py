"""`python -m tests.postgres`: looks for PostgreSQL before the tests, installs it where we are root, says what it found.

Never fails: without it the tests that need a PostgreSQL are skipped with the reason, and the others run.
"""

import os
import shutil
import subprocess

from tests.support.postgres import WHAT_TO_INSTALL, binaries

INSTALL_TIMEOUT_S = 600.0


def _install() -> None:
    """The package may make a cluster of the system's own; the tests make theirs and leave that one alone."""
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "--yes", "--no-install-recommends", "postgresql"]
    for command in (["apt-get", "update"], install):
        try:
            subprocess.run(command, env=environment, check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"{' '.join(command)}: {error}")
            return


def main() -> None:
    if binaries() is None:
        _install()
    found = binaries()
    if found is None:
        print(WHAT_TO_INSTALL, "Until then the tests of the outbox with PostgreSQL are skipped.", sep="\n")
    else:
        print(f"PostgreSQL in {found}")


if __name__ == "__main__":
    main()
