"""The verbs that follow from rows of proto/operations.py: those whose row has a `cli`.

The argument of a verb is the place that its row names, such as a topic. -s names the subscription, and other values
that the row takes are options. On a partitioned topic a verb is applied to each partition, at its owner. A verb without
an answer prints what was done; any other one prints a list of names, or a row for each partition. LazyGroup gets the
command of a verb only when it runs, as an attribute of this module (`__getattr__`) with the words of the verb: "topics
trim".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from ...proto.operations import OPERATIONS, AnsweringBroker, CliVerb, Operation, PermissionScope
from ..common.lazy import LazyCommand
from ..common.session import (
    NAME_COMPLETIONS,
    SUBSCRIPTION_OPTION,
    WATCH_FLAGS,
    YES_OPTION,
    CommandSession,
    confirm_deletion,
    with_session,
)


def make_operation_commands(group: str) -> dict[str, LazyCommand]:
    """Returns the commands of the group `group` that are made from rows of the table proto/operations.py, by the last
    word of their names; empty if there is none."""
    found = (each.cli for each in OPERATIONS.values() if each.cli is not None)
    return {
        each.words.removeprefix(f"{group} "): LazyCommand(".admin.rows", each.words, each.line)
        for each in found if each.words.rpartition(" ")[0] == group
    }  # fmt: skip


def __getattr__(words: str) -> click.Command:
    for row in OPERATIONS.values():
        if row.cli is not None and row.cli.words == words:
            return _command(row, row.cli)
    raise AttributeError(f"no verb {words!r}")


def _command(row: Operation[Any], cli: CliVerb) -> click.Command:
    place = row.rule.on.value if row.rule.on is not PermissionScope.NOTHING else ""

    def run(session: CommandSession, **given: Any) -> None:
        yes, named = given.pop("yes", True), given.pop(place, "")
        of = {place: _full(named) if row.rule.on is PermissionScope.TOPIC else named} if place else {}
        of |= {"subscription": given.pop("subscription")} if "subscription" in given else {}
        texts = {"place": of.get(place, ""), **of, **given}
        if cli.confirm:
            confirm_deletion(cli.confirm.format(**texts), yes)
        parts = session.admin.parts(named) if row.asked_of is AnsweringBroker.OWNER else [named] if place else [""]
        method, others = getattr(session.admin, row.method), [of["subscription"]] if "subscription" in of else []
        found = {part: method(*([part] if place else []), *others, **given) for part in parts}
        if cli.done:
            session.out.print_result_text(cli.done.format(**texts), **of)
        else:
            _show(session, found, place, cli.empty.format(**texts))

    command = with_session(run, *(() if cli.done or cli.confirm else WATCH_FLAGS))
    if cli.confirm:
        command = YES_OPTION(command)
    for take in reversed(row.takes):
        flags = (*(("-f",) if take.name == "force" else ()), f"--{take.name.replace('_', '-')}", take.name)
        settings: dict[str, Any] = {"type": take.kind, "default": take.kind()}
        settings = {"is_flag": True} if take.kind is bool else settings
        command = click.option(*flags, help=take.help, **settings)(command)
    if row.rule.subscription:
        command = SUBSCRIPTION_OPTION(command)
    if place:
        command = click.argument(place, shell_complete=NAME_COMPLETIONS.get(place))(command)
    command.__doc__ = f"{cli.text}\n\nExample: magnetar {cli.words} {cli.example}"
    return click.command(cli.words.rpartition(" ")[2])(command)


def _full(topic: str) -> str:
    from ...proto.names import TopicName

    return TopicName.parse(topic).full


def _show(session: CommandSession, found: Mapping[str, Any], place: str, empty: str) -> None:
    from dataclasses import asdict, is_dataclass

    if all(isinstance(each, str) for names in found.values() for each in (names if isinstance(names, list) else [0])):
        session.out.print_names(sorted({each for names in found.values() for each in names}), empty=empty)
        return
    rows = [
        {**({place: part} if part else {}), **(asdict(each) if is_dataclass(each) else {"answer": each})}  # type: ignore[arg-type]
        for part, answer in found.items() for each in (answer if isinstance(answer, list) else [answer])
    ]  # fmt: skip
    only = rows[0] if len(rows) == 1 and not session.out.is_structured else {}
    nested = [name for name, value in only.items() if _is_rows(value)]
    if nested:
        flat = {name: value for name, value in only.items() if name not in nested}
        if flat:
            session.out.print_record(flat)
        for number, name in enumerate(nested):
            if flat or number:
                click.echo()
            session.out.print_rows(only[name], [*only[name][0]])
        return
    session.out.print_rows(rows, [*(rows[0] if rows else ())], empty=empty)


def _is_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], dict)
