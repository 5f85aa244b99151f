"""The module `magnetar.inbox`: lets a consumer process each message once, in a database transaction of the application
(docs/outbox.md)."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from ..common.checks import (
    NAME_CHECK,
    ParameterCheck,
    WrongType,
    check_parameter,
    make_methods_check,
    make_missing_extra,
)

if TYPE_CHECKING:
    from ..model.message import Message
    from .django import DjangoInbox
    from .tables import SQLAlchemyInbox

__all__ = ["DjangoInbox", "SQLAlchemyInbox", "message_key", "once"]

_PLACES = {"DjangoInbox": "django", "SQLAlchemyInbox": "tables"}

KEY_CHARACTERS_MAX = 255
"""Most characters of a stored key, which is a part of a unique index."""

KEPT_S = 7 * 86_400.0
"""Seconds for which a record is kept by default: longer than the time within which a message may be delivered again
(retention and TTL of its topic, and how long a subscription may be without a consumer)."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f".{_PLACES[name]}", __name__), name)
    except ModuleNotFoundError as error:
        raise make_missing_extra(error, f"magnetar.inbox.{name}") from error
    globals()[name] = value
    return value


def message_key(message: Message) -> str:
    """Returns a key of the message: its topic, producer name and sequence id as one text. A message that its producer
    sends again has the same key; a new message has another. This holds only if the producer has a fixed name, as the
    relays of an outbox have. Otherwise use a key from the message itself, such as an order number among its
    properties."""
    return f"{message.topic_name()}|{message.producer_name()}|{message.sequence_id()}"


def shorten_inbox_key(key: str) -> str:
    """Returns the form of the key that is stored: the key itself, or its SHA-256 hash as text if the key has more than
    KEY_CHARACTERS_MAX characters."""
    return key if len(key) <= KEY_CHARACTERS_MAX else f"sha256:{sha256(key.encode()).hexdigest()}"


class Inbox(Protocol):
    """The interface of an inbox that `once` uses; DjangoInbox and SQLAlchemyInbox implement it. `first_time` records a
    message as processed, and returns whether it was not recorded before."""

    def open_transaction(
        self, begin: Callable[[], AbstractContextManager[Any]] | None
    ) -> AbstractContextManager[tuple[Any, ...]]:
        """Begins a database transaction, which commits at the end of the `with` block and is rolled back if the block
        raises. Yields a tuple of arguments, which `once` passes to `first_time` as the first ones and to the handler
        after the message: the session of SQLAlchemy, or nothing. `begin`: the parameter of `once`. Raises
        InvalidConfiguration if this inbox needs `begin` and it is None, or does not take it."""
        ...

    first_time: Callable[..., bool]


BEGIN_CHECK = ParameterCheck("a function that begins a transaction, or None", (object,), callable, True)


def once(
    inbox: Inbox, subscription: str | None = None, *, begin: Callable[[], AbstractContextManager[Any]] | None = None,
    key: Callable[[Message], str] = message_key,
) -> Callable[[Callable[..., Any]], Callable[[Message], Any]]:  # fmt: skip
    """Makes a handler do its work once for each message, in one database transaction with the record of it.

        @once(SQLAlchemyInbox(metadata), begin=sessionmaker(engine).begin)
        def bill(message, session):
            session.execute(…)

        @once(DjangoInbox())
        def bill(message):
            Invoice.objects.create(…)

        consumer.listen(bill)        # or: bill(consumer.receive())

    `begin` (SQLAlchemy only): a function that returns a context manager of a Session or Connection in a transaction.
    `subscription` None: the subscription that received the message. `key`: a function that names a message
    (`message_key` needs producers with fixed names). If a message was processed before, the handler is not called, and
    the result is None: the message must be acknowledged as after the first time. If the handler raises, its work and
    the record are rolled back, and the exception is raised. Raises InvalidConfiguration for a wrong argument, and for a
    coroutine function as handler. The handler that is returned also raises the errors of the database.
    """
    check_parameter("inbox", make_methods_check("open_transaction", "first_time"), inbox)
    check_parameter("subscription", NAME_CHECK._replace(optional=True), subscription)
    check_parameter("begin", BEGIN_CHECK, begin)

    def decorate(function: Callable[..., Any]) -> Callable[[Message], Any]:
        if inspect.iscoroutinefunction(function):
            raise WrongType("a handler with an inbox is a plain function: asyncio's listeners call it in a thread")

        @wraps(function)
        def handle(message: Message) -> Any:
            name = subscription if subscription is not None else message.entry.consumer.subscription
            with inbox.open_transaction(begin) as given:
                if not inbox.first_time(*given, name, key(message)):
                    return None
                return function(message, *given)

        return handle

    return decorate
