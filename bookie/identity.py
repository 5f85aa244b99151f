"""Whose data directory this is: lock, cookie, and what to do when they and the metadata disagree (BookKeeper §2.7).

| cookie in the directory | cookie in the metadata | store in the directory | then |
|---|---|---|---|
| no  | none for this place | no  | a new bookie with a new uuid |
| no  | one for this place  | –   | refuse: the directory lost its data |
| no  | –                   | yes | refuse: files without an owner |
| yes | the same            | –   | start |
| yes | no                  | no  | a first start that was cut short: finish it |
| yes | no                  | yes | refuse: another cluster, or the metadata was lost |
| yes | another             | –   | refuse |

A host that lost its data comes back under a new uuid (invariant 25); nothing here ever overwrites a cookie. One process
per directory: the lock is held until the process ends.
"""

from __future__ import annotations

import logging
import uuid as uuids
from dataclasses import dataclass

from ..metadata import paths, records
from ..metadata.store import ABSENT, MetadataStore
from ..proto.errors import BadVersion, Busy, InvalidConfiguration
from ..runtime.files import File, Files, join
from ..runtime.world import World
from .format import cookie as cookie_format
from .format.cookie import Cookie
from .store import boot, checkpoint, disk

log = logging.getLogger(__name__)

COOKIE = "cookie"
LOCK = "lock"


@dataclass(frozen=True, slots=True)
class Identity:
    uuid: bytes
    instance: str
    lock: File

    @property
    def text(self) -> str:
        return str(uuids.UUID(bytes=self.uuid))


def lock_directory(files: Files, directory: str) -> File:
    files.make_directories(directory)
    try:
        return files.lock(join(directory, LOCK))
    except BlockingIOError as error:
        raise Busy(
            f"the data directory {directory} is used by another process; stop that process or give another directory",
            directory=directory,
        ) from error


async def claim(world: World, metadata: MetadataStore, directory: str, place: str) -> Identity:
    """Locks the directory and decides by the table above. `place` (host:directory) is unique in the cluster."""
    lock = lock_directory(world.files, directory)
    try:
        instance = await cluster_instance(world, metadata)
        cookie = _read_cookie(world.files, directory)
        if cookie is None:
            cookie = await _new_cookie(world, metadata, directory, place, instance)
        await _agree(world.files, metadata, directory, cookie, instance)
        return Identity(uuids.UUID(cookie.bookie).bytes, instance, lock)
    except BaseException:
        lock.close()
        raise


async def cluster_instance(world: World, metadata: MetadataStore) -> str:
    """The cluster's instance id; made when this is the first process of a new cluster."""
    found = await metadata.get(paths.CLUSTER)
    if found is None:
        record = records.ClusterRecord(instance=world.rng.randbytes(16).hex())
        try:
            await metadata.put(paths.CLUSTER, records.encode(record), ABSENT)
            return record.instance
        except BadVersion:
            found = await metadata.get(paths.CLUSTER)
            assert found is not None, "the cluster record was there a moment ago and is never deleted"
    return records.decode(found.value, records.ClusterRecord, paths.CLUSTER).instance


def _read_cookie(files: Files, directory: str) -> Cookie | None:
    path = join(directory, COOKIE)
    return cookie_format.decode(disk.read_file(files, path), path) if files.exists(path) else None


def _holds_store(files: Files, directory: str) -> bool:
    names = (checkpoint.MARK, boot.JOURNAL, boot.ENTRIES, boot.LEDGERS)
    return any(files.exists(join(directory, name)) for name in names)


async def _new_cookie(world: World, metadata: MetadataStore, directory: str, place: str, instance: str) -> Cookie:
    """A new bookie, unless directory or metadata say that there was one. The directory's cookie comes first."""
    if _holds_store(world.files, directory):
        raise InvalidConfiguration(
            f"{directory} holds a bookie's files but no cookie: a file was lost, or something else wrote it. "
            "Give an empty directory to start a new bookie"
        )
    for known in await metadata.children(paths.COOKIES):
        found = await metadata.get(paths.cookie(known))
        if found is None:
            continue
        if place in records.decode(found.value, records.CookieRecord, paths.cookie(known)).directories:
            raise InvalidConfiguration(
                f"the metadata knows bookie {known} at {place}, but {directory} is empty: its data is lost. "
                f"If that is so, delete {paths.cookie(known)} from the metadata and start again as a new bookie"
            )
    uuid = uuids.UUID(bytes=world.rng.randbytes(16), version=4)
    cookie = Cookie(str(uuid), instance, (place,))
    disk.replace(world.files, directory, COOKIE, cookie_format.encode(cookie))
    log.info("new bookie %s in %s", cookie.bookie, directory)
    return cookie


async def _agree(files: Files, metadata: MetadataStore, directory: str, cookie: Cookie, instance: str) -> None:
    """The metadata's cookie says the same as the directory's; it is written when nothing was ever stored."""
    if cookie.instance != instance:
        raise InvalidConfiguration(
            f"{directory} belongs to a bookie of cluster {cookie.instance}; the metadata is of cluster {instance}"
        )
    path = paths.cookie(cookie.bookie)
    expected = records.CookieRecord(bookie=cookie.bookie, instance=instance, directories=cookie.directories)
    found = await metadata.get(path)
    if found is None and files.exists(join(directory, checkpoint.MARK)):
        raise InvalidConfiguration(
            f"{directory} belongs to bookie {cookie.bookie}, which the metadata does not know: "
            "it is the wrong metadata, or it lost data; nothing was changed"
        )
    if found is None:
        await metadata.put(path, records.encode(expected), ABSENT)
        return
    known = records.decode(found.value, records.CookieRecord, path)
    if known != expected:
        raise InvalidConfiguration(f"{directory} and the metadata disagree about bookie {cookie.bookie}: {known}")
