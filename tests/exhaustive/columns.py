"""One bookie with what is on its way to it and from it: its moves, found once and looked up ever after."""

from collections.abc import Iterator
from typing import Any

from tests.exhaustive.actors import Bookie, Cast, play_bookie
from tests.exhaustive.values import NOBODY, WRITER, Column, Move, Shape, Table, Told, added, put


class Columns(Table):
    """The columns of a space; `stores` are the bookies' local states, `messages` all requests and answers."""

    def __init__(self, shape: Shape, messages: Table, *, spares: bool) -> None:
        super().__init__()
        self.stores = Cast(play_bookie)
        self.empty = self.number((self.stores.number(Bookie()), (), ()))
        self._shape = shape
        self._messages = messages
        self._spares = spares
        self._at_once = shape.fault != "crash"
        self._moves: dict[int, list[Move]] = {}
        self._sent: dict[tuple[int, int], int] = {}
        self._tidy: dict[Any, int] = {}

    def moves_of(self, number: int) -> list[Move]:
        found = self._moves.get(number)
        if found is None:
            found = self._moves[number] = list(self._moves_new(self.values[number]))
        return found

    def _moves_new(self, column: Column) -> Iterator[Move]:
        store, requests, answers = column
        for place, number in enumerate(requests):
            if not place or requests[place - 1] != number:
                rest = requests[:place] + requests[place + 1 :]
                yield from self._asked(store, rest, answers, number)
        for place, number in enumerate(answers):
            if not place or answers[place - 1] != number:
                rest = answers[:place] + answers[place + 1 :]
                request, answer = self._messages.values[number]
                after = self.number((store, requests, rest))
                yield f"w hears {answer} of {request[1:4]}", after, ((request, answer),), 0
                if self._shape.fault == "late":
                    yield f"!! w gives up, and never hears {answer} of {request[1:4]}", after, ((request, None),), 1
        if not self._at_once and self.stores.cores[store].waiting:
            yield from self._synced(store, requests, answers, ("sync",), 0)
        if self._shape.fault == "crash":
            yield from self._synced(store, requests, answers, ("crash",), 1)

    def _asked(self, store: int, rest: tuple[int, ...], answers: tuple[int, ...], number: int) -> Iterator[Move]:
        request = self._messages.values[number]
        client, op = request[:2]
        after, outputs = self.stores.step(store, ("ask", request, self._at_once))
        words = f"{request[3]} takes {op} {getattr(request[4], 'entry', request[4])} of {client or 'somebody gone'}"
        yield from self._heard(words, after, rest, answers, outputs, 0)
        if client != NOBODY and outputs and after != store and (client != WRITER or not self._spares):
            yield f"{words}, unheard", self.number((after, rest, answers)), (), 0
        if client != NOBODY and self._shape.fault == "late":
            gone = self._messages.number((NOBODY, *request[1:]))
            late = self.number((store, added(rest, gone), answers))
            yield f"!! {client} gives up {op} at {request[3]}", late, ((request, None),), 1
            if after != store:
                done = self.number((after, rest, answers))
                yield f"!! {words}, and {client} gives up", done, ((request, None),), 1

    def _synced(
        self, store: int, requests: tuple[int, ...], answers: tuple[int, ...], event: Any, cost: int
    ) -> Iterator[Move]:
        after, outputs = self.stores.step(store, event)
        words = f"{'!! ' if cost else ''}a bookie {event[0]}es" if cost else "a bookie syncs"
        yield from self._heard(words, after, requests, answers, outputs, cost)

    def _heard(self, words: str, store: int, requests: tuple[int, ...], answers: tuple[int, ...], outputs: Any,
               cost: int) -> Iterator[Move]:  # fmt: skip
        """Recoverers hear at once; so does a writer without spares; else its answers travel."""
        told: list[Told] = []
        for request, answer in outputs:
            if request[0] == WRITER and self._spares and answer is not None:
                answers = added(answers, self._messages.number((request, answer)))
            elif request[0] != NOBODY:
                told.append((request, answer))
        yield words, self.number((store, requests, answers)), tuple(told), cost

    def send(self, columns: tuple[int, ...], request: Any) -> tuple[int, ...]:
        at = int(request[3][1:])
        key = columns[at], self._messages.number(request)
        found = self._sent.get(key)
        if found is None:
            store, requests, answers = self.values[columns[at]]
            found = self._sent[key] = self.number((store, added(requests, key[1]), answers))
        return put(columns, at, found)

    def forget(self, columns: tuple[int, ...], client: str) -> tuple[int, ...]:
        """It wants nothing any more: its requests may still arrive, and nobody listens."""
        return tuple(self.number(self._without(self.values[column], client)) for column in columns)

    def _without(self, column: Column, client: str) -> Column:
        store, requests, answers = column
        kept: tuple[int, ...] = ()
        for number in requests:
            request = self._messages.values[number]
            if request[0] == client:
                if request[1] in ("look", "read") or self._is_vain(store, request):
                    continue
                number = self._messages.number((NOBODY, *request[1:]))
            kept = added(kept, number)
        return store, kept, () if client == WRITER else answers

    def _is_vain(self, store: int, request: Any) -> bool:
        fenced = self.stores.cores[store].fence_synced
        return bool(fenced) and request[1] in ("add", "fence")

    def tidied(self, column: int, phases: Any, left: int) -> int:
        key = column, phases, left
        found = self._tidy.get(key)
        if found is None:
            store, requests, answers = self.values[column]
            core = self.stores.cores[store]
            values = self._messages.values
            kept = tuple(number for number in requests if self._matters(core, values[number], phases, left))
            found = self._tidy[key] = self.number((store, kept, answers))
        return found

    def _matters(self, store: Bookie, request: Any, phases: Any, left: int) -> bool:
        client, op, _, _, what = request
        if client == WRITER:
            return True
        fencing, votes, lac = phases[int(client[1])] if client != NOBODY else (False, (), 1 << 62)
        if op == "fence":
            return fencing or not store.fence_synced
        if op in ("read", "look"):
            return what in votes or (op == "read" and not store.fence_synced)
        if op == "add":
            return not store.fence_synced and what.entry not in store.synced
        return bool(what.entry > lac or left or what.entry not in store.synced)

    def only_writer(self, number: int) -> int:
        """Without what recoverers sent."""
        store, requests, answers = self.values[number]
        kept = tuple(each for each in requests if self._messages.values[each][0] == WRITER)
        return self.number((store, kept, answers))
