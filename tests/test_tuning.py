"""The tuning file of `aiocoll bench --tune`: contents, errors of invalid files, and use by all ranks."""

import asyncio
import json
import logging
import math
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiocoll
from aiocoll.algorithms import Machine, Tuning, choose
from aiocoll.algorithms.machine import SingleCopy
from aiocoll.elements.ops import ReduceOp
from aiocoll.errors import RendezvousError
from aiocoll.options import GroupOptions
from aiocoll.store import HashStore
from aiocoll.testing import run_virtual
from aiocoll.tuning import default_path, dumps, from_wire, load, to_wire

from .internals import comm_of, plans_of, replace_parts

#: A machine model with a very high latency, for which algorithms with one step are best at all sizes.
DEAR = Machine(1.0, 0.001, 1e-9, 1e-10)
CHEAP = Machine(1e-6, 1e-6, 1e-9, 1e-10)
LARGE = 1 << 20


def machines() -> dict[str, Machine]:
    return {"tcp": DEAR, "unix": DEAR, "shm": DEAR}


def write(path: Path, **changed: Any) -> str:
    content = {**json.loads(dumps(machines(), "2026-01-01")), **changed}
    path.write_text(json.dumps(content))
    return str(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.json"


def test_tuning_written_to_a_file_is_read_back_unchanged(path: Path) -> None:
    path.write_text(dumps({"tcp": DEAR, "shm": CHEAP}, "2026-01-01T12:00:00+00:00"))
    assert load(str(path), {}) == Tuning(tcp=DEAR, shm=CHEAP)
    content = json.loads(path.read_text())
    assert content["machine"] == socket.gethostname()
    assert content["date"] == "2026-01-01T12:00:00+00:00"


@pytest.mark.parametrize("single_copy", [SingleCopy(), SingleCopy(0, 65536, 7), SingleCopy(*[math.inf] * 3)])
def test_single_copy_sizes_are_read_from_the_tuning_file(single_copy: SingleCopy, path: Path) -> None:
    path.write_text(dumps({}, "2026-01-01", single_copy))
    assert load(str(path), {}) == Tuning(single_copy=single_copy)
    json.loads(path.read_text(), parse_constant=pytest.fail)  # fails for constants that JSON does not have
    wire = to_wire(Tuning(single_copy=single_copy), 4)
    assert from_wire(wire, "shm", 2) == Tuning(medium="shm", single_copy=single_copy)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\n", SingleCopy()),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 6\n", SingleCopy(reduced=2**21)),
        ("processor\t: 0\nBogoMIPS\t: 50.00\n", SingleCopy()),
        (None, SingleCopy()),
    ],
)
def test_default_single_copy_sizes_depend_on_the_processor(
    text: str | None, expected: SingleCopy, tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processors = tmp_path / "cpuinfo"
    if text is not None:
        processors.write_text(text)
    replace_parts(monkeypatch, processors_file=str(processors))
    assert from_wire(None, "shm", 2) == Tuning(medium="shm", single_copy=expected)
    assert load(write(path), {}) == Tuning(**machines(), single_copy=expected)


def test_single_copy_sizes_in_a_tuning_file_can_be_incomplete(path: Path) -> None:
    assert load(write(path, single_copy={"reduced": 7}), {}) == Tuning(**machines(), single_copy=SingleCopy(reduced=7))


@pytest.mark.parametrize("sizes", [[], {"sent": 1}, {"moved": -1}, {"moved": "1"}, {"moved": True}, {"reduced": [1]}])
def test_invalid_single_copy_sizes_in_a_tuning_file_are_refused(sizes: object, path: Path) -> None:
    with pytest.raises(ValueError, match=r"single_copy.* must be "):
        load(write(path, single_copy=sizes), {})


@pytest.mark.parametrize("sizes", [None, [], [1, 2], [1, 2, 3, 4], [1, 2, "3"], [float("nan"), 1, 2]])
def test_invalid_single_copy_sizes_from_rank_0_are_refused(sizes: object) -> None:
    with pytest.raises(RendezvousError, match="single_copy"):
        from_wire([*to_wire(Tuning(), 4)[:-1], sizes], "shm", 2)


def test_default_tuning_file_is_in_the_users_cache_and_optional(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    name = f"tuning-{socket.gethostname()}.json"
    assert default_path(environ) == str(tmp_path / "aiocoll" / name)
    monkeypatch.setenv("HOME", str(tmp_path))
    for cache in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert default_path(cache) == str(tmp_path / ".cache" / "aiocoll" / name)
    assert load(None, environ) is load(None, {"XDG_CACHE_HOME": os.devnull}) is None
    (tmp_path / "aiocoll").mkdir()
    write(Path(default_path(environ)))
    assert load(None, environ) == Tuning(**machines())
    assert not caplog.records


UNUSABLE = {
    "no JSON": "{",
    "deep": "[" * 100_000,
    "of something else": '{"version": 1}',
    "a list": "[1]",
    "large": " " * 70_000,
}


@pytest.mark.parametrize("text", UNUSABLE.values(), ids=UNUSABLE)
def test_malformed_tuning_file_raises_an_error_if_requested(
    path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=r"^tuning='.*': it (is|has) .*; write a new file with `aiocoll bench --tune`"):
        load(str(path), {})
    folder = path.parent / "aiocoll"
    folder.mkdir()
    environ = {"XDG_CACHE_HOME": str(path.parent)}
    path.rename(default_path(environ))
    assert load(None, environ) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{default_path(environ)} is not used: it " in caplog.text


def test_unreadable_tuning_file_raises_an_error_if_requested(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"tuning='.*none': No such file or directory; write a new file"):
        load(str(tmp_path / "none"), {})
    with pytest.raises(ValueError, match=r"tuning='.*': Is a directory"):
        load(str(tmp_path), {})
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    Path(default_path(environ)).mkdir(parents=True)
    assert load(None, environ) is None
    assert "is not used: Is a directory" in caplog.text


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ([], '"media" must be an object with some of tcp, unix, shm'),
        ({"carrier pigeon": {}}, '"media" must be an object with some of tcp, unix, shm'),
        ({"tcp": {}}, '"tcp" must be an object with alpha, overhead, beta, gamma'),
        ({"tcp": {**DEAR._asdict(), "delta": 1}}, '"tcp" must be an object with alpha, overhead, beta, gamma'),
        *(
            ({"tcp": {**DEAR._asdict(), "beta": value}}, "tcp: beta=.* must be a number of seconds, 1e-15 to 1000.0")
            for value in (0, -1.0, 1e-300, 10**400, float("nan"), float("inf"), True, "1", None)
        ),
    ],
)
def test_error_names_impossible_numbers_in_a_tuning_file(path: Path, media: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"tuning='.*': {message}"):
        load(write(path, media=media), {})


@pytest.mark.parametrize("version", [0, 2, "1", None, "x" * 1000])
def test_tuning_file_of_another_version_is_not_used(path: Path, version: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert load(write(path, version=version, media="of the future"), {}) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "is not used: version" in record.getMessage()
    assert len(record.getMessage()) < 300 + len(str(path))


def test_tuning_that_rank_0_sends_is_decoded_unchanged() -> None:
    tuning = Tuning(DEAR, CHEAP)
    assert from_wire(to_wire(tuning, 4), "tcp", 4) == tuning
    assert from_wire(to_wire(tuning, 4), "shm", 4) == tuning.over("shm")
    assert from_wire(None, "unix", 4) == Tuning(medium="unix")


def test_tuning_assumes_slower_sends_and_reductions_for_ranks_that_share_cores() -> None:
    tuning = from_wire(to_wire(Tuning(DEAR), 2), "tcp", 5)
    assert tuning == Tuning(DEAR, crowd=2.5)
    alpha, overhead, beta, gamma = DEAR
    assert tuning.machine == Machine(alpha, 2.5 * overhead, 2.5 * beta, 2.5 * gamma)
    assert from_wire(to_wire(Tuning(DEAR), 64), "tcp", 5).machine == DEAR


FINE = [1.0] * 4


@pytest.mark.parametrize(
    "numbers",
    [[], [2], [2, FINE, FINE], [2, FINE, FINE, FINE, FINE], [2, FINE, FINE, [1.0] * 3], [2, FINE, FINE, [0.0] * 4]]
    + [[cores, FINE, FINE, FINE] for cores in (0, -1, 1.5, "2", True, None)]
    + [b"x", {}],
)
def test_malformed_tuning_from_rank_0_is_refused(numbers: Any) -> None:
    with pytest.raises(RendezvousError, match="rank 0 published an invalid tuning in the store: "):
        from_wire(numbers, "tcp", 2)


@pytest.mark.parametrize("medium", [None, "pigeon", ["tcp"], 1])
def test_unknown_transport_medium_from_rank_0_is_refused(medium: Any) -> None:
    with pytest.raises(RendezvousError, match="rank 0 published an invalid medium in the store: "):
        from_wire(None, medium, 2)


async def group(store: HashStore, rank: int, world_size: int, **options: Any) -> aiocoll.ProcessGroup:
    return await aiocoll.new_group(
        store=store, rank=rank, world_size=world_size, timeout=30, options=GroupOptions(**options)
    )


@pytest.mark.parametrize("transport", ["tcp", "unix", "shm"])
async def test_tuning_of_rank_0_is_used_by_all_ranks(path: Path, transport: Any) -> None:
    """Give rank 1 a different tuning file. If rank 1 used this file, the algorithms of the ranks would differ."""
    other = write(path.with_name("other.json"), media={"tcp": CHEAP._asdict(), "unix": CHEAP._asdict()})
    own = write(path)
    assert choose("allreduce", LARGE, 2) != choose("allreduce", LARGE, 2, tuning=Tuning(tcp=DEAR))
    store = HashStore()
    groups = await asyncio.gather(
        *(group(store, rank, 2, transport=transport, tuning=other if rank else own) for rank in range(2))
    )
    for pg in groups:
        assert comm_of(pg).tuning._replace(crowd=1.0) == Tuning(**machines(), medium=transport)
    arrays = [np.full(LARGE // 4, rank + 1, np.float32) for rank in range(2)]
    # Use PREMUL_SUM, since the algorithm of plain sums in shared memory does not depend on the tuning.
    await asyncio.gather(
        *(pg.allreduce(array, ReduceOp.PREMUL_SUM(2)) for pg, array in zip(groups, arrays, strict=True))
    )
    assert all((array == 6).all() for array in arrays)
    assert {plan.algorithm for pg in groups for plan in plans_of(pg)} == {"exchange"}
    await asyncio.gather(*(pg.shutdown() for pg in groups))
    await store.aclose()


async def test_transport_medium_of_rank_0_determines_the_tuning_of_all_ranks() -> None:
    """Let rank 0 choose shared memory and rank 1 unix sockets, on the same host."""
    store = HashStore()
    groups = await asyncio.gather(*(group(store, rank, 2, transport=("shm", "unix")[rank]) for rank in range(2)))
    assert [comm_of(pg).tuning.medium for pg in groups] == ["shm", "shm"]
    assert await asyncio.gather(*(pg.allreduce(1) for pg in groups)) == [2, 2]
    await asyncio.gather(*(pg.shutdown() for pg in groups))
    await store.aclose()


async def test_unreadable_tuning_file_of_rank_0_fails_all_ranks_at_once(path: Path) -> None:
    write(path, format="of something else")
    store = HashStore()
    first, second = await asyncio.gather(
        *(group(store, rank, 2, **({} if rank else {"tuning": str(path)})) for rank in range(2)), return_exceptions=True
    )
    assert isinstance(first, ValueError)
    assert isinstance(second, RendezvousError)
    assert f"rank 0 could not join: tuning='{path}': it has no \"format\"" in str(second)
    await store.aclose()


async def tuning_of(pg: aiocoll.ProcessGroup) -> Tuning:
    return comm_of(pg).tuning


def test_virtual_run_ignores_the_default_tuning_file_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "aiocoll").mkdir()
    path = write(Path(default_path(os.environ)))
    assert {each._replace(medium="tcp") for each in run_virtual(2, tuning_of)} == {Tuning()}
    given = run_virtual(2, tuning_of, options=GroupOptions(tuning=path))
    assert {each._replace(medium="tcp", crowd=1.0) for each in given} == {Tuning(**machines())}
