"""Limits of objects."""

__all__ = ["MAX_BYTES", "MAX_DEPTH"]

#: Default limit in bytes of `dumps` and `loads`: room for any configuration, too small for a model.
MAX_BYTES = 16 << 20
#: Depth of nested containers. Python stops at 1000 calls, two per level; msgpack at 1024 levels.
MAX_DEPTH = 256
