"""Arguments of torch calls with backend "aio": reductions, timeouts, and tensors that need a copy."""

from __future__ import annotations

from datetime import timedelta

import pytest

from aiocoll import CollectiveTimeoutError, PeerLostError, ReduceOp

torch = pytest.importorskip("torch", reason="needs torch")

import torch.distributed as dist  # noqa: E402

from aiocoll.integrations.torch.arguments import Copies, check_device, flat_tensors, reduce_op, seconds, sole_tensor  # noqa: E402
from aiocoll.integrations.torch.errors import to_torch  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("name", ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_reduction_has_the_same_name_in_torch_and_aiocoll(name: str) -> None:
    assert reduce_op(getattr(dist.ReduceOp, name)) is getattr(ReduceOp, name)
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, name)
    assert reduce_op(options.reduceOp) is getattr(ReduceOp, name)


def test_missing_torch_reduction_means_sum_and_an_unknown_reduction_is_refused() -> None:
    assert reduce_op(None) is ReduceOp.SUM
    with pytest.raises(ValueError, match=r"backend 'aio' does not support the reduction .*; use one of SUM, AVG"):
        reduce_op("median")


def test_unset_timeout_in_a_torch_call_means_the_timeout_of_the_group() -> None:
    assert seconds(None) is None
    assert seconds(dist.AllreduceOptions()) is None
    assert seconds(timedelta(seconds=0)) == 0.0
    options = dist.BroadcastOptions()
    options.timeout = timedelta(seconds=1.5)
    assert seconds(options) == 1.5


def test_torch_tensor_lists_with_several_tensors_per_rank_are_refused() -> None:
    x, y = torch.ones(1), torch.ones(2)
    assert sole_tensor([x]) is x
    assert sole_tensor(x) is x
    assert flat_tensors([[x, y]])[1] is y
    assert flat_tensors([x, y])[1] is y
    with pytest.raises(ValueError, match="got 2 tensors: backend 'aio' takes one tensor per rank"):
        sole_tensor([x, y])


def test_plain_and_strided_torch_tensors_are_not_copied() -> None:
    copies = Copies()
    x = torch.ones(3, 4)
    for tensor in (x, x.t(), x[:, ::2], torch.eye(3).to_sparse()):
        assert copies.writable(tensor) is tensor
    assert not copies


def test_expanded_torch_tensor_is_copied_and_written_back() -> None:
    copies = Copies()
    base = torch.arange(3.0)
    tensor = base[:, None].expand(3, 4)
    copy = copies.writable(tensor)
    assert copy.is_contiguous()
    assert torch.equal(copy, tensor)
    copy.mul_(10)
    assert base.tolist() == [0.0, 1.0, 2.0]
    copies.write_back()
    assert base.tolist() == [0.0, 10.0, 20.0]


def test_output_tensor_that_is_passed_twice_gets_the_last_result() -> None:
    copies = Copies()
    output, other = torch.zeros(2), torch.zeros(2)
    found = copies.outputs([output, other, output])
    assert found[0] is output
    assert found[1] is other
    for number, tensor in enumerate(found):
        tensor.fill_(number + 1)
    copies.write_back()
    assert output.tolist() == [3.0, 3.0]
    assert other.tolist() == [2.0, 2.0]


def test_torch_tensor_that_is_not_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match="a tensor is on meta, but backend 'aio' carries CPU tensors"):
        check_device(torch.ones(1, device="meta"))


def test_aiocoll_errors_are_converted_to_torch_errors_with_a_cause() -> None:
    for error, words in (
        (CollectiveTimeoutError("late", ranks=[1]), "[Rank 2] Timed out waiting: recv failed: late"),
        (PeerLostError("gone", ranks=[1]), "[Rank 2] Connection closed by peer: recv failed: gone"),
    ):
        made = to_torch(error, "recv", 2)
        assert isinstance(made, dist.DistBackendError)
        assert str(made) == words
        assert made.__cause__ is error
    wrong = TypeError("no array")
    assert to_torch(wrong, "recv", 2) is wrong
