"""Every public name, parameter and default of pulsar-client is here; what differs is in one table, with its reason.

The same table is in docs/pulsar.md ("The SDK as pulsar-client").
"""

from __future__ import annotations

import enum
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import magnetar

pulsar = pytest.importorskip("pulsar", minversion="3.13")

MODULES = [
    "", "asyncio", "exceptions", "functions", "functions.context", "functions.function", "functions.serde", "schema",
    "schema.definition", "schema.schema", "schema.schema_avro", "schema.schema_protobuf", "tableview",
]  # fmt: skip

MADE_BY_THE_CLIENT = {"Consumer", "EncryptionContext", "EncryptionKey", "Message", "Producer", "Reader", "TableView"}
"""Programs do not make these: their constructors take parts of the client, in either."""
DIFFERENT = {
    "Record()": "fields may be called default, required and required_default",
    "PulsarException()": "takes a text as well",
    "AvroSchema.encode_dict": "a step of `encode`",
    "Client()": "of asyncio: takes its parameters by name, and refuses others",
    "HAS_AVRO": "says what is installed",
    "HAS_PROTOBUF": "says what is installed",
    "ProtobufMessage": "google.protobuf's",
    "RecordMeta": "the class of the class of records",
    "is_unicode": "of Python 2",
    "remove_reserved_key": "a step of `encode`",
}


def public(of: Any) -> Iterator[tuple[str, Any]]:
    for name in dir(of):
        if not name.startswith("_"):
            yield name, getattr(of, name)


def is_theirs(value: Any) -> bool:
    """Not a name that they import from elsewhere."""
    if isinstance(value, ModuleType):
        return value.__name__.startswith("pulsar.")
    return getattr(value, "__module__", "pulsar").partition(".")[0] in ("pulsar", "_pulsar")


def told(default: Any) -> Any:
    """An enum by its name; bytes are the schema of who names none."""
    if isinstance(default, pulsar.schema.BytesSchema):
        return None
    return default.name if isinstance(default, enum.Enum) or type(default).__module__ == "_pulsar" else default


def parameters_of(call: Any) -> list[inspect.Parameter]:
    try:
        found = list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):  # a class of C++
        return []
    return [each for each in found if each.name != "self"]


def lacks(theirs: Any, ours: Any) -> str:
    """Which parameters are not there, in another place, or have another default."""
    positional = [each for each in parameters_of(ours) if each.kind is each.POSITIONAL_OR_KEYWORD]
    for at, wanted in enumerate(parameters_of(theirs)):
        if at >= len(positional) or positional[at].name != wanted.name:
            return f"parameter {wanted.name}"
        if wanted.default is not wanted.empty and told(positional[at].default) != told(wanted.default):
            return f"default of {wanted.name}"
    required = [each.name for each in positional[len(parameters_of(theirs)) :] if each.default is each.empty]
    return f"needs {required}" if required and parameters_of(theirs) else ""


def differences(module: str) -> Iterator[str]:
    theirs = importlib.import_module(f"pulsar.{module}".rstrip("."))
    ours = importlib.import_module(f"magnetar.{module}".rstrip("."))
    for name, value in public(theirs):
        if not is_theirs(value) or (module == "tableview" and value.__module__ != theirs.__name__):
            continue
        found = getattr(ours, name, None)
        if found is None:
            yield name
        elif inspect.isclass(value):
            yield from differences_of_class(name, value, found)
        elif inspect.isfunction(value) and (why := lacks(value, found)):
            yield f"{name}(): {why}"


def differences_of_class(name: str, theirs: type, ours: type) -> Iterator[str]:
    for base in theirs.__mro__:
        if is_theirs(base) and base.__name__ not in {each.__name__ for each in ours.__mro__}:
            yield f"{name} is a {base.__name__}"
    if name not in MADE_BY_THE_CLIENT and not issubclass(ours, enum.Enum) and (why := lacks(theirs, ours)):
        yield f"{name}(): {why}"
    members = {"name", "value"} if issubclass(ours, enum.Enum) else set()
    for each, value in public(theirs):
        found = getattr(ours, each, None)
        if found is None and not hasattr(ours, each):
            if each not in members:
                yield f"{name}.{each}"
        elif isinstance(value, property) != isinstance(found, property) and not inspect.isdatadescriptor(found):
            yield f"{name}.{each} is a property"
        elif inspect.isfunction(value) and (why := lacks(value, found)):
            yield f"{name}.{each}(): {why}"
        elif issubclass(ours, enum.Enum) and hasattr(value, "value") and value.value != found.value:
            yield f"{name}.{each} is {value.value}"


@pytest.mark.parametrize("module", MODULES)
def test_every_name_parameter_and_default_of_pulsar_client_is_here(module: str) -> None:
    found = [each for each in differences(module) if each.partition(":")[0] not in DIFFERENT]
    assert found == []


def test_what_differs_is_in_the_document() -> None:
    text = (Path(__file__).parents[2] / "docs/pulsar.md").read_text()
    for name in DIFFERENT:
        assert f"`{name.removesuffix('()')}" in text, name


def test_modules_of_pulsar_are_modules_here_too() -> None:
    from magnetar.functions import serde
    from magnetar.schema.definition import Record
    from magnetar.schema.schema_avro import AvroSchema

    assert (AvroSchema, Record) == (magnetar.schema.AvroSchema, magnetar.schema.Record)
    assert magnetar.schema.definition.Record is Record
    assert magnetar.functions.context.Context is magnetar.Context
    assert importlib.import_module("magnetar.tableview").TableView is magnetar.TableView
    assert [serde.IdentitySerDe().deserialize(each) for each in (b"5", b"5.5", b"x", b"\xff")] == [5, 5.5, "x", b"\xff"]
    for value in (5, "x", b"\xff"):
        assert serde.IdentitySerDe().deserialize(serde.IdentitySerDe().serialize(value)) == value
    assert serde.PickleSerDe().deserialize(serde.PickleSerDe().serialize([1])) == [1]
    with pytest.raises(TypeError):
        serde.IdentitySerDe().serialize([1])


def test_programs_for_pulsar_run_without_a_change() -> None:
    program = (
        "import sys, magnetar; sys.modules['pulsar'] = magnetar\n"
        "import pulsar, pulsar.schema.schema_avro\n"
        "from pulsar.schema import *\nfrom pulsar.asyncio import Client\nfrom pulsar.functions.serde import SerDe\n"
        "from pulsar.exceptions import Timeout\nfrom pulsar.tableview import TableView\n"
        "print(Record is magnetar.schema.Record, Client is magnetar.asyncio.Client, SerDe is pulsar.SerDe)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True"] * 3, done.stderr


# ------------------------------------------------------------------ what those names do
def test_a_batch_is_taken_apart() -> None:
    import _pulsar

    from magnetar.proto.entry_pb2 import SingleMessageMetadata

    keyed, plain = SingleMessageMetadata(payload_size=2, partition_key="k"), SingleMessageMetadata(payload_size=1)
    items = [(keyed.SerializeToString(), b"ab"), (plain.SerializeToString(), b"c")]
    payload = b"".join(len(each).to_bytes(4) + each + data for each, data in items)
    batch = magnetar.MessageBatch().with_message_id(magnetar.MessageId(2, 5, 6, -1))
    messages = batch.parse_from(payload, 2)
    theirs = pulsar.MessageBatch().with_message_id(_pulsar.MessageId(2, 5, 6, -1)).parse_from(payload, 2)
    for ours, other in zip(messages, theirs, strict=True):
        assert (ours.data(), ours.value(), ours.partition_key()) == (other.data(), other.data(), other.partition_key())
        assert str(ours.message_id()) == str(other.message_id())
    for wrong in ((payload, 3), (payload, 1), (payload[:-1], 2), (b"", 1), (payload, 0), ("x", 1), (payload, None)):
        with pytest.raises(ValueError):  # noqa: PT011
            batch.parse_from(*wrong)
    with pytest.raises(TypeError):
        batch.with_message_id(5)


def test_policies_have_the_methods_of_pulsars_cpp_client() -> None:
    policy = magnetar.DeadLetterPolicyBuilder().maxRedeliverCount(3).deadLetterTopic("d").build()
    assert (policy, policy.policy()) == (magnetar.ConsumerDeadLetterPolicy(3, "d"),) * 2
    with pytest.raises(ValueError, match="maxRedeliverCount"):
        magnetar.DeadLetterPolicyBuilder().build()
    received = magnetar.BatchReceivePolicy(1, 2, 3)
    assert (received.getMaxNumMessages(), received.getMaxNumBytes(), received.getTimeoutMs()) == (1, 2, 3)
    shared = magnetar.KeySharedPolicy().set_key_shared_mode(magnetar.KeySharedMode.Sticky).set_sticky_ranges([(0, 9)])
    assert shared.policy().sticky_ranges == ((0, 9),)
    error = magnetar.PulsarException(magnetar.Result.Timeout, "late")
    assert (error.error(), error.message) == (magnetar.Result.Timeout, "late")


def test_authentication_by_the_names_of_pulsars_client(tmp_path: Path) -> None:
    java = "org.apache.pulsar.client.impl.auth.Authentication"
    for name in ("tls", f"{java}Tls"):
        tls = magnetar.Authentication(name, "tlsCertFile:a.pem,tlsKeyFile:b.pem")
        assert (tls.auth_method_name, tls.certificate_path, tls.private_key_path) == ("tls", "a.pem", "b.pem")
    (tmp_path / "token").write_text("abc\n")
    for parameters in ("abc", "token:abc", f"file://{tmp_path}/token", f"file:{tmp_path}/token"):
        assert magnetar.Authentication("token", parameters).authorization() == "Bearer abc"
    basic = magnetar.Authentication(f"{java}Basic", '{"username": "u", "password": "p"}')
    assert basic.authorization() == magnetar.AuthenticationBasic("u", "p").authorization()
    for wrong in (("x.so", "y"), ("tls", None), (None, "y"), ("tls", "")):
        with pytest.raises(magnetar.PulsarException):
            magnetar.Authentication(*wrong)
