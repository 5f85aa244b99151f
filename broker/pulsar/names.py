"""The producers of all Pulsar connections to this broker, by topic and name: detects that a producer reconnects.

Pulsar's clients count how often a producer was opened (`epoch`), and identify it only by its name: the same name from
the same host with a higher epoch is the producer that was disconnected, and replaces it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .producer import ProducerHandler


class OpenProducers:
    """The open producers of all Pulsar connections of this broker, by topic and producer name."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], ProducerHandler] = {}

    def find_replaced_instance(self, topic: str, name: str, place: str, epoch: int) -> str:
        """Returns the instance id of the open producer that a new producer replaces, because its client has
        reconnected: a producer with the same topic and name, from the same host (`place`), with a lower epoch. Returns
        "" if there is no such producer."""
        known = self._open.get((topic, name))
        returns = known is not None and known.network == place and known.epoch < epoch
        return known.instance if known is not None and returns else ""

    def add(self, topic: str, name: str, producer: ProducerHandler) -> None:
        self._open[topic, name] = producer

    def remove(self, topic: str, name: str, producer: ProducerHandler) -> None:
        if self._open.get((topic, name)) is producer:
            del self._open[topic, name]
