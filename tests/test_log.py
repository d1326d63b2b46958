"""aiocoll's log records, which contain group and rank, and the limit on repeated warnings."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import numpy as np
import pytest

import aiocoll
from aiocoll import ProcessGroup
from aiocoll.log import RepeatLimiter, logger

from .each import each
from .ranks import run_ranks

PACKAGE = Path(aiocoll.__file__).parent
LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")


@each("path", sorted(PACKAGE.rglob("*.py")))
def test_modules_log_through_the_common_logger(path: Path) -> None:
    """Check that all modules use `aiocoll.log.logger`, which adds the fields `group` and `rank`."""
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    used = [ast.unparse(func) for func in calls if isinstance(func, ast.Attribute)]
    if path.name != "log.py":
        assert "logging.getLogger" not in used, "use aiocoll.log.logger"
    assert not [name for name in used if name.startswith("logging.") and name.rpartition(".")[2] in LEVELS]


def test_log_record_outside_of_a_group_has_no_group_and_rank(caplog: pytest.LogCaptureFixture) -> None:
    logger.warning("for a test: %d", 7)
    (record,) = caplog.records
    assert (record.getMessage(), record.name) == ("for a test: 7", "aiocoll")
    assert Path(record.pathname) == Path(__file__)
    assert (record.group, record.rank) == (None, None)  # type: ignore[attr-defined]


async def test_log_record_of_a_group_contains_group_and_rank(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiocoll")

    async def rank(pg: ProcessGroup) -> str:
        if pg.rank():
            pg.abort("for a test")
        else:
            with pytest.raises(aiocoll.GroupError):
                await pg.allreduce(np.ones(1))
        return pg.group_name

    names = await run_ranks(2, rank)
    logged = {(record.group, record.rank) for record in caplog.records}  # type: ignore[attr-defined]
    assert logged == {(names[0], 0), (names[1], 1)}


def logged_times(repeats: RepeatLimiter, kind: object, times: range) -> dict[int, str]:
    """Repeat a warning at all `times`; return the times at which it is logged, each with the message suffix."""
    ends = {now: repeats.admit(kind, float(now)) for now in times}
    return {now: end for now, end in ends.items() if end is not None}


def test_repeated_warning_is_logged_at_growing_intervals_with_a_count() -> None:
    assert logged_times(RepeatLimiter(), "line", range(2000)) == {
        0: "",
        10: " (9 repetitions were not logged)",
        110: " (99 repetitions were not logged)",
        1110: " (999 repetitions were not logged)",
    }


def test_warning_repeated_after_long_pauses_is_logged_without_a_count() -> None:
    repeats = RepeatLimiter()
    assert [repeats.admit("line", now) for now in (5.0, 15.0, 115.0)] == ["", "", ""]


def test_warnings_of_different_kinds_do_not_suppress_each_other() -> None:
    repeats = RepeatLimiter()
    assert [repeats.admit(kind, 0.0) for kind in ("a", "b", "a", "b")] == ["", "", None, None]


def test_repeat_limiter_forgets_the_oldest_kinds_of_warnings() -> None:
    repeats = RepeatLimiter()
    for number in range(1000):
        repeats.admit(number, 0.0)
        assert repeats.admit("frequent", 0.0) == (None if number else "")
    assert repeats.admit(999, 0.0) is None
    assert repeats.admit(0, 0.0) == "", "the oldest kind is still known"
