"""`magnetar.functions`: the names of `pulsar.functions`.

A program's functions are classes that derive from them, and can be called and tested here. Magnetar has no runtime that
would run them: a consumer and a producer do.
"""

from __future__ import annotations

import pickle
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

# ------------------------------------------------------------------------------------------------------ function
# `Function`, the base of a program's functions.


class Function:
    """Takes each message of its input topics, and may give one for its output topic."""

    @abstractmethod
    def process(self, input: Any, context: Any) -> Any:
        """Returns what the message `input` becomes; None: nothing. `context`: a `Context`."""


# --------------------------------------------------------------------------------------------------------- serde
# How the values of a function become bytes and back.


class SerDe:
    """Base of a program's own serializers."""

    @abstractmethod
    def serialize(self, input: Any) -> Any:
        """Returns the bytes of a value."""

    @abstractmethod
    def deserialize(self, input_bytes: Any) -> Any:
        """Returns the value of bytes."""


class PickleSerDe(SerDe):
    """Serializes by pickle, which runs what the bytes say: only for topics whose producers are trusted."""

    def serialize(self, input: Any) -> bytes:
        return pickle.dumps(input)

    def deserialize(self, input_bytes: bytes) -> Any:
        return pickle.loads(input_bytes)


class IdentitySerDe(SerDe):
    """Numbers and text as text, bytes as they are. Bytes come back as the first of int, float, complex and text that
    they are. TypeError: a value of another type."""

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
    """Base of the contexts that a runtime, or a test, gives to functions."""

    @abstractmethod
    def get_message_id(self) -> Any:
        """Returns the id of the message."""

    @abstractmethod
    def get_message_key(self) -> Any:
        """Returns the key of the message."""

    @abstractmethod
    def get_message_eventtime(self) -> Any:
        """The event time of the message, in ms."""

    @abstractmethod
    def get_message_properties(self) -> Any:
        """The properties of the message."""

    @abstractmethod
    def get_current_message_topic_name(self) -> Any:
        """The topic of the message."""

    @abstractmethod
    def get_function_tenant(self) -> Any:
        """The tenant of the function."""

    @abstractmethod
    def get_function_namespace(self) -> Any:
        """The namespace of the function."""

    @abstractmethod
    def get_function_name(self) -> Any:
        """The name of the function."""

    @abstractmethod
    def get_function_id(self) -> Any:
        """Returns the id of the function."""

    @abstractmethod
    def get_instance_id(self) -> Any:
        """The id of the instance that runs it."""

    @abstractmethod
    def get_function_version(self) -> Any:
        """The version of the function."""

    @abstractmethod
    def get_logger(self) -> Any:
        """Returns a logger."""

    @abstractmethod
    def get_user_config_value(self, key: str) -> Any:
        """A value of the program's configuration; None: there is none."""

    @abstractmethod
    def get_user_config_map(self) -> Any:
        """The program's configuration."""

    @abstractmethod
    def get_secret(self, secret_name: str) -> Any:
        """A secret; None: there is none."""

    @abstractmethod
    def get_partition_key(self) -> Any:
        """Returns the key of the message."""

    @abstractmethod
    def get_ordering_key(self) -> Any:
        """The ordering key of the message."""

    @abstractmethod
    def record_metric(self, metric_name: str, metric_value: float) -> Any:
        """Counts a number under a name."""

    @abstractmethod
    def publish(
        self, topic_name: str, message: Any, serde_class_name: str = "serde.IdentitySerDe",
        properties: Mapping[str, str] | None = None, compression_type: Any = None,
        callback: Callable[..., Any] | None = None, message_conf: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """Sends a message to a topic. `message_conf`: parameters of `Producer.send`."""

    @abstractmethod
    def get_input_topics(self) -> Any:
        """The topics that the function takes messages from."""

    @abstractmethod
    def get_output_topic(self) -> Any:
        """The topic that gets what the function gives."""

    @abstractmethod
    def get_output_serde_class_name(self) -> Any:
        """The name of the class that makes bytes of the output."""

    @abstractmethod
    def ack(self, msgid: Any, topic: str) -> Any:
        """Acknowledges a message."""

    @abstractmethod
    def incr_counter(self, key: str, amount: int) -> Any:
        """Adds to a counter of the function's state."""

    @abstractmethod
    def get_counter(self, key: str) -> Any:
        """A counter of the function's state."""

    @abstractmethod
    def del_counter(self, key: str) -> Any:
        """Removes a counter of the function's state."""

    @abstractmethod
    def put_state(self, key: str, value: Any) -> Any:
        """Sets a value of the function's state."""

    @abstractmethod
    def get_state(self, key: str) -> Any:
        """A value of the function's state."""


context = function = serde = sys.modules[__name__]
"""`pulsar.functions` has modules of these names; here one module has what they hold."""

__all__ = ["Context", "Function", "IdentitySerDe", "PickleSerDe", "SerDe", "context", "function", "serde"]
