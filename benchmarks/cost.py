"""cost: the account of a message. What one message costs the server and the client, by thread and by part, for eight
kinds of load.

    kind        load
    lone        one producer, not batched, --rate sends a second
    fifty       fifty threads of one client, each with a topic, `send()` one by one, all settings at their defaults
    batch-1k    one producer, 1 KiB messages as fast as they are acknowledged
    batch-100   the same of 100 B
    deliver     a consumer receives a backlog of 1 KiB messages and acknowledges each
    shared      the same of a Shared subscription
    key-shared  the same of a Key_Shared one, an entry a message, KEYS keys
    ack         the same stretch, what the acknowledgements alone add: `deliver` less a reader of the same backlog

CPU is the kernel's run time of each thread in nanoseconds (/proc/PID/task/*/schedstat), context switches are its own
counts (status); a *hand-over* is a voluntary switch of a thread that is not the loop's. System calls are counted by
`perf stat` (raw_syscalls:sys_enter) where perf is installed and allowed, and `perf record` says which part of the time
is the kernel's, the interpreter's, compiled code's, … (PARTS). The names of threads, and the functions that cost most,
are py-spy's (extra `bench`). gRPC messages are counted at the client, where each one is made or comes. `lo`
is what went through the loopback device, `disk` what was given to the disk. What the server allocates and copies is
counted by probes of the kernel, in a stretch of its own, because they cost time (probes.py; Linux, root, perf).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from .harness import Options, Run, progress, server
from .messaging import PENDING, TOPIC, Paced, Sending, payloads
from .probes import Counted, Probes
from .small_sends import THREADS, Sender

WARM_UP_S, PROFILED_S, PROBED_S = 1.5, 3, 1.5
REHEARSAL = 0.2, 1, 0.2
"""The same in a rehearsal."""
REHEARSED = ("lone", "batch-1k", "deliver", "receive")
"""Those of LOADS that a rehearsal runs: one of each way to be measured."""
PROFILE_HZ = 400
FUNCTIONS = 12
PROBED_RATE = 0.1
"""Of the rate of `lone`, while probes make a send several times as long."""
PARTS = {
    "kernel": r"\[kernel", "interpreter": r"^(lib)?python", "compiled": "__mypyc", "memory": r"^(libc\.|ld-)",
    "protobuf": r"^_message", "event loop": r"^loop\.", "check sums": r"^_crc32c",
}  # fmt: skip
"""Of the time of a process, by the file whose code runs; "memory" is the C library: allocations and copies."""
KEYS = 10_000
STRETCHES = 5
"""Of a load: warm-up, the measured one, two profiled ones, the probed one. A backlog is read in as many parts at most.
"""


# ---------------------------------------------------------------------------------- counters of the system
@dataclass
class _Thread:
    run_ns: int = 0
    voluntary: int = 0
    involuntary: int = 0


def _threads(pid: int) -> dict[int, _Thread]:
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            status = (task / "status").read_text()
            numbers = [int(each) for each in re.findall(r"voluntary_ctxt_switches:\s+(\d+)", status)]
            found[int(task.name)] = _Thread(int((task / "schedstat").read_text().split()[0]), *numbers)
        except OSError:  # it ended
            continue
    return found


def _loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def _disk_bytes(pid: int) -> int:
    return int(re.findall(r"^write_bytes: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.M)[0])


def _thread_names(pid: int) -> dict[int, str]:
    """By py-spy; empty without it."""
    if not (tool := _py_spy()):
        return {}
    done = subprocess.run([tool, "dump", "--json", "--pid", str(pid)], capture_output=True, text=True)
    if done.returncode:
        return {}
    return {each["os_thread_id"]: each["thread_name"] or "" for each in json.loads(done.stdout)}


def _py_spy() -> str | None:
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


@dataclass
class _Account:
    """What one process cost in a stretch."""

    threads: dict[str, _Thread] = field(default_factory=dict)
    syscalls: int | None = None
    disk_bytes: int = 0
    wall_s: float = 0.0


@contextmanager
def _accounted(**pids: int) -> Iterator[dict[str, _Account]]:
    """Notes what each process does during the block."""
    accounts = {name: _Account() for name in pids}
    before = {name: _threads(pid) for name, pid in pids.items()}
    disk = {name: _disk_bytes(pid) for name, pid in pids.items()}
    counting = {name: _count_syscalls(pid) for name, pid in pids.items()}
    begin = time.perf_counter()
    yield accounts
    for name, pid in pids.items():
        account = accounts[name]
        account.wall_s = time.perf_counter() - begin
        names = _thread_names(pid)
        for tid, now in _threads(pid).items():
            was = before[name].get(tid, _Thread())
            called = "loop" if name == "server" and tid == pid else re.sub(r"[\d-]*$", "", names.get(tid) or "other")
            total = account.threads.setdefault(called, _Thread())
            total.run_ns += now.run_ns - was.run_ns
            total.voluntary += now.voluntary - was.voluntary
            total.involuntary += now.involuntary - was.involuntary
        account.disk_bytes = _disk_bytes(pid) - disk[name]
        account.syscalls = _counted(counting[name])


def _count_syscalls(pid: int) -> subprocess.Popen[str] | None:
    if (perf := shutil.which("perf")) is None:
        return None
    command = [perf, "stat", "-x", ",", "-e", "raw_syscalls:sys_enter", "-p", str(pid)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def _counted(perf: subprocess.Popen[str] | None) -> int | None:
    if perf is None:
        return None
    perf.send_signal(2)
    first = (perf.communicate(timeout=60)[1].splitlines() or [""])[0].split(",")[0]
    return int(first) if first.isdigit() else None


# ---------------------------------------------------------------------------------- the loads
class _GrpcMessages:
    """Counts what this process sends and gets."""

    def __init__(self) -> None:
        from magnetar.proto.versions import is_compiled
        from magnetar.runtime.grpc.stream import GrpcStream

        self.sent = self.came = 0
        envelope, came = GrpcStream._next_envelope, GrpcStream.on_message

        def counted_envelope(stream: Any) -> Any:
            self.sent += 1
            return envelope(stream)

        def counted_came(stream: Any, data: Any, cost: int) -> None:
            self.came += 1
            came(stream, data, cost)

        self.counts = not is_compiled()  # a compiled method cannot be replaced
        if self.counts:
            GrpcStream._next_envelope = counted_envelope  # type: ignore[method-assign]
            GrpcStream.on_message = counted_came  # type: ignore[method-assign]


Load = Callable[[float], int]
"""Runs for so many seconds; returns how many messages were done."""


def _lone(client: Any, options: Options) -> Load:
    return Paced(client, payloads(options.size, options.seed), options.rate).stretch


def _fifty(client: Any, options: Options) -> Load:
    contents = payloads(options.size, options.seed)
    producers = [client.create_producer(f"small-{n}") for n in range(THREADS)]

    def stretch(seconds: float) -> int:
        begin = threading.Barrier(THREADS + 1)
        senders = [Sender(producer, contents, begin) for producer in producers]
        for sender in senders:
            sender.start()
        begin.wait()
        time.sleep(seconds)
        for sender in senders:
            sender.stop = True
        for sender in senders:
            sender.join(60)
        return sum(len(sender.samples) for sender in senders)

    return stretch


def _batches(size: int) -> Callable[[Any, Options], Load]:
    def make(client: Any, options: Options) -> Load:
        producer = client.create_producer(
            TOPIC, batching_enabled=True, block_if_queue_full=True, max_pending_messages=PENDING
        )
        sending = Sending(producer, payloads(size, options.seed))

        def stretch(seconds: float) -> int:
            before = sending.acked
            sending.run(seconds=seconds)
            return sending.acked - before

        return stretch

    return make


def _deliver(client: Any, options: Options) -> Load:
    return _read(client, options, acknowledges=True)


def _receive(client: Any, options: Options) -> Load:
    return _read(client, options, acknowledges=False)


def _shared(client: Any, options: Options) -> Load:
    return _read(client, options, acknowledges=True, kind="Shared")


def _key_shared(client: Any, options: Options) -> Load:
    return _read(client, options, acknowledges=True, kind="KeyShared")


def _read(client: Any, options: Options, *, acknowledges: bool, kind: str = "Exclusive") -> Load:
    import magnetar

    consumer_type, lone = getattr(magnetar.ConsumerType, kind), kind == "KeyShared"
    earliest = magnetar.InitialPosition.Earliest
    client.subscribe(TOPIC, "bench", consumer_type, initial_position=earliest).close()
    producer = client.create_producer(
        TOPIC, batching_enabled=not lone, block_if_queue_full=True, max_pending_messages=PENDING
    )
    if lone:
        for number, content in zip(range(options.messages // 4), cycle(payloads(options.size, options.seed))):
            producer.send_async(content, None, partition_key=str(number % KEYS))
        producer.flush()
    else:
        Sending(producer, payloads(options.size, options.seed)).run(messages=options.messages)
    consumer = client.subscribe(TOPIC, "bench", consumer_type, receiver_queue_size=5000)
    stored = options.messages // 4 if lone else options.messages

    def stretch(seconds: float) -> int:
        count, deadline = 0, time.perf_counter() + seconds
        while time.perf_counter() < deadline and count < stored // STRETCHES:
            message = consumer.receive(30_000)
            if acknowledges:
                consumer.acknowledge(message)
            count += 1
        return count

    return stretch


LOADS: dict[str, Callable[[Any, Options], Load]] = {
    "lone": _lone, "fifty": _fifty, "batch-1k": _batches(1024), "batch-100": _batches(100), "deliver": _deliver,
    "receive": _receive, "shared": _shared, "key-shared": _key_shared,
}  # fmt: skip


def _functions(pid: int, seconds: float, folder: str) -> subprocess.Popen[bytes] | None:
    if (tool := _py_spy()) is None:
        return None
    command = [tool, "record", "--pid", str(pid), "--duration", str(max(1, int(seconds))), "--rate", str(PROFILE_HZ),
               "--format", "raw", "--output", f"{folder}/{pid}.raw", "--gil"]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _recorded(pid: int, seconds: float, path: str) -> subprocess.Popen[bytes] | None:
    if (perf := shutil.which("perf")) is None:
        return None
    command = [perf, "record", "--quiet", "--freq", str(PROFILE_HZ), "--output", path, "--pid", str(pid),
               "--", "sleep", str(seconds)]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _parts(path: str) -> dict[str, float] | None:
    """Part → its share of the time; None: perf recorded nothing."""
    command = ["perf", "report", "--input", path, "--sort", "dso", "--stdio", "--quiet"]
    found: Counter[str] = Counter()
    report = subprocess.run(command, capture_output=True, text=True).stdout
    for share, file in re.findall(r"^ *([\d.]+)% +(\S+)", report, re.M):
        part = next((part for part, pattern in PARTS.items() if re.search(pattern, file)), "other")
        found[part] += float(share) / 100
    return {part: round(share, 3) for part, share in found.most_common()} or None


def _top(path: Path) -> list[tuple[str, float]]:
    """(function, share of the interpreter's time), the most expensive first."""
    found: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        stack, _, count = line.rpartition(" ")
        found[stack.rpartition(";")[2]] += int(count)
    total = sum(found.values()) or 1
    return [(name, count / total) for name, count in found.most_common(FUNCTIONS)]


# ---------------------------------------------------------------------------------- the account
def _entries(client_url: str, topics: list[str]) -> int:
    from magnetar.admin import Admin

    with Admin(client_url) as admin:
        return sum(sum(each.entries for each in admin.topic_internal_stats(topic).ledgers) for topic in topics)


def _one(kind: str, options: Options, probes: Probes) -> dict[str, Any]:
    import magnetar

    with server(options.bookies) as running, magnetar.Client(running.url) as client:
        stretch = LOADS[kind](client, options)
        usual = (WARM_UP_S, PROFILED_S, PROBED_S)
        warm_up_s, profiled_s, probed_s = usual if not options.rehearses else REHEARSAL
        stretch(warm_up_s)
        counts = _GrpcMessages()
        topics = [f"small-{n}" for n in range(THREADS)] if kind == "fifty" else [TOPIC]
        entries, lo = _entries(running.url, topics), _loopback_bytes()
        counts.sent = counts.came = 0
        with _accounted(server=running.pid, client=os.getpid()) as accounts:
            messages = stretch(options.seconds)
        told = {"sent": counts.sent, "came": counts.came}
        lo = _loopback_bytes() - lo
        made = _entries(running.url, topics) - entries
        with tempfile.TemporaryDirectory(prefix="magnetar-cost-") as folder:  # apart: a profile costs too
            pids = {"server": running.pid, "client": os.getpid()}

            def profiled(*tools: subprocess.Popen[bytes] | None) -> None:
                stretch(profiled_s + 0.5)
                for each in tools:
                    if each is not None:
                        each.wait(30)

            profiled(*(_recorded(pid, profiled_s, f"{folder}/{name}") for name, pid in pids.items()))
            profiled(_functions(running.pid, profiled_s, folder))  # apart too: py-spy stops what it looks at
            top = {"server": _top(path)} if (path := Path(folder, f"{running.pid}.raw")).exists() else {}
            parts = {name: _parts(f"{folder}/{name}") for name in pids}
        if kind == "lone":
            stretch = _lone(client, replace(options, rate=options.rate * PROBED_RATE))
        with probes.counting(running.pid) as counted:
            probed = stretch(probed_s)
    account = _as_account(messages, made, accounts, told if counts.counts else {}, lo, top)
    for name, each in parts.items():
        account[name]["parts"] = each
    if not probes.why_not:
        account["server"] |= _allocated(counted, probed)
    return account


def _allocated(counted: Counted, messages: int) -> dict[str, float]:
    return {name: round(number / max(1, messages), 2) for name, number in vars(counted).items()}


def _as_account(
    messages: int, entries: int, accounts: dict[str, _Account], grpc: dict[str, int], lo: int, top: dict[str, Any]
) -> dict[str, Any]:
    per = lambda number, digits=3: round(number / max(1, messages), digits)
    account: dict[str, Any] = {
        "messages": messages,
        "messages_an_entry": round(messages / entries, 1) if entries else None,
        "lo_bytes": per(lo, 1),
        "grpc_to_server": per(grpc["sent"], 4) if grpc else None,
        "grpc_to_client": per(grpc["came"], 4) if grpc else None,
    }
    for name, found in accounts.items():
        main = max(found.threads, key=lambda each: found.threads[each].run_ns, default="")
        account[name] = {
            "cpu_us": per(sum(each.run_ns for each in found.threads.values()) / 1000),
            "cpu_us_by_thread": {
                thread: per(used.run_ns / 1000)
                for thread, used in sorted(found.threads.items(), key=lambda each: -each[1].run_ns)
                if used.run_ns > 1_000_000
            },
            "cores": round(sum(each.run_ns for each in found.threads.values()) / 1e9 / found.wall_s, 2),
            "switches": per(sum(each.voluntary + each.involuntary for each in found.threads.values())),
            "hand_overs": per(sum(used.voluntary for thread, used in found.threads.items() if thread != main)),
            "syscalls": None if found.syscalls is None else per(found.syscalls),
            "disk_bytes": per(found.disk_bytes, 1),
        }
    account["functions"] = {
        name: {function: round(share * account[name]["cpu_us"], 3) for function, share in functions}
        for name, functions in top.items()
    }
    return account


def cost(options: Options) -> Run:
    run, probes = Run(0.0), Probes()
    if probes.why_not:
        progress(f"cost: nothing is told of allocations and copies: {probes.why_not}")
    try:
        for kind in REHEARSED if options.rehearses else LOADS:
            run.detail[kind] = account = _one(kind, options, probes)
            progress(f"cost: {kind}: server {account['server']['cpu_us']} us, client {account['client']['cpu_us']} us")
    finally:
        probes.close()
    deliver, receive = (run.detail[kind] for kind in ("deliver", "receive"))
    run.detail["ack"] = {
        name: {"cpu_us": round(deliver[name]["cpu_us"] - receive[name]["cpu_us"], 3)} for name in ("server", "client")
    }
    run.value = run.detail["batch-1k"]["server"]["cpu_us"]
    print(_table(run.detail), file=sys.stderr)
    return run


def _table(kinds: dict[str, Any]) -> str:
    """In Markdown, for docs/performance.md."""
    head = ["", "server us", "client us", "a message an entry", "gRPC to / from", "hand-overs", "system calls", "lo B",
            "objects", "copied B"]  # fmt: skip
    rows = [head, ["---"] * len(head)]
    for kind, found in kinds.items():
        if kind == "ack":
            rows.append([kind, str(found["server"]["cpu_us"]), str(found["client"]["cpu_us"]), *[""] * 7])
            continue
        rows.append([
            kind, str(found["server"]["cpu_us"]), str(found["client"]["cpu_us"]), str(found["messages_an_entry"] or ""),
            f"{found['grpc_to_server']} / {found['grpc_to_client']}",
            f"{found['server']['hand_overs']} + {found['client']['hand_overs']}",
            f"{found['server']['syscalls']} + {found['client']['syscalls']}", str(found["lo_bytes"]),
            *(str(found["server"].get(name, "")) for name in ("objects", "copied_bytes")),
        ])  # fmt: skip
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
