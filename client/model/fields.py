"""Fields of a Record: which values a field accepts, how they are encoded, their part of the Avro schema, and their
type.

Here is what all fields share, and those of single values; client/model/record.py has arrays, maps and records. Type
checkers see a field as its value: `String(required=True)` and `String("a")` as str, `String()` as str or None.
"""

from __future__ import annotations

import copy
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Self, TypeVar, overload

from ..common.errors import InvalidMessage

V = TypeVar("V")
"""The type of the values that a record holds in the field."""
E = TypeVar("E")
M = TypeVar("M", bound=Enum)


class TextEncoding(Enum):
    """The encoding of a schema, JSON or Avro, to which a field's value is converted."""

    JSON = "json"  # bytes as text, enums by value
    AVRO = "avro"  # bytes as they are, enums by name


class DefinedTypes:
    """The records and enums that a schema has defined so far, by their full names."""

    def __init__(self) -> None:
        self._defined: dict[str, type] = {}

    def register_if_new(self, name: str, kind: type) -> bool:
        """Registers the name; returns whether it is new, so that the type must be defined here. Raises InvalidMessage
        if another type has that name."""
        known = self._defined.get(name)
        if known is not None and known is not kind:
            raise InvalidMessage(f"two types are called {name!r} in one schema: {known} and {kind}")
        self._defined[name] = kind
        return known is None


class Field(Generic[V]):
    """An attribute of a Record. `required`: its value must not be None. `default`: its value when nothing or None is
    given; `required_default`: the Avro schema contains the default. Raises InvalidMessage if the default does not fit
    the field."""

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
        """Returns the name of the field's type in Avro."""
        return self.avro

    def python_type(self) -> Any:
        """Returns the Python type of the field's values, or a tuple of types."""
        return self.python if len(self.python) > 1 else self.python[0]

    def validate_type(self, name: str, val: Any) -> Any:
        """Returns the value that a record stores when the field called `name` is set to `val`. Raises InvalidMessage
        (a TypeError) if `val` does not fit."""
        if val is None:
            return self.initial()
        val = self.made(val)
        named = copy.copy(self)
        named.set_name(name)
        named.check(val)
        return val

    def set_name(self, name: str) -> None:
        """Sets the field's name, which error messages of the field and of its parts contain."""
        self.name = name

    def default(self) -> Any:
        """Returns the value of the field when nothing or None is given."""
        return self.initial()

    def required_default(self) -> bool:
        """Whether the Avro schema contains the default."""
        return self._required_default

    def schema(self) -> Any:
        """Returns the field's type in Avro."""
        return self.schema_info(None)

    def schema_info(self, defined_names: Any) -> Any:
        """Returns the field's type as part of a schema. `defined_names`: a `DefinedTypes` with the types that are
        already defined; None: no type is."""
        return self.avro_type(defined_names if isinstance(defined_names, DefinedTypes) else DefinedTypes(), "")

    def check(self, value: Any) -> None:
        """Raises InvalidMessage if the field cannot be set to `value`, which must not be None."""
        if not self.is_of_type(value):
            raise InvalidMessage(f"field {self.name!r} takes {type(self).__name__}, not {value!r}")

    def is_of_type(self, value: Any) -> bool:
        """Whether `value`, which must not be None, is of the field's type; it may still be too large, or have wrong
        parts."""
        return isinstance(value, self.python) and not (isinstance(value, bool) and bool not in self.python)

    def made(self, value: Any) -> Any:
        """Returns the value that a record stores for `value`: a record for a dict, the member of an enum for
        its name."""
        return value

    def absent(self) -> Any:
        """Returns the value of the field in a new record for which nothing is given."""
        return self.initial()

    def plain(self, value: Any, text: TextEncoding) -> Any:
        """Converts a value to what JSON or Avro, as `text` says, encodes."""
        return value

    def from_plain(self, value: Any, text: TextEncoding) -> Any:
        """Converts a decoded JSON or Avro value back: the reverse of `plain`. Raises InvalidMessage if it is not
        possible."""
        return value

    def avro_type(self, names: DefinedTypes, namespace: str) -> Any:
        """Returns the field's type in Avro. `names`: the types that are already defined; `namespace`: that of the
        enclosing record."""
        return self.avro

    def initial(self) -> Any:
        """Returns the value of the field when None is given: a copy of its default."""
        return copy.copy(self._default)

    def definition(self, names: DefinedTypes, namespace: str) -> dict[str, Any]:
        """Returns the field as part of the Avro schema of its record."""
        kind = self.avro_type(names, namespace)
        found: dict[str, Any] = {"name": self.name}
        if self._required_default:
            default = self.initial()
            found["default"] = None if default is None else _avro_default(self, default)
        found["type"] = kind if self._required else ["null", kind]
        return found


def _avro_default(field: Field[Any], default: Any) -> Any:
    """Returns the default as the schema's JSON needs it: bytes as text, an enum by name."""
    plain = field.plain(default, TextEncoding.AVRO)
    return plain.decode("latin-1") if isinstance(plain, bytes) else plain


class Null(Field[None]):
    """A field that is always None."""


class Boolean(Field[bool]):
    """A field of a bool. Without a default of its own it is False, as in Pulsar."""

    avro, python = "boolean", (bool,)

    def initial(self) -> Any:
        return bool(self._default)


class _Whole(Field[V]):
    bits: ClassVar[int] = 64
    python = (int,)

    def check(self, value: Any) -> None:
        super().check(value)
        if not -(1 << self.bits - 1) <= value < 1 << self.bits - 1:
            raise InvalidMessage(f"field {self.name!r}: {value} does not fit {self.bits} bits")


class Integer(_Whole[V]):
    """A field of a signed int of 32 bits."""

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
    """A field of a signed int of 64 bits."""

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
    """A field of a float, which Avro encodes in 32 bits."""

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
    """A field of a float of 64 bits."""

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
    """A field of bytes. JSON encodes them as text with one character for each byte."""

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

    def made(self, value: Any) -> Any:
        return value.encode() if isinstance(value, str) else value

    def plain(self, value: Any, text: TextEncoding) -> Any:
        return value.decode("latin-1") if text is TextEncoding.JSON else value

    def from_plain(self, value: Any, text: TextEncoding) -> Any:
        return value.encode("latin-1") if isinstance(value, str) else value


class String(Field[V]):
    """A field of text."""

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

    def made(self, value: Any) -> Any:
        try:
            return value.decode() if isinstance(value, bytes) else value
        except UnicodeDecodeError as error:
            raise InvalidMessage(f"field {self.name!r} takes text, and the bytes are not UTF-8") from error


class CustomEnum(Field[V]):
    """A field with a member of `enum_type`. Avro encodes its name. JSON encodes its value, as Pulsar's client does, or
    its name if the value is not text, a number or a bool; names are read from JSON, too."""

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

    def made(self, value: Any) -> Any:
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

    def plain(self, value: Any, text: TextEncoding) -> Any:
        return value.value if text is TextEncoding.JSON and isinstance(value.value, str | int | float) else value.name

    def from_plain(self, value: Any, text: TextEncoding) -> Any:
        found = self.enum_type.__members__.get(value) if isinstance(value, str) else None
        if text is TextEncoding.JSON and isinstance(value, str | int | float):
            found = next((each for each in self.enum_type if each.value == value), found)
        if found is None:
            raise InvalidMessage(f"field {self.name!r}: {self.enum_type.__name__} has no {value!r}")
        return found

    def avro_type(self, names: DefinedTypes, namespace: str) -> Any:
        name = self.enum_type.__name__
        full = f"{namespace}.{name}" if namespace else name
        if not names.register_if_new(full, self.enum_type):
            return name
        return {"type": "enum", "name": name, "symbols": [each.name for each in self.enum_type]}
