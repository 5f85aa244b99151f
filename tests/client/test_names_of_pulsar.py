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
    received = magnetar.BatchReceivePolicy(1, 2, 3)
    assert (received.getMaxNumMessages(), received.getMaxNumBytes(), received.getTimeoutMs()) == (1, 2, 3)
    shared = magnetar.KeySharedPolicy().set_key_shared_mode(magnetar.KeySharedMode.Sticky).set_sticky_ranges([(0, 9)])
    assert shared.policy().sticky_ranges == [(0, 9)]
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
    for wrong in (("tls", None), (None, "y"), ("tls", "")):
        with pytest.raises(magnetar.PulsarException):
            magnetar.Authentication(*wrong)


# ------------------------------------------------------------------ pairs of calls: what _pulsar has below its classes
CONFIGURATIONS = [f"{each}Configuration" for each in ("Client", "Consumer", "Producer", "Reader")]
NOT_OF_PROGRAMS = {"AbstractCryptoKeyReader", "Error", "MessageBuilder", "TableViewConfiguration", "TopicRegex"}
"""What the wrapper in Python and the C++ client say to each other; in docs/pulsar.md too."""


def test_every_name_of_the_cpp_client_is_here() -> None:
    import _pulsar

    from magnetar import _pulsar as ours

    lacking = {name for name, value in public(_pulsar) if not hasattr(ours, name)}
    assert lacking == NOT_OF_PROGRAMS
    for name in ("ConsumerConfiguration", "ProducerConfiguration", "SchemaType", "RegexSubscriptionMode"):
        assert getattr(magnetar, name) is getattr(ours, name)


def plain(value: Any) -> Any:
    """An enum by its text, so that those of both can be compared."""
    return str(value) if isinstance(value, enum.Enum) or type(value).__module__.endswith("_pulsar") else value


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_configurations_have_the_options_and_defaults_of_pulsars(name: str) -> None:
    import _pulsar

    theirs, ours = getattr(_pulsar, name)(), getattr(magnetar, name)()
    for option, _ in public(type(theirs)):
        assert callable(getattr(ours, option)), option
        try:
            default = getattr(theirs, option)()
        except TypeError:  # it is set, and not read
            with pytest.raises(TypeError):
                getattr(ours, option)()
            continue
        found = getattr(ours, option)()
        if type(default).__name__ in ("SchemaInfo", "DeadLetterPolicy", "KeySharedPolicy", "BatchReceivePolicy"):
            getters = [each for each, _ in public(default) if not each.startswith(("set_", "with_"))]
            assert [plain(getattr(found, each)()) for each in getters] == [
                plain(getattr(default, each)()) for each in getters
            ], option
        else:
            assert plain(found) == plain(default), option
            returned = getattr(theirs, option)(default)
            assert getattr(ours, option)(found) is (None if returned is None else ours), option
            with pytest.raises(TypeError):
                getattr(theirs, option)(object())
            with pytest.raises(TypeError):
                getattr(ours, option)(object())


def test_a_configuration_is_what_opens_a_producer_and_a_consumer(fake: tuple[str, Any]) -> None:
    sending = magnetar.ProducerConfiguration().send_timeout_millis(12000).batching_enabled(True)
    sending.property("a", "b").compression_type(magnetar.CompressionType.ZSTD).producer_name("p")
    receiving = magnetar.ConsumerConfiguration().consumer_type(magnetar.ConsumerType.Shared).property("c", "d")
    receiving.consumer_name("k")
    receiving.subscription_initial_position(magnetar.InitialPosition.Earliest)
    assert receiving.parameters()["properties"] == {"c": "d"}
    with magnetar.Client(fake[0]) as client:
        producer = client.create_producer("configured", **sending.parameters())
        consumer = client.subscribe("configured", "s", **receiving.parameters())
        producer.send(b"x")
        assert (producer.producer_name(), consumer.consumer_name()) == ("p", "k")
        assert consumer.receive(30_000).data() == b"x"
    for wrong in (("compression_type", 1), ("send_timeout_millis", "5"), ("property", "a")):
        with pytest.raises(TypeError):
            getattr(magnetar.ProducerConfiguration(), wrong[0])(*wrong[1:])


def test_enums_print_as_pulsars() -> None:
    for name, value in public(pulsar):
        members = getattr(value, "__members__", None) if isinstance(value, type) else None
        for each in members or ():
            ours = getattr(getattr(magnetar, name), each)
            assert (str(ours), f"{ours}") == (str(members[each]), f"{members[each]}")
    import _pulsar

    for each in _pulsar.SchemaType.__members__:
        theirs, our = getattr(_pulsar.SchemaType, each), getattr(magnetar.SchemaType, each)
        assert (str(our), our.name, our.value) == (str(theirs), theirs.name, theirs.value)


class Place(magnetar.schema.Record):
    name = magnetar.schema.String()


class TheirPlace(pulsar.schema.Record):
    name = pulsar.schema.String()


TheirPlace.__name__ = "Place"


@pytest.mark.parametrize("kind", ["BytesSchema", "StringSchema", "JsonSchema", "AvroSchema"])
def test_a_schema_describes_itself_as_pulsars(kind: str) -> None:
    takes_a_record = kind in ("JsonSchema", "AvroSchema")
    theirs = getattr(pulsar.schema, kind)(*[TheirPlace] * takes_a_record).schema_info()
    ours = getattr(magnetar.schema, kind)(*[Place] * takes_a_record).schema_info()
    assert (ours.name(), ours.schema()) == (theirs.name(), theirs.schema())
    assert plain(ours.schema_type()) == plain(theirs.schema_type())
    assert ours.schema_type().value == theirs.schema_type().value
    again = magnetar.SchemaInfo(ours.schema_type(), ours.name(), ours.schema())
    assert (again.schema_type(), again.name(), again.schema()) == (ours.schema_type(), ours.name(), ours.schema())


def test_policies_say_what_pulsars_say() -> None:
    for of in (pulsar, magnetar):
        for given, expected in (
            ((3,), (3, "", "")), ((3, None, None), (3, "", "")), ((3, "t"), (3, "t", "")),
            ((3, "t", "s"), (3, "t", "s")),
        ):  # fmt: skip
            policy = of.ConsumerDeadLetterPolicy(*given)
            found = (policy.max_redeliver_count, policy.dead_letter_topic, policy.initial_subscription_name)
            assert found == expected
            told = policy.policy()
            found = (told.getMaxRedeliverCount(), told.getDeadLetterTopic(), told.getInitialSubscriptionName())
            assert found == expected
        assert of.DeadLetterPolicyBuilder().build().getMaxRedeliverCount() == 2**31 - 1
        for wrong in (0, -1, None):
            with pytest.raises(ValueError):  # noqa: PT011
                of.ConsumerDeadLetterPolicy(wrong)
        sticky = of.ConsumerKeySharedPolicy(of.KeySharedMode.Sticky, False, [(0, 100), (101, 65535)])
        assert sticky.sticky_ranges == [(0, 100), (101, 65535)]
        assert sticky.policy().get_sticky_ranges() == [(0, 100), (101, 65535)]
        assert sticky.policy().get_key_shared_mode() == of.KeySharedMode.Sticky
        assert not sticky.policy().is_allow_out_of_order_delivery()
        split = of.ConsumerKeySharedPolicy()
        assert (split.sticky_ranges, split.policy().get_sticky_ranges()) == ([], [])
        for ranges in (None, [], [(-1, 5)], [(0, 65536)], [(0, 5), (3, 9)]):
            with pytest.raises(ValueError):  # noqa: PT011
                of.ConsumerKeySharedPolicy(of.KeySharedMode.Sticky, False, ranges)
        batch = of.ConsumerBatchReceivePolicy(10, -1, 100).policy()
        assert (batch.getMaxNumMessages(), batch.getMaxNumBytes(), batch.getTimeoutMs()) == (10, -1, 100)


# ------------------------------------------------------------------ pairs of calls: values of another type
def elements(schema: Any) -> dict[str, tuple[Any, Any]]:
    """Fields of elements, and values that are of another type."""

    class Colour(enum.Enum):
        RED = 1

    class Inner(schema.Record):  # type: ignore[name-defined, misc]
        a = schema.Integer()

    return {
        "an integer": (schema.Array(schema.Integer()), [1, "x"]),
        "a long": (schema.Array(schema.Long()), ["x"]),
        "text": (schema.Array(schema.String()), [1]),
        "bytes": (schema.Array(schema.Bytes()), [1]),
        "a float": (schema.Array(schema.Double()), ["x"]),
        "a truth": (schema.Array(schema.Boolean()), [1]),
        "an array": (schema.Array(schema.Array(schema.Integer())), [1]),
        "a map": (schema.Array(schema.Map(schema.Integer())), [1]),
        "an enum": (schema.Array(schema.CustomEnum(Colour)), [2.5]),
        "a record": (schema.Array(Inner()), [1]),
        "a value": (schema.Map(schema.Integer()), {"a": "x"}),
        "a value that is a float": (schema.Map(schema.Double()), {"a": "x"}),
        "a value that is an array": (schema.Map(schema.Array(schema.Integer())), {"a": 1}),
        "a value that is an enum": (schema.Map(schema.CustomEnum(Colour)), {"a": 2.5}),
        "a value that is a record": (schema.Map(Inner()), {"a": 1}),
        "a key": (schema.Map(schema.Integer()), {1: 1}),
    }


@pytest.mark.parametrize("what", elements(pulsar.schema))
def test_an_element_of_another_type_is_refused_with_the_words_of_pulsars_client(what: str) -> None:
    said = []
    for schema in (pulsar.schema, magnetar.schema):
        field, value = elements(schema)[what]
        record = type(schema.Record)("Outer", (schema.Record,), {"some_field": field})
        with pytest.raises(TypeError) as found:
            record(some_field=value)
        said.append(str(found.value))
    assert said[0] == said[1]


def test_an_element_that_does_not_fit_and_a_default_name_their_field() -> None:
    shared = magnetar.schema.Integer()

    class Two(magnetar.schema.Record):
        first = magnetar.schema.Array(shared)
        second = magnetar.schema.Map(magnetar.schema.Array(shared))

    with pytest.raises(TypeError, match="'first': 2147483648 does not fit"):
        Two(first=[1 << 31])
    with pytest.raises(TypeError, match="'second': 2147483648 does not fit"):
        Two(second={"a": [1 << 31]})
    with pytest.raises(TypeError, match="field 'default' takes Integer"):
        magnetar.schema.Integer(default="x")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="Array field default items should all be of type int"):
        magnetar.schema.Array(shared, default=["x"])
