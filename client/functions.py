"""The module `magnetar.functions`: the names of Pulsar's `pulsar.functions`.

A program derives its functions from these classes, and can call and test them. Magnetar has no runtime that runs
functions: use a consumer and a producer.

`Function` is the base class of functions. `SerDe` and its subclasses convert values to bytes and back. `Context` is the
base class of the object that a function gets with each message."""

from __future__ import annotations

import pickle
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

# ------------------------------------------------------------------------------------------------------ function
# `Function`, the base of a program's functions.


class Function:
    """Base class of a program's own functions: a function processes each message of its input topics, and may return a
    message for its output topic."""

    @abstractmethod
    def process(self, input: Any, context: Any) -> Any:
        """Processes one message, whose value is `input`. Returns the value to publish to the output topic; None:
        nothing is published. `context`: a `Context`."""


# --------------------------------------------------------------------------------------------------------- serde
# How the values of a function become bytes and back.


class SerDe:
    """Base class of a program's own serializers, which convert values to bytes and back."""

    @abstractmethod
    def serialize(self, input: Any) -> Any:
        """Converts a value to bytes and returns these."""

    @abstractmethod
    def deserialize(self, input_bytes: Any) -> Any:
        """Converts bytes back to the value and returns it."""


class PickleSerDe(SerDe):
    """Converts values by Python's pickle. Reading pickled bytes can run code that they contain: use this only for
    topics whose producers are trusted. Both methods raise the errors of pickle, such as PicklingError."""

    def serialize(self, input: Any) -> bytes:
        return pickle.dumps(input)

    def deserialize(self, input_bytes: bytes) -> Any:
        return pickle.loads(input_bytes)


class IdentitySerDe(SerDe):
    """Converts numbers and text to text, and leaves bytes unchanged. Bytes are read as the first of int, float, complex
    and text that fits; bytes that are none of these are returned unchanged. `serialize` raises TypeError for a value of
    another type."""

    _types = (int, float, complex, str)

    def serialize(self, input: Any) -> bytes:
        if type(input) is bytes:
            return input
        if type(input) in self._types:
            return str(input).encode()
        raise TypeError(f"IdentitySerDe takes numbers, text and bytes, not {type(input).__name__}")

    def deserialize(self, input_bytes: bytes) -> Any:
        for type_ in self._types:
            try:
                return type_(input_bytes.decode())
            except ValueError:
                continue
        return input_bytes


# ------------------------------------------------------------------------------------------------------- context
# `Context`, what a function may ask while it processes a message.


class Context:
    """Base class of the contexts that a test, or a runtime of the program's own, passes to functions. A subclass
    overrides the methods that its functions call; here they do nothing and return None."""

    @abstractmethod
    def get_message_id(self) -> Any:
        """Returns the id of the message that the function processes now."""

    @abstractmethod
    def get_message_key(self) -> Any:
        """Returns the key of the message that the function processes now."""

    @abstractmethod
    def get_message_eventtime(self) -> Any:
        """Returns the event time of the message that the function processes now, in ms since the epoch."""

    @abstractmethod
    def get_message_properties(self) -> Any:
        """Returns the properties of the message that the function processes now."""

    @abstractmethod
    def get_current_message_topic_name(self) -> Any:
        """Returns the name of the topic from which the message came that the function processes now."""

    @abstractmethod
    def get_function_tenant(self) -> Any:
        """Returns the tenant of the function."""

    @abstractmethod
    def get_function_namespace(self) -> Any:
        """Returns the namespace of the function."""

    @abstractmethod
    def get_function_name(self) -> Any:
        """Returns the name of the function."""

    @abstractmethod
    def get_function_id(self) -> Any:
        """Returns the id of the function."""

    @abstractmethod
    def get_instance_id(self) -> Any:
        """Returns the id of the instance that runs the function."""

    @abstractmethod
    def get_function_version(self) -> Any:
        """Returns the version of the function."""

    @abstractmethod
    def get_logger(self) -> Any:
        """Returns the logger that the function should use."""

    @abstractmethod
    def get_user_config_value(self, key: str) -> Any:
        """Returns the value of `key` in the user configuration of the function; None if there is none."""

    @abstractmethod
    def get_user_config_map(self) -> Any:
        """Returns the whole user configuration of the function as a dictionary."""

    @abstractmethod
    def get_secret(self, secret_name: str) -> Any:
        """Returns the value of the secret with this name; None if there is none."""

    @abstractmethod
    def get_partition_key(self) -> Any:
        """Returns the partition key of the message that the function processes now."""

    @abstractmethod
    def get_ordering_key(self) -> Any:
        """Returns the ordering key of the message that the function processes now."""

    @abstractmethod
    def record_metric(self, metric_name: str, metric_value: float) -> Any:
        """Records the value of a metric that the function itself defines."""

    @abstractmethod
    def publish(
        self, topic_name: str, message: Any, serde_class_name: str = "serde.IdentitySerDe",
        properties: Mapping[str, str] | None = None, compression_type: Any = None,
        callback: Callable[..., Any] | None = None, message_conf: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Publishes a message to a topic. `message_conf`: parameters of `Producer.send`. The other parameters are those
        of Pulsar's functions: `serde_class_name` names the class that encodes `message`, and `callback` gets the
        outcome."""

    @abstractmethod
    def get_input_topics(self) -> Any:
        """Returns the topics from which the function gets messages."""

    @abstractmethod
    def get_output_topic(self) -> Any:
        """Returns the name of the topic to which the function's results are published."""

    @abstractmethod
    def get_output_serde_class_name(self) -> Any:
        """Returns the name of the class that serializes the output."""

    @abstractmethod
    def ack(self, msgid: Any, topic: str) -> Any:
        """Acknowledges the message `msgid` on the input topic `topic`."""

    @abstractmethod
    def incr_counter(self, key: str, amount: int) -> Any:
        """Adds `amount` to the counter `key` in the function's state."""

    @abstractmethod
    def get_counter(self, key: str) -> Any:
        """Returns the value of the counter `key` in the function's state."""

    @abstractmethod
    def del_counter(self, key: str) -> Any:
        """Removes the counter `key` from the function's state."""

    @abstractmethod
    def put_state(self, key: str, value: Any) -> Any:
        """Stores `value` under `key` in the function's state."""

    @abstractmethod
    def get_state(self, key: str) -> Any:
        """Returns the value that is stored under `key` in the function's state."""


context = function = serde = sys.modules[__name__]
"""This module under the names of three modules of `pulsar.functions`, whose classes it contains."""

__all__ = ["Context", "Function", "IdentitySerDe", "PickleSerDe", "SerDe", "context", "function", "serde"]
