"""`magnetar namespaces|topics …-properties`: what users noted of a namespace or a topic, KEY=VALUE."""

from __future__ import annotations

import click
from click import option

from ..common import units
from ..common.lazy import LazyCommand
from ..common.session import Session, session_command

OF_NAMESPACES = {
    "get-properties": LazyCommand(".admin.properties", "of_namespace", "What was noted of it."),
    "set-properties": LazyCommand(".admin.properties", "set_of_namespace", "Note properties; others stay."),
    "remove-property": LazyCommand(".admin.properties", "remove_of_namespace", "A property is gone."),
    "clear-properties": LazyCommand(".admin.properties", "clear_of_namespace", "All are gone."),
}
OF_TOPICS = {
    "get-properties": LazyCommand(".admin.properties", "of_topic", "What was noted of it."),
    "update-properties": LazyCommand(".admin.properties", "set_of_topic", "Note properties; others stay."),
    "remove-properties": LazyCommand(".admin.properties", "remove_of_topic", "A property is gone."),
}
PROPERTIES = option("-p", "--property", "--properties", "pairs", multiple=True, help="KEY=VALUE, several too.")
KEYS = option("-k", "--key", "keys", multiple=True, required=True, metavar="KEY", help="Several too.")


def _show(session: Session, place: str, found: dict[str, str]) -> None:
    rows = [{"property": key, "value": value} for key, value in sorted(found.items())]
    session.out.print_rows(rows, ("property", "value"), empty=f"{place} has no properties")


def _given(pairs: tuple[str, ...]) -> dict[str, str]:
    if not pairs:
        raise click.UsageError("which property? -p KEY=VALUE")
    return units.parse_properties(pairs)


def _noted(session: Session, place: str, given: dict[str, str]) -> None:
    session.out.print_done(f"{place} has {', '.join(f'{key}={value}' for key, value in given.items())}", place=place)


def _gone(session: Session, place: str, keys: tuple[str, ...]) -> None:
    session.out.print_done(f"{place} has no property {', '.join(keys)}", place=place)


@session_command(name="get-properties")
def of_namespace(session: Session, namespace: str) -> None:
    """What was noted of a namespace. Its topics do not inherit it.

    Example: magnetar namespaces get-properties acme/orders
    """
    _show(session, namespace, session.admin.namespace_properties(namespace))


@session_command(PROPERTIES, name="set-properties")
def set_of_namespace(session: Session, namespace: str, pairs: tuple[str, ...]) -> None:
    """Note properties of a namespace; others stay.

    Example: magnetar namespaces set-properties acme/orders -p owner=ada -p tier=1
    """
    given = _given(pairs)
    session.admin.set_namespace_properties(namespace, given)
    _noted(session, namespace, given)


@session_command(KEYS, name="remove-property")
def remove_of_namespace(session: Session, namespace: str, keys: tuple[str, ...]) -> None:
    """Remove properties of a namespace. A missing one does nothing.

    Example: magnetar namespaces remove-property acme/orders -k owner
    """
    session.admin.remove_namespace_properties(namespace, *keys)
    _gone(session, namespace, keys)


@session_command(name="clear-properties")
def clear_of_namespace(session: Session, namespace: str) -> None:
    """Remove all properties of a namespace.

    Example: magnetar namespaces clear-properties acme/orders
    """
    session.admin.remove_namespace_properties(namespace)
    session.out.print_done(f"{namespace} has no properties", place=namespace)


@session_command(name="get-properties")
def of_topic(session: Session, topic: str) -> None:
    """What was noted of a topic; a partition has the properties of its topic.

    Example: magnetar topics get-properties orders
    """
    _show(session, topic, session.admin.topic_properties(topic))


@session_command(PROPERTIES, name="update-properties")
def set_of_topic(session: Session, topic: str, pairs: tuple[str, ...]) -> None:
    """Note properties of a topic; others stay.

    Example: magnetar topics update-properties orders -p owner=ada
    """
    given = _given(pairs)
    session.admin.set_topic_properties(topic, given)
    _noted(session, topic, given)


@session_command(KEYS, name="remove-properties")
def remove_of_topic(session: Session, topic: str, keys: tuple[str, ...]) -> None:
    """Remove properties of a topic. A missing one does nothing.

    Example: magnetar topics remove-properties orders -k owner
    """
    session.admin.remove_topic_properties(topic, *keys)
    _gone(session, topic, keys)
