"""The policies under the names and methods that Pulsar's C++ client gives them."""

from __future__ import annotations

from ..common.checks import INT32_MAX
from ..model.settings import ConsumerDeadLetterPolicy, ConsumerKeySharedPolicy, KeySharedMode


class DeadLetterPolicyBuilder:
    """Makes a `ConsumerDeadLetterPolicy`, whose parameters its methods set."""

    def __init__(self) -> None:
        self._count = INT32_MAX
        self._topic: str | None = None
        self._subscription: str | None = None

    def maxRedeliverCount(self, count: int) -> DeadLetterPolicyBuilder:
        """Sets how often a message may come back."""
        self._count = count
        return self

    def deadLetterTopic(self, topic: str) -> DeadLetterPolicyBuilder:
        """Sets the topic of the dead letters."""
        self._topic = topic
        return self

    def initialSubscriptionName(self, name: str) -> DeadLetterPolicyBuilder:
        """Sets the subscription that is made with that topic."""
        self._subscription = name
        return self

    def build(self) -> ConsumerDeadLetterPolicy:
        """Returns the policy. InvalidConfiguration: a parameter is wrong. Without `maxRedeliverCount` a message comes
        back for ever."""
        return ConsumerDeadLetterPolicy(self._count, self._topic, self._subscription)


class KeySharedPolicy:
    """A `ConsumerKeySharedPolicy` that is set step by step; `policy` gives it."""

    def __init__(self) -> None:
        self._mode = KeySharedMode.AutoSplit
        self._out_of_order = False
        self._ranges: list[tuple[int, int]] = []

    def set_key_shared_mode(self, mode: KeySharedMode) -> KeySharedPolicy:
        """Sets how the keys are divided."""
        self._mode = mode
        return self

    def get_key_shared_mode(self) -> KeySharedMode:
        """Returns how the keys are divided."""
        return self._mode

    def set_allow_out_of_order_delivery(self, allowed: bool) -> KeySharedPolicy:
        """Whether a key may move before what is outstanding is acknowledged."""
        self._out_of_order = allowed
        return self

    def is_allow_out_of_order_delivery(self) -> bool:
        """Whether a key may move before what is outstanding is acknowledged."""
        return self._out_of_order

    def set_sticky_ranges(self, ranges: list[tuple[int, int]]) -> KeySharedPolicy:
        """Sets (first, last) pairs of hashes, both included; with Sticky."""
        self._ranges = ranges
        return self

    def get_sticky_ranges(self) -> list[tuple[int, int]]:
        """Returns (first, last) pairs of hashes, both included."""
        return self._ranges

    def policy(self) -> ConsumerKeySharedPolicy:
        """Returns the policy. InvalidConfiguration: a parameter is wrong."""
        return ConsumerKeySharedPolicy(self._mode, self._out_of_order, self._ranges or None)
