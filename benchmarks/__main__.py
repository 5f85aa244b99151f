"""python -m benchmarks NAME [options] --json: one benchmark, one JSON object.

Its `value` is the figure that the benchmark is named for.

Example: python -m benchmarks produce --size 1024 --bookies 3 --json
         python -m benchmarks produce --compare benchmarks/results/produce-1024.json
         python -m benchmarks all            every one of them, into benchmarks/results/, with a table and a plot
         python -m benchmarks all --only holes,shared      … these anew, the table of what is there
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from .harness import Options, Run, load, progress, report
from .tables import as_plot, as_table, compared, ratio_line


class Benchmark(NamedTuple):
    module: str
    unit: str
    what: str


BENCHMARKS = {
    "startup": Benchmark("startup", "s", "start of the server to the first message produced and consumed"),
    "idle": Benchmark("startup", "MB", "RSS of an idle standalone server"),
    "journal": Benchmark("storage.bookies", "MB/s", "the journal alone: blocks of --size bytes, each synced"),
    "ledger": Benchmark("storage.bookies", "entries/s", "one ledger on --bookies bookies, through the client library"),
    "store-add": Benchmark("storage.adds", "entries/s", "entries of --size bytes into a bookie process over a socket"),
    "store-latency": Benchmark("storage.adds", "ratio", "p99 of adds at half load: checkpoints, compaction, or not"),
    "cost": Benchmark("cost", "us", "CPU of the server a message of 1 KiB; the account of six loads in `detail`"),
    "calls": Benchmark("calls", "", "Python calls of the server for a `small-sends` message; four loads in `detail`"),
    "produce": Benchmark("messaging", "msg/s", "one producer, fsync before each ack"),
    "outbox": Benchmark("outbox", "rows/s", "rows of --size bytes from PostgreSQL into a topic, the relay of a shard"),
    "dedup": Benchmark("dedup", "ratio", "produce with deduplication / without, taking turns in one run"),
    "txn-aborts": Benchmark("txn_aborts", "s", "load of 100,000 aborted transactions in 10,000,000 entries; memory"),
    "roundtrip": Benchmark("messaging", "msg/s", "produce, consume and acknowledge at once"),
    "catchup": Benchmark("messaging", "msg/s", "one consumer reads --messages messages that were there before"),
    "catchup-disturb": Benchmark("messaging", "ratio", "p99 of sends beside a catch-up, own journal folder / alone"),
    "latency": Benchmark("messaging", "ms", "p99 of single sends at --rate per second, not batched"),
    "secure-produce": Benchmark("secure", "ratio", "produce over TLS with a token / plain, taking turns in one run"),
    "secure-cluster": Benchmark("secure", "ratio", "the same of clusters, with keys between broker and bookies too"),
    "secure-latency": Benchmark("secure", "ratio", "p99 of single sends over TLS with a token / plain"),
    "secure-startup": Benchmark("secure", "ratio", "start of the server with security / without"),
    "connect": Benchmark("secure", "/s", "connections with TLS and a token, each with a look-up"),
    "pulsar-java-produce": Benchmark("pulsar", "msg/s", "pulsar-perf (Java) produces"),
    "pulsar-java-consume": Benchmark("pulsar", "msg/s", "pulsar-perf (Java) consumes a backlog of --messages"),
    "pulsar-java-transaction": Benchmark(
        "pulsar", "/s", "pulsar-perf (Java): transactions of 1 message and 1 ack; --peer: in turns with a Pulsar"
    ),
    "pulsar-python": Benchmark("pulsar", "msg/s", "pulsar-client (Python) produces; --peer: in turns with a Pulsar"),
    "rest": Benchmark("rest", "/s", "GETs of the statistics of a topic over HTTP, by 4 connections"),
    "scrape": Benchmark("scrape", "ms", "of the loop for a page of metrics of --topics topics, in slices"),
    "status": Benchmark("status", "s", "`magnetar status` of 4 brokers and 5 bookies with --topics topics"),
    "page": Benchmark(
        "page", "ms", "the slowest view of the page with --topics topics; memory of the page in `detail`"
    ),
    "small-sends": Benchmark("small_sends", "msg/s", "50 threads of one client, a topic each, send() one by one"),
    "durability": Benchmark(
        "small_sends", "ratio", "p50 of one send after another, durability=disk / memory; each, and acks=none: `detail`"
    ),
    "tracing": Benchmark("tracing", "us", "a send and a process span of a message; without them: `detail`"),
    "metadata": Benchmark("metadata", "ratio", "commits/s on an etcd of three / on SQLite; both in `detail`"),
    "topics": Benchmark("topics", "/s", "creations of --topics topics with a producer and a subscription each"),
    "holes": Benchmark("storage.holes", "CPU s", "of the server for 5,000,000 alternating acks; kept over a kill"),
    "delayed": Benchmark("delayed", "MB", "broker with --messages delayed ones; restart, lateness at 10,000/s"),
    "recover": Benchmark("storage.recover", "s", "start after a kill -9 under load to the first new ack"),
    "recover-topics": Benchmark("recover_topics", "s", "kill -9 with --topics open ledgers until all took a message"),
    "store-journal": Benchmark("storage.journal", "ratio", "the journal over raw synced writes: lowest of three sizes"),
    "store-replay": Benchmark("storage.journal", "MB/s", "start of a store with --mib of journal to replay"),
    "store-many": Benchmark("storage.reads", "s", "start of a store with --ledgers ledgers of one entry, cold"),
    "store-gc": Benchmark("storage.gc", "", "bytes of logs per live byte: --ledgers small ledgers beside --mib gone"),
    "store-read": Benchmark("storage.reads", "ratio", "catch-up of a ledger of 128 KiB entries / raw file"),
    "store-read-small": Benchmark("storage.reads", "entries/s", "catch-up of a ledger of --size bytes entries"),
    "bookie-killed": Benchmark("failures", "ms", "longest time without an ack after kill -9 of a bookie, 3/3/2"),
    "slow-bookie": Benchmark(
        "storage.slow_bookie", "ratio", "p99 of appends, 3/3/2, beside a bookie ten times slower / three alike"
    ),
    "broker-killed": Benchmark("failures", "ms", "kill -9 of the owner to the first ack by another, session 2 s"),
    "rolling": Benchmark("rolling", "ms", "p99 of pauses as brokers restart; bookies, drain, kill -9 in `detail`"),
    "balance": Benchmark("balance", "s", "until the busiest of 4 brokers is <= 1.25 of the mean: a load skewed 10:1"),
    "shares": Benchmark("shares", "%", "off a namespace's publish rate, in sum of 2 brokers; the parts in `detail`"),
    "two-brokers": Benchmark("two_brokers", "ratio", "msg/s of 2 brokers / of 1, each on a part of a core; 64 topics"),
    "repair": Benchmark("storage.repair", "MB/s", "copies of a dead bookie's --gib of 128 KiB entries, unlimited"),
    "repair-disturb": Benchmark("storage.repair", "ratio", "p99 of sends beside such copying at its default / without"),
    "shared": Benchmark("subscriptions", "msg/s", "4 consumers of a Shared subscription ack each of --messages"),
    "filter": Benchmark("filtering", "ratio", "backlog passed over by a filter of 1 % at the broker / in the program"),
    "key-shared": Benchmark("subscriptions", "msg/s", "the same of a Key_Shared one, 10,000 keys, an entry a message"),
    "fan-out": Benchmark("subscriptions", "ratio", "CPU per byte delivered to 100 subscriptions / to 1"),
    "stuck-key": Benchmark("subscriptions", "ratio", "other keys after 1,000,000 messages of a stuck one / without"),
    "fair": Benchmark("subscriptions", "ratio", "p99 of a quiet key beside a flood of another / alone: fair_by_key"),
    "control": Benchmark("control", "ms", "p99 of look-ups, administration and health beside a flood of data"),
    "abuse": Benchmark("abuse", "ratio", "good clients' p99 beside floods, slow ones, garbage, unread ones / alone"),
    "memory": Benchmark("memory", "ratio", "peak RSS / (memory_bytes + 60 MB), the worst load; above 1: exit 1"),
    "find": Benchmark("find", "s", "a search for one key in --gib of messages whose ledgers have a key index"),
    "compact": Benchmark("compaction", "msg/s", "a topic compacted, ten messages a key, both passes; peak memory"),
    "txn-small": Benchmark("transactions", "/s", "transactions of 1 message and 1 ack, 64 open at once, 4 topics"),
    "txn-large": Benchmark("transactions", "ratio", "messages in transactions of 1,000 / without, taking turns"),
    "txn-none": Benchmark("transactions", "ratio", "produce here / in the tree before transactions, taking turns"),
    "process": Benchmark("transactions", "msg/s", "consume, transform, produce, exactly once, of --messages"),
    "spark-read": Benchmark("spark", "rows/s", "stream of --messages rows into noop, rows per second of addBatch"),
    "schema-spark-read": Benchmark(
        "spark_schemas", "rows/s", "the same, ten fields by the topic's schema: JSON; Avro in `detail`"
    ),
    "spark-write": Benchmark("spark", "rows/s", "batch write of --messages rows"),
}

STANDARD: list[tuple[str, dict[str, Any]]] = [
    ("startup", {}),
    ("idle", {}),
    ("journal", {"size": 131072}),
    ("ledger", {"size": 1024}),
    ("produce", {"size": 1024, "seconds": 10.0}),  # long enough to have filled the journal's first segments
    ("produce", {"size": 100, "seconds": 10.0}),
    ("produce", {"size": 1024, "bookies": 3, "seconds": 10.0}),
    ("roundtrip", {"size": 1024, "seconds": 10.0}),
    ("catchup", {"size": 1024}),
    ("catchup-disturb", {"size": 1024}),
    ("latency", {"size": 1024}),
    ("cost", {"size": 1024}),
    ("calls", {"runs": 1}),
    ("small-sends", {"size": 1024}),
    ("durability", {"runs": 1}),
    ("control", {"size": 1024}),
    ("memory", {"size": 1024, "runs": 1}),
    ("metadata", {"runs": 1}),
    ("txn-small", {"size": 100}),
    ("txn-large", {"size": 1024}),
    ("txn-none", {"size": 1024, "runs": 1}),
    ("txn-aborts", {"runs": 1}),
    ("process", {"size": 100}),
    ("secure-produce", {"size": 1024}),
    ("secure-cluster", {"size": 1024}),
    ("secure-cluster", {"size": 1024, "bookies": 3}),
    ("secure-latency", {"size": 1024}),
    ("secure-startup", {"runs": 1}),
    ("connect", {}),
    ("abuse", {"runs": 1}),
    ("pulsar-java-produce", {"size": 1024, "seconds": 12.0}),
    ("pulsar-java-produce", {"size": 1024, "bookies": 3, "seconds": 12.0}),
    ("pulsar-java-consume", {"size": 1024, "messages": 2_000_000}),
    ("pulsar-java-transaction", {"size": 100, "seconds": 40.0, "runs": 1}),
    ("pulsar-python", {"size": 1024}),
    ("recover", {"size": 1024}),
    ("recover-topics", {}),
    ("holes", {"runs": 1}),
    ("dedup", {}),
    ("outbox", {"size": 1024}),
    ("topics", {"runs": 1}),
    ("scrape", {}),
    ("tracing", {"size": 100}),
    ("status", {"runs": 1}),
    ("page", {}),
    ("shared", {}),
    ("key-shared", {}),
    ("filter", {"size": 1024, "runs": 1}),
    ("fan-out", {}),
    ("stuck-key", {"runs": 1}),
    ("fair", {}),
    ("compact", {"size": 100}),
    ("find", {"runs": 1}),
    ("delayed", {"runs": 1, "messages": 10_000_000}),
    ("store-journal", {}),
    ("store-replay", {}),
    ("store-many", {}),
    ("store-add", {"size": 1024}),
    ("store-add", {"size": 131072}),
    ("store-latency", {"size": 1024}),
    ("store-read", {}),
    ("store-read-small", {"size": 1024}),
    ("store-gc", {}),
    ("bookie-killed", {"size": 1024}),
    ("slow-bookie", {"rate": 500.0, "seconds": 10.0}),
    ("broker-killed", {"size": 1024}),
    ("rolling", {"size": 1024, "runs": 1}),
    ("balance", {"runs": 1}),
    ("shares", {"runs": 1}),
    ("two-brokers", {"runs": 1}),
    ("repair", {}),
    ("repair-disturb", {}),
    ("spark-read", {"size": 100}),
    ("schema-spark-read", {}),
    ("spark-write", {"size": 100}),
    ("rest", {}),
]
"""What `all` runs: the rows of the table of figures in docs/performance.md."""

RESULTS = Path(__file__).parent / "results"


def run_one(name: str, options: Options) -> dict[str, Any]:
    entry = BENCHMARKS[name]
    function: Callable[[Options], Run] = getattr(
        importlib.import_module(f".{entry.module}", __package__), name.replace("-", "_")
    )
    runs = []
    for number in range(options.runs):
        runs.append(function(options))
        progress(f"{name} run {number + 1}/{options.runs}: {runs[-1].value:,.3f} {entry.unit}")
    return report(name, entry.unit, runs, options)


def run_all(names: Sequence[str], base: dict[str, Any], plot: str | None) -> None:
    """Those of STANDARD with such a name; then the table and the plot of all results that are there."""
    unknown = sorted({*names} - BENCHMARKS.keys())
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: no such benchmark; there are {', '.join(BENCHMARKS)}")
    RESULTS.mkdir(exist_ok=True)
    for each, settings in STANDARD:
        if each in names:
            result = run_one(each, Options(**{"size": 1024, **base, **settings}))
            (RESULTS / f"{label(result)}.json").write_text(json.dumps(result, indent=1) + "\n")
    stored = {path.stem: load(str(path)) for path in RESULTS.glob("*.json")}
    order = [standard_label(each, settings) for each, settings in STANDARD]
    results = [stored[each] for each in order if each in stored]
    (RESULTS / "table.md").write_text(as_table(results) + "\n")
    as_plot(results, plot or str(RESULTS / "figures.svg"))
    print(as_table(results))


def standard_label(name: str, settings: dict[str, Any]) -> str:
    return label({"benchmark": name, "options": {"size": 1024, "bookies": 1, **settings}})


def label(result: dict[str, Any]) -> str:
    options = result["options"]
    return "-".join([result["benchmark"], str(options["size"]), *(["3bookies"] if options["bookies"] == 3 else [])])


def _help() -> str:
    names = "\n".join(f"  {name:<12} {each.what} ({each.unit})" for name, each in BENCHMARKS.items())
    return "\n\n".join(f"\b\n{part}" for part in (*(__doc__ or "").strip().split("\n\n"), names))


@click.command(help=_help(), context_settings={"max_content_width": 120})
@click.argument("name", type=click.Choice([*BENCHMARKS, "all"]), metavar="NAME")
@click.option(
    "--size", type=click.IntRange(1, 5 << 20),
    help="Bytes of a message (default 1024; Spark, txn-small and process 100; journal 131072).",
)
@click.option("--bookies", type=click.Choice(["1", "3"]), default="1", help="1: one copy; 3: 3/3/2.")
@click.option(
    "--processes", type=click.IntRange(1), default=1,
    help="Of the server (startup, idle, produce, roundtrip, catchup, latency, shared, key-shared).",
)
@click.option("--seconds", type=float, default=5.0, help="Length of a measured stretch.")
@click.option("--rate", type=float, default=1000.0, help="Sends per second (latency, catchup-disturb).")
@click.option("--messages", type=click.IntRange(1), help="How many (catchup, recover, Spark: 1,000,000; delayed: ten).")
@click.option("--mib", type=click.IntRange(1), help="MiB: store-replay of journal, store-gc deleted, store-read read.")
@click.option("--gib", type=click.IntRange(1), help="GiB: repair, repair-disturb copied (2), find searched (1).")
@click.option("--ledgers", type=click.IntRange(1), help="How many (store-many: 1,000,000; store-gc: 10,000).")
@click.option("--topics", type=click.IntRange(1), help="How many (topics, scrape, page: 10,000).")
@click.option("--baseline", type=click.Path(exists=True, file_okay=False), help="Tree to compare with (txn-none).")
@click.option("--exactly-once", is_flag=True, help="In transactions; at least once in the same run (spark-write).")
@click.option("--url", help="Of a Pulsar to compare with (pulsar-python).")
@click.option("--peer", type=click.Choice(["pulsar"]), help="A real Pulsar to compare with (pulsar-python, …).")
@click.option("--one-core", is_flag=True, help="The threads of the client on one core (pulsar-python).")
@click.option("--only", metavar="NAME,…", help="With `all`: these.")
@click.option("--runs", type=click.IntRange(1), default=3, help="Repetitions; the value is their median.")
@click.option("--seed", type=int, default=1, help="Of the payload bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON object (else a table).")
@click.option("--compare", type=click.Path(exists=True, dir_okay=False), help="An earlier result: print the ratio.")
@click.option("--plot", type=click.Path(dir_okay=False), help="Write a picture (.png or .svg) of the runs.")
def main(
    name: str, size: int | None, bookies: str, processes: int, seconds: float, rate: float, messages: int | None,
    mib: int | None, gib: int | None, ledgers: int | None, topics: int | None, baseline: str | None, exactly_once: bool,
    url: str | None, peer: str | None, one_core: bool, only: str | None, runs: int, seed: int, as_json: bool,
    compare: str | None, plot: str | None,
) -> None:  # fmt: skip
    messages = messages or (10_000_000 if name == "delayed" else 1_000_000)
    base: dict[str, Any] = {"seconds": seconds, "rate": rate, "messages": messages, "runs": runs, "seed": seed}
    base["url"] = url
    if peer is not None and (name not in ("pulsar-python", "pulsar-java-transaction") or url is not None):
        raise click.UsageError("--peer is for pulsar-python and pulsar-java-transaction, instead of --url")
    extra = {
        "mib": mib, "gib": gib, "ledgers": ledgers, "topics": topics, "baseline": baseline, "peer": peer,
        "exactly_once": exactly_once or None, "one_core": one_core or None,
    }  # fmt: skip
    base["extra"] = {name: value for name, value in extra.items() if value is not None}
    if name == "all":
        run_all(only.split(",") if only else list(BENCHMARKS), base, plot)
        return
    small = name.startswith("spark") or name in ("txn-small", "process")
    default_size = 131072 if name == "journal" else 100 if small else 1024
    result = run_one(name, Options(size=size or default_size, bookies=int(bookies), processes=processes, **base))
    if compare:
        result["compared"] = compared(result, load(compare))
    if plot:
        as_plot([result], plot)
    print(json.dumps(result) if as_json else "\n".join([as_table([result]), *ratio_line(result)]))
    if result["detail"].get("within") is False and name == "memory":
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
