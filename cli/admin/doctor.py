"""`magnetar doctor`: runs the checks of a table, and shows what is wrong and which command helps.

    facts = gather_facts(session, backup)      plain records: brokers, bookies, quorums, subscriptions, settings
    findings, states = run_checks(facts)       the checks in CHECKS, which decide only from the facts
    findings, states = check_directory(dir)    the checks in OFFLINE_CHECKS, of a data directory without a server

A check has a code, which alarms of `magnetar status` share, and is described in docs/operations.md. A finding is an
Alarm: a sentence, the command that shows more or helps, and whether an operator must act; if one must, the exit code is
1. What cannot be known (a bookie of an older version, no --backup) is said and is no finding. Guarding tests:
tests/cli/test_doctor.py.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import click

from ...proto.alarms import (
    DISK_FREE_LOW,
    OLD_MESSAGE_S,
    Alarm,
    describe_backup_age,
    find_alarms,
    find_backup_alarms,
    find_certificate_alarms,
    find_metadata_alarms,
    find_metadata_disk_alarms,
    find_metadata_refusal_alarms,
    find_repair_alarms,
    format_age,
)
from ...runtime.clock import SystemClock
from ..common.exits import FAILED
from ..common.session import CommandSession
from ..storage.admin_port import with_operator_and_watch_options
from .cluster import ask_bookie_states, find_largest_topics, make_broker_row, read_summary

if TYPE_CHECKING:
    from ...proto.statistics import ClusterSummary

Row = Mapping[str, Any]

SYNC_WRONG_S, SYNC_SLOW_S = 0.1, 0.03
"""p99 of a journal's sync: publishes wait for it. A disk with a capacitor takes 1 ms, a hard disk 10 to 30."""
SKEW_WRONG_MS, SKEW_MS = 5_000, 500
"""Times of messages, retention and TTL are those of brokers."""
DESCRIPTORS_ENOUGH = 4_096
DISK_FREE_CRITICAL = 0.05
"""Share of a disk that is free, below which somebody is needed."""
SKEW_FACTOR = 3.0
"""Times of the mean, from which the busiest partition is called skewed; below SKEW_RATE_MIN it does not matter."""
SKEW_RATE_MIN = 100.0
BACKUP_OLD_S = 86_400.0
FORGOTTEN_SUBSCRIPTION_S = 7 * 86_400.0
"""Age of the oldest message from which a subscription without consumers needs somebody."""
CHECKED_NAMESPACES_MAX, CHECKED_TOPICS_MAX, CHECKED_BASES_MAX = 50, 20, 10
"""Namespaces whose quorums, topics whose subscriptions, and topics whose partitions are looked at."""
BROKER_TIMEOUT_S = 5.0
SYNCS = 20
"""Writes that measure a disk, of 4 KiB each."""


@dataclass
class ClusterFacts:
    """The facts about a cluster from which the checks of `magnetar doctor` decide. All records are plain values, so
    that a test can create them."""

    now_ms: int
    brokers: Sequence[Row] = ()  # as of `status`
    silent: Sequence[str] = ()
    refusing: Sequence[str] = ()  # of `silent`
    bookies: Sequence[Row] = ()  # as of `status`
    repair: Row | None = None
    unasked: str = ""  # why no bookie answers
    unasked_refused: bool = False  # as of `BookiesReport`
    unlisted: str = ""  # as of `BookiesReport`
    oldest: Sequence[Row] = ()  # TopicRow
    described: Mapping[str, Row] = field(default_factory=dict)  # endpoint → BrokerDescription, askedMs, answeredMs
    unreachable: Mapping[str, str] = field(default_factory=dict)  # endpoint → why not, from here
    reports: Mapping[str, Row] = field(default_factory=dict)  # bookie → its report, askedMs, answeredMs
    racks: Mapping[str, str] = field(default_factory=dict)  # registered bookie → rack
    quorums: Sequence[tuple[str, int, int, int]] = ()  # namespace, ensemble, write and ack quorum
    unread: Sequence[tuple[str, str, int, int]] = ()  # topic, subscription without consumers, backlog, oldest_ms
    partitions: Sequence[Row] = ()  # TopicRow of topics with partitions
    backup_ms: int | None = None  # of the newest file
    version: str = ""  # of this command
    url: str = ""
    metadata_away_ms: int = 0  # as of `status`
    late: Sequence[str] = ()  # of `brokers`
    died: Sequence[Row] = ()  # DiedBroker
    metadata_late: bool = False  # as of `status`
    metadata_disk: tuple[int, int] = (0, 0)  # its size, and what is free; size 0: not known
    metadata_certificate_ends_ms: int = 0  # 0: it has none, or it is not known
    metadata_refusal: str = ""  # why it refuses commits; "": it does not, as far as is known
    metadata_backup: tuple[int, int, str] = (0, 0, "")  # as of `MetadataDisk`: when, how often, and the failure


class DoctorCheck(NamedTuple):
    """One check of `magnetar doctor`. `code`: its name. `what`: what it checks. `find`: the function that returns the
    alarms, or a text that says why the check is not possible. `asks_metadata`: the check is not possible while the
    metadata does not answer."""

    code: str
    what: str
    find: Callable[[ClusterFacts], Iterable[Alarm] | str]
    asks_metadata: bool = True  # what it looks at is not known without the metadata


def run_checks(facts: ClusterFacts) -> tuple[list[Alarm], dict[str, str]]:
    """Runs all checks. Returns the alarms (the urgent ones first), and the state of each check by its code: "ok",
    "look" (an alarm that can wait), "wrong" (an urgent alarm), or the reason why the check was not possible."""
    findings, states = list[Alarm](), dict[str, str]()
    for check in CHECKS:
        away = "the metadata does not answer" if facts.metadata_away_ms else "the metadata answers late"
        unread = facts.metadata_away_ms or facts.metadata_late
        answer = away if unread and check.asks_metadata else check.find(facts)
        if isinstance(answer, str):
            states[check.code] = answer
            continue
        mine = [each._replace(code=check.code) for each in answer]
        findings += mine
        states[check.code] = "wrong" if any(each.needed for each in mine) else "look" if mine else "ok"
    return sorted(findings, key=lambda each: (not each.needed, each.code)), states


# ------------------------------------------------------------------------------------------------------- checks
def _alarms(code: str) -> Callable[[ClusterFacts], list[Alarm]]:
    def find(facts: ClusterFacts) -> list[Alarm]:
        found = find_alarms(
            facts.brokers, facts.silent, facts.bookies, facts.oldest, facts.now_ms, facts.refusing, facts.late,
            facts.died,
        )  # fmt: skip
        found += find_repair_alarms(facts.repair, facts.unasked, refused=facts.unasked_refused, unlisted=facts.unlisted)
        return [each for each in found if each.code == code]

    return find


def _metadata(facts: ClusterFacts) -> list[Alarm]:
    return find_metadata_alarms(facts.metadata_away_ms, facts.now_ms, late=facts.metadata_late)


def _ending(facts: ClusterFacts) -> list[Alarm]:
    metadata = find_certificate_alarms("the metadata service", facts.metadata_certificate_ends_ms, facts.now_ms)
    return [*metadata, *_alarms("D16")(facts)]


def _metadata_disk(facts: ClusterFacts) -> list[Alarm] | str:
    if facts.metadata_refusal:
        return find_metadata_refusal_alarms(facts.metadata_refusal)
    if not facts.metadata_disk[0]:
        return "the metadata does not say: it is on ZooKeeper or etcd, or of an older release"
    return find_metadata_disk_alarms(*facts.metadata_disk)


def _reachable(facts: ClusterFacts) -> Iterator[Alarm]:
    yield from _alarms("D01")(facts)
    for endpoint, why in sorted(facts.unreachable.items()):
        text = f"A broker is advertised as {endpoint}, and does not answer there from here: {why}"
        yield Alarm(text, "magnetar brokers list")
    host = urlsplit(facts.url).hostname or ""
    if host and not _is_loopback(host):
        for each in facts.brokers:
            if _is_loopback(each["endpoint"].rpartition(":")[0]):
                text = f"Broker {each['broker']} is advertised as {each['endpoint']}, which is another machine's own."
                yield Alarm(text, "magnetar broker --advertise HOST:PORT")


def _is_loopback(host: str) -> bool:
    return host.strip("[]") in ("localhost", "::1", "0.0.0.0", "::") or host.startswith("127.")


def _syncs(facts: ClusterFacts) -> Iterable[Alarm] | str:
    found = {name: each for name, each in facts.reports.items() if each["syncs"]}
    return _slow_syncs(found) if found else "no bookie says how long its syncs take"


def _slow_syncs(reports: Mapping[str, Row]) -> Iterator[Alarm]:
    for name, each in sorted(reports.items()):
        took = each["syncP99Seconds"]
        if took > SYNC_SLOW_S:
            text = f"A sync of the journal of bookie {name[:8]} takes {took * 1000:.0f} ms (p99): each publish waits."
            yield Alarm(text, "magnetar doctor --offline DIR", needed=took > SYNC_WRONG_S)


def _clocks(facts: ClusterFacts) -> Iterator[Alarm]:
    told = [(f"broker {each['name']}", each["clock_ms"], each) for each in facts.described.values()]
    told += [(f"bookie {name[:8]}", each["clockMs"], each) for name, each in facts.reports.items()]
    for who, clock_ms, each in sorted(told, key=lambda one: one[0]):
        early, late = each["askedMs"] - clock_ms, clock_ms - each["answeredMs"]
        skew = max(early, late)
        if skew > SKEW_MS:
            way = "behind" if early > late else "ahead of"
            text = f"The clock of {who} is {skew / 1000:.1f} s {way} this machine's."
            yield Alarm(text, "timedatectl status", needed=skew > SKEW_WRONG_MS)


def _files(facts: ClusterFacts) -> Iterator[Alarm]:
    limits = [(f"broker {each['name']}", each["open_files_max"]) for each in facts.described.values()]
    limits += [(f"bookie {name[:8]}", each["openFilesMax"]) for name, each in facts.reports.items()]
    for who, limit in sorted(limits):
        if limit < DESCRIPTORS_ENOUGH:
            text = f"The process of {who} may have {limit:,} files open; {DESCRIPTORS_ENOUGH:,} are few for a server."
            yield Alarm(text, "systemctl edit SERVICE  # LimitNOFILE=1048576")


def _versions(facts: ClusterFacts) -> Iterator[Alarm]:
    running = {each["version"] or "an older one" for each in (*facts.brokers, *facts.reports.values())}
    if len(running) > 1:
        text = f"Servers run different versions: {', '.join(sorted(running))}. Finish the upgrade."
        yield Alarm(text, "magnetar status", needed=False)
    elif running and facts.version and {facts.version} != running:
        text = f"This command is of version {facts.version}, the servers of {running.pop()}."
        yield Alarm(text, "magnetar --version", needed=False)


def _quorums(facts: ClusterFacts) -> Iterator[Alarm]:
    writable = sum(each["state"] == "writable" for each in facts.bookies)
    for namespace, ensemble, write, ack in facts.quorums:
        helps = f"magnetar namespaces get-persistence {namespace} --applied"
        if writable < ensemble:
            text = f"Namespace {namespace} asks for {ensemble} bookies ({write} copies), and {writable} take writes."
            yield Alarm(text, helps)
        elif writable == ensemble and writable > 1:
            text = f"Namespace {namespace} needs all of the {writable} bookies: without one it writes fewer copies."
            yield Alarm(text, helps, needed=False)
        if ack == 1 and writable > 1:
            text = f"Namespace {namespace} confirms a message with one copy: a lost disk may lose it."
            yield Alarm(text, helps, needed=False)


def _racks(facts: ClusterFacts) -> Iterator[Alarm]:
    known = set(facts.racks.values())
    without = [name for name, rack in facts.racks.items() if rack in ("", "/default", "/default-rack")]
    if without and len(without) < len(facts.racks):
        text = f"{len(without)} of {len(facts.racks)} bookies have no rack, among them {min(without)[:8]}."
        yield Alarm(text, "magnetar bookies set-rack BOOKIE RACK", needed=False)
    wanted = max((int(_setting(facts, "min_racks_per_write_quorum", "1")), 1))
    if facts.racks and len(known) < wanted:
        text = f"Copies of an entry are to be in {wanted} racks, and the bookies are in {len(known)}."
        yield Alarm(text, "magnetar bookies racks")


def _setting(facts: ClusterFacts, name: str, default: str) -> str:
    for each in facts.described.values():
        for one in each["settings"]:
            if one["name"] == name:
                return str(one["value"])
    return default


def _unread(facts: ClusterFacts) -> Iterator[Alarm]:
    yield from _alarms("D12")(facts)
    for topic, name, backlog, oldest_ms in facts.unread:
        age_s = (facts.now_ms - oldest_ms) / 1000 if oldest_ms else 0.0
        since = f", the oldest for {format_age(age_s)}" if age_s > OLD_MESSAGE_S else ""
        text = f"Subscription {name} of {topic} has no consumer, and keeps {backlog:,} messages{since}."
        yield Alarm(text, f"magnetar why {shlex.join((topic, name))}", needed=age_s > FORGOTTEN_SUBSCRIPTION_S)


def _skewed(facts: ClusterFacts) -> Iterator[Alarm]:
    groups: dict[str, dict[str, Row]] = defaultdict(dict)
    for each in facts.partitions:
        groups[each["name"].rpartition("-partition-")[0]][each["name"]] = each
    for base, parts in sorted(groups.items()):
        rates = {name: each["rate_in"] for name, each in parts.items()}
        total, busiest = sum(rates.values()), max(rates, key=lambda name: (rates[name], name))
        if len(parts) > 1 and total >= SKEW_RATE_MIN and rates[busiest] > SKEW_FACTOR * total / len(parts):
            share = rates[busiest] / total
            text = f"Partition {busiest.rpartition('-')[2]} of {base} gets {share:.0%} of the messages of {len(parts)}."
            helps = f"magnetar topics partitioned-stats {shlex.quote(base)}"
            yield Alarm(f"{text} Do most have one key?", helps, needed=False)


class RiskySetting(NamedTuple):
    """A setting of a broker with values that are risky, and that an operator may have set by mistake. `is_risky` is
    called with the value as text; `text` says what a risky value causes, as the end of a sentence."""

    setting: str
    is_risky: Callable[[str], bool]
    text: str


RISKY_SETTINGS = (
    RiskySetting("log_level", lambda text: text == "debug",
    "each connection, producer, consumer and request of administration is a line of the log"),
    RiskySetting("degraded_writes", lambda text: text == "false", "one lost bookie may stop publishing"),
    RiskySetting("session_lost_grace_s", lambda text: float(text) == 0,
    "topics close when the metadata is away for a moment"),
    RiskySetting("drain_timeout_s", lambda text: float(text) == 0, "clients wait longer when a broker is restarted"),
    RiskySetting("cursor_flush_s", lambda text: float(text) > 10, "a crash redelivers so much"),
    RiskySetting("retention_minutes", lambda text: text == "-1", "nothing is ever deleted: the disks fill"),
    RiskySetting("orphan_age_s", lambda text: float(text) < 600, "a ledger that is about to be listed may be deleted"),
    RiskySetting("authorization_allow_wildcards_matching", lambda text: text == "true", "a role `*` is every caller"),
)  # fmt: skip


def _risky(facts: ClusterFacts) -> Iterable[Alarm] | str:
    if not facts.described:
        return "no broker says its settings"
    found = dict[tuple[str, str], Alarm]()
    for each in facts.described.values():
        values = {one["name"]: one for one in each["settings"]}
        for risk in RISKY_SETTINGS:
            one = values.get(risk.setting)
            if one is not None and risk.is_risky(one["value"]):
                text = f"{risk.setting} is {one['value']} ({one['source']}): {risk.text}."
                found[risk.setting, one["value"]] = Alarm(text, "magnetar brokers get-runtime-config", needed=False)
    parts = urlsplit(facts.url)
    if parts.scheme in ("magnetar", "pulsar") and parts.hostname and not _is_loopback(parts.hostname):
        text = "Clients talk to the brokers in clear, and no certificate says who they are."
        found["tls", ""] = Alarm(text, "magnetar security --help", needed=False)
    return found.values()


def _backup(facts: ClusterFacts) -> Iterable[Alarm] | str:
    """Looks at the files of --backup, or without it at the time of the last copy that the metadata tells."""
    made_ms, every_ms, failure = facts.metadata_backup
    scheduled = find_backup_alarms(made_ms, every_ms, failure, facts.now_ms)
    if facts.backup_ms is None and not made_ms:
        return scheduled or "--backup DIR says where the backups of the metadata are"
    newest_ms, old_s = made_ms, max(BACKUP_OLD_S, 2 * every_ms / 1000)
    if facts.backup_ms is not None:
        newest_ms, old_s = facts.backup_ms, BACKUP_OLD_S
    age_s = (facts.now_ms - newest_ms) / 1000
    if -SKEW_WRONG_MS / 1000 <= age_s <= old_s:
        return scheduled
    newest = describe_backup_age(newest_ms, facts.now_ms)
    return [*scheduled, Alarm(f"The newest backup of the metadata {newest}.", "magnetar metadata backup")]


CHECKS = (
    DoctorCheck("D00", "the metadata answers", _metadata, False),
    DoctorCheck("D01", "each registered broker answers, at its advertised address, from here", _reachable, False),
    DoctorCheck("D02", "no event loop is busy most of its time", _alarms("D02"), False),
    DoctorCheck("D03", "bookies take writes; none is read-only, in limbo, or away", _alarms("D03")),
    DoctorCheck("D04", "disks of bookies: none has failed, and they have space", _alarms("D04")),
    DoctorCheck(
        "D05", "each ledger has its copies, or they move off a departing bookie; auto-recovery is enabled",
        _alarms("D05"),
    ),
    DoctorCheck("D06", "how long a sync of each journal takes (p99 since the start)", _syncs),
    DoctorCheck("D07", "clocks of servers differ little from this machine's", _clocks),
    DoctorCheck("D08", "servers may have enough files open", _files),
    DoctorCheck("D09", "all servers and this command have one version", _versions),
    DoctorCheck("D10", "quorums of namespaces fit the bookies that take writes", _quorums),
    DoctorCheck("D11", "bookies have racks, and as many as the copies need", _racks),
    DoctorCheck("D12", "old messages, and subscriptions without consumers that hold data", _unread),
    DoctorCheck("D13", "partitions of a topic get about as many messages", _skewed),
    DoctorCheck("D14", "settings that somebody may not have meant", _risky),
    DoctorCheck("D15", "age of the newest backup of the metadata (`--backup DIR`, or as it tells)", _backup, False),
    DoctorCheck("D16", "certificates of servers, and the brokers' own tokens, last for two weeks", _ending, False),
    DoctorCheck("D17", "no topic refuses or holds publishes for its backlog quota", _alarms("D17"), False),
    DoctorCheck("D18", "no bookie refuses to collect garbage", _alarms("D18")),
    DoctorCheck("D19", "no broker has gone without closing in order", _alarms("D19"), False),
    DoctorCheck("D20", "space on the disk of the metadata, and in etcd", _metadata_disk),
    DoctorCheck("D25", "no broker drains, unless that is meant", _alarms("D25"), False),
)
"""What `magnetar doctor` looks at, in this order."""


# -------------------------------------------------------------------------------------------------------- facts
def gather_facts(session: CommandSession, backup: str | None) -> ClusterFacts:
    """Asks the servers of the cluster for the facts that the checks need, and returns the facts. Leaves out the facts
    of a server that does not answer; while the metadata does not answer, also those that need it. `backup`: the folder
    or file with copies of the metadata; None if it is not given. Raises the error of the first request if no broker
    answers."""
    from ...proto.versions import PRODUCT

    now_ms = SystemClock().wall_ms()
    summary = read_summary(session)
    facts = ClusterFacts(
        now_ms=now_ms, brokers=[make_broker_row(asdict(each), now_ms) for each in summary.brokers],
        silent=summary.silent, refusing=summary.refusing,
        oldest=find_largest_topics(summary, "age", CHECKED_TOPICS_MAX),
        backup_ms=find_newest_file_time_ms(backup, now_ms),
        version=PRODUCT, url=session.url, metadata_away_ms=summary.metadata_away_ms, late=summary.late,
        metadata_disk=(summary.metadata_total_bytes, summary.metadata_free_bytes),
        metadata_certificate_ends_ms=summary.metadata_certificate_ends_ms,
        metadata_refusal=summary.metadata_refusal,
        metadata_backup=(
            summary.metadata_backup_ms, summary.metadata_backup_every_ms, summary.metadata_backup_failure
        ),
        metadata_late=summary.metadata_late, died=[asdict(each) for each in summary.died],
    )  # fmt: skip
    if summary.metadata_away_ms or summary.metadata_late:
        return facts
    described, unreachable = _describe(session)
    bookies, storage = session.admin.bookies(), ask_bookie_states(session, summary)
    return replace(
        facts, bookies=storage.bookies, repair=storage.repair, unasked=storage.why, unasked_refused=storage.refused,
        unlisted=storage.unlisted, described=described, unreachable=unreachable,
        reports=_reports(session) if bookies and storage.answered else {},
        racks={each.id: each.rack for each in bookies}, quorums=_read_quorums(session, summary),
        unread=_read_unread(session, summary), partitions=_read_partitions(session, summary),
    )  # fmt: skip


def _describe(session: CommandSession) -> tuple[dict[str, Row], dict[str, str]]:
    """Asks each broker at the address that look-ups answer: what it says, and why others do not, by address."""
    from ...proto.errors import MagnetarError, Unauthenticated, Unauthorized, is_unknown_operation

    described, unreachable = dict[str, Row](), dict[str, str]()
    for broker in session.admin.brokers():
        other = session.with_broker(broker.endpoint).with_timeout(BROKER_TIMEOUT_S)
        asked_ms = SystemClock().wall_ms()
        try:
            found = asdict(other.admin.describe_broker())
            described[broker.endpoint] = {**found, "askedMs": asked_ms, "answeredMs": SystemClock().wall_ms()}
        except (Unauthenticated, Unauthorized):
            raise
        except MagnetarError as error:
            if is_unknown_operation(error):
                continue  # a broker of an older version
            unreachable[broker.endpoint] = str(error)
        finally:
            other.close()
    return described, unreachable


def _reports(session: CommandSession) -> dict[str, Row]:
    from ..storage.admin_port import ask_reachable_bookies

    asked_ms = SystemClock().wall_ms()
    found = ask_reachable_bookies(session, "report")
    return {
        name: {**each, "askedMs": asked_ms, "answeredMs": SystemClock().wall_ms()} for name, each in found.items()
    }


def _read_quorums(session: CommandSession, summary: ClusterSummary) -> list[tuple[str, int, int, int]]:
    from ...proto.errors import MagnetarError

    names = sorted({each.name for broker in summary.brokers for each in broker.namespaces} | {"public/default"})
    found = []
    for name in names[:CHECKED_NAMESPACES_MAX]:
        try:
            one = session.admin.namespace_policies(name, applied=True)
        except MagnetarError:
            continue  # it was deleted meanwhile
        found.append((name, one.ensemble_size or 1, one.write_quorum or 1, one.ack_quorum or 1))
    return found


def _read_unread(session: CommandSession, summary: ClusterSummary) -> list[tuple[str, str, int, int]]:
    from ...proto.errors import MagnetarError

    found = list[tuple[str, str, int, int]]()
    for row in find_largest_topics(summary, "backlog", CHECKED_TOPICS_MAX):
        try:
            stats = session.admin.topic_stats(row["name"]) if row["backlog"] else None
        except MagnetarError:
            continue
        found += [
            (row["name"], each.name, each.backlog, each.oldest_ms)
            for each in (stats.subscriptions if stats is not None else ())
            if each.durable and each.backlog and not each.consumers
        ]
    return found


def _read_partitions(session: CommandSession, summary: ClusterSummary) -> list[Row]:
    busy = find_largest_topics(summary, "traffic", 50)
    bases = list(dict.fromkeys(
        row["name"].rpartition("-partition-")[0] for row in busy if "-partition-" in row["name"] and row["rate_in"]
    ))  # fmt: skip
    found = list[Row]()
    for base in bases[:CHECKED_BASES_MAX]:
        found += map(asdict, session.admin.topic_page(prefix=f"{base}-partition-", limit=200).topics)
    return found


def find_newest_file_time_ms(place: str | None, now_ms: int) -> int | None:
    """Returns when the newest file of the folder `place` (or the file `place` itself) was written, in ms since the
    epoch; 0 if the folder is empty or there is none, None if no `place` is given. Raises OSError if a file cannot be
    examined. A file whose time has not come yet was written while a clock was wrong, and counts only if there is no
    other one: it would be the newest for as long as it exists."""
    if place is None:
        return None
    path = Path(place)
    files = [path] if path.is_file() else [each for each in path.glob("*") if each.is_file()] if path.is_dir() else []
    times = [int(each.stat().st_mtime * 1000) for each in files]
    return max((each for each in times if each <= now_ms + SKEW_WRONG_MS), default=max(times, default=0))


# ------------------------------------------------------------------------------------------------------ offline
class DataDirectoryCheck(NamedTuple):
    """One check of a data directory. It has the fields of a `DoctorCheck`, which is a check of a running cluster."""

    code: str
    what: str
    find: Callable[[Path], Iterable[Alarm] | str]


def check_directory(directory: Path) -> tuple[list[Alarm], dict[str, str]]:
    """Runs all checks of a data directory. Returns the alarms and the states of the checks, like `run_checks`. Reads
    only those files of the directory in which bookies identify themselves; writes one file, and removes it again.
    Raises OSError if the directory does not exist."""
    findings, states = list[Alarm](), dict[str, str]()
    for check in OFFLINE_CHECKS:
        answer = check.find(directory)
        mine = [] if isinstance(answer, str) else [each._replace(code=check.code) for each in answer]
        findings += mine
        state = "wrong" if any(each.needed for each in mine) else "look" if mine else "ok"
        states[check.code] = answer if isinstance(answer, str) else state
    return sorted(findings, key=lambda each: (not each.needed, each.code)), states


def _space(directory: Path) -> Iterator[Alarm]:
    import shutil

    usage = shutil.disk_usage(directory)
    free = usage.free / usage.total if usage.total else 1.0
    if free < DISK_FREE_LOW:
        text = f"The disk of {directory} has {free:.0%} left ({usage.free >> 20:,} MiB); at 5 % a bookie is read-only."
        yield Alarm(text, f"df -h {directory}", needed=free < DISK_FREE_CRITICAL)


def _measured_sync(directory: Path) -> Iterable[Alarm] | str:
    try:
        took = measure_sync_time_s(directory)
    except OSError as error:
        return f"{directory} takes no file: {error.strerror}"
    if took <= SYNC_SLOW_S:
        return ()
    text = f"A write and a sync on the disk of {directory} take {took * 1000:.0f} ms (the slowest but one of {SYNCS})."
    return (Alarm(text, "iostat -x 1", needed=took > SYNC_WRONG_S),)


def measure_sync_time_s(directory: Path) -> float:
    """Measures how long it takes to write 4 KiB to a file in the directory and to sync the file. Repeats this SYNCS
    times, and returns the second longest time, in seconds. Deletes the file at the end. Raises OSError if the directory
    takes no file."""
    name = directory / f".magnetar-doctor-{os.getpid()}"
    clock, took = SystemClock(), list[float]()
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for _ in range(SYNCS):
            began = clock.monotonic()
            os.write(descriptor, bytes(4096))
            os.fsync(descriptor)
            took.append(clock.monotonic() - began)
    finally:
        os.close(descriptor)
        name.unlink()
    return sorted(took)[-2]


def _own_files(directory: Path) -> Iterator[Alarm]:
    from ...runtime.descriptors import raise_files_limit

    if (limit := raise_files_limit()) < DESCRIPTORS_ENOUGH:
        text = f"A process of this shell may have {limit:,} files open; {DESCRIPTORS_ENOUGH:,} are few for a server."
        yield Alarm(text, "ulimit -Hn")


def _whole(directory: Path) -> Iterable[Alarm] | str:
    from ...bookie.inspect.snapshot import list_ledgers_directories, snapshot_directory
    from ...proto.errors import NotFound
    from ...runtime.process import make_system_world

    files = make_system_world().files
    homes = [directory, *sorted(each for each in directory.glob("bookie-*") if each.is_dir())]
    places = [place for home in homes for place in list_ledgers_directories(files, str(home))]
    found, seen = list[Alarm](), 0
    for place in places:
        try:
            snapshot = snapshot_directory(files, place)
        except NotFound:
            continue
        seen += 1
        for path, offset, reason in snapshot.damages:
            text = f"{path} is damaged at offset {offset}: {reason}"
            found.append(Alarm(text, f"magnetar bookie inspect store {place}"))
        for reason in snapshot.reasons:
            found.append(Alarm(f"{place} will start in limbo: {reason}", f"magnetar bookie inspect store {place}"))
    return found if seen else f"{directory} is not, and has not, a directory of a bookie"


OFFLINE_CHECKS = (
    DataDirectoryCheck("D21", "space on the disk", _space),
    DataDirectoryCheck("D22", "how long a write and its sync take, measured", _measured_sync),
    DataDirectoryCheck("D23", "a process may have enough files open", _own_files),
    DataDirectoryCheck("D24", "cookie and mark of the bookies there are whole, and none is in limbo", _whole),
)
"""What `magnetar doctor --offline DIR` looks at, in this order."""


# ------------------------------------------------------------------------------------------------------ command
@click.command()
@click.option("--backup", default=None, metavar="DIR", help="Where backups of the metadata are: checks their age.")
@click.option(
    "--offline", default=None, metavar="DIR", type=click.Path(exists=True, file_okay=False),
    help="Ask no server: look at this data directory.",
)  # fmt: skip
@with_operator_and_watch_options
def doctor(session: CommandSession, backup: str | None, offline: str | None) -> None:
    """Run all checks of the cluster, and show what is wrong and which command helps.

    Exit code 1 if something is wrong. A finding that is marked with - may be intended, or can wait.

    \b
    Examples:
      magnetar doctor
      magnetar doctor --backup /var/backups/magnetar -o json
      magnetar doctor --offline /var/lib/magnetar
    """
    if offline is not None and backup is not None:
        raise click.UsageError("--offline looks at one directory: leave --backup out")
    if offline is not None:
        findings, states = check_directory(Path(offline))
        names = {check.code: check.what for check in OFFLINE_CHECKS}
    else:
        findings, states = run_checks(gather_facts(session, backup))
        names = {check.code: check.what for check in CHECKS}
    checks = [{"code": code, "state": _short(state), "check": names[code], "why": _why(state)}
              for code, state in states.items()]  # fmt: skip
    if session.out.is_structured:
        session.out.print_document({"checks": checks, "findings": [each._asdict() for each in findings]})
    else:
        session.out.print_rows(checks, ("code", "state", "check"))
        click.echo()
        for each in findings:
            click.echo(f"{'!' if each.needed else '-'} {each.code} {each.text}  {each.command}")
        for one in checks:
            if one["why"]:
                click.echo(f"? {one['code']} not known: {one['why']}")
        if not findings:
            click.echo("Nothing is wrong.")
    if any(each.needed for each in findings):
        sys.exit(FAILED)


CHECK_STATES = ("ok", "look", "wrong")


def _short(state: str) -> str:
    return state if state in CHECK_STATES else "not known"


def _why(state: str) -> str | None:
    return None if state in CHECK_STATES else state
