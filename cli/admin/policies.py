"""`magnetar tenants|namespaces|topics set-X|get-X|remove-X`: every policy by one table, with pulsar-admin's names.

A row of proto/policies.py makes three commands for each level that has the policy: `set-` sets the given policies
and keeps the rest, `get-` shows what is set at that level (`--applied`: with what is inherited, topic > namespace >
broker), `remove-` inherits again. The meaning and the bounds of a policy: proto/policies.py, which the broker checks.
No command here is written by hand, and LazyGroup makes one only when it is run (attributes of this module, by
`__getattr__`).

`magnetar namespaces|topics …-properties`: what users noted of a namespace or a topic, KEY=VALUE.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click import option

from ...proto.policies import NAMESPACE_LEVEL, POLICIES, TENANT_LEVEL, Field, PolicyDefinition
from ..common import units
from ..common.lazy import LazyCommand
from ..common.session import CommandSession, session_command, with_session
from ..common.units import NUMBER_PATTERN, parse_duration, parse_mebibytes

if TYPE_CHECKING:
    from ...proto.policies import Policies


NAMESPACE_COMMANDS = {
    "get-properties": LazyCommand(".admin.policies", "of_namespace", "What was noted of it."),
    "set-properties": LazyCommand(".admin.policies", "set_properties_of_namespace", "Note properties; others stay."),
    "remove-property": LazyCommand(".admin.policies", "remove_properties_of_namespace", "A property is gone."),
    "clear-properties": LazyCommand(".admin.policies", "clear_properties_of_namespace", "All are gone."),
}
TOPIC_COMMANDS = {
    "get-properties": LazyCommand(".admin.policies", "of_topic", "What was noted of it."),
    "update-properties": LazyCommand(".admin.policies", "set_properties_of_topic", "Note properties; others stay."),
    "remove-properties": LazyCommand(".admin.policies", "remove_properties_of_topic", "A property is gone."),
}
PROPERTIES_OPTION = option("-p", "--property", "--properties", "pairs", multiple=True, help="KEY=VALUE, several too.")
KEYS_OPTION = option("-k", "--key", "keys", multiple=True, required=True, metavar="KEY", help="Several too.")


def _show(session: CommandSession, place: str, found: dict[str, str]) -> None:
    rows = [{"property": key, "value": value} for key, value in sorted(found.items())]
    session.out.print_rows(rows, ("property", "value"), empty=f"{place} has no properties")


def _given(pairs: tuple[str, ...]) -> dict[str, str]:
    if not pairs:
        raise click.UsageError("which property? -p KEY=VALUE")
    return units.parse_properties(pairs)


def _noted(session: CommandSession, place: str, given: dict[str, str]) -> None:
    session.out.print_result_text(
        f"{place} has {', '.join(f'{key}={value}' for key, value in given.items())}", place=place
    )


def _gone(session: CommandSession, place: str, keys: tuple[str, ...]) -> None:
    session.out.print_result_text(f"{place} has no property {', '.join(keys)}", place=place)


@session_command(name="get-properties")
def of_namespace(session: CommandSession, namespace: str) -> None:
    """Show the properties (texts by key) of a namespace. Its topics do not inherit them.

    Example: magnetar namespaces get-properties acme/orders
    """
    _show(session, namespace, session.admin.namespace_properties(namespace))


@session_command(PROPERTIES_OPTION, name="set-properties")
def set_properties_of_namespace(session: CommandSession, namespace: str, pairs: tuple[str, ...]) -> None:
    """Set properties (texts by key) of a namespace. Its other properties stay.

    Example: magnetar namespaces set-properties acme/orders -p owner=ada -p tier=1
    """
    given = _given(pairs)
    session.admin.set_namespace_properties(namespace, given)
    _noted(session, namespace, given)


@session_command(KEYS_OPTION, name="remove-property")
def remove_properties_of_namespace(session: CommandSession, namespace: str, keys: tuple[str, ...]) -> None:
    """Remove the properties with these keys from a namespace. A key that is missing is no error.

    Example: magnetar namespaces remove-property acme/orders -k owner
    """
    session.admin.remove_namespace_properties(namespace, *keys)
    _gone(session, namespace, keys)


@session_command(name="clear-properties")
def clear_properties_of_namespace(session: CommandSession, namespace: str) -> None:
    """Remove all properties of a namespace.

    Example: magnetar namespaces clear-properties acme/orders
    """
    session.admin.remove_namespace_properties(namespace)
    session.out.print_result_text(f"{namespace} has no properties", place=namespace)


@session_command(name="get-properties")
def of_topic(session: CommandSession, topic: str) -> None:
    """Show the properties (texts by key) of a topic. A partition has the properties of its topic.

    Example: magnetar topics get-properties orders
    """
    _show(session, topic, session.admin.topic_properties(topic))


@session_command(PROPERTIES_OPTION, name="update-properties")
def set_properties_of_topic(session: CommandSession, topic: str, pairs: tuple[str, ...]) -> None:
    """Set properties (texts by key) of a topic. Its other properties stay.

    Example: magnetar topics update-properties orders -p owner=ada
    """
    given = _given(pairs)
    session.admin.set_topic_properties(topic, given)
    _noted(session, topic, given)


@session_command(KEYS_OPTION, name="remove-properties")
def remove_properties_of_topic(session: CommandSession, topic: str, keys: tuple[str, ...]) -> None:
    """Remove the properties with these keys from a topic. A key that is missing is no error.

    Example: magnetar topics remove-properties orders -k owner
    """
    session.admin.remove_topic_properties(topic, *keys)
    _gone(session, topic, keys)


ROCKETMQ_DELAYS_S = (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
"""Seconds: RocketMQ's delay levels; its redeliveries use the third and all that follow, 16 steps."""


def _bytes(text: str) -> int:
    found = re.fullmatch(rf"{NUMBER_PATTERN}([kmgt]?)i?b?", text.strip().lower())
    if found is None:
        raise click.BadParameter(f"{text[:40]!r} is not a size such as 65536, 64K, 5M")
    return int(found[1]) << {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[found[2]]


def _limit(text: str) -> int:
    """Parses a limit; converts pulsar-admin's -1, "no limit", to 0, which means it here."""
    try:
        return max(0, int(text))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a whole number") from error


def _ladder(text: str) -> tuple[float, ...]:
    if text.lower() == "rocketmq":
        return tuple(float(step) for step in ROCKETMQ_DELAYS_S[2:])
    return tuple(float(parse_duration(step.strip(), 1) or 0) for step in text.split(",") if step.strip())


def _switch(text: str) -> bool:
    return text == "on"


def _seconds(text: str) -> int:
    return max(0, parse_duration(text, 1) or 0)


UNIT_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "minutes": lambda text: parse_duration(text, 60),
    "MiB": parse_mebibytes,
    "bytes limit": lambda text: 0 if text == "-1" else _bytes(text),
    "s": _seconds,
    "ms": lambda text: 1000 * _seconds(text),
    "expiry": lambda text: 60 * max(0, parse_duration(text, 60) or 0),
    "bytes": _bytes,
    "limit": _limit,
    "ladder": _ladder,
    "names": lambda text: tuple(each.strip() for each in text.split(",") if each.strip()),
    "text": str,
}


COMMAND_ALIASES = {
    "get-backlog-quotas": "get-backlog-quota",
    "set-max-subscriptions": "set-max-subscriptions-per-topic",
    "get-max-subscriptions": "get-max-subscriptions-per-topic",
    "remove-max-subscriptions": "remove-max-subscriptions-per-topic",
}


def make_policy_commands(level: str) -> dict[str, LazyCommand]:
    """Returns the commands that set, get and remove policies, by their names. `level`: the command group for which they
    are made, `tenants`, `namespaces` or `topics`."""
    return {
        f"{act}-{verb.name_at(level)}": LazyCommand(".admin.policies", f"{level} {act} {verb.name}", verb.help)
        for verb in POLICIES
        if level in verb.levels
        for act in ("set", "get", "remove")
    }


def collect_given_policies(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the policies that the user gave as options, by the names of the fields of `Policies` (proto/policies.py).
    Options that were not given have the value None."""
    return {name: value for name, value in options.items() if value is not None}


def with_options_for_policies(fields: tuple[Field, ...]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Returns a decorator that adds an option for each policy of `fields` to a command. An option that the user does
    not give has the value None."""

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
    convert = UNIT_CONVERTERS[field.kind]

    def callback(_: click.Context, __: click.Parameter, text: str | None) -> Any:
        return None if text is None else convert(text)

    return click.option(*field.flags, field.name, callback=callback, default=None, help=field.help)


def __getattr__(name: str) -> click.Command:
    """Makes the command that `name`, "LEVEL ACT VERB", means."""
    level, _, rest = name.partition(" ")
    act, _, verb_name = rest.partition(" ")
    for verb in POLICIES:
        if verb.name == verb_name and level in verb.levels:
            return {"set": _set, "get": _get, "remove": _remove}[act](level, verb)
    raise AttributeError(f"no command {name!r}")


_PLACES = {TENANT_LEVEL: ("tenant", "acme"), NAMESPACE_LEVEL: ("namespace", "public/default")}
"""What a command of the level takes, with an example."""


def _command(level: str, act: str, verb: PolicyDefinition, text: str, function: Callable[..., None]) -> click.Command:
    target, sample = _PLACES.get(level, ("topic", "orders"))
    options = f" {verb.example}" if act == "set" else ""
    function.__doc__ = f"{text}\n\n    Example: magnetar {level} {act}-{verb.name_at(level)} {sample}{options}\n    "
    return click.command(f"{act}-{verb.name_at(level)}")(click.argument("target", metavar=target.upper())(function))


def _set(level: str, verb: PolicyDefinition) -> click.Command:
    def command(session: CommandSession, target: str, **options: Any) -> None:
        given = collect_given_policies(options)
        if not given:
            raise click.UsageError(f"nothing to set; for instance: {verb.example}")
        found = change_policies(session, level, target, given)
        if verb.name == "persistence":
            _warn_of_risks(session, found)
        shown = {field.name: getattr(found, field.name) for field in verb.fields}
        said = ", ".join(f"{name}={value}" for name, value in shown.items() if value is not None)
        session.out.print_result_text(f"{verb.name_at(level)} of {target}: {said}{verb.note}", target=target, **shown)

    return _command(
        level, "set", verb, f"Set: {verb.help}", with_options_for_policies(verb.fields)(with_session(command))
    )


def _get(level: str, verb: PolicyDefinition) -> click.Command:
    def command(session: CommandSession, target: str, applied: bool) -> None:
        found = read_policies(session, level, target, applied=applied)
        session.out.print_record({field.name: getattr(found, field.name) for field in verb.fields})

    applied = click.option("-ap", "--applied", is_flag=True, help="With what is inherited: topic, namespace, broker.")
    return _command(level, "get", verb, f"Show: {verb.help}", applied(with_session(command)))


def _remove(level: str, verb: PolicyDefinition) -> click.Command:
    def command(session: CommandSession, target: str) -> None:
        _choose_method(session, "remove_{}_policies", level)(target, *(field.name for field in verb.fields))
        session.out.print_result_text(f"{verb.name_at(level)} of {target} is inherited again{verb.note}", target=target)

    return _command(level, "remove", verb, f"Inherit again: {verb.help}", with_session(command))


def read_policies(session: CommandSession, level: str, target: str, *, applied: bool = False) -> Policies:
    """Returns the policies that are set at the tenant, namespace or topic `target`; with `applied` also those that it
    inherits. `level`: TENANT_LEVEL, NAMESPACE_LEVEL or TOPIC_LEVEL (proto/policies.py). Raises the errors of the admin
    client."""
    found: Policies = _choose_method(session, "{}_policies", level)(target, applied=applied)
    return found


def _choose_method(session: CommandSession, name: str, level: str) -> Callable[..., Any]:
    """Returns the method of the admin client for this level; `name`: its name, with {} for "tenant" and so on."""
    method: Callable[..., Any] = getattr(session.admin, name.format(level.removesuffix("s")))
    return method


def change_policies(session: CommandSession, level: str, target: str, given: dict[str, Any]) -> Policies:
    """Sets the policies `given` (by the names of the fields of `Policies`) at the tenant, namespace or topic `target`;
    other policies stay. `level`: TENANT_LEVEL, NAMESPACE_LEVEL or TOPIC_LEVEL. Returns all policies that are set there
    afterwards. Raises UsageError if a value has the wrong type; InvalidRequest if the broker refuses a value, and the
    other errors of the admin client."""
    import msgspec

    from ...proto.policies import Policies

    try:
        policies = msgspec.convert(given, Policies)
    except msgspec.ValidationError as error:
        raise click.UsageError(str(error)) from error
    _choose_method(session, "set_{}_policies", level)(target, policies)
    return read_policies(session, level, target)


def _warn_of_risks(session: CommandSession, policies: Policies) -> None:
    from ...broker.log.log_shape_core import describe_quorum_risks

    bookies = sum(not each.read_only for each in session.admin.bookies())
    shape = (policies.ensemble_size or 0, policies.write_quorum or 0, policies.ack_quorum or 0)
    for risk in describe_quorum_risks(*shape, bookies):
        click.echo(f"warning: {risk}", err=True)
