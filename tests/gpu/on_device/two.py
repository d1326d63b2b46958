"""Two ranks of NCCL on one device: two processes that look like two hosts to it, and talk by sockets. For tests only.

``python -m tests.gpu.on_device.two MODULE HOW KIND FOLDER`` starts both ranks, each as ``python -m
tests.gpu.on_device.MODULE HOW KIND MEETING RANK``. If one does not end as it should, it fails, and shows what NCCL has
said; of `raw`, that is kept in FOLDER, however it ends. `TWO_BY` chooses what lets NCCL do it.
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

from .through import Through

#: What both ranks need, whatever lets NCCL do it.
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
#: The variable that says by what: a name of its own for each rank's host, or the setting that NCCL has since 2.30.
TWO_BY = "GPU_TWO_BY"
WAYS = ("hostid", "multi-rank")
#: The version that brought the latter.
MULTI_RANK = 23000
#: Seconds that both ranks have together: less than the step, so that it is told which of them hangs.
LIMIT = 45.0
#: Seconds that a rank has when the other has failed, and between two looks at them.
GRACE, LOOK = 10.0, 0.1
#: Seconds that a rank has to write the stacks of its threads.
LAST_WORDS = 3.0


#: Lines of NCCL's that are shown of each rank when something went wrong.
SHOWN = 40


def settings(rank: int, by: str) -> dict[str, str]:
    """Return what one rank needs in its environment."""
    if by == WAYS[0]:
        return {**TWO_HOSTS, "NCCL_HOSTID": f"rank{rank}"}
    return {**TWO_HOSTS, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}


def way(version: int) -> str:
    """Return what lets this version of NCCL do it."""
    return WAYS[version >= MULTI_RANK]


class Posing(Through):
    """CUDA whose device says that it is another: else ranks of one device are staged.

    Attributes:
        staged: how often something was copied to the host.
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


def said(meeting: Path, rank: int) -> Path:
    """Return where NCCL of a rank writes."""
    return meeting / f"nccl-rank{rank}.txt"


def pair(module: str, how: str, kind: str, meeting: Path, expected: Sequence[int]) -> list[int]:
    """Run both ranks; return how they ended: exit codes, or minus a signal's number; SIGABRT is for one that hung."""
    words = (sys.executable, "-m", f"tests.gpu.on_device.{module}", how, kind, str(meeting))
    by = os.environ.get(TWO_BY, WAYS[0])
    ranks = []
    for rank in range(2):
        loud = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(said(meeting, rank)), "PYTHONFAULTHANDLER": "1"}
        ranks.append(subprocess.Popen([*words, str(rank)], env={**os.environ, **settings(rank, by), **loud}))
    try:
        _wait(ranks, expected)
    finally:
        hung = [process for process in ranks if process.poll() is None]
        for process in hung:
            process.send_signal(signal.SIGABRT)
        for process in hung:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LAST_WORDS)
            process.kill()
    return [process.wait() for process in ranks]


def _wait(ranks: Sequence[subprocess.Popen[bytes]], expected: Sequence[int]) -> None:
    """Wait for both; not long for one whose peer has failed."""
    end = monotonic() + LIMIT
    while any(process.poll() is None for process in ranks) and monotonic() < end:
        for process, code in zip(ranks, expected, strict=True):
            with contextlib.suppress(subprocess.TimeoutExpired):
                if process.wait(LOOK) != code:
                    end = min(end, monotonic() + GRACE)


def main(module: str, how: str, kind: str, folder: str) -> str | None:
    """Run both; return what went wrong."""
    expected = [0, -signal.SIGKILL if how == "killed" else 0]
    with tempfile.TemporaryDirectory() as name:
        meeting = Path(name)
        codes = pair(module, how, kind, meeting, expected)
        for rank in range(2):
            file = said(meeting, rank)
            if not file.exists():
                continue
            if codes != expected:
                print(f"rank {rank}, NCCL:", *file.read_text(errors="replace").splitlines()[-SHOWN:], sep="\n  ")
            if module == "raw":
                shutil.copy(file, folder)
    told = [
        f"rank {rank} {_ending(code)}"
        for rank, (code, right) in enumerate(zip(codes, expected, strict=True))
        if code != right
    ]
    return f"{module}, {how}: {', '.join(told)}" if told else None


def _ending(code: int) -> str:
    if code == -signal.SIGABRT:
        return "hung"
    if code == 0:
        return "ended as if all were well"
    return f"ended with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
