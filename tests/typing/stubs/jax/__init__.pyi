"""The part of JAX's types by which an array is one; it has no `__dlpack_device__`, nor can it be written to."""

from typing import Any

class Array:
    def __buffer__(self, flags: int) -> memoryview: ...
    def __dlpack__(self) -> Any: ...
