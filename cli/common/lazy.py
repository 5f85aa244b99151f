"""Groups whose commands are imported when they run: `magnetar --help` loads click and no heavy module of ours.

A group is a table: name → (module, attribute, one line of help). Aliases (the spellings of pulsar-admin) run the same
command and are not listed. Start-up time is a feature: each command imports what it needs inside its function.

`--url`, `-o`, `--timeout` and `--context` (SHARED_OPTIONS) are also accepted before a verb: a group passes them to the
command, before the command's own options, so that the later one wins. A command without these options refuses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

import click

from .profiles import complete_context_name

_CLI = __package__.rpartition(".")[0]


class LazyCommand(NamedTuple):
    """A command whose module is imported only when the command runs: the module, the attribute of the module that is
    the command, and one line of help."""

    module: str  # relative to cli: ".admin.topics"
    attribute: str
    help: str


OPERATION_ROW = LazyCommand(".admin.rows", "", "")
"""In a table: the verb that a row of proto/operations.py makes. Its line of help is read when that is shown."""

SHARED_OPTIONS = {
    "--url": "The server.", "-o": "table, wide, json, jsonl, yaml or name.", "--timeout": "Seconds.",
    "--context": "Of client.toml.",
}  # fmt: skip

OTHER_SPELLINGS = {"-o": ("--output",), "--context": ("--profile",)}


def _keep(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None:
        _given_options(ctx).extend((option.opts[0], value))


def _given_options(ctx: click.Context) -> list[str]:
    """Returns the options that were given before this group's verb."""
    found: list[str] = ctx.meta.setdefault(f"magnetar.given.{ctx.command_path}", [])
    return found


class LazyGroup(click.Group):
    """A command group that imports each command when it runs. `table`: the commands by name, in the order of the help
    page. `aliases`: maps other spellings to names of the table.

    `policies`: the commands about policies (cli/admin/policies.py). The help page lists them in a section of their own,
    with one line for set, get and remove of a policy. `with_rows`: also adds the commands that are made from rows of
    proto/operations.py. `settings`: arguments of click.Group; with a `callback`, the group itself can run too."""

    def __init__(
        self, name: str, table: Mapping[str, LazyCommand], aliases: Mapping[str, str] | None = None, *, help: str,
        policies: Mapping[str, LazyCommand] | None = None, with_rows: bool = False, **settings: Any,
    ) -> None:  # fmt: skip
        super().__init__(name, help=help, no_args_is_help="callback" not in settings, **settings)
        self.policies = policies or {}
        for flag, what in SHARED_OPTIONS.items():
            names = (flag, *OTHER_SPELLINGS.get(flag, ()))
            complete = complete_context_name if flag == "--context" else None
            self.params.append(
                click.Option(
                    names, expose_value=False, callback=_keep, hidden=bool(name != "magnetar"), help=what,
                    shell_complete=complete,
                )
            )  # fmt: skip
        self.table = {**table, **self.policies}
        self.with_rows = with_rows
        self.aliases = aliases or {}
        unknown = set(self.aliases.values()) - set(self.table)
        assert not unknown, f"aliases of commands that do not exist: {unknown}"

    def _of_rows(self) -> Mapping[str, LazyCommand]:
        if not self.with_rows:
            return {}
        found: Mapping[str, LazyCommand] = import_module(OPERATION_ROW.module, _CLI).make_operation_commands(self.name)
        return found

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list({**self.table, **self._of_rows()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = self.aliases.get(cmd_name, cmd_name)
        entry: LazyCommand | None = self.table.get(name, OPERATION_ROW)
        if entry is OPERATION_ROW:
            entry = self._of_rows().get(name)
        if entry is None:
            return None
        found = getattr(import_module(entry.module, _CLI), entry.attribute)
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and self.get_command(ctx, name) is None:
            from difflib import get_close_matches

            near = get_close_matches(name, [*self.list_commands(ctx), *self.aliases], n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; see '{ctx.command_path} --help'"
            ctx.fail(f"no command {name!r}{hint}")
        found, command, rest = super().resolve_command(ctx, args)
        return found, command, [*_given_options(ctx), *rest]

    def invoke(self, ctx: click.Context) -> Any:
        alone = not (ctx.args or ctx._protected_args)
        if alone and _given_options(ctx) and self.invoke_without_command:  # the group itself runs
            ctx.fail(f"{ctx.command_path} without a command takes no {_given_options(ctx)[0]}")
        return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            table = {**self.table, **self._of_rows()}
            formatter.write_dl([(name, entry.help) for name, entry in table.items() if name not in self.policies])
        if self.policies:
            with formatter.section("Policies: each with set-, get- (--applied: with what is inherited) and remove-"):
                sets = ((name, entry) for name, entry in self.policies.items() if name.startswith("set-"))
                formatter.write_dl([(name.removeprefix("set-"), entry.help) for name, entry in sets])
