"""Bounds that are constants of the store, made so small that a workload of some hundred operations goes past them."""

import contextlib
import importlib
from collections.abc import Iterator
from types import ModuleType

from tests.crashes.sites import BOOKIE

SMALL = {
    "REPLAY_READ_BYTES": 4 << 10,
    "READ_STEP_BYTES": 4 << 10,
    "SOURCE_LOGS_PER_MOVE_MAX": 3,
    "FILL_SLICE_BYTES": 8 << 10,
    "_REWRITE_BYTES_MIN": 400,
    "_OUTDATED_MAX": 4,
    "_WRITE_BYTES": 200,
    "SCAN_SLICE_BYTES": 512,
    "APPEND_SLICE_BYTES": 512,
    "ENCODE_PIECE_BYTES": 256,
    "WRITE_BUFFER_BYTES": 1 << 10,
    "TOMBSTONES_PER_GROUP_MAX": 2,
}
"""By name, in whichever module of bookie/store they stand."""


def places() -> list[tuple[ModuleType, str, int]]:
    names = [".".join(path.relative_to(BOOKIE).with_suffix("").parts) for path in sorted(STORE.rglob("*.py"))]
    modules = [importlib.import_module(f"magnetar.bookie.{name}") for name in names]
    found = [(module, name, value) for module in modules for name, value in SMALL.items() if name in vars(module)]
    assert {name for _, name, _ in found} == set(SMALL), "a bound of the store has another name now"
    return found


STORE = BOOKIE / "store"
_places: list[tuple[ModuleType, str, int]] = []


@contextlib.contextmanager
def small_limits() -> Iterator[None]:
    if not _places:
        _places.extend(places())
    found = [(module, name, getattr(module, name)) for module, name, _ in _places]
    for module, name, value in _places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in found:
            setattr(module, name, value)
