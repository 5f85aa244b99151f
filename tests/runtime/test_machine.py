"""The memory that a process may have: of the machine, or of the control groups that it is in."""

import os
from pathlib import Path

import pytest

from magnetar.proto.errors import InvalidConfiguration
from magnetar.runtime import config as settings
from magnetar.runtime.config import (
    MemoryShare,
    ProcessConfig,
    compute_process_memory,
    load_config,
    measure_machine_memory,
)

MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
SHARE = MemoryShare("a", "x.a_bytes", 1, 1, 1000, 1 << 40, "…")


def test_without_limits_it_is_the_machine(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/here\n")
    (tmp_path / "here").mkdir()
    (tmp_path / "here/memory.max").write_text("max\n")
    assert measure_machine_memory(tmp_path, own) == MACHINE
    assert measure_machine_memory(tmp_path, tmp_path / "missing") == MACHINE
    assert 64 << 20 < measure_machine_memory() <= MACHINE


@pytest.mark.parametrize("group", ["memory.max", "a/memory.max", "a/b/memory.max"])
def test_a_limit_of_a_group_above_counts(tmp_path: Path, group: str) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / group).write_text(f"{100 << 20}\n")
    assert measure_machine_memory(tmp_path, own) == 100 << 20


def test_a_limit_of_cgroup_1_counts(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("5:cpu:/other\n4:memory:/a\nnot a line\n")
    (tmp_path / "memory/a").mkdir(parents=True)
    (tmp_path / "memory/memory.limit_in_bytes").write_text(f"{(1 << 63) - 4096}\n")
    (tmp_path / "memory/a/memory.limit_in_bytes").write_text(f"{200 << 20}\n")
    assert measure_machine_memory(tmp_path, own) == 200 << 20


def test_the_setting_counts_else_a_quarter_within_the_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "magnetar.toml"
    file.write_text("[process]\nmemory_bytes = 5000\n")
    monkeypatch.setattr(settings, "measure_machine_memory", lambda: 40_000)
    assert compute_process_memory(str(file), None, (SHARE,), {}) == 5000
    assert compute_process_memory(str(file), 6000, (SHARE,), {}) == 6000
    assert compute_process_memory(None, None, (SHARE,), {}) == 10_000
    assert compute_process_memory(None, 0, (SHARE,), {}, 7000) == 7000
    assert compute_process_memory(
        str(file), None, (SHARE,), {}, processes=2
    ) == 2500, "each has its part of what is set"
    assert compute_process_memory(None, 0, (SHARE,), {}, 7000, 2) == 3500
    assert compute_process_memory(None, 0, (SHARE,), {}, 7000, 100) == 1000, "and what it needs"
    assert compute_process_memory(None, None, (SHARE,), {}, 7) == 1000, "what it needs, in any case"
    assert compute_process_memory(None, None, (SHARE,), {"x.a_bytes": 90_000}) == 90_000, "and what was set by hand"
    monkeypatch.setenv("MAGNETAR_PROCESS_MEMORY_BYTES", "7777")
    assert compute_process_memory(str(file), None, (SHARE,), {}) == 7777
    with pytest.raises(InvalidConfiguration):
        load_config(ProcessConfig, "process", environment={"MAGNETAR_PROCESS_MEMORY_BYTES": "-1"})
