"""`import magnetar as pulsar`: names and errors that Pulsar's programs use; importing is cheap."""

import importlib
import subprocess
import sys

import pytest

import magnetar
from magnetar.client.common import errors
from magnetar.client.common.errors import MagnetarError, PulsarException, Result, translate_error
from magnetar.proto import errors as wire_errors


def test_pr15_a_clients_defaults_are_pulsars() -> None:
    client = magnetar.Client("magnetar://localhost")
    settings = client.inner().settings
    assert (settings.operation_timeout_s, settings.connection_timeout_s) == (30, 10)
    assert (settings.backoff_first_s, settings.backoff_last_s) == (0.1, 60)
    taken = magnetar.Client("magnetar://localhost", None, 5, 4, 4, 100, None, 60, connection_timeout_ms=500)
    settings = taken.inner().settings
    assert (settings.operation_timeout_s, settings.connection_timeout_s) == (5, 0.5), "the others choose nothing here"


def test_every_public_name_is_there() -> None:
    for name in magnetar.__all__:
        assert getattr(magnetar, name) is not None
    assert set(magnetar.__all__) <= set(dir(magnetar))
    assert set(errors.__all__) <= set(magnetar.__all__), "each exception is exported"
    with pytest.raises(AttributeError):
        magnetar.no_such_name  # noqa: B018


def test_every_result_has_its_exception() -> None:
    for result in Result:
        if result is not Result.Ok:
            family = getattr(magnetar, result.name)
            assert issubclass(family, PulsarException)
            assert issubclass(family, MagnetarError)
            assert family().error() is result
            assert type(errors.make_exception_for_result(result)) is family


def test_errors_are_pythons_own_as_well_where_pulsars_programs_expect_it() -> None:
    for family, builtin in (
        (magnetar.Timeout, TimeoutError),
        (magnetar.InvalidConfiguration, ValueError), (magnetar.InvalidConfiguration, TypeError),
        (magnetar.InvalidMessage, ValueError), (magnetar.InvalidMessage, TypeError),
        (magnetar.InvalidTopicName, ValueError), (magnetar.InvalidUrl, ValueError),
    ):  # fmt: skip
        error = family("why", endpoint="x")
        assert isinstance(error, builtin)
        assert (str(error), error.message, error.fields) == ("why", "why", {"endpoint": "x"})
    with pytest.raises(ValueError, match="nonsense"):
        magnetar.Client("nonsense")
    with pytest.raises(TypeError):
        magnetar.schema.StringSchema().encode(5)


def test_translation_keeps_the_cause_and_what_is_known_of_the_outcome() -> None:
    cause = wire_errors.TimedOut("slow", endpoint="x")
    error = translate_error(cause)
    assert isinstance(error, magnetar.Timeout)
    assert (error.__cause__, error.definite, error.retryable, error.fields) == (cause, False, True, {"endpoint": "x"})
    assert translate_error(error) is error
    assert isinstance(translate_error(wire_errors.NotOwner("moved")), magnetar.ServiceUnitNotReady)
    assert isinstance(translate_error(wire_errors.TenantNotFound("t")), magnetar.TopicNotFound)
    assert isinstance(translate_error(ValueError("x")), magnetar.UnknownError)
    lost = translate_error(wire_errors.DataLost("gone", ledger=7, first=2, last=4))
    assert isinstance(lost, magnetar.DataLost)
    assert isinstance(lost, magnetar.BrokerPersistenceError), "what it is to programs of Pulsar"
    assert (lost.ledger, lost.first, lost.last, lost.retryable) == (7, 2, 4, False)


def test_asyncio_is_importable_in_both_ways_and_shadows_nothing() -> None:
    module = importlib.import_module("magnetar.asyncio")
    from magnetar import asyncio as again

    assert module is again
    assert module.Client.__module__ == "magnetar.client.client"
    assert importlib.import_module("asyncio").__name__ == "asyncio"
    assert importlib.import_module("magnetar.schema").JsonSchema
    assert importlib.import_module("magnetar.exceptions").Timeout is magnetar.Timeout


def test_importing_and_making_a_client_loads_no_grpc_and_no_zeromq() -> None:
    code = (
        "import sys, magnetar; light = 'google.protobuf' not in sys.modules; "
        "magnetar.Client('magnetar://localhost'); magnetar.MessageId.earliest; magnetar.schema; "
        "print(light, *[m for m in ('grpc', 'zmq', 'uvloop', 'msgspec', 'prometheus_client') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["True"]
