"""Argument types that several subcommands share."""

from __future__ import annotations

import argparse

from aiocoll.numerals import parse_int

__all__ = ["integer", "natural", "positive", "positives"]


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
