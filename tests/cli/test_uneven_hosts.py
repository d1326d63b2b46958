"""`aiocoll run --nproc-list`: hosts with different numbers of ranks, as launchers on one machine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiocoll.cli import main

if TYPE_CHECKING:
    from tests.cli.conftest import Launch

SUM = """
    import asyncio, os
    import aiocoll

    async def main():
        async with aiocoll.new_group() as pg:
            total = await pg.allreduce(2 ** pg.rank())
            names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")
            print(total, pg.size(), *(os.environ[name] for name in names))

    asyncio.run(main())
"""


@pytest.fixture
def master_options(tmp_path: Path, port: int) -> tuple[object, ...]:
    file = tmp_path / "job.key"
    file.touch(mode=0o600)
    file.write_text("0123456789abcdef")
    return ("--master-addr", "127.0.0.1", "--master-port", port, "--job-key-file", file)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [pytest.param((3, 1), marks=pytest.mark.soak), (1, 3), (1, 2, 1)])
def test_rank_numbers_follow_the_order_of_hosts_in_the_list(
    launch: Launch, master_options: tuple[object, ...], sizes: tuple[int, ...]
) -> None:
    listed = ",".join(map(str, sizes))
    script = launch.write(SUM)
    order = reversed(range(len(sizes)))
    hosts = [launch("--nproc-list", listed, "--node-rank", host, *master_options, script) for host in order]
    done = [host.finish() for host in hosts]
    lines = sorted(line for each in done for line in each.stdout.splitlines())
    expected = [(host, local) for host, size in enumerate(sizes) for local in range(size)]
    # The sum is 1 + 2 + 4 + 8: each rank takes part once.
    assert lines == [f"[{rank}] 15 4 4 {local} {sizes[host]} {host}" for rank, (host, local) in enumerate(expected)]
    assert [each.returncode for each in done] == [0] * len(sizes)


def test_list_of_rank_counts_may_contain_one_host(launch: Launch) -> None:
    assert launch("--nproc-list", 1, script=SUM).finish().stdout == "[0] 1 1 1 0 1 0\n"


HOSTS = ["--master-addr", "h"]
WRONG = [
    ([], r"missing: the number of ranks \(-n N, or --nproc-list N,N,... for several hosts\); for example: "),
    (["-n", "2", "--nproc-list", "3,1"], "argument --nproc-list: not allowed with argument -n/--nproc"),
    (["--nproc-list", "3,1", "--nnodes", "3", *HOSTS], "--nproc-list 3,1: has 2 numbers for --nnodes 3; give one for"),
    (["--nproc-list", "3,1", "--nnodes", "1"], "--nproc-list 3,1: has 2 numbers for --nnodes 1; give one for"),
    (["--nproc-list", "3,1", "--node-rank", "2", *HOSTS], "--node-rank 2: must be from 0 to 1"),
    (["--nproc-list", "3,1"], "--master-addr: needed with several hosts"),
    (["--nproc-list", "3,0"], r"argument --nproc-list: '3,0': 0 is not a positive number; .* like 3,1"),
    (["--nproc-list", "3,,1"], r"argument --nproc-list: '3,,1': '' must be a whole number"),
    (["--nproc-list", "3 1"], r"argument --nproc-list: '3 1': '3 1' must be a whole number"),
]


@pytest.mark.parametrize(("args", "message"), WRONG, ids=[str(i) for i in range(len(WRONG))])
def test_error_explains_an_invalid_list_of_rank_counts(
    args: list[str], message: str, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["run", *args, launch.write("")])
    error = capsys.readouterr().err
    assert re.search(f"^aiocoll run: error: .*{message}", error, re.MULTILINE), error
