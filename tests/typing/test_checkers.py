"""What mypy and pyright say of programs that use the library; they need no runs, so nothing of these is carried out."""

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
    """What a checker says: lines with errors, and what `reveal_type` shows, by file and line."""

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
    for path, line, kind, said in re.findall(r"^(.*?\.py):(\d+): (\w+): (.*)$", done.stdout, re.MULTILINE):
        place = Path(path).name, int(line)
        if kind == "error":
            verdict.errors[place] = said
        elif shown := re.fullmatch(r'Revealed type is "(.*)"', said):
            verdict.revealed[place] = plain(shown[1])
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
            verdict.revealed[place] = plain(shown[1])
    return verdict


def plain(shown: str) -> str:
    """Return a type without the modules of its names."""
    return re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", shown)


def commented(path: Path, pattern: str) -> dict[tuple[str, int], str]:
    """Return what the comments of some lines say."""
    lines = enumerate(path.read_text().splitlines(), 1)
    return {(path.name, number): found[1] for number, line in lines if (found := re.search(pattern, line))}


both = pytest.mark.parametrize(
    "checker", [pytest.param(mypy, id="mypy"), pytest.param(pyright, id="pyright", marks=pytest.mark.slow)]
)


@pytest.mark.slow
@both
def test_awaited_expression_has_the_result_type(checker: Callable[[], Verdict]) -> None:
    expected = commented(ACCEPTED, r"^ *reveal_type\(.*\)  # (.*)$")
    assert len(expected) > 100
    revealed = checker().revealed
    wrong = [f"line {place[1]}: {revealed.get(place)}, not {said}" for place, said in expected.items()
             if revealed.get(place) != said]  # fmt: skip
    assert not wrong, "\n".join(wrong)
    assert revealed.keys() == expected.keys()


@both
def test_valid_programs_are_accepted(checker: Callable[[], Verdict]) -> None:
    assert {place: said for place, said in checker().errors.items() if place[0] == ACCEPTED.name} == {}


@both
def test_invalid_programs_are_refused(checker: Callable[[], Verdict]) -> None:
    expected = commented(REFUSED, r"  # (refused)$").keys()
    assert len(expected) > 30
    found = {place for place in checker().errors if place[0] == REFUSED.name}
    assert sorted(expected - found) == [], "taken as good"
    assert sorted(found - expected) == [], "refused besides"


def test_few_expressions_have_the_type_any() -> None:
    """Only what another rank has made, of which this one knows nothing, which library makes arrays, named dtypes."""
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


def test_package_declares_its_types() -> None:
    assert (ROOT / "aiocoll" / "py.typed").exists()
