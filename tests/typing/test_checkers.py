"""Results of mypy and pyright for the programs in tests/typing/programs, which are never run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROGRAMS = sorted((HERE / "programs").glob("*.py"))
ACCEPTED, REFUSED = PROGRAMS


class Verdict(NamedTuple):
    """The result of a type checker: errors, and the types from `reveal_type`, by file and line."""

    errors: dict[tuple[str, int], str]
    revealed: dict[tuple[str, int], str]


@cache
def mypy() -> Verdict:
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--follow-imports=silent",
               "--no-error-summary", "--hide-error-context", f"--cache-dir={ROOT}/.mypy_cache/programs"]  # fmt: skip
    environ = {**os.environ, "MYPYPATH": f"{HERE / 'stubs'}"}
    done = subprocess.run(
        [*command, *map(str, PROGRAMS)], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    verdict = Verdict({}, {})
    for path, line, kind, message in re.findall(r"^(.*?\.py):(\d+): (\w+): (.*)$", done.stdout, re.MULTILINE):
        place = Path(path).name, int(line)
        if kind == "error":
            verdict.errors[place] = message
        elif shown := re.fullmatch(r'Revealed type is "(.*)"', message):
            verdict.revealed[place] = without_modules(shown[1])
    return verdict


@cache
def pyright() -> Verdict:
    pytest.importorskip("pyright")
    environ = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "--project", str(HERE)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    verdict = Verdict({}, {})
    for each in json.loads(done.stdout)["generalDiagnostics"]:
        place = Path(each["file"]).name, each["range"]["start"]["line"] + 1
        if each["severity"] == "error":
            verdict.errors[place] = each["message"]
        elif shown := re.fullmatch(r'Type of ".*" is "(.*)"', each["message"], re.DOTALL):
            verdict.revealed[place] = without_modules(shown[1])
    return verdict


def without_modules(shown: str) -> str:
    """Return a type's text without the module names in it."""
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", shown)


def comments_of(path: Path, pattern: str) -> dict[tuple[str, int], str]:
    """Return group 1 of the pattern for each matching line, by file name and line number."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return {(path.name, number): found[1] for number, line in lines if (found := re.search(pattern, line))}


both = pytest.mark.parametrize(
    "checker", [pytest.param(mypy, id="mypy"), pytest.param(pyright, id="pyright", marks=pytest.mark.slow)]
)


@pytest.mark.slow
@both
def test_type_checker_infers_the_result_type_of_awaited_calls(checker: Callable[[], Verdict]) -> None:
    expected = comments_of(ACCEPTED, r"^ *reveal_type\(.*\)  # (.*)$")
    assert len(expected) > 100
    revealed = checker().revealed
    wrong = [f"line {place[1]}: {revealed.get(place)}, not {type_}" for place, type_ in expected.items()
             if revealed.get(place) != type_]  # fmt: skip
    assert not wrong, "\n".join(wrong)
    assert revealed.keys() == expected.keys()


@both
def test_type_checker_accepts_valid_programs(checker: Callable[[], Verdict]) -> None:
    assert {place: error for place, error in checker().errors.items() if place[0] == ACCEPTED.name} == {}


@both
def test_type_checker_refuses_invalid_programs(checker: Callable[[], Verdict]) -> None:
    expected = comments_of(REFUSED, r"  # (refused)$").keys()
    assert len(expected) > 30
    found = {place for place in checker().errors if place[0] == REFUSED.name}
    assert sorted(expected - found) == [], "invalid lines are accepted"
    assert sorted(found - expected) == [], "valid lines are refused"


def test_only_listed_expressions_have_the_type_any() -> None:
    """Allow `Any` for objects of other ranks, for arrays of an unnamed library, and for dtypes by name."""
    unknown = {
        line.strip()
        for line in ACCEPTED.read_text().splitlines()
        if re.search(
            r"  # .*\bAny\b",
            line.replace("tuple[Any, ...]", "").replace("dict[str, Any]", "").replace("list[Work[Any]]", ""),
        )
    }
    calls = (
        "allgather(None, t)",
        "broadcast_object(None, 0)",
        "broadcast_object()",
        "recv_object(1)",
        '"bfloat16")',
        "message",
    )
    assert all(any(call in line for call in calls) for line in unknown)


def test_package_contains_the_py_typed_marker() -> None:
    assert (ROOT / "aiocoll" / "py.typed").exists()
