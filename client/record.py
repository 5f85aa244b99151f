"""Records: classes whose fields say their types, for JsonSchema and AvroSchema. Names of `pulsar.schema`.

    class Flight(Record):
        carrier = String(required=True)
        delay = Integer(default=0)

    Flight(carrier="UA").delay == 0

A field that is not required may be None. `schema()` is the Avro schema of the class, fields sorted by name as Pulsar's.
"""

from __future__ import annotations

import copy
from enum import Enum
from typing import Any, ClassVar

from .errors import InvalidMessage


class Text(Enum):
    JSON = "json"  # bytes as text, enums by name
    AVRO = "avro"  # bytes as they are, enums by name


class Field:
    avro: ClassVar[str] = "null"
    python: ClassVar[tuple[type, ...]] = (type(None),)

    def __init__(self, default: Any = None, required: bool = False, required_default: bool = False) -> None:
        self.default = default
        self.required = required
        self.required_default = required_default
        self.name = ""
        if default is not None:
            self.check(default)

    def check(self, value: Any) -> None:
        if (isinstance(value, bool) and bool not in self.python) or not isinstance(value, self.python):
            raise InvalidMessage(f"field {self.name!r} takes {type(self).__name__}, not {value!r}")

    def plain(self, value: Any, text: Text) -> Any:
        return value

    def from_plain(self, value: Any) -> Any:
        return value

    def avro_type(self) -> Any:
        return self.avro

    def initial(self) -> Any:
        return copy.copy(self.default)

    def definition(self) -> dict[str, Any]:
        kind = self.avro_type()
        found: dict[str, Any] = {"name": self.name, "type": kind if self.required else ["null", kind]}
        if self.required_default or self.default is not None:
            found["default"] = self.default
            if not self.required and self.default is not None:
                found["type"] = [kind, "null"]
        return found


class Null(Field):
    pass


class Boolean(Field):
    avro, python = "boolean", (bool,)


class _Whole(Field):
    bits: ClassVar[int] = 64
    python = (int,)

    def check(self, value: Any) -> None:
        super().check(value)
        if not -(1 << self.bits - 1) <= value < 1 << self.bits - 1:
            raise InvalidMessage(f"field {self.name!r}: {value} does not fit {self.bits} bits")


class Integer(_Whole):
    avro, bits = "int", 32


class Long(_Whole):
    avro, bits = "long", 64


class Float(Field):
    avro, python = "float", (float, int)


class Double(Field):
    avro, python = "double", (float, int)


class Bytes(Field):
    avro, python = "bytes", (bytes,)

    def plain(self, value: Any, text: Text) -> Any:
        return value.decode("latin-1") if text is Text.JSON else value

    def from_plain(self, value: Any) -> Any:
        return value.encode("latin-1") if isinstance(value, str) else value


class String(Field):
    avro, python = "string", (str,)


class CustomEnum(Field):
    """A field that holds a member of `enum_type`; it travels by name."""

    def __init__(
        self, enum_type: type[Enum], default: Any = None, required: bool = False, required_default: bool = False
    ) -> None:
        self.enum_type = enum_type
        super().__init__(default, required, required_default)

    def check(self, value: Any) -> None:
        if not isinstance(value, self.enum_type):
            raise InvalidMessage(f"field {self.name!r} takes {self.enum_type.__name__}, not {value!r}")

    def plain(self, value: Any, text: Text) -> Any:
        return value.name

    def from_plain(self, value: Any) -> Any:
        try:
            return self.enum_type[value]
        except KeyError as error:
            raise InvalidMessage(f"field {self.name!r}: {self.enum_type.__name__} has no {value!r}") from error

    def avro_type(self) -> Any:
        return {"type": "enum", "name": self.enum_type.__name__, "symbols": [each.name for each in self.enum_type]}


def _field(kind: Any) -> Field:
    """A field for the element of an array or map: Field, Field class, Record class or instance."""
    if isinstance(kind, type):
        kind = kind() if issubclass(kind, Field) else _Nested(kind)
    return kind if isinstance(kind, Field) else _Nested(type(kind))


class Array(Field):
    python = (list,)

    def __init__(
        self, array_type: Any, default: Any = None, required: bool = False, required_default: bool = False
    ) -> None:
        self.items = _field(array_type)
        super().__init__(default, required, required_default)

    def check(self, value: Any) -> None:
        super().check(value)
        for each in value:
            self.items.check(each)

    def plain(self, value: Any, text: Text) -> Any:
        return [self.items.plain(each, text) for each in value]

    def from_plain(self, value: Any) -> Any:
        return [self.items.from_plain(each) for each in value]

    def avro_type(self) -> Any:
        return {"type": "array", "items": self.items.avro_type()}


class Map(Field):
    python = (dict,)

    def __init__(
        self, value_type: Any, default: Any = None, required: bool = False, required_default: bool = False
    ) -> None:
        self.values = _field(value_type)
        super().__init__(default, required, required_default)

    def check(self, value: Any) -> None:
        super().check(value)
        for key, each in value.items():
            if not isinstance(key, str):
                raise InvalidMessage(f"field {self.name!r}: keys of a map are text, not {key!r}")
            self.values.check(each)

    def plain(self, value: Any, text: Text) -> Any:
        return {key: self.values.plain(each, text) for key, each in value.items()}

    def from_plain(self, value: Any) -> Any:
        return {key: self.values.from_plain(each) for key, each in value.items()}

    def avro_type(self) -> Any:
        return {"type": "map", "values": self.values.avro_type()}


class _Nested(Field):
    """A record inside a record."""

    def __init__(self, record_class: Any, default: Any = None) -> None:
        self.record_class = record_class
        super().__init__(default)

    def check(self, value: Any) -> None:
        if not isinstance(value, self.record_class):
            raise InvalidMessage(f"field {self.name!r} takes {self.record_class.__name__}, not {value!r}")
        value.check_fields()

    def plain(self, value: Any, text: Text) -> Any:
        return value.plain(text)

    def from_plain(self, value: Any) -> Any:
        return self.record_class.from_plain(value)

    def avro_type(self) -> Any:
        return self.record_class.schema()


class _RecordType(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        fields: dict[str, Field] = {}
        for base in bases:
            fields.update(getattr(base, "_fields", {}))
        for key, value in list(namespace.items()):
            if isinstance(value, (Field, Record) if bases else Field):
                found = value if isinstance(value, Field) else _Nested(type(value))
                found.name = key
                fields[key] = found
                del namespace[key]
            elif isinstance(value, _RecordType):
                fields[key] = _Nested(value)
                fields[key].name = key
                del namespace[key]
        namespace["_fields"] = fields
        return super().__new__(mcs, name, bases, namespace)


class Record(metaclass=_RecordType):
    _fields: ClassVar[dict[str, Field]]
    _avro_namespace: ClassVar[str | None] = None

    def __init__(self, **values: Any) -> None:
        unknown = [name for name in values if name not in self._fields]
        if unknown:
            raise InvalidMessage(f"{type(self).__name__} has no field {', '.join(unknown)}")
        for name, field in self._fields.items():
            setattr(self, name, values[name] if name in values else field.initial())

    def __setattr__(self, name: str, value: Any) -> None:
        field = self._fields.get(name)
        if field is not None and value is not None:
            field.check(value)
        super().__setattr__(name, value)

    def check_fields(self) -> None:
        """Raises InvalidMessage when a required field is missing."""
        for name, field in self._fields.items():
            if field.required and getattr(self, name) is None:
                raise InvalidMessage(f"{type(self).__name__} lacks its field {name!r}")

    def plain(self, text: Text) -> dict[str, Any]:
        return {
            name: None if (value := getattr(self, name)) is None else field.plain(value, text)
            for name, field in self._fields.items()
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Any:
        """From decoded JSON or Avro; unknown fields are ignored, missing ones get their defaults."""
        return cls(
            **{
                name: None if plain[name] is None else field.from_plain(plain[name])
                for name, field in cls._fields.items()
                if name in plain
            }
        )

    @classmethod
    def schema(cls) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "record", "name": cls.__name__}
        if cls._avro_namespace:
            found["namespace"] = cls._avro_namespace
        found["fields"] = [cls._fields[name].definition() for name in sorted(cls._fields)]
        return found

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(getattr(self, n) == getattr(other, n) for n in self._fields)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in self._fields)})"
