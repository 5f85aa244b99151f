"""`magnetar broker`: one broker, or several processes on one machine that share the topics they are asked for.

With `--processes N` each process is a broker of the cluster, with a name and ports of its own. Clients know the first
one's address; look-ups, of all protocols, lead to the process that has the topic (broker/cluster/ownership.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from . import processes as several
from .members import make_member_world, make_registered_world
from .metrics import SingleProcessOutput, StatusOutput
from .servers import (
    LISTEN_HELP,
    SECURITY,
    check_listeners,
    connect_metadata,
    disconnect,
    is_secured,
    make_memory_plan,
    make_pulsar_ready_facts,
    metadata_options,
    parse_endpoint,
    parse_health_endpoint,
    parse_metadata_address,
    parse_metrics_endpoint,
    readiness_of,
    run_server,
    scheme,
    serve_for_ever,
    serve_metrics,
    server_options,
    with_authentication,
)

if TYPE_CHECKING:
    from ...broker.common.config import BrokerConfig
    from ...broker.server import Broker
    from ...metadata.address import Address
    from ...metadata.store import MetadataStore
    from ...runtime.network import Endpoint, World
    from ...runtime.parent import ProcessSpec


class BrokerOptions(NamedTuple):
    """The options of a process that runs a broker."""

    settings: BrokerConfig
    tree: Address
    wait_s: float
    session_s: float
    security: str | None = None
    metrics: Endpoint | None = None
    health: Endpoint | None = None  # of the first process
    compat: str = "none"
    warning: str = ""
    config: str | None = None
    memory_bytes: int | None = None
    memory_most: int | None = None  # where nothing is set
    processes: int = 1  # which have the memory together


LISTENING = ("listen", "pulsar_listen", "http_listen")
LOADED = ("broker.server", "metadata.remote", "metadata.remote", "runtime.config", "cli.run.metrics")
"""Modules that the processes of several brokers import: once, in the parent."""


async def run_broker(given: BrokerOptions, world: World, voice: StatusOutput) -> None:
    """Runs a broker until the process is cancelled."""
    from ...broker.server import Broker
    from ...runtime.lifecycle import ProcessParts
    from .metrics import MeasuredParts, RepeatedPage, wants_pulsar_names

    security = given.security
    plan = make_memory_plan(
        given.config, given.memory_bytes, broker=given.settings, most=given.memory_most, processes=given.processes
    )
    settings = plan.apply_to(given.settings, "broker")
    world = make_member_world(world, security, "broker")

    async def session() -> MetadataStore:
        return await connect_metadata(world, given.tree, given.wait_s, given.session_s)

    async with ProcessParts(world.clock) as parts:
        store = await parts.start("metadata", session(), disconnect)
        serving = await make_registered_world(parts, world, security, "broker", session)
        later: list[MetadataStore] = []

        async def next_session() -> MetadataStore:
            later.append(await session())
            return later[-1]

        async def close(running: Broker) -> None:
            await running.close()
            for each in later:
                await each.close()

        starting = Broker.start(
            with_authentication(serving, security), settings, store, next_session, time.process_time
        )
        running = await parts.start("broker", starting, close)
        own = MeasuredParts(broker=running, pulsar=wants_pulsar_names(given.compat), memory=plan)
        page = RepeatedPage(voice.combine_metrics(own), world.clock)
        running.rest.measure = running.topic_manager.measure = page
        facts = await serve_metrics(parts, given.metrics, page) | make_pulsar_ready_facts(running)
        voice.report_ready(f"{scheme(security)}://{running.endpoint}", **facts)
        await serve_for_ever(given.warning, readiness_of(broker=running))


def broker_specs(
    given: BrokerOptions, count: int, base: str, ports: several.Ports, log_level: str, log_format: Any
) -> list[ProcessSpec]:
    """Returns the processes of `count` brokers that share the topics for which any of them is asked. The first has the
    ports, the metrics and the warning of `given`, the others ports of their own. Raises Busy or InvalidConfiguration.
    """
    found = []
    given = given._replace(
        metrics=given.metrics and ports.reserve(given.metrics), health=given.health and ports.reserve(given.health)
    )
    for number in range(count):
        asked = {each: getattr(given.settings, each) for each in LISTENING}
        forwarded = given.settings.advertised is not None
        listening = {
            each: at and ports.reserve(several.address_of_process(at, number, forwarded=forwarded)) for each,
            at in asked.items()
        }  # fmt: skip
        one = given._replace(settings=settings_of_process(given.settings, number, base, listening))
        if number:
            one = one._replace(metrics=None, health=None, warning="")
        name = f"broker-{number + 1}"
        found.append(
            several.make_spec(
                name, partial(run_broker, one), log_level, log_format, shows=not number, health=one.health
            )
        )
    return found


def ready_line_of(facts: dict[str, dict[str, str]]) -> tuple[str, Mapping[str, object]]:
    """Returns the URL and the facts of the first broker, where clients connect, for the ready line."""
    first = dict(facts["broker-1"])
    return first.pop("url"), first


def with_share_group(settings: BrokerConfig) -> BrokerConfig:
    """Returns the settings of a broker beside which others may run: they share topics, unless their settings name
    several groups."""
    import msgspec

    return settings if settings.share_group else msgspec.structs.replace(settings, share_group=settings.cluster)


def name_of_address(settings: BrokerConfig) -> str:
    """Returns a name for several brokers without one: the same one after a restart, so that an order to drain one of
    them is found again. It is made of the address at which clients reach the first; random if that says too little."""
    known = settings.advertised or settings.listen
    port = known.port or settings.listen.port
    is_any = known.host in ("0.0.0.0", "::")
    digest = os.urandom(4) if is_any or not port else sha256(str(known._replace(port=port)).encode()).digest()
    return f"broker-{digest[:4].hex()}"


def settings_of_process(
    settings: BrokerConfig, number: int, base: str, listening: dict[str, Endpoint | None]
) -> BrokerConfig:
    """Returns the settings of process `number`, from 0, of several that share topics. Raises InvalidConfiguration."""
    import msgspec

    from ...proto.errors import InvalidConfiguration

    if settings.pulsar_listeners:
        raise InvalidConfiguration(
            "pulsar_listeners says where one broker is reached: it goes with one process", setting="pulsar_listeners"
        )
    known_as = settings.advertised
    return msgspec.structs.replace(
        settings, name=f"{base}-{number + 1}", share_group=settings.share_group or base,
        advertised=known_as and known_as._replace(port=known_as.port and known_as.port + number),
        **listening,
    )  # fmt: skip


@click.command()
@click.option("--listen", default="127.0.0.1:7650", show_default=True, help=LISTEN_HELP)
@click.option(
    "--pulsar-listen", default=None, metavar="HOST:PORT", help="Serve Pulsar's protocol there (default: nowhere)."
)
@click.option(
    "--http-listen", default=None, metavar="HOST:PORT",
    help="Serve REST administration, look-ups and metrics there (default: nowhere).",
)  # fmt: skip
@click.option("--advertise", default=None, metavar="HOST:PORT", help="Where clients reach it (default: as --listen).")
@metadata_options
@several.processes_option("Brokers that share the topics which the first is asked for, each at ports of its own.")
@click.option(
    "--name", default=None,
    help="Its name in 'magnetar brokers list' (default: a random one; of its address with --processes).",
)  # fmt: skip
@SECURITY
@server_options("info", compat=["pulsar"])
def broker(
    listen: str,
    pulsar_listen: str | None,
    http_listen: str | None,
    advertise: str | None,
    metadata_: str,
    wait_s: float,
    session_s: float,
    processes_: int,
    name: str | None,
    security: str | None,
    config: str | None,
    memory_bytes: int | None,
    metrics: str | None,
    health: str | None,
    insecure: bool,
    metrics_compat: str,
    log_level: str,
    log_format: str,
) -> int:
    """Run a broker: it owns topics for a while and keeps nothing itself.

    \b
    Examples:
      magnetar broker --listen 127.0.0.1:7650 --metadata 127.0.0.1:7640
      magnetar broker --listen 0.0.0.0:7650 --advertise b1.example.org:7650 --processes 4 --security broker.toml
    """
    pulsar = None if pulsar_listen is None else parse_endpoint(pulsar_listen, "--pulsar-listen")
    http = None if http_listen is None else parse_endpoint(http_listen, "--http-listen")
    where, tree = parse_endpoint(listen, "--listen"), parse_metadata_address(metadata_, security)
    known_as = None if advertise is None else parse_endpoint(advertise, "--advertise")
    scraped = parse_metrics_endpoint(metrics)
    doors = {"listen": where, "pulsar-listen": pulsar, "http-listen": http}
    warning = check_listeners(insecure, **({} if is_secured(security) else doors), metrics=scraped)

    from ...broker.common.config import BrokerConfig
    from ...runtime.config import load

    given = {
        "listen": str(where), "advertised": None if known_as is None else str(known_as), "name": name,
        "pulsar_listen": None if pulsar is None else str(pulsar),
        "http_listen": None if http is None else str(http),
    }  # fmt: skip
    settings = with_share_group(load(BrokerConfig, "broker", file=config, overrides=given))
    one = BrokerOptions(
        settings, tree, wait_s, session_s, security, scraped, parse_health_endpoint(health), metrics_compat, warning,
        config, memory_bytes,
    )  # fmt: skip
    if processes_ > 1:
        return _several(one, processes_, log_level, log_format)
    return run_server(
        lambda world: run_broker(one, world, SingleProcessOutput()), log_level, log_format, health=one.health
    )


def _several(given: BrokerOptions, count: int, log_level: str, log_format: Any) -> int:
    several.check_fork()
    given = given._replace(processes=count)
    base = given.settings.name or name_of_address(given.settings)
    ports = several.Ports()
    tiers = [broker_specs(given, count, base, ports, log_level, log_format)]
    several.preload_modules(*LOADED)

    def ready(facts: dict[str, dict[str, str]]) -> tuple[str, Mapping[str, object]]:
        url, first = ready_line_of(facts)
        return url, {"processes": count, **first}

    return several.run_process_tiers(tiers, ready, log_level, log_format)
