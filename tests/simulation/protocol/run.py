"""One seed of the fast tier, from its number to its verdict.

A run has two parts: `faulty_s` with load and faults; then everything is healed, clients that still live finish, and
within `HEALING_S` virtual seconds every ledger must be closed and readable to its end (invariant 13, liveness). Beyond
promise nobody waits for that.
"""

from __future__ import annotations

import hashlib
import random
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from magnetar.bookie.maintenance import repair_core as copies
from magnetar.metadata.records import CLOSED, LedgerRecord

from .bookie import Bookie, Rules
from .faults import Faults
from .judge import Judge, Violation
from .nemesis import Nemesis
from .network import Client, Network, Node
from .options import Options, draw
from .reading import Reader
from .recovering import Recoverer
from .register import Register
from .repairing import Repairer
from .scheduler import Scheduler
from .writing import WriterClient

HEALING_S = 60.0
BEYOND_S = 3.0
"""Beyond promise recoveries may try for ever; a few tries say whether what they find is true."""
STEPS_MAX = 200_000
RETRY_S = 0.2
DELETE_AFTER_S = 0.05


@dataclass(slots=True)
class Verdict:
    seed: int
    failures: list[str]
    trace_hash: str
    seconds: float
    virtual_seconds: float
    steps: int
    figures: dict[str, int] = field(default_factory=dict)
    struck: dict[int, tuple[float, str, str]] = field(default_factory=dict)


def run_protocol(
    seed: int, *, options: Options | None = None, only: Collection[int] | None = None, rules: Rules | None = None,
    show: Callable[[str], None] | None = None,
) -> Verdict:  # fmt: skip
    """Never raises for what the scenario does. `only`: the numbers of the disturbances that may happen."""
    options = options or draw(seed)
    begun = time.perf_counter()
    simulation = Simulation(options, only, rules or Rules(), show)
    failures: list[str] = []
    _current[:] = [simulation]
    try:
        simulation.run()
    except Violation as violation:
        failures.append(str(violation))
    except AssertionError as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        failures.append(f"assert: {error or where.line} ({where.name})")
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        failures.append(f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})")
    if failures and show is not None:
        show(f"{simulation.scheduler.now:10.6f}  VIOLATED {failures[0]}")
    return Verdict(
        seed, failures, simulation.hash(), time.perf_counter() - begun, simulation.scheduler.now,
        simulation.scheduler.steps, simulation.figures(), simulation.faults.struck,
    )  # fmt: skip


_current: list[Simulation] = []


def current() -> Simulation:
    """The one that runs now: for plants that reach around their core (tests/mutants)."""
    return _current[-1]


class Simulation:
    def __init__(
        self, options: Options, only: Collection[int] | None, rules: Rules, show: Callable[[str], None] | None
    ) -> None:
        self.options = options
        self.rules = rules
        self.scheduler = Scheduler()
        self.rng = random.Random(f"load {options.seed}")
        self.faults = Faults(options.seed, options.rates, only)
        self.tracing = show is not None
        self._show = show
        self._told: list[tuple[float, str]] = []
        self.healed = False
        self.bookies: dict[str, Bookie] = {}  # also those that are gone
        self.judge = Judge(self)
        self.register = Register(self)
        self.nodes = [Node(address, self.new_bookie(f"b{address}")) for address in range(options.bookies)]
        self.network = Network(self, self.nodes)
        self.writers = [WriterClient(self, f"w{number}") for number in range(options.writers)]
        self.recoverers: list[Client] = []
        self.readers: list[Client] = []
        self.recovered = 0
        self._unread: dict[int, None] = {}

    def new_bookie(self, name: str) -> Bookie:
        rng = random.Random(f"{self.options.seed} {name}")
        bookie = Bookie(name, self.scheduler, rng, self._sync_s(rng), self.rules)
        bookie.on_store = self.judge.copied
        bookie.on_promise = self._broken
        self.bookies[name] = bookie
        return bookie

    def _sync_s(self, rng: random.Random) -> Callable[[], float]:
        seconds = self.options.sync_s
        return (lambda: seconds * (0.5 + rng.random())) if self.options.jitter else (lambda: seconds)

    def _broken(self, text: str) -> None:
        raise Violation(text)

    def around(self, seconds: float) -> float:
        return seconds * (0.5 + self.rng.random()) if self.options.jitter else seconds

    def asking(self) -> list[Client]:
        return [*(writer.client for writer in self.writers), *self.recoverers, *self.readers]

    # ------------------------------------------------------------------------------ the two parts
    def run(self) -> None:
        options, scheduler = self.options, self.scheduler
        for writer in self.writers:
            scheduler.after(0.0, writer.begin)
        rng = random.Random(f"clients {options.seed}")
        for _ in range(options.recoverers):
            scheduler.at(rng.random() * options.faulty_s, self.recover_some, rng)
        for _ in range(options.readers):
            scheduler.at(rng.random() * options.faulty_s, self.read_some, rng)
        Nemesis(self)
        scheduler.run(options.faulty_s, STEPS_MAX)
        self._heal()
        healing_s = BEYOND_S if options.beyond else HEALING_S
        scheduler.run(options.faulty_s + healing_s, STEPS_MAX, self._finished)
        self.judge.at_rest()
        if not options.beyond:
            self._judge_liveness()

    def _heal(self) -> None:
        self.healed = True
        self.story("everything is healed")
        self.faults.calm = True
        self.network.heal()
        self.register.down = False
        for node in self.nodes:
            bookie = node.bookie
            bookie.read_only = False
            bookie.stalled_until = 0.0
            bookie.slowness = 1
            if not bookie.up:
                bookie.restart()
        for client in self.asking():
            client.go_on()
        for ledger in list(self.register.records):
            self._finish(ledger)

    def created(self, ledger: int) -> None:
        if self.healed:  # late: the request was on its way
            self._finish(ledger)

    def _finish(self, ledger: int) -> None:
        """Closes it, tells its writer, reads it whole."""
        self._unread[ledger] = None
        client = Client(f"closer of {ledger}")

        def recovered(outcome: object) -> None:
            if isinstance(outcome, LedgerRecord):
                client.seen[ledger] = self.register.versions.get(ledger, 0)
                for writer in self.writers:
                    if writer.ledger == ledger:
                        writer.client.take(writer.finish)
                Reader(self, client, ledger, outcome, lambda whole: self._unread.pop(ledger, None))
            elif self.register.records.get(ledger) is None:
                self._unread.pop(ledger, None)
            else:
                self.scheduler.after(RETRY_S, lambda: Recoverer(self, client, ledger, recovered))

        Recoverer(self, client, ledger, recovered)

    def _finished(self) -> bool:
        return not self._unread and all(self._at_end(writer) for writer in self.writers)

    def _at_end(self, writer: WriterClient) -> bool:
        core = writer.core
        return core is None or not writer.client.alive or core.state.name == "CLOSED" or (
            core.state.name == "POISONED" and self.register.records.get(writer.ledger) is None
        )

    def _judge_liveness(self) -> None:
        for ledger, record in self.register.records.items():
            if record.state != CLOSED:
                raise Violation(f"13: ledger {ledger} is not closed {HEALING_S} s after all was healed")
            if ledger in self._unread:
                raise Violation(f"13: ledger {ledger} is not read {HEALING_S} s after all was healed")
        for writer in self.writers:
            if not self._at_end(writer):
                assert writer.core is not None
                raise Violation(f"13: {writer.client.name} does not learn its ledger's end: {writer.core.state.name}")

    # ------------------------------------------------------------------------------ more clients
    def recover_some(self, rng: random.Random) -> None:
        ledgers = list(self.register.records)
        if not ledgers or self.healed:
            return
        client = Client(f"r{len(self.recoverers)}")
        self.recoverers.append(client)
        ledger = rng.choice(ledgers[-2:])

        def done(outcome: object) -> None:
            self.recovered += isinstance(outcome, LedgerRecord)
            if outcome is None and not self.healed:
                self.scheduler.after(RETRY_S / 4, client.take, Recoverer, self, client, ledger, done)

        Recoverer(self, client, ledger, done)

    def read_some(self, rng: random.Random) -> None:
        records = list(self.register.records.values())
        if records and not self.healed:
            client = Client(f"reader{len(self.readers)}")
            self.readers.append(client)
            record = rng.choice(records[-2:])
            client.seen[record.ledger_id] = self.register.versions[record.ledger_id]
            Reader(self, client, record.ledger_id, record, lambda whole: None)

    def repair_some(self, rng: random.Random) -> None:
        """One slot of a final fragment, of a ledger in any state."""
        finals = [
            (record, final)
            for record in list(self.register.records.values())[-2:]
            for final in copies.list_final_fragments(record)
        ]
        if finals:
            record, final = rng.choice(finals)
            client = Client(f"repairer{len(self.recoverers)}")
            self.recoverers.append(client)
            Repairer(self, client, record, final, rng.randrange(record.ensemble_size))

    def delete_some(self, rng: random.Random) -> None:
        """Only what is closed is deleted (§1.11), best what a writer has not heard of; bookies find out by and by."""
        closed = [ledger for ledger, record in self.register.records.items() if record.state == CLOSED]
        written = [writer.ledger for writer in self.writers if not self._at_end(writer) and writer.ledger in closed]
        if closed:
            ledger = rng.choice(written or closed)
            self.register.delete(ledger, self.register.versions[ledger])
            for node in self.nodes:
                self.scheduler.after(rng.random() * DELETE_AFTER_S, self._delete, node, ledger)

    def _delete(self, node: Node, ledger: int) -> None:
        if node.bookie.up:
            node.bookie.delete(ledger)

    # ------------------------------------------------------------------------------ what is told
    def story(self, text: str) -> None:
        self._told.append((self.scheduler.now, text))
        if self._show is not None:
            self._show(f"{self.scheduler.now:10.6f}  {text}")

    def hash(self) -> str:
        told = repr((self._told, self.scheduler.steps, self.judge.confirmations, self.rng.random()))
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def figures(self) -> dict[str, int]:
        return {
            "confirmed": self.judge.confirmations,
            "recovered": self.recovered,
            "changes": self.judge.changes,
            "ledgers": len(self.judge.ledgers),
            "unreadable": self.judge.losses_seen,
            "struck": len(self.faults.struck),
        }
