"""`python -m tests.chromium`: looks for Chromium before the tests, installs it where we are root, says what it found.

Chromium is Debian's; what drives it is the extra `page-tests`, which is installed only where there is a Chromium.
Never fails: without either the tests marked `browser` are skipped with the reason, and the others run.
"""

import importlib
import subprocess
import sys
import tomllib

from tests.layout import ROOT
from tests.page import WHAT_TO_INSTALL, chromium, is_there
from tests.support.debian import INSTALL_TIMEOUT_S, install_as_root


def _install_driver() -> None:
    """Installs the packages of the extra alone: to install the extra would install Magnetar once more."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *extras["page-tests"]]
    try:
        subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"{' '.join(command)}: {error}")
    importlib.invalidate_caches()


def main() -> None:
    if not chromium():
        install_as_root("chromium")
    if chromium() and not is_there():
        _install_driver()
    if is_there():
        version = subprocess.run([chromium(), "--version"], capture_output=True, text=True, check=False).stdout.strip()
        print(f"{version or 'Chromium'} in {chromium()}")
    else:
        print(WHAT_TO_INSTALL, "Until then the tests of the page in a browser are skipped.", sep="\n")


if __name__ == "__main__":
    main()
