"""A real process: how it ends, and with which code."""

import signal
import subprocess
import sys

import pytest

from magnetar.runtime.process import make_system_world

PROGRAM = """
import asyncio, sys
from magnetar.proto.errors import InvalidConfiguration, Unavailable
from magnetar.runtime.process import freeze_objects, run_process

async def serve():
    try:
        print("ready", flush=True)
        await asyncio.Event().wait()
    finally:
        freeze_objects()
        await asyncio.sleep(0)
        print("stopped", flush=True)

async def value():
    return 5

async def nothing():
    return None

async def misconfigured():
    raise InvalidConfiguration("flush_bytes must be positive")

async def unavailable():
    raise Unavailable("no metadata at 127.0.0.1:1")

sys.exit(run_process(globals()[sys.argv[1]]))
"""

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_stops_the_process_in_order(number: int, code: int) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, "serve"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        rest, _ = process.communicate(timeout=30)
    assert (rest, process.returncode) == ("stopped\n", code)


@pytest.mark.parametrize(
    ("main", "code", "text"),
    [
        ("value", 5, ""),
        ("nothing", 0, ""),
        ("misconfigured", 2, "magnetar: flush_bytes must be positive\n"),
        ("unavailable", 1, "magnetar: no metadata at 127.0.0.1:1\n"),
    ],
)
def test_the_outcome_is_the_exit_code(main: str, code: int, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, main], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stderr) == (code, text)


def test_a_world_costs_no_import_of_a_transport() -> None:
    program = (
        "import sys; from magnetar.runtime.process import make_system_world; make_system_world()\n"
        "print(*(name for name in ('grpc', 'zmq', 'prometheus_client', 'msgspec', 'uvloop') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert done.stdout == "\n"


def test_a_seed_fixes_chance() -> None:
    assert make_system_world(5).rng.randbytes(16) == make_system_world(5).rng.randbytes(16)
    assert make_system_world().rng.randbytes(16) != make_system_world().rng.randbytes(16)
