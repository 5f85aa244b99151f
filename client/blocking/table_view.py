"""The blocking table view: a dictionary that is kept up to date in the loop thread (client/consume/table_view.py).

A read is a lookup in that dictionary. Listeners run in a thread of their own, in the order of the changes, so that they
may wait, and may use the client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

from ..common.checks import FUNCTION_CHECK, check_parameter
from ..common.loggers import log_foreign_error
from ..consume.table_view import TableListener
from .faces import TableViewFacade


class TableView(TableViewFacade):
    """A read-only dictionary of the latest value of each key of a topic, kept up to date in the client's thread.

        with client.create_table_view("prices") as view:
            print(view.get("ACME"), len(view))
            view.for_each_and_listen(lambda key, value: print(key, value))

    Keys are text; values are `bytes`, or what the schema decodes. A message without a value, or with an empty one,
    deletes its key; a message without a key is ignored. `keys`, `values` and `items` return copies. `view[key]` raises
    KeyError if the key has no value. Any thread may read.

    Listeners run in a thread of their own, in the order of the changes, and may block. If the table cannot be kept up
    to date any more, a warning is logged."""

    _changes: SimpleQueue[tuple[TableListener, str, Any] | None] | None = None

    def for_each(self, callback: Callable[[str, Any], object]) -> None:
        """Calls `callback(key, value)` for each key that the table has now, in the calling thread. Raises what the
        callback raises, and InvalidConfiguration if `callback` is not callable."""
        check_parameter("callback", FUNCTION_CHECK, callback)
        for key, value in self.items():
            callback(key, value)

    def for_each_and_listen(self, callback: Callable[[str, Any], object]) -> None:
        """Calls `callback(key, value)` for each key that the table has now, in the calling thread, and then for each
        change, in a thread of its own. An empty value means that the key was deleted. An exception of the callback is
        logged. Raises InvalidConfiguration if `callback` is not callable, Interrupted in the loop thread, CtrlC after
        Ctrl-C."""
        check_parameter("callback", FUNCTION_CHECK, callback)
        listener = _LateListener(callback, self._listening())
        view = self._current()

        async def listen() -> list[tuple[str, Any]]:
            present = listener.present
            await view.for_each_and_listen(listener.on_change)
            listener.present = None
            return present or []

        for key, value in self._thread.run(listen()):
            _call(callback, key, value)
        listener.deliver_waiting_changes()

    def _listening(self) -> SimpleQueue[tuple[TableListener, str, Any] | None]:
        if self._changes is None:
            changes = self._changes = SimpleQueue[tuple[TableListener, str, Any] | None]()
            self._inner.inbox.call_when_queue_ends(lambda: changes.put(None))
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


class _LateListener:
    """Passes changes to a callback only after the calling thread has passed it the keys that were present."""

    def __init__(self, callback: TableListener, changes: SimpleQueue[tuple[TableListener, str, Any] | None]) -> None:
        self.present: list[tuple[str, Any]] | None = []  # None: they are known, what comes is a change
        self._callback = callback
        self._changes = changes
        self._waiting: list[tuple[str, Any]] | None = []  # changes; None: they go on at once
        self._lock = threading.Lock()

    def on_change(self, key: str, value: Any) -> None:
        """Passes a change on, in the loop thread."""
        if self.present is not None:
            self.present.append((key, value))
            return
        with self._lock:
            if self._waiting is not None:
                self._waiting.append((key, value))
            else:
                self._changes.put((self._callback, key, value))

    def deliver_waiting_changes(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting or [], None
            for key, value in waiting:
                self._changes.put((self._callback, key, value))


def _listen(_view: TableView, changes: SimpleQueue[tuple[TableListener, str, Any] | None]) -> None:
    """Keeps the view alive: a view with a listener is in use."""
    while (change := changes.get()) is not None:
        _call(*change)


def _call(listener: TableListener, key: str, value: Any) -> None:
    try:
        listener(key, value)
    except BaseException as error:
        log_foreign_error(error, "a listener of a table")
