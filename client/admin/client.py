"""AdminClient: every operation of administration as a typed method, for asyncio.

Names are checked before anything is sent. A topic's name may be short: `orders` means
persistent://public/default/orders. An operation on a single topic works on one partition: name the partition
(`orders-partition-0`), or call the method for each of `parts(topic)`.

The methods are functions of client/admin/topics.py, and methods that are made from rows of the table of operations
(client/admin/grpc_transport.py). Type checkers and editors read client.pyi, which `python -m tests.stubs` writes;
guard: tests/client/admin/test_stubs.py."""

from __future__ import annotations

import inspect
from typing import TypeVar

from ...proto.operations import OPERATIONS
from ...runtime.network import World
from ..common.checks import PATH_CHECK, SECONDS_CHECK, check_parameter
from ..common.closing import ClosedAfterAsyncWith
from . import topics
from .grpc_transport import (
    GrpcTransport,
    OperationCaller,
    Transport,
    add_argument_checks,
    convert_argument,
    make_operation_method,
)

C = TypeVar("C", bound=type)


def add_operation_methods(kind: C) -> C:
    """Adds the methods of AdminClient to the class `kind`, and returns the class. There is one method for each row of
    the table of operations that names a method, and one for each public coroutine function of the module `topics`."""
    for row in OPERATIONS.values():
        if row.method:
            setattr(kind, row.method, make_operation_method(row))
    for name, function in inspect.getmembers(topics, inspect.iscoroutinefunction):
        if function.__module__ == topics.__name__ and not name.startswith("_"):
            function.__qualname__ = f"{kind.__name__}.{name}"
            setattr(kind, name, function)
    return kind


@add_argument_checks
@add_operation_methods
class AdminClient(OperationCaller, ClosedAfterAsyncWith):
    """Administration of a cluster, for asyncio: tenants, namespaces, policies, topics, subscriptions, brokers, bookies.

        async with magnetar.admin.AdminClient("magnetar://localhost:7650") as admin:
            await admin.create_topic("flights", partitions=4)
            print(await admin.topics(), await admin.subscriptions("flights-partition-0"))

    The object connects by `service_url` as `Client` does, or through `transport` if the program passes one. It belongs
    to one event loop; `Admin` has the same methods for programs without asyncio. Methods return the frozen dataclasses
    of proto/statistics.py.

    `timeout_s` bounds each operation with all its attempts. A method raises the error with which the server refused the
    operation: TenantNotFound, NamespaceNotFound, TopicNotFound, SubscriptionNotFound, AlreadyExists, Busy (in use),
    NotAllowed, InvalidName or InvalidRequest. The last two are raised before anything is sent, if the client can tell.
    Raises Unavailable if no broker is reached. After ConnectionLost and TimedOut it is unknown whether the operation
    was done. The constructor raises InvalidUrl or InvalidConfiguration for a wrong parameter."""

    def __init__(
        self, service_url: str = "", *, timeout_s: float = 30.0, world: World | None = None,
        transport: Transport | None = None, authentication: object = None, tls_trust_certs_file_path: str = "",
    ) -> None:  # fmt: skip
        timeout_s = convert_argument("timeout_s", float, timeout_s)
        check_parameter("timeout_s", SECONDS_CHECK, timeout_s)
        check_parameter("tls_trust_certs_file_path", PATH_CHECK, tls_trust_certs_file_path)
        self._timeout_s = timeout_s
        self._transport = transport or GrpcTransport(
            service_url, timeout_s, world, authentication, tls_trust_certs_file_path
        )

    async def close(self) -> None:
        """Closes the connections of this object, and waits until they are closed. A method that is called later
        connects again."""
        await self._transport.close()
