"""What can go wrong in a simulated cluster: every kind of fault, by name. `--kinds` prints them.

`RATES` happen at random moments by themselves, per message, operation, commit or start; `TIMES` are planned strikes.
A seed draws a random subset of both (options.py), one in ten draws none. `LOSSES` lose what a bookie stored and are for
one bookie of a seed, and only where Qa > 1: of every entry at most Qa-1 copies may be lost. What one power loss does to
a disk (unsynced writes lost, kept, torn at a sector, names lost) is one kind here, though it is many there.

Not among them, and why: stale reads of the metadata (its contract forbids them: a read sees every commit that was
answered before it was asked), a message delivered twice (TCP does not; a request that is repeated on a new connection
comes with `half-open` and `reset`), short writes (runtime/disk.py ends them before a store sees one), misdirected
writes (no promise is made), a crash of the metadata store (SQLite does its own I/O, tests/metadata has it), a peer
that breaks the framing of ZeroMQ or HTTP/2 (a stranger's noise arrives whole here; tests/runtime has the rest), two
machines that hold copies of one bookie's disk and live at once (a `twin` shares the disk, and its lock), records of a
later version elsewhere than in the folders that background tasks read (a ledger's or topic's is refused by name).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Rate(NamedTuple):
    what: str
    values: tuple[float, ...]


class Times(NamedTuple):
    what: str
    most: int  # in a seed
    needs: str = ""
    """"topics" | "ledgers": only with that load; "grants": with topics, in a secured cluster; "inside": where brokers
    share the processes of bookies."""


RATES: Mapping[str, Rate] = MappingProxyType({
    # ---- network
    "drop": Rate("a message between ledger library and bookie is lost", (0.002, 0.02)),
    "delay": Rate("a message takes up to 0.2 s longer, and those of other connections overtake it", (0.01, 0.05)),
    "reset": Rate("a connection breaks behind a message, with what is on its way", (0.0005, 0.002)),
    # ---- disks of bookies
    "stall": Rate("one call of a worker takes up to half a second", (0.002, 0.01)),
    # ---- metadata
    "answer-lost": Rate("a commit is applied, and its answer is lost", (0.02, 0.1)),
    "commit-lost": Rate("a commit is not applied, and nobody is told", (0.02, 0.1)),
    "metadata-slow": Rate("a call of the metadata takes up to half a second", (0.05, 0.2)),
    # ---- starts
    "crash-in-start": Rate("a bookie that was started dies at one of its first disk operations, in its replay", (0.3,)),
})  # fmt: skip

TIMES: Mapping[str, Times] = MappingProxyType({
    # ---- network, between two nodes or around one
    "cut": Times("the connections between two nodes break", 4),
    "half-open": Times("the connections between two nodes swallow everything, and are lost seconds later", 3),
    "partition": Times("two nodes do not hear each other", 2),
    "one-way": Times("one node is not heard by another, which it hears", 2),
    "isolate": Times("a node hears nobody and is heard by nobody", 2),
    "flap": Times("two nodes lose each other and find each other, five times in a row", 1),
    "clog": Times("what two nodes say to each other takes up to a second", 2),
    # ---- processes
    "kill-bookie": Times("a bookie is killed", 4),
    "kill-broker": Times("a broker is killed, the owner of the topic first", 2, "topics"),
    "unplug-broker": Times("a broker loses power: nobody is told, its connections fall silent", 1, "topics"),
    "crash-at-operation": Times("a bookie dies at one of its next sixty disk operations", 3),
    "pause-bookie": Times("a bookie stands still, beyond its session too, and goes on", 2),
    "pause-broker": Times("a broker stands still, beyond its session too, and believes in itself", 2, "topics"),
    "pause-client": Times("the process of the clients stands still", 1, "topics"),
    "kill-writer": Times("the process of a ledger's writer is killed", 2, "ledgers"),
    "pause-writer": Times("the process of a ledger's writer stands still, and goes on", 2, "ledgers"),
    "clean-stop": Times("a bookie is stopped in order, and started again", 2),
    "renew-bookie": Times("a bookie is stopped in order and started again in the process of a broker", 3, "inside"),
    "rolling-restart": Times("bookies and brokers are stopped in order and started again, one after the other", 1),
    # ---- power
    "power-bookie": Times("a bookie loses power: unsynced bytes are lost, kept, or torn at a sector; so are names", 3),
    "blackout": Times("every bookie and broker loses power at the same moment", 1),
    # ---- disks of bookies
    "sync-error": Times("an fdatasync fails, and so the bookie must end", 2),
    "write-error": Times("a write fails with EIO", 2),
    "read-error": Times("a read of a running bookie fails with EIO", 3),
    "name-error": Times("a create, a rename or the sync of a directory fails with EIO", 1),
    "disk-full": Times("a disk is full, and freed later", 2),
    "read-only": Times("a disk is so full that clients' adds are refused, and freed later", 2),
    "slow-disk": Times("a disk is many times slower for a while", 2),
    "disk-hangs": Times("a disk takes seconds for each call for a while", 1),
    # ---- disks that lose what was stored: of one bookie, and at most Qa-1 copies
    "bit-flip": Times("a bit of a log of entries flips", 3),
    "truncated-log": Times("a log of entries ends earlier than it did", 1),
    "replaced": Times("a bookie's disk is lost: another bookie, empty, stands at its address", 1),
    "rolled-back": Times("a bookie's disk is an older copy of itself: it starts in limbo", 1),
    "leaves": Times("a bookie goes for good, and another one joins", 1),
    # ---- metadata
    "metadata-down": Times("nobody reaches the metadata for a while, now and then longer than a session lasts", 1),
    "unheard": Times("the metadata does not hear a node, which goes on hearing of changes, beyond its session", 1),
    "mute": Times("the metadata does what it is asked and is not heard; mostly a bookie dies then", 2),
    "expire-bookie": Times("a bookie's session ends, and it lives", 2),
    "expire-broker": Times("a broker's session ends, and it lives", 2, "topics"),
    "expire-auditor": Times("the session of the elected auditor ends", 1),
    "expire-client": Times("the session of a ledger's writer ends", 1, "ledgers"),
    # ---- clocks
    "clock-jump": Times("the wall clock of a node jumps by seconds or minutes, forth or back", 3),
    "clock-skew": Times("the wall clocks of all nodes are hours or a day apart until they are healed", 1),
    # ---- tasks
    "cancel": Times("a call of a client or an operator, or a handler of a request, is cancelled where it waits", 6),
    "dead-task": Times("a task that lives as long as its process meets an exception of ours, or is cancelled", 3),
    # ---- who does not belong there
    "stranger": Times("somebody without a key sends noise and requests to every port", 2),
    "twin": Times("a second process is started on the directory of a living bookie", 1),
    "newer-record": Times("a later version of Magnetar has written a record where background tasks read all", 2),
    # ---- bookies come and go
    "joins": Times("one more bookie starts", 1),
    "decommission": Times("an operator empties a living bookie, and may think better of it", 1),
    # ---- what operators do
    "unload": Times("the topic is unloaded", 3, "topics"),
    "drain": Times("brokers are drained, also all at once, and some die meanwhile or get bundles again", 3, "topics"),
    "set-persistence": Times("E, Qw and Qa of the namespace change", 2, "topics"),
    "recover": Times("somebody recovers a ledger in use, and so fences its writer", 2),
    "delete-ledger": Times("a closed ledger is deleted", 3, "ledgers"),
    "anew": Times("a topic, a subscription, schemas or the name of a producer are deleted and made anew", 4, "topics"),
    "repair-off": Times("auto-recovery is switched off, and on again later", 1),
    "compact": Times("a bookie collects garbage and compacts every log that is not full", 2),
    "revoke": Times("rights of a role that has traffic are taken, and given back later", 5, "grants"),
})  # fmt: skip

PENDING: tuple[str, ...] = ()
"""Not drawn yet: the product does not stand them. Strikes by hand (tests) alone."""

LOSSES = ("bit-flip", "truncated-log", "replaced", "rolled-back", "leaves")
USUAL = ("kill-bookie", "power-bookie", "kill-broker", "recover", "mute", "revoke", "renew-bookie")
"""Drawn more often than the others: most of what else goes wrong needs a restart or a take-over to matter."""

KINDS: Mapping[str, str] = MappingProxyType(
    {name: rate.what for name, rate in RATES.items()} | {name: times.what for name, times in TIMES.items()}
)


def kinds() -> list[str]:
    """As `--kinds` prints them."""
    return [f"{name:20} {what}" for name, what in KINDS.items()]
