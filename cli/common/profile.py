"""Profiles: what a person would otherwise type at each command, in `~/.config/magnetar/client.toml`.

    [default]
    url = "magnetar+ssl://broker-1:7650"
    token = "orders.token"          # a file, relative to this one, or env:NAME; never the token itself
    tls_ca = "ca.pem"

    [production]                    # of --profile production, or MAGNETAR_PROFILE
    tls_cert = "ada.pem"
    tls_key = "ada-key.pem"

An option of the command beats its environment variable, and both beat the profile. The folder is `XDG_CONFIG_HOME`,
where that is set. The file has mode 600, as files of secrets do: who writes to it sends tokens where it likes.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path

DEFAULT = "default"
NAMES = ("url", "token", "tls_ca", "tls_cert", "tls_key")
_FILES = NAMES[1:]


def path() -> Path:
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(folder) if folder else Path.home() / ".config") / "magnetar" / "client.toml"


def load(name: str) -> Mapping[str, str]:
    """The values of a profile; `name` empty: of the default one, if there is a file. InvalidConfiguration."""
    from ...proto.errors import InvalidConfiguration
    from ...security.secrets import read_private

    file = path()
    if not name and not file.exists():
        return {}
    try:
        found = tomllib.loads(read_private(str(file)).decode())
    except (ValueError, RecursionError) as error:  # TOML's and UTF-8's errors are ValueErrors
        raise InvalidConfiguration(f"{file} is not TOML: {error}") from error
    values = found.get(name or DEFAULT, None if name else {})
    if values is None:
        raise InvalidConfiguration(f"{file} has no profile [{name}]; it has {', '.join(found) or 'none'}")
    unknown = [key for key in values if key not in NAMES] if isinstance(values, dict) else [name or DEFAULT]
    if unknown:
        raise InvalidConfiguration(f"{file}: {unknown[0]!r} is not of a profile, which has {', '.join(NAMES)}")
    if not all(isinstance(each, str) for each in values.values()):
        raise InvalidConfiguration(f"{file}: the values of [{name or DEFAULT}] are texts")
    return {key: _placed(file.parent, each) if key in _FILES else each for key, each in values.items()}


def _placed(folder: Path, source: str) -> str:
    """A file that is named relative to the profiles'."""
    if not source or source.startswith("env:"):
        return source
    return str(folder / Path(source.removeprefix("file:")).expanduser())
