"""`python -m tests.etcd`: looks for etcd before the tests, installs it where we are root, says what it found.

Never fails: without it the tests that need an etcd are skipped with the reason, and the others run. In CI they fail
(tests/support/etcd.py `REQUIRED`).
"""

import shutil

from tests.support.debian import install_as_root
from tests.support.etcd import WHAT_TO_INSTALL


def main() -> None:
    if shutil.which("etcd") is None:
        install_as_root("etcd-server")
    found = shutil.which("etcd")
    if found is None:
        print(WHAT_TO_INSTALL, "Until then the tests of the metadata on etcd are skipped.", sep="\n")
    else:
        print(f"etcd in {found}")


if __name__ == "__main__":
    main()
