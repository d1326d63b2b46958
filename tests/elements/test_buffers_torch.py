"""Buffers of torch CPU tensors: with shared memory, with a staging copy, or refused."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from aiocoll.elements.buffers import view
from aiocoll.elements.dtypes import by_code
from aiocoll.elements.sparse import is_sparse

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]
TORCH_TYPES = [by_code(code).name for code in range(1, 20)]


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
@pytest.mark.parametrize("name", TORCH_TYPES)
def test_buffers_of_torch_tensors_share_their_memory(torch: Any, name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(getattr(torch, name))
    buffer = view(tensor)
    assert (buffer.dtype.name, buffer.shape, buffer.count) == (name, shape, tensor.numel())
    assert buffer.nbytes == tensor.numel() * tensor.element_size()
    assert buffer.array.dtype == buffer.dtype.storage
    if buffer.count:
        assert buffer.array.ctypes.data == tensor.data_ptr()
    buffer.array[:] = 0
    assert not tensor.to(torch.complex128).any()
    assert buffer.finish() is tensor


def test_buffer_of_a_torch_parameter_writes_to_the_parameter(torch: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    view(parameter).array[:] = 3
    assert parameter.requires_grad
    assert parameter.tolist() == [[3, 3], [3, 3]]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2", "int64"])
def test_noncontiguous_torch_tensors_are_staged(torch: Any, name: str) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).to(getattr(torch, name)).t()
    buffer = view(tensor)
    assert buffer.array.ctypes.data != tensor.data_ptr()
    buffer.array[:] = buffer.array[::-1].copy()
    assert buffer.finish() is tensor
    assert tensor.to(torch.float32).tolist() == [[5, 2], [4, 1], [3, 0]]


def test_noncontiguous_torch_view_that_requires_grad_is_staged(torch: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    buffer = view(parameter[:, 1])
    buffer.array[:] = 1
    buffer.finish()
    assert parameter.tolist() == [[0, 1], [0, 1]]


def test_conjugated_and_negated_torch_views_are_resolved(torch: Any) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 1j])
    buffer = view(tensor.conj())
    assert buffer.array.tolist() == [1 - 2j, 3 + 1j]
    buffer.array[:] = [1j, 2j]
    buffer.finish()
    assert tensor.tolist() == [-1j, -2j]
    assert view(tensor.conj().imag, writable=False).array.tolist() == [1, 2]


def test_expanded_torch_tensor_is_accepted_only_as_input(torch: Any) -> None:
    tensor = torch.ones(1).expand(4)
    with pytest.raises(ValueError, match=r"^x has elements that share memory, and .*; pass x.clone\(\)$"):
        view(tensor, name="x")
    assert view(tensor, writable=False).array.tolist() == [1, 1, 1, 1]


def test_torch_tensor_with_overlapping_windows_is_accepted_only_as_input(torch: Any) -> None:
    tensor = torch.arange(4.0).unfold(0, 2, 1)
    with pytest.raises(ValueError, match=r"^x has elements that share memory, and .*; pass x.clone\(\)$"):
        view(tensor, name="x")
    assert view(tensor, writable=False).array.tolist() == [0, 1, 1, 2, 2, 3]
    tensor = torch.arange(4.0).unfold(0, 2, 2).t()  # windows without an overlap
    buffer = view(tensor)
    buffer.array[:] = 7
    buffer.finish()
    assert tensor.tolist() == [[7, 7], [7, 7]]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_nested_fake_and_masked_torch_tensors_are_refused(torch: Any) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.masked import masked_tensor

    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        assert not is_sparse(nested)
        expected = r"^x must be a dense tensor on .*, not a nested tensor; pass its component tensors$"
        with pytest.raises(TypeError, match=expected):
            view(nested, name="x")
    with FakeTensorMode():
        fake = torch.ones(3)
    masked = masked_tensor(torch.ones(2), torch.tensor([True, False]))
    for tensor in (fake, masked):
        kind = type(tensor).__name__
        with pytest.raises(
            TypeError, match=rf"^x must be a dense tensor .* gives no access to the memory of this {kind}"
        ):
            view(tensor, name="x")


def test_unsupported_torch_tensor_is_refused(torch: Any) -> None:
    with pytest.raises(TypeError, match=r"x must be a dense tensor on the CPU or on CUDA, not torch.strided on meta"):
        view(torch.ones(2, device="meta"), name="x")
    with pytest.raises(TypeError, match=r"x must be a dense tensor on the CPU or on CUDA, not torch.sparse_coo on cpu"):
        view(torch.eye(2).to_sparse(), name="x")
    with pytest.raises(TypeError, match=r"x must be a dense tensor .*, not torch._mkldnn on cpu"):
        view(torch.ones(2).to_mkldnn(), name="x")
    with pytest.raises(TypeError, match="x: dtype 'float8_e8m0fnu' is not supported"):
        view(torch.zeros(2, dtype=torch.float8_e8m0fnu), name="x")
