"""States that differ in names alone are one: two recoverers are equal, and so are bookies when each holds every entry.

`canonical(state)` is the same for all of them (it is only a key: the search goes on with the state it found, so that
its path reads well). Bookies are equal when E = Qw = their number: then slot and bookie are renamed together.

The renamed local state of a core is found without looking into it: each was first reached by an event from another one;
the renamed one is reached by the renamed event from the renamed other one.
"""

from itertools import permutations
from typing import Any

from tests.exhaustive.actors import Cast
from tests.exhaustive.space import Space
from tests.exhaustive.values import NEW, R, State

Naming = tuple[int, ...]


class Symmetry:
    def __init__(self, space: Space) -> None:
        self._space = space
        size = space.shape.bookies
        equal = space.striping.ensemble_size == space.striping.write_quorum == size
        self._namings: tuple[Naming, ...] = tuple(permutations(range(size))) if equal else (tuple(range(size)),)
        self._same = self._namings[0]
        self._sorting: dict[tuple[int, ...], list[Naming]] = {}
        self._columns: dict[Any, int] = {}
        self._locals: dict[Any, int] = {}
        self._kinds: dict[tuple[int, bool], int] = {}
        self._kind_numbers: dict[Any, int] = {}

    def canonical(self, state: State) -> State:
        swappable = len(state[R]) == 2 and NEW not in state[R]
        best = self._least(state, False)
        return min(best, self._least(state, True)) if swappable else best

    def _least(self, state: State, swap: bool) -> State:
        """The least of its images; where kinds of columns differ, only the namings that sort them are tried."""
        kinds = tuple([self._kind(column, swap) for column in state[2]])
        namings = self._sorting.get(kinds)
        if namings is None:
            wanted = sorted(kinds)
            namings = self._sorting[kinds] = [
                naming
                for naming in self._namings
                if len(self._namings) == 1 or all(wanted[to] == kinds[at] for at, to in enumerate(naming))
            ]
        if len(namings) == 1:
            return self._image(state, namings[0], swap)
        return min([self._image(state, naming, swap) for naming in namings])

    def _image(self, state: State, naming: Naming, swap: bool) -> State:
        if naming == self._same and not swap:
            return state
        writer, recoverers, columns, *rest = state
        renamed = [0] * len(columns)
        for at, to in enumerate(naming):
            renamed[to] = self._column(columns[at], naming, swap)
        if swap:
            recoverers = recoverers[::-1]
        return (
            self._local(self._space.writers, writer, naming),
            tuple(self._local(self._space.recoveries, each, naming) for each in recoverers),
            tuple(renamed), *rest,
        )  # type: ignore[return-value]  # fmt: skip

    # ------------------------------------------------------------------------------ columns
    def _kind(self, column: int, swap: bool) -> int:
        """What a column is, whoever the bookie."""
        found = self._kinds.get((column, swap))
        if found is None:
            store, requests, answers = self._space.columns.values[column]
            values = self._space.messages.values
            asked = sorted((_client(values[n][0], swap), values[n][1], repr(values[n][4])) for n in requests)
            told = sorted(repr((values[n][0][1], values[n][0][4], values[n][1])) for n in answers)
            key = self._anonymous(store), tuple(asked), tuple(told)
            found = self._kinds[column, swap] = self._kind_numbers.setdefault(key, len(self._kind_numbers))
        return found

    def _anonymous(self, store: int) -> Any:
        core = self._space.stores.cores[store]
        waiting = tuple((request[0], request[1], repr(request[4])) for request in core.waiting)
        return tuple(core.entries.items()), tuple(sorted(core.synced)), core.fenced, core.fence_synced, waiting

    def _column(self, column: int, naming: Naming, swap: bool) -> int:
        key = column, naming, swap
        found = self._columns.get(key)
        if found is None:
            store, requests, answers = self._space.columns.values[column]
            table = self._space.messages
            renamed = tuple(sorted(table.number(_request(table.values[n], naming, swap)) for n in requests))
            told = tuple(sorted(
                table.number((_request(table.values[n][0], naming, swap), table.values[n][1])) for n in answers
            ))  # fmt: skip
            found = self._columns[key] = self._space.columns.number((self._store(store, naming, swap), renamed, told))
        return found

    def _store(self, store: int, naming: Naming, swap: bool) -> int:
        core = self._space.stores.cores[store]
        if not core.waiting:
            return store
        key = "store", store, naming, swap
        if key not in self._locals:
            renamed = self._space.stores.copy(store)
            renamed.waiting = [_request(request, naming, swap) for request in core.waiting]
            self._locals[key] = self._space.stores.number(renamed)
        return self._locals[key]

    # ------------------------------------------------------------------------------ cores
    def _local(self, cast: Cast, number: int, naming: Naming) -> int:
        if number < 0 or naming == self._same:
            return number
        key = cast is self._space.writers, number, naming
        found = self._locals.get(key)
        if found is None:
            origin = cast.origins[number]
            if origin is None:
                found = number  # as it begins, it knows no bookie from another
            else:
                before, event = origin
                found, _ = cast.step(self._local(cast, before, naming), _event(event, naming))
            self._locals[key] = found
        return found


def _client(client: str, swap: bool) -> str:
    return {"r0": "r1", "r1": "r0"}.get(client, client) if swap else client


def _request(request: Any, naming: Naming, swap: bool) -> Any:
    client, op, slot, _, what = request
    to = naming[slot]
    return _client(client, swap), op, to, f"b{to}", what


def _event(event: Any, naming: Naming) -> Any:
    if event[0] != "fact" or not hasattr(event[1], "slot"):
        return event
    fact = event[1]
    to = naming[fact.slot]
    renamed = fact._replace(slot=to, bookie=f"b{to}") if hasattr(fact, "bookie") else fact._replace(slot=to)
    return (event[0], renamed, *event[2:])

