"""Admin: the methods of AdminClient for programs without asyncio, blocking.

Admin has each public method of AdminClient, with its parameters and its docstring. Type checkers and editors read
blocking.pyi, which `python -m tests.stubs` writes; guard: tests/client/admin/test_stubs.py."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any

from ..blocking.loop_thread import shared_loop_thread
from ..common.closing import ClosedAfterWith
from .client import AdminClient


class Admin(ClosedAfterWith):
    """Administration of a cluster, blocking: each method has the parameters, the return value and the errors of
    AdminClient's method.

        with magnetar.admin.Admin("magnetar://localhost:7650") as admin:
            admin.create_topic("flights", partitions=4)

    The event loop thread of the process does the work, and a method waits for its outcome. The methods may be called
    from any thread but that one, where they raise Interrupted; after Ctrl-C they raise CtrlC. Close the object after
    use, or use a `with` statement."""

    def __init__(
        self, service_url: str, *, timeout_s: float = 30.0, authentication: object = None,
        tls_trust_certs_file_path: str = "",
    ) -> None:  # fmt: skip
        self._inner = AdminClient(
            service_url, timeout_s=timeout_s, authentication=authentication,
            tls_trust_certs_file_path=tls_trust_certs_file_path,
        )  # fmt: skip

    def close(self) -> None:
        """Closes the connections of this object, and waits until they are closed. A method that is called later
        connects again."""
        shared_loop_thread().run(self._inner.close())


def _blocking(method: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Any]:
    """Makes the blocking method with the same parameters."""

    @functools.wraps(method)
    def call(self: Admin, /, *arguments: Any, **options: Any) -> Any:
        return shared_loop_thread().run(method(self._inner, *arguments, **options))

    return call


for _name, _method in inspect.getmembers(AdminClient, inspect.iscoroutinefunction):
    if not _name.startswith("_") and _name != "close":
        setattr(Admin, _name, _blocking(_method))
