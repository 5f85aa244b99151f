"""Contexts: what a person would otherwise type at each command, in `~/.config/magnetar/client.toml`. A context is a
profile of that file: one thing, which programs name by `profile`, and `magnetar context` manages (cli/context.py).

    current = "production"          # of commands that name none; written by `context use`. Programs take [default]

    [default]
    url = "magnetar+ssl://broker-1:7650"
    token = "orders.token"          # a file, relative to this one, or env:NAME; never the token itself
    tls_ca = "ca.pem"

    [production]                    # of --context production, or MAGNETAR_CONTEXT
    tls_cert = "ada.pem"
    tls_key = "ada-key.pem"
    security = "operator/security.toml"     # for the commands that ask bookies or the metadata
    metadata = "metadata-1:7640"

An option of the command beats its environment variable, and both beat the profile. A context that is named by an option
also beats the environment variables of its values, so that the command goes to no other server than the named one. The
folder is `XDG_CONFIG_HOME`, where that is set. The file has mode 600, as files of secrets do: whatever can write to it
can have tokens sent to another server.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ...proto.errors import InvalidConfiguration

DEFAULT_PROFILE = "default"
PROGRAM_KEYS = ("url", "token", "tls_ca", "tls_cert", "tls_key")
PROFILE_KEYS = (*PROGRAM_KEYS, "security", "metadata")
"""Keys of a profile. `security` and `metadata` are those of commands that ask bookies or the metadata."""
_FILES = ("token", "tls_ca", "tls_cert", "tls_key", "security")
CURRENT_KEY, PREVIOUS_KEY = "current", "previous"
"""Keys of the file that are no profile: the name that `context use` gave, and the one before it."""


def profiles_path() -> Path:
    """Returns the path of the file `client.toml`, below $XDG_CONFIG_HOME or ~/.config."""
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(folder) if folder else Path.home() / ".config") / "magnetar" / "client.toml"


def load_profile(name: str) -> Mapping[str, str]:
    """Returns those values of the profile `name` that programs need (PROGRAM_KEYS), from the file of profiles. An empty
    `name` means the default profile; without a file it has no values. Raises InvalidConfiguration if the profile is
    missing or the file is invalid."""
    found = {} if not name and not profiles_path().exists() else find_profile(read_profiles(), name)
    return {key: found[key] for key in found if key in PROGRAM_KEYS}


def load_context(name: str) -> tuple[str, Mapping[str, str]]:
    """Returns the name and the values of the context `name`. An empty `name` means the current context, or the default
    one if none is current; without a file, returns an empty name and no values. Raises InvalidConfiguration if the
    context is missing or the file is invalid."""
    if not name and not profiles_path().exists():
        return "", {}
    found = read_profiles()
    chosen = name or current_profile_name(found)
    return chosen or (DEFAULT_PROFILE if DEFAULT_PROFILE in found else ""), find_profile(found, chosen)


def current_profile_name(found: Mapping[str, Any]) -> str:
    """Returns the name of the current profile, which `magnetar context use` has stored in the file; "" if there is
    none. `found`: the content of the file."""
    named = found.get(CURRENT_KEY, "")
    return named if isinstance(named, str) else ""


def read_profiles() -> dict[str, Any]:
    """Reads and parses the file of profiles. Raises InvalidConfiguration if the file is missing or invalid, or if other
    users may read it."""
    from ...security.settings import read_private_file

    return parse_profiles(read_private_file(str(profiles_path())))


def parse_profiles(data: bytes) -> dict[str, Any]:
    """Parses the content of the file of profiles, and returns it by section name. Raises InvalidConfiguration if it is
    not TOML in UTF-8."""
    import tomllib

    from ...proto.errors import InvalidConfiguration

    try:
        return tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:  # TOML's and UTF-8's errors are ValueErrors
        raise InvalidConfiguration(f"{profiles_path()} is not TOML: {error}") from error


def list_profile_names(found: Mapping[str, Any]) -> list[str]:
    """Returns the names of all profiles, in the order of the file. `found`: the content of the file."""
    return [name for name in found if name not in (CURRENT_KEY, PREVIOUS_KEY)]


def complete_context_name(_: click.Context, __: click.Parameter, incomplete: str) -> list[str]:
    """Returns the names of contexts that begin with `incomplete`, for the completion of a shell; none if the file
    cannot be read."""
    try:
        return [name for name in list_profile_names(read_profiles()) if name.startswith(incomplete)]
    except Exception:
        return []


def make_missing_profile_error(found: Mapping[str, Any], name: str) -> InvalidConfiguration:
    """Returns the error for a profile `name` that the file does not have. Its text suggests the profile with the most
    similar name."""
    from difflib import get_close_matches

    from ...proto.errors import InvalidConfiguration

    names = list_profile_names(found)
    near = get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return InvalidConfiguration(
        f"{profiles_path()} has no profile [{name}]; it has {', '.join(names) or 'none'}{hint}"
    )


def find_profile(found: Mapping[str, Any], name: str) -> Mapping[str, str]:
    """Returns the values of the profile `name` from `found`, the parsed file; an empty `name` means the default
    profile, which may be missing. Paths of files are relative to the folder of the file, and are returned joined with
    it. Raises InvalidConfiguration if the profile is missing or invalid."""
    from ...proto.errors import InvalidConfiguration

    file = profiles_path()
    values = None if name in (CURRENT_KEY, PREVIOUS_KEY) else found.get(name or DEFAULT_PROFILE, None if name else {})
    if values is None:
        raise make_missing_profile_error(found, name)
    unknown = (
        [key for key in values if key not in PROFILE_KEYS] if isinstance(values, dict) else [name or DEFAULT_PROFILE]
    )
    if unknown:
        raise InvalidConfiguration(f"{file}: {unknown[0]!r} is not of a profile, which has {', '.join(PROFILE_KEYS)}")
    if not all(isinstance(each, str) for each in values.values()):
        raise InvalidConfiguration(f"{file}: the values of [{name or DEFAULT_PROFILE}] are texts")
    return {key: _placed(file.parent, each) if key in _FILES else each for key, each in values.items()}


def _placed(folder: Path, source: str) -> str:
    """Returns the path of a file that a profile names, relative to the folder of the profiles; `env:NAME` stays."""
    if not source or source.startswith("env:"):
        return source
    return str(folder / Path(source.removeprefix("file:")).expanduser())
