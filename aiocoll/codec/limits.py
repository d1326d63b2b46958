"""Limits of encoded objects."""

__all__ = ["MAX_BYTES", "MAX_DEPTH"]

#: Default size limit of `dumps` and `loads` in bytes: enough for any configuration, too small for a model.
MAX_BYTES = 16 << 20
#: Maximum depth of nested containers. Encoding takes two nested Python calls per level, and Python permits 1000;
#: msgpack permits 1024 levels.
MAX_DEPTH = 256
