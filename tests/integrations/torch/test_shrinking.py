"""`torch.distributed.shrink_group` on a torch group with backend "aio"."""

from __future__ import annotations

from pathlib import Path

import pytest

from .ranks import last_json, run_ranks

torch = pytest.importorskip("torch", reason="needs torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

OLD = torch.__version__ < (2, 14)


@pytest.mark.skipif(OLD, reason="needs torch 2.14, which accepts a backend in Python")
@pytest.mark.parametrize("case", ["leave_before", "kill_before"])
def test_shrunk_torch_group_works_without_the_excluded_rank(case: str, tmp_path: Path) -> None:
    found = [last_json(printed) for printed in run_ranks("shrinking", case, 3, tmp_path)]
    assert found.pop(1) == {}
    for rank, results in enumerate(found):
        assert results["rank"] == [rank, 2, rank, 2, 2]
        assert results["total"] == [3.0] * 3
        assert results["gathered"] == [0.0, 1.0]
        assert results["objects"] == [{"rank": 0}, {"rank": 1}]
        assert results["message"] == [7.0, 7.0]
        assert results["gradient"] == [[1.5] * 4]
        assert results["broadcast"] == [1, "AioGroup"]
        assert (
            results["options"] == "pg_options must be None: the new group has the options of the group that is shrunk"
        )
        assert results["mismatch"].startswith(f"[Rank {rank}] all_reduce failed: Collectives differ")
        assert results["open"] == 0
    assert found[0]["pending"] == ([[5.0, 5.0]] if case == "leave_before" else [])
    assert found[0]["again"] == [1.0, 1.0]


@pytest.mark.skipif(OLD, reason="needs torch 2.14, which accepts a backend in Python")
def test_shrink_group_error_names_lost_ranks_that_are_not_excluded(tmp_path: Path) -> None:
    found = [last_json(printed) for printed in run_ranks("shrinking", "kill_two_before", 3, tmp_path)]
    assert found[0]["error"].startswith("rank(s) 2 are lost, too, but not in ranks_to_exclude")


@pytest.mark.skipif(not OLD, reason="torch 2.14 and newer accept a backend in Python")
def test_shrink_group_is_unsupported_before_torch_214(tmp_path: Path) -> None:
    for printed in run_ranks("shrinking", "leave_before", 3, tmp_path):
        assert last_json(printed) == {"supported": False}
