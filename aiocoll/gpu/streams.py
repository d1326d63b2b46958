"""CUDA streams of any library, represented by their addresses."""

from __future__ import annotations

from typing import Any

__all__ = ["stream_address"]


def stream_address(stream: Any) -> int:
    """Return the address of a CUDA stream, given as an address or as a stream object of any library.

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
    raise TypeError(f"stream must be a CUDA stream or the address of a CUDA stream, not {type(stream).__name__}")
