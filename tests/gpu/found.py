"""What there is for `run.py`, and what of it is missing: ``python -m tests.gpu.found FILE`` writes the first as JSON.

It is a process of its own, since what is looked at may hang, or end the process.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.gpu.kinds import REAL

#: Modules, and the oldest version that will do.
MODULES = {
    "numpy": (2,),
    "msgpack": (1, 2),
    "ml_dtypes": (0, 5),
    "pytest": (9,),
    "pytest_asyncio": (1, 5),
    "uvloop": (0, 21),
    "cupy": (14,),
    "torch": (2,),
}
#: pytest's plugins: the module of each, by the name that it has where its package is installed.
PLUGINS = {"asyncio": "pytest_asyncio.plugin", "aiocoll": "aiocoll.testing.plugin"}
#: What a step may need, in the order in which it is told; without those of the first line there is nothing to be run.
VITAL = ("numpy", "msgpack", "arrays", "device")
NEEDED = (*VITAL, "nccl", "ctypes", "ml_dtypes", "pytest", "pytest_asyncio", "uvloop")
#: What may be missing: steps are left out for it, and that is no failure.
OPTIONAL = (*REAL, "two devices")
#: What is played where the device is.
ON_REAL = ("arrays", "device", "nccl", "ctypes", *OPTIONAL)

Found = dict[str, Any]


def look(note: Callable[[Found], object] = lambda found: None) -> Found:
    """Return what there is; each part that cannot be found out is an error in words.

    Args:
        note: called with what is known by now, before each part: it may hang, or end the process.
    """
    unknown = {"error": "looking for it has hung, or ended the process"}
    found: Found = {
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "plugins": [entry.name for entry in metadata.entry_points(group="pytest11")],
        "settings": {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("NCCL_", "CUDA_"))},
        "modules": dict.fromkeys(MODULES, unknown),
    }
    parts: dict[str, Callable[[], Any]] = {
        "interfaces": _interfaces, "driver": _driver, "cuda": _cuda, "nccl": _nccl, "ctypes": _ctypes
    }  # fmt: skip
    found |= dict.fromkeys(parts, unknown)
    for name in MODULES:
        note(found)
        found["modules"][name] = _tried(lambda name=name: _version(name))
    for name, part in parts.items():
        note(found)
        found[name] = _tried(part)
    note(found)
    return found


def missing(found: Mapping[str, Any], fake: bool) -> dict[str, str]:
    """Return what is missing, and why, by the names of `NEEDED` and `OPTIONAL`."""
    gone = {}
    for name, oldest in MODULES.items():
        version = found["modules"][name]
        if not isinstance(version, str):
            gone[name] = version["error"]
        elif tuple(map(int, re.findall(r"\d+", version)[: len(oldest)])) < oldest:
            gone[name] = f"{version} is too old, it must be {'.'.join(map(str, oldest))} or later"
    devices = found["cuda"].get("devices", [])
    if not devices:
        gone["device"] = found["cuda"].get("error") or found["driver"].get("error") or "there is none"
    if len(devices) < 2:
        gone["two devices"] = f"there {'is 1' if devices else 'is none'}"
    for name in ("nccl", "ctypes"):
        if "error" in found[name]:
            gone[name] = found[name]["error"]
    if gone.keys() >= {*REAL}:
        gone["arrays"] = "there is neither CuPy nor torch"
    return {name: gone[name] for name in (*NEEDED, *OPTIONAL) if name in gone and not (fake and name in ON_REAL)}


def plugins(found: Mapping[str, Any]) -> list[str]:
    """Return what pytest has to be told so that it finds plugins whose packages are not installed, but only there."""
    gone = [module for name, module in PLUGINS.items() if name not in found["plugins"]]
    return [word for module in gone for word in ("-p", module)]


def told(found: Mapping[str, Any]) -> str:
    """Return what there is, in lines."""
    modules = [f"{name} {version}" for name, version in found["modules"].items() if isinstance(version, str)]
    lines = [f"Python {found['python']}, {found['executable']}", ", ".join(modules)]
    for name in ("driver", "cuda", "nccl", "ctypes", "interfaces", "settings"):
        shown = found[name]
        lines.append(f"{name}: {', '.join(f'{key} {value}' for key, value in shown.items()) or 'none'}")
    return "\n".join(lines)


def _tried(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def _version(name: str) -> str:
    """Return the version of a module that can be imported; of torch, which takes long, that of its package."""
    return metadata.version(name) if name == "torch" else str(importlib.import_module(name).__version__)


def _driver() -> Found:
    """Ask the driver, without CuPy."""
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    number, count = ctypes.c_int(), ctypes.c_int()
    if status := driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(number)):
        raise OSError(f"the driver says {status}")
    driver.cuDeviceGetCount(ctypes.byref(count))
    return {"version": number.value, "devices": count.value}


def _cuda() -> Found:
    """Ask CUDA as groups do: by CuPy, or without it by ctypes."""
    from aiocoll.gpu.provider import runtime

    made, _ = runtime()
    ordinals = range(made.device_count())
    return {
        "by": type(made).__module__.rpartition(".")[2],
        "runtime": made.version(),
        "devices": [f"{made.bus_id(each)} ({'.'.join(map(str, made.capability(each)))})" for each in ordinals],
    }


def _nccl() -> Found:
    from aiocoll.gpu.provider import missing_nccl_reason, runtime

    _, made = runtime()
    if made is None:
        raise ImportError(missing_nccl_reason())
    return {"version": made.version()}


def _ctypes() -> Found:
    """Ask both by ctypes, also where there is CuPy."""
    from aiocoll.gpu.provider import by_ctypes

    cuda, nccl, why = by_ctypes()
    if nccl is None:
        raise ImportError(why)
    return {"driver": cuda.version(), "nccl": nccl.version()}


def _interfaces() -> Found:
    """Return the network interfaces, and whether processes of this machine can talk by the loopback."""
    found = {name: _state(name) for _, name in socket.if_nameindex()}
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()[:2], 5):
        return {**found, "127.0.0.1": "answers"}


def _state(name: str) -> str:
    try:
        return Path(f"/sys/class/net/{name}/operstate").read_text().strip()
    except OSError:
        return "unknown"


if __name__ == "__main__":
    look(lambda found: Path(sys.argv[1]).write_text(json.dumps(found)))
