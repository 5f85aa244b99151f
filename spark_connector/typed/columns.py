"""Values that msgspec decoded from JSON, to Arrow: a column at a time.

Arrow takes a list of plain values fast. Of the others it is given the parts: a record is a Struct, and its fields are
columns of their own, with a mask where it is null; of arrays and maps it gets all items as one column, and where each
begins. So a value inside costs as much as one at the top.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import pyarrow as pa
from msgspec.structs import astuple

from .shapes import Shape


def column(cells: Sequence[Any], shape: Shape) -> pa.Array:
    """Cells of the shape, or None, as its `raw` type. What Arrow raises: a value that the type cannot hold."""
    if shape.is_plain or not cells:
        return pa.array(cells, shape.raw)
    if not shape.parts:
        return _texts(cells, shape.raw)
    if pa.types.is_struct(shape.raw):
        return _records(cells, shape)
    items = chain.from_iterable(filter(None, cells))
    if pa.types.is_list(shape.raw):
        return pa.ListArray.from_arrays(_begins(cells), column(list(items), shape.parts[0]), type=shape.raw)
    keys = pa.array(list(items), pa.string())
    values = list(chain.from_iterable(each.values() for each in cells if each))
    return pa.MapArray.from_arrays(_begins(cells), keys, column(values, shape.parts[0]), type=shape.raw)


def _texts(cells: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """Returns a column of text, also of an enum: a number is its digits."""
    try:
        return pa.array(cells, type_)
    except (pa.ArrowException, TypeError):
        return pa.array([each if each is None or isinstance(each, str) else str(each) for each in cells], type_)


def _records(cells: Sequence[Any], shape: Shape) -> pa.Array:
    blank = (None,) * len(shape.parts)
    rows = [blank if each is None else astuple(each) for each in cells]
    parts = [column(part, of) for part, of in zip(zip(*rows, strict=True), shape.parts, strict=True)]
    return pa.StructArray.from_arrays(parts, fields=list(shape.raw), mask=pa.array([each is None for each in cells]))


def _begins(cells: Sequence[Any]) -> pa.Array:
    """Returns where the items of each cell begin, null where it is null; and the end."""
    begins = accumulate((len(each) if each else 0 for each in cells), initial=0)
    nulls = chain((each is None for each in cells), (False,))
    return pa.array([None if null else at for at, null in zip(begins, nulls, strict=True)], pa.int32())
