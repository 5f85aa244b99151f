"""The parts of the tree that a member of a secured cluster may write, by its role; each may read all of it.

A role writes its own keys only (`/members/<role>`), so none can make a key of another role; and such a key ends with
the session that wrote it, so none stays after its process. A bookie writes what repair
and its registration need, and no topic, owner, policy or grant; a broker writes no bookie's registration.
"""

from __future__ import annotations

from .. import paths

_ROLES = ("broker", "bookie", "operator")
_OF_BOOKIES = (
    paths.BOOKIES_ROOT, paths.LEDGERS, paths.DAMAGED, paths.UNDER_REPLICATED, "/repair", paths.LEDGER_IDS,
    paths.CLUSTER,
)  # fmt: skip
_NOT_OF_BROKERS = (paths.COOKIES, paths.BOOKIES)


def may_write(role: str, path: str, *, lasting: bool = True) -> bool:
    """Whether a role ("broker", "bookie", "operator"; another one writes nothing) may write the path. `lasting`: the
    node outlives its session."""
    if _is_in(path, paths.MEMBERS):
        return role in _ROLES and path.startswith(paths.member(role, "")) and not lasting
    match role:
        case "operator":
            return True
        case "broker":
            return not any(_is_in(path, each) for each in _NOT_OF_BROKERS)
        case "bookie":
            return any(_is_in(path, each) for each in _OF_BOOKIES)
    return False


def _is_in(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + "/")
