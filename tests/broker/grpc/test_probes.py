"""gRPC's standard services at a broker's port, asked by gRPC's own client."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from magnetar.cli.common.processes import Process, Processes
from magnetar.proto import health_pb2, reflection_pb2
from magnetar.runtime.network import HEALTH_SERVICE, REFLECTION_SERVICES, find_rpc
from tests.support.processes import run_here

pytestmark = pytest.mark.processes

Status = health_pb2.HealthCheckResponse
SERVICES = (
    "magnetar.wire.Broker",
    "magnetar.wire.Admin",
    "magnetar.wire.Transactions",
    HEALTH_SERVICE,
    *REFLECTION_SERVICES,
)


def call(channel: grpc.Channel, kind: str, service: str, method: str) -> Any:
    target = find_rpc(service, method)
    return getattr(channel, kind)(
        target.path, request_serializer=target.request.SerializeToString, response_deserializer=target.reply.FromString
    )


def check(channel: grpc.Channel, service: str = "") -> int:
    asked = health_pb2.HealthCheckRequest(service=service)
    status: int = call(channel, "unary_unary", HEALTH_SERVICE, "Check")(asked, timeout=20).status
    return status


def reflect(channel: grpc.Channel, *requests: Any, version: int = 0) -> list[Any]:
    streaming = call(channel, "stream_stream", REFLECTION_SERVICES[version], "ServerReflectionInfo")
    return list(streaming(iter(requests), timeout=20))


@pytest.fixture
def server(started: Processes, tmp_path: Path) -> Process:
    server = started.start("s", "standalone", "--port", "0", "--data", str(tmp_path / "data"))
    server.wait_ready()
    return server


@pytest.fixture
def channel(server: Process) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as found:
        yield found


def test_health_is_serving_for_the_server_and_each_service_of_it(channel: grpc.Channel) -> None:
    for service in ("", *SERVICES):
        assert check(channel, service) == Status.SERVING
    with pytest.raises(grpc.RpcError) as raised:
        check(channel, "nothing")
    assert raised.value.code() == grpc.StatusCode.NOT_FOUND


def test_watch_tells_of_the_state_and_ends_with_its_caller_and_with_the_server(
    channel: grpc.Channel, server: Process
) -> None:
    watch = call(channel, "unary_stream", HEALTH_SERVICE, "Watch")
    states = watch(health_pb2.HealthCheckRequest())
    assert next(states).status == Status.SERVING
    states.cancel()
    assert next(watch(health_pb2.HealthCheckRequest(service="later"), timeout=20)).status == Status.SERVICE_UNKNOWN
    states = watch(health_pb2.HealthCheckRequest())
    assert next(states).status == Status.SERVING
    assert server.stop() == 0
    with pytest.raises(grpc.RpcError):
        next(states)
    assert "Traceback" not in server.output()


@pytest.mark.parametrize("version", [0, 1])
def test_reflection_lists_the_services_and_has_their_messages(channel: grpc.Channel, version: int) -> None:
    asked = reflection_pb2.ServerReflectionRequest
    answers = reflect(
        channel, asked(list_services="*"), asked(file_containing_symbol="magnetar.wire.Broker.Lookup"),
        asked(file_by_filename="magnetar/proto/health.proto"), asked(file_containing_symbol="no.such.Thing"),
        asked(all_extension_numbers_of_type=HEALTH_SERVICE + "Check"), asked(), version=version,
    )  # fmt: skip
    assert [each.name for each in answers[0].list_services_response.service] == list(SERVICES)
    for answer, name in ((answers[1], "magnetar/proto/wire.proto"), (answers[2], "magnetar/proto/health.proto")):
        files = [FileDescriptorProto.FromString(each) for each in answer.file_descriptor_response.file_descriptor_proto]
        assert files[0].name == name
        assert {each for file in files for each in file.dependency} <= {file.name for file in files}
    assert [each.error_response.error_code for each in answers[3:]] == [5, 5, 12]


def test_many_answers_pass_through_small_windows(channel: grpc.Channel) -> None:
    asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol="magnetar.wire.Broker")
    answers = reflect(channel, *[asked] * 200)
    assert len({each.SerializeToString() for each in answers}) == 1
    assert len(answers) == 200


def test_on_a_secured_server_a_stranger_may_check_and_nothing_else(started: Processes, tmp_path: Path) -> None:
    folder = tmp_path / "security"
    assert run_here("security", "init", str(folder)).code == 0
    server = started.start(
        "s", "standalone", "--port", "0", "--data", str(tmp_path / "data"), "--security", str(folder / "security.toml")
    )
    server.wait_ready()
    where = f"localhost:{server.address.rpartition(':')[2]}"
    token = (folder / "admin.token").read_text().strip()
    tls = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
    asked = reflection_pb2.ServerReflectionRequest(list_services="*")
    with grpc.secure_channel(where, tls) as stranger:
        assert [check(stranger) for _ in range(5)] == [Status.SERVING] * 5
        watch = call(stranger, "unary_stream", HEALTH_SERVICE, "Watch")
        watching = lambda: next(watch(health_pb2.HealthCheckRequest(), timeout=20))
        for refused in (watching, lambda: reflect(stranger, asked)):
            with pytest.raises(grpc.RpcError) as raised:
                refused()
            assert raised.value.code() == grpc.StatusCode.UNAUTHENTICATED
    with grpc.secure_channel(where, tls) as flood, pytest.raises(grpc.RpcError, match="too many refused calls"):
        any(check(flood) is None for _ in range(200))
    known = grpc.composite_channel_credentials(tls, grpc.access_token_call_credentials(token))
    with grpc.secure_channel(where, known) as channel:
        assert len(reflect(channel, asked)[0].list_services_response.service) == len(SERVICES)
        assert check(channel) == Status.SERVING
