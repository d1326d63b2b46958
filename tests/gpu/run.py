"""All that needs a GPU, in under 8 minutes: ``make gpu``, or ``python tests/gpu/run.py [--fake] [FOLDER]``.

Every part has a time limit of its own, and what it leaves running is killed. The Python that runs this must have the
development packages, CuPy, NCCL and, for tensors, torch; nothing is installed. Figures are written to FOLDER (default:
``gpu-figures``), one JSON object a line. ``--fake`` runs the same parts on the fake device, to see that they run.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
#: Seconds for everything.
WHOLE = 470.0
PACKAGES = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "torch", "pytest")
#: Without these NCCL would open a port, and CUDA load kernels while others run, for which it waits for them.
ENVIRONMENT = {"NCCL_RAS_ENABLE": "0", "CUDA_MODULE_LOADING": "EAGER", "NCCL_DEBUG": "WARN"}


class Part(NamedTuple):
    """One process.

    Attributes:
        name: of the part.
        limit: seconds it may take.
        words: what to run, behind the name of the Python.
    """

    name: str
    limit: float
    words: Sequence[str]


def parts(fake: bool, folder: Path) -> list[Part]:
    """Return what is to be run, in order."""
    chosen = ("-m", "not gpu") if fake else ("-m", "gpu")
    limits = {"calls": 100, "streams": 50, "loop": 60, "failures": 70, "processes": 110}
    found = [
        Part(
            name,
            limit,
            (
                *("-m", "pytest", "-q", "-W", "default", *chosen, "-o", "faulthandler_timeout=45", "--durations=3"),
                f"tests/gpu/on_device/test_{name}.py",
            ),
        )
        for name, limit in limits.items()
    ]
    bench = ("bench/gpu.py", "--quick", *(("--fake",) if fake else ()), "--output", str(folder / "RESULTS-gpu.md"))
    return [*found, Part("bench", 80, bench)]


def versions() -> str:
    """Return what is installed, and what CUDA and NCCL say of themselves."""
    found = [f"Python {sys.version.split()[0]}"]
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    code = (
        "from aiocoll.gpu.provider import runtime\n"
        "cuda, nccl = runtime()\n"
        "print('CUDA', cuda.version(), 'devices', [cuda.bus_id(each) for each in range(cuda.device_count())],"
        " 'NCCL', nccl and nccl.version())"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found.append((asked.stdout or asked.stderr).strip().splitlines()[-1])
    return " · ".join(found)


def carry_out(part: Part, limit: float, environment: dict[str, str]) -> str:
    """Run a part; return how it ended."""
    print(f"\n== {part.name}, at most {limit:.0f} s", flush=True)
    start = monotonic()
    with subprocess.Popen([sys.executable, *part.words], cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # it and what it has left
                os.killpg(process.pid, signal.SIGKILL)
    took = f"{monotonic() - start:.0f} s"
    return f"HUNG, killed after {took}" if code is None else f"passed, {took}" if code == 0 else f"FAILED, {took}"


def main() -> int:
    parser = argparse.ArgumentParser(description="All that needs a GPU, in under 8 minutes.")
    parser.add_argument("folder", nargs="?", default="gpu-figures", type=Path, help="for the figures")
    parser.add_argument("--fake", action="store_true", help="run the same parts on the fake device")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    devices = importlib.import_module("aiocoll.testing.skips")._gpus()
    if not devices and not args.fake:
        print("There is no CUDA device: nothing was run. See that it runs: python tests/gpu/run.py --fake")
        return 2
    end = monotonic() + WHOLE
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    figures = folder / "figures.jsonl"
    figures.unlink(missing_ok=True)
    environment = os.environ | ENVIRONMENT | {"GPU_FIGURES": str(figures), "PYTHONPATH": str(ROOT)}
    print("The fake device: nothing here says anything of a real one." if args.fake else versions(), flush=True)
    ended = {}
    for part in parts(args.fake, folder):
        left = end - monotonic()
        ended[part.name] = carry_out(part, min(part.limit, left), environment) if left > 5 else "no time was left"
    print("\n== figures")
    for line in figures.read_text().splitlines() if figures.exists() else ():
        found = json.loads(line)
        print(f"{found['world']}: {found['name']}: {found['value']}")
    print("\n== ended")
    for name, how in ended.items():
        print(f"{name}: {how}")
    return int(not all(how.startswith("passed") for how in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
