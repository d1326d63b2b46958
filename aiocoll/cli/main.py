"""The command `aiocoll` and its subcommands."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from aiocoll.cli import bench, doctor, run, trace

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv`, by default that of this process.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(prog="aiocoll", description="Collectives you can await.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run.add_parser(commands)
    bench.add_parser(commands)
    doctor.add_parser(commands)
    trace.add_parser(commands)
    args = parser.parse_args(argv)
    code: int = args.command(args)
    return code
