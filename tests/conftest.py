"""What all tests share: `spark` tests are skipped, with the reason, where Spark cannot run; processes that end.

Workers take test after test (`--dist loadgroup`), the longest first; those that share something that takes seconds to
make, a Spark session or a cluster, stay together.
"""

import functools
import gc
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest

from magnetar.cli.common.processes import Processes
from magnetar.cli.demo import why_no_spark
from magnetar.runtime.process import GC_THRESHOLDS
from tests.compiled import COMPILED

os.environ.setdefault(
    "SPARK_SUBMIT_OPTS",
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
    " -Dspark.sql.shuffle.partitions=2",
)
"""A Spark session of a test lives for seconds: so it takes half of the processor's time (19 s → 9 s). Spark's own 200
parts of a shuffle are each a Python task, with a producer where they write, also where there are two rows."""

hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")
"""A machine that is busy takes longer than Hypothesis's fifth of a second for an example, and nothing is wrong."""

gc.set_threshold(*GC_THRESHOLDS)
"""As servers have it. With Python's own the trees of all modules take 9 s to parse, and so 4.8 s."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--walks", type=int, default=1, metavar="N", help="random walks: N times as many as usual (1)")


OF_THE_TWIN = 4
"""One walk in so many is walked on the compiled twin too: the sources have all of them."""


@pytest.fixture
def walks(request: pytest.FixtureRequest) -> Callable[[int], range]:
    """`walks(usual)`: the seeds of random walks."""
    times = int(request.config.getoption("--walks"))
    return lambda usual: range(usual * times // (OF_THE_TWIN if COMPILED else 1))


COMMANDS = "tests/docs/test_commands.py::"
LONGEST = (
    f"{COMMANDS}test_the_spark_programs_of_a_document_run",
    f"{COMMANDS}test_the_commands_in_the_sentences_of_a_document_are_real[docs/performance.md]",
    "tests/spark/test_spark.py", "tests/spark/test_exactly_once.py", f"{COMMANDS}test_the_blocks_of_a_document_run",
    "tests/cli/test_demo.py", "tests/chaos/", "tests/spark/", "tests/docs/test_examples.py", COMMANDS,
    "tests/client/outbox/", "tests/pairs/", "tests/upgrade/", "tests/security/test_secured_cluster.py",
)  # fmt: skip
"""Where tests of a minute are: they begin in this order, and no worker is alone with one in the end. (xdist by itself
begins with the groups of most tests, and with the longest tests last, as most of these are alone: so
`--no-loadscope-reorder`.)"""
SPARK = "tests/spark"
SECOND_SESSION = "tests/spark/test_spark.py"
"""It has a session of its own, in another worker: what needs one took as long in one worker as all else in five."""
HOUSE = "tests/docs/", "tests/test_"
"""Tests that read all modules: neighbours, so that one worker reads them."""


@pytest.hookimpl(wrapper=True, tryfirst=True)  # begins before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    items.sort(key=lambda item: (_turn(item.nodeid), not item.nodeid.startswith(HOUSE)))
    for item in items:
        if shared := _shared(item):
            item.add_marker(pytest.mark.xdist_group(shared))
    yield
    marked = [item for item in items if item.get_closest_marker("spark")]  # none where the run leaves them out
    reason = why_no_spark() if marked else None
    for item in marked if reason else ():
        item.add_marker(pytest.mark.skip(reason=reason or ""))


def _turn(nodeid: str) -> int:
    return next((number for number, each in enumerate(LONGEST) if nodeid.startswith(each)), len(LONGEST))


def _shared(item: pytest.Item) -> str:
    """The folder or module of the tests with which it shares a fixture of ours; "": with none."""
    fixtures = getattr(item, "_fixtureinfo", None)
    if fixtures is None:
        return ""
    if "spark" in fixtures.names_closure:
        return SECOND_SESSION if item.nodeid.startswith(SECOND_SESSION) else SPARK  # a worker has one, whoever asks
    used = [each[-1] for name, each in fixtures.name2fixturedefs.items() if name in fixtures.names_closure]
    places = [each.baseid for each in used if each.scope != "function" and each.baseid.startswith("tests/")]
    places = [each for each in places if each != SPARK]  # the server beside the session begins within a second
    return min(places, key=len, default="")


@pytest.hookimpl(tryfirst=True)  # pytest-asyncio would run it on a real loop
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """An async test with positional-only parameters is the body that the runner of its mark `run_by` runs: a simulation
    gives it these; pytest gives it those after the `/`."""
    body = getattr(pyfuncitem.parent and pyfuncitem.parent.obj, pyfuncitem.originalname or "", None)
    mark = pyfuncitem.get_closest_marker("run_by")
    if mark is None or not inspect.iscoroutinefunction(body):
        return None
    parameters = inspect.signature(body).parameters
    if inspect.Parameter.POSITIONAL_ONLY not in {each.kind for each in parameters.values()}:
        return None
    given = {name: pyfuncitem.funcargs[name] for name in parameters if name in pyfuncitem.funcargs}
    run, *rest = mark.args
    run(functools.partial(body, **given) if given else body, *rest, **mark.kwargs)
    return True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Groups are kept, or a Spark session is made four times. Modules and tests stay to the end: no collection of
    garbage looks through them again."""
    if getattr(session.config.option, "loadgroup", False):
        apart = [each for each in session.items if each.get_closest_marker("xdist_group") and "@" not in each.nodeid]
        assert not apart, f"this pytest-xdist keeps no groups with pytest {pytest.__version__}"
    if not gc.get_freeze_count():  # tests of the mutant bank run pytest within a test
        gc.collect()
        gc.freeze()


FROZEN_AFTER = 200
"""Tests."""
_finished = itertools.count(1)


def pytest_runtest_logfinish() -> None:
    """Freezes what is alive: it stays so, and a test that collects garbage took eight times as long late in a run."""
    if next(_finished) % FROZEN_AFTER == 0:
        gc.collect()
        gc.freeze()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Processes]:
    """Starts processes in the test's folder and ends them, whatever happens."""
    with Processes(tmp_path) as processes:
        yield processes


@pytest.fixture(autouse=True)
def _logs_again() -> Iterator[None]:
    """A simulation keeps its processes quiet; the test after it may want to read what is logged."""
    yield
    logging.disable(logging.NOTSET)
