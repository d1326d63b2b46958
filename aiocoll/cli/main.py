"""The command `aiocoll` and its subcommands."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Sequence

import numpy as np

import aiocoll
from aiocoll.cli import bench, doctor, run, trace
from aiocoll.cli.arguments import HelpFormatter
from aiocoll.cli.top import command as top
from aiocoll.work import COMPILED

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of this process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="aiocoll",
        description="Collectives you can await.",
        epilog="Each command lists its exit codes: aiocoll COMMAND --help.\n"
        "NO_COLOR=1 turns colours off, FORCE_COLOR=1 turns them on where there is no terminal.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version(), help="show versions, and exit")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run.add_parser(commands)
    bench.add_parser(commands)
    doctor.add_parser(commands)
    top.add_parser(commands)
    trace.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        code: int = args.command(args)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `aiocoll bench --json | head`: whoever reads has enough
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return 0
    return code


def _version() -> str:
    kind = "compiled" if COMPILED else "pure Python"
    return f"aiocoll {aiocoll.__version__} ({kind}), Python {platform.python_version()}, NumPy {np.__version__}"
