
import pytest

from magnetar.proto import wire_pb2 as wire
from magnetar.proto.errors import InternalError, MagnetarError, NotOwner, TimedOut, from_wire, to_wire


def families(base: type[MagnetarError] = MagnetarError) -> list[type[MagnetarError]]:
    """The classes of this module, those with a code."""
    found = [base] if "code" in base.__dict__ else []
    return found + [each for child in base.__subclasses__() for each in families(child)]


def test_codes_are_unique() -> None:
    codes = [family.code for family in families()]
    assert len(codes) == len(set(codes))
    assert len(codes) > 30


def test_a_code_cannot_be_taken_twice() -> None:
    with pytest.raises(AssertionError, match="is taken"):
        type("Twin", (MagnetarError,), {"code": 41})


def test_an_unknown_code_is_a_plain_error_and_a_bug_an_internal_one() -> None:
    assert type(from_wire(wire.Error(code=9999, message="later"))) is MagnetarError
    assert type(from_wire(to_wire(ValueError("no")))) is InternalError


def test_a_time_out_is_unknown_and_a_wrong_owner_is_definite() -> None:
    assert not TimedOut.definite
    assert TimedOut.retryable
    assert NotOwner.definite
    assert NotOwner.retryable
