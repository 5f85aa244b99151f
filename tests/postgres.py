"""`python -m tests.postgres`: looks for PostgreSQL before the tests, installs it where we are root, says what it found.

Never fails: without it the tests that need a PostgreSQL are skipped with the reason, and the others run.
"""

from tests.support.debian import install_as_root
from tests.support.postgres import WHAT_TO_INSTALL, binaries


def main() -> None:
    if binaries() is None:
        install_as_root("postgresql")  # may make a cluster of its own: the tests make theirs, and leave that alone
    found = binaries()
    if found is None:
        print(WHAT_TO_INSTALL, "Until then the tests of the outbox with PostgreSQL are skipped.", sep="\n")
    else:
        print(f"PostgreSQL in {found}")


if __name__ == "__main__":
    main()
