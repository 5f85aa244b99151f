"""A start is measured with bytecode, and says when it is not."""

import os
import py_compile
from pathlib import Path

from benchmarks.startup import _has_bytecode


def test_bytecode_counts_as_long_as_the_source_is_the_one_that_was_compiled(tmp_path: Path) -> None:
    source = tmp_path / "module.py"
    source.write_text("x = 1\n")
    assert not _has_bytecode(source)
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.TIMESTAMP)
    assert _has_bytecode(source)
    os.utime(source, (1_700_000_000, 1_700_000_000))
    assert not _has_bytecode(source)
