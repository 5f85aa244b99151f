"""The incarnation of a topic: which of the topics that had a name is meant. It is when the topic was made, ms since the
epoch. 0: unknown."""

from __future__ import annotations

from ...proto.errors import TopicNotFound
from ...proto.names import TopicName


def is_another(there: int, meant: int) -> bool:
    """Whether it is known to be another topic of the name than the one that is meant."""
    return bool(meant and there and meant != there)


def check_incarnation(topic: TopicName, there: int, meant: int) -> None:
    """Raises TopicNotFound if the caller means a topic that was deleted, and the one that is `there` has its name.
    `meant` 0: it means the present one, whichever that is."""
    if is_another(there, meant):
        raise TopicNotFound(
            f"the topic {topic} that is meant was deleted and made anew since (at {there} ms, not {meant})", topic=topic
        )
