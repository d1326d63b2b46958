"""Fixtures for tests of the pytest plugin: a project with tests, and reports without frames of aiocoll."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path

import pytest

from ..internals import replace_parts

ROOT = str(Path(__file__).parents[2])


class Project:
    """A directory with tests; `run` runs them with only aiocoll's plugin and pytest-asyncio or anyio."""

    def __init__(self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
        self._pytester = pytester
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        monkeypatch.setenv("PYTHONPATH", ROOT)
        # Debug mode reports slow steps, which occur on a busy machine.
        monkeypatch.delenv("PYTHONASYNCIODEBUG", raising=False)

    def run(
        self, source: str, *options: str, mode: str = "strict", asyncio: bool = True, anyio: bool = False
    ) -> pytest.RunResult:
        self._pytester.makepyfile(test_it=source)
        fixtures = "asyncio_default_fixture_loop_scope = function"
        self._pytester.makeini(f"[pytest]\nasyncio_mode = {mode}\n{fixtures}\n" if asyncio else "[pytest]\n")
        plugins = [*(("-p", "asyncio") if asyncio else ()), *(("-p", "anyio") if anyio else ())]
        plugins += ["-p", "aiocoll.testing.plugin"]
        return self._pytester.runpytest_subprocess(*plugins, *options, "--strict-markers", "-W", "error", "-rA")


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Project:
    return Project(pytester, monkeypatch)


@pytest.fixture
def frames_of_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide frames of aiocoll in reports, as for users; aiocoll's own tests show them."""
    replace_parts(monkeypatch, all_frames=ContextVar("all frames", default=False))
