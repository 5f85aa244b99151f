"""Configuration: one frozen struct per process, filled from four sources; a later source overrides an earlier one.

    defaults  ←  [section] of a TOML file  ←  MAGNETAR_<SECTION>__<NAME> in the environment  ←  keyword overrides

In the environment two underscores stand for a level: MAGNETAR_BOOKIE__STORE__MEMTABLE_BYTES is `memtable_bytes` of
[bookie.store]. After the section one is enough (MAGNETAR_BROKER_ROLL_MINUTES). A program first calls
`set_variables_from_files`: then each variable may be given as the content of a file (MAGNETAR_BROKER_NAME_FILE=PATH).

Every setting has a name with its unit, a type, a default, and a comment, which says its effect or limit, and its cost.
The comment is the text after the field in the source (`#` on its line, or a string literal below it). `list_settings`
lists them for the table in docs. Types: int, float, bool, str, `Literal`, `X | None`, `tuple[X, ...]` (comma-separated
in the environment), `Endpoint`; bounds with `Annotated[int, msgspec.Meta(ge=1)]`. A method `validate(self)` may check
relations and raises InvalidConfiguration or ValueError. A static method `fill_values(values)` may return the values
that were given together with those that follow from them.

A mistake raises InvalidConfiguration, in most cases with the fields `setting`, `source` and `allowed`. Mistakes are an
unknown key, section or MAGNETAR_<SECTION>_… variable, a value of the wrong type or out of bounds, and a file that is
not TOML.

Also in this file, each below its heading: the division of a process's memory among its parts (memory_shares); the
memory of this machine or container (machine); the settings that every process has (settings).
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
import types
import typing
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from ..proto.errors import InvalidConfiguration
from ..proto.names import parse_number
from .network import Endpoint

Config = TypeVar("Config", bound=msgspec.Struct)

REQUIRED_VALUE = object()
"""The default of a setting that has none."""

CONFIG_SECTIONS = ("bookie", "broker", "process")
"""Sections of a file; each process reads its own, and [process]."""


_SOURCES: dict[str, dict[str, str]] = {}
"""By section the settings that the last `load_config` of this process found, with their sources."""


class Setting(NamedTuple):
    """One setting in the generated table of settings: its name, type, default and comment, all as text. `default` is
    "required" if there is none. `doc` is the comment."""

    name: str
    type: str
    default: str
    doc: str


def load_config(
    kind: type[Config],
    section: str,
    *,
    file: str | None = None,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Config:
    """Returns the configuration of the class `kind` (a frozen struct) for `section`. Its values come from `file` (a
    path), the environment (None: that of the process) and `overrides`; overrides of None are ignored. `defaults`
    replace the defaults of `kind`. Raises InvalidConfiguration if the file cannot be read or is not TOML, if a setting
    is unknown, if its value is invalid, or if settings contradict each other. Keeps the source of each value for
    `find_source`."""
    values: dict[str, object] = dict(defaults or {})
    sources = _SOURCES[section] = dict.fromkeys(values, "default")
    if file is not None:
        found = _from_file(file, section)
        _add_settings(kind, values, f"[{section}] in {file}", found)
        sources |= dict.fromkeys(found, "file")
    _add_variables(kind, values, section, environment)
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    _add_settings(kind, values, "option", given)
    sources |= {name.partition(".")[0]: "environment" for name in _variables(section, environment)}
    sources |= dict.fromkeys(given, "option")
    try:
        fill = getattr(kind, "fill_values", None)
        config = kind(**(values if fill is None else fill(values)))
        validate = getattr(config, "validate", None)
        if validate is not None:
            validate()
    except (ValueError, AssertionError, TypeError) as error:
        raise InvalidConfiguration(f"the {section} configuration contradicts itself: {error}") from error
    return config


def find_source(section: str, name: str, *, is_default: bool) -> str:
    """Returns the source of a setting's value: "environment", "file", "default" or "option". "option" means that the
    program gave the value, or computed it as a share of `memory_bytes`. Only settings that `load_config` has read have
    a source. `is_default`: whether the setting has its default value; it decides between "default" and "option" for
    other settings."""
    return _SOURCES.get(section, {}).get(name) or ("default" if is_default else "option")


def find_explicit_settings(
    kind: type[msgspec.Struct],
    section: str,
    *,
    file: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> frozenset[str]:
    """Returns the names of the settings that the file and the environment set, whatever their values are. A setting of
    a table inside the section has a name like `store.memtable_bytes`. `load_config` must have accepted the same sources
    before. Raises InvalidConfiguration if the file has changed since, and cannot be read."""
    found: set[str] = set()
    for name, value in ({} if file is None else _from_file(file, section)).items():
        found |= {f"{name}.{each}" for each in value} if isinstance(value, dict) else {name}
    return frozenset(found | _variables(section, environment).keys())


def get_setting_value(config: msgspec.Struct, name: str) -> object:
    """Returns the value of one setting of `config`. `name` has the form of the names that `find_explicit_settings`
    returns, such as `store.memtable_bytes`. Raises AttributeError if there is no such setting."""
    head, _, rest = name.partition(".")
    value = getattr(config, head)
    return get_setting_value(value, rest) if rest else value


def replace_settings(config: Config, values: Mapping[str, object]) -> Config:
    """Returns a copy of `config` with other values for some settings. `values`: the new values, by names like those
    that `find_explicit_settings` returns. Raises AttributeError or TypeError if there is no such setting, and the
    errors of the checks of the configuration class (ValueError, AssertionError)."""
    direct = {name: value for name, value in values.items() if "." not in name}
    tables = dict.fromkeys(name.partition(".")[0] for name in values if "." in name)
    for table in tables:
        inside = {name[len(table) + 1 :]: value for name, value in values.items() if name.startswith(table + ".")}
        direct[table] = replace_settings(getattr(config, table), inside)
    return msgspec.structs.replace(config, **direct)


def list_settings(kind: type) -> list[Setting]:
    """Returns all settings of a configuration class, in the order of the source code."""
    docs = _comments(kind)
    return [
        Setting(
            name, _type_text(_type_of(kind, name)), "required" if default is REQUIRED_VALUE else repr(default),
            docs.get(name, ""),
        )
        for name, default in list_setting_defaults(kind).items()
    ]  # fmt: skip


def list_setting_defaults(kind: type) -> dict[str, object]:
    """Returns the defaults of all settings, by name; REQUIRED_VALUE for a setting without a default. `kind` is a struct
    or, in the SDK, a dataclass."""
    if issubclass(kind, msgspec.Struct):
        fields: Sequence[Any] = msgspec.structs.fields(kind)
    else:
        assert dataclasses.is_dataclass(kind), f"{kind.__name__} is no configuration"
        fields = dataclasses.fields(kind)
    missing = (msgspec.NODEFAULT, dataclasses.MISSING)
    found: dict[str, object] = {}
    for field in fields:
        made = REQUIRED_VALUE if field.default_factory in missing else field.default_factory()
        found[field.name] = made if field.default in missing else field.default
    return found


def _from_file(file: str, section: str) -> Mapping[str, object]:
    import tomllib

    try:
        with open(file, "rb") as stream:
            content = tomllib.load(stream)
    except OSError as error:
        raise InvalidConfiguration(f"cannot read the configuration file {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f"{file} is not TOML: {error}") from error
    for name, value in content.items():
        if name not in CONFIG_SECTIONS or not isinstance(value, dict):
            allowed = ", ".join(f"[{each}]" for each in CONFIG_SECTIONS)
            raise InvalidConfiguration(
                f"{file}: {name!r} is no section{_suggest(name, CONFIG_SECTIONS)}; allowed: {allowed}",
                setting=name,
                source=file,
                allowed=allowed,
            )
    found: Mapping[str, object] = content.get(section, {})
    return found


def _add_settings(
    kind: type[msgspec.Struct], values: dict[str, object], source: str, given: Mapping[str, object]
) -> None:
    """Converts and adds the settings of one source."""
    _check_names(kind, source, given)
    for name, value in given.items():
        values[name] = _convert(name, value, _type_of(kind, name), source)


def _check_names(
    kind: type[msgspec.Struct], source: str, given: Mapping[str, object], table: str = ""
) -> None:
    """Raises InvalidConfiguration if `kind`, or a table inside it, has no setting of a name that is given. `table`: the
    name of the table that `kind` is, with a dot."""
    names = kind.__struct_fields__
    for name, value in given.items():
        if name not in names:
            called = f"{table}{name}"
            raise InvalidConfiguration(
                f"{source}: there is no setting {called!r}{_suggest(name, names)}; there are: {', '.join(names)}",
                setting=called,
                source=source,
                allowed=", ".join(names),
            )
        inside = _table_of(kind, name) if isinstance(value, Mapping) else None
        if inside is not None and isinstance(value, Mapping):
            _check_names(inside, source, value, f"{table}{name}.")


def _variables(section: str, environment: Mapping[str, str] | None) -> dict[str, tuple[str, str]]:
    """Returns by setting the environment variable that sets it, and its text; the names are like those of
    `find_explicit_settings`. Raises InvalidConfiguration if two variables set one setting."""
    prefix = f"MAGNETAR_{section.upper()}_"
    found: dict[str, tuple[str, str]] = {}
    for variable, text in sorted((os.environ if environment is None else environment).items()):
        if not variable.startswith(prefix):
            continue
        name = variable[len(prefix) :].removeprefix("_").lower().replace("__", ".")
        if name in found:
            raise InvalidConfiguration(
                f"{found[name][0]} and {variable} are the same setting: give one", setting=name, source=variable
            )
        found[name] = variable, text
    return found


def _add_variables(
    kind: type[msgspec.Struct], values: dict[str, object], section: str, environment: Mapping[str, str] | None
) -> None:
    """Converts and adds the settings of the environment. Those inside a table replace single settings of the table,
    all of one table at once: its own checks see the result."""
    tables: dict[str, dict[str, object]] = {}
    for name, (variable, text) in _variables(section, environment).items():
        source, (table, _, rest) = f"environment variable {variable}", name.partition(".")
        if not rest:
            if table in kind.__struct_fields__ and _table_of(kind, table) is not None:
                raise InvalidConfiguration(
                    f"{source}: {table} is a table; its settings are {variable}__…", setting=table, source=source
                )
            _add_settings(kind, values, source, {table: text})
            continue
        inside = tables.setdefault(table, {})
        inside[rest] = _convert_inside(kind, name, text, source)
    for table, given in tables.items():
        before = values.get(table, list_setting_defaults(kind)[table])
        assert isinstance(before, msgspec.Struct), "its settings were found"
        try:
            values[table] = replace_settings(before, given)
        except (ValueError, AssertionError, TypeError) as error:
            raise InvalidConfiguration(
                f"the {section}.{table} configuration contradicts itself: {error}", setting=table
            ) from error


def _table_of(kind: type, name: str) -> type[msgspec.Struct] | None:
    """Returns the struct of the setting `name`, if it is a table."""
    found = _type_of(kind, name)
    return found if isinstance(found, type) and issubclass(found, msgspec.Struct) else None


def _convert_inside(kind: type[msgspec.Struct], name: str, text: str, source: str) -> object:
    """Converts the value of a setting inside a table. Raises InvalidConfiguration if there is no such setting."""
    *tables, last = name.split(".")
    inside = kind
    for table in tables:
        found = _table_of(inside, table) if table in inside.__struct_fields__ else None
        if found is None:
            known = [each for each in inside.__struct_fields__ if _table_of(inside, each) is not None]
            raise InvalidConfiguration(
                f"{source}: there is no table {table!r}{_suggest(table, known)}; there are: {known}",
                setting=name, source=source, allowed=", ".join(known),
            )  # fmt: skip
        inside = found
    one: dict[str, object] = {}
    _add_settings(inside, one, source, {last: text})
    return one[last]


CONFIG_FILE_BYTES_MAX = 64 << 10
PATH_VARIABLES = ("MAGNETAR_TOKEN", "MAGNETAR_SECURITY", "MAGNETAR_TLS_CA", "MAGNETAR_TLS_CERT", "MAGNETAR_TLS_KEY")
"""Variables whose value is the path of a file already: with `_FILE` they are the same."""


def set_variables_from_files(environment: MutableMapping[str, str]) -> None:
    """For each environment variable MAGNETAR_…_FILE, reads the file that it names, and sets the variable without _FILE
    to the content of the file (UTF-8, without the line end at its end); then deletes the variable with _FILE. A
    variable of PATH_VARIABLES is set to the path itself. So a container can use mounted files without a shell. Raises
    InvalidConfiguration if both variables are set, or if a file cannot be read, is not UTF-8, or has more than
    CONFIG_FILE_BYTES_MAX bytes."""
    for variable in [each for each in environment if each.startswith("MAGNETAR_") and each.endswith("_FILE")]:
        name, path = variable.removesuffix("_FILE"), environment[variable]
        if name in environment:
            raise InvalidConfiguration(f"{name} and {variable} are both given: give one", setting=name, source=variable)
        environment[name] = path if name in PATH_VARIABLES else _content(variable, path)
        del environment[variable]


def _content(variable: str, path: str) -> str:
    try:
        with open(path, "rb") as stream:
            content = stream.read(CONFIG_FILE_BYTES_MAX + 1)
        if len(content) > CONFIG_FILE_BYTES_MAX or b"\0" in content:
            raise ValueError(f"it has more than {CONFIG_FILE_BYTES_MAX} bytes, or a byte 0")
        text = content.decode()
    except OSError as error:
        raise InvalidConfiguration(
            f"{variable}: {path} cannot be read: {error.strerror}", setting=variable, source=path
        ) from error
    except ValueError as error:  # not UTF-8, too
        raise InvalidConfiguration(f"{variable}: {path} is no text: {error}", setting=variable, source=path) from error
    return text.removesuffix("\n").removesuffix("\r")


def _type_of(kind: type, name: str) -> Any:
    """Returns the type of one setting. Only that one is evaluated: the annotations of all settings would take
    milliseconds.
    """
    owner = next(each for each in kind.__mro__ if name in inspect.get_annotations(each))
    alone = types.SimpleNamespace(__annotations__={name: inspect.get_annotations(owner)[name]})
    return typing.get_type_hints(alone, vars(sys.modules[owner.__module__]), include_extras=True)[name]


def _convert(name: str, value: object, kind: Any, source: str) -> object:
    if isinstance(value, str) and _is_tuple(kind):
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        if isinstance(value, str) and (kind is Endpoint or Endpoint in typing.get_args(kind)):
            return Endpoint.parse(value)
        return msgspec.convert(value, kind, strict=not isinstance(value, str | list))
    except (msgspec.ValidationError, ValueError) as error:
        allowed = _type_text(kind)
        raise InvalidConfiguration(
            f"{source}: setting {name!r} cannot be {value!r} ({error}); allowed: {allowed}",
            setting=name,
            source=source,
            allowed=allowed,
        ) from error


def _is_tuple(kind: Any) -> bool:
    return typing.get_origin(kind) is tuple


def _type_text(kind: Any) -> str:
    """Returns the type in words, with its bounds."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is typing.Annotated:
        bounds = [text for meta in arguments[1:] if (text := _bounds_text(meta))]
        return " ".join([_type_text(arguments[0]), *bounds])
    if origin is typing.Literal:
        return " | ".join(map(repr, arguments))
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}"
    if arguments:
        return " | ".join(_type_text(each) for each in arguments)
    if kind is type(None):
        return "none"
    return "HOST:PORT" if kind is Endpoint else str(getattr(kind, "__name__", kind))


def _bounds_text(meta: Any) -> str:
    signs = (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
    bounds = [f"{sign} {getattr(meta, name)}" for name, sign in signs if getattr(meta, name, None) is not None]
    return " and ".join(bounds)


def _suggest(name: str, names: typing.Sequence[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, names, 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _comments(kind: type) -> dict[str, str]:
    """Returns for each field, by name, the comment on its line or the string literal below it; inherited fields too."""
    import ast
    import io
    import textwrap
    import tokenize

    inherited = [_comments(base) for base in kind.__bases__ if base not in (msgspec.Struct, object)]
    source = textwrap.dedent(inspect.getsource(kind))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    body = typing.cast(ast.ClassDef, ast.parse(source).body[0]).body
    found: dict[str, str] = {}
    last = ""
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
            found[last] = " ".join(
                comments[line] for line in range(node.lineno, (node.end_lineno or node.lineno) + 1) if line in comments
            )
        elif last and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[last] = found[last] or " ".join(str(node.value.value).split())
            last = ""
    return {name: text for each in (*inherited, found) for name, text in each.items()}


# -------------------------------------------------------------------------------------------------------- memory_shares
# Divides the memory of a process (`memory_bytes`) among the parts that use memory. Pure.
#
#     found = plan_memory(budget, shares, given)
#     settings = found.apply_to_config(settings, "broker")    sets the settings that the operator has not set
#
# A `MemoryShare` is all the memory that one setting limits: with 64 MiB of `memtable_bytes` it may be three times that.
# Each share first gets its minimum. The rest is divided by weight, and no share gets more than its maximum. So a larger
# budget makes no share smaller. A setting that the operator has set keeps its value, and the other shares get the rest.
#
# Raises InvalidConfiguration if the budget is less than the sum of the minimums, or than the sum of the given values
# and the other minimums. Guards: tests/runtime/test_shares.py.


MIB = 1 << 20
NO_LIMIT = 1 << 50
"""The most of a share that may take whatever is there."""


class MemoryShare(NamedTuple):
    """The part of a process's memory that one setting limits. `least` and `most`: the smallest and largest value of the
    setting. `unit_bytes`: the bytes of memory for each unit of the value. `weight`: of this part, when memory is
    divided among the parts."""

    name: str  # in metrics and documents
    setting: str  # with its section, as in a file: bookie.store.memtable_bytes
    unit_bytes: int  # of memory, for each of the setting's value
    weight: int
    least: int  # values of the setting
    most: int
    what: str  # takes this memory

    def multiply_share(self, count: int) -> MemoryShare:
        """Returns this share multiplied by `count`, for a process with `count` parts that all have this setting."""
        return self._replace(unit_bytes=self.unit_bytes * count, weight=self.weight * count)


class MemoryPlan(NamedTuple):
    """How the memory of a process (`budget` bytes) is divided among its shares: the value of each setting."""

    budget: int
    shares: Sequence[MemoryShare]
    values: Mapping[str, int]  # setting → its value

    @property
    def limits(self) -> dict[str, int]:
        """Returns how many bytes of memory each share gets, by the name of the share."""
        return {each.name: self.values[each.setting] * each.unit_bytes for each in self.shares}

    def apply_to_config(self, config: Config, section: str) -> Config:
        """Returns a copy of `config`, the configuration of `section`, with the values that the plan has for settings of
        this section. Raises the errors of `replace_settings`."""
        own = {name.partition(".")[2]: value for name, value in self.values.items() if name.startswith(section + ".")}
        return replace_settings(config, own)


def compute_minimum_bytes(shares: Sequence[MemoryShare], given: Mapping[str, int]) -> int:
    """Returns the smallest number of bytes with which the process can run. `given`: the values of the settings that the
    operator has set, by name."""
    return sum(given.get(each.setting, each.least) * each.unit_bytes for each in shares)


def plan_memory(budget: int, shares: Sequence[MemoryShare], given: Mapping[str, int]) -> MemoryPlan:
    """Divides `budget` bytes among the shares, and returns the plan. `given`: the values of the settings that the
    operator has set, by name; they stay. Raises InvalidConfiguration if the budget is too small for the shares."""
    needed = compute_minimum_bytes(shares, given)
    if needed > budget:
        raise _too_small(budget, needed, shares, given)
    values = {each.setting: given.get(each.setting, each.least) for each in shares}
    left, open_ = budget - needed, [each for each in shares if each.setting not in given]
    while open_:
        weights = sum(each.weight for each in open_)
        full = [each for each in open_ if each.least * each.unit_bytes + left * each.weight // weights >= _most(each)]
        if not full:
            for each in open_:
                values[each.setting] = each.least + left * each.weight // weights // each.unit_bytes
            break
        for each in full:
            values[each.setting] = each.most
            left -= _most(each) - each.least * each.unit_bytes
            open_.remove(each)
    found = MemoryPlan(budget, shares, values)
    assert sum(found.limits.values()) <= budget, "more is shared out than there is"
    return found


def _most(share: MemoryShare) -> int:
    return share.most * share.unit_bytes


def _too_small(
    budget: int, needed: int, shares: Sequence[MemoryShare], given: Mapping[str, int]
) -> InvalidConfiguration:
    least = compute_minimum_bytes(shares, {})
    if not given:
        text = f"memory_bytes is {_mib(budget)}; this process needs {_mib(needed)} at least"
    else:
        taken = ", ".join(
            f"{each.setting} = {given[each.setting]} ({_mib(given[each.setting] * each.unit_bytes)})"
            for each in sorted(shares, key=lambda each: -given.get(each.setting, 0) * each.unit_bytes)
            if each.setting in given
        )
        text = (
            f"memory_bytes is {_mib(budget)}; with {taken} this process needs {_mib(needed)}: set memory_bytes to "
            f"that, or smaller values, or leave them out (then {_mib(least)} suffice)"
        )
    return InvalidConfiguration(text, setting="process.memory_bytes", allowed=f"≥ {needed}")


def _mib(size: int) -> str:
    return f"{-(-size // MIB):,} MiB"


# ------------------------------------------------------------------------------------------------------- machine
# The memory of this machine, or of the container that this process runs in.


CGROUPS_FOLDER = Path("/sys/fs/cgroup")


def measure_machine_memory(root: Path = CGROUPS_FOLDER, own: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the bytes of memory that this process could use. That is the memory of the machine, or the smallest limit
    of the process's control groups (versions 1 and 2) and their parents, whichever is less. `root` and `own`: where the
    system describes the control groups."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(found for each in _limits(root, own) if (found := _read(each)) is not None)])


def _limits(root: Path, own: Path) -> Sequence[Path]:
    found = [root / "memory.max", root / "memory/memory.limit_in_bytes"]
    for line in _text(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        base, name = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
        if controllers and "memory" not in controllers.split(","):
            continue
        group = base / path.lstrip("/")
        found += [each / name for each in (group, *group.parents) if each.is_relative_to(base)]
    return found


def _read(path: Path) -> int | None:
    """Returns the memory limit in bytes, or None if no limit is set."""
    text = _text(path).strip()
    return parse_number(text) or None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------------ settings
# The settings of a process as a whole, whatever it runs.


MACHINE_MEMORY_DIVISOR = 4
"""Divisor of the machine's memory, without the setting. Its page cache serves reads, and other processes run."""


class ProcessConfig(msgspec.Struct, frozen=True):
    """The setting that every process has: how many bytes of memory it may use."""

    memory_bytes: Annotated[int, Meta(ge=0)] = 0  # shared out to all that takes memory; 0: a quarter of the machine's


def compute_process_memory(
    file: str | None, option: int | None, shares: Sequence[MemoryShare], given: Mapping[str, int], most: int = NO_LIMIT,
    processes: int = 1,
) -> int:  # fmt: skip
    """Returns how many bytes of memory this process may use: an equal share of the memory that `file` or `option` sets
    for all `processes` together. If none is set, an equal share of a quarter of the machine's memory (at most `most`
    bytes), but never less than the process needs with the settings `given`. Raises InvalidConfiguration if the setting
    is invalid, or the file cannot be read."""
    process = load_config(ProcessConfig, "process", file=file, overrides={"memory_bytes": option})
    needed = compute_minimum_bytes(shares, given)
    own = process.memory_bytes // processes
    return own or max(needed, min(most, measure_machine_memory() // MACHINE_MEMORY_DIVISOR) // processes)
