"""The build of the C accelerator, and the choice between the accelerator and pure Python."""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from aiocoll.native import IMPLEMENTATION, core, layout

from .pages import commands, shell

ROOT = Path(__file__).parents[1]
MODULE = "aiocoll/native/_core.abi3.so"
BUILD = """
import sys
from hatchling.builders.wheel import WheelBuilder
print(next(iter(WheelBuilder(".").build(directory=sys.argv[1], versions=[sys.argv[2]]))))
"""
NEEDS = "from hatchling.build import get_requires_for_build_wheel as needs; print(*needs())"
SHOW = "from aiocoll.native import describe_implementation as describe; print(describe())"
#: A program that runs two groups of two ranks, one after the other, and logs to standard error.
LOGGED = """
import asyncio, logging
import aiocoll, aiocoll.testing
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
async def program(pg):
    await pg.barrier()
for _ in range(2):
    asyncio.run(aiocoll.testing.run_ranks(2, program))
"""


def run(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the copy of the package in `folder`."""
    left = ("AIOCOLL_NATIVE", "CC", "CFLAGS", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if name not in left}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**env, "PYTHONPATH": str(folder), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def wheel(source: Path, version: str = "standard", **variables: str) -> Path:
    """Build a wheel of the source tree `source`; return the path of the wheel."""
    done = run(source, "-c", BUILD, str(source.parent), version, **variables)
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.splitlines()[-1])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a copy of the source tree, without compiled files."""
    pytest.importorskip("hatch_fancy_pypi_readme")
    for name in (".gitignore", "hatch_build.py", "pyproject.toml", "README.md", "LICENSE"):
        (tmp_path / "tree").mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "tree")
    shutil.copytree(ROOT / "aiocoll", tmp_path / "tree" / "aiocoll", ignore=shutil.ignore_patterns("*.so", "*.pyc"))
    return tmp_path / "tree"


@pytest.fixture
def hook() -> dict[str, Any]:
    """Return the namespace of hatch_build.py, the build hook."""
    pytest.importorskip("hatchling")
    return runpy.run_path(str(ROOT / "hatch_build.py"))


@pytest.fixture
def compiler(hook: dict[str, Any]) -> None:
    """Skip the test if the C accelerator cannot be built on this machine."""
    if reason := hook["obstacle"]():
        pytest.skip(reason)


def fake_compiler(folder: Path) -> str:
    """Return the path of a fake compiler that creates the file `called`, then fails."""
    fake = folder / "fake-cc"
    fake.write_text(f"#!/bin/sh\ntouch {folder}/called\necho 'module.c:1: no such thing' >&2\nexit 1\n")
    fake.chmod(0o700)
    return str(fake)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
def test_built_wheel_uses_the_accelerator(source: Path, tmp_path: Path) -> None:
    start = monotonic()
    path = wheel(source, AIOCOLL_NATIVE="1")
    assert monotonic() - start < 60  # 10 s on 2 idle cores; other tests may run at the same time
    machine = sysconfig.get_platform().replace("-", "_")
    assert path.name.endswith(f"-cp311-abi3-{machine}.whl")
    unpacked = tmp_path / "unpacked"
    with zipfile.ZipFile(path) as archived:
        names = {name for name in archived.namelist() if name.startswith("aiocoll/native/")}
        assert names == {"aiocoll/native/__init__.py", "aiocoll/native/_core.pyi", "aiocoll/native/layout.py", MODULE}
        info = next(archived.read(name).decode() for name in archived.namelist() if name.endswith(".dist-info/WHEEL"))
        assert "Root-Is-Purelib: false" in info
        archived.extractall(unpacked)
    for variables in ({}, {"AIOCOLL_NATIVE": "1"}):
        shown = run(unpacked, "-c", SHOW, **variables).stdout
        assert shown.startswith("native (for Python 3.11 and later, NumPy 2.0 and later; built with Python ")
        assert platform.python_version() in shown
    assert run(unpacked, "-c", SHOW, AIOCOLL_NATIVE="0").stdout == "pure Python (AIOCOLL_NATIVE=0)\n"
    assert run(unpacked, "-c", "import aiocoll", AIOCOLL_NATIVE="1").returncode == 0
    assert " (native), Python " in run(unpacked, "-m", "aiocoll", "--version").stdout


def test_build_without_a_compiler_makes_a_pure_wheel_without_numpy(source: Path) -> None:
    assert run(source, "-c", NEEDS, CC="no-such-compiler").stdout == "\n"
    assert wheel(source, CC="no-such-compiler").name.endswith("-py3-none-any.whl")


@pytest.mark.usefixtures("compiler")
def test_build_requires_numpy_only_if_it_compiles_the_accelerator(source: Path) -> None:
    assert run(source, "-c", NEEDS).stdout == "numpy>=2.0\n"
    assert run(source, "-c", NEEDS, AIOCOLL_NATIVE="0").stdout == "\n"


def test_required_build_without_a_compiler_fails_with_a_remedy(source: Path) -> None:
    done = run(source, "-c", BUILD, ".", "standard", AIOCOLL_NATIVE="1", CC="no-such-compiler")
    assert done.returncode != 0
    assert "AIOCOLL_NATIVE=1, but the accelerator cannot be built: " in done.stderr
    if sys.platform == "linux":
        assert "there is no C compiler 'no-such-compiler'; install one (gcc), or set CC" in done.stderr


@pytest.mark.usefixtures("compiler")
def test_build_with_a_failing_compiler_makes_a_pure_wheel_unless_required(source: Path, tmp_path: Path) -> None:
    fake = fake_compiler(tmp_path)
    assert wheel(source, CC=fake).name.endswith("-py3-none-any.whl")
    assert (tmp_path / "called").exists()
    done = run(source, "-c", BUILD, ".", "standard", AIOCOLL_NATIVE="1", CC=fake)
    assert done.returncode != 0
    assert "the compiler failed: " in done.stderr
    assert "module.c:1: no such thing" in done.stderr


def test_pure_build_calls_no_compiler(source: Path, tmp_path: Path) -> None:
    assert wheel(source, CC=fake_compiler(tmp_path), AIOCOLL_NATIVE="0").name.endswith("-py3-none-any.whl")
    assert not (tmp_path / "called").exists()


def test_unknown_value_of_aiocoll_native_fails_the_build(source: Path) -> None:
    done = run(source, "-c", BUILD, ".", "standard", AIOCOLL_NATIVE="yes")
    assert "AIOCOLL_NATIVE='yes': must be 1 (build the accelerator in C, or fail) or 0 (do not build it)" in done.stderr


@pytest.mark.usefixtures("compiler")
def test_editable_install_builds_the_accelerator_in_place(source: Path) -> None:
    pytest.importorskip("editables")
    wheel(source, "editable", AIOCOLL_NATIVE="1")
    assert (source / MODULE).is_file()
    assert run(source, "-c", SHOW, AIOCOLL_NATIVE="1").stdout.startswith("native (")
    wheel(source, "editable", AIOCOLL_NATIVE="0")
    assert not (source / MODULE).exists()


@pytest.mark.usefixtures("compiler")
def test_accelerator_built_with_another_memory_layout_is_not_used(source: Path) -> None:
    numbers = source / "aiocoll/native/layout.py"
    text = numbers.read_text()
    numbers.write_text(text.replace("MIDDLE_SLOTS: Final = 4", "MIDDLE_SLOTS: Final = 5"))
    assert run(source, "hatch_build.py").returncode == 0
    assert run(source, "-c", SHOW).stdout.startswith("native (")
    numbers.write_text(text)
    assert "was built for another version of aiocoll" in run(source, "-c", SHOW).stdout
    done = run(source, "-c", "import aiocoll", AIOCOLL_NATIVE="1")
    assert "ImportError: AIOCOLL_NATIVE=1, but the accelerator in C is not available: " in done.stderr


def test_generated_layout_header_contains_every_layout_number(hook: dict[str, Any]) -> None:
    lines = hook["layout_header"](ROOT).splitlines()
    for name in layout.__all__:
        assert f"#define LAYOUT_{name} {getattr(layout, name)}" in lines
    assert f"#define LAYOUT_NUMBERS(X) {' '.join(f'X({name})' for name in layout.__all__)}" in lines


def test_accelerator_has_the_memory_layout_of_the_package() -> None:
    if core is None:
        pytest.skip("the accelerator in C does not run here")
    assert {name: getattr(layout, name) for name in layout.__all__} == core.LAYOUT


def test_free_threaded_interpreter_builds_no_accelerator(hook: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_config_var", {"Py_GIL_DISABLED": 1}.get)
    assert hook["obstacle"]() == "it requires CPython on Linux, and not a free-threaded build"


def test_build_error_names_missing_python_headers(
    hook: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if sys.platform != "linux" or sys.implementation.name != "cpython":
        pytest.skip("nothing is built here")
    monkeypatch.setenv("CC", "sh")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert f"there is no Python.h in {tmp_path}" in hook["obstacle"]()


def test_missing_accelerator_raises_an_error_only_if_required(source: Path) -> None:
    assert run(source, "-c", SHOW).stdout == "pure Python (not built)\n"
    assert run(source, "-c", SHOW, AIOCOLL_NATIVE="0").stdout == "pure Python (AIOCOLL_NATIVE=0)\n"
    done = run(source, "-c", "import aiocoll", AIOCOLL_NATIVE="1")
    assert done.returncode != 0
    error = done.stderr.splitlines()[-1]
    assert error.startswith(
        "ImportError: AIOCOLL_NATIVE=1, but the accelerator in C is not available: not built; build it by "
    )
    assert "make native" in error
    assert "AIOCOLL_NATIVE=1 pip install" in error


def test_error_for_an_accelerator_that_cannot_be_loaded_names_its_file(source: Path) -> None:
    (source / MODULE).write_bytes(b"no library")
    assert f"{MODULE}: " in run(source, "-c", SHOW).stdout
    done = run(source, "-c", "import aiocoll", AIOCOLL_NATIVE="1")
    assert f"{MODULE}: " in done.stderr.splitlines()[-1]


def test_unknown_value_of_aiocoll_native_fails_the_import() -> None:
    done = run(ROOT, "-c", "import aiocoll", AIOCOLL_NATIVE="yes")
    assert (
        done.stderr.splitlines()[-1] == "ValueError: AIOCOLL_NATIVE='yes': "
        "must be 1 (require the accelerator in C) or 0 (run pure Python)"
    )


def test_process_logs_once_whether_it_uses_the_accelerator() -> None:
    done = run(ROOT, "-c", LOGGED, AIOCOLL_NATIVE="0")
    assert done.stderr.splitlines().count("INFO aiocoll runs pure Python (AIOCOLL_NATIVE=0)") == 1


def test_commands_of_the_native_page_show_whether_the_accelerator_is_used(tmp_path: Path) -> None:
    chosen = {name: value for name, value in os.environ.items() if name == "AIOCOLL_NATIVE"}
    said = shell(commands("docs/native.md")[0], tmp_path, **chosen)
    assert f" ({IMPLEMENTATION}), Python " in said
    assert f", {IMPLEMENTATION} (" in said
