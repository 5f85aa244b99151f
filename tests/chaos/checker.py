"""Judges a history: what producers were promised against what the topic holds.

- Every acknowledged message is there, with its value, at the id of its acknowledgement.
- Per producer, messages first appear in the order in which they were sent. A message may appear again (it was sent
  again under the same sequence id, because nobody could say whether it was stored) and only after that.
- Nothing is there that nobody sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class Stored(NamedTuple):
    """A message as it was read: `text` is what `value` made of it."""

    message_id: str
    text: str


def value(producer: str, number: int) -> str:
    """The payload of a producer's message, with filling that depends on both, so that mixed-up bytes are seen."""
    return f"{producer}:{number}:" + f"{hash_of(producer, number):08x}" * 8


def hash_of(producer: str, number: int) -> int:
    found = number * 2654435761 & 0xFFFFFFFF
    for character in producer:
        found = (found ^ ord(character)) * 16777619 & 0xFFFFFFFF
    return found


@dataclass
class History:
    """What one producer did: `sent` is how many, `acked` maps a message's number to the id in its acknowledgement."""

    producer: str
    sent: int = 0
    acked: dict[int, str] = field(default_factory=dict)


def violations(histories: Mapping[str, History], topic: Iterable[Stored], most: int = 10) -> list[str]:
    """Sentences about what is wrong, at most so many; empty: the topic keeps its promises."""
    wrong: list[str] = []
    places: dict[str, dict[int, set[str]]] = {name: {} for name in histories}
    newest: dict[str, int] = dict.fromkeys(histories, -1)
    for stored in topic:
        producer, number = _parse(stored.text)
        history = histories.get(producer)
        if history is None or not 0 <= number < history.sent or stored.text != value(producer, number):
            wrong.append(f"{stored.message_id} holds what nobody sent: {stored.text[:60]!r}")
            continue
        if number not in places[producer] and number < newest[producer]:
            wrong.append(f"{producer}: message {number} first appears after {newest[producer]}, at {stored.message_id}")
        newest[producer] = max(newest[producer], number)
        places[producer].setdefault(number, set()).add(stored.message_id)
    for producer, history in histories.items():
        wrong += _promises(history, places[producer])
    return wrong[:most]


def _promises(history: History, places: Mapping[int, set[str]]) -> Iterable[str]:
    for number, message_id in history.acked.items():
        if number not in places:
            yield f"{history.producer}: message {number} was acknowledged as {message_id} and is lost"
        elif message_id not in places[number]:
            yield f"{history.producer}: message {number} was acknowledged as {message_id} and is at {places[number]}"


def _parse(text: str) -> tuple[str, int]:
    producer, _, rest = text.partition(":")
    number = rest.partition(":")[0]
    return producer, int(number) if number.isdigit() else -1
