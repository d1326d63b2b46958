"""Worked examples of CONTRIBUTING.md, run in a copy of the tree; files named there and in SECURITY.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT, Block, blocks, commands, files, shell, write

PAGE = "CONTRIBUTING.md"
SECURITY = "SECURITY.md"
#: The worked examples by heading, with the number of files below `aiocoll/` that each example changes.
EXAMPLES = {"A hook": 0, "A store": 1, "A schedule": 3, "A collective": 4, "A transport": 2}
#: Examples whose commands run many tests, so that running these examples is a slow test.
SLOW = ("A schedule", "A collective")


def blocks_of(example: str) -> list[Block]:
    return [block for block in blocks(PAGE) if block.heading == example]


def changed_files(example: str) -> list[str]:
    """Return the paths of all files that an example adds or changes."""
    changed = {
        path for block in blocks_of(example) for path in re.findall(r"^\+\+\+ b/(.*)$", block.code, re.MULTILINE)
    }
    return sorted(changed | {block.file for block in blocks_of(example) if block.file is not None})


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Return a copy of the source tree with equal file times, so that compiled Python files stay valid."""
    for name in ("aiocoll", "docs", "examples", "tests", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy2(ROOT / "pyproject.toml", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    return tmp_path


def run(script: str, root: Path) -> str:
    """Run shell commands with the copy of the package in `root`, and few pytest plugins; return the output."""
    plugins = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "pytest_asyncio.plugin,aiocoll.testing.plugin"}
    output = shell(f"exec 2>&1\nset -e\n{script}\necho all done", root, PYTHONPATH=str(root), **plugins)
    assert output.endswith("all done\n"), output
    return output.removesuffix("all done\n")


def apply(diff: str, root: Path) -> None:
    # Hide any git repository around `root`: `git apply` would take paths relative to that repository.
    environ = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    subprocess.run(["git", "apply"], input=diff, text=True, cwd=root, env=environ, check=True)


def test_contributing_page_has_an_example_for_each_kind_of_extension() -> None:
    assert list(dict.fromkeys(block.heading for block in blocks(PAGE) if block.heading.startswith("A "))) == [*EXAMPLES]


@pytest.mark.parametrize("example", EXAMPLES)
def test_contributing_example_changes_apply_to_the_source_tree(example: str, copy: Path) -> None:
    for block in blocks_of(example):
        if block.language == "diff":
            apply(block.code, copy)


@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in EXAMPLES]
)
def test_contributing_example_prints_the_shown_output_and_passes_the_checks(example: str, copy: Path) -> None:
    output = ""
    for block in blocks_of(example):
        if block.file is not None:
            write({block.file: files(PAGE)[block.file]}, copy)
        elif block.language == "diff":
            apply(block.code, copy)
        elif block.code in commands(PAGE):
            output += run(block.code, copy)
        else:
            assert (block.language, block.code) == ("text", output)
    python = " ".join(path for path in changed_files(example) if path.endswith(".py"))
    run(f".venv/bin/python -m ruff check --no-cache {python}", copy)
    run(f".venv/bin/python -m ruff format --no-cache --diff {python}", copy)
    run(".venv/bin/python -m pytest -q tests/test_house.py", copy)


@pytest.mark.slow
def test_contributing_examples_pass_the_type_check(copy: Path) -> None:
    """Run mypy on one example after the other in the same copy, since the mypy cache makes later runs fast."""
    before = {path: path.read_bytes() for path in copy.rglob("*.py")}
    for example in EXAMPLES:
        write({block.file: block.code for block in blocks_of(example) if block.file is not None}, copy)
        for block in blocks_of(example):
            if block.language == "diff":
                apply(block.code, copy)
        run(".venv/bin/python -m mypy", copy)
        for path in {copy / name for name in changed_files(example)}:
            path.write_bytes(before[path]) if path in before else path.unlink()


@pytest.mark.parametrize("example", EXAMPLES)
def test_contributing_example_changes_the_listed_number_of_package_files(example: str) -> None:
    assert len([path for path in changed_files(example) if path.startswith("aiocoll/")]) == EXAMPLES[example]


def test_make_targets_of_the_contributing_page_exist() -> None:
    named = set(re.findall(r"^\| `make ([\w-]+)` \|", (ROOT / PAGE).read_text(), re.MULTILINE))
    made = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"check", "test"} <= named <= made


@pytest.mark.parametrize("page", [PAGE, SECURITY])
def test_files_named_on_the_contributing_and_security_pages_exist(page: str) -> None:
    made = {path for example in EXAMPLES for path in changed_files(example)}
    named = re.findall(r"(?<![\w/.-])((?:aiocoll|docs|examples|bench|tests)/[\w./-]*\w)", (ROOT / page).read_text())
    assert len(set(named) - made) > 10
    assert {name for name in set(named) - made if "/.venvs/" not in name and not (ROOT / name).exists()} == set()


def test_each_security_promise_names_existing_tests() -> None:
    text = (ROOT / SECURITY).read_text().replace("|---|---|\n", "")
    _, *rows = re.findall(r"^\| (.*) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) > 10
    for promise, shown in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)`", shown)
        assert tests, promise
        assert [test for test in tests if not (ROOT / test).is_file()] == []
