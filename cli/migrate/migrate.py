"""`magnetar migrate`: copies topics of an Apache Pulsar cluster.

Also in this file, below its heading: progress on standard error (progress).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click

from ...runtime.tasks import Tasks
from ..common.output import make_progress_bar
from ..common.session import CommandSession, read_token, with_session
from .copying import CopyTotals, TopicCopier

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from ...client.admin import AdminClient
    from ...client.client import Client
    from ...runtime.access import CallerAccess
    from ...runtime.network import World
    from .copying import CopyOptions, SourceRestClient
    from .source import MigrationSource, TopicToCopy

RESUME_HINT = "stopped; the same command continues where this one ended"


@click.command()
@click.option("--from", "source_url", required=True, metavar="URL", help="The source: pulsar://HOST:6650.")
@click.option("--topics", required=True, multiple=True, metavar="TOPIC", help="A name or pattern; may be given often.")
@click.option("--follow", is_flag=True, help="Go on copying what is published there, until Ctrl-C.")
@click.option("--dry-run", is_flag=True, help="Show what would be copied, and copy nothing.")
@click.option("--subscriptions", is_flag=True, help="Also copy positions of durable subscriptions (with --admin-url).")
@click.option("--admin-url", default="", metavar="URL", help="HTTP of the source, such as http://HOST:8080.")
@click.option("--no-schemas", is_flag=True, help="Copy no schemas: messages name none.")
@click.option("--append", is_flag=True, help="Put copies after messages of others that the destination has.")
@click.option("--same-source", is_flag=True, help="Another --from than before is the same cluster.")
@click.option("--from-token", default="", metavar="FILE|env:NAME", help="Where your token for the source is.")
@click.option("--from-tls-ca", default="", metavar="FILE", help="Who signs the source's certificate (pulsar+ssl://).")
@with_session
def migrate(session: CommandSession, **options: Any) -> None:
    """Copy topics of an Apache Pulsar cluster to this one.

    Messages keep their bytes, order, keys, properties, times and producers' names; topics keep their partitions and
    schemas. If the command is killed or stopped, the same command continues: no message is lost, and none is doubled.
    It ends when everything is copied that was there when it began. docs/pulsar.md says what is exact and what is not.

    \b
    Examples:
      magnetar migrate --from pulsar://old:6650 --topics orders --dry-run
      magnetar migrate --from pulsar://old:6650 --topics 'public/default/*' --follow
      magnetar migrate --from pulsar+ssl://old:6651 --from-token old.token --topics orders \\
          --subscriptions --admin-url https://old:8443
    """
    if options["subscriptions"] and not options["admin_url"]:
        raise click.UsageError("--subscriptions asks the source's HTTP service: give --admin-url")
    try:
        asyncio.run(_Migration(session, options).run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"magnetar: {RESUME_HINT}", file=sys.stderr)
        raise click.Abort from None


class _Migration:
    """One run of the command."""

    def __init__(self, session: CommandSession, options: dict[str, Any]) -> None:
        self._session = session
        self._options = options

    async def run(self) -> None:
        from ...client.connect.connections import make_client_world
        from .source import MigrationSource

        task = asyncio.current_task()
        assert task is not None, "asyncio.run made one"
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        session, world = self._session, make_client_world()
        access = self._access()
        source = MigrationSource(self._options["source_url"], access, session.timeout_s, world)
        try:
            async with session.asyncio_client() as client, session.make_asyncio_admin() as admin:
                await self._with(source, access, client, admin, world)
        finally:
            await source.close()

    def _access(self) -> CallerAccess:
        """Returns the credentials and TLS files for the source. Raises InvalidUrl or InvalidConfiguration."""
        from ...client.connect.authentication import AuthenticationToken, make_caller_access
        from ...client.connect.discovery import parse_service_url

        token = self._options["from_token"]
        authentication = AuthenticationToken(lambda: read_token(token)) if token else None
        url = parse_service_url(self._options["source_url"])
        return make_caller_access(url, authentication, {"tls_trust_certs_file_path": self._options["from_tls_ca"]})

    async def _with(
        self, source: MigrationSource, access: CallerAccess, client: Client, admin: AdminClient, world: World
    ) -> None:
        from .copying import CopyOptions, SourceRestClient, TopicCopier
        from .source import find_matching_topics

        options = self._options
        wanted = CopyOptions(options["follow"], options["append"], options["same_source"], self._session.timeout_s)
        copying = TopicCopier(source, client, admin, wanted, world)
        positions = (
            SourceRestClient(options["admin_url"], access, self._session.timeout_s) if options["admin_url"] else None
        )
        topics = await find_matching_topics(source, options["topics"])
        if options["dry_run"]:
            await self._plan(source, copying, topics)
            return
        await copying.prepare(topics, schemas=not options["no_schemas"])
        await self._copy(copying, wanted, world)
        if options["subscriptions"]:
            assert positions is not None, "it was asked for"
            await self._subscriptions(positions, copying, client, admin)
        await self._report(copying, admin)

    async def _copy(self, copying: TopicCopier, wanted: CopyOptions, world: World) -> None:
        """Runs the copy. With --follow a first Ctrl-C ends the copying, and the steps after it still run."""

        loop, task, interrupted = asyncio.get_running_loop(), asyncio.current_task(), False
        assert task is not None, "asyncio.run made one"

        def interrupt() -> None:
            nonlocal interrupted
            interrupted = True
            task.cancel()

        if wanted.follow:
            loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            async with show_progress(copying, world.clock.monotonic, quiet=self._session.out.is_structured):
                await copying.run()
        except asyncio.CancelledError:
            if not interrupted:
                raise
            task.uncancel()
        finally:
            if wanted.follow:
                loop.remove_signal_handler(signal.SIGINT)

    async def _plan(self, source: MigrationSource, copying: TopicCopier, topics: list[TopicToCopy]) -> None:
        rows: list[dict[str, object]] = []
        unit = "entries" if source.is_backlog_in_entries else "messages"
        for topic in topics:
            newest = await source.read_schema(topic.name)
            for part in topic.parts:
                place = await copying.find_destination_state(part)
                after = place.newest.position if place is not None and place.newest is not None else None
                reader = await source.open_reader(part, after)
                try:
                    left = await reader.measure_backlog()
                finally:
                    await reader.close()
                there = "is made" if place is None else "is empty" if not place.messages else "has other messages"
                rows.append({
                    "topic": part.full, unit: left, "schemas": 0 if newest is None else int.from_bytes(newest[1]) + 1,
                    "destination": there if after is None else f"continues after {after}",
                })  # fmt: skip
        self._session.out.print_rows(rows, ["topic", unit, "schemas", "destination"])

    async def _subscriptions(
        self, source: SourceRestClient, copying: TopicCopier, client: Client, admin: AdminClient
    ) -> None:
        from .copying import copy_subscriptions

        for tally in copying.tallies:
            for each in await copy_subscriptions(source, client, admin, tally.topic):
                if not self._session.out.is_structured:
                    print(
                        f"{each['topic']}: subscription {each['subscription']}, backlog {each['backlog']:,}",
                        file=sys.stderr,
                    )

    async def _report(self, copying: TopicCopier, admin: AdminClient) -> None:
        from .copying import MIGRATION_NAME

        totals = make_combined_totals(copying)
        text = f"{totals.messages:,} messages copied, of {len(copying.topics)} topics"
        if self._options["follow"]:
            text += f"; lag {totals.lag:,}" if totals.lag is not None else ""
        text += f". Subscription {MIGRATION_NAME} keeps them: delete it when your consumers have subscribed"
        self._session.out.print_result_text(
            text, topics=len(copying.topics), messages=totals.messages, bytes=totals.bytes, lag=totals.lag
        )


# ------------------------------------------------------------------------------------------------------ progress
# Progress on standard error: a bar for each topic on a terminal, else a line for each topic now and then.
#
#     orders: 120,400 copied, 9,800/s, lag 31,000, 4 s left


BAR_EVERY_S = 0.25
LINE_EVERY_S = 5.0
PROGRESS_LINES_MAX = 20
"""Topics with a line of their own; more have one line together."""

TitledTotals = list[tuple[str, CopyTotals]]


@asynccontextmanager
async def show_progress(copying: TopicCopier, now: Callable[[], float], *, quiet: bool) -> AsyncIterator[None]:
    """While the `async with` block runs, shows the progress of the copy on stderr: bars on a terminal, otherwise a line
    for each topic every LINE_EVERY_S seconds. Shows nothing if `quiet`. `now`: a monotonic clock, in seconds."""
    if quiet:
        yield
        return
    bars = sys.stderr.isatty()
    tasks = Tasks()
    tasks.spawn(_bars(_titled(copying), now) if bars else _lines(_titled(copying), now), "progress")
    try:
        yield
    finally:
        await tasks.close()


def _titled(copying: TopicCopier) -> TitledTotals:
    by_topic = {
        topic.name.full: CopyTotals(each for each in copying.tallies if each.topic.base == topic.name)
        for topic in copying.topics
    }
    return (
        list(by_topic.items()) if len(by_topic) <= PROGRESS_LINES_MAX else [(f"{len(by_topic)} topics",
        make_combined_totals(copying))]
    )


def make_combined_totals(copying: TopicCopier) -> CopyTotals:
    """Returns the progress of all partitions that `copying` copies, as one sum."""
    return CopyTotals(copying.tallies)


def format_progress_line(title: str, totals: CopyTotals, now: float) -> str:
    """Returns the line of progress for `title`, a topic or several. `now`: seconds of a monotonic clock, from which the
    rate is computed."""
    rate = totals.rate(now)
    return f"{title}: {totals.messages:,} copied, {_rest(totals, rate)}"


def _rest(totals: CopyTotals, rate: float) -> str:
    if totals.complete:
        return "complete"
    lag, left = totals.lag, totals.remaining_time_s(rate)
    parts = [f"{rate:,.0f}/s", "lag unknown" if lag is None else f"lag {lag:,}"]
    if lag and left is not None:
        parts.append(f"{_duration(left)} left")
    if totals.why_not_copied:
        parts.append(f"waits: {totals.why_not_copied}")
    return ", ".join(parts)


def _duration(seconds: float) -> str:
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"


async def _lines(titled: TitledTotals, now: Callable[[], float]) -> None:
    """Prints a line for each topic every LINE_EVERY_S; for a complete topic once."""
    while titled:
        await asyncio.sleep(LINE_EVERY_S)
        for title, totals in titled:
            print(format_progress_line(title, totals, now()), file=sys.stderr, flush=True)
        titled = [(title, totals) for title, totals in titled if not totals.complete]


async def _bars(titled: TitledTotals, now: Callable[[], float]) -> None:
    with make_progress_bar() as bar:
        tasks = [(bar.add_task(title, total=None), title, totals) for title, totals in titled]
        try:
            while True:
                _update(bar, tasks, now())
                await asyncio.sleep(BAR_EVERY_S)
        finally:
            _update(bar, tasks, now())


def _update(bar: Progress, tasks: list[tuple[TaskID, str, CopyTotals]], at: float) -> None:
    for id_, title, totals in tasks:
        lag = totals.lag
        whole = None if lag is None else totals.messages + lag
        text = f"{title}  {_rest(totals, totals.rate(at))}"
        bar.update(id_, description=text, completed=totals.messages, total=whole)
