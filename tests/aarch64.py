"""The check of `make dist-aarch64`: the wheel for aarch64 works in Debian's Python for aarch64, under qemu-user.

It needs only the standard library, Debian's apt, and qemu-aarch64. It installs nothing: packages are unpacked in a
temporary folder. All ranks are tasks of one process, since qemu-user starts no other program.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_27_aarch64", "manylinux2014_aarch64")
PROGRAM = """
import asyncio, platform
import numpy as np
import aiocoll
from aiocoll.native import describe_implementation
from aiocoll.testing import run_ranks

async def program(pg):
    for count in (1, 1000, 100_000):
        assert (await pg.allreduce(np.full(count, pg.rank() + 1.0)) == 3).all()
    await pg.barrier()

for transport in ("auto", "unix", "shm"):
    asyncio.run(run_ranks(2, program, options=aiocoll.GroupOptions(transport=transport)))
print(platform.machine(), describe_implementation())
"""


def apt(folder: Path, *arguments: str) -> None:
    """Run apt-get for aarch64 packages, with its state and cache below `folder`."""
    state = folder / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (state / name).mkdir(parents=True, exist_ok=True)
    (state / "status").touch()
    options = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "root",
        "Dir::State": state,
        "Dir::State::Lists": state / "lists",
        "Dir::State::status": state / "status",
        "Dir::Cache": state / "cache",
    }
    given = [text for name, value in options.items() for text in ("-o", f"{name}={value}")]
    subprocess.run(["apt-get", "--quiet", *given, *arguments], check=True, stdout=subprocess.DEVNULL)


def python(folder: Path) -> Path:
    """Unpack Debian's Python for aarch64; return its path."""
    apt(folder, "update")
    apt(folder, "install", "--yes", "--no-install-recommends", "--download-only", "python3", "libatomic1", "libstdc++6")
    for package in (folder / "apt/cache/archives").glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(package), str(folder / "root")], check=True)
    return next((folder / "root/usr/bin").glob("python3.[0-9]*"))


def packages(folder: Path, version: str, wheel: Path) -> Path:
    """Unpack the wheel, and its dependencies from the package index; return the folder with both."""
    platforms = [text for each in PLATFORMS for text in ("--platform", each)]
    options = ["--quiet", "--only-binary", ":all:", "--no-deps", "--python-version", version, *platforms]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder / "wheels")]
    subprocess.run([*command, "numpy", "msgpack", "uvloop"], check=True)
    for path in (wheel, *(folder / "wheels").iterdir()):
        with zipfile.ZipFile(path) as archive:
            archive.extractall(folder / "site")
    return folder / "site"


def main(wheel: str) -> None:
    """Run the test program under qemu with aarch64's Python and the wheel."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        interpreter = python(folder)
        site = packages(folder, interpreter.name.removeprefix("python"), Path(wheel).resolve())
        variables = {"PYTHONHOME": folder / "root/usr", "PYTHONPATH": site, "AIOCOLL_NATIVE": 1}
        given = [text for name, value in variables.items() for text in ("-E", f"{name}={value}")]
        command = ["qemu-aarch64", "-L", str(folder / "root"), *given, str(interpreter), "-W", "error", "-c", PROGRAM]
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AIOCOLL"))}
        done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
        assert done.stdout.startswith("aarch64 native "), done.stdout
        print(f"{Path(wheel).name}: {done.stdout}", end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
