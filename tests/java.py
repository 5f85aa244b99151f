"""`python -m tests.java`: looks for Java before the tests, installs it where we are root, and says what it found.

Never fails: without Java the tests marked `spark` are skipped with the reason, and the others run.
"""

from magnetar.cli.demo import JAVA_INSTALL_ADVICE, ensure_java


def main() -> None:
    java = ensure_java(install=True)
    if java is None:
        print(JAVA_INSTALL_ADVICE, "Until then the tests of the Spark connector are skipped.", sep="\n")
    else:
        print(f"Java {java.version} in {java.home}")


if __name__ == "__main__":
    main()
