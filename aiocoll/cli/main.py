"""The command `aiocoll` and its subcommands."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence

import numpy as np

import aiocoll
from aiocoll.cli.arguments import CommandParser, HelpFormatter
from aiocoll.cli.sink import CommandOutput, OutputLostError
from aiocoll.cli.terminal import print_error
from aiocoll.errors import BackendUnavailableError
from aiocoll.native import IMPLEMENTATION
from aiocoll.plugins import commands

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the subcommand that a command line names.

    Args:
        argv: the arguments; by default those of this process.

    Returns:
        The exit code; it is not 0 if output was lost.
    """
    with CommandOutput() as output:
        try:
            code = _run(argv)
        except SystemExit as end:  # argparse has printed something
            raise SystemExit(output.exit_code(end.code) if isinstance(end.code, int) else end.code) from None
        except KeyboardInterrupt:
            code = 130
        except OutputLostError:
            code = 0
        return output.exit_code(code)


def _run(argv: Sequence[str] | None) -> int:
    parser = CommandParser(
        prog="aiocoll",
        description="Collectives you can await.",
        epilog="Each command lists its exit codes: aiocoll COMMAND --help.\n"
        "NO_COLOR=1 turns colours off, FORCE_COLOR=1 turns them on where there is no terminal.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version(), help="show versions, and exit")
    try:
        _add_commands(parser, sys.argv[1:] if argv is None else argv)
    except BackendUnavailableError as error:
        print_error("", error)
        return 1
    args = parser.parse_args(argv)
    code: int = args.command(args)
    return code


def _add_commands(parser: argparse.ArgumentParser, argv: Sequence[str]) -> None:
    """Add all subcommands with their help lines, but add arguments only for the subcommand that `argv` names."""
    chosen = next((word for word in argv if not word.startswith("-")), None)
    listed = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    if chosen is None or chosen not in commands:
        for error in commands.discover():
            print_error("", error)
    for name in commands.names():
        command = commands.get(name)
        subparser = listed.add_parser(name, help=command.help, formatter_class=HelpFormatter)
        if name == chosen:
            command.add_arguments(subparser)


def _version() -> str:
    return (
        f"aiocoll {aiocoll.__version__} ({IMPLEMENTATION}), Python {platform.python_version()}, NumPy {np.__version__}"
    )
