"""`Context`, what a function may ask while it processes a message."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any


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
