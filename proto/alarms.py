"""The alarms of a cluster: which states an operator should look at. `magnetar status`, `magnetar doctor` and the page
share these rules.

The functions decide only from plain records, which each of the three gets in its own way. Guarding tests:
tests/cli/test_status.py.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

BUSY_LOOP_SHARE = 0.85
"""An event loop that is busy for more than this share of its time has no room for a burst."""
DISK_FREE_LOW = 0.15
"""If less than this share of a bookie's disk is free, there is an alarm. At 5 % the bookie is read-only."""
METADATA_DISK_FREE_LOW = 0.05
"""If less than this share of the metadata's disk is free, an operator must act; below DISK_FREE_LOW it can wait."""
BACKUP_GRACE_MS = 60_000
"""Milliseconds that a copy of the metadata may take before it counts as late."""
CLOCKS_S = 5.0
"""Seconds by which the clocks of two machines may differ unnoticed."""
OLD_MESSAGE_S = 3600.0
"""If the oldest message of a topic is unacknowledged for longer than this, in seconds, there is an alarm."""
TOKEN_WARNING_MS, TOKEN_CRITICAL_MS = 14 * 86_400_000, 86_400_000
"""When a broker's own token ends within TOKEN_WARNING_MS, there is an alarm; within TOKEN_CRITICAL_MS an operator must
act."""
DEFAULT_COPIES = 3
"""Bookies that a ledger needs for all its copies, unless a namespace says otherwise."""
OLD_TOPICS_MAX = 5
"""The largest number of topics with old messages for which there is an alarm."""


METADATA_HEALTH_COMMAND = "magnetar health --http http://HOST:PORT  # of a metadata server: its --health address"
"""The command that asks the metadata itself. A broker does not know where metadata servers answer for their health."""
NEW_TOKEN_COMMAND = (
    "magnetar security token create --folder DIR --role broker --days 90 --out DIR/broker.token --replace"
)

NEW_CERTIFICATE_COMMAND = "magnetar security certificate --folder DIR  # of a member: magnetar security member"


class Alarm(NamedTuple):
    """An alarm: something in the cluster that an operator should look at, and the command that helps. Names in the
    command are quoted for a shell, because clients choose them. `needed`: an operator must act; False: it can wait, and
    the exit code of the command line is not 1. `code`: the code of the check (docs/operations.md)."""

    text: str
    command: str
    needed: bool = True
    code: str = ""


def find_alarms(
    brokers: Sequence[Mapping[str, Any]], silent: Sequence[str], bookies: Sequence[Mapping[str, Any]],
    oldest: Sequence[Mapping[str, Any]], now_ms: int, refusing: Collection[str] = (), late: Collection[str] = (),
    died: Iterable[Mapping[str, Any]] = (),
) -> list[Alarm]:  # fmt: skip
    """Returns all alarms of a cluster except those of repair; those that need an operator come first.

    Each of `brokers` has the fields `broker`, `busy` (the share of the time for which its event loop computes, 0 to 1;
    None: not known), `degraded` (how many of its topics write fewer copies than asked for), `tokenEndsMs` and
    `certificateEndsMs` (0: no end), `draining`, and `full`, the topics that accept no publishes. Each of `bookies` has
    `bookie`, `state`, `freeBytes` and `totalBytes`, and if they are known `ledgers`, `gcRefused`, `certificateEndsMs`
    `disk`, the state of its disk, and `directories`, those of several: each with `path`, `disk`, `readOnly` and, if its
    disk failed, `failure`. Of `oldest`, topics with their `name` and `oldest_ms`, the first OLD_TOPICS_MAX
    are considered. `silent` are the brokers that did not answer; `refusing` are those of them that refused the own
    token or certificate of the broker that was asked. `late` are those of `brokers` that answered only when they were
    asked again. Each of `died` has `name`, `endpoint` and `seen_ms`. Times are in ms since the epoch."""
    found = []
    for name in late:
        text = f"Broker {name} answers late: only when it was asked again."
        found.append(Alarm(text, "magnetar brokers list", needed=False, code="D01"))
    for name in silent:
        text, helps = f"Broker {name} is registered and does not answer.", "magnetar brokers list"
        if name in refusing:
            text = (
                f"Broker {name} refuses the own token or certificate of the broker that was asked: ended, revoked, or"
                " without the right."
            )
            helps = NEW_TOKEN_COMMAND if any(each["tokenEndsMs"] for each in brokers) else "magnetar security --help"
        found.append(Alarm(text, helps, code="D01"))
    for each in died:
        seen = f"{datetime.fromtimestamp(each['seen_ms'] / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
        text = (
            f"Broker {each['name']} ({each['endpoint']}) is not seen since {seen} "
            f"({format_age((now_ms - each['seen_ms']) / 1000)} ago): it died, or closed while the metadata was away. "
            "Start it again, or forget it if it was removed, or is back at another address."
        )
        found.append(Alarm(text, f"magnetar brokers forget {each['name']}", code="D19"))
    for each in brokers:
        found += _alarms_of_broker(each, now_ms)
    writable = [each for each in bookies if each["state"] == "writable"]
    if not writable:
        found.append(Alarm("No bookie takes writes: nothing can be published.", "magnetar bookies list", code="D03"))
    for each in bookies:
        found += _alarms_of_bookie(each, now_ms)
    degraded = sum(each["degraded"] for each in brokers)
    if degraded:
        found.append(_make_degraded_alarm(degraded, is_any_away=len(writable) < max(DEFAULT_COPIES, len(bookies))))
    for each in oldest[:OLD_TOPICS_MAX]:
        age_s = (now_ms - each["oldest_ms"]) / 1000 if each["oldest_ms"] else 0.0
        if age_s > OLD_MESSAGE_S:
            text = f"The oldest message of {each['name']} has not been acknowledged for {format_age(age_s)}."
            found.append(Alarm(text, f"magnetar why {shlex.quote(each['name'])}", needed=False, code="D12"))
    return sorted(found, key=lambda alarm: not alarm.needed)


def _make_degraded_alarm(degraded: int, *, is_any_away: bool) -> Alarm:
    """Returns the alarm that topics write fewer copies; a remark once all bookies take writes again, as after each
    restart of a bookie, because the next ledgers have all copies."""
    text = f"{format_count(degraded, 'topic')} write{'s' if degraded == 1 else ''} fewer copies than asked for"
    if not is_any_away:
        text += ", and all copies again with their next ledgers, as all bookies take writes"
    return Alarm(f"{text}.", "magnetar bookies list", needed=is_any_away, code="D05")


def _alarms_of_broker(broker: Mapping[str, Any], now_ms: int) -> Iterable[Alarm]:
    name = broker["broker"]
    if broker["busy"] is not None and broker["busy"] > BUSY_LOOP_SHARE:
        text = f"The event loop of broker {name} is busy {broker['busy']:.0%} of its time."
        yield Alarm(text, "magnetar top --by traffic", code="D02")
    left_ms = broker["tokenEndsMs"] - now_ms
    if broker["tokenEndsMs"] and left_ms < TOKEN_WARNING_MS:
        ends = f"ends in {format_age(left_ms / 1000)}" if left_ms > 0 else "has ended"
        text = f"The own token of broker {name} {ends}: no other broker answers it then."
        yield Alarm(text, NEW_TOKEN_COMMAND, needed=left_ms < TOKEN_CRITICAL_MS, code="D16")
    yield from find_certificate_alarms(f"broker {name}", broker["certificateEndsMs"], now_ms)
    if broker["draining"]:
        text = f"Broker {name} drains: it gives away what it owns, and gets nothing until that is ended."
        yield Alarm(text, f"magnetar brokers undrain {shlex.quote(name)}", needed=False, code="D25")
    for topic in broker["full"]:
        text = f"{topic} takes no publishes: the backlog of its slowest subscription is above the quota."
        yield Alarm(text, f"magnetar why {shlex.quote(topic)}", code="D17")


def find_certificate_alarms(what: str, ends_ms: int | None, now_ms: int) -> list[Alarm]:
    """Returns the alarm that a certificate of the server `what` ends within TOKEN_WARNING_MS or has ended; [] if it
    ends later. `ends_ms` is in ms since the epoch; 0 or None: there is no certificate."""
    left_ms = (ends_ms or 0) - now_ms
    if not ends_ms or left_ms >= TOKEN_WARNING_MS:
        return []
    ends = f"ends in {format_age(left_ms / 1000)}" if left_ms > 0 else "has ended"
    text = f"A certificate of {what} {ends}: no new connection is made then."
    return [Alarm(text, NEW_CERTIFICATE_COMMAND, needed=left_ms < TOKEN_CRITICAL_MS, code="D16")]


def _alarms_of_directories(name: str, bookie: Mapping[str, Any]) -> Iterable[Alarm]:
    """Yields the alarms of single ledgers directories of a bookie that has several."""
    for each in bookie.get("directories") or ():
        if each["disk"] == "failed":
            text = (
                f"The disk with {each['path']} of bookie {name} failed: its ledgers are copied to other bookies, and "
                f"the bookie serves the others ({each['failure']}). Restart the bookie with a good disk."
            )
            yield Alarm(text, "magnetar bookies state", code="D04")
        elif each["readOnly"] and bookie["state"] == "writable":
            text = f"{each['path']} of bookie {name} takes no writes, its disk is {each['disk']}; its other disks do."
            yield Alarm(text, "magnetar bookies state", code="D04")


def _alarms_of_bookie(bookie: Mapping[str, Any], now_ms: int) -> Iterable[Alarm]:
    name, state = bookie["bookie"][:8], bookie["state"]
    yield from find_certificate_alarms(f"bookie {name}", bookie.get("certificateEndsMs"), now_ms)
    yield from _alarms_of_directories(name, bookie)
    free = bookie["freeBytes"] / bookie["totalBytes"] if bookie["totalBytes"] else 1.0
    if state != "limbo" and (reason := bookie.get("gcRefused")):
        text = f"Bookie {name} deletes nothing of some ledgers: {reason}."
        yield Alarm(text, "magnetar bookies gc --plan", code="D18")
    if state == "absent" and bookie.get("ledgers") == 0:
        text = f"Bookie {name} is not registered, and no ledger names it: forget it, or start it again."
        yield Alarm(text, f"magnetar bookies forget {name}", needed=False, code="D03")
    elif state in ("read-only", "limbo", "absent"):
        why = {
            "read-only": f"is read-only, with {free:.0%} of its disk free (disk_full_share says when)",
            "limbo": "lost data, and looks for it at other bookies", "absent": "is not registered, and ledgers name it",
        }  # fmt: skip
        yield Alarm(f"Bookie {name} {why[state]}.", "magnetar bookies state", code="D03")
    elif free < DISK_FREE_LOW and not bookie.get("directories"):
        text = f"The disk of bookie {name} has {free:.0%} left; at 5 % it is read-only."
        yield Alarm(text, "magnetar bookies list", code="D04")
    elif bookie.get("disk") == "tight":
        text = (
            f"The disk of bookie {name} is {1 - free:.0%} used, which is disk_warn_share or more: it runs no major"
            " compaction. Free space, or add bookies."
        )
        yield Alarm(text, "magnetar bookies state", needed=False, code="D04")


def find_metadata_alarms(away_ms: int, now_ms: int, *, late: bool = False) -> list[Alarm]:
    """Returns the alarm that the metadata does not answer, or the less urgent one that it answers late; [] if it
    answers. The alarm comes before all others. `away_ms`: when the metadata answered last, in ms since the epoch; 0: it
    answers, or is `late`: it did not answer in time, but has been silent for a few seconds at most."""
    if away_ms:
        since = datetime.fromtimestamp(away_ms / 1000, UTC)
        text = (
            f"The metadata does not answer since {since:%Y-%m-%d %H:%M:%S} UTC "
            f"({format_age((now_ms - away_ms) / 1000)}): topics that have an owner are served, and what is shown is "
            "what the broker that was asked knew last."
        )
        return [Alarm(text, METADATA_HEALTH_COMMAND, code="D00")]
    if late:
        text = (
            "The metadata answers late: what is shown is what the broker that was asked knew last, and bookies were "
            "not asked."
        )
        return [Alarm(text, METADATA_HEALTH_COMMAND, needed=False, code="D00")]
    return []


def find_metadata_disk_alarms(total_bytes: int, free_bytes: int) -> list[Alarm]:
    """Returns the alarm that the disk with the metadata is nearly full; [] if it has room, or if its size is not known
    (`total_bytes` 0). A metadata server with a full disk makes no changes: nothing can be created, changed or taken
    over."""
    if not total_bytes or (free := free_bytes / total_bytes) >= DISK_FREE_LOW:
        return []
    text = (
        f"The disk of the metadata has {free:.0%} left ({free_bytes >> 20:,} MiB): when it is full nothing is made, "
        "changed or taken over. Free space there, or enlarge it."
    )
    helps = "df -h .  # in the folder of the metadata server"
    return [Alarm(text, helps, needed=free < METADATA_DISK_FREE_LOW, code="D20")]


def find_metadata_refusal_alarms(refusal: str) -> list[Alarm]:
    """Returns the alarm that the metadata refuses commits, because etcd is full; [] if `refusal` is ""."""
    if not refusal:
        return []
    text = f"The metadata refuses commits, so nothing is made, changed or taken over: {refusal}."
    return [Alarm(text, "etcdctl alarm list", code="D20")]


def find_backup_alarms(made_ms: int, every_ms: int, failure: str, now_ms: int) -> list[Alarm]:
    """Returns the alarm that the scheduled copies of the metadata fail, or are late; [] if all is well, or none are
    scheduled (`every_ms` 0). `made_ms`: when the last copy was made, in ms since the epoch; 0: never. `failure`: why
    the last scheduled one failed; "": it did not. An operator must act if two copies in a row are missing."""
    age_ms = now_ms - made_ms
    is_late = age_ms > 2 * every_ms + BACKUP_GRACE_MS
    if not every_ms or not (failure or (is_late and made_ms)):
        return []
    newest = describe_backup_age(made_ms, now_ms)
    why = f"fail: {failure}" if failure else "are late"
    text = f"The scheduled copies of the metadata (every {format_age(every_ms / 1000)}) {why}. The newest {newest}."
    return [Alarm(text, "df -h  # on the machine of the metadata, whose log says more", needed=is_late, code="D15")]


def describe_backup_age(made_ms: int, now_ms: int) -> str:
    """Returns what is known of the newest copy of the metadata, as the end of a sentence, such as "is 3 h old"."""
    if not made_ms:
        return "does not exist"
    age_s = (now_ms - made_ms) / 1000
    if age_s < -CLOCKS_S:
        return f"has a time {format_age(-age_s)} from now: a clock was wrong, and its age is not known"
    return f"is {format_age(age_s)} old"


def find_repair_alarms(
    repair: Mapping[str, Any] | None, why: str = "", *, refused: bool = False, unlisted: str = ""
) -> list[Alarm]:  # fmt: skip
    """Returns the alarms about repair. `repair` is a bookie's answer to `repair-status`; None: no bookie answered, and
    `why` says why. `refused`: bookies do not answer this caller, which is no fault of the cluster. `unlisted`: why it
    is not known which bookies the ledgers name."""
    found = list[Alarm]()
    if unlisted:
        text = f"Whether ledgers name bookies that are not registered is not known: {unlisted}."
        found.append(Alarm(text, "magnetar bookies list", needed=False, code="D03"))
    if repair is None and refused:
        text = f"Bookies and repair were not asked: {why}."
        helps = "magnetar status --security FILE --metadata HOST:PORT"
        return [*found, Alarm(text, helps, needed=False, code="D05")]
    if repair is None:
        text = f"No bookie says how repair gets on{f': {why}' if why else ''}."
        return [*found, Alarm(text, "magnetar bookies list", code="D05")]
    if count := repair["underReplicated"]:
        found.append(_make_missing_copies_alarm(count, repair))
    if not repair["enabled"]:
        text = "Auto-recovery is disabled: copies of lost bookies are not made again."
        found.append(Alarm(text, "magnetar repair enable", code="D05"))
    return found


def _make_missing_copies_alarm(count: int, repair: Mapping[str, Any]) -> Alarm:
    """Returns the alarm that copies of `count` ledgers are missing; a remark if all of them move off a departing
    bookie, as an operator has ordered, and none is stuck. An older bookie says neither reasons nor what is stuck."""
    stuck, helps = repair.get("stuck") or {}, "magnetar ledgers under-replicated"
    if not stuck and set(repair.get("reasons") or ()) == {"departing"}:
        text = f"{format_count(count, 'ledger')} still move{'s' if count == 1 else ''} off departing bookies."
        return Alarm(text, helps, needed=False, code="D05")
    why = ", ".join(f"{number}: {what}" for what, number in stuck.items())
    text = f"{format_count(count, 'ledger')} miss{'es' if count == 1 else ''} copies{f' ({why})' if why else ''}."
    return Alarm(text, helps, code="D05")


def format_age(seconds: float) -> str:
    """Returns a duration in seconds as text, rounded down in its largest unit, such as "3 h"; "0 s" for a negative one.
    """
    for size, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{int(seconds // size)} {name}"
    return f"{max(0, int(seconds))} s"


def format_count(number: int, what: str) -> str:
    """Returns a number with the word for what it counts, such as "2 ledgers". `what` is the word for one; for another
    number it gets an "s"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
