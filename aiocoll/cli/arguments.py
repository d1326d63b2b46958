"""What the subcommands share: how their help looks, and types of arguments."""

from __future__ import annotations

import argparse
import math
import textwrap

from aiocoll.numerals import parse_float, parse_int

__all__ = ["HelpFormatter", "describe_command", "integer", "natural", "positive", "positives", "seconds"]

#: Exit codes that all subcommands have.
_COMMON = {1: "output could not be written", 2: "the command line is wrong", 130: "interrupted by Ctrl-C"}
#: Columns of an exit code.
_WIDTH = 7


class HelpFormatter(argparse.HelpFormatter):
    """Keeps the lines of a text apart; what stands before a tab is a column of its own."""

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
    """Set the help of a subcommand, which lists its exit codes.

    Args:
        parser: of the subcommand.
        codes: the exit codes that it has besides 2 and 130, and what each means; or that mean something else.
        description: for its own help.
        epilog: the end of its help.
        usage: the first line of its help, if argparse would not write a good one.
    """
    parser.description, parser.epilog = description, epilog
    if usage is not None:
        parser.usage = usage
    every: dict[int | str, str] = {**codes, **{code: what for code, what in _COMMON.items() if code not in codes}}
    lines = [f"{code}\t{meaning}" for code, meaning in every.items()]
    parser.add_argument_group("exit codes", "\n".join(lines))


def integer(text: str) -> int:
    """Return a whole number.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        return parse_int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def natural(text: str) -> int:
    """Return a whole number of at least 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    value = integer(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def positive(text: str) -> int:
    """Return a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    value = integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def positives(text: str) -> tuple[int, ...]:
    """Return whole numbers of at least 1 that are separated by commas.

    Raises:
        argparse.ArgumentTypeError: one of them is none.
    """
    try:
        return tuple(map(positive, text.split(",")))
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}; give numbers separated by commas, like 3,1") from None


def seconds(text: str) -> float:
    """Return a finite number of seconds of at least 0.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = parse_float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be a finite number of seconds, not negative")
    return value
