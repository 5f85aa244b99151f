"""How the processes of a secured cluster know each other: [members] of `--security FILE` (docs/security.md)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ...metadata.store import MetadataStore
    from ...runtime.lifecycle import ProcessParts
    from ...runtime.network import World
    from ...security.settings import MembersSection


def make_member_world(world: World, settings: str | None, role: str) -> World:
    """Returns a world whose connections to the metadata service use the member's certificate; for the metadata service
    itself, its listener too. Returns `world` unchanged if the settings have no [members]. Raises InvalidConfiguration
    if they are wrong."""
    members = section_of(settings)
    if members is None:
        return world
    from ...security.members import member_network

    return replace(world, network=member_network(world.network, members, role, world.clock))


async def make_registered_world(
    parts: ProcessParts, world: World, settings: str | None, role: str, session: Callable[[], Awaitable[MetadataStore]]
) -> World:
    """Returns the world of a process whose key the other members know. `session()` opens a session with
    the metadata."""
    section = section_of(settings)
    if section is None:
        return world
    from ...metadata.members import Members
    from ...security.members import read_own_name

    starting = Members.start(world, session, role, read_own_name(section, role))
    members = await parts.start("members", starting, Members.close)
    return members.with_keys(world)


def section_of(settings: str | None) -> MembersSection | None:
    if settings is None:
        return None
    from ...security.settings import SecuritySettings

    return SecuritySettings.load(settings).members


def accepts_only_members(settings: str | None) -> bool:
    """Whether the listener of the metadata service or of a bookie accepts members only. Raises UsageError if
    `settings` has no [members]."""
    if settings is not None and section_of(settings) is None:
        raise click.UsageError(f"--security: {settings} has no section [members], which this process needs")
    return settings is not None
