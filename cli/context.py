"""`magnetar context …`: the profiles of client.toml (common/profiles.py), and which of them is the current one; and
`magnetar completion`.

The file is changed as text, so that comments stay. The new text is parsed before it is written: if it does not have the
intended content, the file stays, and the change is left to an editor. The new file is written whole, with mode 600, and
replaces the old one at once. A credential is the name of a file or of a variable; its content is never read or shown.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .common.exits import IN_USE, NOT_AVAILABLE, CommandFailure
from .common.lazy import LazyCommand, LazyGroup
from .common.output import OUTPUT_OPTION, CommandOutput
from .common.profiles import (
    CURRENT_KEY,
    DEFAULT_PROFILE,
    PREVIOUS_KEY,
    PROFILE_KEYS,
    complete_context_name,
    current_profile_name,
    find_profile,
    list_profile_names,
    make_missing_profile_error,
    parse_profiles,
    profiles_path,
    read_profiles,
)

context = LazyGroup(
    "context",
    {
        "list": LazyCommand(".context", "list_", "All of them, and which is the current one."),
        "show": LazyCommand(".context", "show", "One of them; secrets are files, and are not shown."),
        "add": LazyCommand(".context", "add", "Add one."),
        "use": LazyCommand(".context", "use", "Make one the current one; -: the one before."),
        "edit": LazyCommand(".context", "edit", "Open the file in your editor."),
        "delete": LazyCommand(".context", "delete", "Delete one."),
    },
    {"ls": "list", "rm": "delete", "select": "use"},
    help="Contexts: servers with your credentials. They are the profiles of client.toml.\n\n"
    "An option beats its variable of the environment, that beats the context, and that beats the default.\n\n"
    "Example: magnetar context add production --url magnetar+ssl://broker-1:7650 --use",
)
CONTEXT_NAME_PATTERN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
ADDRESS_KEYS = ("url", "metadata")
CONTEXT_COLUMNS = ("context", "current", "url", "credentials")
NAME_ARGUMENT = click.argument("name", shell_complete=complete_context_name)


def _read() -> tuple[str, dict[str, Any]]:
    """Returns the text of the file and what is in it; empty without a file."""
    if not profiles_path().exists():
        return "", {}
    return profiles_path().read_text(), read_profiles()


# ---------------------------------------------------------------------------------------------------- the file's text
def _with_current(text: str, current: str, previous: str) -> str:
    """Returns the text with other values of `current` and `previous`, which are before its first profile."""
    at = re.search(r"^[ \t]*\[", text, re.M)
    head, rest = (text[: at.start()], text[at.start() :]) if at else (text, "")
    head = re.sub(rf"^[ \t]*({CURRENT_KEY}|{PREVIOUS_KEY})[ \t]*=.*\n?", "", head, flags=re.M)
    keys = "".join(
        f"{key} = {json.dumps(name)}\n" for key, name in ((CURRENT_KEY, current), (PREVIOUS_KEY, previous)) if name
    )
    return f"{keys}\n{head.lstrip()}{rest}" if keys else head + rest


def _without(text: str, name: str) -> str:
    """Returns the text without a profile; comments right before the next one stay."""
    lines = text.splitlines(keepends=True)
    heads = [at for at, line in enumerate(lines) if line.lstrip().startswith("[")]
    start = next((at for at in heads if re.match(rf"[ \t]*\[{name}\]", lines[at])), len(lines))
    end = next((at for at in heads if at > start), len(lines))
    while start < end < len(lines) and lines[end - 1].strip()[:1] in ("", "#"):
        end -= 1
    return "".join(lines[:start] + lines[end:])


def _with(text: str, name: str, values: dict[str, str]) -> str:
    lines = "".join(f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in values.items())
    return f"{text.rstrip()}\n\n[{name}]\n{lines}".lstrip()


def _write(text: str, meant: dict[str, Any]) -> None:
    """Writes the file with mode 600. Raises CommandFailure if the text, when parsed, does not give the profiles
    `meant`."""
    try:
        found = parse_profiles(text.encode())
    except Exception:
        found = None
    if found != meant:
        raise CommandFailure(
            f"{profiles_path()} is written in a way that only an editor changes: magnetar context edit"
        )
    path = Path(os.path.realpath(profiles_path()))  # a link to it stays one
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise


# ------------------------------------------------------------------------------------------------------------- verbs
def _source(value: str) -> str:
    from ..security.settings import describe_secret_source

    return describe_secret_source(value)


def _row(found: dict[str, Any], name: str) -> dict[str, Any]:
    values = found[name] if isinstance(found[name], dict) else {}
    kinds = [what for key, what in (("token", "token"), ("tls_cert", "certificate")) if values.get(key)]
    current = name == (current_profile_name(found) or DEFAULT_PROFILE)
    return {"context": name, "current": current, "url": values.get("url"), "credentials": ", ".join(kinds) or None}


@click.command("list")
@OUTPUT_OPTION
def list_(output: str) -> None:
    """List all contexts. A command that names no context uses the current one.

    Example: magnetar context list
    """
    found = _read()[1]
    rows = [_row(found, name) for name in list_profile_names(found)]
    CommandOutput(output).print_rows(rows, CONTEXT_COLUMNS, empty="no contexts: magnetar context add NAME --url URL")


@click.command()
@click.argument("name", default="", shell_complete=complete_context_name)
@OUTPUT_OPTION
def show(name: str, output: str) -> None:
    """Show one context, or the current one if no name is given. For a credential, the file or variable that contains it
    is shown.

    Example: magnetar context show production
    """
    found = _read()[1]
    chosen = name or current_profile_name(found) or DEFAULT_PROFILE
    if chosen not in list_profile_names(found):
        raise make_missing_profile_error(found, chosen)
    values = find_profile(found, chosen)
    shown = {key: values[key] if key in ADDRESS_KEYS else _source(values[key]) for key in PROFILE_KEYS if key in values}
    CommandOutput(output).print_record({**_row(found, chosen), **shown})


def _value(key: str, given: str) -> str:
    """Returns the value of an option as it is written: paths are absolute."""
    if key == "url":
        from ..client.connect.discovery import parse_service_url

        parse_service_url(given)
    if key in ADDRESS_KEYS:
        return given
    if _source(given) != given:
        raise click.UsageError(f"--{key.replace('_', '-')} names a file or env:NAME, and is never the secret itself")
    return given if given.startswith("env:") else str(Path(given.removeprefix("file:")).expanduser().absolute())


def _with_values(function: Callable[..., None]) -> Callable[..., None]:
    for flag, metavar, text in reversed(
        (
            ("--url", "URL", "The server."),
            ("--token", "FILE|env:NAME", "Where your token is."),
            ("--tls-ca", "FILE", "Who signs its certificate."),
            ("--tls-cert", "FILE", "Your certificate."),
            ("--tls-key", "FILE", "Its private key."),
            ("--security", "FILE", "Who you are for bookies and the metadata (section [members])."),
            ("--metadata", "HOST:PORT", "The metadata, with --security."),
        )
    ):
        function = click.option(flag, default="", metavar=metavar, help=text)(function)
    return function


@click.command()
@click.argument("name")
@_with_values
@click.option("--use", "chosen", is_flag=True, help="Make it the current one.")
@OUTPUT_OPTION
def add(name: str, chosen: bool, output: str, **given: str) -> None:
    """Add a context: a server, and the files with your credentials. The credentials themselves are not stored in it.

    \b
    Examples:
      magnetar context add laptop --url magnetar://127.0.0.1:7650 --use
      magnetar context add production --url magnetar+ssl://broker-1:7650 --tls-ca ca.pem --token ada.token
    """
    if not CONTEXT_NAME_PATTERN.fullmatch(name) or name in (CURRENT_KEY, PREVIOUS_KEY):
        raise click.UsageError(f"{name[:80]!r} is no name of a context: letters, digits, _ and -, 64 at most")
    text, found = _read()
    if name in found:
        raise CommandFailure(
            f"{profiles_path()} has a context {name!r}: change it with 'magnetar context edit'", IN_USE
        )
    values = {key: _value(key, given[key]) for key in PROFILE_KEYS if given[key]}
    if not values:
        raise click.UsageError("what is the context? --url URL")
    if given["token"] and (given["tls_cert"] or given["tls_key"]):
        raise click.UsageError("--token and --tls-cert are two ways to say who you are: give one")
    text, meant = _with(text, name, values), {**found, name: values}
    if chosen:
        text, meant = _use(text, meant, name)
    _write(text, meant)
    done = f"context {name} added" + (", and is the current one" if chosen else f": magnetar context use {name}")
    CommandOutput(output).print_result_text(done, context=name, current=chosen)


def _use(text: str, found: dict[str, Any], name: str) -> tuple[str, dict[str, Any]]:
    """Returns the text and the content with `name` as the current context."""
    before = current_profile_name(found) or (DEFAULT_PROFILE if DEFAULT_PROFILE in found else "")
    previous = before if before != name else str(found.get(PREVIOUS_KEY, ""))
    others = {key: value for key, value in found.items() if key not in (CURRENT_KEY, PREVIOUS_KEY)}
    return _with_current(text, name, previous), others | {CURRENT_KEY: name} | (
        {PREVIOUS_KEY: previous} if previous else {}
    )


@click.command()
@NAME_ARGUMENT
@OUTPUT_OPTION
def use(name: str, output: str) -> None:
    """Make a context the current one, which commands use that name no context. `-` means the context that was current
    before.

    \b
    Examples:
      magnetar context use production
      magnetar context use -
    """
    text, found = _read()
    if name == "-":
        name = str(found.get(PREVIOUS_KEY, ""))
        if not name:
            raise click.UsageError("there was no context before: magnetar context list")
    if name not in list_profile_names(found):
        raise make_missing_profile_error(found, name)
    _write(*_use(text, found, name))
    url = find_profile(found, name).get("url")
    CommandOutput(output).print_result_text(
        f"commands go to {name}" + (f": {url}" if url else ""), context=name, url=url
    )
    for variable in ("MAGNETAR_CONTEXT", "MAGNETAR_PROFILE", "MAGNETAR_URL"):
        if os.environ.get(variable):
            click.echo(f"{variable} is set, and beats the current context: unset it", err=True)


@click.command()
def edit() -> None:
    """Open the file of contexts (client.toml) in your editor ($VISUAL, $EDITOR), and check the file afterwards.

    Example: magnetar context edit
    """
    path = profiles_path()
    if not path.exists():
        _write("", {})
    try:
        click.edit(filename=str(path))
    except click.ClickException as error:
        raise CommandFailure(f"{error.message}: VISUAL or EDITOR names another", NOT_AVAILABLE) from error
    path.chmod(0o600)
    found = read_profiles() if path.stat().st_size else {}
    for name in list_profile_names(found):
        find_profile(found, name)
    if (current := current_profile_name(found)) and current not in list_profile_names(found):
        raise make_missing_profile_error(found, current)


@click.command()
@NAME_ARGUMENT
@OUTPUT_OPTION
def delete(name: str, output: str) -> None:
    """Delete a context. The files with its credentials are not deleted.

    Example: magnetar context delete laptop
    """
    text, found = _read()
    if name not in list_profile_names(found):
        raise make_missing_profile_error(found, name)
    left = {key: value for key, value in found.items() if key != name}
    gone = [key for key in (CURRENT_KEY, PREVIOUS_KEY) if left.get(key) == name]
    for key in gone:
        del left[key]
    text = _with_current(_without(text, name), str(left.get(CURRENT_KEY, "")), str(left.get(PREVIOUS_KEY, "")))
    _write(text, left)
    fallback = f"; commands go to [{DEFAULT_PROFILE}]" if CURRENT_KEY in gone else ""
    CommandOutput(output).print_result_text(f"context {name} deleted{fallback}", context=name)


# -------------------------------------------------------------------------------------------------------- completion
@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell. It completes commands, options, and names that exist at the server.

    \b
    Examples:
      eval "$(magnetar completion bash)"                                         in ~/.bashrc
      eval "$(magnetar completion zsh)"                                          in ~/.zshrc, after compinit
      magnetar completion fish > ~/.config/fish/completions/magnetar.fish
    """
    from click.shell_completion import get_completion_class

    from .main import root

    kind = get_completion_class(shell)
    assert kind is not None
    try:
        click.echo(kind(root, {}, "magnetar", "_MAGNETAR_COMPLETE").source())
    except RuntimeError as error:  # a bash before 4.4
        raise CommandFailure(str(error), NOT_AVAILABLE) from error
