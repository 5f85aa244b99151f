"""Real `magnetar …` processes for tests: what starts them (cli/common/processes.py), and runners for single commands.

    def test_something(started: Processes) -> None:          # the fixture of tests/conftest.py ends all of them
        server = started.start("standalone", "standalone", "--port", "0", "--data", "data")
        done = run_cli("topics", "list", "--url", server.wait_ready())

Processes listen on loopback, die with the test run (also when that is killed), and work in the test's own folder.
"""

import os
import signal
import subprocess
import sys
import unittest.mock
from typing import NamedTuple

from click.testing import CliRunner

from magnetar.cli.common.exits import run_command_line
from magnetar.cli.common.processes import Cluster, Process, Processes
from magnetar.cli.main import root

__all__ = ["Cluster", "Process", "Processes", "Result", "heed_sigint", "run_cli", "run_here"]

CLI_TIMEOUT_S = 60.0


class Result(NamedTuple):
    code: int
    out: str
    err: str


def heed_sigint() -> None:
    """Before a process that shall be interrupted: a run in the background of a shell ignores SIGINT, and hands it down.

    Here and not in the child: code of ours between fork and exec may crash there because of gRPC's threads.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_cli(*arguments: str, stdin: str | None = None, timeout_s: float = CLI_TIMEOUT_S, **environment: str) -> Result:
    """Runs one `magnetar` command to its end."""
    done = subprocess.run(
        [sys.executable, "-m", "magnetar.cli.main", *arguments],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **environment},
    )
    return Result(done.returncode, done.stdout, done.stderr)


def run_here(*arguments: str, stdin: str | None = None, **environment: str) -> Result:
    """The same in this process, without the second that an interpreter takes to begin: for tests with many commands."""
    with CliRunner(env=environment).isolation(input=stdin) as (out, err, _):
        with unittest.mock.patch.object(sys, "argv", ["magnetar", *arguments]):
            try:
                code = run_command_line(root)
            except SystemExit as ended:
                code = int(ended.code or 0)
        sys.stdout.flush()
        sys.stderr.flush()
        return Result(code, out.getvalue().decode(), err.getvalue().decode())
