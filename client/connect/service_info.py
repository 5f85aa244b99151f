"""The cluster to which a client connects, if that may change: one cluster, a program's own provider of clusters, or a
list of clusters with fail-over.

    client = Client(AutoClusterFailover(ServiceInfo("pulsar://a:6650"), [ServiceInfo("pulsar://b:6650")]))

The names are those of Pulsar's client. `ClientCluster` connects the client, and moves it to another cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ...proto.errors import MagnetarError
from ...runtime.access import CallerAccess
from ...runtime.network import Endpoint, Network, World
from ...runtime.tasks import Tasks, run_together
from ..common.checks import (
    TEXT_CHECK,
    TEXT_OR_NONE,
    ParameterCheck,
    WrongValue,
    check_parameter,
    check_parameters,
    make_instance_check,
    make_whole_number_check,
    shorten_value,
)
from ..common.errors import InvalidConfiguration
from ..common.loggers import ignore_error, log_foreign_error, run_logging_errors
from ..core.failover import ClusterFailoverCore
from ..model.settings import ClientSettings
from .authentication import Authentication, make_caller_access
from .connections import Connections
from .discovery import parse_service_url

_COUNT = make_whole_number_check(1)


class ServiceInfo:
    """The description of a cluster for a client: its service URL, the client's credentials there, and the certificate
    authorities that the client trusts (a PEM file; None: the system's). Raises InvalidConfiguration or InvalidUrl if a
    value is wrong."""

    def __init__(
        self, service_url: str, authentication: Authentication | None = None,
        tls_trust_certs_file_path: str | None = None,
    ) -> None:  # fmt: skip
        check_parameter("service_url", TEXT_CHECK, service_url)
        if authentication is not None and not isinstance(authentication, Authentication):
            kind = type(authentication).__name__  # never its value: it may be the token
            raise InvalidConfiguration(f"authentication is one of magnetar.Authentication…, not a {kind}")
        check_parameter("tls_trust_certs_file_path", TEXT_OR_NONE, tls_trust_certs_file_path)
        self.url = parse_service_url(service_url)
        self.authentication = authentication
        self._service_url = service_url
        self._trusted = tls_trust_certs_file_path

    @property
    def service_url(self) -> str:
        """Returns the service URL as the program gave it."""
        return self._service_url

    @property
    def use_tls(self) -> bool:
        """Returns whether connections to the cluster are encrypted."""
        return self.url.encrypted

    @property
    def tls_trust_certs_file_path(self) -> str | None:
        """Returns the path of the PEM file of trusted certificate authorities; None: the system's authorities are
        trusted."""
        return self._trusted

    @classmethod
    def wrap(cls, service_info: ServiceInfo) -> ServiceInfo:
        """Returns `service_info` unchanged; exists because Pulsar's client has two such classes and converts between
        them. Raises InvalidConfiguration if it is no ServiceInfo."""
        if not isinstance(service_info, ServiceInfo):
            raise InvalidConfiguration(f"wrap takes a ServiceInfo, not {shorten_value(service_info)}")
        return service_info

    def __repr__(self) -> str:
        return (
            f"ServiceInfo(service_url={self.service_url!r}, use_tls={self.use_tls!r},"
            f" tls_trust_certs_file_path={self.tls_trust_certs_file_path!r})"
        )


class ServiceInfoProvider:
    """Base class of a program's own providers: a provider returns the cluster to connect to first, and may report
    another cluster later.

    `initialize` is called once, when the client is made. The provider may call `on_service_info_update` with a
    ServiceInfo from any thread, until `close`, which is called when the client is closed.
    """

    def initial_service_info(self) -> ServiceInfo:
        """Returns the cluster to connect to first; a derived class must implement this. Called once, when the client is
        made, which raises InvalidConfiguration if the result is no ServiceInfo."""
        raise NotImplementedError

    def initialize(self, on_service_info_update: Callable[[ServiceInfo], None]) -> None:
        """Called once by the client, when it is made; a derived class must implement this. `on_service_info_update`
        takes a ServiceInfo and makes the client connect to that cluster. It may be called from any thread, and raises
        InvalidConfiguration or OperationNotSupported for a wrong value."""
        raise NotImplementedError

    def close(self) -> None:
        """Stops the threads or tasks that the provider has started. Called when the client is closed."""


class AutoClusterFailover:
    """A preferred cluster (`primary`), and the clusters that replace it while it does not answer, in the order of
    preference.

    All clusters are probed, with a pause of `check_interval_ms` between the rounds. After `failover_threshold` failures
    of the present cluster in a row the client changes to the first cluster that answers. When the primary has answered
    `switch_back_threshold` times in a row, the client changes back. Raises InvalidConfiguration if a value is wrong."""

    def __init__(
        self, primary: ServiceInfo, secondary: list[ServiceInfo], check_interval_ms: int = 5000,
        failover_threshold: int = 1, switch_back_threshold: int = 1,
    ) -> None:  # fmt: skip
        check_parameter("primary", make_instance_check(ServiceInfo, optional=False), primary)
        infos = ParameterCheck(
            "a list of at least one ServiceInfo", (list,), lambda found: bool(found) and all(map(_is, found))
        )
        check_parameter("secondary", infos, secondary)
        numbers: dict[str, Any] = {
            "check_interval_ms": check_interval_ms, "failover_threshold": failover_threshold,
            "switch_back_threshold": switch_back_threshold,
        }  # fmt: skip
        check_parameters(dict.fromkeys(numbers, _COUNT), numbers)
        self.primary = primary
        self.secondary = list(secondary)
        self.check_interval_ms = check_interval_ms
        self.failover_threshold = failover_threshold
        self.switch_back_threshold = switch_back_threshold

    def __repr__(self) -> str:
        return (
            f"AutoClusterFailover(primary={self.primary!r}, secondary={self.secondary!r},"
            f" check_interval_ms={self.check_interval_ms!r}, failover_threshold={self.failover_threshold!r},"
            f" switch_back_threshold={self.switch_back_threshold!r})"
        )


def _is(found: object) -> bool:
    return isinstance(found, ServiceInfo)


def find_first_service_info(
    service: object, authentication: object, options: dict[str, Any]
) -> ServiceInfo:
    """Returns the cluster to which a client connects first. `service`: the client's `service_url` parameter; `options`:
    its other parameters. Raises InvalidUrl if the URL is malformed, InvalidConfiguration if another value is wrong or
    belongs into the ServiceInfo, and the errors of a provider's `initial_service_info`."""
    if isinstance(service, AutoClusterFailover | ServiceInfoProvider):
        for name, value in (
            ("authentication", authentication), ("tls_trust_certs_file_path", options["tls_trust_certs_file_path"])
        ):  # fmt: skip
            if value is not None:
                raise WrongValue(f"{name} is of each ServiceInfo: a {type(service).__name__} has its own")
    if isinstance(service, AutoClusterFailover):
        return service.primary
    if isinstance(service, ServiceInfoProvider):
        return check_service_info(service.initial_service_info())
    parse_service_url(service)  # type: ignore[arg-type]  # InvalidUrl says what it is
    return ServiceInfo(str(service), authentication, options["tls_trust_certs_file_path"])  # type: ignore[arg-type]


def check_service_info(info: object) -> ServiceInfo:
    """Returns `info`, which a program's provider returned, unchanged. Raises InvalidConfiguration if it is no
    ServiceInfo."""
    if not isinstance(info, ServiceInfo):
        raise InvalidConfiguration(f"a provider gives a ServiceInfo, not {shorten_value(info)}")
    return info


# ------------------------------------------------------------------------------------------------------- service
# The cluster that a client connects to, and where the client goes when that changes.
#
# A program's provider may name another cluster at any time, from any thread. The clusters of an AutoClusterFailover are
# tried in rounds, which begin when the client is first used, each `check_interval_ms` after the end of the one before:
# a cluster answers when a connection to one of its addresses is made within the connection time-out. The connection is
# closed again, and nothing is asked. To move, the client closes its connections; producers, consumers and readers open
# again at the other cluster, as after any broken connection. Guard: tests/client/connect/test_service.py.


_LOG = logging.getLogger("magnetar.client")


class ClientCluster:
    """Keeps the cluster to which a client connects (`info`), and moves the client to another one when a provider or
    AutoClusterFailover says so. `given`: the client's parameter `service_url`; a provider is initialized at once.
    `options`: its other parameters. Raises InvalidUrl, InvalidConfiguration or OperationNotSupported if a parameter or
    the credentials of a cluster are wrong or not supported, and the errors of the provider."""

    def __init__(self, given: object, authentication: object, options: Mapping[str, Any]) -> None:
        self._options = dict(options)
        self.info = find_first_service_info(given, authentication, self._options)
        self._access_of(self.info)
        self._clusters = given if isinstance(given, AutoClusterFailover) else None
        for each in self._clusters.secondary if self._clusters is not None else ():
            self._access_of(each)
        self._tasks = Tasks()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._connections: Connections | None = None
        self._used: ServiceInfo | None = None  # what the connections go to
        self._provider = given if isinstance(given, ServiceInfoProvider) else None
        if self._provider is not None:
            self._provider.initialize(self.switch_cluster)

    def _access_of(self, info: ServiceInfo) -> CallerAccess:
        trusted = {"tls_trust_certs_file_path": info.tls_trust_certs_file_path}
        return make_caller_access(info.url, info.authentication, {**self._options, **trusted})

    def connect(self, world: World, settings: ClientSettings) -> Connections:
        """Returns the connections of the client to the present cluster, and starts to probe the clusters of an
        AutoClusterFailover. Must be called once, in the event loop that uses the connections. Raises
        InvalidConfiguration or OperationNotSupported if the credentials of the cluster are not valid."""
        self._loop = asyncio.get_running_loop()  # before the look at `info`: what is told later calls into it
        self._used = self.info
        self._connections = Connections(world, self._used.url, settings, self._access_of(self._used))
        if self._clusters is not None:
            rounds = self._try_clusters(self._clusters, world.network, settings.connection_timeout_s)
            self._tasks.spawn(rounds, "failover of a client")
        return self._connections

    def switch_cluster(self, info: ServiceInfo) -> None:
        """Makes the client connect to another cluster, and returns without waiting for it. May be called from any
        thread. Raises InvalidConfiguration if `info` is no ServiceInfo, or does not fit the client's other parameters;
        OperationNotSupported if the client does not support its credentials. Has no effect after `close`."""
        self._access_of(check_service_info(info))
        self.info = info
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(run_logging_errors, self._move, ignore_error)

    def _move(self) -> None:
        info, connections = self.info, self._connections
        if connections is not None and info is not self._used and not self._tasks.closed:
            _LOG.warning("the client goes to %s", info.service_url)
            self._used = info
            self._tasks.spawn(connections.switch_cluster(info.url, self._access_of(info)), "move of a client")

    async def _try_clusters(self, clusters: AutoClusterFailover, network: Network, timeout_s: float) -> None:
        infos = [clusters.primary, *clusters.secondary]
        core = ClusterFailoverCore(
            len(infos), failover_after=clusters.failover_threshold, back_after=clusters.switch_back_threshold
        )
        answered = [False] * len(infos)

        async def probe_cluster(which: int) -> None:
            answered[which] = await is_reachable(infos[which], network, timeout_s)

        while True:
            await asyncio.sleep(clusters.check_interval_ms / 1000)
            await run_together(map(probe_cluster, range(len(infos))), "look at a cluster")
            self.info = infos[core.on_clusters_probed(answered)]
            self._move()

    async def close(self) -> None:
        """Stops switching the client between clusters, also a switch in progress, and closes the program's provider. An
        error of the provider is logged. Must be called in the event loop. A second call does nothing."""
        self._connections = None
        provider, self._provider = self._provider, None
        try:
            await self._tasks.close()
        finally:
            if provider is not None:
                try:
                    provider.close()
                except BaseException as error:
                    log_foreign_error(error, "the close of the provider of a client's service")


async def is_reachable(info: ServiceInfo, network: Network, timeout_s: float) -> bool:
    """Returns whether at least one of the cluster's addresses accepts a connection within `timeout_s` seconds. The
    addresses are tried one after the other, each for that long."""
    for address in info.url.ask_at or info.url.endpoints:
        if await _takes(address, network, timeout_s):
            return True
    return False


async def _takes(address: Endpoint, network: Network, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            stream = await network.connect_bytes(address)
    except (MagnetarError, TimeoutError):
        return False
    await stream.close()
    return True
