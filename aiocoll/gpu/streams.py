"""CUDA streams of any library, represented by their addresses."""

from __future__ import annotations

from typing import Any

__all__ = ["stream_address"]


def stream_address(stream: Any) -> int:
    """Return the address of a CUDA stream: of CuPy, torch, an object with ``__cuda_stream__``, or an address.

    Raises:
        TypeError: `stream` is not a stream.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    if hasattr(stream, "__cuda_stream__"):
        _, address = stream.__cuda_stream__()
        return int(address)
    for name in ("cuda_stream", "ptr"):  # the attributes of torch's and of CuPy's streams
        address = getattr(stream, name, None)
        if isinstance(address, int):
            return address
    raise TypeError(f"stream must be a CUDA stream or the address of one, not {type(stream).__name__}")
