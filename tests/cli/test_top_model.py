"""The model of `aiocoll top`: rates, waits, states and verdict from the answers of ranks; and its layout as text."""

from __future__ import annotations

import re
from typing import Any

import pytest

from aiocoll.cli.top import formatting
from aiocoll.cli.top.jobs import JobOutcome
from aiocoll.cli.top.model import KEPT, GroupView, HostLoad, Model, RankView
from aiocoll.top.viewer import Process, State

from ..pages import ROOT

Answer = dict[str, Any]


def answer_of(rank: int, time: float, size: int = 3, **more: Any) -> Answer:
    """Return the answer of a rank that has not done anything."""
    plain: Answer = {
        **{"name": "world:0", "id": 7, "rank": rank, "size": size, "host": "here", "state": "open"},
        "processes": [100 + each for each in range(size)],
        **{"cause": None, "time": time, "blocked": None, "lost": [], "left": [], "pending": 0, "oldest": 0.0},
        **{"in_flight": [], "slow": [], "counted": True, "operations": [], "peers": []},
    }
    return {**plain, **more}


class Job:
    """Processes with given answers, and the model of `aiocoll top` that reads them."""

    def __init__(self) -> None:
        self.processes: dict[int, Process] = {}
        self.model = Model()

    def views(self, now: float, *answers: Answer) -> list[GroupView]:
        for each in answers:
            process = self.processes.setdefault(each["rank"], Process(100 + each["rank"]))
            process.state, process.answered, process.groups = State.ANSWERS, now, [each]
        return self.model.look(self.processes.values(), now)


def row(calls: int, nbytes: int, *histogram: tuple[float, int], op: str = "ALLREDUCE") -> tuple[Any, ...]:
    return op, "ring", "tcp", calls, 0, nbytes, 0.0, list(histogram)


def flight(op: str, seconds: float, *missing: int, peer: int | None = None) -> Answer:
    return {"op": op, "peer": peer, "seconds": seconds, "missing": list(missing), "site": "job.py:3 in main"}


def test_rates_are_computed_with_the_clock_of_the_answering_rank() -> None:
    job = Job()
    (before,) = job.views(1.0, answer_of(0, 50.0, 1, operations=[row(10, 1000, (0.5, 10))]))
    assert [before.ranks[0].ops, before.ranks[0].nbytes, before.ops, before.kinds] == [None, None, None, ()]
    new = [row(30, 5000, (0.5, 10), (0.25, 20)), row(4, 0, (1.0, 4), op="BARRIER")]
    (group,) = job.views(2.0, answer_of(0, 52.0, 1, operations=new))
    (rank,) = group.ranks
    assert (rank.ops, rank.nbytes) == (12.0, 2000.0)
    assert (rank.p50, rank.p99) == (pytest.approx(0.125 * (1 + 12 / 20)), pytest.approx(0.5 * (1 + 3.76 / 4)))
    assert [(each.op, each.ops, each.nbytes) for each in group.kinds] == [
        ("ALLREDUCE", 10.0, 2000.0),
        ("BARRIER", 2.0, 0.0),
    ]
    (same,) = (job.model.look(job.processes.values(), 2.5),)
    assert same[0] == group, "the view changed without a new answer"


def test_restarted_process_has_no_rates_at_first() -> None:
    job = Job()
    job.views(1.0, answer_of(0, 50.0, 1, operations=[row(10, 1000, (0.5, 10))]))
    job.processes[0] = Process(999)
    (group,) = job.views(2.0, answer_of(0, 51.0, 1, operations=[row(3, 10, (0.5, 3))]))
    assert (group.ranks[0].process, group.ranks[0].ops) == (999, None)


def test_ranks_are_sorted_by_how_long_other_ranks_wait_for_them() -> None:
    job = Job()
    job.views(1.0, *(answer_of(rank, 1.0, peers=[]) for rank in range(3)))
    (group,) = job.views(
        3.0,
        answer_of(0, 3.0, peers=[(2, 5, 1.5, 0), (1, 1, 0.1, 0)]),
        answer_of(1, 3.0, peers=[(2, 5, 1.7, 0)]),
        answer_of(2, 3.0, peers=[(0, 5, 0.2, 0)]),
    )
    assert [each.rank for each in group.ranks] == [2, 0, 1]
    late, first, second = group.ranks
    assert (late.waited_for, late.waits) == (pytest.approx(0.8), pytest.approx(0.1))
    assert (first.waited_for, first.waits) == (pytest.approx(0.05), pytest.approx(0.8))
    assert (second.waited_for, second.waits) == (pytest.approx(0.025), pytest.approx(0.85))


def test_long_wait_is_counted_once_although_it_lasts_several_intervals() -> None:
    """Check a wait of 10 s: a rank reports a wait at its end, which must not show as 1000 % of one second."""
    job = Job()
    job.views(0.0, *(answer_of(rank, 0.0, 2) for rank in range(2)))
    shares = []
    for second in range(1, 11):
        pending = answer_of(
            0, float(second), 2, pending=1, oldest=float(second), in_flight=[flight("BARRIER", second, 1)]
        )
        (group,) = job.views(float(second), {**pending, "peers": [(1, 0, 0.0, 1)]}, answer_of(1, float(second), 2))
        assert (group.ranks[0].rank, group.ranks[0].state, group.ranks[0].missing) == (1, "late", 1)
        shares.append((group.ranks[0].waited_for, group.ranks[1].waits))
    assert shares == [(1.0, 1.0)] * 10
    (group,) = job.views(11.0, answer_of(0, 11.0, 2, peers=[(1, 1, 10.5, 0)]), answer_of(1, 11.0, 2))
    assert (group.ranks[0].rank, group.ranks[0].waited_for, group.ranks[1].waits) == (1, 0.5, 0.5)
    (group,) = job.views(12.0, answer_of(0, 12.0, 2, peers=[(1, 2, 11.5, 0)]), answer_of(1, 12.0, 2))
    assert (group.ranks[0].waited_for, group.ranks[0].state) == (1.0, "ok")


def test_wait_is_counted_for_each_of_several_missing_ranks() -> None:
    job = Job()
    job.views(0.0, answer_of(0, 0.0))
    (group,) = job.views(
        1.0, answer_of(0, 1.0, in_flight=[flight("BARRIER", 5.0, 1, 2)], peers=[(1, 0, 0.0, 1), (2, 0, 0.0, 1)])
    )
    assert [(each.rank, each.waited_for) for each in group.ranks] == [(1, 1.0), (2, 1.0), (0, 0.0)]
    assert group.ranks[2].waits == 1.0


@pytest.mark.parametrize(
    ("state", "shown", "text"),
    [
        (State.GONE, "gone", "process 101 is gone"),
        (State.STOPPED, "stopped", "process 101 is stopped, no answer for 3 s"),
        (State.SILENT, "silent", "process 101 lives and does not answer: no answer for 3 s"),
        (State.CLOSED, "closed", "it has closed the group"),
    ],
)
def test_silent_process_is_shown_with_its_process_state(state: State, shown: str, text: str) -> None:
    job = Job()
    job.views(1.0, *(answer_of(rank, 1.0) for rank in range(3)))
    job.processes[1].state = state
    (group,) = job.views(4.0, answer_of(0, 4.0), answer_of(2, 4.0))
    rank = next(each for each in group.ranks if each.rank == 1)
    assert (rank.state, rank.detail, rank.ops, rank.pending) == (shown, text, None, 0)
    assert group.ranks[0].rank == (1 if state != State.CLOSED else 0)


@pytest.mark.parametrize(
    ("state", "shown", "text"),
    [
        (State.GONE, "gone", "process 101 is gone"),
        (State.STOPPED, "stopped", "process 101 is stopped, no answer yet"),
        (State.SILENT, "silent", "process 101 lives and does not answer: no answer yet"),
        (State.ANSWERS, "slow", "it has not answered the others for 4.0 s, its process is alive (stopped)"),
    ],
)
def test_rank_that_has_never_answered_is_shown_with_its_process_state(state: State, shown: str, text: str) -> None:
    job = Job()
    job.processes[1] = Process(101)
    job.processes[1].state = state
    (group,) = job.views(4.0, answer_of(0, 4.0, slow=[(1, 4.0, "its process is alive (stopped)")]), answer_of(2, 4.0))
    first = group.ranks[0]
    assert (first.rank, first.process, first.state, first.detail) == (1, 101, shown, text)
    assert (first.ops, first.p50, first.waits, first.pending) == (None, None, None, 0)


def test_rank_is_shown_with_the_state_that_the_rank_or_its_peers_report() -> None:
    job = Job()
    here: Answer = {"processes": [100, 101, None, None, 104, 105, 106]}
    more: Answer = {"slow": [(1, 4.0, "its process is alive (running)")], "left": [4], **here}
    blocked = answer_of(5, 1.0, 7, blocked=(2.0, "a.py:1 in f"), **here)
    (group,) = job.views(
        1.0,
        answer_of(0, 1.0, 7, lost=[(2, "killed", "its process is gone")], **more),
        answer_of(1, 1.0, 7, **here),
        blocked,
    )
    assert {each.rank: (each.state, each.detail) for each in group.ranks} == {
        0: ("ok", ""),
        1: ("slow", "it has not answered the others for 4.0 s, its process is alive (running)"),
        2: ("lost", "killed: its process is gone"),
        3: ("remote", "on another host"),
        4: ("left", "it has left the group"),
        5: ("blocked", "its event loop has been blocked for 2.0 s, at a.py:1 in f"),
        6: ("unknown", "it has not answered yet"),
    }
    assert [each.rank for each in group.ranks[:3]] == [2, 1, 5]


def test_revoked_group_is_shown_with_its_cause_and_closed_group_disappears() -> None:
    job = Job()
    (group,) = job.views(1.0, answer_of(0, 1.0, 1, cause="rank 3 was lost"))
    assert (group.state, group.cause, group.ranks[0].state) == ("revoked", "rank 3 was lost", "revoked")
    assert "world:0: 1 ranks, revoked: rank 3 was lost" in formatting.format_groups([group], 80)
    job.processes[0].state = State.CLOSED
    (group,) = job.model.look(job.processes.values(), 1.0 + KEPT)
    assert group.state == "closed"
    assert job.model.look(job.processes.values(), 1.1 + KEPT) == []


@pytest.mark.parametrize("state", [State.STOPPED, State.SILENT])
def test_verdict_names_a_stopped_rank_when_the_others_have_closed_the_group(state: State) -> None:
    job = Job()
    job.processes[1] = Process(101)
    job.processes[1].state = state
    job.views(1.0, answer_of(0, 1.0), answer_of(2, 1.0))
    for rank in (0, 2):
        job.processes[rank].state = State.CLOSED
    (group,) = job.model.look(job.processes.values(), 2.0)
    assert (group.state, group.culprits) == ("closed", (1,))
    assert group.verdict.startswith(f"rank 1 is {group.ranks[0].state}: process 101 ")
    assert group.verdict.endswith("; the other ranks have closed the group")


def test_oldest_pending_operations_are_shown_with_all_their_ranks() -> None:
    job = Job()
    entries = [flight("BARRIER (sequence 4)", 2.0 - rank / 10, 3) for rank in range(3)]
    message = flight("SEND", 1.0, peer=2)
    young = flight("BROADCAST (sequence 5)", 0.1)
    (group,) = job.views(
        1.0, *(answer_of(rank, 1.0, 4, in_flight=[each, message, young]) for rank, each in enumerate(entries))
    )
    assert [(each.op, each.ranks, each.seconds, each.missing) for each in group.pending] == [
        ("BARRIER (sequence 4)", (0, 1, 2), 2.0, (3,)),
        ("SEND", (0, 1, 2), 1.0, ()),
    ]
    text = formatting.format_groups([group], 80)
    assert "BARRIER (sequence 4) pending for 2 s on rank 0-2, rank 3 missing, called at job.py:3 in main" in text


def wide_group(size: int = 8) -> GroupView:
    """Return a group with the widest possible numbers in every column."""
    job = Job()
    job.views(0.0, *(answer_of(rank, 0.0, size) for rank in range(size)))
    answers = [
        answer_of(
            *(rank, 1.0, size),
            operations=[row(99_999, 1023 << 20, (2.0**-15, 9_999), (2.0**-4, 90_000))],
            peers=[((rank + 1) % size, 9, 0.999, 0)],
            **{"pending": 12, "oldest": 5.51},
        )
        for rank in range(size)
    ]
    (group,) = job.views(1.0, *answers)
    return group


@pytest.mark.parametrize("width", [80, 120])
def test_text_view_fits_the_terminal_width(width: int) -> None:
    lines = formatting.format_groups([wide_group()], width).splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0] == "healthy: no rank is late"
    assert ("process" in lines[2].split()) == (width == 120)
    assert lines[3].split()[:5] == ["0", "ok", "100k", "1023", "MiB"]
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("width", [80, 120])
def test_live_table_fits_the_terminal_width(width: int) -> None:
    console = pytest.importorskip("rich.console", reason="needs rich")
    from aiocoll.cli.top import terminal

    recording = console.Console(record=True, width=width, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    recording.print(terminal.render("job 7: job.py", [wide_group()], width, 50))
    recording.file.close()
    shown = recording.export_text(clear=False)
    assert "…" not in shown
    plain = [line.split() for line in formatting.format_groups([wide_group()], width).splitlines() if line]
    assert [line.split() for line in shown.splitlines()[1:] if line.strip()] == plain
    assert re.search(r'class="[^"]*-r\d+"[^>]*>ok', recording.export_svg().replace("&#160;", " "))


def test_live_table_leaves_lines_for_the_verdict() -> None:
    pytest.importorskip("rich.console", reason="needs rich")
    from rich.console import Console

    from aiocoll.cli.top import terminal

    with open("/dev/null", "w") as nowhere:
        console = Console(record=True, width=80, file=nowhere)
        console.print(terminal.render("job 7", [wide_group(60)], 80, 24))
        lines = console.export_text().splitlines()
    assert len(lines) <= 24
    assert "and 52 more ranks, for which others wait less" in lines


def test_live_table_keeps_the_last_state_while_no_rank_has_an_open_group() -> None:
    console = pytest.importorskip("rich.console", reason="needs rich")
    from aiocoll.cli.top import terminal

    with open("/dev/null", "w") as nowhere:
        recording = console.Console(record=True, width=80, file=nowhere)
        recording.print(terminal.render("job 7", [], 80, 50))
        assert recording.export_text().split("\n\n") == ["job 7", "no rank has an open group\n"]
        recording.print(terminal.render("job 7", [], 80, 50, last=[wide_group()]))
        parts = recording.export_text().split("\n\n")
    assert parts[:2] == ["job 7", "no rank has an open group; last state:"]
    assert parts[2].startswith("healthy: no rank is late\n")


# -- the verdict


def measured_group(*waited_for: float, load: HostLoad | None = None, **more: Any) -> GroupView:
    """Return a group in which other ranks have waited for each rank during the given shares of a second."""
    job = Job()
    size = len(waited_for)
    job.views(0.0, *(answer_of(rank, 0.0, size) for rank in range(size)))
    done = [row(10, 0, (0.5, 10))]
    peers = {rank: [(other, 1, share, 0) for other, share in enumerate(waited_for) if other != rank and share]
             for rank in range(size)}  # fmt: skip
    answers = [answer_of(rank, 1.0, size, operations=done, peers=peers[rank], **more) for rank in range(size)]
    for each in answers:
        process = job.processes[each["rank"]]
        process.state, process.answered, process.groups = State.ANSWERS, 1.0, [each]
    (group,) = job.model.look(job.processes.values(), 1.0, load)
    return group


def test_verdict_of_a_healthy_job_blames_no_rank() -> None:
    """Use waiting shares of 46 % and 32 %, as measured in a healthy job on as many cores as ranks."""
    group = measured_group(0.46, 0.32, 0.1)
    assert (group.verdict, group.culprits) == ("healthy: no rank is late", ())


def test_verdict_of_a_busy_host_names_its_load() -> None:
    group = measured_group(0.46, 0.32, 0.1, load=HostLoad(10.04, 2))
    assert group.verdict == "no rank is late; the ranks wait for a core (load 10.0 on 2 cores)"
    assert group.culprits == ()
    assert measured_group(0.05, 0.05, 0.05, load=HostLoad(10.04, 2)).verdict == "healthy: no rank is late"


def test_verdict_names_the_rank_that_the_others_wait_for_most() -> None:
    group = measured_group(0.05, 0.8, 0.05)
    assert group.verdict == "rank 1 is slower than the others: they wait for it 80 % of the time"
    assert group.culprits == (1,)


def test_verdict_reports_that_rates_are_not_measured_yet() -> None:
    (group,) = Job().views(0.0, answer_of(0, 0.0, 2), answer_of(1, 0.0, 2))
    assert group.verdict == "measuring: rates follow with the next answers"
    assert [each.waited_for for each in group.ranks] == [None, None]


def test_verdict_names_a_blocked_rank_with_its_line_and_the_call_that_waits() -> None:
    job = Job()
    waits = {"in_flight": [flight("BARRIER (sequence 7)", 4.2, 2)], "peers": [(2, 1, 0.0, 1)], "pending": 1}
    blocked = (4.0, "train.py:15 in load, called from train.py:20 in main")
    (group,) = job.views(
        1.0, answer_of(0, 1.0, **waits), answer_of(1, 1.0, **waits), answer_of(2, 1.0, blocked=blocked)
    )
    assert group.verdict == (
        "rank 2 is blocked: its event loop has been blocked for 4.0 s, at train.py:15 in load; "
        "2 ranks have waited 4.2 s in BARRIER (sequence 7)"
    )
    assert group.culprits == (2,)


def test_verdict_names_a_stopped_rank() -> None:
    job = Job()
    job.views(1.0, *(answer_of(rank, 1.0) for rank in range(3)))
    job.processes[1].state = State.STOPPED
    slow = [(1, 2.0, "its process is alive (stopped)")]
    (group,) = job.views(3.0, answer_of(0, 3.0, slow=slow), answer_of(2, 3.0, slow=slow))
    assert (group.ranks[0].rank, group.ranks[0].state) == (1, "stopped")
    assert group.verdict.startswith("rank 1 is stopped: process 101 is stopped")


def test_rate_history_has_one_value_per_answer() -> None:
    job = Job()
    job.views(0.0, answer_of(0, 0.0, 1, operations=[row(0, 0)]))
    for second in range(1, 4):
        (group,) = job.views(float(second), answer_of(0, float(second), 1, operations=[row(0, 0, (0.5, second**2))]))
    assert group.history == (1.0, 3.0, 5.0)
    (group,) = job.model.look(job.processes.values(), 3.5)
    assert group.history == (1.0, 3.0, 5.0)
    assert formatting.history(group) == "ops/s, last 3 rounds: ▂▅█ (highest 5)"


def test_text_view_of_an_ended_job_shows_exit_code_cause_and_last_state() -> None:
    group = measured_group(0.05, 0.8, 0.05)
    end = JobOutcome(
        137, ("rank 1 was killed by SIGKILL", "ranks 0, 2 failed in consequence: PeerLostError (a.py:3 in main)")
    )
    lines = formatting.format_ended_job("job 7: a.py", end, [group], 80).splitlines()
    assert lines[:3] == ["job 7: a.py: it has ended with exit code 137", *end.lines]
    assert lines[3:6] == ["", "last state:", group.verdict]


def test_host_line_shows_load_and_cores() -> None:
    assert formatting.format_host_load(HostLoad(0.5, 1)) == "host: load 0.5 on 1 core"
    assert formatting.format_host_load(HostLoad(10.0, 2)) == "host: load 10.0 on 2 cores; ranks wait for a free core"


def test_top_page_explains_every_state_of_a_rank() -> None:
    page = (ROOT / "docs" / "top.md").read_text()
    table = page.split("| state | meaning | remedy |\n|---|---|---|\n")[1].split("\n\n")[0]
    explained = {state for line in table.splitlines() for state in re.findall(r"`(\w+)`", line.split("|")[1])}
    assert explained == set(re.findall(r'"(\w+)"', str(RankView.__doc__).split("state: ")[1].split("detail: ")[0]))
