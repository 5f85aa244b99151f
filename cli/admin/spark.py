"""`magnetar spark …`: Spark's streaming queries that hold data, by the subscriptions that they have of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from click import option

from ..common.exits import NOT_FOUND, Failure
from ..common.lazy import Lazy, LazyGroup
from ..common.session import Session, verb

if TYPE_CHECKING:
    from ...proto.statistics import SubscriptionStats

COLUMNS = ("query", "topic", "lag", "bytes")
NAME = re.compile(r"spark-query-([0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})")
"""Matches the name of a query's own subscription, with the query's id (spark_connector/source.py)."""
NAMESPACE = option("-n", "--namespace", default="public/default", show_default=True, help="Of the topics.")

spark = LazyGroup(
    "spark",
    {
        "queries": Lazy(".admin.spark", "queries", "The queries that hold data, and how far each lags."),
        "forget": Lazy(".admin.spark", "forget", "Delete what a query that is no more holds."),
    },
    help="Streaming queries of Spark.\n\nExample: magnetar spark queries",
)


@verb(NAMESPACE)
def queries(session: Session, namespace: str) -> None:
    """The queries that hold data, with what each has not committed, by topic and partition. A query has the id that is
    in the file `metadata` of its checkpoint, and shown by Spark.

    Example: magnetar spark queries
    """
    rows = [
        {"query": query, "topic": part, "lag": each.backlog, "bytes": each.backlog_bytes}
        for part, query, each in _found(session, namespace)
    ]
    session.out.rows(sorted(rows, key=lambda row: (str(row["query"]), str(row["topic"]))), COLUMNS, empty="no queries")


@verb(NAMESPACE)
def forget(session: Session, query: str, namespace: str) -> None:
    """Delete the subscriptions of a query that does not run any more, by its id. If it runs again, it goes on from its
    checkpoint; what was deleted meanwhile is lost to it.

    Example: magnetar spark forget 6e1d5c1c-0d0e-4a3b-9a51-2f1c5a4f8f0e
    """
    parts = [(part, each.name) for part, id_, each in _found(session, namespace) if id_ == query]
    if not parts:
        raise Failure(f"no query {query} holds data of {namespace}: magnetar spark queries lists them", NOT_FOUND)
    for part, name in parts:
        session.admin.delete_subscription(part, name)
    text = f"query {query} holds nothing any more: {len(parts)} subscriptions are deleted"
    session.out.done(text, query=query, subscriptions=len(parts))


def _found(session: Session, namespace: str) -> Iterator[tuple[str, str, SubscriptionStats]]:
    for topic in session.admin.topics(namespace):
        if topic.startswith("non-persistent:"):
            continue
        for part in session.admin.parts(topic):
            for each in session.admin.topic_stats(part).subscriptions:
                if (name := NAME.fullmatch(each.name)) is not None:
                    yield part, name[1], each


