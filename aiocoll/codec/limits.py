"""What objects may be at most."""

__all__ = ["MAX_BYTES", "MAX_DEPTH"]

#: What `dumps` makes and `loads` takes unless told otherwise: room for any configuration, too small for a model.
MAX_BYTES = 16 << 20
#: Containers within containers. Python stops at 1000 calls, of which a level takes two; msgpack at 1024 levels.
MAX_DEPTH = 256
