"""`magnetar topics find|trace|letters|redrive`: the commands that search messages of a topic, explain what became of
one, count dead letters, and send them back.

On a partitioned topic each verb is applied to every partition, at its owner.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click import option

from ...proto.alarms import format_count
from ...proto.names import ERROR, ERROR_CONSUMER, ERROR_MESSAGE, REAL_SUBSCRIPTION, REAL_TOPIC
from ..common.exits import INCOMPLETE, NOT_FOUND, CommandFailure
from ..common.output import (
    RAW_OPTION,
    format_message_id,
    make_printed_stored_message,
    print_consumed_message,
    show_progress,
)
from ..common.session import CommandSession, confirm_deletion, session_command
from ..common.units import FiniteNumber, parse_message_id
from .topics import full_name

if TYPE_CHECKING:
    from ...client.admin import StoredMessage
    from ...client.model.message_id import MessageId
    from ...client.redrive import RedriveOptions, RedriveResult

DEFAULT_FOUND_LIMIT = 100
"""Messages that are shown unless -n says otherwise."""
LETTER_SEARCHES_MAX = 20
"""Partitions of letter topics that a trace looks into: a search may take 10 s."""


@session_command(
    option("-k", "--key", default="", help="With this key."),
    option("-p", "--property", "property_", default="", help="With this property: NAME or NAME=VALUE."),
    option("--text", default="", help="Whose payload contains this."),
    option("--where", default="", help="For which this filter holds: \"price > 10 AND region = 'eu'\"."),
    option("--since", default=None, help="Stored since then: 10m (ago), 2026-11-21T09:30, or milliseconds."),
    option("--until", default=None, help="Stored before."),
    option(
        "-n",
        "--count",
        type=click.IntRange(1),
        default=DEFAULT_FOUND_LIMIT,
        show_default=True,
        help="Show at most so many.",
    ),
    option("--before", type=click.IntRange(1), default=None, help="Go on below this index, of one partition."),
    option("--all", "everything", is_flag=True, help="Look at everything, however long it takes."),
    RAW_OPTION,
    option("--dry-run", is_flag=True, help="Say only what would be read, by the key indexes."),
)
def find(
    session: CommandSession, topic: str, key: str, property_: str, text: str, where: str, since: str | None,
    until: str | None, count: int, before: int | None, everything: bool, dry_run: bool, raw: bool,
) -> None:  # fmt: skip
    """Show the messages of a topic that have a key, a property or a text, or for which a filter holds, the newest
    first. Each is shown after its id, time, key and properties. Messages of several partitions are in the order of
    their publication times. No subscription is needed or changed.

    Of each partition the command looks at the newest 100,000 messages, at 64 MiB, or for 10 s. Its last line on
    standard error says how far it got. Messages of which the key indexes of a topic (policy key-index) say that they
    cannot fit, by key, property or filter, are passed over unread and do not count. Exit codes: 0 some were found; 4
    everything was looked at and none found; 6 none was found, and not everything was looked at.

    \b
    Examples:
      magnetar topics find orders --key customer-7
      magnetar topics find orders --where "total > 100 AND region IN ('eu', 'us')" --since 2h -o wide
      magnetar topics find orders --text 4711 --all -o jsonl
    """
    from ...runtime.clock import SystemClock
    from ..common.units import parse_moment_ms

    now_ms = SystemClock().wall_ms()
    search = partial(
        session.admin.find_messages, key=key, property=property_, text=text, where=where,
        since_ms=parse_moment_ms(since, now_ms) if since else 0,
        until_ms=parse_moment_ms(until, now_ms) if until else 0, dry_run=dry_run,
    )  # fmt: skip
    parts = session.admin.parts(topic)
    if before is not None and len(parts) > 1:
        raise click.UsageError("--before goes on in one partition: give its name")
    messages: list[StoredMessage] = []
    looked_at = unread = waiting = skipped = ledgers = unindexed = read_bytes = 0
    left: list[str] = []  # what was not looked at
    with show_progress("messages looked at", None) as progress:
        for part in parts:
            below, wanted = before or 0, count
            while wanted:
                found = search(part, before_index=below, limit=min(DEFAULT_FOUND_LIMIT, wanted))
                messages += found.messages
                wanted -= len(found.messages)
                looked_at += found.looked_at
                unread += found.unread
                waiting += found.waiting
                skipped += found.skipped
                ledgers += found.ledgers
                unindexed += found.unindexed_ledgers
                read_bytes += found.bytes
                progress(looked_at)
                below = found.before_index
                if not below:
                    break
                if not wanted or (not everything and not dry_run and len(found.messages) < DEFAULT_FOUND_LIMIT):
                    why = f"{format_count(count, 'message')} found (-n)" if not wanted else found.why
                    left.append(f"{part} below index {below}: {why}; with its name --before {below} goes on")
                    break
    if len(parts) > 1:
        messages.sort(key=lambda each: -each.publish_time_ms)
    for message in messages[:count]:
        print_consumed_message(make_printed_stored_message(message), session.out, described=True, raw=raw)
    said = [f"looked at {format_count(looked_at, 'message')} of {full_name(topic)}"]
    if dry_run:
        said = [f"would look at {format_count(looked_at, 'message')} ({read_bytes:,} bytes) of {full_name(topic)}"]
    if ledgers:
        said.append(
            f"passed over {format_count(skipped, 'message')} by key indexes; {unindexed:,} of {ledgers:,} ledgers are "
            "without an index"
        )
    if unread:
        said.append(f"not into {unread:,} of them, which are encrypted, chunks or too large")
    if waiting:
        said.append(
            f"{format_count(waiting, 'more message')} come after the begin of an open transaction, and nobody gets "
            "them before it ends: 'magnetar transactions list'"
        )
    missed = bool(left or unread or waiting)
    said += [f"not looked at: {each}" for each in left]
    if not messages and not dry_run:
        said[0] += ": none of them fits"
        raise CommandFailure("; ".join(said), INCOMPLETE if missed else NOT_FOUND)
    click.echo("\n".join(said), err=True)


def _named_message(session: CommandSession, topic: str, message_id: str) -> tuple[str, dict[str, int]]:
    """Returns the partition of a message, and the parts of its id that operations take."""
    wanted = parse_message_id(message_id)
    parts = session.admin.parts(topic)
    if len(parts) > 1:
        if not 0 <= (partition := wanted.partition()) < len(parts):
            raise click.UsageError("of a topic with partitions the id is LEDGER:ENTRY:PARTITION, or name the partition")
        parts = parts[partition : partition + 1]
    return parts[0], {
        "ledger_id": wanted.ledger_id(), "entry_id": wanted.entry_id(), "batch_index": wanted.batch_index()
    }


@session_command()
def cancel_delayed(session: CommandSession, topic: str, message_id: str) -> None:
    """Cancel a delayed message: it counts as acknowledged for every subscription, and no consumer gets it. Refused when
    its time has come, or a subscription has got it already. Who may produce to the topic may do this.

    Example: magnetar topics cancel-delayed orders 17:3
    """
    part, parts_of_id = _named_message(session, topic, message_id)
    found = session.admin.cancel_delayed(part, **parts_of_id)
    if session.out.is_structured:
        session.out.print_document({"topic": part, **asdict(found)})
        return
    click.echo(f"message {message_id} of {part} is cancelled for {format_count(len(found.cancelled), 'subscription')}")
    for name in found.acknowledged:
        click.echo(f"subscription {name} had acknowledged it already")


@session_command()
def trace(session: CommandSession, topic: str, message_id: str) -> None:
    """Show what has become of a message: whether the topic has it, and for each subscription whether it is
    acknowledged, delivered, delayed, held back, or waits. MESSAGE_ID is an id as other commands print it.

    For a subscription that has acknowledged the message, the command also searches the dead-letter topic and the retry
    topic, and says which letter the message has become. Of each partition it searches the newest 100,000 messages, as
    find does. Standard error says what was not searched.

    Example: magnetar topics trace orders 17:3
    """
    wanted = parse_message_id(message_id)
    part, parts_of_id = _named_message(session, topic, message_id)
    found = session.admin.trace_message(part, **parts_of_id)
    rows = [{"topic": part, **asdict(each), "letter": None} for each in found.subscriptions]
    is_gone = found.stored.startswith("The topic has no such message: ")
    rows += [
        {"topic": part, "subscription": name, "state": "", "detail": "", "letter": None}
        for name in (session.admin.subscriptions(part) if is_gone else ())
    ]  # fmt: skip
    unseen = _add_letters(session, [each for each in rows if each["state"] in ("acknowledged", "")], wanted)
    rows = [each for each in rows if each["state"]]
    if session.out.is_structured:
        session.out.print_document({"stored": found.stored, "subscriptions": rows, "notLookedAt": unseen})
        return
    click.echo(found.stored)
    if rows:
        session.out.print_rows(rows, ("subscription", "state", "detail"))
    for each in unseen:
        click.echo(f"not looked at: {each}", err=True)


def _add_letters(session: CommandSession, rows: Sequence[dict[str, Any]], wanted: MessageId) -> list[str]:
    """Looks for the letter that the message `wanted` has become for the subscription of each row, and puts it into the
    row. Returns what was not looked at, and why."""
    from ...proto.errors import InvalidName, MagnetarError, NotFound

    unseen, searches = list[str](), 0
    for row in rows:
        where = _make_origin_filter(wanted, row["subscription"])
        for state, topic in _list_letter_topics(session, row["topic"], row["subscription"]):
            try:
                for part in session.admin.parts(topic):
                    if row["letter"] is None:
                        searches += 1
                        if searches > LETTER_SEARCHES_MAX:
                            return [*unseen, f"{part} and the letter topics after it: {LETTER_SEARCHES_MAX} are enough"]
                        unseen += _add_letter(session, row, state, part, where)
            except (NotFound, InvalidName):
                continue
            except MagnetarError as error:
                unseen.append(f"{topic}: {error.message}")
    return unseen


def _add_letter(session: CommandSession, row: dict[str, Any], state: str, part: str, where: str) -> list[str]:
    """Puts the newest letter in `part` that fits into the row. Returns what was not looked at."""
    found = session.admin.find_messages(part, where=where, limit=1)
    for letter in found.messages:
        place = format_message_id(letter.message_id)
        redriven = _is_redriven(session, part, letter.message_id)
        row["letter"] = {"topic": part, "messageId": place, "index": letter.index, "redriven": redriven}
        row["state"], row["detail"] = state, f"It is message {place} of {part}, index {letter.index}."
        if redriven:
            row["detail"] += " It went back from there: 'topics redrive'."
        return []
    left = [f"{part} below index {found.before_index}: {found.why}"] if found.before_index else []
    for number, why in ((found.unread, "too large or damaged"), (found.waiting, "after the begin of a transaction")):
        if number:
            left.append(f"{format_count(number, 'message')} of {part}: {why}")
    return left


def _is_redriven(session: CommandSession, part: str, letter: MessageId) -> bool:
    """Returns whether the letter went back: `redrive` acknowledges it with its copy."""
    from ...client.redrive import REDRIVE_SUBSCRIPTION

    place = {"ledger_id": letter.ledger_id(), "entry_id": letter.entry_id(), "batch_index": letter.batch_index()}
    states = {each.subscription: each.state for each in session.admin.trace_message(part, **place).subscriptions}
    return states.get(REDRIVE_SUBSCRIPTION) == "acknowledged"


def _list_letter_topics(session: CommandSession, topic: str, subscription: str) -> Iterator[tuple[str, str]]:
    """Yields what a message of the subscription is in which letter topic. A topic that a program chose is not known."""
    from ...proto.errors import MagnetarError
    from ...proto.names import DEAD_LETTERS, RETRIES, TopicName, make_letter_topic_name

    base = TopicName.parse(topic).base
    with suppress(MagnetarError):  # who may not read policies looks under the usual names
        if chosen := session.admin.topic_policies(base.full, applied=True).dead_letter_topic:
            yield "dead letter", chosen
    yield "dead letter", make_letter_topic_name(base, subscription, DEAD_LETTERS).full
    yield "retried", make_letter_topic_name(base, subscription, RETRIES).full


def _make_origin_filter(wanted: MessageId, subscription: str) -> str:
    """Returns the filter of the letters that a message of the subscription became. ORIGIN_MESSAGE_ID is `(17,3,-1,0)`,
    or `17:3:-1:0` from Pulsar's Java client; without a batch index any message of the entry fits."""
    from ...proto.names import ORIGIN_MESSAGE_ID, REAL_SUBSCRIPTION

    ledger, entry, index = wanted.ledger_id(), wanted.entry_id(), wanted.batch_index()
    ours, javas = ("%)", "%") if index < 0 else (f"%,{index})", f"%:{index}")
    quoted = subscription.replace("'", "''")
    return (
        f"{REAL_SUBSCRIPTION} = '{quoted}' AND ({ORIGIN_MESSAGE_ID} LIKE '({ledger},{entry},{ours}' "
        f"OR {ORIGIN_MESSAGE_ID} LIKE '{ledger}:{entry}:{javas}')"
    )


GROUP_PROPERTIES = {"error": ERROR, "consumer": ERROR_CONSUMER, "subscription": REAL_SUBSCRIPTION, "topic": REAL_TOPIC}
"""What letters are grouped by: the name of the option's value → the property of a letter."""
REDRIVEN_MAX = 10_000
"""Letters of which `letters` asks an older broker whether they went back, one request each; others say it with the
letters. It asks only where a redrive has run."""
GROUPS_MAX = 1000
"""Groups that are counted by themselves; the letters of others are counted together."""


@dataclass
class _LetterGroup:
    group: str
    where: str
    letters: int = 0
    went_back: int = 0
    oldest_ms: int = 0
    newest_ms: int = 0
    sample: str = ""
    message: str = ""

    def add(self, letter: StoredMessage) -> None:
        self.letters += 1
        self.oldest_ms = min(self.oldest_ms or letter.publish_time_ms, letter.publish_time_ms)
        if letter.publish_time_ms >= self.newest_ms:
            self.newest_ms = letter.publish_time_ms
            self.sample = make_printed_stored_message(letter).message_id
            self.message = letter.properties.get(ERROR_MESSAGE, "")

    def as_row(self) -> dict[str, Any]:
        times = {"oldest": self.oldest_ms, "newest": self.newest_ms}
        row = asdict(self)
        row["wentBack"] = row.pop("went_back")
        return row | {
            name: datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds") for name, ms in times.items()
        }


@session_command(
    option(
        "--group-by",
        type=click.Choice(tuple(GROUP_PROPERTIES)),
        default="error",
        show_default=True,
        help="What is counted.",
    ),
    option("--where", default="", help="Only those for which this filter holds."),
)
def letters(session: CommandSession, topic: str, group_by: str, where: str) -> None:
    """Count the letters of a dead-letter topic by the class of their last error: how many, since when, until when, and
    the id and text of the newest. Letters without an error are one group. The letters stay in the topic. The column
    "wentBack" counts the letters that 'topics redrive' has sent back already.

    The column "where" is the filter for the letters of this group: for 'topics find' and 'topics redrive'.

    \b
    Examples:
      magnetar topics letters orders-billing-DLQ --group-by error
      magnetar topics redrive orders-billing-DLQ --where "ERROR = 'TimeoutError'" --dry-run
    """
    from ...client.redrive import REDRIVE_SUBSCRIPTION

    name, groups, unread, unasked = GROUP_PROPERTIES[group_by], dict[str | None, _LetterGroup](), 0, 0
    asks = REDRIVEN_MAX
    with show_progress("letters", None) as progress:
        for part in session.admin.parts(topic):
            below, is_redriven = None, REDRIVE_SUBSCRIPTION in session.admin.subscriptions(part)
            while below is None or below:
                found = session.admin.find_messages(
                    part, where=where, before_index=below or 0, limit=DEFAULT_FOUND_LIMIT,
                    acked_by=REDRIVE_SUBSCRIPTION if is_redriven else "",
                )  # fmt: skip
                below, unread = found.before_index, unread + found.unread
                for letter in found.messages:
                    group = _group_of(groups, name, letter.properties.get(name))
                    group.add(letter)
                    if letter.is_acknowledged is not None:
                        group.went_back += letter.is_acknowledged
                    elif is_redriven and asks:  # an older broker
                        asks -= 1
                        group.went_back += _is_redriven(session, part, letter.message_id)
                    elif is_redriven:
                        unasked += 1
                progress(sum(each.letters for each in groups.values()))
    rows = [each.as_row() for each in sorted(groups.values(), key=lambda each: -each.letters)]
    columns = ("group", "letters", "wentBack", "oldest", "newest", "sample", "where")
    session.out.print_rows(rows, columns, empty="no letters")
    if unread:
        click.echo(f"not looked into: {unread:,} that are encrypted, chunks or too large", err=True)
    if unasked:
        click.echo(f"not looked at: whether {unasked:,} older ones went back", err=True)


def _group_of(groups: dict[str | None, _LetterGroup], name: str, value: str | None) -> _LetterGroup:
    """Returns the group of letters whose property `name` has this value; None: they have none."""
    if value not in groups and len(groups) >= GROUPS_MAX:
        return groups.setdefault("", _LetterGroup("(others)", ""))
    if value is None:
        return groups.setdefault(None, _LetterGroup("(none told)", f"{name} IS NULL"))
    quoted = value.replace("'", "''")
    return groups.setdefault(value, _LetterGroup(value, f"{name} = '{quoted}'"))


@session_command(
    option("-s", "--subscription", default="", help="Only those that this subscription gave up."),
    option("--where", default="", help="Only those for which this filter holds."),
    option("-n", "--count", "--limit", type=click.IntRange(1), default=None, help="At most so many (default: all)."),
    option("--to", default="", help="To this topic and all its subscriptions, in place of where they came from."),
    option("--to-all", is_flag=True, help="To all subscriptions of where they came from, not only to their own."),
    option("-r", "--rate", type=FiniteNumber(0.001), default=None, help="So many a second (default: all it takes)."),
    option("--dry-run", is_flag=True, help="Say only what would go where."),
    option("--force", is_flag=True, help="Also those that went back three times already."),
)
def redrive(
    session: CommandSession, topic: str, subscription: str, where: str, count: int | None, to: str, to_all: bool,
    rate: float | None, dry_run: bool, force: bool, yes: bool,
) -> None:  # fmt: skip
    """Send dead letters back to where they came from: the letters of a dead-letter topic, to the retry topic of their
    subscription if that reads it, or to the end of their topic. Of the topic's subscriptions only the one that gave a
    letter up gets it, and readers and table views see it too. With --to-all, or --to, every subscription gets it. The
    answer names those that do. Letters of a topic or a subscription that does not exist any more stay.

    Each letter is sent in one transaction with its acknowledgement on the subscription "redrive" of the dead-letter
    topic. If the command is killed, no letter is sent twice and none is lost, and the next run continues. One run at a
    time.

    \b
    Examples:
      magnetar topics redrive orders-billing-DLQ --dry-run
      magnetar topics redrive orders-billing-DLQ --where "region = 'eu'" --rate 100 --yes
    """
    from ...client.redrive import RedriveOptions

    options = RedriveOptions(subscription, where, count or 0, rate or 0.0, dry_run, force, to, to_all)

    def count_letters() -> str:
        found = _redrive(session, topic, replace(options, dry_run=True))
        return f" ({', '.join(_describe_redrive(found, options)) or 'none'})"

    if not dry_run:
        confirm_deletion(f"Send the dead letters of {full_name(topic)} back", yes, count_letters)
    result = _redrive(session, topic, options)
    of_all = {"complete": result.is_complete}  # else what comes after these letters was not looked at
    rows = [
        {**of_all, "goes": True, "where": name, "letters": number, "readers": _list_readers(result, name)}
        for name, number in sorted(result.sent.items())
    ]
    rows += [
        {**of_all, "goes": False, "where": why, "letters": number, "readers": None}
        for why, number in sorted(result.left.items())
    ]
    if session.out.is_structured:
        session.out.print_rows(rows, ("goes", "where", "letters", "readers", "complete"))
    else:
        said = "\n".join(_describe_redrive(result, options)) or f"no letter of {full_name(topic)} is left"
        session.out.print_result_text(said)


def _describe_redrive(result: RedriveResult, options: RedriveOptions) -> list[str]:
    """Returns what became of the letters that were looked at, in sentences; [] if there was none."""
    said = []
    for name, number in sorted(result.sent.items()):
        said.append(f"{number:,} to {name}")
        if name in result.readers:
            readers = _list_readers(result, name)
            who = "which are not known" if readers is None else ", ".join(readers) or "none so far"
            if options.to or options.to_all:
                said[-1] += f", where all subscriptions get them: {who}"
            else:
                said[-1] += f", of whose subscriptions only {who} gets its own; readers and table views see them too"
    said += [f"{number:,} stay: {why}" for why, number in sorted(result.left.items())]
    if said and not result.is_complete:
        said.append("what comes after these was not looked at")
    return said


def _list_readers(result: RedriveResult, topic: str) -> list[str] | None:
    """Returns the subscriptions that get what goes to the topic; None: that of its retry topic, or not known."""
    found = result.readers.get(topic)
    return None if found is None else list(found)


def _redrive(session: CommandSession, topic: str, options: RedriveOptions) -> RedriveResult:
    import asyncio

    from ...client.redrive import Redrive, RedriveResult

    session.admin.parts(topic)  # raises what any command says of a server or a topic that is not there

    async def run() -> RedriveResult:
        result = RedriveResult()
        async with session.asyncio_client() as client, session.make_asyncio_admin() as admin:
            with show_progress("letters sent", options.limit or None, shown=not options.dry_run) as progress:
                async for result in Redrive(client, admin, topic, options).run():
                    progress(result.sent.total())
        return result

    return asyncio.run(run())
