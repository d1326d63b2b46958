"""Measurement of the machine load, read from simulated files of /proc and /sys."""

from __future__ import annotations

import os
from math import inf
from pathlib import Path

import pytest

from aiocoll.machine_load import LoadMeter, MachineLoad

TICKS = os.sysconf("SC_CLK_TCK")
ROOT_PID = 100


class Machine:
    """Simulated /proc and /sys files of a machine, written to a folder; all times are in seconds."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.proc = root / "proc"
        self.cgroups = root / "sys/fs/cgroup"
        self.uptime(1000.0)
        self.cores({0: 0.0})
        self.process(ROOT_PID, 1)

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def uptime(self, seconds: float) -> None:
        self.write(self.proc / "uptime", f"{seconds:.2f} 77.00\n")

    def cores(self, busy: dict[int, float], steal: float = 0.0) -> None:
        """Write /proc/stat: split the busy time of each core over five fields, and add idle and I/O wait time."""
        lines = ["cpu  9 9 9 9 9 9 9 9 9 9"]
        for core, seconds in busy.items():
            fifth = round(seconds * TICKS / 5)
            lines.append(f"cpu{core} {fifth} {fifth} {fifth} 5555 6666 {fifth} {fifth} {round(steal * TICKS)} 0 0")
        self.write(self.proc / "stat", "\n".join([*lines, "intr 1 2 3"]))

    def process(self, pid: int, parent: int, own: float = 0.0, reaped: float = 0.0, name: str = "python") -> None:
        """Write /proc/PID/stat: half of the CPU time as user time, half as system time."""
        halves = " ".join(str(round(seconds * TICKS / 2)) for seconds in (own, own, reaped, reaped))
        self.write(self.proc / str(pid) / "stat", f"{pid} ({name}) S {parent} 1 1 0 -1 0 0 0 0 0 {halves} 20 0 1 0 55")

    def pressure(self, seconds: float) -> None:
        full = "full avg10=0.00 avg60=0.00 avg300=0.00 total=77"
        some = f"some avg10=1.00 avg60=2.00 avg300=3.00 total={round(seconds * 1e6)}"
        self.write(self.proc / "pressure/cpu", f"{some}\n{full}\n")

    def meter(self) -> LoadMeter:
        return LoadMeter(self.root, ROOT_PID)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 2}, raising=False)
    return Machine(tmp_path)


def test_load_of_other_processes_excludes_the_measured_process_tree(machine: Machine) -> None:
    machine.process(101, ROOT_PID, own=4, name="a (b) c")
    machine.process(102, 101, own=1, reaped=2)
    machine.process(200, 1, own=50)
    machine.cores({0: 10, 2: 20})
    meter = machine.meter()
    machine.process(ROOT_PID, 1, own=1)
    machine.process(101, ROOT_PID, own=7, name="a (b) c")
    machine.process(102, 101, own=2, reaped=4)
    machine.process(200, 1, own=99)
    machine.cores({0: 15, 2: 25})
    machine.uptime(1004.0)
    # Both cores together were busy for 10 s in 4 s; the measured process tree used 1 + 3 + 1 + 2 = 7 s of these.
    assert meter.lap().others == pytest.approx(3 / 4)


def test_load_of_other_processes_excludes_ended_child_processes(machine: Machine) -> None:
    machine.process(101, ROOT_PID, own=4)
    meter = machine.meter()
    (machine.proc / "101" / "stat").unlink()
    machine.process(ROOT_PID, 1, own=0, reaped=9)
    machine.cores({0: 5})
    machine.uptime(1010.0)
    assert meter.lap().others == pytest.approx(0)


def test_load_of_other_processes_excludes_cores_that_this_process_cannot_use(machine: Machine) -> None:
    machine.cores({0: 0, 1: 0, 2: 0, 20: 0})
    meter = machine.meter()
    machine.cores({0: 1, 1: 100, 2: 2, 20: 100})
    machine.uptime(1010.0)
    assert meter.lap().others == pytest.approx(0.3)


def test_each_load_measurement_starts_where_the_previous_measurement_ended(machine: Machine) -> None:
    machine.pressure(1.0)
    meter = machine.meter()
    machine.cores({0: 5}, steal=1)
    machine.pressure(2.0)
    machine.uptime(1010.0)
    first = meter.lap()
    machine.cores({0: 10}, steal=3)
    machine.pressure(7.0)
    machine.uptime(1020.0)
    second = meter.lap()
    assert (first.others, first.steal, first.pressure) == pytest.approx((0.5, 0.1, 0.1))
    assert (second.others, second.steal, second.pressure) == pytest.approx((0.5, 0.2, 0.5))


def test_negative_load_of_other_processes_is_reported_as_zero(machine: Machine) -> None:
    meter = machine.meter()
    machine.process(ROOT_PID, 1, own=5.2)
    machine.cores({0: 5})
    machine.uptime(1010.0)
    assert meter.lap().others == 0


def test_load_without_proc_files_is_unknown(tmp_path: Path) -> None:
    load = LoadMeter(tmp_path).lap()
    assert load == MachineLoad(None, None, None, None)
    assert (load.total, load.is_high) == (None, False)
    assert str(load) == "other processes unknown, steal unknown, CPU pressure unknown, CPU quota unknown"


@pytest.mark.parametrize("name", ["stat", "uptime", f"{ROOT_PID}/stat", "pressure/cpu", "self/cgroup"])
@pytest.mark.parametrize("text", ["", "?", "cpu0 1 2", "some total=x", "0::/\n1:cpu"])
def test_load_with_a_malformed_file_is_unknown(machine: Machine, name: str, text: str) -> None:
    machine.pressure(0)
    meter = machine.meter()
    machine.write(machine.proc / name, text)
    machine.uptime(1010.0) if name != "uptime" else None
    load = meter.lap()
    unknown = {
        "stat": load.others,
        "uptime": load.others,
        f"{ROOT_PID}/stat": load.others,
        "pressure/cpu": load.pressure,
    }
    assert unknown.get(name) is None


def test_load_of_an_empty_interval_is_unknown(machine: Machine) -> None:
    assert machine.meter().lap().others is None


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000\n"}, inf),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"jobs/cpu.max": "50000 100000", "jobs/7/cpu.max": "max 100000"}, 0.5),
        ({"unified/jobs/7/cpu.max": "25000 50000"}, 0.5),
        ({"jobs/cpu.max": "nonsense"}, None),
        ({"elsewhere/cpu.max": "50000 100000"}, None),
    ],
)
def test_cpu_quota_is_read_from_control_groups_version_2(
    machine: Machine, files: dict[str, str], quota: float | None
) -> None:
    machine.write(machine.proc / "self/cgroup", "0::/jobs/7\n")
    for name, text in files.items():
        machine.write(machine.cgroups / name, text)
    assert machine.meter().lap().quota == quota


@pytest.mark.parametrize(
    ("folder", "limit", "quota"),
    [
        ("cpu/docker/5", "200000", 2.0),
        ("cpu,cpuacct", "50000", 0.5),
        ("cpu", "-1", inf),
        ("cpuacct", "50000", None),
    ],
)
def test_cpu_quota_is_read_from_control_groups_version_1(
    machine: Machine, folder: str, limit: str, quota: float | None
) -> None:
    machine.write(machine.proc / "self/cgroup", "4:memory:/docker/5\n3:cpu,cpuacct:/docker/5\n0::/\n")
    machine.write(machine.cgroups / folder / "cpu.cfs_quota_us", limit)
    machine.write(machine.cgroups / folder / "cpu.cfs_period_us", "100000")
    assert machine.meter().lap().quota == quota


@pytest.mark.parametrize(
    ("others", "steal", "high"),
    [(0.0, 0.0, False), (0.29, None, False), (0.31, None, True), (0.2, 0.2, True), (None, 5.0, False)],
)
def test_machine_load_above_the_limit_is_reported_as_high(
    others: float | None, steal: float | None, high: bool
) -> None:
    assert MachineLoad(others, steal, None, None).is_high is high


def test_machine_load_is_formatted_as_text() -> None:
    load = MachineLoad(0.123, 0.0, 0.25, inf)
    assert str(load) == "other processes 0.12 cores, steal 0.00 cores, CPU pressure 25 %, CPU quota none"
    assert str(MachineLoad(1.0, 0.0, 1.0, 1.5)).endswith("CPU quota 1.50 cores")


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")
def test_load_of_this_machine_is_known() -> None:
    meter = LoadMeter()
    deadline = float(Path("/proc/uptime").read_text().split()[0]) + 0.05
    while float(Path("/proc/uptime").read_text().split()[0]) < deadline:
        pass
    load = meter.lap()
    assert load.others is not None
    assert load.steal is not None
    assert load.others <= len(os.sched_getaffinity(0)) + 1
