"""Names of what a server has: those that a shell completes, and the near one that an error names.

Both ask as the caller, so they show nothing that the caller may not list. Both wait for SOON_S at most and are silent
when they fail: a name that is not known costs neither the line that is typed nor the error that is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...client.admin import Admin
    from .session import Session

SOON_S = 0.8
"""Seconds for a list of names: with the start of the command, a person waits for a second."""
DEFAULT_NAMESPACE = "public/default"


# ---------------------------------------------------------------------------------------------------- completion
def _tenants(admin: Admin, _: str, __: Mapping[str, Any]) -> Iterable[str]:
    return admin.tenants()


def _namespaces(admin: Admin, incomplete: str, _: Mapping[str, Any]) -> Iterable[str]:
    tenant, slash, _name = incomplete.partition("/")
    return admin.namespaces(tenant) if slash else (f"{each}/" for each in admin.tenants())


def _topics(admin: Admin, incomplete: str, _: Mapping[str, Any]) -> Iterable[str]:
    """Topics in the spelling that was begun: `orders`, `acme/shop/orders`, or with the domain in front."""
    scheme, mark, rest = incomplete.rpartition("://")
    parts = rest.split("/")
    if len(parts) == 2 or (mark and len(parts) < 3):
        return (f"{scheme}{mark}{each}/" for each in _namespaces(admin, rest, {}))
    if len(parts) > 3:
        return ()
    full = admin.topics("/".join(parts[:2]) if len(parts) == 3 else DEFAULT_NAMESPACE)
    if mark:
        return full
    short = (each.partition("://")[2] for each in full if each.startswith("persistent://"))
    if len(parts) == 3:
        return short
    local = [each.rpartition("/")[2] for each in short]
    return local if any(each.startswith(incomplete) for each in local) else _namespaces(admin, incomplete, {})


def _subscriptions(admin: Admin, _: str, given: Mapping[str, Any]) -> Iterable[str]:
    return admin.subscriptions(admin.parts(given["topic"])[0])


Names = Callable[["Admin", str, Mapping[str, Any]], Iterable[str]]
NAMES_OF: Mapping[str, Names] = {
    "topic": _topics, "namespace": _namespaces, "tenant": _tenants, "subscription": _subscriptions,
}  # fmt: skip
"""Of a parameter by its name: asks for the names that may come, among others. It gets what is typed of it, and the
parameters before it."""


# ---------------------------------------------------------------------------------------------------- near names
def add_name_suggestion(session: Session, error: Exception, given: Mapping[str, Any]) -> None:
    """Adds to an error that something was not found a note with the nearest name that there is. `given`: the arguments
    of the command."""
    from .exits import find_cause

    found = find_cause(error)
    near = _NEAR.get(type(found).__name__)
    if found is None or near is None:
        return
    brief = session.brief(SOON_S)
    try:
        name, names = near(brief.admin, given)
    except Exception:  # as the caller, who may not be allowed to list
        return
    finally:
        brief.close()
    from difflib import get_close_matches

    before, mark, last = name.rpartition("/")  # what is before the last part is right: it would make all names near
    others = {each.rpartition("/")[2] for each in names} - {last}
    if nearest := get_close_matches(last, others, n=1):
        found.add_note(f"did you mean {before + mark + nearest[0]!r}?")


Near = tuple[str, Iterable[str]]
"""The name that was given, and those that there are."""


def _near_topic(admin: Admin, given: Mapping[str, Any]) -> Near:
    from ...proto.names import TopicName

    return str(given["topic"]), admin.topics(str(TopicName.parse(given["topic"]).namespace_name))


def _namespace(given: Mapping[str, Any]) -> str:
    from ...proto.names import TopicName

    found = given.get("namespace")
    return str(found) if found else str(TopicName.parse(given["topic"]).namespace_name)


def _near_namespace(admin: Admin, given: Mapping[str, Any]) -> Near:
    name = _namespace(given)
    return name, admin.namespaces(name.partition("/")[0])


def _near_tenant(admin: Admin, given: Mapping[str, Any]) -> Near:
    return str(given.get("tenant") or _namespace(given).partition("/")[0]), admin.tenants()


def _near_subscription(admin: Admin, given: Mapping[str, Any]) -> Near:
    return str(given["subscription"]), _subscriptions(admin, "", given)


_NEAR: Mapping[str, Callable[[Admin, Mapping[str, Any]], Near]] = {
    "TopicNotFound": _near_topic, "NamespaceNotFound": _near_namespace, "TenantNotFound": _near_tenant,
    "SubscriptionNotFound": _near_subscription,
}  # fmt: skip
"""By the class of an error: those of a server and those that the SDK raises have the same names."""
