"""Fields of a Record: the values that a field accepts, their encoding, the field's part of the Avro schema, and its
type.

This module has the base class of all fields, and the fields of single values; client/model/record.py has arrays, maps
and records. Type checkers see a field as its value: `String(required=True)` and `String("a")` as str, `String()` as str
or None.

Also the checks that an Avro payload must pass before it is decoded, of its depth and of its number of items that take
no bytes: decoding a payload beyond these limits would crash the process or fill its memory. Also the aliases by which
fastavro finds the records of a writer's schema (`add_reader_aliases`).

fastavro descends without a limit: a few thousand levels of a recursive record end the process, and an array of nulls
can have any number of items in five bytes. `CheckedSchema` determines once whether payloads of a schema can be of that
kind; if so, it walks through each payload and refuses a wrong one before fastavro decodes it. Guard:
tests/client/model/test_typed_schemas.py."""

from __future__ import annotations

import copy
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar, overload

from ..common.errors import InvalidMessage

AVRO_DEPTH_MAX = 200
"""Deepest nesting of types in an Avro payload."""
EMPTY_ITEMS_PER_BYTE_MAX = 64
"""Most items that take no bytes, for each byte of the payload."""

_FIXED = {"null": 0, "boolean": 1, "float": 4, "double": 8}
_VARINTS = ("int", "long", "enum")
_COUNTED = ("bytes", "string")


def collect_named_types(schema: Any, names: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns a dict of the named types in a schema that fastavro parsed: full name → type. `names`: a dict to which
    the types are added, and which is returned; None: a new dict."""
    found: dict[str, Any] = {} if names is None else names
    for each in _inner(schema):
        collect_named_types(each, found)
    if isinstance(schema, dict) and "name" in schema and schema["type"] in ("record", "error", "enum", "fixed"):
        found[schema["name"]] = schema
    return found


def _inner(schema: Any) -> list[Any]:
    if isinstance(schema, list):
        return schema
    if not isinstance(schema, dict):
        return []
    if "fields" in schema:
        return [field["type"] for field in schema["fields"]]
    return [schema[each] for each in ("items", "values") if each in schema]


def must_check_payload(schema: Any, names: dict[str, Any], around: tuple[str, ...] = ()) -> bool:
    """Returns whether payloads of this Avro type must be checked before fastavro decodes them: the type contains
    itself, or items of an array may take no bytes. `names`: the named types of the schema (`collect_named_types`);
    `around`: the names of the types that enclose this one."""
    if isinstance(schema, str):
        return schema in around
    if isinstance(schema, dict):
        if "items" in schema and _may_be_empty(schema["items"], names, around):
            return True
        if "name" in schema:
            around = (*around, schema["name"])
    return any(must_check_payload(each, names, around) for each in _inner(schema))


def _may_be_empty(schema: Any, names: dict[str, Any], around: tuple[str, ...]) -> bool:
    if isinstance(schema, str):
        return schema == "null" or (schema in names and (schema in around or _may_be_empty(names[schema], {}, around)))
    if isinstance(schema, list):
        return False  # the number of the branch is a byte
    kind = schema["type"]
    if kind in ("record", "error"):
        return all(_may_be_empty(field["type"], names, around) for field in schema["fields"])
    return bool(kind == "null" or (kind == "fixed" and not schema["size"]))


class _Walk:
    def __init__(self, data: bytes, names: dict[str, Any]) -> None:
        self._data = data
        self._names = names
        self._at = 0
        self._empty = EMPTY_ITEMS_PER_BYTE_MAX * len(data)

    def walk(self, schema: Any, depth: int) -> None:
        if depth > AVRO_DEPTH_MAX:
            raise InvalidMessage(f"the payload is deeper than {AVRO_DEPTH_MAX} types")
        if isinstance(schema, list):
            number = self._varint()
            if not 0 <= number < len(schema):
                raise InvalidMessage(f"the payload has branch {number} of a union of {len(schema)}")
            self.walk(schema[number], depth + 1)
            return
        if isinstance(schema, str) and schema in self._names:
            schema = self._names[schema]
        kind = schema if isinstance(schema, str) else schema["type"]
        if kind in _FIXED:
            self._skip(_FIXED[kind])
        elif kind in _VARINTS:
            self._varint()
        elif kind in _COUNTED:
            self._skip(self._varint())
        elif kind == "fixed":
            self._skip(schema["size"])
        elif kind in ("record", "error"):
            for field in schema["fields"]:
                self.walk(field["type"], depth + 1)
        elif kind in ("array", "map"):
            self._blocks(schema, depth)
        else:
            self.walk(kind, depth + 1)

    def _blocks(self, schema: dict[str, Any], depth: int) -> None:
        while count := self._varint():
            if count < 0:
                count = -count
                self._varint()  # bytes of the block
            for _ in range(count):
                before = self._at
                if "values" in schema:
                    self._skip(self._varint())
                self.walk(schema.get("items", schema.get("values")), depth + 1)
                if self._at == before:
                    self._empty -= 1
                    if self._empty < 0:
                        raise InvalidMessage("the payload claims many items without bytes")

    def _skip(self, size: int) -> None:
        if not 0 <= size <= len(self._data) - self._at:
            raise InvalidMessage(f"the payload ends in front of {size} bytes that it claims")
        self._at += size

    def _varint(self) -> int:
        found = shift = 0
        while True:
            if self._at >= len(self._data) or shift > 63:
                raise InvalidMessage("the payload ends in a number")
            byte = self._data[self._at]
            self._at += 1
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return (found >> 1) ^ -(found & 1)
            shift += 7


class CheckedSchema:
    """An Avro schema that fastavro parsed, together with the check that its payloads must pass before fastavro decodes
    them."""

    __slots__ = ("_names", "schema")

    def __init__(self, schema: Any) -> None:
        self.schema = schema
        names = collect_named_types(schema)
        self._names = names if must_check_payload(schema, names) else None

    def check(self, payload: bytes) -> None:
        """Raises InvalidMessage if the payload is nested too deeply, declares more items than it can contain, or does
        not fit the schema. Takes time linear in the size of the payload. Does nothing if no payload of the schema can
        have so many levels or items."""
        if self._names is not None:
            _Walk(payload, self._names).walk(self.schema, 0)


# ---------------------------------------------------------------------------------------------------- avro_names
# Records of another name: a reader's record takes what a writer's record in its place wrote, whatever both are called.
#
# Brokers do not compare names of records, as Pulsar's do not (broker/cluster/schema_core.py); fastavro
# does. So the reader's schema is given the writer's names as aliases. In a union the branch is the one with the name,
# else the first record whose fields the writer has, or that have defaults. Guard:
# tests/client/model/test_typed_schemas.py.


_OF_THE_PARSER = ("__fastavro_parsed__", "__named_schemas")


def add_reader_aliases(reader: Any, writer: Any) -> Any:
    """Returns a copy of the parsed Avro schema `reader`, which gives its records additional names (aliases): the names
    of the corresponding records in the parsed schema `writer`. fastavro needs these to find the records."""
    if isinstance(reader, dict):
        reader = {name: value for name, value in reader.items() if name not in _OF_THE_PARSER}
    found = copy.deepcopy(reader)
    _Aliases(collect_named_types(found), collect_named_types(writer)).add(found, writer)
    return found


class _Aliases:
    def __init__(self, readers: dict[str, Any], writers: dict[str, Any]) -> None:
        self._readers, self._writers = readers, writers
        self._seen: set[tuple[str, str]] = set()

    def add(self, reader: Any, writer: Any) -> None:
        """Adds aliases to the records of the reader's type for the records of the writer's type at the same place."""
        if isinstance(writer, str):
            writer = self._writers.get(writer, writer)
        if isinstance(reader, str):
            reader = self._readers.get(reader, reader)
        if isinstance(writer, list):
            for each in writer:
                self.add(reader, each)
        elif isinstance(reader, list):
            self._add_in_union(reader, writer)
        elif isinstance(reader, dict) and isinstance(writer, dict) and reader["type"] == writer["type"]:
            if reader["type"] in ("record", "error"):
                self._add_to_record(reader, writer)
            for inner in ("items", "values"):
                if inner in reader:
                    self.add(reader[inner], writer[inner])

    def _add_in_union(self, branches: list[Any], writer: Any) -> None:
        if not isinstance(writer, dict):
            return
        same = [self._readers.get(each, each) if isinstance(each, str) else each for each in branches]
        same = [each for each in same if isinstance(each, dict) and each["type"] == writer["type"]]
        if "fields" in writer:
            named = [each for each in same if _is_named(each, writer["name"])]
            same = named or [each for each in same if _fits(each, writer)]
        if same:
            self.add(same[0], writer)

    def _add_to_record(self, reader: dict[str, Any], writer: dict[str, Any]) -> None:
        pair = reader["name"], writer["name"]
        if pair in self._seen:
            return
        self._seen.add(pair)
        if not _is_named(reader, writer["name"]):
            reader["aliases"] = [*reader.get("aliases", ()), writer["name"]]
        written = {each["name"]: each["type"] for each in writer["fields"]}
        for field in reader["fields"]:
            if (source := _source(field, written)) is not None:
                self.add(field["type"], written[source])


def _is_named(reader: dict[str, Any], name: str) -> bool:
    return name in reader.get("aliases", ()) or reader["name"].rpartition(".")[2] == name.rpartition(".")[2]


def _fits(reader: dict[str, Any], writer: dict[str, Any]) -> bool:
    written = {each["name"]: each["type"] for each in writer["fields"]}
    return all("default" in each or _source(each, written) is not None for each in reader["fields"])


def _source(field: dict[str, Any], written: dict[str, Any]) -> str | None:
    return next((each for each in (field["name"], *field.get("aliases", ())) if each in written), None)


V = TypeVar("V")
"""The type of the values of a field."""
E = TypeVar("E")
M = TypeVar("M", bound=Enum)


class FieldEncoding(Enum):
    """The encodings to which the values of a record's fields are converted: JSON or Avro."""

    JSON = "json"  # bytes as text, enums by value
    AVRO = "avro"  # bytes as they are, enums by name


class DefinedTypes:
    """The record and enum types that an Avro schema under construction has defined so far, by their full names."""

    def __init__(self) -> None:
        self._defined: dict[str, type] = {}

    def add_if_new(self, name: str, kind: type) -> bool:
        """Registers the type `kind` under its full name. Returns True if the name is new, so the schema must define the
        type at this place; False if it is defined already. Raises InvalidMessage if another type has that name."""
        known = self._defined.get(name)
        if known is not None and known is not kind:
            raise InvalidMessage(f"two types are called {name!r} in one schema: {known} and {kind}")
        self._defined[name] = kind
        return known is None


class Field(Generic[V]):
    """Base class of the fields of a Record. `required`: the value must not be None. `default`: the value that the field
    gets if the program gives no value, or None. `required_default`: whether the Avro schema contains the default.
    Raises InvalidMessage if the default does not fit the field."""

    avro: ClassVar[str] = "null"
    python: ClassVar[tuple[type, ...]] = (type(None),)
    name = ""

    def __init__(self, default: Any = None, required: bool = False, required_default: bool = False) -> None:
        self._default = None if default is None else self.validate_type("default", default)
        self._required = required
        self._required_default = required_default

    if TYPE_CHECKING:

        @overload
        def __get__(self, instance: None, owner: type[Any]) -> Self: ...
        @overload
        def __get__(self, instance: object, owner: type[Any]) -> V: ...
        def __get__(self, instance: object, owner: type[Any]) -> V | Self: ...
        def __set__(self, instance: object, value: V) -> None: ...
        def element_(self: Field[E | None]) -> E: ...

    def type(self) -> str:
        """Returns the name of the field's type in Avro, such as "string"."""
        return self.avro

    def python_type(self) -> Any:
        """Returns the Python type of the field's values, or a tuple of types."""
        return self.python if len(self.python) > 1 else self.python[0]

    def validate_type(self, name: str, val: Any) -> Any:
        """Returns the value that a record stores when the field called `name` is set to `val`; the default if `val` is
        None. Raises InvalidMessage, which is a TypeError too, if `val` does not fit the type or the bounds of the
        field."""
        if val is None:
            return self.initial_value()
        val = self.convert_value(val)
        named = copy.copy(self)
        named.set_name(name)
        named.check(val)
        return val

    def set_name(self, name: str) -> None:
        """Sets the name of the field. Error messages of the field and of its parts contain the name."""
        self.name = name

    def default(self) -> Any:
        """Returns the default value of the field, which replaces a missing value and None; None if it has none."""
        return self.initial_value()

    def required_default(self) -> bool:
        """Returns whether the Avro schema contains the default value of the field."""
        return self._required_default

    def schema(self) -> Any:
        """Returns the Avro schema of the field's type. Raises InvalidMessage if two of its types have the same name."""
        return self.schema_info(None)

    def schema_info(self, defined_names: Any) -> Any:
        """Returns the field's type as a part of an Avro schema. `defined_names`: a `DefinedTypes` with the types that
        the schema has defined already; None: the schema has defined no type. Raises InvalidMessage if two types have
        the same name."""
        return self.avro_type(defined_names if isinstance(defined_names, DefinedTypes) else DefinedTypes(), "")

    def check(self, value: Any) -> None:
        """Checks a value for the field. Raises InvalidMessage if the field cannot be set to `value`, which must not be
        None."""
        if not self.is_of_type(value):
            raise InvalidMessage(f"field {self.name!r} takes {type(self).__name__}, not {value!r}")

    def is_of_type(self, value: Any) -> bool:
        """Returns whether `value`, which must not be None, is of the field's type. Such a value may still be too large,
        or have parts of a wrong type."""
        return isinstance(value, self.python) and not (isinstance(value, bool) and bool not in self.python)

    def convert_value(self, value: Any) -> Any:
        """Converts a value that a program assigns to the field, and returns the value that the record stores. If the
        field has such a type, a dict becomes a record, the name or value of a member of an enum becomes the member,
        text becomes bytes, and bytes become text. Any other value is returned unchanged; it is checked later. Raises
        InvalidMessage if a dict does not fit the record, or bytes are no UTF-8 text."""
        return value

    def absent_value(self) -> Any:
        """Returns the value that the field has in a new record if the program gives none."""
        return self.initial_value()

    def to_plain(self, value: Any, text: FieldEncoding) -> Any:
        """Returns a value of the field converted to plain Python values, which the encoding `text` (JSON or Avro) can
        write."""
        return value

    def from_plain(self, value: Any, text: FieldEncoding) -> Any:
        """Converts plain Python values, decoded from JSON or Avro, to a value of the field: the reverse of `to_plain`.
        Raises InvalidMessage if the value does not fit the field."""
        return value

    def avro_type(self, names: DefinedTypes, namespace: str) -> Any:
        """Returns the field's type as a part of an Avro schema. `names`: the types that the schema has defined already,
        to which this adds its own; `namespace`: the namespace of the enclosing record. Raises InvalidMessage if two
        types have the same name."""
        return self.avro

    def initial_value(self) -> Any:
        """Returns a copy of the field's default value, which the field gets when it is set to None; None if it has
        none."""
        return copy.copy(self._default)

    def avro_definition(self, names: DefinedTypes, namespace: str) -> dict[str, Any]:
        """Returns the definition of the field (name, type, default) for the Avro schema of its record; a field that is
        not required is a union with null. `names` and `namespace`, and the error: as for `avro_type`."""
        kind = self.avro_type(names, namespace)
        found: dict[str, Any] = {"name": self.name}
        if self._required_default:
            default = self.initial_value()
            found["default"] = None if default is None else _avro_default(self, default)
        found["type"] = kind if self._required else ["null", kind]
        return found


def _avro_default(field: Field[Any], default: Any) -> Any:
    """Returns the default as the schema's JSON needs it: bytes as text, an enum by name."""
    plain = field.to_plain(default, FieldEncoding.AVRO)
    return plain.decode("latin-1") if isinstance(plain, bytes) else plain


class Null(Field[None]):
    """A field whose value is always None."""


class Boolean(Field[bool]):
    """A field with a bool. Without a default of its own the default is False, as in Pulsar."""

    avro, python = "boolean", (bool,)

    def initial_value(self) -> Any:
        return bool(self._default)


class _Whole(Field[V]):
    bits: ClassVar[int] = 64
    python = (int,)

    def check(self, value: Any) -> None:
        super().check(value)
        if not -(1 << self.bits - 1) <= value < 1 << self.bits - 1:
            raise InvalidMessage(f"field {self.name!r}: {value} does not fit {self.bits} bits")


class Integer(_Whole[V]):
    """A field with a signed int of 32 bits."""

    avro, bits = "int", 32

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: Integer[int], default: int, required: bool = ..., required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: Integer[int], default: None = ..., *, required: Literal[True], required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: Integer[int | None], default: None = ..., required: bool = ..., required_default: bool = ...
        ) -> None: ...
        def __init__(self, default: Any = None, required: bool = False, required_default: bool = False) -> None: ...


class Long(_Whole[V]):
    """A field with a signed int of 64 bits."""

    avro, bits = "long", 64

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: Long[int], default: int, required: bool = ..., required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: Long[int], default: None = ..., *, required: Literal[True], required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: Long[int | None], default: None = ..., required: bool = ..., required_default: bool = ...
        ) -> None: ...
        def __init__(self, default: Any = None, required: bool = False, required_default: bool = False) -> None: ...


class Float(Field[V]):
    """A field with a float, which Avro encodes in 32 bits."""

    avro, python = "float", (float, int)

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: Float[float], default: float, required: bool = ..., required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: Float[float], default: None = ..., *, required: Literal[True], required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: Float[float | None], default: None = ..., required: bool = ..., required_default: bool = ...
        ) -> None: ...
        def __init__(self, default: Any = None, required: bool = False, required_default: bool = False) -> None: ...


class Double(Field[V]):
    """A field with a float of 64 bits."""

    avro, python = "double", (float, int)

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: Double[float], default: float, required: bool = ..., required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: Double[float], default: None = ..., *, required: Literal[True], required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: Double[float | None], default: None = ..., required: bool = ..., required_default: bool = ...
        ) -> None: ...
        def __init__(self, default: Any = None, required: bool = False, required_default: bool = False) -> None: ...


class Bytes(Field[V]):
    """A field with bytes. Text that a program assigns is converted to UTF-8. JSON encodes the bytes as text, with one
    character for each byte."""

    avro, python = "bytes", (bytes,)

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: Bytes[bytes], default: bytes, required: bool = ..., required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: Bytes[bytes], default: None = ..., *, required: Literal[True], required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: Bytes[bytes | None], default: None = ..., required: bool = ..., required_default: bool = ...
        ) -> None: ...
        def __init__(self, default: Any = None, required: bool = False, required_default: bool = False) -> None: ...

    def convert_value(self, value: Any) -> Any:
        return value.encode() if isinstance(value, str) else value

    def to_plain(self, value: Any, text: FieldEncoding) -> Any:
        return value.decode("latin-1") if text is FieldEncoding.JSON else value

    def from_plain(self, value: Any, text: FieldEncoding) -> Any:
        try:
            return value.encode("latin-1") if isinstance(value, str) else value
        except UnicodeEncodeError as error:
            raise InvalidMessage(f"field {self.name!r} takes bytes, and the text has other characters") from error


class String(Field[V]):
    """A field with text. Bytes that a program assigns are decoded as UTF-8; InvalidMessage is raised if they are not
    UTF-8."""

    avro, python = "string", (str,)

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: String[str], default: str, required: bool = ..., required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: String[str], default: None = ..., *, required: Literal[True], required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: String[str | None], default: None = ..., required: bool = ..., required_default: bool = ...
        ) -> None: ...
        def __init__(self, default: Any = None, required: bool = False, required_default: bool = False) -> None: ...

    def convert_value(self, value: Any) -> Any:
        try:
            return value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            raise InvalidMessage(f"field {self.name!r} takes text, and the bytes are not UTF-8") from error


class CustomEnum(Field[V]):
    """A field with a member of the enum `enum_type`. Avro encodes the member's name. JSON encodes its value, as
    Pulsar's client does, or its name if the value is not text, a number or a bool. From JSON both names and values are
    read."""

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: CustomEnum[M], enum_type: type[M], default: M, required: bool = ..., required_default: bool = ...
        ) -> None: ...
        @overload
        def __init__(
            self: CustomEnum[M], enum_type: type[M], default: None = ..., *, required: Literal[True],
            required_default: bool = ...,
        ) -> None: ...
        @overload
        def __init__(
            self: CustomEnum[M | None], enum_type: type[M], default: None = ..., required: bool = ...,
            required_default: bool = ...,
        ) -> None: ...

    def __init__(
        self, enum_type: type[Enum], default: Any = None, required: bool = False, required_default: bool = False
    ) -> None:
        self.enum_type = enum_type
        super().__init__(default, required, required_default)

    def type(self) -> str:
        return "enum"

    def python_type(self) -> Any:
        return self.enum_type

    def convert_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.enum_type.__members__.get(value, value)
        if isinstance(value, int) and not isinstance(value, bool | Enum):
            return next((each for each in self.enum_type if each.value == value), value)
        return value

    def check(self, value: Any) -> None:
        if not self.is_of_type(value):
            raise InvalidMessage(f"field {self.name!r} takes {self.enum_type.__name__}, not {value!r}")

    def is_of_type(self, value: Any) -> bool:
        return isinstance(value, self.enum_type)

    def to_plain(self, value: Any, text: FieldEncoding) -> Any:
        return value.value if text is FieldEncoding.JSON and isinstance(value.value, str | int | float) else value.name

    def from_plain(self, value: Any, text: FieldEncoding) -> Any:
        found = self.enum_type.__members__.get(value) if isinstance(value, str) else None
        if text is FieldEncoding.JSON and isinstance(value, str | int | float):
            found = next((each for each in self.enum_type if each.value == value), found)
        if found is None:
            raise InvalidMessage(f"field {self.name!r}: {self.enum_type.__name__} has no {value!r}")
        return found

    def avro_type(self, names: DefinedTypes, namespace: str) -> Any:
        name = self.enum_type.__name__
        full = f"{namespace}.{name}" if namespace else name
        if not names.add_if_new(full, self.enum_type):
            return name
        return {"type": "enum", "name": name, "symbols": [each.name for each in self.enum_type]}
