"""Everything that the page on testing shows is run, and its reports are what pytest prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "testing-with-ranks.md").read_text()

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FILES = {
    name.group(1): code
    for language, code in BLOCKS
    if language == "python" and (name := re.match(r"# ([a-z_]+)\.py\n", code))
}
REPORTS = [text.splitlines() for language, text in BLOCKS if language == "text"]
#: The only file whose tests fail, to show how that looks.
FAILING = "test_reports"
#: Where ranks are tasks, time is virtual: no operation or test times out because the machine is busy.
CONFTEST = """
import asyncio

from aiocoll.testing.virtual import VirtualLoop


def pytest_asyncio_loop_factories(item):
    mark = item.get_closest_marker("ranks")
    tasks = mark is not None and not mark.kwargs.get("processes")
    return {"loop": VirtualLoop if tasks else asyncio.new_event_loop}
"""


@pytest.fixture
def page(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(**FILES)
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    return pytester


def test_every_block_is_one_of_these() -> None:
    assert {language for language, _ in BLOCKS} == {"python", "sh", "text"}
    assert len(FILES) == sum(language == "python" for language, _ in BLOCKS)
    assert FAILING in FILES


def test_the_tests_of_the_page_do_what_it_says(page: pytest.Pytester) -> None:
    result = page.runpytest_subprocess("-p", "asyncio", "-p", "aiocoll.testing.plugin", "-W", "error", "-rA")
    summary = [line for line in result.outlines if line.startswith(("FAILED", "ERROR"))]
    assert len(summary) == 3
    assert all(FAILING in line for line in summary)
    for report in REPORTS:
        result.stdout.fnmatch_lines(report)


def test_the_program_of_the_page_runs(page: pytest.Pytester) -> None:
    done = subprocess.run([sys.executable, "first.py"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "[60, 60, 60, 60]\n"), done.stderr
