"""What the benchmarks of CUDA arrays run on: a real device, with arrays of CuPy or of torch, or the fake one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.gpu.on_device.worlds import REAL, missing

__all__ = ["add_arguments", "chosen"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Let the command line choose."""
    parser.add_argument("--fake", action="store_true", help="measure on the fake device")
    parser.add_argument("--kind", choices=REAL, help="what arrays are of (default: CuPy where it is, else torch)")


def chosen(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return the kind of world that was chosen; where there is none, end the program."""
    kind = "fake" if args.fake else args.kind or next((each for each in REAL if not missing(each)), REAL[0])
    if reason := missing(kind):
        parser.exit(2, f"{reason}: nothing was measured. On the fake device: --fake\n")
    return str(kind)
