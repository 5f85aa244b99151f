"""Records: classes with typed fields, for JsonSchema and AvroSchema. The classes have the names of `pulsar.schema`.

    class Flight(Record):
        carrier = String(required=True)
        delay = Integer(default=0)

A field that is not required may be None; a field with a default replaces None by the default, as in Pulsar. A record
may be a field of another record: `origin = Place()`, `Place(required=True)`. The default of that field is the record as
it was declared, as in Pulsar, unless the record lacks a required field. A program may assign a dict to such a field,
and an enum's name or value to an enum field.

`schema()` returns the Avro schema of the class, as Pulsar's client 3.13 makes it: fields in the order of their
definition, which is the order of Avro's encoding (with `_sorted_fields = True`: by name); with a default if
`required_default` is set; a record or enum that is used twice is defined once and then named. The schema differs from
Pulsar's in two cases: a record also has the fields of its base class, which Pulsar leaves out; and two things are valid
Avro that are not in Pulsar's schema: arrays and maps of enums, and references to a type in another namespace.

Type checkers see a field as its value (`flight.delay` is an int), which may be None where neither `required` nor a
default excludes it. Guard: tests/client/model/test_schema.py, tests/docs/typed_program.py."""

from __future__ import annotations

import copy
from enum import EnumMeta
from operator import is_
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeVar, overload

from ..common.checks import WrongType, shorten_value
from ..common.errors import InvalidMessage
from .fields import (
    Boolean,
    Bytes,
    CustomEnum,
    DefinedTypes,
    Double,
    Field,
    FieldEncoding,
    Float,
    Integer,
    Long,
    Null,
    String,
    V,
)

__all__ = [
    "Array", "Boolean", "Bytes", "CustomEnum", "Double", "Field", "Float", "Integer", "Long", "Map", "Null", "Record",
    "String",
]  # fmt: skip

E = TypeVar("E")
E_co = TypeVar("E_co", covariant=True)


class _Element(Protocol[E_co]):
    """What an array or a map may contain, a field or a record; for type checkers only. `element_` returns its type."""

    def element_(self) -> E_co: ...


def _field(kind: Any) -> Field[Any]:
    """Returns the field for the element of an array or a map, which may be a Field or its class, an Enum, or a Record
    or its class. Raises WrongType for anything else."""
    if isinstance(kind, EnumMeta):
        return CustomEnum(kind)
    if isinstance(kind, Field):
        return kind
    if isinstance(kind, Record):
        return _Nested(type(kind), kind)
    if isinstance(kind, type) and issubclass(kind, Field):
        return _field(kind())
    if isinstance(kind, type) and issubclass(kind, Record):
        return _Nested(kind)
    raise WrongType(f"the elements of a field are a field, an enum, or a record, not {shorten_value(kind)}")


class Array(Field[V]):
    """A field with a list whose elements have one type, `array_type`: a Field or a class of fields, an enum, or a
    Record or its class. Raises InvalidConfiguration for any other type."""

    avro, python = "array", (list,)

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: Array[list[E]], array_type: _Element[E], default: list[E], required: bool = ...,
            required_default: bool = ...,
        ) -> None: ...
        @overload
        def __init__(
            self: Array[list[E]], array_type: _Element[E], default: None = ..., *, required: Literal[True],
            required_default: bool = ...,
        ) -> None: ...
        @overload
        def __init__(
            self: Array[list[E] | None], array_type: _Element[E], default: None = ..., required: bool = ...,
            required_default: bool = ...,
        ) -> None: ...

    def __init__(
        self, array_type: Any, default: Any = None, required: bool = False, required_default: bool = False
    ) -> None:
        self.array_type = array_type
        self.items = _field(array_type)
        super().__init__(default, required, required_default)

    def convert_value(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value
        found = [self.items.convert_value(each) for each in value]
        return value if all(map(is_, found, value)) else found  # the list that was given, where nothing was made

    def check(self, value: Any) -> None:
        """Raises InvalidMessage if `value` is not a list, or an element of it does not fit. For an element of a wrong
        type the error text is that of Pulsar's client."""
        super().check(value)
        for each in value:
            if not self.items.is_of_type(each):
                raise InvalidMessage(f"Array field {self.name} items should all be of type {self.items.type()}")
            self.items.check(each)

    def set_name(self, name: str) -> None:
        super().set_name(name)
        self.items = copy.copy(self.items)  # a program may have given the same field to others
        self.items.set_name(name)

    def to_plain(self, value: Any, text: FieldEncoding) -> Any:
        return [self.items.to_plain(each, text) for each in value]

    def from_plain(self, value: Any, text: FieldEncoding) -> Any:
        super().check(value)
        return [self.items.from_plain(each, text) for each in value]

    def avro_type(self, names: DefinedTypes, namespace: str) -> Any:
        return {"type": "array", "items": self.items.avro_type(names, namespace)}


class Map(Field[V]):
    """A field with a dict from text to values of one type, `value_type`: a Field or a class of fields, an enum, or a
    Record or its class. Raises InvalidConfiguration for any other type."""

    avro, python = "map", (dict,)

    if TYPE_CHECKING:

        @overload
        def __init__(
            self: Map[dict[str, E]], value_type: _Element[E], default: dict[str, E], required: bool = ...,
            required_default: bool = ...,
        ) -> None: ...
        @overload
        def __init__(
            self: Map[dict[str, E]], value_type: _Element[E], default: None = ..., *, required: Literal[True],
            required_default: bool = ...,
        ) -> None: ...
        @overload
        def __init__(
            self: Map[dict[str, E] | None], value_type: _Element[E], default: None = ..., required: bool = ...,
            required_default: bool = ...,
        ) -> None: ...

    def __init__(
        self, value_type: Any, default: Any = None, required: bool = False, required_default: bool = False
    ) -> None:
        self.value_type = value_type
        self.values = _field(value_type)
        super().__init__(default, required, required_default)

    def convert_value(self, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        found = {key: self.values.convert_value(each) for key, each in value.items()}
        return value if all(map(is_, found.values(), value.values())) else found

    def check(self, value: Any) -> None:
        """Raises InvalidMessage if `value` is not a dict, a key is not text, or a value of it does not fit. For a key
        or value of a wrong type the error text is that of Pulsar's client."""
        super().check(value)
        for key, each in value.items():
            if not isinstance(key, str):
                raise InvalidMessage(f"Map keys for field {self.name}  should all be strings")
            if not self.values.is_of_type(each):
                kind = self.values.python_type()
                said = getattr(kind, "__name__", str(kind))
                raise InvalidMessage(f"Map values for field {self.name} should all be of type {said}")
            self.values.check(each)

    def set_name(self, name: str) -> None:
        super().set_name(name)
        self.values = copy.copy(self.values)
        self.values.set_name(name)

    def to_plain(self, value: Any, text: FieldEncoding) -> Any:
        return {key: self.values.to_plain(each, text) for key, each in value.items()}

    def from_plain(self, value: Any, text: FieldEncoding) -> Any:
        super().check(value)
        return {key: self.values.from_plain(each, text) for key, each in value.items()}

    def avro_type(self, names: DefinedTypes, namespace: str) -> Any:
        return {"type": "map", "values": self.values.avro_type(names, namespace)}


class _Nested(Field["Record"]):
    """A field that contains a record, or its class, of another Record. `declared`: that record, with the options of
    the field."""

    def __init__(self, record_class: Any, declared: Record | None = None) -> None:
        self.record_class, self.declared = record_class, declared
        super().__init__(**(declared.declared_ if declared is not None else {}))

    def type(self) -> str:
        return str(self.record_class.__name__)

    def python_type(self) -> Any:
        return self.record_class

    def absent_value(self) -> Any:
        declared = self.declared
        return copy.deepcopy(declared) if declared is not None and declared.is_whole() else self.initial_value()

    def convert_value(self, value: Any) -> Any:
        return self.record_class(**value) if isinstance(value, dict) else value

    def check(self, value: Any) -> None:
        if not self.is_of_type(value):
            raise InvalidMessage(f"field {self.name!r} takes {self.record_class.__name__}, not {value!r}")
        value.check_fields()

    def is_of_type(self, value: Any) -> bool:
        return isinstance(value, self.record_class)

    def to_plain(self, value: Any, text: FieldEncoding) -> Any:
        return value.to_plain(text)

    def from_plain(self, value: Any, text: FieldEncoding) -> Any:
        if not isinstance(value, dict):
            raise InvalidMessage(f"field {self.name!r} takes {self.record_class.__name__}, not {value!r}")
        return self.record_class.from_plain(value, text)

    def avro_type(self, names: DefinedTypes, namespace: str) -> Any:
        return self.record_class.avro_definition(names, namespace)


FIELD_PARAMETERS = ("default", "required", "required_default")


class NoSuchField(InvalidMessage, AttributeError):
    """Raised when a program sets a field that the record does not have. It is an AttributeError, too, because Pulsar's
    records raise an AttributeError."""


class _RecordType(type):
    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Any:
        fields: dict[str, Field[Any]] = {}
        for base in bases:
            fields.update(getattr(base, "_fields", {}))
        for key, value in list(namespace.items()) if bases else ():
            if isinstance(value, Field):
                found = copy.copy(value)  # it may be the field of another name, or record, as well
            elif isinstance(value, EnumMeta | _RecordType | Record):
                found = _field(value)
            else:
                continue
            found.set_name(key)
            fields[key] = found
            del namespace[key]
        namespace["_fields"] = fields
        return super().__new__(mcs, name, bases, namespace)


class Record(metaclass=_RecordType):
    """Base class of the values of JsonSchema and AvroSchema: a class whose attributes are fields.

        class Flight(Record):
            number = String(required=True)
            gate = Integer(default=12)

        producer = client.create_producer("flights", schema=JsonSchema(Flight))
        producer.send(Flight(number="UA 1545"))

    A field that gets no value has its default, or None. Making a record and setting a field raise InvalidMessage if a
    value does not fit its field, or no field has that name. A required field may still be None then: sending the record
    raises InvalidMessage.
    """
    _fields: ClassVar[dict[str, Field[Any]]]
    _avro_namespace: ClassVar[str | None] = None
    _sorted_fields: ClassVar[bool] = False

    declared_: ClassVar[dict[str, Any]] = {}
    """The Field parameters of a record that was declared as the field of another record (and no field has their
    name)."""

    def __init__(self, *declared: Any, **values: Any) -> None:
        """Makes a record with the field values `values`. `declared`: default, required_default and required, in this
        order, for a record that declares a field of another record. Raises InvalidMessage if a value does not fit its
        field, or no field has that name."""
        fields = self._fields
        values.update(zip(("default", "required_default", "required"), declared, strict=False))
        if given := [name for name in FIELD_PARAMETERS if name in values and name not in fields]:
            super().__setattr__("declared_", {name: values.pop(name) for name in given})
        for name in values:
            if name not in fields:
                raise NoSuchField(f"{type(self).__name__} has no field {name!r}")
        for name, field in fields.items():
            if name in values:
                setattr(self, name, values[name])
            else:
                super().__setattr__(name, field.absent_value())

    if TYPE_CHECKING:

        def element_(self) -> Self: ...

    def __setattr__(self, name: str, value: Any) -> None:
        field = self._fields.get(name)
        if field is None:
            raise NoSuchField(f"{type(self).__name__} has no field {name!r}")
        if value is None:
            value = field.initial_value()
        else:
            value = field.convert_value(value)
            field.check(value)
        super().__setattr__(name, value)

    def is_whole(self) -> bool:
        """Returns whether every required field of the record has a value."""
        return not any(field._required and getattr(self, name) is None for name, field in self._fields.items())

    def check_fields(self) -> None:
        """Raises InvalidMessage if a required field of the record has no value."""
        for name, field in self._fields.items():
            if field._required and getattr(self, name) is None:
                raise InvalidMessage(f"{type(self).__name__} lacks its field {name!r}")

    def to_plain(self, text: FieldEncoding) -> dict[str, Any]:
        """Returns the fields of the record as a dict by name, with values converted to plain Python values, which the
        encoding `text` (JSON or Avro) can write."""
        return {
            name: None if (value := getattr(self, name)) is None else field.to_plain(value, text)
            for name, field in self._fields.items()
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any], text: FieldEncoding) -> Any:
        """Returns the record for a dict that was decoded from the encoding `text` (JSON or Avro). Unknown fields are
        ignored, and missing fields get their defaults. Raises InvalidMessage if a value does not fit its field."""
        return cls(
            **{
                name: None if plain[name] is None else field.from_plain(plain[name], text)
                for name, field in cls._fields.items()
                if name in plain
            }
        )

    def type(self) -> str:
        """Returns the name of the record's class."""
        return type(self).__name__

    def python_type(self) -> Any:
        """Returns the record's class."""
        return type(self)

    def validate_type(self, name: str, val: Any) -> Any:
        """Returns the value that a record stores when its field called `name`, whose type is this record, is set to
        `val`; the default if `val` is None. Raises InvalidMessage if `val` does not fit."""
        return _Nested(type(self), self).validate_type(name, val)

    def default(self) -> Any:
        """Returns the default value of a field whose type is this record; None if it has none. The default replaces
        None."""
        return self.declared_.get("default")

    def required_default(self) -> bool:
        """Returns whether the Avro schema contains the default value of a field whose type is this record."""
        return bool(self.declared_.get("required_default"))

    @classmethod
    def schema_info(cls, defined_names: Any) -> Any:
        """Returns the record's type as a part of an Avro schema. `defined_names`: a `DefinedTypes` with the types that
        the schema has defined already; None: the schema has defined no type. Raises InvalidMessage if two types have
        the same name."""
        return cls.avro_definition(defined_names if isinstance(defined_names, DefinedTypes) else DefinedTypes(), "")

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """Returns the Avro schema of the record. Raises InvalidMessage if two of its types have the same name."""
        found: dict[str, Any] = cls.avro_definition(DefinedTypes(), "")
        return found

    @classmethod
    def avro_definition(cls, names: DefinedTypes, namespace: str) -> Any:
        """Returns the record's type as a part of an Avro schema: its definition, or only its name if the schema has
        defined it already. `names`: the types that the schema has defined, to which this adds the record; `namespace`:
        the namespace of the enclosing record. Raises InvalidMessage if another type has the record's name."""
        namespace = cls._avro_namespace or namespace
        name = f"{namespace}.{cls.__name__}" if namespace else cls.__name__
        if not names.add_if_new(name, cls):
            return name if cls._avro_namespace else cls.__name__
        found: dict[str, Any] = {"type": "record", "name": cls.__name__}
        if cls._avro_namespace:
            found["namespace"] = cls._avro_namespace
        order = sorted(cls._fields) if cls._sorted_fields else cls._fields
        found["fields"] = [cls._fields[each].avro_definition(names, namespace) for each in order]
        return found

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and all(getattr(self, n) == getattr(other, n) for n in self._fields)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{n}={getattr(self, n)!r}' for n in self._fields)})"
