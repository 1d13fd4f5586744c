"""kvtier doctor: every verdict has a cause that can be produced, and every problem a next step."""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvtier
from kvtier.errors import ConfigError
from kvtier.pools.host_memory import CgroupMemory, HostMemory, mount_of
from kvtier.tiering import build, doctor
from kvtier.tiering.config import TierConfig
from kvtier.tiering.doctor import Finding, Report, Status, examine, print_report

GIB = 1 << 30
GPU = Finding("GPU", Status.OK, "1 NVIDIA device(s)")
NO_GPU = Finding("GPU", Status.WARN, "no NVIDIA device", "install")


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("KVTIER_"):
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests that pretend to have a GPU have none to measure."""
    monkeypatch.setattr(doctor, "measured_elsewhere", lambda device: ({}, "nobody asked"))


def line(report: Report, name: str) -> Finding:
    return next(finding for finding in report.findings if finding.name == name)


def test_a_good_machine_is_ok_and_names_every_setting_with_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_MAX_BATCH_SIZE", "3")
    report = examine(tmp_path)
    assert report.ok
    content = json.loads(json.dumps(report.as_json()))
    assert content["config"]["max_batch_size"] == {"value": 3, "source": "environment KVTIER_MAX_BATCH_SIZE"}
    assert content["config"]["primary"] == {"value": "90%", "source": "default"}
    assert content["config"]["max_tokens"] == {"value": None, "source": "default"}
    assert {check["name"] for check in content["checks"]} >= {
        "configuration", "Python", "kvtier", "torch", "GPU", "cupy", "kvikio", "CPUs", "host memory", "memlock", "/dev/shm",
        "file system", "free space", "direct I/O"}
    assert list(tmp_path.iterdir()) == []  # the probe removed what it wrote


COMPILED_LEDGER = "ledger.cpython-311-x86_64-linux-gnu.so"


def test_the_plain_build_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.ledger, "__file__", "ledger.py")
    assert line(examine(tmp_path), "kvtier") == Finding("kvtier", Status.OK, f"{kvtier.__version__}, plain Python")


def test_the_compiled_build_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.ledger, "__file__", COMPILED_LEDGER)
    monkeypatch.setattr(build, "PathFinder", SimpleNamespace(find_spec=lambda name, path: importlib.util.find_spec("json")))
    assert line(examine(tmp_path), "kvtier") == Finding("kvtier", Status.OK, f"{kvtier.__version__}, compiled")


@pytest.mark.parametrize("damaged", [False, True])
def test_a_compiled_build_whose_module_in_c_is_missing_or_damaged_is_slower_and_says_so(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool) -> None:
    monkeypatch.setattr(build.ledger, "__file__", COMPILED_LEDGER)
    library = tmp_path / f"host_copy{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    if damaged:
        library.write_bytes(b"no library")
    monkeypatch.setattr(build, "PathFinder", SimpleNamespace(find_spec=lambda name, path: PathFinder.find_spec(name, [str(tmp_path)])))
    found = line(examine(), "kvtier")
    assert found.status is Status.WARN
    assert "compiled, but copies on the host are library calls" in found.found
    assert ("missing" in found.found) is not damaged
    assert "install the compiled wheel" in found.next_step


def test_every_warning_and_failure_has_a_next_step(tmp_path: Path) -> None:
    for report in (examine(), examine(tmp_path / "not there"), examine(config_file=tmp_path / "none.yaml")):
        assert all(finding.next_step for finding in report.findings if finding.status is not Status.OK)


def test_a_bad_configuration_fails_with_the_reason_and_the_rest_is_still_examined(tmp_path: Path) -> None:
    (tmp_path / "tier.yaml").write_text("primary: 8\n")
    report = examine(tmp_path, tmp_path / "tier.yaml")
    assert not report.ok
    assert "needs a unit" in line(report, "configuration").found
    assert line(report, "direct I/O").name == "direct I/O"
    assert report.configuration is None


def test_faults_that_are_injected_are_a_warning_and_without_them_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [finding for finding in examine().findings if finding.name == "faults"]
    monkeypatch.setenv("KVTIER_FAULTS", "nvme.read.eio=0.5")
    found = line(examine(), "faults")
    assert found.status is Status.WARN
    assert "nvme.read.eio=0.5" in found.found
    assert "environment KVTIER_FAULTS" in found.found
    assert "remove faults there" in found.next_step


def test_the_configured_directory_is_examined(tmp_path: Path) -> None:
    (tmp_path / "tier.toml").write_text(f'nvme_directory = "{tmp_path}"\n')
    assert str(tmp_path) in line(examine(config_file=tmp_path / "tier.toml"), "direct I/O").found


def test_without_a_directory_the_report_says_how_to_name_one() -> None:
    finding = line(examine(), "NVMe directory")
    assert finding.status is Status.WARN
    assert "--directory" in finding.next_step


def test_a_directory_that_does_not_exist_is_examined_where_it_would_be(tmp_path: Path) -> None:
    report = examine(tmp_path / "a" / "b")
    assert report.ok
    assert line(report, "NVMe directory").next_step == f"mkdir -p -m 700 {tmp_path / 'a' / 'b'}"
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("folder", ["$KVTIER_TEST_NOPE/x", "~no-such-user-here/x"])
def test_a_directory_that_cannot_be_expanded_is_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match="directory="):
        examine(Path(folder))


def test_a_file_in_place_of_the_directory_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert line(examine(tmp_path / "file" / "x"), "NVMe directory").status is Status.FAIL


def test_a_directory_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> str | None:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(doctor, "refuses_direct", refuse)
    finding = line(examine(tmp_path), "direct I/O")
    assert finding.status is Status.FAIL
    assert "Permission denied" in finding.found


def test_a_mount_without_direct_io_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "refuses_direct", lambda folder: "open with O_DIRECT: Invalid argument")
    finding = line(examine(tmp_path), "direct I/O")
    assert finding.status is Status.WARN
    assert "page cache" in finding.found


@pytest.mark.parametrize(("nvme", "reserve", "verdict"), [("1GiB", "1GiB", Status.OK), ("10GiB", "1GiB", Status.FAIL),
                                                          ("0 blocks", "9GiB", Status.FAIL)])
def test_free_space_is_compared_with_reserve_and_nvme(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvme: str, reserve: str, verdict: Status) -> None:
    monkeypatch.setattr(doctor, "free_disk_bytes", lambda folder: 8 * GIB)
    (tmp_path / "tier.yaml").write_text(f"nvme: {nvme}\nsecondary: 1 blocks\nnvme_free_space_reserve: {reserve}\n"
                                        f"nvme_directory: {tmp_path}\n")
    assert line(examine(config_file=tmp_path / "tier.yaml"), "free space").status is verdict


@pytest.mark.parametrize(("available", "cgroup", "verdict"), [
    (20 * GIB, None, Status.OK), (GIB // 2, None, Status.WARN), (GIB // 2, CgroupMemory("/box", GIB, GIB // 2), Status.WARN)])
def test_memory_says_what_bounds_it(
        monkeypatch: pytest.MonkeyPatch, available: int, cgroup: CgroupMemory | None, verdict: Status) -> None:
    bound = "MemAvailable" if cgroup is None else "cgroup limit of /box"
    monkeypatch.setattr(doctor, "host_memory", lambda: HostMemory(available, 32 * GIB, bound, cgroup))
    finding = line(examine(), "host memory")
    assert finding.status is verdict
    assert bound in finding.found


@pytest.mark.parametrize(("gpu", "limit", "verdict"), [(GPU, 8 << 20, Status.WARN), (GPU, None, Status.OK),
                                                       (NO_GPU, 8 << 20, Status.OK)])
def test_memlock_matters_where_memory_is_pinned(
        monkeypatch: pytest.MonkeyPatch, gpu: Finding, limit: int | None, verdict: Status) -> None:
    monkeypatch.setattr(doctor, "memlock_limit", lambda: limit)
    monkeypatch.setattr(doctor, "_gpu", lambda: gpu)
    assert line(examine(), "memlock").status is verdict


@pytest.mark.parametrize(("found", "verdict"), [(None, Status.WARN), ((64 << 20, 64 << 20), Status.WARN),
                                                ((4 * GIB, 8 * GIB), Status.OK)])
def test_a_small_shared_memory_is_a_warning(
        monkeypatch: pytest.MonkeyPatch, found: tuple[int, int] | None, verdict: Status) -> None:
    monkeypatch.setattr(doctor, "shared_memory", lambda: found)
    assert line(examine(), "/dev/shm").status is verdict


def test_a_single_cpu_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "usable_cpus", lambda: 1)
    assert line(examine(), "CPUs").status is Status.WARN


def test_with_a_gpu_missing_packages_and_a_cpu_torch_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpu", lambda: GPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = examine()
    assert line(report, "cupy").next_step == "pip install 'kvtier[cuda]'"
    assert line(report, "kvikio").status is Status.WARN
    assert report.ok


def test_packages_that_are_there_show_their_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpu", lambda: GPU)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"cupy": ["numpy"]})
    report = examine()
    assert line(report, "cupy") == Finding("cupy", Status.OK, importlib.metadata.version("numpy"))
    assert line(report, "kvikio").found == "unknown version"


def test_a_torch_that_cannot_be_imported_fails_and_the_report_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    report = examine()
    assert line(report, "torch").status is Status.FAIL
    assert not report.ok
    assert line(report, "CPUs").status is not Status.FAIL


def test_the_deepest_and_latest_mount_holds_a_folder(tmp_path: Path) -> None:
    info = tmp_path / "mountinfo"
    info.write_text("1 0 8:1 / / rw - ext4 /dev/root rw\n"
                    "2 1 8:2 / /data rw shared:1 - xfs /dev/nvme0n1 rw\n"
                    "3 1 8:3 / /data\\040dir rw - btrfs /dev/x rw\n"
                    "4 2 0:9 / /data rw - tmpfs tmpfs rw\n")
    assert mount_of(Path("/etc"), info) == ("ext4", "/")
    assert mount_of(Path("/data/kv"), info) == ("tmpfs", "/data")
    assert mount_of(Path("/data dir"), info) == ("btrfs", "/data dir")
    assert mount_of(Path("/database"), info) == ("ext4", "/")
    with info.open("ab") as file:  # names are bytes
        file.write("5 1 8:4 / /dätä rw - xfs /dev/y rw\n".encode() + b"6 1 8:5 / /\xff\x0b rw - ext4 /dev/z rw\n")
    assert mount_of(Path("/dätä/kv"), info) == ("xfs", "/dätä")
    assert mount_of(Path("/etc"), tmp_path / "none") == ("unknown", "/")


@pytest.mark.parametrize(("kind", "verdict"), [("ext4", Status.OK), ("xfs", Status.OK), ("tmpfs", Status.WARN),
                                               ("overlay", Status.WARN), ("fuse.sshfs", Status.WARN), ("nfs4", Status.WARN)])
def test_file_systems_that_cannot_do_gds_or_are_memory_are_warnings(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, verdict: Status) -> None:
    monkeypatch.setattr(doctor, "mount_of", lambda folder: (kind, "/x"))
    assert line(examine(tmp_path), "file system").status is verdict


def test_the_printed_report_shows_verdict_and_next_step() -> None:
    said: list[str] = []
    print_report(Report((Finding("memlock", Status.WARN, "8 MiB", "ulimit -l unlimited"),), TierConfig()), said.append)
    assert said[0].split() == ["warn", "memlock", "8", "MiB"]
    assert "-> ulimit -l unlimited" in said[1]
    assert [each.split()[-1] for each in said[2:]].count("default") == len(TierConfig().effective())
    assert not [each for each in said if "None" in each]


# -- GPUDirect ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gds", "reason", "status"), [
    ("off", "never asked", Status.OK), ("auto", None, Status.OK), ("auto", "no nvidia-fs", Status.WARN), ("required", None, Status.OK),
    ("required", "no nvidia-fs", Status.FAIL)])
def test_gpudirect_is_what_another_process_found_out_in_this_folder(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gds: str, reason: str | None, status: Status) -> None:
    asked: list[Path] = []

    def probe(folder: Path, device: str) -> str | None:
        asked.append(folder)
        return reason

    monkeypatch.setenv("KVTIER_GDS", gds)
    monkeypatch.setattr(doctor, "_gpu", lambda: GPU)
    monkeypatch.setattr(doctor, "obstacle", lambda device, folder: None)
    monkeypatch.setattr(doctor, "try_directory", probe)
    found = line(examine(tmp_path), "GPUDirect")
    assert found.status is status
    assert asked == ([] if gds == "off" else [tmp_path])
    if reason is not None and gds != "off":
        assert reason in found.found


def test_gpudirect_that_is_required_fails_without_a_gpu_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpu", lambda: NO_GPU)
    assert line(examine(tmp_path), "GPUDirect").status is Status.OK  # nobody asked for it
    monkeypatch.setenv("KVTIER_GDS", "required")
    assert "no NVIDIA device" in line(examine(tmp_path), "GPUDirect").found
    assert "no folder" in line(examine(), "GPUDirect").found
    assert not examine(tmp_path).ok


# -- ranks ---------------------------------------------------------------------------------------------------------------------


def test_several_ranks_are_told_who_they_are_and_what_the_sizes_come_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(finding.name != "ranks" for finding in examine(tmp_path).findings)
    monkeypatch.setenv("KVTIER_NUM_RANKS", "2")
    monkeypatch.setenv("KVTIER_RANK", "1")
    monkeypatch.setenv("KVTIER_HOST_CACHE_SIZE", "1024")
    found = line(examine(tmp_path), "ranks")
    assert found.status is Status.OK
    assert found.found.startswith("rank 1 of 2; primary: 90% of what is free; secondary: 1.00 KiB (1024 bytes) of each rank, 2.00 KiB")
    assert found.found.endswith(f"its store is {tmp_path}/rank-1-of-2")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_made_for_other_ranks_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rank-0-of-2").mkdir()
    for number in ("1", "4"):
        monkeypatch.setenv("KVTIER_NUM_RANKS", number)
        found = line(examine(tmp_path), "ranks")
        assert (found.status, "holds stores of 2 ranks" in found.found) == (Status.FAIL, True)


def test_what_all_ranks_want_of_a_drive_is_compared_with_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_disk_bytes", lambda folder: 3 * GIB)
    for key, value in {"NVME": "1536MiB", "SECONDARY": "1MiB", "NVME_DIRECTORY": str(tmp_path), "NVME_FREE_SPACE_RESERVE": "0B"}.items():
        monkeypatch.setenv(f"KVTIER_{key}", value)
    assert line(examine(), "free space").status is Status.OK
    monkeypatch.setenv("KVTIER_NUM_RANKS", "3")
    assert "nvme wants 4.50 GiB" in line(examine(), "free space").found
    monkeypatch.setenv("KVTIER_SIZE_SCOPE", "total")
    assert line(examine(), "free space").status is Status.OK


# -- copies ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "status", "found"), [
    (({"host to device": "kernel, one batch from 64 KiB", "device to host": "one batch"}, ""), Status.OK,
     "host to device: kernel, one batch from 64 KiB; device to host: one batch"),
    (({}, "the driver is too old"), Status.WARN, "a call for each piece, nothing else was measured: the driver is too old"),
])
def test_how_a_gpu_copies_is_what_another_process_has_measured(
        monkeypatch: pytest.MonkeyPatch, said: tuple[dict[str, str], str], status: Status, found: str) -> None:
    monkeypatch.setattr(doctor, "_gpu", lambda: GPU)
    monkeypatch.setattr(doctor, "measured_elsewhere", lambda device: said)
    finding = line(examine(), "copies")
    assert (finding.status, finding.found) == (status, found)


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_gpu", lambda: NO_GPU)
    monkeypatch.setattr(doctor, "measured_elsewhere", lambda device: pytest.fail("there is no GPU"))
    assert line(examine(), "copies").status is Status.OK


def test_a_doctor_needs_no_torch() -> None:
    done = subprocess.run([sys.executable, "-c", "import sys, kvtier.tiering.doctor; sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0, "a torch that cannot be imported is something a doctor has to say"
