"""Compiles the hot modules, if `AIOCOLL_COMPILED=1` asks for it, when hatchling makes a wheel; see `docs/compiled.md`.

mypyc works on a copy of the package in a temporary folder, so nothing is left in the tree that would shadow a source.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: What an allreduce or a barrier goes through, between the group's method and the memory that ranks share; and what
#: these are made of, since mypyc calls directly only what it has compiled together.
MODULES = (
    "aiocoll/completion.py",
    "aiocoll/elements/kernels.py",
    "aiocoll/engine/communicator.py",
    "aiocoll/engine/fusion/deferred_completion.py",
    "aiocoll/engine/journal.py",
    "aiocoll/engine/links/channel.py",
    "aiocoll/engine/operations/base.py",
    "aiocoll/engine/operations/composite.py",
    "aiocoll/engine/operations/plan.py",
    "aiocoll/engine/operations/program_executor.py",
    "aiocoll/engine/operations/round.py",
    "aiocoll/engine/operations/shm_ring.py",
    "aiocoll/engine/operations/slot_program.py",
    "aiocoll/engine/operations/slots.py",
    "aiocoll/engine/polling.py",
    "aiocoll/group/dispatch/call_cache.py",
    "aiocoll/group/dispatch/dispatcher.py",
    "aiocoll/group/prepared_call.py",
    "aiocoll/transport/shm/chunk_queue.py",
    "aiocoll/transport/shm/doorbell.py",
    "aiocoll/transport/shm/fence.py",
    "aiocoll/transport/shm/layout.py",
    "aiocoll/transport/shm/link.py",
    "aiocoll/transport/shm/outbox.py",
    "aiocoll/transport/shm/ring.py",
    "aiocoll/transport/shm/slots.py",
    "aiocoll/transport/stream/link.py",
    "aiocoll/work.py",
)
#: In the C code of a class that is generic and no protocol: that there may be weak references to its objects. mypyc 2.4
#: does not clear them, so they would lead to freed memory; without this, Python refuses to make them.
_WEAKLY = re.compile(r"^\s*\.tp_weaklistoffset = sizeof\((?!PyObject\)).*\n", re.MULTILINE)
#: What mypyc needs besides hatchling: the types of NumPy, too.
NEEDS = ["mypy[mypyc]>=2.4", "numpy>=2.0", "setuptools>=77"]


class CompiledWheel(BuildHookInterface[Any]):
    """Adds extension modules to a wheel, which is then one for this Python and platform."""

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Return what the build needs."""
        return NEEDS if _wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, unless what is installed will be the tree itself: there, compiled modules would hide sources."""
        if version == "editable" or not _wanted():
            return
        self._folder = tempfile.TemporaryDirectory(prefix="aiocoll-compiled-")
        folder = Path(self._folder.name)
        shutil.copytree(Path(self.root, "aiocoll"), folder / "aiocoll", ignore=shutil.ignore_patterns("*.pyc"))
        # In a process of its own: mypyc depends on the working folder, and ends the process that it fails in.
        subprocess.run([sys.executable, str(Path(__file__).resolve())], cwd=folder, check=True)
        made = folder / "made"
        build_data["force_include"] |= {
            str(path): str(path.relative_to(made)) for path in made.rglob("*.*") if path.is_file()
        }
        build_data["infer_tag"] = True
        build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder."""
        if self._folder is not None:
            self._folder.cleanup()


def _wanted() -> bool:
    wanted = os.environ.get("AIOCOLL_COMPILED", "0")
    if wanted not in ("0", "1"):
        raise ValueError(f"AIOCOLL_COMPILED={wanted!r}: must be 1 (compile the hot modules) or 0")
    return wanted == "1"


def compile_here() -> None:
    """Compile the package in this folder; the extension modules are put below `made`."""
    import setuptools
    from mypyc.build import mypycify

    extensions = mypycify(
        # `make check` is where types are checked; here, what need not be installed may be missing.
        ["--config-file=", "--ignore-missing-imports", *MODULES],
        only_compile_paths=MODULES,
        target_dir="c",
        group_name="aiocoll",
        opt_level="3",
        debug_level="0",
    )
    for path in Path("c").rglob("*.c"):
        path.write_text(_WEAKLY.sub("", path.read_text()))
    options = {"build_lib": "made", "build_temp": "objects"}
    distribution = setuptools.Distribution({"ext_modules": extensions})
    command = distribution.get_command_obj("build_ext")
    for name, value in options.items():
        setattr(command, name, value)
    distribution.run_command("build_ext")


if __name__ == "__main__":
    compile_here()
