"""The tests and commands of the page on testing, with the reports that pytest prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages import ROOT, blocks, code, commands, files, shell, write

pytest_plugins = ["pytester"]

PAGE = "docs/testing-with-ranks.md"
FILES = files(PAGE)
REPORTS = [
    block.code.splitlines()
    for block in blocks(PAGE)
    if block.heading == "Reading a report" and block.language == "text"
]
#: The only file on the testing page whose tests fail, because the page shows the reports of failures.
FAILING = "test_reports"
#: The only file on the testing page that uses anyio's pytest plugin instead of pytest-asyncio.
ANYIO = "test_anyio.py"
#: A conftest that runs task ranks in virtual time, so that a busy machine causes no timeout.
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
    write({name: source for name, source in FILES.items() if name != ANYIO}, pytester.path)
    pytester.makeconftest(CONFTEST)
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n")
    return pytester


@pytest.mark.slow
def test_tests_of_the_testing_page_have_the_shown_outcomes(page: pytest.Pytester) -> None:
    result = page.runpytest_subprocess("-p", "asyncio", "-p", "aiocoll.testing.plugin", "-W", "error", "-rA")
    summary = [line for line in result.outlines if line.startswith(("FAILED", "ERROR test"))]
    assert len(summary) == 4
    assert all(FAILING in line for line in summary)
    for report in REPORTS:
        result.stdout.fnmatch_lines(report)


@pytest.mark.slow
def test_anyio_test_of_the_testing_page_runs_without_pytest_asyncio(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("anyio")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    write({ANYIO: FILES[ANYIO]}, pytester.path)
    result = pytester.runpytest_subprocess("-p", "anyio", "-p", "aiocoll.testing.plugin", "-W", "error")
    result.assert_outcomes(passed=1)


@pytest.mark.slow
def test_commands_of_the_testing_page_print_the_shown_output(tmp_path: Path) -> None:
    write(FILES, tmp_path)
    (tmp_path / ".coveragerc").write_text(code(PAGE, "Coverage", language="ini"))
    first, program, coverage = commands(PAGE)
    assert "1 passed" in shell(first, tmp_path)
    assert shell(program, tmp_path) == code(PAGE, "The first test", language="text")
    # The report shown on the page covers only the files of its own section.
    for name in FILES.keys() - {"shards.py", "test_shards.py", "job.py"}:
        (tmp_path / name).unlink()
    assert code(PAGE, "Coverage", language="text") in shell(coverage, tmp_path)
