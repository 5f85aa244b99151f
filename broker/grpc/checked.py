"""Wraps a service: each unary rpc is authorized before its handler runs, and each change is written to the audit log.

The rules are in broker/access/table_core.py; an rpc without a rule fails the start of the broker. Streams are
authorized where they open a producer or a consumer (broker/session/), because one stream opens many.

Also in this file, below its heading: services whose code is imported at the first call (later).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.message import Message

from ...proto.errors import MagnetarError
from ...proto.names import NamespaceName, TopicName
from ...proto.operations import OPERATIONS, Operation, Permission, PermissionRule, PermissionScope
from ...runtime.network import CallContext, find_rpc, list_rpc_names
from ...runtime.tasks import Workers
from ..access.authorizer import Authorizer, may_call_every_operation
from ..access.table_core import PERMISSION_RULES
from ..node.topic_manager import TopicManager

# --------------------------------------------------------------------------------------------------------- later
# Services whose code is imported at the first call: administration and transactions, which an idle broker does not
# need. Guard: tests/cli/test_start.py.


RpcMethod = Callable[[Any, Any], Awaitable[Any]]


def make_rpc_handler_name(method: str) -> str:
    """Returns the name of the Python method that implements an rpc: "list_topics" for the rpc "ListTopics"."""
    return "".join(f"_{each.lower()}" if each.isupper() else each for each in method).lstrip("_")


def find_rpc_handlers(name: str, parts: Sequence[object]) -> dict[str, RpcMethod]:
    """Returns the bound methods that implement the rpcs of the service `name`, by the name of the method. `parts`: the
    objects that together implement the service; exactly one of them must have each method."""
    found = {}
    for attribute in map(make_rpc_handler_name, list_rpc_names(name)):
        having = [part for part in parts if hasattr(part, attribute)]
        assert len(having) == 1, f"{name}: {len(having)} parts have {attribute}"
        found[attribute] = getattr(having[0], attribute)
    return found


class LazyService:
    """A proxy for the gRPC service `name`, such as "Admin". The first call of any method imports `module`, a module of
    this package, in a worker thread. Then it calls `make`, which returns the objects that implement the service."""

    def __init__(self, name: str, workers: Workers, module: str, make: Callable[[], Sequence[object]]) -> None:
        self._name = name
        self._workers = workers
        self._module = f"{__package__}.{module}"
        self._make = make
        self._handlers: dict[str, RpcMethod] = {}
        for method in list_rpc_names(name):
            attribute = make_rpc_handler_name(method)
            setattr(self, attribute, self._method(attribute))

    def _method(self, attribute: str) -> RpcMethod:
        async def call(asked: Any, context: Any) -> Any:
            if not self._handlers:
                await self._workers.load(self._module)
                if not self._handlers:  # no other call was faster
                    self._handlers = find_rpc_handlers(self._name, self._make())
            return await self._handlers[attribute](asked, context)

        return call


def make_lazy_admin_service(broker: TopicManager) -> LazyService:
    """Returns a proxy for the gRPC service "Admin" that imports the service's module at its first call."""
    def make() -> Sequence[object]:
        from .admin import SERVICE_CLASSES

        return [part(broker) for part in SERVICE_CLASSES]

    return LazyService("Admin", broker.world.workers, "admin", make)


def make_lazy_transaction_service(broker: TopicManager) -> LazyService:
    """Returns a proxy for the gRPC service "Transactions" that imports the service's module at its first call."""
    def make() -> Sequence[object]:
        from .transactions import SERVICE_CLASSES

        return [part(broker) for part in SERVICE_CLASSES]

    return LazyService("Transactions", broker.world.workers, "transactions", make)


# ------------------------------------------------------------------------------------------------------- checked


RpcValueHandler = Callable[[Any, CallContext], Awaitable[Any]]

_LOG = logging.getLogger("magnetar.broker.admin")

ALL_SUBSCRIPTIONS_RPCS = ("Admin.SkipMessages", "Admin.ExpireMessages")
"""Rpcs that change every subscription of a topic if they do not name one: then they need the permission MANAGE."""
UNAUDITED_RPCS = re.compile(
    r"Broker\.|Transactions\.|"
    r"Admin\.(Check|Describe(?!Broker)|List|Get(?!Message$)|.*(Stats|Status|LastMessageId|MessageIdByTime|Size)$)"
)
"""Matches rpcs that are not audited: those that change nothing and return no message, and the many of clients."""


class AuthorizedService:
    """Wraps `service`, an implementation of the gRPC service `name`. For each unary rpc it checks the caller's
    permission, and writes each change to the audit log. The methods of an Admin implementation return plain values,
    which this object converts to protobuf messages. `value_handlers`: by the name of the rpc, the same handlers before
    this conversion."""

    def __init__(self, name: str, service: object, access: Authorizer) -> None:
        self.value_handlers: dict[str, RpcValueHandler] = {}
        for method in list_rpc_names(name):
            path, attribute, target = f"{name}.{method}", make_rpc_handler_name(method), find_rpc(name, method)
            handler = getattr(service, attribute)
            if target.streaming:
                assert any(each.partition(" ")[0] == path for each in PERMISSION_RULES), f"{path} has no rule"
            else:
                handler = _checked(path, PERMISSION_RULES[path], handler, access)
                handler = self.value_handlers[method] = _logged(path, handler) if name == "Admin" else handler
                if name == "Admin":
                    handler = _encoded(OPERATIONS[method], target.reply, handler)
            setattr(self, attribute, handler)


def _encoded(operation: Operation[Any], reply: type[Message], handler: RpcValueHandler) -> RpcValueHandler:
    async def call(request: Any, context: CallContext) -> Message:
        from ...proto.translation import make_reply_message  # with the service, which a start does not load

        return make_reply_message(reply, await handler(request, context), operation.of_reply)

    return call


def _logged(path: str, handler: RpcValueHandler) -> RpcValueHandler:
    """Returns a handler that also writes each request, with its result, to the log if that has the level debug."""
    async def call(request: Any, context: CallContext) -> Any:
        result = "done"
        try:
            return await handler(request, context)
        except BaseException as error:
            result = type(error).__name__
            raise
        finally:
            _LOG.debug("%s on %s: %s, %s: %s", path, _subject(request), context.principal, context.peer, result)

    return call


def _checked(path: str, rule: PermissionRule, handler: RpcValueHandler, access: Authorizer) -> RpcValueHandler:
    act = not UNAUDITED_RPCS.match(path)

    async def call(request: Any, context: CallContext) -> Any:
        if not may_call_every_operation(context.principal):
            await _authorize(path, rule, request, context, access)
        if not act:
            return await handler(request, context)
        result = "done"
        try:
            return await handler(request, context)
        except BaseException as error:
            result = type(error).__name__ if isinstance(error, MagnetarError) else "unknown"
            raise
        finally:
            access.audit.log_operation(
                context.principal, context.peer, path, _subject(request), result, fields=_fields(request),
                is_administration=may_call_every_operation(context.principal)
                or _needed(path, rule, request) in _OF_ADMINISTRATORS,
            )  # fmt: skip

    return call


_OF_ADMINISTRATORS = frozenset((Permission.MANAGE, Permission.OPERATE))


def _needed(path: str, rule: PermissionRule, request: Any) -> Permission:
    if path in ALL_SUBSCRIPTIONS_RPCS and rule.subscription and not getattr(request, rule.subscription):
        return Permission.MANAGE
    return rule.permission


async def authorize_request(
    path: str, request: Any, context: CallContext, access: Authorizer, *, audited: bool = True
) -> None:
    """Checks whether the caller may call the unary rpc `path` ("Admin.DeleteTopic") with this request. Raises
    Unauthorized if the caller may not; InvalidName if a topic or namespace in the request has an invalid name;
    Unavailable, or another error of the metadata, if the grants cannot be read. `audited`: a refusal is written to the
    audit log."""
    if not may_call_every_operation(context.principal):
        await _authorize(path, PERMISSION_RULES[path], request, context, access, audited=audited)


async def _authorize(
    path: str, rule: PermissionRule, request: Any, context: CallContext, access: Authorizer, *, audited: bool = True
) -> None:
    """Authorizes a request by `rule`. Raises Unauthorized, or InvalidName if a topic or namespace in the request has an
    invalid name."""
    permission, principal = _needed(path, rule, request), context.principal
    subscription = getattr(request, rule.subscription) if rule.subscription else ""
    if rule.on is PermissionScope.PLACE:
        topic, namespace = request.topic, request.namespace
    else:
        topic = getattr(request, rule.field) if rule.on is PermissionScope.TOPIC else ""
        namespace = getattr(request, rule.field) if rule.on is PermissionScope.NAMESPACE else ""
    if rule.on is PermissionScope.PLACE and not topic and not namespace:
        permission = Permission.OPERATE
    await access.check_permission(
        principal, permission, topic=TopicName.parse(topic) if topic or rule.on is PermissionScope.TOPIC else None,
        namespace=NamespaceName.parse(namespace) if namespace or rule.on is PermissionScope.NAMESPACE else None,
        tenant=getattr(request, rule.field) if rule.on is PermissionScope.TENANT else "", subscription=subscription,
        peer=context.peer, audited=audited,
    )  # fmt: skip


def _subject(request: Any) -> str:
    """Returns the topic, namespace or name in the request, for the audit log."""
    named = (getattr(request, field, "") for field in ("topic", "namespace", "name"))
    return next((each for each in named if each), "the cluster")


def _fields(request: Message) -> list[str]:
    """Returns the names of the fields that are set in the request, never their values."""
    return [field.name for field, _ in request.ListFields()]
