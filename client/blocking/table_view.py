"""The blocking table view: a dictionary that is kept up to date in the loop thread (client/consume/table_view.py).

Reading is a lookup in that dictionary. Listeners are called in a thread of their own, in the order of
the changes, so that they may wait, and may use the client.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from queue import SimpleQueue
from typing import Any

from ..consume.table_view import Listener
from ..consume.table_view import TableView as AsyncTableView
from .handle import Handle

_LOG = logging.getLogger("magnetar.client")


class TableView(Handle[AsyncTableView]):
    """A read-only dictionary of the latest value of each key of a topic, kept up to date in the client's thread.

        with client.create_table_view("prices") as view:
            print(view.get("ACME"), len(view))
            view.for_each_and_listen(lambda key, value: print(key, value))

    Keys are text, values are `bytes` or what the schema decodes. A message without a value, or with an empty one,
    deletes its key; a message without a key is ignored. `keys`, `values` and `items` are copies. Any thread may read;
    listeners run in a thread of their own, in the order of the changes, and may block. KeyError: `view[key]` without
    a value. When the table cannot be kept up to date any more, a warning is logged.
    """

    _changes: SimpleQueue[tuple[Listener, str, Any] | None] | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """The latest value of the key; `default` when it has none."""
        return self._current().get(key, default)

    def for_each(self, callback: Callable[[str, Any], object]) -> None:
        """Calls `callback(key, value)` for each present key, in the calling thread."""
        for key, value in self.items():
            callback(key, value)

    def for_each_and_listen(self, callback: Callable[[str, Any], object]) -> None:
        """As `for_each`, and then for each change, in a thread; an empty value: the key was deleted."""
        changes = self._listening()

        def told(key: str, value: Any) -> None:
            changes.put((callback, key, value))

        view = self._current()

        async def listen() -> None:
            await view.for_each_and_listen(told)

        self._thread.run(listen())

    def _listening(self) -> SimpleQueue[tuple[Listener, str, Any] | None]:
        if self._changes is None:
            changes = self._changes = SimpleQueue[tuple[Listener, str, Any] | None]()
            self._inner.inbox.at_end(lambda: changes.put(None))
            threading.Thread(target=_listen, args=(self, changes), name="magnetar-table", daemon=True).start()
        return self._changes

    def __getitem__(self, key: str) -> Any:
        return self._current()[key]

    def __len__(self) -> int:
        return len(self._current())

    def __contains__(self, key: object) -> bool:
        return key in self._current()

    def __iter__(self) -> Iterator[str]:
        return iter(self._current())

    def keys(self) -> KeysView[str]:
        """A copy."""
        return self._current().keys()

    def values(self) -> ValuesView[Any]:
        """A copy."""
        return self._current().values()

    def items(self) -> ItemsView[str, Any]:
        """A copy: later changes are not in it."""
        return self._current().items()


def _listen(_view: TableView, changes: SimpleQueue[tuple[Listener, str, Any] | None]) -> None:
    """Keeps the view alive: a view with a listener is in use."""
    while (change := changes.get()) is not None:
        listener, key, value = change
        try:
            listener(key, value)
        except (Exception, SystemExit):
            _LOG.exception("a listener of a table failed")
