"""Device buffers of real torch tensors without a GPU: host memory stands in for device memory."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from aiocoll.arrays.torch_tensors import TORCH, cuda_view
from aiocoll.elements.buffers import Buffer
from aiocoll.elements.dtypes import by_code, by_name

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]
NAMES = [by_code(code).name for code in range(1, 20)]


@pytest.fixture
def streams() -> list[int]:
    """Return a list that records the stream of each copy to the device."""
    return []


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, streams: list[int]) -> Any:
    torch = pytest.importorskip("torch")

    @contextmanager
    def use_stream(stream: Any) -> Any:
        streams.append(stream.cuda_stream)
        yield

    def external_stream(stream_ptr: int, device: Any) -> Any:
        assert isinstance(device, torch.device)
        return SimpleNamespace(cuda_stream=stream_ptr)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0x70))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "ExternalStream", external_stream)
    monkeypatch.setattr(torch.cuda, "stream", use_stream)
    return torch


def device_view(torch: Any, tensor: Any, writable: bool = True) -> Any:
    return cuda_view(torch, tensor, by_name(str(tensor.dtype)[6:]), "x", writable)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
@pytest.mark.parametrize("name", NAMES)
def test_buffers_of_real_torch_tensors_share_their_memory(torch: Any, name: str, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(getattr(torch, name))
    array = device_view(torch, tensor)
    assert (array.ptr, array.size, array.nbytes) == (tensor.data_ptr(), tensor.numel(), tensor.nbytes)
    assert (array.stream, array.keep[0], array.back) == (0x70, tensor, None)


def test_device_buffer_of_a_real_torch_parameter_is_detached(torch: Any, streams: list[int]) -> None:
    leaf = torch.zeros(2, 3, requires_grad=True)
    assert device_view(torch, leaf).ptr == leaf.data_ptr()
    turned = torch.zeros(3, 2, requires_grad=True)
    array = device_view(torch, turned.detach().T.requires_grad_())
    array.keep[1].fill_(3)
    array.back.on(0x90)
    assert (turned == 3).all()
    assert turned.is_leaf
    assert streams == [0x90]


@pytest.mark.parametrize("name", ["float32", "bfloat16", "bool", "int16", "complex64", "float8_e5m2"])
def test_results_for_noncontiguous_real_torch_tensors_are_written_back(
    torch: Any, streams: list[int], name: str
) -> None:
    whole = torch.zeros(4, 6).to(getattr(torch, name))
    part = whole[:, ::2]
    array = device_view(torch, part)
    assert array.ptr == array.keep[1].data_ptr() != part.data_ptr()
    array.keep[1].view(torch.uint8).fill_(1)
    assert array.back() is part
    assert (part.contiguous().view(torch.uint8) == 1).all()
    assert not whole[:, 1::2].contiguous().view(torch.uint8).any()
    assert streams == [0x70]
    assert device_view(torch, part, writable=False).back is None


@pytest.mark.parametrize("turn", ["conj", "neg"])
def test_conjugated_and_negated_views_of_real_torch_tensors_are_resolved(torch: Any, turn: str) -> None:
    base = torch.tensor([1 + 2j, 3 - 4j])
    tensor = base.conj() if turn == "conj" else base.conj().imag
    array = device_view(torch, tensor)
    dense = array.keep[1]
    assert torch.equal(dense, tensor.resolve_conj().resolve_neg())
    assert not dense.is_conj()
    assert not dense.is_neg()
    dense *= 2
    array.back.on(0)
    assert torch.equal(base, torch.tensor([2 + 4j, 6 - 8j] if turn == "conj" else [1 + 4j, 3 - 8j]))


def test_expanded_real_torch_tensors_are_accepted_only_as_input(torch: Any) -> None:
    tensor = torch.ones(1, 3).expand(2, 3)
    assert device_view(torch, tensor, writable=False).size == 6
    with pytest.raises(ValueError, match=r"^x has elements that share memory, and .*; pass x.clone\(\)$"):
        device_view(torch, tensor)


def test_sparse_torch_device_tensors_are_refused(torch: Any) -> None:
    with pytest.raises(TypeError, match=r"x is torch.sparse_coo on a CUDA device"):
        device_view(torch, torch.eye(3).to_sparse())


def test_empty_like_a_torch_tensor_has_its_shape_and_dtype(torch: Any) -> None:
    tensor = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True).detach().T.requires_grad_()
    made = TORCH.empty_like(tensor)
    assert (made.shape, made.dtype, made.is_contiguous(), made.requires_grad) == ((2, 3), torch.bfloat16, True, False)
    flat = device_view(torch, tensor)
    array: Any = TORCH.spare(Buffer(flat, flat.dtype, (2, 3), tensor)).array
    array.keep[1].fill_(2)
    assert array.ptr == array.keep[1].data_ptr()
    array.back.on(0x90)
    assert (tensor == 2).all()
