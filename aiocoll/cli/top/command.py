"""`aiocoll top`: find the job, send a request to its ranks once a second, and show their answers."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from aiocoll.cli.arguments import describe_command
from aiocoll.cli.terminal import write_stderr
from aiocoll.cli.top import formatting
from aiocoll.cli.top.jobs import Job, JobOutcome, jobs, open_description, read_end
from aiocoll.cli.top.model import GroupView, HostLoad, Model
from aiocoll.errors import AiocollError
from aiocoll.machine_load import load_average, usable_cores
from aiocoll.top.viewer import Viewer

__all__ = ["Watch", "configure"]

#: Seconds between two requests to the ranks, and seconds to wait for their answers.
INTERVAL: Final = 1.0
MAX_WAIT: Final = 0.4


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `top`; see `aiocoll.plugins.Command`."""
    describe_command(
        parser,
        codes={0: "the job or Ctrl-C has ended the command", 2: "wrong arguments, or there is no such job"},
        description="Show once a second the activity of the ranks of a job on this host: operations and bytes per "
        "second, times, waits for ranks, pending calls, and slow or lost ranks. Ctrl-C ends the command. The job is "
        "not disturbed: a rank that cannot answer at once is shown with its last state.",
        epilog="Without JOB: the one job of this user that aiocoll run has started here, or that of AIOCOLL_TOP_DIR. "
        "The live table needs rich: pip install 'aiocoll[top]'.",
    )
    parser.add_argument(
        "job", nargs="?", metavar="JOB", help="process id of the launcher, or the folder of AIOCOLL_TOP_DIR"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print a line of JSON per second")
    how.add_argument("--web", action="store_true", help="serve a page on this host alone, and print its address")
    parser.add_argument("--once", action="store_true", help="show the state once, as text or with --json, and end")
    parser.set_defaults(command=lambda args: _top(args, parser))


class Watch:
    """A viewer of a job, which keeps the last state of the job's groups after the job has ended.

    Args:
        folder: the folder in which the ranks listen.

    Attributes:
        load: load of this host at the last request; None where the system does not report it.

    Raises:
        OSError: the path is not a folder, or other users may enter it.
    """

    def __init__(self, folder: str) -> None:
        self._viewer = Viewer(folder, time.monotonic)
        self._description = open_description(folder)
        self._model = Model()
        self._last: list[GroupView] = []
        self.load = _read_load()

    def sample(self) -> list[GroupView]:
        """Send a request to all ranks and return the groups; after the end of the job, return its last state."""
        if self.over:
            return self._last
        self._viewer.request_answers(MAX_WAIT)
        self.load = _read_load()
        groups = self._model.look(self._viewer.processes.values(), time.monotonic(), self.load)
        # At the end of a job, ranks close their groups one after another. Keep the state from before the first close.
        if any(_is_running(group) for group in groups):
            self._last = groups
        return groups

    def news(self) -> dict[str, Any]:
        """Send a request to all ranks and return the groups as plain data, for JSON."""
        groups = self.sample()
        is_over, end = self.over, self.end
        shown = self._last if is_over else groups
        return {
            "time": time.time(),
            "over": is_over,
            "end": None if end is None else end._asdict(),
            "load": None if self.load is None else asdict(self.load),
            "groups": [asdict(group) for group in shown],
            "last": [] if shown else [asdict(group) for group in self._last],
        }

    @property
    def over(self) -> bool:
        """Return whether the job has ended."""
        return self._viewer.over

    @property
    def end(self) -> JobOutcome | None:
        """Return the outcome of the job; None while the job runs, or if `aiocoll run` has not started it."""
        return read_end(self._description) if self.over and self._description is not None else None

    @property
    def last(self) -> list[GroupView]:
        """Return the last state of the groups from before they were closed."""
        return self._last

    def close(self) -> None:
        """Close all connections."""
        self._viewer.close()
        if self._description is not None:
            self._description.close()


def _is_running(group: GroupView) -> bool:
    """Return whether at least half of the ranks are still in the group."""
    ended = sum(each.state in ("gone", "closed", "left") for each in group.ranks)
    return group.state != "closed" and 2 * ended < group.size


def _read_load() -> HostLoad | None:
    average = load_average()
    return None if average is None else HostLoad(average, len(usable_cores()))


def _top(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.once and args.web:
        parser.error("argument --once: not allowed with argument --web")
    try:
        title, folder = _find(args.job)
        watch = Watch(folder)
    except _JobNotFoundError as error:
        write_stderr([f"aiocoll top: {error}"])
        return 2
    except (AiocollError, OSError) as error:
        reason = getattr(error, "strerror", None) or error  # str() of an OSError would name the folder again
        write_stderr([f"aiocoll top: {args.job or 'the folder of the job'}: {reason}"])
        return 2
    try:
        return _show(args, title, watch)
    except (AiocollError, OSError) as error:
        write_stderr([f"aiocoll top: {error}"])
        return 2
    except KeyboardInterrupt:
        return 130 if args.once else 0
    finally:
        watch.close()


def _show(args: argparse.Namespace, title: str, watch: Watch) -> int:
    if args.once or args.json:
        return _print(args, watch)
    if args.web:
        from aiocoll.cli.top.web import serve

        serve(title, watch.news, lambda address: print(address, flush=True))
        return 0
    if not sys.stdout.isatty():
        write_stderr(["aiocoll top: standard output is not a terminal; use --once for text, or --json for data"])
        return 2
    from aiocoll.cli.top import terminal

    terminal.watch(title, watch.sample, lambda: watch.last, lambda: watch.load, lambda: watch.over, INTERVAL)
    print(formatting.format_ended_job(title, watch.end, watch.last, shutil.get_terminal_size().columns), end="")
    return 0


def _print(args: argparse.Namespace, watch: Watch) -> int:
    """Print the groups once, or every second until the job has ended. Request once before, because rates need that."""
    watch.sample()
    while True:
        time.sleep(INTERVAL)
        if args.json:
            print(json.dumps(watch.news()), flush=True)
        else:
            groups = watch.sample()
            print(formatting.format_groups(groups, shutil.get_terminal_size().columns, watch.load), end="")
        if args.once or watch.over:
            return 0


class _JobNotFoundError(Exception):
    """Raised if no running job, or more than one, matches the argument JOB."""


def _find(job: str | None) -> tuple[str, str]:
    """Return the title of the job, and its folder.

    Raises:
        _JobNotFoundError: no job matches, or several do.
    """
    if job is None and (folder := os.environ.get("AIOCOLL_TOP_DIR")):
        job = folder
    if job is not None and not job.isdigit():
        return job, job
    running = jobs(os.environ)
    found = running if job is None else [each for each in running if str(each.number) == job]
    if len(found) == 1:
        return f"job {found[0].number}: {found[0].command}", found[0].folder
    if not running:
        raise _JobNotFoundError(
            "`aiocoll run` has started no running job of this user on this host; for ranks that another program "
            "has started, set AIOCOLL_TOP_DIR to a folder in their environment, and pass that folder as JOB"
        )
    if job is None:
        raise _JobNotFoundError(
            f"several jobs run here; pass the number of one job as the argument JOB. The jobs are:{_list_jobs(running)}"
        )
    if found:
        lines = "".join(f"\n  {each.folder}  {each.command}" for each in found)
        raise _JobNotFoundError(
            f"jobs in several containers have number {job}; pass the folder of a job as JOB:{lines}"
        )
    raise _JobNotFoundError(f"no job {job} of this user runs here; these jobs run:{_list_jobs(running)}")


def _list_jobs(running: Sequence[Job]) -> str:
    now = time.time()
    return "".join(
        f"\n  {each.number}  {each.ranks} ranks  {formatting.format_duration(now - each.started)}  {each.command}"
        for each in running
    )
