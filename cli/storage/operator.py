"""The identity of an operator's command in a secured cluster: a member with the role `operator`, for as long as it
runs.

Bookies take administrators' requests from brokers and operators alone. The command shows its certificate to the
metadata service, writes a key of its own there, and reads the bookie's; both end with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..common.session import Session, connected
from ..run.servers import METADATA_HELP, connect, metadata_address

if TYPE_CHECKING:
    from ...metadata.members import Members
    from ...metadata.store import MetadataStore
    from ...runtime.world import World

ROLE = "operator"
SESSION_S = 10.0

SECURITY = click.option(
    "--security", envvar="MAGNETAR_SECURITY", type=click.Path(dir_okay=False), default=None, metavar="FILE",
    help="Of a cluster whose bookies take members alone: who you are (section [members]).",
)  # fmt: skip
METADATA = click.option(
    "--metadata", "metadata_", envvar="MAGNETAR_METADATA", default="127.0.0.1:7640", show_default=True,
    help=f"With --security. {METADATA_HELP}",
)  # fmt: skip


class Operator(NamedTuple):
    """An operator: `--security` and `--metadata` of a command. Without `security` it has no key, and its requests are
    in clear."""

    security: str | None = None
    metadata: str = ""
    timeout_s: float = SESSION_S

    async def join(self) -> tuple[World, Members | None]:
        """The world whose peers take this command for an operator; the members are the caller's to close."""
        from ...metadata.members import Members
        from ...runtime.process import real_world
        from ...security.members import own_name
        from ..run.members import as_member, section_of

        world = real_world()
        section = section_of(self.security)
        if section is None:
            return world, None
        world = as_member(world, self.security, ROLE)
        address = metadata_address(self.metadata, self.security)

        async def session() -> MetadataStore:
            return await connect(world, address, self.timeout_s, SESSION_S)

        members = await Members.start(world, session, ROLE, own_name(section, ROLE))
        return members.world(world), members


def operating(function: Callable[..., None]) -> Callable[..., None]:
    """Does what `connected` does, for a command that speaks to bookies: adds --security and --metadata besides."""

    @wraps(function)
    def command(session: Session, *args: Any, **options: Any) -> None:
        session.operator = Operator(options.pop("security"), options.pop("metadata_"), session.timeout_s)
        function(session, *args, **options)

    return connected(SECURITY(METADATA(command)))
