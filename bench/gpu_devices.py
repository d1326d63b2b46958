"""Choice of the device for benchmarks of CUDA arrays: a real one, with CuPy or torch arrays, or the fake device."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.gpu.on_device.worlds import REAL, missing

__all__ = ["add_arguments", "choose_kind"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options --fake and --kind to a parser."""
    parser.add_argument("--fake", action="store_true", help="measure on the fake device")
    parser.add_argument("--kind", choices=REAL, help="library of the arrays (default: CuPy if available, else torch)")


def choose_kind(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """Return the chosen kind of device and arrays; end the program if it is not available."""
    kind = "fake" if args.fake else args.kind or next((each for each in REAL if not missing(each)), REAL[0])
    if reason := missing(kind):
        parser.exit(2, f"{reason}: nothing was measured; pass --fake to measure on the fake device\n")
    return str(kind)
