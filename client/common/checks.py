"""The checks of the SDK's parameters: one table, applied before anything is sent or made.

Each row is a `ParameterCheck`: the allowed types (any other type raises a TypeError), a test of the value (a value that
fails it raises a ValueError), and a description of the allowed values. The errors are exceptions of the SDK as well:
InvalidMessage for a parameter of a message, InvalidTopicName for the name of a topic, InvalidConfiguration for all
other parameters. Relations between parameters are checked by the settings themselves (client/model/settings.py);
parameters that Magnetar does not support are refused by client/model/options.py.

    check_parameters(CLIENT_CHECKS, options)                 checks the values of `options` by the table CLIENT_CHECKS
    check_message_parameters(properties, key, …)      the same for each message that is sent, without a table, for speed

The tables of producers and consumers, whose rows name the SDK's types, are in client/model/options.py. A bool is not
accepted as a number, nor a number as a member of an enum; text must be encodable as UTF-8 (no lone surrogates). A
number is bounded by the type that carries it: signed 64 bits on the wire, or the timers of an event loop.
Guard: tests/client/model/test_wrong_arguments.py.

Also in this file, under the heading "extras": the packages that only some parts of the SDK need."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, NamedTuple

from ...proto.errors import InvalidName
from .errors import InvalidConfiguration, InvalidMessage, InvalidTopicName

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
UINT64_MAX = 2**64 - 1
DURATION_MS_MAX = 1 << 40
"""Longest duration that a parameter accepts, in ms: 35 years, which the timers of every event loop accept."""
ENTRY_ID_MAX = 2**32 - 1
"""Largest entry id that can be acknowledged: sets of entry ids have 32 bits, and no ledger has that many entries."""
BATCH_INDEX_MAX = 1 << 24
"""Largest batch index that can be acknowledged: larger than the number of messages that fit into an entry
(UNCOMPRESSED_BYTES_MAX, at 6 bytes each)."""


class WrongType(InvalidConfiguration, TypeError):
    """Raised when a parameter has a wrong type."""


class WrongValue(InvalidConfiguration, ValueError):
    """Raised when a parameter has the right type, but a value that is not allowed."""


class WrongMessageType(InvalidMessage, TypeError):
    """Raised when a parameter of a message has a wrong type."""


class WrongMessageValue(InvalidMessage, ValueError):
    """Raised when a parameter of a message has a value that is not allowed."""


class WrongIdText(WrongMessageValue, InvalidName):
    """Raised when a text is not the text of a message id."""


class WrongTopicType(InvalidTopicName, TypeError):
    """Raised when the name of a topic is not a text."""


class WrongTopic(InvalidTopicName, ValueError):
    """Raised when a text is not a valid name of a topic."""


class ParameterCheck(NamedTuple):
    """The check of one parameter: the allowed types (`types`), a function that says whether a value is allowed
    (`fits`), and a description of the allowed values for the error message (`allowed_text`). `optional`: whether None
    is allowed, too."""

    allowed_text: str
    types: tuple[type, ...]
    fits: Callable[[Any], bool] = lambda _: True
    optional: bool = False

    def find_error_class(self, value: object) -> type[TypeError] | type[ValueError] | None:
        """Returns TypeError if the value has a wrong type, ValueError if it is not allowed, None if it passes the
        check."""
        if value is None and self.optional:
            return None
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            return TypeError
        return None if self.fits(value) else ValueError


CheckTable = Mapping[str, ParameterCheck]


def check_parameters(table: CheckTable, values: Mapping[str, Any]) -> None:
    """Raises WrongType or WrongValue for the first of `values` that does not pass the check with its name in `table`.
    Values whose names are not in `table` are not checked."""
    for name, value in values.items():
        row = table.get(name)
        if row is not None and (problem := row.find_error_class(value)) is not None:
            raise (WrongType if problem is TypeError else WrongValue)(
                f"{name} is {row.allowed_text}, not {shorten_value(value)}"
            )


def check_parameter(name: str, row: ParameterCheck, value: object) -> None:
    """Raises WrongType or WrongValue if the value of the parameter `name` does not pass the check `row`."""
    check_parameters({name: row}, {name: value})


def shorten_value(value: object) -> str:
    """Returns a value as text for an error message, of at most 80 characters. The text of a PEM file, which may be a
    private key, is left out."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    if "-----BEGIN" in text:
        return "what a PEM file says"  # a key, where its path belongs
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= 80 else f"{text[:77]}..."


# -------------------------------------------------------------------------------- rows
def _encodable(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def make_whole_number_check(least: int, most: int = INT32_MAX, *, optional: bool = False) -> ParameterCheck:
    """Returns the check of a parameter that must be an int from `least` to `most`, both included; with `optional` also
    None."""
    return ParameterCheck(
        f"a whole number from {least} to {most}", (int,), lambda value: least <= value <= most, optional
    )


def make_enum_check(kind: type[IntEnum]) -> ParameterCheck:
    """Returns the check of a parameter that must be a member of the enum `kind`."""
    return ParameterCheck(f"one of {kind.__name__}.{', '.join(each.name for each in kind)}", (kind,))


def to_plain_text(value: Any) -> Any:
    """Returns a text as a plain `str`, and a dict with plain `str` objects as keys and values, in place of objects of
    subclasses of `str`: a member of a text enum prints as something else. Returns any other value unchanged."""
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)
    if type(value) is dict and not are_ascii_properties(value):
        return {to_plain_text(name): to_plain_text(each) for name, each in value.items()}
    return value


def _texts(pairs: Mapping[Any, Any]) -> bool:
    return all(isinstance(each, str) and _encodable(each) for pair in pairs.items() for each in pair)


def make_instance_check(kind: type, *, optional: bool = True) -> ParameterCheck:
    """Returns the check of a parameter that must be an instance of `kind`, or None unless `optional` is False."""
    return ParameterCheck(f"a {kind.__name__}{', or None' if optional else ''}", (kind,), optional=optional)


def make_methods_check(*methods: str) -> ParameterCheck:
    """Returns the check of a parameter that must be an object with all the methods named `methods`, or None."""

    def fits(value: object) -> bool:
        return not isinstance(value, type) and all(callable(getattr(value, each, None)) for each in methods)

    return ParameterCheck(
        f"an object with {' and '.join(f'{each}()' for each in methods)}, or None", (object,), fits, True
    )


TEXT_CHECK = ParameterCheck("text that can be encoded", (str,), _encodable)
NAME_CHECK = ParameterCheck(
    "text, not empty, that can be encoded", (str,), lambda text: text != "" and _encodable(text)
)
PATH_CHECK = ParameterCheck("the path of a file", (str,), lambda text: "-----BEGIN" not in text and _encodable(text))
PATH_OR_NONE = PATH_CHECK._replace(allowed_text="the path of a file, or None", optional=True)
TEXT_OR_NONE = TEXT_CHECK._replace(allowed_text="text that can be encoded, or None", optional=True)
BOOLEAN_CHECK = ParameterCheck("True or False", (bool,))
PROPERTIES_CHECK = ParameterCheck("a dict of text to text", (dict,), _texts, optional=True)
MS_CHECK = make_whole_number_check(0, DURATION_MS_MAX)
TIMEOUT_MS = make_whole_number_check(0, DURATION_MS_MAX, optional=True)
SECONDS_CHECK = ParameterCheck(
    "a number of seconds above 0", (int, float), lambda value: 0 < value < DURATION_MS_MAX / 1000
)
ISOLATION = ParameterCheck(
    "read_committed or read_uncommitted", (str,), lambda name: name in ("read_committed", "read_uncommitted")
)
EXCEPTION_CHECK = ParameterCheck("an exception, or None", (BaseException,), lambda _: True, True)
FUNCTION_CHECK = ParameterCheck("a function", (object,), callable)
REDELIVERY_ORDER = ParameterCheck("any or key", (str,), lambda name: name in ("any", "key"))
FILTER_CHECK = ParameterCheck("a filter, or None", (str,), lambda text: bool(text.strip()), optional=True)
DEBOUNCE_CHECK = ParameterCheck(
    "seconds, 0.001 to 86400, or None", (int, float), lambda value: 0.001 <= value <= 86_400, True
)
RATE_PER_SECOND_CHECK = ParameterCheck(
    "messages per second, above 0 and at most 1e9", (int, float), lambda value: 0 < value <= 1e9, True
)
CALLBACK_CHECK = ParameterCheck("a function, or None", (object,), callable, True)
SEQUENCE_ID_CHECK = make_whole_number_check(0, INT64_MAX - 1, optional=True)
PUBLISH_TIME_CHECK = make_whole_number_check(0, INT64_MAX)
def is_time_after_1970(value: datetime) -> bool:
    """Returns whether a datetime has a time zone, and is after the epoch."""
    return value.tzinfo is not None and 0 < value.timestamp() < DURATION_MS_MAX


DELAY_CHECK = ParameterCheck(
    "a timedelta from 0 to 35 years", (timedelta,), lambda value: 0 <= value.total_seconds() * 1000 <= DURATION_MS_MAX
)


# -------------------------------------------------------------------------------- what is said of a message
KEY_RANGES_CHECK = ParameterCheck(
    "a list of (first, last) pairs of hashes", (list, tuple),
    lambda pairs: all(
        isinstance(pair, list | tuple) and len(pair) == 2 and all(type(each) is int for each in pair) for pair in pairs
    ), True,
)  # fmt: skip

EXPIRES_IN_S_MAX = 10**9
"""Longest `expires_in` in seconds: 31 years."""


def _is_expiry(value: Any) -> bool:
    if isinstance(value, datetime):
        return value.tzinfo is not None and value.timestamp() > 0
    at_ms: int = value
    return 0 < at_ms <= INT64_MAX


def _is_lifetime(value: Any) -> bool:
    seconds: float = value.total_seconds() if isinstance(value, timedelta) else value
    return 0 < seconds <= EXPIRES_IN_S_MAX


MESSAGE_CHECKS: CheckTable = {
    "properties": PROPERTIES_CHECK,
    "partition_key": TEXT_OR_NONE,
    "ordering_key": TEXT_OR_NONE,
    "sequence_id": SEQUENCE_ID_CHECK,
    "replication_clusters": ParameterCheck(
        "a list of cluster names", (list, tuple, set, frozenset),
        lambda names: all(isinstance(each, str) and _encodable(each) for each in names), True,
    ),
    "disable_replication": ParameterCheck("True or False", (bool,), optional=True),
    "event_timestamp": ParameterCheck(
        "ms since the epoch, a whole number from 0 to 2**64-1", (int,), lambda value: 0 <= value <= UINT64_MAX, True
    ),
    "deliver_at": ParameterCheck(
        "ms since the epoch, a whole number from 0 to 2**63-1", (int,), lambda value: 0 <= value <= INT64_MAX, True
    ),
    "deliver_after": DELAY_CHECK._replace(optional=True),
    "expires_at": ParameterCheck(
        "a datetime with a time zone after 1970, or ms since the epoch, a whole number from 1 to 2**63-1",
        (datetime, int), _is_expiry, True,
    ),
    "expires_in": ParameterCheck(
        "seconds above 0 and up to 10**9, or such a timedelta", (int, float, timedelta), _is_lifetime, True
    ),
    "priority": make_whole_number_check(0, optional=True),
    "callback": CALLBACK_CHECK,
}  # fmt: skip


def check_message_parameters(values: Mapping[str, Any]) -> None:
    """Raises InvalidMessage for the first of the parameters of a message that does not pass its check in
    `MESSAGE_CHECKS`. None always passes."""
    for name, value in values.items():
        if value is not None and (problem := MESSAGE_CHECKS[name].find_error_class(value)) is not None:
            kind = WrongMessageType if problem is TypeError else WrongMessageValue
            raise kind(f"{name} is {MESSAGE_CHECKS[name].allowed_text}, not {shorten_value(value)}")


def is_ascii_key(key: object) -> bool:
    """Returns whether the key is a plain `str` of ASCII characters, so that it needs no further check."""
    return type(key) is str and key.isascii()


def are_ascii_properties(properties: object) -> bool:
    """Returns whether `properties` is a dict whose names and values are plain `str` objects of ASCII characters, so
    that they need no further check."""
    if type(properties) is not dict:
        return False
    for key, value in properties.items():
        if not (type(key) is str and type(value) is str and key.isascii() and value.isascii()):
            return False
    return True


# -------------------------------------------------------------------------------- tables
CLIENT_CHECKS: CheckTable = {
    "operation_timeout_seconds": SECONDS_CHECK,
    "io_threads": make_whole_number_check(1),
    "message_listener_threads": make_whole_number_check(1),
    "concurrent_lookup_requests": make_whole_number_check(1),
    "log_conf_file_path": TEXT_OR_NONE,
    "stats_interval_in_seconds": make_whole_number_check(0),
    "use_tls": BOOLEAN_CHECK,
    "tls_trust_certs_file_path": PATH_OR_NONE,
    "tls_allow_insecure_connection": BOOLEAN_CHECK,
    "tls_validate_hostname": BOOLEAN_CHECK,
    "connection_timeout_ms": make_whole_number_check(1),
    "listener_name": TEXT_OR_NONE,
    "tls_private_key_file_path": PATH_OR_NONE,
    "tls_certificate_file_path": PATH_OR_NONE,
    "latency_statistics": BOOLEAN_CHECK,
    "memory_limit_bytes": make_whole_number_check(0, INT64_MAX, optional=True),
}
TRANSACTION_CHECKS: CheckTable = {
    "timeout": SECONDS_CHECK,
    "name": NAME_CHECK._replace(allowed_text="text, not empty, or None", optional=True),
    "id": NAME_CHECK._replace(allowed_text="text, not empty, or None", optional=True),
}
BATCH_RECEIVE_CHECKS: CheckTable = {
    "max_num_message": make_whole_number_check(-INT32_MAX),
    "max_num_bytes": make_whole_number_check(-INT64_MAX, INT64_MAX),
    "timeout_ms": make_whole_number_check(-DURATION_MS_MAX, DURATION_MS_MAX),
}
DEAD_LETTER_CHECKS: CheckTable = {
    "max_redeliver_count": make_whole_number_check(1),
    "dead_letter_topic": TEXT_OR_NONE,
    "initial_subscription_name": TEXT_OR_NONE,
    "retry_letter_topic": TEXT_OR_NONE,
}
BACKOFF_CHECKS: CheckTable = {
    "min_delay_ms": MS_CHECK,
    "max_delay_ms": MS_CHECK,
    "multiplier": ParameterCheck(
        "a number of at least 1", (int, float), lambda value: math.isfinite(value) and value >= 1
    ),
}
MESSAGE_ID_CHECKS: CheckTable = {
    "partition": make_whole_number_check(-1),
    "ledger_id": make_whole_number_check(-1, INT64_MAX),
    "entry_id": make_whole_number_check(-1, INT64_MAX),
    "batch_index": make_whole_number_check(-1),
}
"""Checks of the numbers of a message id."""
SEEK_ID_CHECKS: CheckTable = {
    "ledger_id": make_whole_number_check(-1, INT64_MAX - 1), "entry_id": make_whole_number_check(-1, INT64_MAX - 1)
}
"""Checks of the message id to which a consumer or reader is moved."""
ACK_ID_CHECKS: CheckTable = {
    "ledger_id": make_whole_number_check(0, INT64_MAX),
    "entry_id": make_whole_number_check(0, ENTRY_ID_MAX),
    "batch_index": make_whole_number_check(-1, BATCH_INDEX_MAX),
}
"""Checks of a message id that is acknowledged; `earliest` and `latest` do not pass."""


# -------------------------------------------------------------------------------------------------------- extras
# Packages that only some parts of the SDK need, and what installs them.


PIP_EXTRAS = {"sqlalchemy": "magnetar[outbox]", "django": "django"}
"""Python package → the argument with which `pip install` installs it."""


def make_missing_extra(error: ModuleNotFoundError, what: str) -> ModuleNotFoundError:
    """Returns the error to raise because a Python package is not installed. `error`: the error of its import; `what`:
    the part of the SDK that needs it. The text says what to install. If the missing module belongs to no extra of
    Magnetar's package, returns `error` itself."""
    package = (error.name or "").partition(".")[0]
    if package not in PIP_EXTRAS:
        return error
    return ModuleNotFoundError(f"{what} needs {package}: pip install '{PIP_EXTRAS[package]}'", name=error.name)
