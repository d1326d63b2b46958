"""Limits of encoded objects."""

__all__ = ["MAX_BYTES", "MAX_DEPTH"]

#: Default size limit of `dumps` and `loads` in bytes: enough for any configuration, too small for a model.
MAX_BYTES = 16 << 20
#: Maximum depth of nested containers. Python permits 1000 nested calls, of which each level takes two; msgpack permits
#: 1024 levels.
MAX_DEPTH = 256
