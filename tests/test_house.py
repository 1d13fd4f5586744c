"""The commands that come before everything else: what they say on a machine that lacks something, and what they pin."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def make_venv(tmp_path: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Run scripts/make_venv.sh where the only Python is a shell script with this body."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").write_text(f"#!/bin/sh\n{python}\n")
    (programs / "python3").chmod(0o755)
    for name in ("bash", "dirname", "env"):
        (programs / name).symlink_to(str(shutil.which(name)))
    return subprocess.run([str(programs / "bash"), str(ROOT / "scripts/make_venv.sh")], capture_output=True, text=True, timeout=60,
                          env={"PATH": str(programs), "VENV": str(tmp_path / "venv")}, check=False)


def test_a_python_that_is_too_old_is_told_with_its_version_and_what_to_install(tmp_path: Path) -> None:
    found = make_venv(tmp_path, '[ "$1" = --version ] && echo "Python 3.9.2"; exit 1')
    assert found.returncode == 1
    assert "3.11 or newer" in found.stderr
    assert "Python 3.9.2" in found.stderr
    assert "apt-get install" in found.stderr


def test_a_python_without_ensurepip_is_told_which_system_package_brings_it(tmp_path: Path) -> None:
    found = make_venv(tmp_path, 'case "$2" in *ensurepip*) exit 1;; *version_info\\[:2\\]*) echo 3.12;; esac')
    assert found.returncode == 1
    assert "apt-get install python3.12-venv" in found.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_make_their_own_environment_and_pass_arguments_on(target: str, tmp_path: Path) -> None:
    around = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    said = subprocess.run(["make", "-n", target, "ARGS=--json x", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True,
                          env=around, timeout=60, check=True).stdout.strip().splitlines()
    assert any("scripts/make_venv.sh" in line for line in said)
    assert said[-1].endswith("--json x")
    (tmp_path / ".installed").touch()
    again = subprocess.run(["make", "-n", target, f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True, env=around,
                           timeout=60, check=True).stdout
    assert "make_venv" not in again  # the second run is instant


def test_constraints_pin_torch_name_no_host_and_agree_with_the_requirements() -> None:
    lines = [line for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if line and not line.startswith("#")]
    pins = dict(line.split("==") for line in lines)
    assert pins["torch"] == "2.13.0"
    assert not any("://" in line or line.startswith("-") for line in lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["demo"], *project["optional-dependencies"]["dev"]]
    for requirement in requirements:
        matched = re.match(r"([\w-]+)(?:\[\w+\])?(?:>=([\d.]+))?(?:,<([\d.]+))?", requirement)
        assert matched is not None
        name, least, below = matched.groups()
        if name in pins:
            assert least is None or version(least) <= version(pins[name]), requirement
            assert below is None or version(pins[name]) < version(below), requirement


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


PYTHON = """#!/bin/sh
echo "$@" >>log
case "$*" in
*"pip wheel"*) mkdir -p dist && touch dist/kvtier-cp311.whl dist/kvtier-none-any.whl ;;
*"pip install"*) mkdir -p build/compiled && test ! -e broken ;;
-VV) cat version ;;
esac
"""


def test_what_is_compiled_is_compiled_again_when_it_would_be_another_build_and_only_then(tmp_path: Path) -> None:
    for file in ("setup.py", "pyproject.toml", "MANIFEST.in", "scripts/stage.py", "scripts/check_compiled.py", "constraints-cpu.txt",
                 "scripts/make_venv.sh", "version", *(f"{room}/a file.py" for room in ("bench", "io", "kernels", "policies", "pools",
                                                                                      "tiering", "src"))):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file)
    (tmp_path / "Makefile").symlink_to(ROOT / "Makefile")
    (python := tmp_path / "venv/bin/python").parent.mkdir(parents=True)
    python.write_text(PYTHON)
    python.chmod(0o755)
    (tmp_path / "venv/.installed").touch()

    def compiles(*more: str, code: int = 0) -> bool:
        (tmp_path / "log").write_text("")
        around = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        done = subprocess.run(["make", "compiled", "VENV=venv", *more], cwd=tmp_path, env=around,
                              capture_output=True, text=True, timeout=60, check=False)
        assert bool(done.returncode) is bool(code), done.stderr
        return "pip wheel" in (tmp_path / "log").read_text()

    assert not compiles("-n")
    assert compiles()
    assert not compiles()
    for change in (lambda: (tmp_path / "tiering/a file.py").write_text("another"), lambda: (tmp_path / "io/a file.py").unlink(),
                   lambda: (tmp_path / "io/new.py").touch(), lambda: (tmp_path / "version").write_text("Python 3.12"),
                   lambda: shutil.rmtree(tmp_path / "build")):
        change()
        assert compiles()
        assert not compiles()
    (tmp_path / "bench/__pycache__").mkdir()
    (tmp_path / "bench/__pycache__/a.pyc").touch()
    assert not compiles()
    (tmp_path / "setup.py").write_text("another")
    (tmp_path / "broken").touch()
    assert compiles(code=2)
    (tmp_path / "broken").unlink()
    assert compiles(), "what was not finished counts for nothing"


def test_an_ordinary_build_has_no_extension_modules() -> None:
    code = ("import sys, setuptools; setuptools.setup = lambda **given: sys.exit(bool(given['ext_modules']))\n"
            "import runpy; runpy.run_path('setup.py')")
    around = {key: value for key, value in os.environ.items() if key != "KVTIER_COMPILE"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=around, check=True, timeout=60)


def test_an_archive_of_sources_has_what_the_compiled_build_needs() -> None:
    included = {line.split()[1] for line in (ROOT / "MANIFEST.in").read_text().splitlines() if line.startswith("include ")}
    assert included == {"scripts/stage.py", *(str(file.relative_to(ROOT)) for file in (ROOT / "kernels").glob("*.c"))}
    assert all((ROOT / name).exists() for name in included)


def test_the_compiled_rooms_import_no_torch_file_thread_or_impure_room() -> None:
    patterns = runpy.run_path(str(ROOT / "scripts" / "stage.py"))["COMPILED"]
    modules = [path for pattern in patterns for path in ROOT.glob(pattern)]
    assert len(modules) > 10
    allowed = ("kvtier.errors", "kvtier.types", "kvtier.pools.pool_index", "kvtier.pools.sequence_blocks", "kvtier.policies",
               "kvtier.tiering.ledger")
    forbidden = {"torch", "numpy", "io", "os", "pathlib", "threading", "asyncio", "concurrent", "multiprocessing", "mmap", "sqlite3"}
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else \
                [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.partition(".")[0] not in forbidden, f"{module} imports {name}"
                assert not name.startswith("kvtier") or name.startswith(allowed), f"{module} imports {name}"
