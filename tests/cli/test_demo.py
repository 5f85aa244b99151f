"""The demo as it is typed: it adds up, and nothing stays behind, however it ends."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from magnetar.cli import demo
from magnetar.cli.common.exits import INTERRUPTED, NOT_AVAILABLE
from tests.support.processes import Result, heed_sigint, run_cli

pytestmark = pytest.mark.processes


def _demo(folder: Path, *arguments: str, timeout_s: float, **environment: str) -> Result:
    return run_cli("demo", *arguments, timeout_s=timeout_s, TMPDIR=str(folder), COLUMNS="160", **environment)


def _adds_up(done: Result) -> None:
    text = " ".join(done.out.split())
    assert "equal to pandas: 35 rows, 336,776 flights, 6,409,374 minutes of delay" in text, done.out + done.err
    assert "the topic holds 336,776 messages" in text
    assert "killed (-9)" in text


def test_without_spark_the_demo_says_so_and_ends_with_code_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does then is what the quick one does, and what is interrupted below."""
    monkeypatch.setattr(demo, "_real_flights", lambda steps: None)
    monkeypatch.setattr(demo, "_run", lambda steps, missing, data: missing == "--no-spark was given")
    done = CliRunner().invoke(demo.demo, ["--no-spark"], standalone_mode=False)
    assert done.return_value == NOT_AVAILABLE
    assert "The Spark step was left out" in done.output


def test_the_quick_demo_adds_up_without_java_and_pandas_and_leaves_nothing(tmp_path: Path) -> None:
    done = _demo(tmp_path, "--quick", timeout_s=120, JAVA_HOME="/nowhere")
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    assert "equal to what was sent: 21 rows, 40,000 flights" in text
    assert "the topic holds 40,000 messages" in text
    assert "killed (-9)" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.spark
def test_with_spark_the_demo_adds_up_and_leaves_nothing(tmp_path: Path) -> None:
    done = _demo(tmp_path, timeout_s=400)
    _adds_up(done)
    assert done.code == 0
    assert "Spark aggregated 336,776 rows" in done.out
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_demo_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "magnetar.cli.main", "demo", "--no-spark"]
    environment = {"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"}
    heed_sigint()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as ran:
        try:
            assert ran.stdout is not None
            while "killed (-9)" not in (line := ran.stdout.readline()):
                assert line, "the demo ended before a bookie was killed"
            children = Path(f"/proc/{ran.pid}/task/{ran.pid}/children")
            started = children.read_text().split() if children.exists() else []
            ran.send_signal(signal.SIGINT)
            _, errors = ran.communicate(timeout=60)
        finally:
            ran.kill()
    assert ran.returncode == INTERRUPTED, errors
    assert list(tmp_path.iterdir()) == []
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
