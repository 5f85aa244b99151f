"""`magnetar schedules …`: messages that the cluster publishes at set times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
from click import option

from ..common.lazy import LazyCommand, LazyGroup
from ..common.session import CommandSession, confirm_deletion, session_command
from ..common.units import parse_duration, parse_moment_ms, parse_properties
from .topics import full_name

if TYPE_CHECKING:
    from ...proto.statistics import ScheduleStats

SCHEDULE_COLUMNS = ("name", "when", "zone", "next", "last", "fired", "dropped", "status")

schedules = LazyGroup(
    "schedules",
    {
        "create": LazyCommand(".admin.schedules", "create", "Publish a message at set times from now on."),
        "list": LazyCommand(".admin.schedules", "list_", "The schedules of a topic, and why one cannot fire."),
        "show": LazyCommand(".admin.schedules", "show", "One of them, with its message."),
        "delete": LazyCommand(".admin.schedules", "delete", "Delete a schedule."),
        "pause": LazyCommand(".admin.schedules", "pause", "Let it not fire until it is resumed."),
        "resume": LazyCommand(".admin.schedules", "resume", "End its pause."),
        "run-now": LazyCommand(".admin.schedules", "run_now", "Publish its message once, now."),
    },
    help="Schedules: messages that the cluster publishes at set times.\n\nExample: magnetar schedules list orders",
)


@session_command(
    option("--cron", default="", help='Minute, hour, day, month, weekday: "0 9 * * MON-FRI".'),
    option("--every", default=None, metavar="TIME", help="… or an interval: 10s, 5m, 2h, 1d."),
    option("--at", "moment", default=None, metavar="TIME", help="… or once: 2027-01-31T09:30, or ms since the epoch."),
    option("--zone", default="UTC", show_default=True, help="Time zone of --cron, such as Europe/Berlin."),
    option("-m", "--message", default="", help="The payload."),
    option("-k", "--key", default="", help="Key of the messages."),
    option("-p", "--properties", multiple=True, metavar="KEY=VALUE,…", help="Properties of the messages."),
    option("--missed", type=click.Choice(["skip", "last", "all"]), default="skip", show_default=True,
           help="What no broker could publish in time: drop it, make up for the latest, or for up to 100."),
)  # fmt: skip
def create(
    session: CommandSession, topic: str, name: str, cron: str, every: str | None, moment: str | None, zone: str,
    message: str, key: str, properties: tuple[str, ...], missed: str,
) -> None:  # fmt: skip
    """Create a schedule: the cluster publishes a message to a topic at set times, no time twice, even if brokers fail.
    A local time that the zone skips fires at the next valid instant; one that comes twice fires once.

    \b
    Examples:
      magnetar schedules create orders nightly --cron "30 2 * * *" --zone Europe/Berlin -m close-the-day
      magnetar schedules create orders pulse --every 10s -m tick
    """
    from ...runtime.clock import SystemClock

    if sum((bool(cron), every is not None, moment is not None)) != 1:
        raise click.UsageError("one of --cron, --every and --at")
    session.admin.create_schedule(
        topic, name, cron=cron, every_s=parse_duration(every, 1) or 0,
        at_ms=parse_moment_ms(moment, SystemClock().wall_ms()) if moment is not None else 0, zone=zone,
        payload=message.encode(), key=key, properties=parse_properties(properties), missed=missed,
    )  # fmt: skip
    session.out.print_result_text(f"schedule {name} of {full_name(topic)} created", topic=full_name(topic), name=name)


@session_command(watched=True)
def list_(session: CommandSession, topic: str) -> None:
    """List the schedules of a topic: when each fires next, what it has fired, and, if it cannot fire, why.

    Example: magnetar schedules list orders
    """
    session.out.print_rows(
        [_row(each) for each in session.admin.schedules(topic)],
        SCHEDULE_COLUMNS,
        empty=f"no schedules of {full_name(topic)}",
    )


@session_command()
def show(session: CommandSession, topic: str, name: str) -> None:
    """Show a schedule of a topic, with the message that it publishes.

    Example: magnetar schedules show orders nightly
    """
    from ...proto.errors import NotFound

    found = next((each for each in session.admin.schedules(topic) if each.name == name), None)
    if found is None:
        raise NotFound(f"topic {full_name(topic)} has no schedule {name!r}")
    message = {"key": found.key, "properties": found.properties, "payload": found.payload.decode("utf-8", "replace")}
    session.out.print_record({**_row(found), "missed": found.missed, **message})


@session_command()
def delete(session: CommandSession, topic: str, name: str, yes: bool) -> None:
    """Delete a schedule. What it has published stays.

    Example: magnetar schedules delete orders nightly
    """
    confirm_deletion(f"Delete the schedule {name} of {full_name(topic)}", yes)
    session.admin.delete_schedule(full_name(topic), name=name)
    session.out.print_result_text(f"schedule {name} of {full_name(topic)} deleted", topic=full_name(topic), name=name)


@session_command()
def pause(session: CommandSession, topic: str, name: str) -> None:
    """Pause a schedule: it does not fire until it is resumed.

    Example: magnetar schedules pause orders nightly
    """
    session.admin.pause_schedule(full_name(topic), name=name, paused=True)
    session.out.print_result_text(f"schedule {name} of {full_name(topic)} paused", topic=full_name(topic), name=name)


@session_command()
def resume(session: CommandSession, topic: str, name: str) -> None:
    """End the pause of a schedule. What was due meanwhile is not made up for.

    Example: magnetar schedules resume orders nightly
    """
    session.admin.pause_schedule(full_name(topic), name=name, paused=False)
    session.out.print_result_text(f"schedule {name} of {full_name(topic)} resumed", topic=full_name(topic), name=name)


@session_command()
def run_now(session: CommandSession, topic: str, name: str) -> None:
    """Publish the message of a schedule once, now, paused or not. Its times stay as they are.

    Example: magnetar schedules run-now orders nightly
    """
    session.admin.run_schedule(full_name(topic), name=name)
    where = full_name(topic)
    session.out.print_result_text(f"message of {name} published to {where}", topic=where, name=name)


def _row(each: ScheduleStats) -> dict[str, Any]:
    from ...proto.pulsar_json import time_to_json

    def moment(at_ms: int) -> str:
        return time_to_json(at_ms) if at_ms else ""

    when = each.cron or (f"every {each.every_ms / 1000:g} s" if each.every_ms else f"at {moment(each.at_ms)}")
    return {
        "name": each.name, "when": when, "zone": each.zone if each.cron else "", "next": moment(each.next_ms),
        "last": moment(each.last_ms), "fired": each.fired, "dropped": each.dropped, "status": each.status,
    }  # fmt: skip
