"""Reductions of NaNs on ranks whose NumPy uses different SIMD levels, as on hosts with different processors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from .conftest import LIMIT, Ranks

PROGRAM = str(Path(__file__).with_name("nans.py"))


def simd_levels() -> str:
    """Return the SIMD levels above the baseline that NumPy uses on this machine."""
    umath = pytest.importorskip("numpy._core._multiarray_umath")
    used = [name for name in umath.__cpu_dispatch__ if umath.__cpu_features__[name]]
    if not used:
        pytest.skip(f"NumPy {np.__version__} uses one SIMD level here")
    return " ".join(used)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_on_different_simd_levels_get_bitwise_equal_nans(
    size: int, transport: str, ranks: Ranks, port: int
) -> None:
    """Let rank 1 use only the baseline SIMD level, which computes other NaNs, so that one rank must reduce for all."""
    env = {"AIOCOLL_TRANSPORT": transport}
    lower = {**env, "NPY_DISABLE_CPU_FEATURES": simd_levels()}
    processes = [
        ranks.start(PROGRAM, f"tcp://127.0.0.1:{port}", str(rank), str(size), env=lower if rank == 1 else env)
        for rank in range(size)
    ]
    found = []
    for process in processes:
        out, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, err
        found.append(json.loads(out))
    fingerprints, digests, algorithms = zip(*found, strict=True)
    assert len(set(fingerprints)) == 2
    assert all(each == digests[0] for each in digests)
    assert not {"exchange", "oneround", "oneshot"} & set(algorithms[0])
