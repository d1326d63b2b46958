"""What the numbers of a benchmark depend on besides the code."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path


def machine(versions: Sequence[str] = ()) -> str:
    """Return it in three lines of Markdown; `versions` are those of what is not in this environment."""
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
        f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}\\\n"
        f"Python {platform.python_version()} · {' · '.join([*here, *there])}\\\n"
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load {' '.join(f'{value:.2f}' for value in os.getloadavg())}"
    )


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
