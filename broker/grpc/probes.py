"""gRPC's own services at a broker's port: health and server reflection, for its probes and tools.

    grpc.health.v1.Health                     Check, which needs no credentials, and Watch
    grpc.reflection.v1.ServerReflection       and v1alpha: the services of this port and their messages

`CheckNodeVersion` answers as `GET /readyz` and says no more. Watch and reflection are calls like others: on a secured
listener their caller is authenticated (runtime/grpc/server.py). Guarding tests: tests/broker/grpc/test_probes.py.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor

from ...proto import health_pb2, reflection_pb2
from ...proto.errors import NotFound
from ...runtime.network import HEALTH, REFLECTION, CallContext

if TYPE_CHECKING:
    from ..node.topic_manager import BrokerReadinessCheck

WATCH_S = 1.0
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
        """Serves the rpc Watch: sends the status, and then each change of the status, until the caller disconnects. For
        a service that this server does not have, sends SERVICE_UNKNOWN."""
        request = await stream.receive()
        known = not request.service or request.service in self._services
        last = None
        while stream.is_open:
            found = await self._answer() if known else _Status(status=_Status.SERVICE_UNKNOWN)
            if found != last:
                await stream.send(found)
                last = found
            await asyncio.sleep(WATCH_S)
        await stream.receive()  # raises why it ended

    async def _answer(self) -> Any:
        why = await self._readiness.why_not_ready()
        return _Status(status=_Status.NOT_SERVING if why else _Status.SERVING)


class ReflectionService:
    """Implements gRPC's server reflection. `services`: the full names of the services that it lists."""

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
    """Returns the services for health checks and reflection, by their full names. `services`: the full names of the
    other services at the same port."""
    names = (*services, HEALTH, *REFLECTION)
    reflection = ReflectionService(names)
    return [(HEALTH, HealthService(readiness, names)), *((name, reflection) for name in REFLECTION)]
