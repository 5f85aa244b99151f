"""The broker process: it owns topics while it has a metadata session, and stores nothing itself.

    broker = await Broker.start(world, config, metadata)     the broker serves when this returns
    broker.endpoint                                          the address for clients
    await broker.close()                                     ends in order: topics, bundles, streams

When the metadata session is lost, the broker continues to serve its topics until it has a new session (`new_session`).
Then it keeps or abandons each topic (broker/node/topic_manager.py). If there is no new session within
`session_lost_grace_s` seconds, the broker abandons all topics: by then another broker serves them, and their consumers
should connect there. This time starts again while no process listens at the only address of the metadata, because then
no other broker has a session either. Without `new_session` the broker abandons all topics at once.

Also in this file, each below its heading: the parts of a broker that use memory, and the share of `memory_bytes` that
each gets (memory); the health and reflection services of gRPC (probes); the service of an HTTP listener (rest).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor

from ..metadata.store import MetadataStore, ensure_id_counter
from ..proto import health_pb2, reflection_pb2
from ..proto.errors import InvalidConfiguration, MagnetarError, NotFound, SessionExpired
from ..runtime.access import CallerLimits, ListenerAccess
from ..runtime.config import MIB, NO_LIMIT, MemoryShare
from ..runtime.metrics import FillMetricsPage, write_empty_metrics
from ..runtime.network import (
    HEALTH_SERVICE,
    REFLECTION_SERVICES,
    ByteStream,
    CallContext,
    Endpoint,
    RunningByteServer,
    RunningServer,
    World,
)
from ..runtime.tasks import Supervisor
from .cluster.balance_core import BALANCE_CHECK_INTERVAL_S
from .cluster.ownership import SERVER_LISTS_REFRESH_S
from .common.config import BrokerConfig
from .common.retry import LogThrottle
from .grpc import checked as later
from .grpc.checked import AuthorizedService
from .grpc.connection import BrokerService
from .node.load_turns import MEMORY_MEASURE_INTERVAL_S, MEMORY_MEASURE_INTERVAL_S_PER_TOPIC
from .node.topic_manager import TopicManager
from .pulsar.protocol import PulsarProtocol, make_advertised_urls
from .session.schedules import ScheduleRunner
from .session.sharing import LimitSharer
from .subscription.core.subscription_types import ENTRY_POINT_GROUP, load_installed_types
from .topic.topic import Topic

if TYPE_CHECKING:
    from .grpc.checked import AuthorizedService
    from .node.topic_manager import BrokerReadinessCheck
    from .rest.connection import HttpListener

_LOG = logging.getLogger("magnetar.broker")

OpenMetadataSession = Callable[[], Awaitable[MetadataStore]]
LOAD_REPORT_INTERVAL_S = 10.0
"""Seconds between two reports of a broker's load; a report is a write of the metadata, if the load has changed."""
ORDERS_CHECK_INTERVAL_S = 1.0
"""Seconds between two looks at the orders to drain: a read of the metadata."""
EVICTION_INTERVAL_S = 2.0
"""Seconds between two looks for bundles that must leave a broker: a list of brokers, if a namespace of its bundles asks
for labels."""
BUSY_SMOOTHING_FACTOR = 0.5 ** (LOAD_REPORT_INTERVAL_S / 30.0)
"""The share of the last report in the next one: what a broker did 30 s ago counts half."""
SESSION_RETRY_S = 1.0
"""Seconds between two attempts to open a new metadata session."""


class Broker:
    """A broker. The caller must close `metadata`. `new_session`: a function that opens another metadata session; it is
    called when the session is lost; None: the broker then abandons its topics. `used_s`: as in `start`."""

    def __init__(
        self, world: World, config: BrokerConfig, metadata: MetadataStore,
        new_session: OpenMetadataSession | None = None, used_s: Callable[[], float] = lambda: 0.0,
    ) -> None:  # fmt: skip
        config.validate()
        self.topic_manager = TopicManager(world, config)
        self._services = {
            name: AuthorizedService(name, service, self.topic_manager.access)
            for name, service in (
                ("Broker", BrokerService(self.topic_manager)),
                ("Admin", later.make_lazy_admin_service(self.topic_manager)),
                ("Transactions", later.make_lazy_transaction_service(self.topic_manager)),
            )
        }  # fmt: skip
        self.schedules = ScheduleRunner(self.topic_manager)
        self.rest = RestProtocol(self.topic_manager, self._services)
        self._world = world
        self._config = config
        self._metadata = metadata
        self._new_session = new_session
        self._used_s = used_s
        self.background = Supervisor()
        self._sessions = Supervisor()  # goes on while the broker drains
        self._serving: RunningServer | None = None
        self._pulsar: RunningByteServer | None = None
        self._http: RunningByteServer | None = None
        self._closing = False
        self._alone_since = 0.0  # monotonic time since which it has no session while another broker may have one

    @classmethod
    async def start(
        cls, world: World, config: BrokerConfig, metadata: MetadataStore,
        new_session: OpenMetadataSession | None = None, used_s: Callable[[], float] = lambda: 0.0,
    ) -> Broker:  # fmt: skip
        """Starts a broker and returns it; the broker serves when this method returns. `new_session`: as in Broker.
        `used_s`: a function that returns the processor time that this process has used, in seconds; the broker reports
        its load from it. Raises Busy if a port is taken; InvalidConfiguration if `config` is invalid, or an installed
        subscription type cannot be registered; and the errors of the metadata."""
        if config.subscription_policies:
            await world.workers.load("importlib.metadata")
            load_installed_types(parse_policy_names(config), find_installed_policies)
        broker = cls(world, config, metadata, new_session, used_s)
        await broker._start()
        return broker

    async def _start(self) -> None:
        config = self._config
        services: list[tuple[str, object]] = list(self._services.items())
        names = tuple(f"magnetar.wire.{each}" for each in self._services)
        services += make_probe_services(self.topic_manager.readiness, names)
        limits = CallerLimits(
            config.max_connections, config.max_streams_per_address, config.first_frame_s, config.unread_s
        )
        network = self._world.network
        access = ListenerAccess(limits=limits, memory=self.topic_manager.memory)
        self._serving = await network.serve(config.listen, services, access)
        try:
            if config.pulsar_listen is not None:
                self._pulsar = await network.serve_bytes(
                    config.pulsar_listen, PulsarProtocol(self.topic_manager).serve, access
                )
            if config.http_listen is not None:
                self._http = await network.serve_bytes(config.http_listen, self.rest.serve, access)
            await ensure_id_counter(self._metadata)
            await self.topic_manager.start_owning_bundles(
                self._metadata, str(self.endpoint), self.pulsar_urls, self.http_url
            )
        except BaseException:
            await self._stop_serving()
            raise
        self._sessions.start_supervised("broker-session", self._follow_session)
        self.background.start_supervised("broker-upkeep", self._maintain_topics)
        self.background.start_supervised("broker-orphans", self._sweep)
        self.background.start_supervised("broker-load", self._report_load)
        self.background.start_supervised("broker-orders", self._follow_orders)
        self.background.start_supervised("broker-isolation", self._evict_misplaced_bundles)
        self.background.start_supervised("broker-members", self._read_members)
        self.background.start_supervised("broker-schedules", self.schedules.run)
        self.background.start_supervised("broker-schedules-watch", self.schedules.follow_schedules)
        self.background.start_supervised("broker-shares", LimitSharer(self.topic_manager).run)
        if config.share_group:
            self.background.start_supervised("broker-balancer", self._balance_load)
        if config.state_memory_bytes:
            self.background.start_supervised("broker-memory", self._measure_memory)

    @property
    def name(self) -> str:
        """Returns the name of the broker: the configured one, or a random one."""
        return self.topic_manager.name

    @property
    def topics(self) -> dict[str, Topic]:
        """Returns the topics that are loaded at this broker, by full name."""
        return self.topic_manager.loaded

    @property
    def endpoint(self) -> Endpoint:
        """Returns the address at which clients reach the broker over gRPC. The broker must have been started."""
        assert self._serving is not None, "the broker listens"
        listening = self._serving.endpoint
        advertised = self._config.advertised
        if advertised is None:
            return listening
        return advertised if advertised.port else Endpoint(advertised.host, listening.port)

    @property
    def pulsar_urls(self) -> dict[str, tuple[str, ...]]:
        """Returns the URLs at which Pulsar clients reach the broker, by the name of the listener; {} if it does not
        serve them."""
        if self._pulsar is None:
            return {}
        return make_advertised_urls(self._config, self._pulsar.endpoint, is_encrypted=self._pulsar.is_encrypted)

    @property
    def http_url(self) -> str:
        """Returns the URL at which tools reach the broker over HTTP; "" if it serves no HTTP."""
        if self._http is None:
            return ""
        host = self._config.advertised.host if self._config.advertised is not None else self._http.endpoint.host
        return f"http{'s' * self._http.is_encrypted}://{Endpoint(host, self._http.endpoint.port)}"

    async def _maintain_topics(self) -> None:
        while True:
            try:
                await self.topic_manager.maintain_topics_in_buckets(self._config.trim_interval_s)
            except Exception:  # a fault in one topic must not end the upkeep of all
                _LOG.exception("topics were not looked after")
                await asyncio.sleep(self._config.trim_interval_s)
            try:
                if self.topic_manager.has_session:
                    await self.topic_manager.transactions.load_unowned_coordinators()
            except MagnetarError as error:
                _LOG.warning("coordinators of transactions were not looked after: %s", error)

    async def _report_load(self) -> None:
        now, busy = self._world.clock.monotonic, 0.0
        at, used = now(), self._used_s()
        balancing = self.topic_manager.balancing
        while True:
            await asyncio.sleep(LOAD_REPORT_INTERVAL_S)
            since, before, at, used = at, used, now(), self._used_s()
            balancing.busy, balancing.busy_since_s = 100 * (used - before) / max(at - since, 1e-3), since
            busy = busy * BUSY_SMOOTHING_FACTOR + balancing.busy * (1 - BUSY_SMOOTHING_FACTOR)
            try:
                await self.topic_manager.report_load(round(busy))
            except MagnetarError as error:
                _LOG.info("the load of this broker is not reported: %s", error)

    async def _balance_load(self) -> None:
        """Takes part in the balance of load, from the time on that another broker is registered: until then it has no
        use, and its modules, which load the administration, cost every start."""
        await self._wait_for_other_broker()
        await self._world.workers.load(f"{__package__}.session.balancing")
        from .session.balancing import AutomaticBalancer

        await AutomaticBalancer(self.topic_manager).run()

    async def _wait_for_other_broker(self) -> None:
        while True:
            try:
                if any(each.name != self.name for each in await self.topic_manager.list_brokers()):
                    return
            except MagnetarError as error:
                _LOG.debug("whether there are other brokers is not known: %s", error)
            await asyncio.sleep(BALANCE_CHECK_INTERVAL_S)

    async def _follow_orders(self) -> None:
        throttle = LogThrottle(self._world.clock)
        while True:
            await asyncio.sleep(ORDERS_CHECK_INTERVAL_S)
            try:
                await self.topic_manager.apply_drain_order()
            except MagnetarError as error:
                if throttle.should_log(error):
                    _LOG.warning("whether this broker is to drain is not known: %s", error)

    async def _evict_misplaced_bundles(self) -> None:
        throttle = LogThrottle(self._world.clock)
        while True:
            await asyncio.sleep(EVICTION_INTERVAL_S)
            try:
                await self.topic_manager.evict_misplaced_bundles()
            except MagnetarError as error:
                if throttle.should_log(error):
                    _LOG.warning("whether bundles must leave this broker is not known: %s", error)

    async def _read_members(self) -> None:
        while True:
            await self.topic_manager.read_brokers_and_bookies()
            try:
                await self.topic_manager.update_dead_broker_records()
            except MagnetarError as error:
                _LOG.info("the records of brokers that died are not looked after: %s", error)
            await asyncio.sleep(SERVER_LISTS_REFRESH_S)

    async def _measure_memory(self) -> None:
        while True:
            loaded = self.topic_manager.loaded
            await asyncio.sleep(max(MEMORY_MEASURE_INTERVAL_S, len(loaded) * MEMORY_MEASURE_INTERVAL_S_PER_TOPIC))
            await self.topic_manager.state.measure_topics(loaded.values())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._config.orphan_sweep_s)
            try:
                await self.topic_manager.delete_orphans_if_first_broker()
            except MagnetarError as error:
                _LOG.warning("no search for ledgers that no record names: %s", error)

    async def _follow_session(self) -> None:
        while True:
            await self._metadata.wait_session_lost()
            if self._new_session is None:
                await self._drop_all()
                return
            _LOG.error("the metadata session is lost: topics are served on, and looked at in the next session")
            if self.topic_manager.has_session:
                self.topic_manager.suspend_ownership()
            giving_up = asyncio.create_task(self._drop_after_grace(), name="broker-give-up")
            try:
                await self._renew(self._new_session, giving_up)
            finally:
                giving_up.cancel()
                await asyncio.gather(giving_up, return_exceptions=True)

    async def _drop_after_grace(self) -> None:
        now, grace_s = self._world.clock.monotonic, self._config.session_lost_grace_s
        self._alone_since = now()
        while (left := self._alone_since + grace_s - now()) > 0:  # noqa: ASYNC110 - it moves meanwhile
            await asyncio.sleep(left)
        await self._drop_all()

    async def _drop_all(self) -> None:
        _LOG.error("there is no metadata session: all topics are dropped")
        try:
            await self.topic_manager.abandon_all_topics(SessionExpired("the broker's metadata session is lost"))
        except Exception:  # it owns nothing any more in any case, and must serve again
            _LOG.exception("topics were not dropped in order")

    async def _renew(self, new_session: OpenMetadataSession, giving_up: asyncio.Task[None]) -> None:
        """Retries until the broker is in a new metadata session. `_metadata` stays the lost session until then: after
        any failure this is called again (runtime/tasks.py), and no session is left open in which the broker is not
        registered."""
        throttle = LogThrottle(self._world.clock)
        while True:
            try:
                fresh = await new_session()
            except MagnetarError as error:
                if error.fields.get("listens") == "no":
                    self._alone_since = self._world.clock.monotonic()
                if throttle.should_log(error):
                    _LOG.warning("no new metadata session yet: %s", error)
            else:
                entered = False
                try:
                    if not self.topic_manager.has_session:
                        await asyncio.wait([giving_up])  # until the topics that it drops have ended
                    entered = await self._enter_again(fresh)
                finally:
                    if not entered:
                        await fresh.close()
                if entered:
                    self._metadata = fresh
                    return
            await asyncio.sleep(SESSION_RETRY_S)

    async def _enter_again(self, fresh: MetadataStore) -> bool:
        """Registers the broker in the new session, and resumes its topics. Returns False if that failed."""
        try:
            if self.topic_manager.has_session:
                await self.topic_manager.resume_ownership(fresh)
            elif self._closing:
                return False
            else:
                await self.topic_manager.start_owning_bundles(
                    fresh, str(self.endpoint), self.pulsar_urls, self.http_url
                )
        except MagnetarError as error:
            _LOG.warning("not registered in the new metadata session: %s", error)
            if self.topic_manager.has_session:
                self.topic_manager.suspend_ownership()
            return False
        _LOG.warning("registered in a new metadata session, %d topics are kept", len(self.topic_manager.loaded))
        return True

    async def close(self) -> None:
        """Closes the broker in order, and returns when all topics are unloaded and all connections are closed. First
        moves its bundles to other brokers, for at most `drain_timeout_s` seconds. A second call does nothing. The
        caller must close the metadata session."""
        if self._closing:
            return
        self._closing = True
        await self.background.close()
        await self._drain()
        await self._sessions.close()
        await self.topic_manager.close()
        await self._stop_serving(self._config.close_grace_s)

    async def _drain(self) -> None:
        """Gives what this broker owns to others of its group, for `drain_timeout_s` at most, and then ends the moves
        that have begun. If the metadata session is lost meanwhile, they wait for the next one; without metadata at the
        end of that time they fail at once."""
        timeout_s = self._config.drain_timeout_s
        if not timeout_s or not await self.topic_manager.can_release_bundles():
            return
        draining = asyncio.create_task(self.topic_manager.drain_broker(), name="broker-drain")
        try:
            if (await asyncio.wait([draining], timeout=timeout_s))[0]:
                await draining
            else:
                _LOG.warning("not everything is given to other brokers, the rest is released: too slow")
                await self.topic_manager.stop_waiting_for_metadata()
        except MagnetarError as error:
            _LOG.warning("not everything is given to other brokers, the rest is released: %s", error)
        finally:
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)

    async def _stop_serving(self, grace_s: float = 0.0) -> None:
        self.rest.shut_down()
        for serving in (self._http, self._pulsar, self._serving):
            if serving is not None:
                await serving.close(grace_s)


# -------------------------------------------------------------------------------------------------------- memory
# The parts of a broker that use memory, and the share of `memory_bytes` that each gets (runtime/config.py).


BROKER_MEMORY_SHARES = (
    MemoryShare("clients", "broker.client_memory_bytes", 1, 36, 16 * MIB, NO_LIMIT,
          "what arrives, requests of all clients that are not handled, and answers that have not left"),
    MemoryShare("appends", "broker.append_memory_bytes", 1, 24, 8 * MIB, 1 << 30,
          "entries of all ledgers that a bookie has not answered yet"),
    MemoryShare("tail-cache", "broker.cache_bytes", 1, 28, 2 * MIB, 64 * MIB, "new entries, for consumers at the tail"),
    MemoryShare("catch-up-cache", "broker.catch_up_cache_bytes", 1, 8, MIB, 16 * MIB,
    "what was read last from bookies"),
    MemoryShare("catch-up-reads", "broker.read_memory_bytes", 1, 12, 4 * MIB, 1 << 30,
          "what was read ahead for all subscriptions, and what waits for its key's consumer"),
    MemoryShare("compaction", "broker.compaction_memory_bytes", 1, 8, 4 * MIB, 256 * MIB, "keys of a compaction"),
    MemoryShare("state", "broker.state_memory_bytes", 1, 24, 8 * MIB, NO_LIMIT,
          "topics, subscriptions with their holes and delayed messages, connections"),
)  # fmt: skip
"""The weights are about the mebibytes of each part in a broker with 128 MiB."""


def parse_policy_names(config: BrokerConfig) -> list[str]:
    """Returns the names in the setting `subscription_policies`."""
    return [name for each in config.subscription_policies.split(",") if (name := each.strip())]


def find_installed_policies(name: str) -> list[object]:
    """Returns the objects of the entry points of this name; [] if no installed package has one. Raises
    InvalidConfiguration if one cannot be imported."""
    from importlib.metadata import entry_points

    try:
        return [each.load() for each in entry_points(group=ENTRY_POINT_GROUP, name=name)]
    except Exception as error:  # of the package: the operator must hear of it
        raise InvalidConfiguration(f"subscription_policies: {name!r} cannot be imported: {error!r}") from error


# --------------------------------------------------------------------------------------------------------------- probes
# gRPC's own services at a broker's port: health and server reflection, for its probes and tools.
#
#     grpc.health.v1.Health                     Check, which needs no credentials, and Watch
#     grpc.reflection.v1.ServerReflection       and v1alpha: the services of this port and their messages
#
# `Check` answers as `GET /readyz` and says no more. Watch and reflection are calls like others: on a secured
# listener their caller is authenticated (runtime/grpc/server.py). Guarding tests: tests/broker/grpc/test_probes.py.

HEALTH_WATCH_INTERVAL_S = 1.0
"""Seconds between two looks for a caller of Watch, which is told of changes alone."""
_NOT_FOUND, _UNIMPLEMENTED = 5, 12
_Status = health_pb2.HealthCheckResponse


class HealthService:
    """Implements gRPC's health service: the status is SERVING while the broker is ready. `services`: the full names of
    the services whose status may be requested, in addition to "" (the whole server)."""

    def __init__(self, readiness: BrokerReadinessCheck, services: tuple[str, ...]) -> None:
        self._readiness = readiness
        self._services = services

    async def check(self, request: Any, context: CallContext) -> Any:
        """Answers the rpc Check with the current status. Raises NotFound if this server does not have the requested
        service."""
        if request.service and request.service not in self._services:
            raise NotFound("this server has no service of that name")
        return await self._answer()

    async def watch(self, stream: Any, context: CallContext) -> None:
        """Answers the rpc Watch: sends the status, and then each change of the status within HEALTH_WATCH_INTERVAL_S
        seconds, until the caller disconnects; then raises the error with which the stream ended. For a service that
        this server does not have, sends SERVICE_UNKNOWN."""
        request = await stream.receive()
        known = not request.service or request.service in self._services
        last = None
        while stream.is_open:
            found = await self._answer() if known else _Status(status=_Status.SERVICE_UNKNOWN)
            if found != last:
                await stream.send(found)
                last = found
            await asyncio.sleep(HEALTH_WATCH_INTERVAL_S)
        await stream.receive()  # raises why it ended

    async def _answer(self) -> Any:
        why = await self._readiness.why_not_ready()
        return _Status(status=_Status.NOT_SERVING if why else _Status.SERVING)


class ReflectionService:
    """Implements gRPC's server reflection for tools: describes the services of this port and their messages.
    `services`: the full names of the services that it lists."""

    def __init__(self, services: tuple[str, ...]) -> None:
        self._services = services

    async def server_reflection_info(self, stream: Any, context: CallContext) -> None:
        """Answers each request of the stream until the caller ends the stream, and then raises EndOfStream."""
        while True:
            request = await stream.receive()
            answer = reflection_pb2.ServerReflectionResponse(valid_host=request.host, original_request=request)
            self._fill(answer, request)
            await stream.send(answer)

    def _fill(self, answer: Any, request: Any) -> None:
        pool = descriptor_pool.Default()
        kind = request.WhichOneof("message_request")
        try:
            if kind == "list_services":
                for name in self._services:
                    answer.list_services_response.service.add(name=name)
            elif kind == "file_by_filename":
                _add_files(answer, pool.FindFileByName(request.file_by_filename))
            elif kind == "file_containing_symbol":
                _add_files(answer, _file_of(request.file_containing_symbol))
            elif kind == "all_extension_numbers_of_type":
                pool.FindMessageTypeByName(request.all_extension_numbers_of_type)
                answer.all_extension_numbers_response.base_type_name = request.all_extension_numbers_of_type
            elif kind == "file_containing_extension":
                raise KeyError("there are no extensions")
            else:
                answer.error_response.error_code = _UNIMPLEMENTED
                answer.error_response.error_message = "the request asks for nothing that is known here"
        except KeyError as error:
            answer.error_response.error_code = _NOT_FOUND
            answer.error_response.error_message = str(error.args[0])


def _file_of(symbol: str) -> FileDescriptor:
    """Returns the file that declares a message, a service or a method. Raises KeyError."""
    pool = descriptor_pool.Default()
    service, _, method = symbol.rpartition(".")
    try:
        return pool.FindFileContainingSymbol(symbol)
    except KeyError:
        found = pool.FindServiceByName(service)  # the pool knows no method by its name
        if method not in found.methods_by_name:
            raise
        return found.file


def _add_files(answer: Any, file: FileDescriptor) -> None:
    """Adds the file and all that it imports, each once."""
    found: dict[str, bytes] = {}
    waiting = [file]
    while waiting:
        one = waiting.pop()
        if one.name not in found:
            found[one.name] = one.serialized_pb
            waiting += one.dependencies
    answer.file_descriptor_response.file_descriptor_proto.extend(found.values())


def make_probe_services(readiness: BrokerReadinessCheck, services: tuple[str, ...]) -> list[tuple[str, object]]:
    """Returns the services for health checks and reflection, by their full names. `readiness`: says whether the broker
    is ready; `services`: the full names of the other services at the same port."""
    names = (*services, HEALTH_SERVICE, *REFLECTION_SERVICES)
    reflection = ReflectionService(names)
    return [(HEALTH_SERVICE, HealthService(readiness, names)), *((name, reflection) for name in REFLECTION_SERVICES)]


# ----------------------------------------------------------------------------------------------------------------- rest
# The service of an HTTP listener: administration by Pulsar's REST v2, look-ups, metrics, health.
#
#     rest = RestProtocol(broker, services)
#     serving = await world.network.serve_bytes(endpoint, rest.serve, access)
#     rest.shut_down()                                      idle connections end, the others after their answer
#
# starlette and uvicorn are imported at the first connection, so an unused listener does not hold them in memory.
# A request is authenticated by its own header (or the connection's certificate), and then calls the broker's services
# (broker/grpc/checked.py): the same rights and the same audit log as over gRPC.
# Guarding tests: tests/broker/rest/.

class RestProtocol:
    """Serves the connections of an HTTP listener. `services`: the services "Admin" and "Broker", which check the
    caller's rights. `measure`: the function that writes the metrics page for `GET /metrics`."""

    def __init__(self, broker: TopicManager, services: Mapping[str, AuthorizedService]) -> None:
        self._broker = broker
        self._services = services
        self._connections: HttpListener | None = None
        self._loading = asyncio.Lock()
        self._shut_down = False
        self.measure: FillMetricsPage = write_empty_metrics

    async def serve(self, stream: ByteStream) -> None:
        """Serves one connection until the client or the broker ends it, or the connection is lost. Returns at once
        after `shut_down`. The first call imports the code of the REST API."""
        async with self._loading:
            if self._connections is None:
                rest = f"{__package__}.rest"
                await self._broker.world.workers.load(f"{rest}.application", f"{rest}.connection")
                self._connections = self._open(stream)
        if not self._shut_down:
            await self._connections.serve(stream)

    def _open(self, stream: ByteStream) -> HttpListener:
        from .rest.application import Application
        from .rest.connection import HttpListener

        application = Application(self._broker, self._services, stream.guard, lambda: self.measure)
        return HttpListener(application, self._broker.world.clock, self._broker.config.first_frame_s)

    def shut_down(self) -> None:
        """Ends idle connections at once, and each other connection after its present answer. New connections are not
        served."""
        self._shut_down = True
        if self._connections is not None:
            self._connections.shut_down()
