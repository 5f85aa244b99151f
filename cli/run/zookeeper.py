"""The access to ZooKeeper: [zookeeper] of `--security FILE`, as metadata/address.py takes it."""

from __future__ import annotations

from ...metadata.address import Address, ZookeeperAccess, ZookeeperAddress
from ...proto.errors import InvalidConfiguration
from ...security.settings import ZookeeperSection, read_private_file, read_secret


def add_zookeeper_credentials(address: Address, section: ZookeeperSection) -> Address:
    """Returns the ZooKeeper address with the credentials of the settings' `section`; any other address unchanged.
    Raises InvalidConfiguration if the credentials cannot be read, are not USER:PASSWORD, or if other users may read the
    key."""
    if not isinstance(address, ZookeeperAddress):
        return address
    if section.key:
        read_private_file(section.key)
    if section.credentials:
        _credentials(section.credentials)
    access = ZookeeperAccess(
        section.ca, section.certificate, section.key,
        (lambda: _credentials(section.credentials)) if section.credentials else None,
    )  # fmt: skip
    return address._replace(access=access)


def _credentials(source: str) -> str:
    try:
        found = read_secret(source).reveal().decode().strip()
    except UnicodeDecodeError:
        found = ""
    user, _, password = found.partition(":")
    if not user or not password:
        raise InvalidConfiguration(f"{source} has no user:password for ZooKeeper")
    return found
