"""Limits of encoded objects."""

__all__ = ["MAX_BYTES", "MAX_DEPTH"]

#: Default limit in bytes of `dumps` and `loads`: enough for any configuration, too small for a model.
MAX_BYTES = 16 << 20
#: Maximum depth of nested containers. Python stops at 1000 calls, two per level; msgpack stops at 1024 levels.
MAX_DEPTH = 256
