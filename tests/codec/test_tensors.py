"""Torch tensors and ordered dicts inside encoded objects."""

from __future__ import annotations

import asyncio
import collections
import sys
from typing import Any

import msgpack
import pytest

from aiocoll import ProcessGroup
from aiocoll.codec import MAX_DEPTH, dumps, loads
from aiocoll.codec.records import FOREIGN_ARRAY
from aiocoll.errors import SerializationError

from ..ranks import run_ranks

DTYPES = ("bool", "uint8", "int64", "float16", "bfloat16", "float8_e4m3fn", "float32", "complex64")
MALFORMED: list[tuple[Any, ...]] = [
    (),
    ("float32", [1]),
    ("float32", (), "1234"),
    ("float32", [2], b"1234"),
    ("float32", [-1], b""),
    ("float32", [1.0], b"1234"),
    ("float32", [0] * 65, b""),
    ("quint8", [1], b"1"),
    ("load", [0], b""),
]


def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed: tensors of torch in objects are not tested")


@pytest.mark.parametrize("count", [0, 1, 3, 256, 257, 1000])
def test_ordered_dict_survives_encoding_and_decoding_unchanged(count: int) -> None:
    """Include nested dicts, dicts long enough to be encoded in pieces, and tuples, which msgpack would make lists."""
    given = collections.OrderedDict((str(each), (each,)) for each in range(count))
    if count:
        given.move_to_end("0")
    back = loads(dumps([given, {"inside": collections.OrderedDict(a=collections.OrderedDict(b=1))}]))
    assert back[0] == given
    assert list(back[0]) == list(given)
    assert type(back[0]) is type(back[1]["inside"]["a"]) is collections.OrderedDict


def test_encoded_ordered_dict_counts_as_two_levels_of_nesting() -> None:
    nested: Any = None
    for _ in range(MAX_DEPTH // 2):
        nested = collections.OrderedDict(a=nested)
    assert loads(dumps(nested)) == nested
    with pytest.raises(SerializationError, match="nested deeper than"):
        dumps([nested])


@pytest.mark.torch
@pytest.mark.parametrize("dtype", DTYPES)
def test_tensor_of_every_dtype_survives_encoding_and_decoding_unchanged(dtype: str) -> None:
    kind = getattr(torch(), dtype)
    for shape in ((), (0,), (3,), (2, 0), (2, 3)):
        given = torch().ones(shape).to(kind)
        back = loads(dumps({"a": [given]}))["a"][0]
        assert (back.dtype, back.shape) == (kind, given.shape)
        assert back.tolist() == given.tolist()
    strided = torch().arange(6).reshape(2, 3).T
    back = loads(dumps(strided))
    assert torch().equal(back, strided)
    back[0, 0] = 9
    assert strided[0, 0] == 0
    conjugated = torch().tensor([1 + 2j]).conj()
    assert loads(dumps(conjugated)).tolist() == [1 - 2j]


@pytest.mark.torch
def test_state_dict_is_broadcast_to_all_ranks() -> None:
    from aiocoll import distributed as dist

    make = torch().nn.Linear
    first = make(3, 2).state_dict()

    async def rank(pg: ProcessGroup) -> None:
        objects = [first if pg.rank() == 0 else None]
        await dist.broadcast_object_list(objects)
        model = make(3, 2)
        model.load_state_dict(objects[0])
        assert all(torch().equal(value, first[name]) for name, value in model.state_dict().items())

    asyncio.run(run_ranks(3, rank))


@pytest.mark.torch
def test_encoding_an_unsupported_tensor_is_refused() -> None:
    for given, why in (
        (torch().nn.Parameter(torch().ones(1)), r"Parameter would arrive as a torch.Tensor: send x.detach\(\)"),
        (
            torch().eye(2).to_sparse(),
            "a torch tensor of float32, torch.sparse_coo on cpu: send a dense tensor on the CPU",
        ),
        (torch().ones(1, device="meta"), "on meta: send a dense tensor"),
    ):
        with pytest.raises(SerializationError, match=rf"cannot send obj\[0\]: .*{why}"):
            dumps([given])
    with pytest.raises(SerializationError, match="max_bytes is 100; send large arrays"):
        dumps(torch().ones(1000), max_bytes=100)


def packed(*fields: Any) -> bytes:
    packer = msgpack.Packer()
    head: bytes = packer.pack_array_header(1 + len(fields)) + b"\xc7\x00" + bytes([FOREIGN_ARRAY])
    return head + b"".join(packer.pack(each) for each in fields)


@pytest.mark.torch
@pytest.mark.parametrize("fields", MALFORMED)
def test_malformed_tensor_bytes_are_refused(fields: tuple[Any, ...]) -> None:
    torch()
    with pytest.raises(SerializationError):
        loads(packed("torch", *fields))


def test_decoding_a_tensor_without_torch_raises_an_error_that_names_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SerializationError, match="received an object that contains a torch tensor; import torch"):
        loads(packed("torch", "float32", [1], b"1234"))
