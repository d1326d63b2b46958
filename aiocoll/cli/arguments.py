"""Command-line parsing for all subcommands: the parser, the format of help texts, and argument types."""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from aiocoll.numerals import parse_float, parse_int

__all__ = [
    "CommandParser",
    "HelpFormatter",
    "describe_command",
    "integer",
    "natural_number",
    "positive",
    "positives",
    "seconds",
]

#: Exit codes that all subcommands share, with their default meanings.
_COMMON = {1: "output could not be written", 2: "the command line is wrong", 130: "interrupted by Ctrl-C"}
#: Width of the column of exit codes in help texts.
_WIDTH = 7


class CommandParser(argparse.ArgumentParser):
    """An argument parser for one subcommand. Its error messages point to the --help option of the subcommand."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Parse the arguments; report an unknown argument with the usage of this subcommand, not of `aiocoll`."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown argument{'s' * (len(unknown) > 1)}: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Print the usage and the error, and exit with code 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"{self.prog}: error: {message}\n{self.prog} --help lists all arguments\n")


class HelpFormatter(argparse.HelpFormatter):
    """A help formatter that keeps line breaks. In a line with a tab, the text before the tab is a left column."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(_wrapped(line, width, indent) for line in text.splitlines())


def _wrapped(line: str, width: int, indent: str) -> str:
    column, tab, words = line.rpartition("\t")
    first = indent + (column.ljust(_WIDTH) if tab else "")
    return textwrap.fill(words, width, initial_indent=first, subsequent_indent=" " * len(first))


def describe_command(
    parser: argparse.ArgumentParser,
    *,
    codes: dict[int | str, str],
    description: str,
    epilog: str | None = None,
    usage: str | None = None,
) -> None:
    """Set the help of a subcommand, including its exit codes.

    Args:
        parser: the parser of the subcommand.
        codes: its exit codes with their meanings. Codes 1, 2 and 130 have default meanings.
        description: the description in its help.
        epilog: the last paragraph of its help.
        usage: the usage line, if argparse would not write a good one.
    """
    parser.description, parser.epilog = description, epilog
    if usage is not None:
        parser.usage = usage
    meanings: dict[int | str, str] = {**codes, **{code: text for code, text in _COMMON.items() if code not in codes}}
    lines = [f"{code}\t{meaning}" for code, meaning in meanings.items()]
    parser.add_argument_group("exit codes", "\n".join(lines))


def integer(text: str) -> int:
    """Parse a command-line argument that is a whole number.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    try:
        return parse_int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def natural_number(text: str) -> int:
    """Parse a command-line argument that is a whole number of at least 0.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    value = integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative; give a number of at least 0")
    return value


def positive(text: str) -> int:
    """Parse a command-line argument that is a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    value = integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number; give at least 1")
    return value


def positives(text: str) -> tuple[int, ...]:
    """Parse a command-line argument that lists whole numbers of at least 1, separated by commas.

    Raises:
        argparse.ArgumentTypeError: a part of the text is not such a number.
    """
    try:
        return tuple(map(positive, text.split(",")))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; give numbers separated by commas, like 3,1") from None


def seconds(text: str) -> float:
    """Parse a command-line argument that is a finite number of seconds, at least 0.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    try:
        value = parse_float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a finite number of seconds, at least 0")
    return value
