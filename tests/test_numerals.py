"""Parsing of numbers in environment variables and command line arguments: only plain ASCII numbers are valid."""

from __future__ import annotations

import ast
import math
import os
from pathlib import Path

import pytest

import aiocoll.distributed as dist
from aiocoll import new_group
from aiocoll.cli import main
from aiocoll.numerals import parse_float, parse_int
from aiocoll.options import GroupOptions, job_key

from .each import each

#: Texts that must be refused as numbers, although Python's `int` or `float` accepts most of them.
NO_NUMBERS = ["1_0", " 1", "1 ", "1\n", "+1", "\u0661", "\uff11", "", "-", "--1", "0x1", "9" * 5000]


@each("text", [*NO_NUMBERS, "1.0", "1e3", "inf"])
def test_text_that_is_not_a_plain_integer_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        parse_int(text)


@each("text", [each for each in NO_NUMBERS if each[:1] != "9"] + ["1.5_0", ".", "1e", "Infinity"])
def test_text_that_is_not_a_plain_number_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be a number"):
        parse_float(text)


def test_plain_number_is_parsed_from_text() -> None:
    assert [parse_int(text) for text in ("0", "7", "-12", "0029500")] == [0, 7, -12, 29500]
    assert [parse_float(text) for text in ("0", "1.", ".5", "-2.5", "1e-3", "inf")] == [0, 1, 0.5, -2.5, 1e-3, math.inf]


@pytest.mark.parametrize("text", ["1_0", " 1", "\u0661"])
@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE", "MASTER_PORT", "AIOCOLL_PORT"])
def test_rendezvous_variables_accept_only_ascii_digits(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "11",
        "MASTER_ADDR": "h",
        "MASTER_PORT": "9",
        variable: text,
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{variable}={text!r} in the environment must be"):
        new_group()


@pytest.mark.parametrize("text", ["1_0", " 1", "\u0661"])
def test_other_numeric_variables_accept_only_ascii_digits(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("LOCAL_RANK", text)
    with pytest.raises(ValueError, match=f"LOCAL_RANK={text!r}"):
        dist.get_node_local_rank()
    for name in ("AIOCOLL_SPIN_US", "AIOCOLL_WARN_AFTER"):
        with pytest.raises(ValueError, match=f"{name}={text!r}: must be a number"):
            GroupOptions.resolve(None, {name: text})
    with pytest.raises(ValueError, match=f"AIOCOLL_JOB_KEY_FD={text}: not a descriptor"):
        job_key({"AIOCOLL_JOB_KEY_FD": text}, None)


def test_job_key_descriptor_with_a_malformed_number_is_not_opened() -> None:
    reading, writing = os.pipe()
    with open(writing, "wb") as pipe:
        pipe.write(b"0123456789abcdef")
    with open(reading, "rb") as pipe:
        with pytest.raises(ValueError, match="not a descriptor"):
            job_key({"AIOCOLL_JOB_KEY_FD": f" {reading}"}, None)
        assert pipe.read() == b"0123456789abcdef"


#: Command lines with a numeric argument `{}`. With a valid number, each of them fails for a different reason.
ARGUMENTS = [
    ("run", "-n", "{}", "script"),
    ("run", "-n", "1", "--nnodes", "{}", "script"),
    ("run", "-n", "1", "--node-rank", "{}", "script"),
    ("run", "-n", "1", "--master-port", "{}", "script"),
    ("bench", "-n", "{}", "--refused"),
    ("bench", "--min", "{}", "--refused"),
    ("doctor", "-n", "{}", "--refused"),
    ("doctor", "--nnodes", "{}", "--refused"),
    ("doctor", "--timeout", "{}", "--refused"),
]


@pytest.mark.parametrize("text", ["1_0", " 1", "\u0661"])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=" ".join)
def test_command_line_numbers_accept_only_ascii_digits(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main([each.format(text) for each in arguments])
    assert f": {text!r} " in capsys.readouterr().err


def test_command_line_parsers_do_not_use_int_and_float() -> None:
    folder = Path(__file__).parents[1] / "aiocoll" / "cli"
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "type":
                assert ast.unparse(node.value) not in ("int", "float"), f"{path.name} line {node.value.lineno}"
