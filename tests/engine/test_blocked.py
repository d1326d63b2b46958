"""Reports about a blocked thread: its innermost frame, and the lines of user code that called this frame."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from aiocoll.engine.failure import watchdog
from aiocoll.engine.failure.blocked import line, place
from aiocoll.engine.failure.watchdog import Watchdog

from ..internals import Limits


def frame_in(function: Callable[[Any], object]) -> FrameType:
    """Call `function` with a callback; return the frame that called the callback."""
    found: list[FrameType] = []
    function(lambda *_: found.append(sys._getframe(1)))
    return found[0]


def line_of(text: str) -> int:
    """Return the number of the only line of this file that equals `text`."""
    (line,) = (n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip() == text)
    return line


def test_report_of_a_blocked_thread_shows_the_users_lines() -> None:
    def outer(look: Any) -> None:
        inner(look)

    def inner(look: Any) -> None:
        look()

    first, second, third = place(frame_in(outer)).split(", called from ")
    assert first == f"{__file__}:{line_of('look()')} in inner"
    assert second == f"{__file__}:{line_of('inner(look)')} in outer"
    assert third.endswith(" in frame_in")


def test_report_of_a_blocked_import_names_the_importing_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that five importlib frames between the module and the importing line are omitted."""
    module = "import sys\nfrom aiocoll.engine.failure.blocked import place\nfound = place(sys._getframe(0))\n"
    (tmp_path / "slow_to_load.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)

    def load() -> Any:
        import slow_to_load

        return slow_to_load

    try:
        found = load().found
    finally:
        sys.modules.pop("slow_to_load", None)
        importlib.invalidate_caches()
    first, second, _ = found.split(", called from ")
    assert first == f"{tmp_path / 'slow_to_load.py'}:3 in <module>"
    assert second == f"{__file__}:{line_of('import slow_to_load')} in load"


def test_report_of_a_blocked_installed_program_names_its_own_lines(tmp_path: Path) -> None:
    source = "def run(look):\n    look()\n"
    scope: dict[str, Any] = {}
    exec(compile(source, str(tmp_path / "site-packages" / "theirs.py"), "exec"), scope)
    frame = frame_in(scope["run"])
    first, second, _ = place(frame).split(", called from ")
    assert first == f"{tmp_path / 'site-packages' / 'theirs.py'}:2 in run"
    assert second.endswith(" in frame_in")


def test_blocked_thread_without_a_frame_is_reported_at_an_unknown_line() -> None:
    assert place(None) == "an unknown place"


async def test_blocked_loop_warning_names_the_users_line(limits: Limits, caplog: pytest.LogCaptureFixture) -> None:
    """Block in a call that is three frames deep in the standard library."""
    limits(watchdog_interval=watchdog.ROUND / 20, blocked_after=watchdog.BLOCKED_AFTER / 20)
    watch = Watchdog(3, asyncio.get_running_loop(), time.perf_counter, {}.__getitem__, lambda *_: None, lambda *_: None)
    watch.start()
    try:
        with caplog.at_level(logging.WARNING, logger="aiocoll"):
            concurrent.futures.wait([concurrent.futures.Future()], timeout=5 * watchdog.BLOCKED_AFTER)
            await asyncio.sleep(0)
    finally:
        watch.stop()
    (text,) = [each.getMessage() for each in caplog.records if "has been blocked" in each.getMessage()]
    waiting = "concurrent.futures.wait([concurrent.futures.Future()], timeout=5 * watchdog.BLOCKED_AFTER)"
    where = f"{__file__}:{line_of(waiting)} in test_blocked_loop_warning_names_the_users_line"
    assert "threading.py:" in text
    assert f"in wait, called from {where}" in text


async def test_line_that_blocks_repeatedly_is_logged_once(limits: Limits, caplog: pytest.LogCaptureFixture) -> None:
    limits(watchdog_interval=watchdog.ROUND / 20, blocked_after=watchdog.BLOCKED_AFTER / 20)
    watch = Watchdog(3, asyncio.get_running_loop(), time.perf_counter, {}.__getitem__, lambda *_: None, lambda *_: None)
    never: concurrent.futures.Future[None] = concurrent.futures.Future()
    assert watch.longest_blocks() == []
    watch.start()
    try:
        with caplog.at_level(logging.INFO, logger="aiocoll"):
            for _ in range(4):
                concurrent.futures.wait([never], timeout=4 * watchdog.BLOCKED_AFTER)
                await asyncio.sleep(2 * watchdog.ROUND)
            concurrent.futures.wait([never], timeout=5 * watchdog.BLOCKED_AFTER)
            await asyncio.sleep(2 * watchdog.ROUND)
    finally:
        watch.stop()
    messages = [each.getMessage() for each in caplog.records]
    blocked = [text for text in messages if "has been blocked" in text]
    lines = [line_of(f"concurrent.futures.wait([never], timeout={n} * watchdog.BLOCKED_AFTER)") for n in (4, 5)]
    assert len(blocked) == 2
    found = watch.longest_blocks()
    assert len(found) == watchdog.BLOCKS
    for ago, seconds, text in found:
        assert ago >= seconds >= watchdog.BLOCKED_AFTER
        assert any(f"{__file__}:{number} in" in text for number in lines)
    for text, number in zip(blocked, lines, strict=True):
        assert f"{__file__}:{number} in" in text
    assert sum("runs again" in text for text in messages) <= 2, (
        f"'runs again' is logged for more blocks than were logged: {messages}"
    )


def test_reported_blocked_line_is_the_innermost_line_of_the_users_code(tmp_path: Path) -> None:
    installed: dict[str, Any] = {}
    exec(compile("def run(look):\n    look()\n", str(tmp_path / "site-packages" / "theirs.py"), "exec"), installed)

    def step(look: Any) -> None:
        run = installed["run"]
        run(look)

    assert line(frame_in(step)) == f"{__file__}:{line_of('run(look)')}"
    assert line(None) == ""


async def test_ended_block_is_known_as_soon_as_the_loop_runs_again(limits: Limits) -> None:
    limits(watchdog_interval=watchdog.ROUND / 20, blocked_after=watchdog.BLOCKED_AFTER / 20)
    watch = Watchdog(3, asyncio.get_running_loop(), time.perf_counter, {}.__getitem__, lambda *_: None, lambda *_: None)
    watch.start()
    try:
        concurrent.futures.wait([concurrent.futures.Future()], timeout=6 * watchdog.BLOCKED_AFTER)
        while watch.blocked() is not None or not watch.longest_blocks():
            assert watch.blocked() is not None, "the loop runs again, but the block is not known"
            await asyncio.sleep(0)
        ((ago, seconds, where),) = watch.longest_blocks()
    finally:
        watch.stop()
    assert ago >= seconds >= 4 * watchdog.BLOCKED_AFTER
    assert "in test_ended_block_is_known_as_soon_as_the_loop_runs_again" in where
