"""A report of this machine's software and devices: ``python -m tests.gpu.machine_info FILE`` writes it as JSON.

This runs in a separate process, because a broken driver or library may hang or crash it.
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

from tests.gpu.device_kinds import REAL

#: The oldest usable version of each module.
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
#: Modules of pytest plugins, by the names of their packages' entry points.
PLUGINS = {"asyncio": "pytest_asyncio.plugin", "aiocoll": "aiocoll.testing.plugin"}
#: Requirements of the test steps, in the order of the report. Without those in `VITAL`, no step can run.
VITAL = ("numpy", "msgpack", "arrays", "device")
NEEDED = (*VITAL, "nccl", "ctypes", "ml_dtypes", "pytest", "pytest_asyncio", "uvloop")
#: Optional requirements: a step that needs a missing one is skipped, which is not a failure.
OPTIONAL = (*REAL, "two devices")
#: Requirements that a run on the fake device does not have.
ON_REAL = ("arrays", "device", "nccl", "ctypes", *OPTIONAL)

Found = dict[str, Any]


def describe_machine(note: Callable[[Found], object] = lambda found: None) -> Found:
    """Return a description of the machine; a failed query is replaced by its error message.

    Args:
        note: called with the parts known so far, before each part, because a part may hang or crash the process.
    """
    unknown = {"error": "the query hung, or crashed the process"}
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
        found["modules"][name] = _result_or_error(lambda name=name: _version(name))
    for name, part in parts.items():
        note(found)
        found[name] = _result_or_error(part)
    note(found)
    return found


def missing_parts(found: Mapping[str, Any], fake: bool) -> dict[str, str]:
    """Return the missing requirements of `NEEDED` and `OPTIONAL`, with a reason for each."""
    gone = {}
    for name, oldest in MODULES.items():
        version = found["modules"][name]
        if not isinstance(version, str):
            gone[name] = version["error"]
        elif tuple(map(int, re.findall(r"\d+", version)[: len(oldest)])) < oldest:
            gone[name] = f"{version} is too old; install {'.'.join(map(str, oldest))} or later"
    devices = found["cuda"].get("devices", [])
    if not devices:
        gone["device"] = found["cuda"].get("error") or found["driver"].get("error") or "none found"
    if len(devices) < 2:
        gone["two devices"] = f"{len(devices)} found"
    for name in ("nccl", "ctypes"):
        if "error" in found[name]:
            gone[name] = found[name]["error"]
    if gone.keys() >= {*REAL}:
        gone["arrays"] = "neither CuPy nor torch is installed"
    return {name: gone[name] for name in (*NEEDED, *OPTIONAL) if name in gone and not (fake and name in ON_REAL)}


def plugin_options(found: Mapping[str, Any]) -> list[str]:
    """Return pytest options for plugins whose packages are importable but not installed."""
    gone = [module for name, module in PLUGINS.items() if name not in found["plugins"]]
    return [word for module in gone for word in ("-p", module)]


def format_description(found: Mapping[str, Any]) -> str:
    """Return the machine description as lines of text."""
    modules = [f"{name} {version}" for name, version in found["modules"].items() if isinstance(version, str)]
    lines = [f"Python {found['python']}, {found['executable']}", ", ".join(modules)]
    for name in ("driver", "cuda", "nccl", "ctypes", "interfaces", "settings"):
        shown = found[name]
        lines.append(f"{name}: {', '.join(f'{key} {value}' for key, value in shown.items()) or 'none'}")
    return "\n".join(lines)


def _result_or_error(query: Callable[[], Any]) -> Any:
    try:
        return query()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def _version(name: str) -> str:
    """Return the version of a module by importing it; for torch, which imports slowly, read the package metadata."""
    return metadata.version(name) if name == "torch" else str(importlib.import_module(name).__version__)


def _driver() -> Found:
    """Return the version of the CUDA driver and its device count, without CuPy."""
    import ctypes

    driver = ctypes.CDLL("libcuda.so.1")
    number, count = ctypes.c_int(), ctypes.c_int()
    if status := driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(number)):
        raise OSError(f"libcuda returned status {status}")
    driver.cuDeviceGetCount(ctypes.byref(count))
    return {"version": number.value, "devices": count.value}


def _cuda() -> Found:
    """Return the CUDA runtime and devices that groups would use, through CuPy or ctypes."""
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
    """Return the versions of the CUDA driver and of NCCL by ctypes, even if CuPy is installed."""
    from aiocoll.gpu.provider import by_ctypes

    cuda, nccl, why = by_ctypes()
    if nccl is None:
        raise ImportError(why)
    return {"driver": cuda.version(), "nccl": nccl.version()}


def _interfaces() -> Found:
    """Return the state of each network interface; raise an error if the loopback does not work."""
    found = {name: _interface_state(name) for _, name in socket.if_nameindex()}
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()[:2], 5):
        return {**found, "127.0.0.1": "answers"}


def _interface_state(name: str) -> str:
    try:
        return Path(f"/sys/class/net/{name}/operstate").read_text().strip()
    except OSError:
        return "unknown"


if __name__ == "__main__":
    describe_machine(lambda found: Path(sys.argv[1]).write_text(json.dumps(found)))
