"""A REST request as its handler gets it (`RestRequest`): names, body and query as values, and calls of operations with
the caller's rights.

    await call.call_local(op.CREATE_TOPIC, name=call.topic.full)    as over gRPC: authorized, audited
    await call.call_each_partition(op.COMPACT)                      for the topic, or for each of its partitions

If another broker owns a partition, the operation is called at that broker, with the rights of this broker. This broker
checks the caller's rights before.

Also in this file, each below its heading: errors as HTTP statuses (errors); the table of routes (table); the document
of OpenAPI 3.1, generated from the table of routes (openapi).
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ...proto import errors
from ...proto.errors import NotFound, NotOwner, Unauthorized
from ...proto.names import NamespaceName, TopicName
from ...proto.operations import Operation
from ...proto.versions import PRODUCT
from ...runtime.access import CREDENTIAL_SCHEMES
from ...runtime.metrics import FillMetricsPage
from ...runtime.network import CallContext
from ..grpc.checked import AuthorizedService, authorize_request
from ..node.topic_manager import TopicManager
from ..session.administration import call_operation_at_broker, make_operation_request, parse_operation_reply
from .stats import RateMeters

# -------------------------------------------------------------------------------------------------------- errors
# Errors as HTTP statuses with `{"reason": …}`, as Pulsar's clients expect them.
#
# The first class that fits counts, so a class comes before its base classes. For Busy the status is 409 or 412, as the
# route says.


_LOG = logging.getLogger("magnetar.broker.rest")

_TABLE: tuple[tuple[type[errors.MagnetarError], int], ...] = (
    (errors.MessageTooLarge, 413),
    (errors.CorruptEntry, 500),
    (errors.InvalidRequest, 412),
    (errors.NotFound, 404),
    (errors.AlreadyExists, 409),
    (errors.Busy, 409),
    (errors.ProducerFenced, 409),
    (errors.TopicTerminated, 409),
    (errors.TransactionEnded, 409),
    (errors.TransactionForgotten, 404),
    (errors.IncompatibleSchema, 409),
    (errors.NotAllowed, 405),
    (errors.BacklogQuotaExceeded, 412),
    (errors.Unauthenticated, 401),
    (errors.CredentialsExpired, 401),
    (errors.Unauthorized, 403),
    (errors.BackPressure, 429),
    (errors.BadVersion, 409),
    (errors.TimedOut, 504),
    (errors.Unavailable, 503),
    (errors.SessionExpired, 503),
)

_REASONS: tuple[tuple[type[errors.MagnetarError], str], ...] = (
    (errors.TenantNotFound, "Tenant does not exist"),
    (errors.NamespaceNotFound, "Namespace does not exist"),
)
"""Texts of errors that programs compare with; they do not name the tenant or namespace, as Pulsar's do not."""

AUTHENTICATION_CHALLENGE = ", ".join(scheme.name for scheme in CREDENTIAL_SCHEMES)


class JsonResponse(Response):
    """An HTTP response whose body is JSON. The content is a plain value or a msgspec struct, which is encoded."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Returns the content as JSON."""
        return msgspec.json.encode(content)


class HttpError(HTTPException):
    """Raised by the handler of a route: the request is answered with the HTTP status `status` (default: 400) and a
    reason."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(status, reason)


def find_http_status(error: errors.MagnetarError, busy: int = 409) -> int:
    """Returns the HTTP status that answers a request which failed with `error`; 500 for an error that the table does
    not name. `busy`: the status for the error Busy."""
    if isinstance(error, errors.Busy):
        return busy
    return next((status for kind, status in _TABLE if isinstance(error, kind)), 500)


def make_response(status: int, reason: str, headers: dict[str, str] | None = None) -> Response:
    """Returns a response with this status, whose JSON body gives the reason, and with the `headers`. Adds the challenge
    of 401, and closes the connection after 408 and 413."""
    headers = dict(headers or {})
    if status == 401:
        headers["WWW-Authenticate"] = AUTHENTICATION_CHALLENGE
    if status in (408, 413):
        headers["Connection"] = "close"  # the rest of the request is not read
    return JsonResponse({"reason": reason}, status, headers)


def make_error_response(error: Exception, busy: int = 409) -> Response:
    """Returns the HTTP response that answers a request which failed with `error`. An unexpected exception is logged,
    and its text is not sent to the client. `busy`: the status for the error Busy."""
    if isinstance(error, HTTPException):
        return make_response(error.status_code, error.detail, dict(error.headers or {}))
    if isinstance(error, errors.MagnetarError):
        reason = next((text for kind, text in _REASONS if isinstance(error, kind)), error.message)
        return make_response(find_http_status(error, busy), reason)
    _LOG.error("a request of a client failed", exc_info=error)
    return make_response(500, f"the request failed: {type(error).__name__}")


# ---------------------------------------------------------------------------------------------------------- call


T = TypeVar("T")


@dataclass(slots=True)
class RestRequest:
    """An HTTP request for administration, as the handler of its route gets it. `names`: the decoded segments of the
    path, by their names in the route; `query`: the parameters; `measure`: writes the metrics page; `meters`: measures
    rates of producers and consumers. `services`: the services of this broker, by name; `context`: the caller.
    `headers`: its HTTP headers; `body`: the bytes of its body."""

    broker: TopicManager
    services: Mapping[str, AuthorizedService]
    context: CallContext
    names: Mapping[str, str]
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes
    measure: FillMetricsPage
    meters: RateMeters

    # ------------------------------------------------------------------ names
    @property
    def namespace(self) -> NamespaceName:
        """Returns the namespace that the path of the request names. Raises InvalidName if the name is invalid."""
        return NamespaceName.parse(f"{self.names['tenant']}/{self.names['namespace']}")

    @property
    def topic(self) -> TopicName:
        """Returns the topic that the path of the request names. Raises InvalidName if the name is invalid."""
        tenant, namespace, local = (self.names[each] for each in ("tenant", "namespace", "topic"))
        return TopicName.parse(f"{self.names['domain']}://{tenant}/{namespace}/{local}")

    def check_cluster_in_path(self) -> None:
        """Raises NotFound if the path of the request names a cluster other than this broker's."""
        if self.names["cluster"] != self.broker.config.cluster:
            raise NotFound(f"there is no cluster {self.names['cluster'][:100]!r}")

    # ------------------------------------------------------------------ body and query
    def parse_body(self, kind: type[T]) -> T:
        """Returns the JSON body of the request as a value of type `kind`. Numbers may be in quotes. Raises HttpError
        (400) if the body is not JSON, or does not fit the type."""
        return self.parse_json(self.body, kind)

    def parse_json(self, data: bytes, kind: type[T]) -> T:
        """Returns the JSON text `data` as a value of type `kind`, as `parse_body` does. Raises HttpError (400) like
        it."""
        try:
            return msgspec.json.decode(data, type=kind, strict=False)  # numbers in quotes, as with Pulsar
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise HttpError(f"the body is not what this request takes: {error}") from error

    @property
    def has_empty_body(self) -> bool:
        """Returns True if the request has no body, or the body `null`."""
        return self.body.strip() in (b"", b"null")

    def parse_flag(self, name: str) -> bool:
        """Returns the value of the boolean query parameter `name`; False if it is missing. Raises HttpError (400) if it
        is neither "true" nor "false"."""
        text = self.query.get(name, "").lower()
        if text not in ("", "true", "false"):
            raise HttpError(f"the parameter {name} is true or false, not {text[:40]!r}")
        return text == "true"

    def parse_number(self, text: str, what: str, *, least: int = 0) -> int:
        """Returns the whole number in `text`. `what`: the name of the number in error texts. Raises HttpError (400) if
        `text` is not a whole number; with status 412 if the number is less than `least`, or not below 2^63."""
        try:
            if not re.fullmatch(r"[-+]?[0-9]{1,30}", text):
                raise ValueError
            found = int(text)
        except ValueError:
            raise HttpError(f"{what} is a number, not {text[:40]!r}") from None
        if not least <= found < 1 << 63:
            raise HttpError(f"{what} is {least} or more, and below 2^63, not {found}", 412)
        return found

    # ------------------------------------------------------------------ the operations
    async def call_local(self, operation: Operation[T], **arguments: object) -> T:
        """Calls an operation at this broker, with the caller's rights, and returns its answer. Raises Unauthorized if
        the caller may not call it; InvalidRequest if an argument does not fit the request; and the errors of the
        operation, such as NotOwner if another broker owns the topic."""
        handler = self.services[operation.service].value_handlers[operation.name]
        return parse_operation_reply(
            operation, await handler(make_operation_request(operation, arguments), self.context)
        )

    async def authorize(self, operation: Operation[Any], **arguments: object) -> None:
        """Raises Unauthorized if the caller may not call the operation with these arguments; InvalidName or
        InvalidRequest if an argument is invalid; Unavailable, or another error of the metadata, if the grants cannot be
        read."""
        path = f"{operation.service}.{operation.name}"
        await authorize_request(path, make_operation_request(operation, arguments), self.context, self.broker.access)

    async def may_call(self, operation: Operation[Any], **arguments: object) -> bool:
        """Returns True if the caller may call the operation with these arguments. The check is not written to the audit
        log. Raises the other errors of `authorize`."""
        request = make_operation_request(operation, arguments)
        try:
            path = f"{operation.service}.{operation.name}"
            await authorize_request(path, request, self.context, self.broker.access, audited=False)
        except Unauthorized:
            return False
        return True

    async def list_partitions(self) -> list[TopicName]:
        """Returns the partitions of the topic in the path; [] if the topic is not partitioned, or is itself a
        partition. Raises TopicNotFound if the topic does not exist, InvalidName if its name is invalid, and the errors
        of the metadata. The caller's rights are not checked here."""
        if self.topic.is_partition:
            return []
        count = await self.broker.catalog.count_existing_partitions(self.topic)
        return [self.topic.with_partition(number) for number in range(count)]

    async def check_unpartitioned(self, operation: Operation[Any], what: str, **arguments: object) -> None:
        """Checks that the caller may call the operation with these arguments, and that the topic is not partitioned.
        Raises HttpError (405) if it is; the error text ends with the advice `what`. Raises the errors of `authorize`,
        and TopicNotFound if the topic does not exist."""
        await self.authorize(operation, **{operation.rule.field: self.topic.full}, **arguments)
        if await self.list_partitions():
            raise HttpError(f"topic {self.topic} has partitions: {what}", 405)

    async def call_each_partition(self, operation: Operation[T], **arguments: object) -> list[T]:
        """Calls the operation for the topic; if the topic is partitioned, for each of its partitions, one after the
        other. Returns the answers in the order of the partitions. Raises the errors of `authorize`, TopicNotFound if
        the topic does not exist, and the first error of a call; the operation is not undone at the partitions that were
        called before."""
        field = operation.rule.field
        await self.authorize(operation, **{field: self.topic.full}, **arguments)
        partitions = await self.list_partitions()
        if not partitions:
            return [await self.call_local(operation, **{field: self.topic.full}, **arguments)]
        return [await self.call_topic_owner(operation, each, **arguments) for each in partitions]

    async def call_topic_owner(self, operation: Operation[T], topic: TopicName, **arguments: object) -> T:
        """Calls the operation at the topic's owner, which is this broker or another broker, and returns the answer.
        Another broker does not check the caller's rights, so the rights must be checked before this call. Raises the
        errors of the operation, of `TopicManager.find_owner`, and of `call_operation_at_broker`."""
        asked: dict[str, Any] = {operation.rule.field: topic.full, **arguments}
        try:
            return await self.call_local(operation, **asked)
        except NotOwner:
            return await call_operation_at_broker(
                self.broker.world, (await self.broker.find_owner(topic)).endpoint, operation, **asked
            )

    async def call_coordinator(self, operation: Operation[T], **arguments: Any) -> T:
        """Calls the operation at the broker that runs the transaction coordinator, and returns the answer. The caller's
        rights are checked at this broker, also if another broker answers. Raises the errors of the operation, and of
        `call_operation_at_broker`; NotOwner if the owner of the coordinator is not known."""
        try:
            return await self.call_local(operation, **arguments)
        except NotOwner as error:
            endpoint = error.fields.get("owner", "")
            if not endpoint:
                raise
            return await call_operation_at_broker(self.broker.world, endpoint, operation, **arguments)


# --------------------------------------------------------------------------------------------------------- table
# The table of routes: each handler is registered with its method, its path and a sentence.
#
#     @register_route("GET", "/admin/v2/tenants", "The tenants that the caller may see.", answer="[name]")
#     async def tenants(call: RestRequest) -> object: …
#
# A handler returns a value for JSON (200), None (204), or a Response. `{topic}` and other names in braces are one
# segment each, percent-decoded after the path is split: a name may have an encoded slash. TOPIC_PATH matches persistent
# and non-persistent topics. The OpenAPI document and the table of docs/rest.md are generated from these rows.


RestHandler = Callable[["RestRequest"], Awaitable[object]]
H = TypeVar("H", bound=RestHandler)

TENANT_PATH = "/admin/v2/tenants/{tenant}"
NAMESPACE_PATH = "/admin/v2/namespaces/{tenant}/{namespace}"
TOPIC_PATH = "/admin/v2/{domain:domain}/{tenant}/{namespace}/{topic}"
SUBSCRIPTION_PATH = TOPIC_PATH + "/subscription/{subscription}"


class RestRoute(NamedTuple):
    """A route of the HTTP server: its method, its path, its handler, and the texts that describe it in /openapi.json
    and docs/rest.md. `busy`: the HTTP status for the error Busy; `is_open`: True if the route needs no credentials."""

    method: str
    path: str
    summary: str
    handler: RestHandler
    body: str = ""  # what the request body is; empty: there is none
    answer: str = ""  # what the body of the answer 200 is; empty: the answer is 204
    busy: int = 409  # the status for Busy
    is_open: bool = False  # whether no credentials are needed


REST_ROUTES: list[RestRoute] = []


def register_route(
    method: str, path: str, summary: str, *, body: str = "", answer: str = "", busy: int = 409, is_open: bool = False
) -> Callable[[H], H]:
    """Returns a decorator that adds its function to REST_ROUTES, as the handler of one method and path of the REST API.
    For the other parameters see `RestRoute`."""

    def register(handler: H) -> H:
        REST_ROUTES.append(RestRoute(method, path, summary, handler, body, answer, busy, is_open))
        return handler

    return register


# ------------------------------------------------------------------------------------------------------- openapi
# The document of OpenAPI 3.1, generated from the table of routes.


_NAME = re.compile(r"\{(\w+)(?::\w+)?\}")
_SECRETS = {
    **{name: {"type": "http", "scheme": name} for name in (scheme.name.lower() for scheme in CREDENTIAL_SCHEMES)},
    "certificate": {"type": "mutualTLS"},
}


def make_openapi_path(row: RestRoute) -> str:
    """Returns the path of a route in the form that OpenAPI uses, without the types of parameters: `{domain}` instead of
    `{domain:domain}`."""
    return _NAME.sub(r"{\1}", row.path)


@functools.cache
def make_openapi_document() -> dict[str, Any]:
    """Returns the OpenAPI document that describes all registered routes. The result is cached, so callers must not
    change it."""
    paths: dict[str, dict[str, Any]] = {}
    for row in REST_ROUTES:
        paths.setdefault(make_openapi_path(row), {})[row.method.lower()] = _operation(row)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Magnetar: administration by REST, as Pulsar's v2", "version": PRODUCT},
        "paths": paths,
        "components": {"securitySchemes": _SECRETS, "schemas": {"Error": {
            "type": "object", "properties": {"reason": {"type": "string"}}, "required": ["reason"],
        }}},
    }  # fmt: skip


def _operation(row: RestRoute) -> dict[str, Any]:
    done = {"200": {"description": row.answer}} if row.answer else {"204": {"description": "done"}}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    found: dict[str, Any] = {
        "operationId": f"{row.handler.__name__}_{re.sub(r'[^a-z]+', '_', row.path.lower()).strip('_')}_{row.method}",
        "summary": row.summary, "parameters": [_parameter(name) for name in _NAME.findall(row.path)],
        "responses": {**done, "default": {"description": "an error", "content": error}},
        "security": [] if row.is_open else [{name: []} for name in _SECRETS],
    }  # fmt: skip
    if row.body:
        found["requestBody"] = {"description": row.body, "content": {"application/json": {}}}
    return found


def _parameter(name: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    if name == "domain":
        schema["enum"] = ["persistent", "non-persistent"]
    return {"name": name, "in": "path", "required": True, "schema": schema}
