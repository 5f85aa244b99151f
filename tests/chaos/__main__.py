"""`python -m tests.chaos --minutes N [--metadata sqlite|zookeeper|etcd] [--seed S]`: faults on real processes under
load, and a judge of what clients saw.

Four bookies, two brokers and the metadata (`magnetar metadata`, a real ZooKeeper or etcd), three copies of which two
are synced; every link goes through a proxy (processes/cluster.py). A fault befalls it every eight seconds or so, up to
three at once (tests/chaos/faults.py). When they are healed every producer and every subscription has to go on before
the next (tests/chaos/waiting.py says within what). Which faults follows from the seed; what the machine does in between
does not, so a seed repeats the faults and not the interleaving. At the end all copies have to be made again, and the
history of all clients is judged (workload/judge.py). Prints each fault, what is wrong, and a last line of JSON:

    faults, acknowledged, lost, duplicated, stuck, minutes   `failed` is 0 when nothing at all is wrong, `wrong` by kind
    by_kind, rounds        faults of each kind; rounds of one to three that overlap
    slowest_s              the longest time from a healing until everybody had gone on
    copied                 how often all lost copies were made again before the next bookie lost its data
    gave_up                starts of a process whose metadata session was lost before it was ready: started again
    repeated, delivered    copies in a log that are allowed (sent again without an outcome); messages taken

SIGTERM and Ctrl-C end a run without a verdict, and leave no process, mount or file behind.

With `--secured` every process asks who calls: TLS and tokens at the brokers, members' certificates at the metadata,
keys of live members at the bookies. Clients renew tokens of a minute, and `revoke` takes the rights of a role that has
a producer and a consumer of each topic (tests/chaos/processes/security.py).

With `--keyed` there are consumers that share keys, refuse some messages, and keep the order of a key meanwhile.

With `--filtered` there are consumers with a filter, which get what it wants and nothing else.

With `--wide` there are four brokers, five bookies of two disks each, and eight topics of four namespaces that are loud
by turns. The balance is in haste (processes/moves.py), and a bundle that it moves more often than its rule allows is
wrong. A disk is pulled out of a bookie, namespaces are split, and an operator moves bundles. The metadata is etcd
unless another is named. Its three servers have a leader that is killed, stopped, or cut off from the others. The last
line also has `moves` (of the balance), `most_moves` (of one bundle), `told_moves` (of the operator) and `splits`.

With `--processes 2` each broker is two processes that share its address, and `kill_one` kills one of them.

With `--transactions` clients move money between accounts, and messages from topic to topic, in transactions
(workload/transfers.py), and the judge is another (workload/accounts.py): no half of a transaction is ever shown, what
was told to be committed is there, and each message is processed once. In the last line then `transactions`,
`committed`, `aborted`, `untold` (their clients were told nothing) and `hidden` (messages that are stored, never shown).

`--control` is the known-bad configuration: disks that lie about syncs, and power cuts. Something has to be lost
or refuse to start, and the exit code is 0 only when that is said.
"""

import json
import logging
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

import magnetar
from magnetar.cli.common.processes import ProcessNotReady
from tests.chaos.faults import WEIGHTS, Faults
from tests.chaos.processes.cluster import ChaosCluster
from tests.chaos.processes.moves import count_most, find_restless, read_moves
from tests.chaos.workload.accounts import Verdict as OfTransfers
from tests.chaos.workload.clients import Clients
from tests.chaos.workload.judge import Verdict, Wrong
from tests.chaos.workload.libraries import others
from tests.chaos.workload.transfers import Transfers
from tests.support.etcd import why_no_etcd
from tests.support.processes import run_cli
from tests.support.zookeeper import why_no_zookeeper

TOPICS = ("orders", "payments")
WIDE_NAMESPACES = tuple(f"public/wide-{number}" for number in range(4))
WIDE_TOPICS = tuple(f"{namespace}/{topic}" for topic in TOPICS for namespace in WIDE_NAMESPACES)
WIDE_BUNDLES = 2
Load = Clients | Transfers
FAULT_EVERY_S = 8.0
BETWEEN = 10
"""Messages that each producer and subscription has after a healing: it serves again."""


@click.command()
@click.option("--minutes", type=click.FloatRange(0.01), default=1.0, show_default=True)
@click.option("--seed", type=int, default=None, help="Of what happens to whom (default: a new one).")
@click.option(
    "--metadata", type=click.Choice(["sqlite", "zookeeper", "etcd"]), default=None,
    help="Which metadata store (default: sqlite; etcd with --wide)."
)
@click.option("--wide", is_flag=True, help="A large cluster: four brokers that balance, five bookies of two disks.")
@click.option("--kinds", default="", help="Only these faults, one round after the other: kill,freeze+cut,…")
@click.option("--every", default=FAULT_EVERY_S, show_default=True, help="Seconds for each fault, or longer.")
@click.option("--processes", type=click.IntRange(1, 4), default=1, show_default=True, help="Of each broker.")
@click.option("--secured", is_flag=True, help="Everything asks who calls: TLS, tokens of a minute, grants and keys.")
@click.option(
    "--clients", default="sdk,python,java", show_default=True, metavar="NAMES",
    help="Whose producers and consumers: the SDK has half of them, or all; Pulsar's own libraries have the others."
)
@click.option("--keyed", is_flag=True, help="Consumers that share keys, and hold a key back for what they refused.")
@click.option("--filtered", is_flag=True, help="Consumers with a filter, and key indexes.")
@click.option("--transactions", is_flag=True, help="Clients run transactions: transfers, and moves of messages.")
@click.option("--control", is_flag=True, help="Disks that lie: something has to be wrong.")
@click.option(
    "--logs", type=click.Path(file_okay=False), default=None, help="Keep logs there, and a history that is wrong."
)
def main(
    minutes: float, seed: int | None, metadata: str | None, wide: bool, kinds: str, every: float, secured: bool,
    control: bool, logs: str | None, clients: str, transactions: bool, processes: int, keyed: bool,
    filtered: bool,
) -> None:  # fmt: skip
    metadata = metadata or ("etcd" if wide else "sqlite")
    if why := {"zookeeper": why_no_zookeeper, "etcd": why_no_etcd}.get(metadata, lambda: None)():
        raise click.UsageError(why)
    wanted = [each.split("+") for each in ("power_cut" if control else kinds).split(",") if each]
    if unknown := [kind for each in wanted for kind in each if kind not in WEIGHTS]:
        raise click.UsageError(f"no kind of faults: {', '.join(unknown)}; there are {', '.join(WEIGHTS)}")
    libraries = clients.split(",")
    if unknown := sorted(set(libraries) - {"sdk", "python", "java"}):
        raise click.UsageError(f"no client is called {', '.join(unknown)}; there are sdk, python, java")
    if wide and secured:
        raise click.UsageError("a wide cluster asks nobody who calls")
    if transactions and secured:
        raise click.UsageError("transactions are run in a cluster that asks nobody who calls")
    if transactions and (keyed or filtered):
        raise click.UsageError("transactions have consumers of their own")
    if transactions:
        libraries = [each for each in libraries if each != "python"]  # Pulsar's for Python has none
    if keyed or filtered:
        libraries = [each for each in libraries if each != "java"]  # its driver here sends no properties
    if secured and libraries != ["sdk"]:
        print("a secured cluster is used by the SDK alone: it renews tokens of a minute", flush=True)
        libraries = ["sdk"]
    seed = random.SystemRandom().randrange(1 << 32) if seed is None else seed
    for number in (signal.SIGTERM, signal.SIGINT):  # also Ctrl-C: a shell's background jobs ignore it by default
        signal.signal(number, _stop)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="magnetar-chaos-") as folder:
        _log_clients(Path(folder))
        try:
            how = {"store": metadata, "lies": control, "secured": secured, "processes": processes, "wide": wide}
            run = Run(Path(folder), random.Random(seed), wanted, every, how, libraries, transactions, keyed, filtered)
            result = run.run(minutes * 60)
        finally:
            if logs is not None:
                _keep(Path(folder), Path(logs))
    result |= {"minutes": round((time.monotonic() - begin) / 60, 2), "seed": seed, "metadata": metadata}
    result |= {"secured": secured, "clients": libraries}
    load = " --transactions" if transactions else " --keyed" if keyed else ""
    load += " --filtered" if filtered else ""
    load += f" --processes {processes}" if processes > 1 else ""
    load += " --wide" if wide else ""
    if result["failed"]:
        only = f" --kinds {kinds}" if kinds else ""
        only += " --secured" if secured else f" --clients {','.join(libraries)}"
        print(f"replay: python -m tests.chaos --minutes {minutes} --seed {seed} --metadata {metadata}{only}{load}")
    print(json.dumps(result))
    sys.exit(1 - result["failed"] if control else result["failed"])


def _stop(number: int, _frame: object) -> NoReturn:
    """Everything is ended on the way out; a second signal does not end that."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    sys.exit(128 + number)


def _keep(folder: Path, logs: Path) -> None:
    logs.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.stderr", "java/*.stderr", "zookeeper/log", "etcd/log*", "history.pickle"):
        for file in sorted(folder.glob(pattern)):
            shutil.copy(file, logs / file.name)


def _log_clients(folder: Path) -> None:
    """Beside what the cluster's processes log."""
    handler = logging.FileHandler(folder / "client.stderr")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("magnetar").addHandler(handler)
    logging.getLogger("magnetar").setLevel(logging.INFO)
    logging.getLogger("magnetar").propagate = False


class Run:
    """One cluster from its start to the verdict."""

    def __init__(
        self, folder: Path, rng: random.Random, kinds: list[list[str]], every: float, how: dict[str, Any],
        libraries: Sequence[str] = ("sdk",), transactions: bool = False, keyed: bool = False,
        filtered: bool = False,
    ) -> None:  # fmt: skip
        """`how`: of ChaosCluster."""
        self.libraries, self.transactions, self.keyed, self.filtered = libraries, transactions, keyed, filtered
        self.folder, self.rng, self.kinds, self.every, self.how = folder, rng, kinds, every, how
        self.rounds = 0
        self.slowest_s = 0.0
        self.begin = time.monotonic()

    def run(self, seconds: float) -> dict[str, Any]:
        with ChaosCluster(self.folder, **self.how) as cluster:
            if cluster.wide:
                cluster.make_namespaces(WIDE_NAMESPACES, WIDE_BUNDLES)
            made = others(self.libraries, cluster.pulsar_url, self.folder / "java")
            clients: Load = (
                Transfers(cluster.url, self.rng, made) if self.transactions
                else Clients(cluster.url, WIDE_TOPICS if cluster.wide else TOPICS, self.rng, cluster.security, made,
                             self.keyed, self.filtered, cluster.wide)
            )  # fmt: skip
            cluster.client_pids |= clients.pids
            faults = Faults(cluster, self.rng)
            clients.start()
            stuck = self._disturb(clients, faults, time.monotonic() + seconds)
            stuck += self._settle(clients, faults) if not stuck else []
            clients.close()
        moves = read_moves(self.folder.glob("broker-*.stderr"))
        stuck += find_restless(moves)
        verdict = clients.verdict()
        if not stuck and not verdict.counts:
            stuck += clients.proves_nothing(verdict)
        for line in [*stuck, *filter(None, str(verdict).splitlines())]:
            print(f"WRONG: {line}", flush=True)
        if stuck or verdict.counts:
            with (self.folder / "history.pickle").open("wb") as file:
                pickle.dump(clients.kept, file)
            for line in clients.failures[-20:]:
                print(line, flush=True)
        figures = clients.figures(verdict)
        if cluster.wide:
            figures |= {"moves": len(moves), "most_moves": count_most(moves), "told_moves": faults.told_moves,
                        "splits": faults.splits}  # fmt: skip
        return self._result(faults, verdict, stuck) | figures

    def _disturb(self, clients: Load, faults: Faults, until: float) -> list[str]:
        """What is stuck: then the cluster is left as it is."""

        def say(text: str) -> None:
            clients.disturbed()
            at = time.monotonic() - self.begin
            print(f"{at:6.1f} s, {faults.count + 1}: {text}; {clients.acknowledged:,} acknowledged", flush=True)

        while True:
            healed = time.monotonic()
            if stuck := clients.wait_served(BETWEEN):
                self._show(clients, faults.cluster)
                return stuck
            began = time.monotonic()
            self.slowest_s = max(self.slowest_s, began - healed)
            if began >= until and self.rounds >= len(self.kinds):
                return []
            kinds = self.kinds[self.rounds % len(self.kinds)] if self.kinds else faults.draw()
            self.rounds += 1
            try:
                wrong = faults.round(kinds, say)
            except ProcessNotReady as error:
                wrong = [f"after {', '.join(kinds)}: {error}"]
            if wrong:
                return wrong
            clients.disturbed()
            while time.monotonic() < min(began + self.every * len(kinds), until):
                time.sleep(0.25)
                clients.disturbed()  # a lost connection may be noticed late

    def _show(self, clients: Load, cluster: ChaosCluster) -> None:
        """What the cluster says of its topics, and in the logs what each broker does: for who looks for the reason."""
        for broker in cluster.brokers:
            os.kill(broker.pid, signal.SIGUSR1)
        for topic in clients.topics:
            for verb in ("stats", "stats-internal"):
                cli = run_cli if cluster.security is None else cluster.security.cli
                said = cli("topics", verb, topic, "--url", clients.url)
                print(said.out or said.err, flush=True)

    def _settle(self, clients: Load, faults: Faults) -> list[str]:
        try:
            stuck = clients.settle()
        except magnetar.PulsarException as error:
            stuck = [f"after all was healed: {error!r}"]
        return stuck + faults.wait_copies()

    def _result(self, faults: Faults, verdict: Verdict | OfTransfers, stuck: list[str]) -> dict[str, Any]:
        by_name = {wrong.value: count for wrong, count in verdict.counts.items()}
        stuck_ones = by_name.pop(Wrong.STUCK.value, 0)
        return {
            "faults": faults.count, "acknowledged": verdict.acknowledged, "lost": verdict.lost,
            "duplicated": verdict.duplicated, "stuck": len(stuck) + stuck_ones,
            "failed": int(bool(stuck or verdict.counts)),
            "wrong": {name: count for name, count in by_name.items() if name != Wrong.DUPLICATED.value},
            "by_kind": faults.by_kind, "rounds": self.rounds, "slowest_s": round(self.slowest_s, 1),
            "copied": faults.copied, "gave_up": faults.gave_up, "unsynced_writes_dropped": faults.dropped,
        }  # fmt: skip


if __name__ == "__main__":
    try:
        main()
    except SystemExit as ended:
        # Everything is closed and removed by now. A native client library that the interpreter unloads beside its own
        # threads aborts the process now and then, and the exit code with it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
