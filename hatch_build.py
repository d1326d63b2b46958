"""Build hook of hatch: compiles the accelerator in C for the wheel, unless `AIOCOLL_NATIVE` is 0; see `docs/native.md`.

Run as a program, it builds the accelerator in place; with the argument `layout` it prints `layout.h`.
"""

from __future__ import annotations

import os
import platform
import runpy
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

#: Path of the extension module in the source tree and in the wheel. The name fits all versions of Python from 3.11 on.
MODULE = Path("aiocoll/native/_core.abi3.so")
#: Compiler flags. With --no-as-needed, auditwheel finds the module's C library even if the module uses little of it.
FLAGS = shlex.split(
    "-std=c11 -O3 -fPIC -fvisibility=hidden -pthread -shared -Wl,--no-as-needed"
    " -Wall -Wextra -Wno-unused-parameter -Wno-missing-field-initializers"
    " -DPy_LIMITED_API=0x030b0000"
    " -DNPY_TARGET_VERSION=NPY_2_0_API_VERSION -DNPY_NO_DEPRECATED_API=NPY_2_0_API_VERSION"
)


class NativeWheel(BuildHookInterface[Any]):
    """A build hook that adds the extension module to the wheel, which then fits one platform only."""

    _folder: TemporaryDirectory[str] | None = None

    def dependencies(self) -> list[str]:
        """Return the requirements of the build: NumPy, for its headers, if the accelerator can be compiled."""
        return ["numpy>=2.0"] if _wanted() != "0" and not obstacle() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the extension module; for an editable install, into the source tree."""
        root, wanted = Path(self.root), _wanted()
        if version == "editable":
            target = root / MODULE
            target.unlink(missing_ok=True)
        else:
            self._folder = TemporaryDirectory(prefix="aiocoll-native-")
            target = Path(self._folder.name, MODULE.name)
        if wanted == "0":
            return
        try:
            build(root, target)
        except (ImportError, OSError, RuntimeError) as error:
            if wanted == "1":
                raise RuntimeError(f"AIOCOLL_NATIVE=1, but the accelerator cannot be built: {error}") from error
            self.app.display_warning(f"aiocoll is built in pure Python: {error}")
            return
        if version != "editable":
            build_data["force_include"][str(target)] = MODULE.as_posix()
            build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_')}"
            build_data["pure_python"] = False

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the temporary folder with the compiled module."""
        if self._folder is not None:
            self._folder.cleanup()


def _wanted() -> str | None:
    wanted = os.environ.get("AIOCOLL_NATIVE")
    if wanted not in (None, "0", "1"):
        raise ValueError(
            f"AIOCOLL_NATIVE={wanted!r}: must be 1 (build the accelerator in C, or fail) or 0 (do not build it)"
        )
    return wanted


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def obstacle() -> str:
    """Return why the accelerator cannot be compiled for this interpreter; "" if it can."""
    if sys.platform != "linux" or sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "it requires CPython on Linux, and not a free-threaded build"
    if shutil.which(_compiler()[0]) is None:
        return f"there is no C compiler {_compiler()[0]!r}; install one (gcc), or set CC"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return f"there is no Python.h in {sysconfig.get_path('include')}; install the headers (python3-dev)"
    return ""


def layout_header(root: Path) -> str:
    """Return the content of `layout.h`: the constants of `aiocoll/native/layout.py` as C macros."""
    names = runpy.run_path(str(root / MODULE.with_name("layout.py")))
    lines = [f"#define LAYOUT_{name} {names[name]}" for name in names["__all__"]]
    every = " ".join(f"X({name})" for name in names["__all__"])
    return "\n".join(["/* Generated from layout.py. */", *lines, f"#define LAYOUT_NUMBERS(X) {every}", ""])


def build(root: Path, target: Path) -> None:
    """Compile all C files of the accelerator into an extension module.

    Raises:
        RuntimeError: there is no compiler, or it failed.
    """
    if reason := obstacle():
        raise RuntimeError(reason)
    import numpy

    sources = sorted((root / MODULE).parent.glob("*.c"))
    with TemporaryDirectory(prefix="aiocoll-layout-") as folder:
        Path(folder, "layout.h").write_text(layout_header(root))
        built_with = f'-DBUILT_WITH="Python {platform.python_version()}, NumPy {numpy.__version__}"'
        includes = ["-isystem", sysconfig.get_path("include"), "-isystem", numpy.get_include(), "-I", folder]
        flags = [*FLAGS, built_with, *includes, *shlex.split(os.environ.get("CFLAGS", ""))]
        command = [*_compiler(), *flags, "-o", str(target), *map(str, sources)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the compiler failed: {shlex.join(command)}\n{done.stderr}")
    sys.stderr.write(done.stderr)


if __name__ == "__main__" and sys.argv[1:] == ["layout"]:
    sys.stdout.write(layout_header(Path(__file__).parent))
elif __name__ == "__main__":
    build(Path(__file__).parent, Path(__file__).parent / MODULE)
