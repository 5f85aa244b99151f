"""`magnetar namespaces|topics set-X|get-X|remove-X`: every policy by one table, with pulsar-admin's names and options.

A row of `VERBS` makes three commands for namespaces and three for topics: `set-` sets the given policies and keeps the
rest, `get-` shows what is set at that level (`--applied`: with what is inherited, topic > namespace > broker),
`remove-` inherits again. The meaning and the bounds of a policy: proto/policies.py, which the broker checks. No command
here is written by hand, and LazyGroup makes one only when it is run (attributes of this module, by `__getattr__`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ...proto.schema import Compatibility
from ...proto.subscription_types import TITLES
from ..common.lazy import Lazy
from ..common.session import Session, connected
from ..common.units import NUMBER, duration, mebibytes

if TYPE_CHECKING:
    from ...proto.policies import Policies

NAMESPACES, TOPICS = "namespaces", "topics"
ROCKETMQ = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""Seconds: RocketMQ's delay levels; its redeliveries use the third and all that follow, 16 steps."""


def _bytes(text: str) -> int:
    found = re.fullmatch(rf"{NUMBER}([kmgt]?)i?b?", text.strip().lower())
    if found is None:
        raise click.BadParameter(f"{text[:40]!r} is not a size such as 65536, 64K, 5M")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[found[2]]


def _limit(text: str) -> int:
    """Returns a limit; pulsar-admin's -1 means "no limit", as 0 does here."""
    try:
        return max(0, int(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a whole number") from error


def _ladder(text: str) -> tuple[float, ...]:
    if text.lower() == "rocketmq":
        return tuple(float(step) for step in ROCKETMQ[2:])
    return tuple(float(duration(step.strip(), 1) or 0) for step in text.split(",") if step.strip())


def _switch(text: str) -> bool:
    return text == "on"


def _seconds(text: str) -> int:
    return max(0, duration(text, 1) or 0)


CONVERTERS: dict[str, Callable[[str], Any]] = {
    "minutes": lambda text: duration(text, 60),
    "MiB": mebibytes,
    "bytes limit": lambda text: 0 if text == "-1" else _bytes(text),
    "s": _seconds,
    "ms": lambda text: 1000 * _seconds(text),
    "expiry": lambda text: 60 * max(0, duration(text, 60) or 0),
    "bytes": _bytes,
    "limit": _limit,
    "ladder": _ladder,
    "names": lambda text: tuple(each.strip() for each in text.split(",") if each.strip()),
    "text": str,
}


class Field(NamedTuple):
    """An option of a command, and the policy that it sets."""

    name: str  # of proto/policies.py
    kind: str  # of CONVERTERS, or "on/off", or choices with | between
    flags: tuple[str, ...]
    help: str


class Verb(NamedTuple):
    """A row of `VERBS`: one verb of the policies' commands."""

    name: str  # set-NAME for topics
    fields: tuple[Field, ...]
    help: str
    example: str  # the options of set-NAME
    of_namespaces: str = ""  # set-NAME for namespaces, where pulsar-admin calls it differently
    note: str = ""
    levels: tuple[str, ...] = (NAMESPACES, TOPICS)

    def spelt(self, level: str) -> str:
        return self.of_namespaces if level == NAMESPACES and self.of_namespaces else self.name


def _rates(prefix: str, messages: tuple[str, ...], size: tuple[str, ...]) -> tuple[Field, ...]:
    return (
        Field(f"{prefix}_messages", "limit", messages, "Messages a second; 0 or -1: no limit."),
        Field(f"{prefix}_bytes", "limit", size, "Bytes a second; 0 or -1: no limit."),
    )


def _number(name: str, flags: tuple[str, ...], what: str) -> tuple[Field, ...]:
    return (Field(name, "limit", flags, f"{what}; 0: any number."),)


_DISPATCH = (("-md", "--msg-dispatch-rate"), ("-bd", "--byte-dispatch-rate"))
QUOTA_POLICIES = "producer_request_hold|producer_exception|consumer_backlog_eviction"
INACTIVE_MODES = "delete_when_no_subscriptions|delete_when_subscriptions_caught_up"

COMPATIBILITIES = "|".join(Compatibility)

VERBS = (
    Verb("retention", (
        Field("retention_minutes", "minutes", ("-t", "--time"), "Acknowledged is kept: 10m, 2h, 3d; -1: for ever."),
        Field("retention_mib", "MiB", ("-s", "--size"), "… up to 100M, 10G; -1: without limit."),
    ), "How long acknowledged data is kept.", "-t 3d -s 10G"),
    Verb("unsubscribed-retention", (
        Field("unsubscribed_minutes", "minutes", ("-t", "--time"), "Messages are kept: 10m, 2h, 3d; -1: for ever."),
        Field("unsubscribed_mib", "MiB", ("-s", "--size"), "… up to 100M, 10G, what is reached first; -1: any."),
    ), "What a topic keeps that has no durable subscription.", "-t 7d -s 1G"),
    Verb("message-ttl", (
        Field("message_ttl_s", "s", ("-ttl", "-t", "--messageTTL", "--ttl"), "Acknowledged after: 30s, 10m; 0: never."),
    ), "When an unacknowledged message expires.", "-ttl 10m"),
    Verb("backlog-quota", (
        Field("backlog_quota_bytes", "bytes limit", ("-l", "--limit", "--limitSize"), "100M, 10G, bytes; -1: none."),
        Field("backlog_quota_s", "s", ("-lt", "--limitTime"), "Age of the oldest message: 10m, 3d; -1: none."),
        Field("backlog_quota_policy", QUOTA_POLICIES, ("-p", "--policy"), "What happens then."),
        Field("backlog_quota_counts_delayed", "on/off", ("--delayed/--no-delayed",), "Whether what is not due counts."),
    ), "What the slowest subscription may hold.", "-l 10G -p producer_exception"),
    Verb("deduplication", (
        Field("deduplication", "on/off", (), "Of publishes, by producer name and sequence id."),
    ), "Drop what a producer sends twice.", "--enable"),
    Verb("deduplication-snapshot-interval", (
        Field("dedup_snapshot_s", "s", ("-i", "--interval"), "Between two snapshots: 30, 2m; 0: by entries alone."),
    ), "How often the sequence ids of producers are stored.", "-i 60"),
    Verb("max-message-size", (
        Field("max_message_bytes", "bytes", ("-m", "--max-message-size"), "Of one entry: 65536, 64K, 5M."),
    ), "The largest message.", "-m 1M"),
    Verb("delayed-delivery", (
        Field("delayed_delivery", "on/off", (), "Messages may have a time before which they are not delivered."),
        Field("delayed_tick_ms", "ms", ("--time", "-t"), "So late at most, and so seldom looked: 50, 1000, 1s."),
        Field("max_delay_ms", "ms", ("--maxDelay", "-md"), "The longest delay: 10m, 7d; 0: any."),
    ), "Delayed messages.", "--enable --maxDelay 7d"),
    Verb("publish-rate", _rates(
        "publish_rate", ("-m", "--msg-publish-rate"), ("-b", "--byte-publish-rate")
    ), "How fast all its producers together may send.", "-m 1000 -b 10000000"),
    Verb("dispatch-rate", _rates(
        "dispatch_rate", *_DISPATCH
    ), "How fast all its subscriptions together are served.", "-md 1000"),
    Verb("subscription-dispatch-rate", _rates(
        "subscription_dispatch_rate", *_DISPATCH
    ), "How fast each subscription is served.", "-md 1000"),
    Verb("subscribe-rate", (
        Field("subscribe_rate", "limit", ("-sr", "--subscribe-rate"), "Times a period; 0 or -1: no limit."),
        Field("subscribe_rate_period_s", "s", ("-st", "--subscribe-rate-period"), "The period: 30, 1m."),
    ), "How often one consumer may subscribe.", "-sr 10 -st 30"),
    Verb("max-producers", _number(
        "max_producers", ("-p", "--max-producers", "--max-producers-per-topic"), "Connected to a topic"
    ), "How many producers.", "-p 100", "max-producers-per-topic"),
    Verb("max-consumers", _number(
        "max_consumers", ("-c", "--max-consumers", "--max-consumers-per-topic"), "Connected to a topic"
    ), "How many consumers.", "-c 100", "max-consumers-per-topic"),
    Verb("max-consumers-per-subscription", _number(
        "max_consumers_per_subscription", ("-c", "--max-consumers", "--max-consumers-per-subscription"), "Connected"
    ), "How many consumers of one subscription.", "-c 10"),
    Verb("max-subscriptions-per-topic", _number(
        "max_subscriptions", ("-s", "-m", "--max-subscriptions-per-topic"), "Of a topic"
    ), "How many subscriptions.", "-s 10"),
    Verb("max-topics-per-namespace", _number(
        "max_topics", ("-t", "--max-topics-per-namespace"), "Topics and partitions"
    ), "How many topics, each partition counts.", "-t 1000", levels=(NAMESPACES,)),
    Verb("auto-subscription-creation", (
        Field("auto_subscription_creation", "on/off", (), "A consumer's subscription is made when it connects."),
    ), "Whether consumers make subscriptions.", "--disable"),
    Verb("max-unacked-messages-per-consumer", _number(
        "max_unacked_per_consumer", ("-c", "-m", "--maxNum", "--max-unacked-messages-per-consumer"), "Messages"
    ), "What a consumer may hold without acknowledging.", "-m 10000"),
    Verb("max-unacked-messages-per-subscription", _number(
        "max_unacked_per_subscription", ("-c", "-m", "--maxNum", "--max-unacked-messages-per-subscription"), "Messages"
    ), "What all consumers of a subscription may hold.", "-m 100000"),
    Verb("inactive-topic-policies", (
        Field("inactive_s", "s", ("-t", "--max-inactive-duration"), "Deleted when unused for: 10m, 3d; 0: never."),
        Field("inactive_mode", INACTIVE_MODES, ("-m", "--delete-mode"), "What counts as unused."),
    ), "When an unused topic is deleted.", "-t 3d -m delete_when_no_subscriptions"),
    Verb("subscription-expiration-time", (
        Field("subscription_expiration_s", "expiry", ("-t", "--time"), "Minutes, or 10m, 3d; 0: never."),
    ), "When a subscription without consumers is deleted.", "-t 7d"),
    Verb("compaction-threshold", (
        Field("compaction_threshold_bytes", "bytes", ("-t", "--threshold"), "Uncompacted bytes: 100M; 0: by hand."),
    ), "When a topic is compacted by itself.", "-t 100M"),
    Verb("persistence", (
        Field("ensemble_size", "limit", ("-e", "--ensemble", "--bookkeeper-ensemble"), "Bookies of a ledger."),
        Field("write_quorum", "limit", ("-w", "--write-quorum", "--bookkeeper-write-quorum"), "Copies of an entry."),
        Field("ack_quorum", "limit", ("-a", "--ack-quorum", "--bookkeeper-ack-quorum"), "Synced before the ack."),
    ), "How many bookies and copies a ledger has.", "-e 3 -w 3 -a 2",
       note="; it holds from each topic's next ledger on; 'magnetar topics unload TOPIC' begins one now"),
    Verb("dead-letter-policy", (
        Field("dead_letter_max_redeliver_count", "limit", ("-c", "--max-redeliver-count"), "0: no dead letters."),
        Field("dead_letter_topic", "text", ("-t", "--dead-letter-topic"), "Default: TOPIC-SUBSCRIPTION-DLQ."),
        Field("dead_letter_backoff_s", "ladder", ("-b", "--backoff"), "Waits, as 1s,10s,1m; or: rocketmq (16 steps)."),
    ), "When the server moves a message away.", "-c 16 -b rocketmq"),
    Verb("subscription-types-enabled", (
        Field("subscription_types", "names", ("-t", "--types"), f"Of {', '.join(TITLES)}."),
    ), "Which types consumers may ask for.", "-t Exclusive,Failover"),
    Verb("schema-compatibility-strategy", (
        Field("schema_compatibility", COMPATIBILITIES, ("-c", "--compatibility"), "With those of the topic."),
    ), "What a new schema has to be.", "-c full_transitive"),
    Verb("schema-validation-enforce", (
        Field("schema_validation_enforced", "on/off", (), "No producer without a schema where there is one."),
    ), "Whether producers need the schema.", "--enable"),
    Verb("is-allow-auto-update-schema", (
        Field("schema_auto_update", "on/off", (), "A producer's new schema is registered."),
    ), "Whether producers register schemas.", "--disable"),
)  # fmt: skip

ALIASES = {
    "get-backlog-quotas": "get-backlog-quota",
    "set-max-subscriptions": "set-max-subscriptions-per-topic",
    "get-max-subscriptions": "get-max-subscriptions-per-topic",
    "remove-max-subscriptions": "remove-max-subscriptions-per-topic",
}


def verbs(level: str) -> dict[str, Lazy]:
    """The commands of `namespaces` or `topics`, for its LazyGroup."""
    return {
        f"{act}-{verb.spelt(level)}": Lazy(".admin.policies", f"{level} {act} {verb.name}", verb.help)
        for verb in VERBS
        if level in verb.levels
        for act in ("set", "get", "remove")
    }


def given_fields(options: dict[str, Any]) -> dict[str, Any]:
    """The given options, as fields of Policies."""
    return {name: value for name, value in options.items() if value is not None}


def options_of(fields: tuple[Field, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The click options of these policies; an option that is not given is None."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for field in reversed(fields):
            function = _option(field)(function)
        return function

    return add


def _option(field: Field) -> Callable[[Callable[..., None]], Callable[..., None]]:
    if field.kind == "on/off":
        flags = field.flags or ("--enable/--disable", "-e/-d")
        return click.option(*flags, field.name, default=None, help=field.help)
    if "|" in field.kind:
        choices = click.Choice(field.kind.split("|"), case_sensitive=False)
        return click.option(*field.flags, field.name, type=choices, default=None, help=field.help)
    convert = CONVERTERS[field.kind]

    def callback(_: click.Context, __: click.Parameter, text: str | None) -> Any:
        return None if text is None else convert(text)

    return click.option(*field.flags, field.name, callback=callback, default=None, help=field.help)


def __getattr__(name: str) -> click.Command:
    """The command "LEVEL ACT VERB"."""
    level, _, rest = name.partition(" ")
    act, _, verb_name = rest.partition(" ")
    for verb in VERBS:
        if verb.name == verb_name and level in verb.levels:
            return {"set": _set, "get": _get, "remove": _remove}[act](level, verb)
    raise AttributeError(f"no command {name!r}")


def _command(level: str, act: str, verb: Verb, text: str, function: Callable[..., None]) -> click.Command:
    target, sample = ("namespace", "public/default") if level == NAMESPACES else ("topic", "orders")
    options = f" {verb.example}" if act == "set" else ""
    function.__doc__ = f"{text}\n\n    Example: magnetar {level} {act}-{verb.spelt(level)} {sample}{options}\n    "
    return click.command(f"{act}-{verb.spelt(level)}")(click.argument("target", metavar=target.upper())(function))


def _set(level: str, verb: Verb) -> click.Command:
    def command(session: Session, target: str, **options: Any) -> None:
        given = given_fields(options)
        if not given:
            raise click.UsageError(f"nothing to set; for instance: {verb.example}")
        found = change(session, level, target, given)
        if verb.name == "persistence":
            _warn_of_risks(session, found)
        shown = {field.name: getattr(found, field.name) for field in verb.fields}
        said = ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
        session.out.done(f"{verb.spelt(level)} of {target}: {said}{verb.note}", target=target, **shown)

    return _command(level, "set", verb, f"Set: {verb.help}", options_of(verb.fields)(connected(command)))


def _get(level: str, verb: Verb) -> click.Command:
    def command(session: Session, target: str, applied: bool) -> None:
        found = read(session, level, target, applied=applied)
        session.out.record({field.name: getattr(found, field.name) for field in verb.fields})

    applied = click.option("-ap", "--applied", is_flag=True, help="With what is inherited: topic, namespace, broker.")
    return _command(level, "get", verb, f"Show: {verb.help}", applied(connected(command)))


def _remove(level: str, verb: Verb) -> click.Command:
    def command(session: Session, target: str) -> None:
        admin = session.admin
        remove = admin.remove_namespace_policies if level == NAMESPACES else admin.remove_topic_policies
        remove(target, *(field.name for field in verb.fields))
        session.out.done(f"{verb.spelt(level)} of {target} is inherited again{verb.note}", target=target)

    return _command(level, "remove", verb, f"Inherit again: {verb.help}", connected(command))


def read(session: Session, level: str, target: str, *, applied: bool = False) -> Policies:
    admin = session.admin
    return (admin.namespace_policies if level == NAMESPACES else admin.topic_policies)(target, applied=applied)


def change(session: Session, level: str, target: str, given: dict[str, Any]) -> Policies:
    """Sets the given policies, then shows what is set at that level."""
    import msgspec

    from ...proto.policies import Policies

    try:
        policies = msgspec.convert(given, Policies)
    except msgspec.ValidationError as error:
        raise click.UsageError(str(error)) from error
    admin = session.admin
    (admin.set_namespace_policies if level == NAMESPACES else admin.set_topic_policies)(target, policies)
    return read(session, level, target)


def _warn_of_risks(session: Session, policies: Policies) -> None:
    from ...broker.log.core.quorums import risks

    bookies = sum(not each.read_only for each in session.admin.bookies())
    shape = (policies.ensemble_size or 0, policies.write_quorum or 0, policies.ack_quorum or 0)
    for risk in risks(*shape, bookies):
        click.echo(f"warning: {risk}", err=True)
