"""One seed, from its number to its verdict."""

import contextlib
import hashlib
import logging
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from magnetar.ledger.handle import AppendListener, LedgerWriter
from magnetar.ledger.reader_core import PendingAppend
from magnetar.ledger.sender import PendingAppendWithFuture
from magnetar.runtime.sim.world import Simulation
from tests.simulation.cluster import Cluster
from tests.simulation.load.ledgers import LedgerLoad
from tests.simulation.load.topics import TopicLoad
from tests.simulation.load.transactions import TransactionLoad
from tests.simulation.options import Options, draw
from tests.simulation.strikes.frames import said_twice
from tests.simulation.strikes.late import late_deletions
from tests.simulation.verdict.observer import Observer

STEPS_MAX = 5_000_000
SECONDS_MAX = 7200.0
"""Virtual. A run that is not over by then does not make progress: a failure."""
REAL_SECONDS_MAX = 300
"""A single step that never ends (no other bound sees it) is cut off; only a hang depends on real time."""


@dataclass(slots=True)
class Outcome:
    seed: int
    kind: str
    failures: list[str]
    trace_hash: str
    seconds: float
    virtual_seconds: float
    steps: int
    figures: dict[str, int] = field(default_factory=dict)
    struck: dict[str, float] = field(default_factory=dict)  # strikes by name, and when
    tier: str = "cluster"  # that drew its options (tiers.py)


def run_seed(
    seed: int, *, show: Callable[[str], None] | None = None, details: bool = False,
    change: Callable[[Options], Options] | None = None, only: Collection[str] | None = None,
) -> Outcome:  # fmt: skip
    """Runs the seed's scenario; never raises for what the scenario does.

    `change` alters the options drawn, `only` names the strikes that may happen (shrink.py, tests). `show` gets the
    story line by line, with `details` also every message and every operation of a disk.
    """
    options = draw(seed) if change is None else change(draw(seed))
    begun = time.perf_counter()
    simulation = Simulation(seed, show=show, details=details, steps_max=STEPS_MAX, seconds_max=SECONDS_MAX)
    simulation.add_line(f"options {options.describe()}")
    observer = Observer(simulation)
    failures: list[str] = []
    figures: dict[str, int] = {}
    cluster = Cluster(simulation, options, observer, only)
    seen = contextlib.ExitStack()
    with _observed_writers(observer), said_twice(seed), seen:
        seen.enter_context(cluster.coordination.watching())  # who replaced a method last puts it back first
        if "anew" in options.times:
            seen.enter_context(late_deletions(cluster))
        if options.secured:
            seen.enter_context(cluster.rights.watching())
            seen.enter_context(cluster.owners.watching())
        try:
            with _cut_off():
                failures += simulation.run(_scenario(cluster, figures))
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
            if show is not None:
                show(traceback.format_exc())
    failures += observer.violations + cluster.rights.violations
    failures += [f"asyncio: {complaint}" for complaint in simulation.complaints]
    figures |= {"grants": cluster.rights.changes, "uses": cluster.rights.uses}
    figures |= {"adds": observer.adds_seen, "fences": observer.fences_seen, "ledgers": len(observer.closed)}
    figures |= {"within": observer.within}
    return Outcome(
        seed, options.kind, failures, simulation.trace_hash, time.perf_counter() - begun,
        simulation.virtual_seconds, simulation.trace.steps, figures, cluster.struck,
    )  # fmt: skip


def quiet() -> None:
    """What the simulated processes log is in nobody's interest; the trace is."""
    logging.disable(logging.CRITICAL)


def combine(hashes: list[str]) -> str:
    """The hash over all seeds' hashes, in their order."""
    return hashlib.blake2b("\n".join(hashes).encode(), digest_size=16).hexdigest()


async def _scenario(cluster: Cluster, figures: dict[str, int]) -> list[str]:
    await cluster.start()
    load: LedgerLoad | TopicLoad | TransactionLoad
    if cluster.options.kind == "ledgers":
        load = LedgerLoad(cluster)
    else:
        await cluster.start_brokers(cluster.options.brokers)
        load = TransactionLoad(cluster) if cluster.options.transactions else TopicLoad(cluster)
    try:
        await load.run()
    finally:
        figures |= load.figures | {"starts": sum(cluster.starts.values())}
    return load.violations


class Hung(Exception):
    """One step of the simulation did not end in REAL_SECONDS_MAX."""


@contextlib.contextmanager
def _cut_off() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: object) -> None:
        raise Hung(f"no end after {REAL_SECONDS_MAX} real seconds")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(REAL_SECONDS_MAX)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class _observed_writers:
    """Tells the observer of every confirmed append, in the moment in which its future is done, or its owner told."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._append: Any = LedgerWriter.append
        self._push: Any = LedgerWriter.append_for_listener

    def __enter__(self) -> None:
        original, observer = self._append, self._observer

        def append(writer: LedgerWriter, *frames: Any, **known: Any) -> Any:
            payload = b"".join(bytes(frame) for frame in frames)
            future = original(writer, *frames, **known)
            future.add_done_callback(lambda done: _confirmed(observer, writer.ledger_id, payload, done))
            return future

        push_on = self._push

        def push(writer: LedgerWriter, payload: PendingAppend) -> None:
            if isinstance(payload, PendingAppendWithFuture):  # `append` tells its outcome by a future
                push_on(writer, payload)
                return
            if not isinstance(writer.listener, _ObservedListener):
                assert writer.listener is not None, "whose entries are pushed is told"
                writer.listener = _ObservedListener(observer, writer.listener)
            push_on(writer, payload)
            writer.listener.payloads[writer.last_confirmed + writer.pending_entries] = b"".join(payload.frames)

        LedgerWriter.append = append  # type: ignore[method-assign]
        LedgerWriter.append_for_listener = push  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        LedgerWriter.append = self._append  # type: ignore[method-assign]
        LedgerWriter.append_for_listener = self._push  # type: ignore[method-assign]


class _ObservedListener:
    def __init__(self, observer: Observer, listener: AppendListener) -> None:
        self._observer = observer
        self._listener = listener
        self.on_append_failed = listener.on_append_failed
        self.payloads: dict[int, bytes] = {}  # of the entries that have no outcome

    def on_appended(self, writer: LedgerWriter, last_entry: int) -> None:
        for entry in [entry for entry in self.payloads if entry <= last_entry]:
            self._observer.confirmed(writer.ledger_id, entry, self.payloads.pop(entry))
        self._listener.on_appended(writer, last_entry)


def _confirmed(observer: Observer, ledger: int, payload: bytes, done: Any) -> None:
    if done.cancelled():
        observer.unheard(ledger, payload)
    elif done.exception() is None:
        observer.confirmed(ledger, done.result(), payload)
