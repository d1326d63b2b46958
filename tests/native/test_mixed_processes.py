"""Jobs of processes with and without the accelerator, which use different chunk sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
KIB = 1024


@pytest.mark.slow
@pytest.mark.parametrize(("job", "chunk"), [("NP", 256), ("PN", 256), ("PPN", 256), ("NPN", 128), ("NNP", 128)])
def test_native_and_pure_processes_together_reduce_and_transfer_large_arrays(job: str, chunk: int) -> None:
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.native.rank_of_mixed_job", str(rank), str(len(job)), port],
            cwd=ROOT,
            env=os.environ | {"AIOCOLL_NATIVE": "01"[each == "N"]},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank, each in enumerate(job)
    ]
    outputs = [rank.communicate(timeout=60)[0].strip() for rank in ranks]
    names = {"N": "native", "P": "pure Python"}
    assert outputs == [f"{names[each]} {chunk * KIB}" for each in job]
