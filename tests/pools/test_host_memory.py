"""What may be taken of the host: the container's limit counts, cache that can be given back does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvtier.errors import ConfigError
from kvtier.pools.host_memory import free_disk_bytes, host_memory, memlock_limit, shared_memory, usable_cpus

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A file tree with 32 GiB of memory, 20 GiB available, no cgroup limit."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {32 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {20 << 20} kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/pod/box\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def cgroup2(folder: Path, limit: str, used: int, inactive_file: int = 0) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{used}\n")
    write(folder / "memory.stat", f"anon {used}\ninactive_file {inactive_file}\n")


def test_without_a_limit_mem_available_counts(machine: Path) -> None:
    found = host_memory(machine)
    assert (found.available_bytes, found.total_bytes) == (20 * GIB, 32 * GIB)
    assert (found.limited_by, found.cgroup) == ("MemAvailable", None)


def test_a_cgroup_limit_below_it_wins(machine: Path) -> None:
    cgroup2(machine / "sys/fs/cgroup/pod/box", str(8 * GIB), 3 * GIB)
    found = host_memory(machine)
    assert found.available_bytes == 5 * GIB
    assert found.limited_by.startswith("cgroup limit of")
    assert found.cgroup is not None
    assert found.cgroup.limit_bytes == 8 * GIB


def test_a_limit_above_what_is_available_changes_nothing(machine: Path) -> None:
    cgroup2(machine / "sys/fs/cgroup/pod/box", str(64 * GIB), GIB)
    found = host_memory(machine)
    assert (found.available_bytes, found.limited_by) == (20 * GIB, "MemAvailable")


def test_the_tightest_cgroup_on_the_way_up_counts(machine: Path) -> None:
    cgroup2(machine / "sys/fs/cgroup/pod/box", "max", GIB)
    cgroup2(machine / "sys/fs/cgroup/pod", str(6 * GIB), 4 * GIB)
    assert host_memory(machine).available_bytes == 2 * GIB


def test_page_cache_that_is_not_in_use_counts_as_free(machine: Path) -> None:
    cgroup2(machine / "sys/fs/cgroup/pod/box", str(8 * GIB), 7 * GIB, inactive_file=4 * GIB)
    assert host_memory(machine).available_bytes == 5 * GIB


def test_in_a_container_the_mount_itself_is_the_cgroup(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "0::/../../elsewhere\n")
    cgroup2(machine / "sys/fs/cgroup", str(4 * GIB), GIB)
    assert host_memory(machine).available_bytes == 3 * GIB


def test_a_full_cgroup_has_nothing_left_not_less(machine: Path) -> None:
    cgroup2(machine / "sys/fs/cgroup/pod/box", str(GIB), 2 * GIB)
    assert host_memory(machine).available_bytes == 0


def test_version_one_limits_count_and_its_no_limit_does_not(machine: Path) -> None:
    write(machine / "proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n")
    folder = machine / "sys/fs/cgroup/memory"
    write(folder / "memory.limit_in_bytes", "9223372036854771712\n")
    write(folder / "memory.usage_in_bytes", "5\n")
    assert host_memory(machine).cgroup is None
    write(folder / "docker/abc/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(folder / "docker/abc/memory.usage_in_bytes", f"{GIB}\n")
    write(folder / "docker/abc/memory.stat", f"cache 7\ntotal_inactive_file {GIB // 2}\n")
    assert host_memory(machine).available_bytes == 3 * GIB // 2


def test_no_cgroup_file_means_no_limit(machine: Path) -> None:
    (machine / "proc/self/cgroup").unlink()
    assert host_memory(machine).cgroup is None


@pytest.mark.parametrize("text", [None, "MemTotal: 5 kB\n"])
def test_a_host_that_does_not_say_what_is_free_is_refused(machine: Path, text: str | None) -> None:
    (machine / "proc/meminfo").unlink()
    if text is not None:
        write(machine / "proc/meminfo", text)
    with pytest.raises(ConfigError, match="Linux"):
        host_memory(machine)


def test_this_machine_answers() -> None:
    found = host_memory()
    assert 0 < found.available_bytes <= found.total_bytes
    limit = memlock_limit()
    assert limit is None or limit >= 0
    assert 1 <= usable_cpus() <= (os.cpu_count() or 1)


def test_shared_memory_is_free_and_total_or_absent(tmp_path: Path) -> None:
    assert shared_memory(tmp_path) is None
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = shared_memory(tmp_path)
    assert found is not None
    assert 0 < found[0] <= found[1]


def test_free_disk_space_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    assert free_disk_bytes(tmp_path / "not/yet/there") > 0
