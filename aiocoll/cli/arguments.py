"""Argument types that several subcommands share."""

from __future__ import annotations

import argparse

from aiocoll.numerals import parse_int

__all__ = ["integer", "positive"]


def integer(text: str) -> int:
    """Return a whole number.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        return parse_int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def positive(text: str) -> int:
    """Return a whole number of at least 1.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    value = integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value
