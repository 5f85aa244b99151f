"""A broker that says nothing: who owns its topics now is asked of the others.

    silence = Silence(…)                            one of a client
    silence.others(endpoint)                        whom to ask; empty: nothing to find out
    moved = await silence.moved(endpoint, topics)   which of them another broker owns
    silence.answered(endpoint)                      it said something

A broker that is stopped (SIGSTOP, a machine that hangs, a network that drops) breaks no connection. When its metadata
session ends, another broker may own its topics. So a stream with owners (`broker_stream.py`) that got nothing for
SILENT_S pings its broker. A ping without an answer for UNANSWERED_S makes the broker silent: another one is asked, and
again after each further UNANSWERED_S. An owner leaves when another broker owns its topic, and for no other reason: a
broker that is slow, or whose session lasts, keeps them until HTTP/2 gives the connection up.
The others are those of the service URL and those that the client has connected to. A client that knows one broker
neither pings nor asks. While a broker is silent, questions that any broker answers go to the others first.
One broker may have two addresses, that of the service URL and the one that brokers tell: `named` makes them one.
Guards: tests/client/connect/test_silence.py, tests/broker/test_stopped_owner.py.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence

from ...proto.errors import MagnetarError, TimedOut
from ...proto.names import TopicName
from ...runtime.network import Endpoint
from ...runtime.tasks import together

SILENT_S = 2.5
"""Seconds without a frame until the broker is pinged: so often at most does an idle client cost its broker a ping."""
UNANSWERED_S = 1.25
"""Seconds of a ping; of a question to another broker; and between two rounds of questions."""
SILENT_KEPT_S = 10.0
"""Seconds that a broker counts as silent after the last ping without an answer, when nothing asks it any more."""
ASKED_AT_ONCE = 32
"""Topics. When none of so many moved, the session of their owner lasts: the others wait for the next round."""


class Silence:
    """Notes which brokers are silent, and asks the others for the owners of their topics."""

    def __init__(
        self, now: Callable[[], float], known: Callable[[], Iterable[Endpoint]],
        owner: Callable[[Endpoint, TopicName], Awaitable[Endpoint]],
    ) -> None:  # fmt: skip
        """Begins with no broker silent. `known`: the brokers' endpoints. `owner`: asks one of them who owns a topic,
        for UNANSWERED_S at most."""
        self._now = now
        self._known = known
        self._owner = owner
        self._until: dict[Endpoint, float] = {}  # of those that are silent
        self._names: dict[Endpoint, Endpoint] = {}  # of the service URL → as brokers tell it

    def named(self, endpoint: Endpoint, name: Endpoint) -> None:
        if endpoint != name:
            self._names[endpoint] = name

    def _name(self, endpoint: Endpoint) -> Endpoint:
        return self._names.get(endpoint, endpoint)

    def is_silent(self, endpoint: Endpoint) -> bool:
        return bool(self._until) and self._until.get(self._name(endpoint), 0.0) > self._now()

    def answered(self, endpoint: Endpoint) -> None:
        self._until.pop(self._name(endpoint), None)

    def unanswered(self, endpoint: Endpoint) -> None:
        self._until[self._name(endpoint)] = self._now() + SILENT_KEPT_S

    def others(self, endpoint: Endpoint) -> list[Endpoint]:
        """Returns one address of each other broker; those that are not silent come first."""
        me = self._name(endpoint)
        found = {self._name(each): each for each in self._known() if self._name(each) != me}
        return sorted(found.values(), key=self.is_silent)

    async def moved(self, endpoint: Endpoint, topics: Sequence[TopicName]) -> set[TopicName]:
        """Returns the topics that have another owner than the broker at `endpoint`, as far as others say."""
        self.unanswered(endpoint)
        moved: set[TopicName] = set()
        for asked in self.others(endpoint):
            for at in range(0, len(topics), ASKED_AT_ONCE):
                part = topics[at : at + ASKED_AT_ONCE]
                answers = await self._ask(asked, part)
                moved |= {topic for topic, owner in answers.items() if self._name(owner) != self._name(endpoint)}
                if not moved.intersection(part):
                    break
            else:
                return moved
            if answers:
                return moved
        return moved

    async def _ask(self, asked: Endpoint, topics: Sequence[TopicName]) -> dict[TopicName, Endpoint]:
        """Returns the owners that a broker names. A topic whose owner is not known now, or that it does not tell, is
        not among them."""
        answers: dict[TopicName, Endpoint] = {}

        async def ask(topic: TopicName) -> None:
            try:
                answers[topic] = await self._owner(asked, topic)
            except TimedOut:
                self.unanswered(asked)
            except MagnetarError:
                return  # the next one is asked, or in the next round

        await together(map(ask, topics), f"owners by {asked}")
        return answers
