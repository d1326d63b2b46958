"""Become another program that dies with the process that started it (Linux).

The launcher runs this file by its path, without site packages: ``python -I -S tied.py PID PROGRAM ARG...``. It is a
program of its own because Python code between fork and exec is unsafe in a launcher that has threads.
"""

import ctypes
import os
import signal
import sys

__all__: list[str] = []

_PR_SET_PDEATHSIG = 1


def _main() -> None:
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before we had asked
        os.kill(os.getpid(), signal.SIGKILL)
    os.execv(program[0], program)


if __name__ == "__main__":
    _main()
