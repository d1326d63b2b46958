"""Description of the machine, versions and load, on which the figures of a benchmark depend."""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from aiocoll.machine_load import LoadMeter, MachineLoad, usable_cores

#: Seconds for which the load is measured.
INTERVAL = 1.0


def measured_load() -> MachineLoad:
    """Measure the CPU load of the machine for a second before the benchmark."""
    meter = LoadMeter()
    time.sleep(INTERVAL)
    return meter.lap()


def machine(versions: Sequence[str] = (), load: MachineLoad | None = None) -> str:
    """Return three lines of Markdown: processor and system, versions, time and load.

    Args:
        versions: versions of packages in other environments.
        load: load of the machine before the benchmark; measured by default.
    """
    load = measured_load() if load is None else load
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    here = [f"{name} {version}" for name in ("aiocoll", "numpy", "uvloop") if (version := _version(name))]
    there = versions or [f"torch {version}" for version in [_version("torch")] if version]
    return (
        f"{model}, {len(usable_cores())} cores, {platform.system()} {platform.release()}\\\n"
        f"Python {platform.python_version()} · {' · '.join([*here, *there])}\\\n"
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC; load: {load}"
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
