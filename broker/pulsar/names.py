"""The producers of all connections of Pulsar's protocol here, by topic and name, to tell one that returns from another.

Pulsar's clients count the openings of a producer (`epoch`) and have no other identity than its name: the same name from
the same host with a higher epoch is the producer that was cut off, and replaces it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .producer import ProducerHandler


class ProducerNames:
    """The names of producers on Pulsar's protocol."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], ProducerHandler] = {}

    def instance(self, topic: str, name: str, place: str, epoch: int) -> str:
        """Returns the instance of the producer that was cut off, if this is it; empty: it is another one."""
        known = self._open.get((topic, name))
        returns = known is not None and known.place == place and known.epoch < epoch
        return known.instance if known is not None and returns else ""

    def add(self, topic: str, name: str, producer: ProducerHandler) -> None:
        self._open[topic, name] = producer

    def remove(self, topic: str, name: str, producer: ProducerHandler) -> None:
        if self._open.get((topic, name)) is producer:
            del self._open[topic, name]
