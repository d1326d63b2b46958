"""The check of `make release-check` for one Python version: each archive in dist/ can be installed and used.

It needs only the standard library, and never imports the tree around it.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The public modules that programs import, and the module that pytest loads as a plugin.
MODULES = (
    *(
        "aiocoll",
        "aiocoll.backends",
        "aiocoll.cli.main",
        "aiocoll.distributed",
        "aiocoll.errors",
        "aiocoll.hooks",
        "aiocoll.loops",
    ),
    *("aiocoll.metrics.opentelemetry", "aiocoll.metrics.prometheus"),
    *("aiocoll.options", "aiocoll.plugins", "aiocoll.store", "aiocoll.testing", "aiocoll.testing.contracts"),
    *("aiocoll.testing.plugin", "aiocoll.typing"),
)
TEST = """
import pytest

@pytest.mark.ranks(2, 3)
async def test_sum(pg):
    assert await pg.allreduce(1) == pg.size()
"""
LIMIT = 600


def installable(folder: Path) -> Iterator[Path]:
    """Yield the archives in a folder that this Python can install: source archive, pure wheel, native wheel."""
    machine = f"_{platform.machine()}.whl"
    for path in sorted(folder.iterdir()):
        is_native = "-abi3-" in path.name and path.name.endswith(machine)
        if is_native or path.name.endswith((".tar.gz", "-py3-none-any.whl")):
            yield path


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variables for the new virtual environment, without settings of the source tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AIOCOLL", "VIRTUAL"))}
    return kept | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def first_program() -> tuple[str, list[str]]:
    """Return the first program of the README, and the sorted output lines that the README shows."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"^```python\n(.*?)^```$.*?^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    return found[1], sorted(found[2].splitlines())


def check(archive: Path) -> None:
    """Install an archive into a new virtual environment; import, run and test the installed package."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        variables = environment(folder / "env")
        (folder / "work").mkdir()

        def output_of(*command: str) -> str:
            done = subprocess.run(
                command, cwd=folder / "work", env=variables, capture_output=True, text=True, timeout=LIMIT, check=False
            )
            if done.returncode or "Traceback" in done.stderr:
                raise SystemExit(f"{archive.name}: {' '.join(command)}\n{done.stdout}{done.stderr}")
            return done.stdout

        output_of(
            "python",
            "-m",
            "pip",
            "install",
            "--quiet",
            f"aiocoll[testing,prometheus,otel] @ {archive.resolve().as_uri()}",
        )
        output_of("python", "-m", "pip", "check")
        output_of("python", "-W", "error", "-c", f"import {', '.join(MODULES)}")
        version = output_of("aiocoll", "--version")
        if not archive.name.endswith(".tar.gz"):  # whether a source archive builds natively depends on this machine
            kind = "native" if "-abi3-" in archive.name else "pure Python"
            assert f" ({kind}), Python {sys.version.split()[0]}, " in version, version
        program, expected = first_program()
        (folder / "work" / "hello.py").write_text(program)
        printed = sorted(output_of("aiocoll", "run", "-n", "2", "hello.py").splitlines())
        assert printed == expected, printed
        (folder / "work" / "test_it.py").write_text(TEST)
        scope = "asyncio_default_fixture_loop_scope=function"  # without this option, pytest-asyncio emits a warning
        assert "2 passed" in output_of("python", "-W", "error", "-m", "pytest", "-q", "-o", scope, "test_it.py")
        print(f"{archive.name}: {version}", end="", flush=True)


def main(folder: str) -> None:
    """Check all installable archives in a folder."""
    archives = list(installable(Path(folder))) if Path(folder).is_dir() else []
    if not archives:
        raise SystemExit(f"no archive in {folder}/ that Python {sys.version.split()[0]} can install; run make dist")
    for archive in archives:
        check(archive)


if __name__ == "__main__":
    main(*sys.argv[1:])
