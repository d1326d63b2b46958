"""A starter of two NCCL ranks on one device for tests: NCCL treats their processes as two hosts.

``python -m tests.gpu.on_device.two MODULE HOW KIND FOLDER`` starts both ranks, each as ``python -m
tests.gpu.on_device.MODULE HOW KIND MEETING RANK``. If a rank does not end as expected, the command fails and shows the
log of NCCL. FOLDER always gets the logs of `raw`. The variable `TWO_BY` selects the setting that lets NCCL do this.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from .delegate import Delegate

#: NCCL's environment variables for both ranks, whichever of `WAYS` is used.
TWO_HOSTS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_CUMEM_ENABLE": "0",
}
#: The environment variable that selects one of `WAYS`: a different host id per rank, or a setting of NCCL 2.30.
TWO_BY = "GPU_TWO_BY"
WAYS = ("hostid", "multi-rank")
#: The first NCCL version with a setting that allows several ranks per device.
MULTI_RANK = 23000
#: The timeout of both ranks in seconds: shorter than the time limit of the step, so that the output names the hung
#: rank.
LIMIT = 45.0
#: The maximum time in seconds for a rank to end after its peer has failed, and the polling interval.
GRACE, CHECK_EVERY = 10.0, 0.1
#: The maximum time in seconds for a hung rank to write the stacks of its threads.
STACK_SECONDS = 3.0


#: The number of lines to print from each rank's NCCL log after a failure.
SHOWN = 40


def rank_settings(rank: int, by: str) -> dict[str, str]:
    """Return the NCCL environment variables of a rank."""
    if by == WAYS[0]:
        return {**TWO_HOSTS, "NCCL_HOSTID": f"rank{rank}"}
    return {**TWO_HOSTS, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def way_for_version(version: int) -> str:
    """Return the way to run two ranks on one device that this NCCL version supports."""
    return WAYS[version >= MULTI_RANK]


class PosingCuda(Delegate):
    """A wrapper of CUDA with a different bus id per rank; with equal ids, aiocoll would stage the calls.

    Attributes:
        staged: the number of copies to the host.
    """

    def __init__(self, cuda: Any, rank: int) -> None:
        super().__init__(cuda)
        self._rank = rank
        self.staged = 0

    def bus_id(self, device: int) -> str:
        return f"{self._other.bus_id(device)}/{self._rank}"

    def copy_to_host(self, *args: Any) -> None:
        self.staged += 1
        self._other.copy_to_host(*args)


def nccl_log(meeting: Path, rank: int) -> Path:
    """Return the path of a rank's NCCL log."""
    return meeting / f"nccl-rank{rank}.txt"


def run_pair(module: str, how: str, kind: str, meeting: Path, expected: Sequence[int]) -> list[int]:
    """Run the processes of both ranks; return their exit codes.

    A negative code is the number of a signal: SIGABRT for a rank that hung.
    """
    words = (sys.executable, "-m", f"tests.gpu.on_device.{module}", how, kind, str(meeting))
    by = os.environ.get(TWO_BY, WAYS[0])
    ranks = []
    for rank in range(2):
        logging = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(nccl_log(meeting, rank)), "PYTHONFAULTHANDLER": "1"}
        ranks.append(subprocess.Popen([*words, str(rank)], env={**os.environ, **rank_settings(rank, by), **logging}))
    try:
        _wait(ranks, expected)
    finally:
        hung = [process for process in ranks if process.poll() is None]
        for process in hung:
            process.send_signal(signal.SIGABRT)
        for process in hung:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STACK_SECONDS)
            process.kill()
    return [process.wait() for process in ranks]


def _wait(ranks: Sequence[subprocess.Popen[bytes]], expected: Sequence[int]) -> None:
    """Wait for both processes; after a failure, wait only briefly for the other process."""
    end = monotonic() + LIMIT
    while any(process.poll() is None for process in ranks) and monotonic() < end:
        for process, code in zip(ranks, expected, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(CHECK_EVERY) != code:
                    end = min(end, monotonic() + GRACE)


def main(module: str, how: str, kind: str, folder: str) -> str | None:
    """Run both ranks; return a message that names the failed ranks, or None."""
    expected = [0, -signal.SIGKILL if how == "killed" else 0]
    with tempfile.TemporaryDirectory() as name:
        meeting = Path(name)
        codes = run_pair(module, how, kind, meeting, expected)
        for rank in range(2):
            file = nccl_log(meeting, rank)
            if not file.exists():
                continue
            if codes != expected:
                print(f"rank {rank}, NCCL:", *file.read_text(errors="replace").splitlines()[-SHOWN:], sep="\n  ")
            if module == "raw":
                shutil.copy(file, folder)
    failures = [
        f"rank {rank} {_ending(code)}"
        for rank, (code, right) in enumerate(zip(codes, expected, strict=True))
        if code != right
    ]
    return f"{module}, {how}: {', '.join(failures)}" if failures else None


def _ending(code: int) -> str:
    if code == -signal.SIGABRT:
        return "hung"
    if code == 0:
        return "ended with code 0"
    return f"ended with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
